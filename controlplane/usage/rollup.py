"""Rollups: exact re-computation of the quarters of an hour whose events changed, and the figures of accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import structlog
from django.db import connection, transaction

from controlplane.common.clock import utc_now
from controlplane.common.keeper import Report, unreported
from controlplane.common.zones import QUARTER
from controlplane.usage.accuracy import ACCURACY, HOUR, roll_up_accuracy, roll_up_minute
from controlplane.usage.histogram import BUCKET_SQL
from controlplane.usage.models import (
    RolledUp,
    StaleSum,
    TouchedHour,
    TouchedMinute,
    TouchedQuarter,
    UsageQuarter,
    UsageSum,
)
from controlplane.usage.partitions import MONTHLY, ensure_days
from controlplane.usage.partitions import SUMS as SUM_TABLE
from controlplane.usage.prices import PAYS_SQL

logger = structlog.get_logger(__name__)

_LOCK = 0x66_6C_03
_MINUTES_LOCK = 0x66_6C_04
SETTLE = timedelta(minutes=2)
"""A quarter or hour is rolled up this long after its end; what arrives later marks it again."""
MOST = 9 * 10**18
"""Where a sum stops, so that no event, however damaged its numbers, keeps others from being counted."""

DIMENSIONS = ("tenant", "key", "pool", "model", "tier")
SUMS = (
    "requests", "completed", "prompt_tokens", "output_tokens", "recomputed_tokens", "resumed_tokens", "kv_token_ms",
)  # fmt: skip
COLUMNS = ("at", "minutes", *DIMENSIONS, *SUMS, "ttft_buckets", "ttft_counts")

QUARTER_SQL = "date_bin('15 minutes', {at}, TIMESTAMPTZ '2000-01-01 00:00:00+00')"
"""The quarter of an hour in which an instant lies."""
TTFT_US_SQL = "round(extract(epoch FROM (first_token_at - arrived_at)) * 1000000)::bigint"

_DIMENSIONS = ", ".join(DIMENSIONS)
_LIMITED = ", ".join(f"least(sum({name}), {MOST})::bigint AS {name}" for name in SUMS)
ROLLUP_SQL = f"""
    WITH slice AS (
        SELECT {QUARTER_SQL.format(at="arrived_at")} AS at, {_DIMENSIONS}, outcome,
               prompt_tokens, output_tokens, recomputed_tokens, resumed_prefill_tokens,
               least(round(kv_token_seconds * 1000), 1e18)::bigint AS kv_token_ms,
               CASE WHEN first_token_at IS NOT NULL
                    THEN {BUCKET_SQL.format(us=TTFT_US_SQL)} END AS bucket
        FROM usage_event WHERE arrived_at >= %(from)s AND arrived_at < %(to)s {{where}}
    ), by_bucket AS (
        SELECT at, {_DIMENSIONS}, bucket, count(*) AS requests,
               count(*) FILTER (WHERE outcome = 'completed') AS completed,
               sum(prompt_tokens) AS prompt_tokens, sum(output_tokens) AS output_tokens,
               sum(recomputed_tokens) AS recomputed_tokens, sum(resumed_prefill_tokens) AS resumed_tokens,
               sum(kv_token_ms) AS kv_token_ms
        FROM slice GROUP BY at, {_DIMENSIONS}, bucket
    )
    SELECT at, 15 AS minutes, {_DIMENSIONS}, {_LIMITED},
           coalesce(array_agg(bucket ORDER BY bucket) FILTER (WHERE bucket IS NOT NULL), '{{{{}}}}') AS ttft_buckets,
           coalesce(array_agg(requests ORDER BY bucket) FILTER (WHERE bucket IS NOT NULL), '{{{{}}}}') AS ttft_counts
    FROM by_bucket GROUP BY at, {_DIMENSIONS}
"""
"""Rows of ``usage_quarter`` computed from events; parameters ``from`` and ``to``, ``{where}`` for more conditions. The
report uses it for quarters that are not rolled up."""
_OF_QUARTER_SQL = ROLLUP_SQL.format(where="AND arrived_at >= %(first)s AND arrived_at < %(end)s")
_OF_QUARTER_SQL = _OF_QUARTER_SQL.replace("%(from)s", "done.quarter")
_OF_QUARTER_SQL = _OF_QUARTER_SQL.replace("%(to)s", "done.quarter + interval '15 minutes'")
_INSERT_SQL = f"""
    INSERT INTO usage_quarter ({", ".join(COLUMNS)})
    SELECT tail.* FROM unnest(%(quarters)s::timestamptz[]) AS done (quarter)
    CROSS JOIN LATERAL ({_OF_QUARTER_SQL}) AS tail
"""
_ROLLED_UP_AT_ONCE = 20

SUM_DIMENSIONS = ("price_list", "pool", "model", "tier")
"""What ``usage_sum`` keeps apart."""
_SUM_GROUP = ", ".join(("at", *SUM_DIMENSIONS))
# A histogram says nothing of price lists: it stands in the first one's row, and others have an empty one. A sum that
# its column could not hold is left to the reports, which add up without a limit.
_SUMS_SQL = f"""
    WITH rolled AS (
        SELECT usage_quarter.*, coalesce(pays.price_list_id, '') AS price_list
        FROM usage_quarter {PAYS_SQL.format(row="usage_quarter", at="at")} WHERE at = ANY(%(quarters)s)
    ), sums AS (
        SELECT {_SUM_GROUP}, max(minutes) AS minutes, {", ".join(f"sum({name}) AS {name}" for name in SUMS)}
        FROM rolled GROUP BY {_SUM_GROUP}
    ), pairs AS (
        SELECT at, pool, model, tier, unnest(ttft_buckets) AS bucket, unnest(ttft_counts) AS n FROM rolled
    ), buckets AS (
        SELECT at, pool, model, tier, bucket, sum(n)::bigint AS n FROM pairs GROUP BY at, pool, model, tier, bucket
    ), merged AS (
        SELECT at, pool, model, tier,
               array_agg(bucket ORDER BY bucket) AS buckets, array_agg(n ORDER BY bucket) AS counts
        FROM buckets GROUP BY at, pool, model, tier
    ), histograms AS (
        SELECT merged.*, price_list FROM merged JOIN (
            SELECT at, pool, model, tier, min(price_list) AS price_list FROM sums GROUP BY at, pool, model, tier
        ) AS first USING (at, pool, model, tier)
    ), too_large AS (
        SELECT DISTINCT at FROM sums WHERE greatest({", ".join(SUMS)}) > {MOST}
    ), marked AS (
        INSERT INTO usage_stale_sum (quarter) SELECT at FROM too_large
    )
    INSERT INTO usage_sum ({_SUM_GROUP}, minutes, {", ".join(SUMS)}, ttft_buckets, ttft_counts)
    SELECT {_SUM_GROUP}, minutes, {", ".join(SUMS)}, coalesce(buckets, '{{}}'), coalesce(counts, '{{}}')
    FROM sums LEFT JOIN histograms USING ({_SUM_GROUP}) WHERE at NOT IN (SELECT at FROM too_large)
"""
_SUMMED_AT_ONCE = 200


def quarter_of(instant: datetime) -> datetime:
    """The begin of its quarter of an hour."""
    return instant.replace(minute=instant.minute // 15 * 15, second=0, microsecond=0)


def _latest_finished(now: datetime) -> datetime:
    """The hour that begins last of those that are rolled up as a whole."""
    return (now - SETTLE).replace(minute=0, second=0, microsecond=0) - HOUR


def roll_up_finished(*, now: datetime | None = None, limit: int = 1_000, report: Report = unreported) -> int:
    """Roll up every touched quarter, and for accuracy every touched hour, that has ended.

    Returns:
        How many quarters.
    """
    instant = now or utc_now()
    latest = quarter_of(instant - SETTLE) - QUARTER
    touched = TouchedQuarter.objects.filter(quarter__lte=latest).order_by("quarter")
    quarters = list(touched.values_list("quarter", flat=True).distinct()[:limit])
    for n_done in range(0, len(quarters), _ROLLED_UP_AT_ONCE):
        report(n_done / len(quarters))
        _roll_up(quarters[n_done : n_done + _ROLLED_UP_AT_ONCE])
    sum_up_stale(limit=limit)
    hours = TouchedHour.objects.filter(hour__lte=_latest_finished(instant)).order_by("hour")
    for hour in list(hours.values_list("hour", flat=True).distinct()[:limit]):
        roll_up_hour(hour)
    if quarters:
        logger.info("usage.rolled_up", quarters=len(quarters))
    return len(quarters)


def roll_up_quarter(at: datetime) -> None:
    """Replace the rollups of one quarter of an hour by what its events say; its sums are left to ``sum_up_stale``."""
    _roll_up([at])


def _roll_up(quarters: Sequence[datetime]) -> None:
    """As ``roll_up_quarter``, some quarters in one transaction.

    The marks that are visible go first, the events are read afterwards: a batch that commits in between leaves its
    own mark behind, so that the quarter counts as touched until it is computed again.
    """
    for parent in MONTHLY:
        ensure_days({at.date() for at in quarters}, parent)
    with transaction.atomic(), connection.cursor() as cursor:
        lock_rollups(cursor)
        TouchedQuarter.objects.filter(quarter__in=quarters).delete()
        UsageQuarter.objects.filter(at__in=quarters).delete()
        cursor.execute(
            _INSERT_SQL, {"quarters": list(quarters), "first": min(quarters), "end": max(quarters) + QUARTER}
        )
        StaleSum.objects.bulk_create([StaleSum(quarter=at) for at in quarters])


def lock_rollups(cursor: Any) -> None:
    """Until the transaction ends, nobody else changes rollups, nor who pays by which list."""
    cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])


def sum_up(quarters: Sequence[datetime]) -> None:
    """Replace the sums of these quarters by what their rollups say. In a transaction that holds the rollups' lock."""
    StaleSum.objects.filter(quarter__in=quarters).delete()
    UsageSum.objects.filter(at__in=quarters).delete()
    with connection.cursor() as cursor:
        cursor.execute(_SUMS_SQL, {"quarters": list(quarters)})


def sum_up_stale(*, limit: int = 1_000) -> int:
    """Sum up the quarters whose sums do not hold, the newest first; returns how many.

    Cost: some 10 us a rollup.
    """
    marked = StaleSum.objects.order_by("-quarter").values_list("quarter", flat=True).distinct()
    quarters = list(marked[:limit])
    for first in range(0, len(quarters), _SUMMED_AT_ONCE):
        batch = quarters[first : first + _SUMMED_AT_ONCE]
        ensure_days({at.date() for at in batch}, SUM_TABLE)
        with transaction.atomic(), connection.cursor() as cursor:
            lock_rollups(cursor)
            sum_up(batch)
    return len(quarters)


def roll_up_hour(hour: datetime) -> None:
    """Replace the figures of accuracy of one hour; marks as of ``roll_up_quarter``."""
    with transaction.atomic(), connection.cursor() as cursor:
        lock_rollups(cursor)
        TouchedHour.objects.filter(hour=hour).delete()
        roll_up_accuracy(hour)


def roll_up_running(*, now: datetime | None = None) -> int:
    """Roll up the touched minutes of the hours that have not ended; returns how many. One process at a time does.

    Cost: some 60 us per prediction of those minutes. A minute is done again while its answers end, so for as long as
    they last.
    """
    instant = now or utc_now()
    running = _latest_finished(instant) + HOUR
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [_MINUTES_LOCK])
        if cursor.fetchone() != (True,):
            return 0
        try:
            # Those of hours before are computed with their hour, which is marked as well.
            TouchedMinute.objects.filter(minute__lt=running).delete()
            minutes = list(TouchedMinute.objects.order_by("minute").values_list("minute", flat=True).distinct())
            for minute in minutes:
                with transaction.atomic():
                    TouchedMinute.objects.filter(minute=minute).delete()
                    roll_up_minute(minute)
            RolledUp.objects.update_or_create(what=ACCURACY, defaults={"at": instant})
        finally:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [_MINUTES_LOCK])
    return len(minutes)
