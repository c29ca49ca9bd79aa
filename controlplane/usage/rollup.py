"""Rollups: exact re-computation of the hours whose events changed, and of minutes of the hours still running."""

from __future__ import annotations

from datetime import datetime, timedelta

import structlog
from django.db import connection, transaction

from controlplane.common.clock import utc_now
from controlplane.usage.accuracy import ACCURACY, HOUR, roll_up_accuracy, roll_up_minute
from controlplane.usage.histogram import BUCKET_SQL
from controlplane.usage.models import RolledUp, TouchedHour, TouchedMinute, UsageHour

logger = structlog.get_logger(__name__)

_LOCK = 0x66_6C_03
_MINUTES_LOCK = 0x66_6C_04
SETTLE = timedelta(minutes=2)
"""An hour is rolled up this long after its end; what arrives later marks it again."""

TTFT_US_SQL = "round(extract(epoch FROM (first_token_at - arrived_at)) * 1000000)::bigint"

ROLLUP_SQL = f"""
    WITH slice AS (
        SELECT date_trunc('hour', arrived_at, 'UTC') AS hour, tenant, key, pool, model, tier, outcome,
               prompt_tokens, output_tokens, recomputed_tokens,
               CASE WHEN first_token_at IS NOT NULL
                    THEN {BUCKET_SQL.format(us=TTFT_US_SQL)} END AS bucket
        FROM usage_event WHERE arrived_at >= %(from)s AND arrived_at < %(to)s
    ), by_bucket AS (
        SELECT hour, tenant, key, pool, model, tier, bucket, count(*) AS n,
               count(*) FILTER (WHERE outcome = 'completed') AS completed,
               sum(prompt_tokens) AS prompt_tokens, sum(output_tokens) AS output_tokens,
               sum(recomputed_tokens) AS recomputed_tokens
        FROM slice GROUP BY hour, tenant, key, pool, model, tier, bucket
    )
    SELECT hour, tenant, key, pool, model, tier, sum(n)::bigint AS requests, sum(completed)::bigint AS completed,
           sum(prompt_tokens)::bigint AS prompt_tokens, sum(output_tokens)::bigint AS output_tokens,
           sum(recomputed_tokens)::bigint AS recomputed_tokens,
           coalesce(array_agg(bucket ORDER BY bucket) FILTER (WHERE bucket IS NOT NULL), '{{}}') AS ttft_buckets,
           coalesce(array_agg(n ORDER BY bucket) FILTER (WHERE bucket IS NOT NULL), '{{}}') AS ttft_counts
    FROM by_bucket GROUP BY hour, tenant, key, pool, model, tier
"""
"""Rows of ``usage_hour`` computed from events; parameters ``from`` and ``to``. The report's tail uses it as well."""


def _latest_finished(now: datetime) -> datetime:
    """The hour that begins last of those that are rolled up as a whole."""
    return (now - SETTLE).replace(minute=0, second=0, microsecond=0) - HOUR


def roll_up_finished(*, now: datetime | None = None, limit: int = 1_000) -> int:
    """Roll up every touched hour that has ended; returns how many."""
    latest = _latest_finished(now or utc_now())
    hours = TouchedHour.objects.filter(hour__lte=latest).order_by("hour").values_list("hour", flat=True).distinct()
    n_hours = 0
    for hour in list(hours[:limit]):
        roll_up_hour(hour)
        n_hours += 1
    if n_hours:
        logger.info("usage.rolled_up", hours=n_hours)
    return n_hours


def roll_up_hour(hour: datetime) -> None:
    """Replace the rollups of one hour, usage and accuracy, by what its events say.

    The marks that are visible go first, the events are read afterwards: a batch that commits in between leaves its
    own mark behind, so that the hour counts as touched until it is computed again.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        TouchedHour.objects.filter(hour=hour).delete()
        UsageHour.objects.filter(hour=hour).delete()
        cursor.execute(
            "INSERT INTO usage_hour (hour, tenant, key, pool, model, tier, requests, completed, prompt_tokens, "
            f"output_tokens, recomputed_tokens, ttft_buckets, ttft_counts) {ROLLUP_SQL}",
            {"from": hour, "to": hour + timedelta(hours=1)},
        )
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
