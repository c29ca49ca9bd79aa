"""Slows down guessing of passwords without locking anybody out for good.

Failures are counted in Valkey per address and account, per address, and per account; past a free allowance each
further failure doubles the wait. Another address can therefore still sign in to an account under attack, only slower.
Without Valkey the slow password hash is what remains, and signing in goes on.
"""

from __future__ import annotations

import hashlib

import structlog

from controlplane.common.errors import TooManyAttempts
from controlplane.common.valkey import UNAVAILABLE, valkey

logger = structlog.get_logger(__name__)

_WINDOW_S = 3_600
# (kind, failures that are free, longest wait in seconds)
_RULES = (("pair", 5, 900), ("address", 20, 900), ("account", 50, 60))


def _keys(email: str, address: str) -> dict[str, str]:
    account = hashlib.sha256(email.encode()).hexdigest()[:32]
    return {
        "pair": f"fairlane:signin:{address}:{account}",
        "address": f"fairlane:signin:{address}",
        "account": f"fairlane:signin:account:{account}",
    }


def check(*, email: str, address: str) -> None:
    """Raises TooManyAttempts while a wait is running."""
    try:
        waits = [int(valkey().ttl(f"{key}:wait")) for key in _keys(email, address).values()]
    except UNAVAILABLE:
        logger.warning("signin.throttle_unavailable")
        return
    wait = max(waits)
    if wait > 0:
        raise TooManyAttempts(f"Too many attempts. Try again in {wait} s.", retry_after_s=wait)


def failed(*, email: str, address: str) -> None:
    """Count one failure and start the wait that follows from it."""
    keys = _keys(email, address)
    try:
        for kind, free, longest in _RULES:
            with valkey().pipeline() as pipe:
                pipe.incr(keys[kind])
                pipe.expire(keys[kind], _WINDOW_S)
                count = int(pipe.execute()[0])
            if count >= free:
                valkey().set(f"{keys[kind]}:wait", 1, ex=min(longest, 2 ** min(count - free + 1, 20)))
    except UNAVAILABLE:
        logger.warning("signin.throttle_unavailable")


def succeeded(*, email: str, address: str) -> None:
    """Forget the failures of this pair; those of the address and the account fade by themselves."""
    try:
        valkey().delete(_keys(email, address)["pair"])
    except UNAVAILABLE:
        logger.warning("signin.throttle_unavailable")
