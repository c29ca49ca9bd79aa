"""Public ids: a typed prefix, the time, then chance; so ids sort by creation and never collide across processes."""

from __future__ import annotations

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u to misread


def new_id(prefix: str) -> str:
    """``<prefix>_`` + 9 characters of milliseconds since the epoch + 11 random ones (55 bits)."""
    number = (time.time_ns() // 1_000_000 << 55) | secrets.randbits(55)
    digits = []
    for _ in range(20):
        number, digit = divmod(number, 32)
        digits.append(_ALPHABET[digit])
    return f"{prefix}_{''.join(reversed(digits))}"
