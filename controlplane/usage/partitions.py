"""Partitions, one per UTC day of arrival, of the tables that grow with every request; made when they are needed."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta

import structlog
from django.db import OperationalError, connection, transaction

from controlplane.common.clock import utc_now

logger = structlog.get_logger(__name__)

_LOCK = 0x66_6C_02
AHEAD_DAYS = 3
EVENTS = "usage_event"
PREDICTIONS = "usage_prediction"
SAMPLES = "predictor_sample"
KEPT_DAYS = {PREDICTIONS: 28, SAMPLES: 28}
"""Days, today not counted, for which a table is kept; the books themselves are kept for good. Ingestion leaves out
what is older, so that a day which is dropped here is not made again."""

# Days known to exist, by database (tests use several) and table.
_known: set[tuple[str, str, date]] = set()
_known_guard = threading.Lock()


def partition_name(day: date, parent: str = EVENTS) -> str:
    return f"{parent}_{day:%Y%m%d}"


def oldest_day(parent: str, *, now: datetime | None = None) -> date:
    """The first day that is kept of a table with a limit."""
    return (now or utc_now()).date() - timedelta(days=KEPT_DAYS[parent])


def ensure_days(days: Iterable[date], parent: str = EVENTS) -> None:
    """Make the partitions of these days unless they exist. Call it outside the transaction that fills them.

    A table is made beside its parent and then attached: that waits for nobody's reading or writing, which
    ``CREATE TABLE .. PARTITION OF`` would.
    """
    database = str(connection.settings_dict["NAME"])
    for day in sorted(set(days)):
        if (database, parent, day) not in _known:
            _make(parent, day)
            if not connection.in_atomic_block:
                with _known_guard:
                    _known.add((database, parent, day))


def _make(parent: str, day: date) -> None:
    name = partition_name(day, parent)
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    bounds = [start.isoformat(), (start + timedelta(days=1)).isoformat()]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        cursor.execute("SELECT to_regclass(%s)", [name])
        if cursor.fetchone() != (None,):
            return
        # The check lets the attachment skip its scan, and is not needed afterwards.
        cursor.execute(
            f"CREATE TABLE {name} (LIKE {parent} INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE)"
        )
        cursor.execute(
            f"ALTER TABLE {name} ADD CONSTRAINT {name}_day "
            f"CHECK (arrived_at >= '{bounds[0]}' AND arrived_at < '{bounds[1]}')"
        )
        cursor.execute(
            f"ALTER TABLE {parent} ATTACH PARTITION {name} FOR VALUES FROM ('{bounds[0]}') TO ('{bounds[1]}')"
        )
        cursor.execute(f"ALTER TABLE {name} DROP CONSTRAINT {name}_day")


def ensure_ahead() -> None:
    """Today and the days after it, so that ingestion at midnight finds its tables."""
    today = utc_now().date()
    for parent in (EVENTS, PREDICTIONS, SAMPLES):
        ensure_days((today + timedelta(days=n) for n in range(AHEAD_DAYS + 1)), parent)


def drop_old_days(*, now: datetime | None = None) -> list[str]:
    """Drop the days that are no longer kept; returns their tables. A busy table is tried again at the next call.

    A day past the limit may still be read by a job that began before; dropping waits for it only a moment, because
    whoever comes after waits behind it.
    """
    dropped = []
    for parent in KEPT_DAYS:
        last = partition_name(oldest_day(parent, now=now), parent)
        for name in sorted(_partitions(parent)):
            if name < last:
                try:
                    with transaction.atomic(), connection.cursor() as cursor:
                        cursor.execute("SET LOCAL lock_timeout = '2s'")
                        cursor.execute(f"DROP TABLE {name}")
                    dropped.append(name)
                except OperationalError:
                    logger.warning("usage.partition_busy", partition=name)
    return dropped


def _partitions(parent: str) -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = %s::regclass", [parent])
        return [name for (name,) in cursor.fetchall()]
