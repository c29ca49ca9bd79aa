"""Partitions of the tables that grow with every request, one per UTC day, of the rollups one per UTC month.

They are made when they are needed, and dropped as a whole.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta

import structlog
from django.db import OperationalError, connection, transaction

from controlplane.common.clock import utc_now
from controlplane.common.zones import next_month
from controlplane.usage.models import TouchedQuarter

logger = structlog.get_logger(__name__)

_LOCK = 0x66_6C_02
AHEAD_DAYS = 3
EVENTS = "usage_event"
QUARTERS = "usage_quarter"
SUMS = "usage_sum"
MONTHLY = (QUARTERS, SUMS)
PREDICTIONS = "usage_prediction"
SAMPLES = "predictor_sample"
KEPT_DAYS = {PREDICTIONS: 28, SAMPLES: 28, EVENTS: 91}
"""Days, today not counted, for which a table is kept. Ingestion leaves out what is older, so that a day which is
dropped here is not made again; events it books for 90 days, so that none is under way to a day that goes."""
KEPT_MONTHS = 25
"""Months of rollups, the present one not counted."""

# Days known to exist, by database (tests use several) and table.
_known: set[tuple[str, str, date]] = set()
_known_guard = threading.Lock()


def partition_name(day: date, parent: str = EVENTS) -> str:
    return f"{parent}_{day:%Y%m}" if parent in MONTHLY else f"{parent}_{day:%Y%m%d}"


def oldest_month(*, now: datetime | None = None) -> date:
    """The first day of the oldest month whose rollups are kept."""
    today = (now or utc_now()).date()
    years, month = divmod(today.year * 12 + today.month - 1 - KEPT_MONTHS, 12)
    return date(years, month + 1, 1)


def oldest_day(parent: str, *, now: datetime | None = None) -> date:
    """The first day that is kept of a table with a limit."""
    return (now or utc_now()).date() - timedelta(days=KEPT_DAYS[parent])


def ensure_days(days: Iterable[date], parent: str = EVENTS) -> None:
    """Make the partitions of these days unless they exist. Call it outside the transaction that fills them.

    A table is made beside its parent and then attached: that waits for nobody's reading or writing, which
    ``CREATE TABLE .. PARTITION OF`` would.
    """
    database = str(connection.settings_dict["NAME"])
    for day in sorted({day.replace(day=1) for day in days} if parent in MONTHLY else set(days)):
        if (database, parent, day) not in _known:
            _make(parent, day)
            if not connection.in_atomic_block:
                with _known_guard:
                    _known.add((database, parent, day))


def _make(parent: str, day: date) -> None:
    name = partition_name(day, parent)
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    column, after = ("at", next_month(day)) if parent in MONTHLY else ("arrived_at", day + timedelta(days=1))
    bounds = [start.isoformat(), datetime(after.year, after.month, after.day, tzinfo=UTC).isoformat()]
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
            f"CHECK ({column} >= '{bounds[0]}' AND {column} < '{bounds[1]}')"
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
    for parent in MONTHLY:
        ensure_days([today, next_month(today)], parent)


def drop_old_days(*, now: datetime | None = None) -> list[str]:
    """Drop the days that are no longer kept; returns their tables. A busy table is tried again at the next call.

    A table past its limit may still be read by a job that began before; dropping waits for it only a moment, because
    whoever comes after waits behind it.
    """
    dropped = []
    oldest = {parent: oldest_day(parent, now=now) for parent in KEPT_DAYS}
    oldest |= {parent: oldest_month(now=now) for parent in MONTHLY}
    # Days of events that their rollups do not hold yet, for whatever reason, stay until they do.
    unrolled = {partition_name(each.date()) for each in TouchedQuarter.objects.values_list("quarter", flat=True)}
    for parent, first in oldest.items():
        last = partition_name(first, parent)
        for name in sorted(_partitions(parent)):
            if name < last and name not in unrolled:
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
