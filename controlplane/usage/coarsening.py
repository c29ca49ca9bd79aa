"""Rollups of old days by whole hours, for tenants whose days are made of whole hours: a quarter of the rows.

Only days whose events are gone: nothing can arrive late for them any more, so that nobody has to take an hour apart
again. A tenant that moves to a zone at half an hour later finds its old hours counted where they begin, and is told.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

import structlog
from django.db import connection, transaction

from controlplane.common.clock import utc_now
from controlplane.common.keeper import Report, unreported
from controlplane.common.zones import QUARTER, find_zone, is_whole_hour
from controlplane.tenants.queries import tenant_zones
from controlplane.usage.models import RolledUp
from controlplane.usage.partitions import EVENTS, QUARTERS, ensure_days, oldest_day, oldest_month
from controlplane.usage.partitions import SUMS as SUM_TABLE
from controlplane.usage.rollup import DIMENSIONS, SUMS, lock_rollups, sum_up

logger = structlog.get_logger(__name__)

_LOCK = 0x66_6C_07
_DONE = "coarsened"
MAX_DAYS = 100
"""Days of one call; the next goes on."""

_GROUP = ", ".join(("hour", *DIMENSIONS))
# The sums need all that is deleted, so that every row is gone before the first is inserted.
_COARSEN_SQL = f"""
    WITH fine AS (
        DELETE FROM usage_quarter
        WHERE at >= %(from)s AND at < %(to)s AND minutes = 15 AND tenant <> ALL(%(kept)s)
        RETURNING *, date_trunc('hour', at, 'UTC') AS hour
    ), sums AS (
        SELECT {_GROUP}, {", ".join(f"sum({name})::bigint AS {name}" for name in SUMS)} FROM fine GROUP BY {_GROUP}
    ), buckets AS (
        SELECT {_GROUP}, bucket, sum(n)::bigint AS n
        FROM fine, unnest(ttft_buckets, ttft_counts) AS pair(bucket, n) GROUP BY {_GROUP}, bucket
    ), histograms AS (
        SELECT {_GROUP}, array_agg(bucket ORDER BY bucket) AS buckets, array_agg(n ORDER BY bucket) AS counts
        FROM buckets GROUP BY {_GROUP}
    )
    INSERT INTO usage_quarter (at, minutes, {", ".join((*DIMENSIONS, *SUMS))}, ttft_buckets, ttft_counts)
    SELECT hour, 60, {", ".join((*DIMENSIONS, *SUMS))}, coalesce(buckets, '{{}}'), coalesce(counts, '{{}}')
    FROM sums LEFT JOIN histograms USING ({_GROUP})
"""


def coarsen(*, now: datetime | None = None, report: Report = unreported) -> int:
    """Coarsen the days that have become old since the last call; returns how many. One process at a time does.

    Cost: one statement a day.
    """
    instant = now or utc_now()
    end = oldest_day(EVENTS, now=instant) - timedelta(days=1)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [_LOCK])
        if cursor.fetchone() != (True,):
            return 0
        try:
            done = RolledUp.objects.filter(what=_DONE).values_list("at", flat=True).first()
            first = max(oldest_month(now=instant), done.date() if done else _first_day(end))
            days = [first + timedelta(days=n) for n in range(min(MAX_DAYS, (end - first).days))]
            zones = tenant_zones()
            for n_done, day in enumerate(days):
                report(n_done / len(days))
                _coarsen_day(day, zones)
        finally:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [_LOCK])
    if days:
        logger.info("usage.coarsened", first=str(days[0]), days=len(days))
    return len(days)


def _first_day(end: date) -> date:
    """The day of the oldest rollup."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT min(at) FROM {QUARTERS}")
        (at,) = cursor.fetchone() or (None,)
    return end if at is None else min(end, at.astimezone(UTC).date())


def _coarsen_day(day: date, zones: dict[str, list[str]]) -> None:
    start = datetime.combine(day, time(), UTC)
    # An hour is kept in quarters for whoever's days do not begin with one on this day.
    kept = [tenant for name, tenants in zones.items() if not _is_whole(name, start) for tenant in tenants]
    ensure_days([day], SUM_TABLE)
    with transaction.atomic(), connection.cursor() as cursor:
        lock_rollups(cursor)
        cursor.execute(_COARSEN_SQL, {"from": start, "to": start + timedelta(days=1), "kept": kept})
        sum_up([start + n * QUARTER for n in range(96)])
        RolledUp.objects.update_or_create(what=_DONE, defaults={"at": start + timedelta(days=1)})


def _is_whole(name: str, start: datetime) -> bool:
    zone = find_zone(name) or ZoneInfo("UTC")
    return is_whole_hour(zone, start - timedelta(days=1), start + timedelta(days=2))
