"""Cursors of lists: what the next page begins behind, as text that goes into an address as it is."""

from __future__ import annotations

import base64


def sealed(key: bytes) -> str:
    """The cursor that holds this key."""
    return base64.urlsafe_b64encode(key).decode().rstrip("=")


def opened(cursor: str) -> bytes:
    """What ``sealed`` was given.

    Raises:
        ValueError: nothing that ``sealed`` gives.
    """
    return base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
