"""Every night: do the rollups say what the events say? By day, key and model, of the days that ended last."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Any

import structlog
from django.db import connection
from django.db.models import QuerySet

from controlplane.common.access import visible
from controlplane.common.actor import Actor
from controlplane.common.clock import utc_now
from controlplane.common.keeper import Report, unreported
from controlplane.usage.models import Reconciliation
from controlplane.usage.report import one_state, parts_sql

logger = structlog.get_logger(__name__)

DAYS = 8
SHOWN = 100
"""Differences that are kept of one run."""
KEPT = timedelta(days=400)
_SUMS = ("requests", "completed", "prompt_tokens", "output_tokens")

# Quarters that are marked are computed from events anyway: what differs is a rollup that should not.
_COMPARE_SQL = f"""{parts_sql(("key", "model", *_SUMS), ())}, books AS (
        SELECT key, model, {", ".join(f"sum({name}) AS {name}" for name in _SUMS)} FROM parts GROUP BY key, model
    ), events AS (
        SELECT key, model, count(*) AS requests, count(*) FILTER (WHERE outcome = 'completed') AS completed,
               sum(prompt_tokens) AS prompt_tokens, sum(output_tokens) AS output_tokens
        FROM usage_event WHERE arrived_at >= %(from)s AND arrived_at < %(to)s GROUP BY key, model
    )
    SELECT key, model, {", ".join(f"coalesce(books.{name}, 0), coalesce(events.{name}, 0)" for name in _SUMS)}
    FROM books FULL JOIN events USING (key, model)
    WHERE ({", ".join(f"books.{name}" for name in _SUMS)})
          IS DISTINCT FROM ({", ".join(f"events.{name}" for name in _SUMS)})
    ORDER BY key, model
"""


def reconcile(*, now: datetime | None = None, n_days: int = DAYS, report: Report = unreported) -> Reconciliation:
    """Compare the last ``n_days`` UTC days that have ended; differences are kept, shown and logged as an error.

    Cost: the events of those days are read once.
    """
    instant = now or utc_now()
    today = instant.date()
    differences: list[dict[str, Any]] = []
    n_events = 0
    with one_state(), connection.cursor() as cursor:
        for back in range(n_days, 0, -1):
            day = today - timedelta(days=back)
            report((n_days - back) / n_days, f"{day}: {len(differences):,} differences so far")
            start = datetime.combine(day, time(), UTC)
            span = {"from": start, "to": start + timedelta(days=1)}
            cursor.execute(_COMPARE_SQL, span)
            for key, model, *values in cursor.fetchall():
                differences.append(
                    {
                        "day": day.isoformat(),
                        "key": key,
                        "model": model,
                        "books": dict(zip(_SUMS, map(int, values[::2]), strict=True)),
                        "events": dict(zip(_SUMS, map(int, values[1::2]), strict=True)),
                    }
                )
            cursor.execute(
                "SELECT count(*) FROM usage_event WHERE arrived_at >= %(from)s AND arrived_at < %(to)s", span
            )
            (n,) = cursor.fetchone() or (0,)
            n_events += n
    row = Reconciliation.objects.create(
        ran_at=instant,
        from_day=today - timedelta(days=n_days),
        to_day=today - timedelta(days=1),
        n_events=n_events,
        n_different=len(differences),
        differences=differences[:SHOWN],
    )
    Reconciliation.objects.filter(ran_at__lt=instant - KEPT).delete()
    if differences:
        logger.error("usage.books_differ", differences=len(differences), first=differences[0])
    else:
        logger.info("usage.reconciled", events=n_events, days=n_days)
    return row


def reconciliations(*, actor: Actor) -> QuerySet[Reconciliation]:
    """The runs, newest first."""
    return visible(Reconciliation.objects.order_by("-id"), actor=actor)
