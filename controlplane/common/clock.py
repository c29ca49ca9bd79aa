"""Wall time of the control plane, always aware UTC; microseconds at the edge to the routers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def utc_now() -> datetime:
    return datetime.now(UTC)


def to_us(instant: datetime) -> int:
    """Microseconds since the epoch, exactly."""
    delta = instant - EPOCH
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def from_us(microseconds: int) -> datetime:
    """Aware UTC datetime of microseconds since the epoch.

    Raises:
        OverflowError: outside the years 1 to 9999.
    """
    return EPOCH + timedelta(microseconds=microseconds)
