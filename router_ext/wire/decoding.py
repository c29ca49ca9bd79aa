"""What decoding bytes from outside with msgspec may raise: one name, so that no reader forgets a kind.

A document nested too deep is no ``MsgspecError`` but a ``RecursionError``, also inside fields that nobody reads.
"""

from __future__ import annotations

import msgspec

NotDecoded = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""For ``except NotDecoded as error``."""
