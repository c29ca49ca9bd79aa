"""Hourly rollups: exact re-computation of the hours whose events changed."""

from __future__ import annotations

from datetime import datetime, timedelta

import structlog
from django.db import connection, transaction

from controlplane.common.clock import utc_now
from controlplane.usage.accuracy import roll_up_accuracy
from controlplane.usage.histogram import BUCKET_SQL
from controlplane.usage.models import TouchedHour, UsageHour

logger = structlog.get_logger(__name__)

_LOCK = 0x66_6C_03
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


def roll_up_finished(*, now: datetime | None = None, limit: int = 1_000) -> int:
    """Roll up every touched hour that has ended; returns how many."""
    latest = (now or utc_now()) - timedelta(hours=1) - SETTLE
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
