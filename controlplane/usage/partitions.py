"""Partitions of ``usage_event``, one per UTC day of arrival, made when they are needed."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta

from django.db import connection, transaction

from controlplane.common.clock import utc_now

_LOCK = 0x66_6C_02
AHEAD_DAYS = 3

# Days known to exist in the database of this name; tests use several.
_known: set[tuple[str, date]] = set()
_known_guard = threading.Lock()


def partition_name(day: date) -> str:
    return f"usage_event_{day:%Y%m%d}"


def ensure_days(days: Iterable[date]) -> None:
    """Make the partitions of these days unless they exist. Call it outside the transaction that fills them.

    A table is made beside its parent and then attached: that waits for nobody's reading or writing, which
    ``CREATE TABLE .. PARTITION OF`` would.
    """
    database = str(connection.settings_dict["NAME"])
    for day in sorted(set(days)):
        if (database, day) not in _known:
            _make(day)
            if not connection.in_atomic_block:
                with _known_guard:
                    _known.add((database, day))


def _make(day: date) -> None:
    name = partition_name(day)
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    bounds = [start.isoformat(), (start + timedelta(days=1)).isoformat()]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        cursor.execute("SELECT to_regclass(%s)", [name])
        if cursor.fetchone() != (None,):
            return
        # The check lets the attachment skip its scan, and is not needed afterwards.
        cursor.execute(f"CREATE TABLE {name} (LIKE usage_event INCLUDING DEFAULTS INCLUDING CONSTRAINTS)")
        cursor.execute(
            f"ALTER TABLE {name} ADD CONSTRAINT {name}_day "
            f"CHECK (arrived_at >= '{bounds[0]}' AND arrived_at < '{bounds[1]}')"
        )
        cursor.execute(
            f"ALTER TABLE usage_event ATTACH PARTITION {name} FOR VALUES FROM ('{bounds[0]}') TO ('{bounds[1]}')"
        )
        cursor.execute(f"ALTER TABLE {name} DROP CONSTRAINT {name}_day")


def ensure_ahead() -> None:
    """Today and the days after it, so that ingestion at midnight finds its table."""
    today = utc_now().date()
    ensure_days(today + timedelta(days=n) for n in range(AHEAD_DAYS + 1))
