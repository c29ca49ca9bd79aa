"""Messages that end with the digest of themselves: checked over the bytes that came."""

from __future__ import annotations

import hashlib
import re

_TAIL_BYTES = 128
"""A seal stands within the last so many bytes."""


def is_sealed(body: bytes, stated: str, *, seal: re.Pattern[bytes], blank: bytes) -> bool:
    """Whether ``body`` ends with ``stated``, the sha256 of itself with ``blank`` in place of its seal.

    Over the received bytes, so that fields of a newer neighbour count too. False also where they are not in canonical
    form: then what was decoded has to be encoded again.

    Args:
        seal: matches from where ``blank`` begins to the end; its first group is the digest in hex.
    """
    tail = body[-_TAIL_BYTES:]
    match = seal.search(tail)
    if match is None or match[1].decode() != stated:
        return False
    hasher = hashlib.sha256(memoryview(body)[: len(body) - len(tail) + match.start()])
    hasher.update(blank)
    return hasher.hexdigest() == stated
