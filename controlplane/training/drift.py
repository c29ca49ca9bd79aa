"""The drift monitor: does the trained model of a pool still tell answers as it did when it was promoted?

Rolling pinball loss over the newest answers that it predicted since its promotion, against the loss on the rows held
out then (of a model that was promoted without such rows: against its first ``MIN_ROWS`` answers), and the calibration
of the same answers. Judged from ``MIN_ROWS`` answers on.

Source: the retraining rule of rolling loss above 1.2 times the loss at promotion over 1,000 samples or more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import fmean

import structlog
from django.db import connection

from controlplane.common.actor import system_actor
from controlplane.common.clock import utc_now
from controlplane.common.errors import Conflict
from controlplane.common.leases import JobTrigger
from controlplane.fleet.models import Pool
from controlplane.training.actions import is_trainable, start_job
from controlplane.training.models import Drift, DriftState, Job, JobKind
from controlplane.training.promotion import current_promotion
from controlplane.usage.accuracy import transform
from router_ext.predict.baseline import LEVELS

logger = structlog.get_logger(__name__)

MIN_ROWS = 1_000
WINDOW = 5_000
"""Newest answers looked at: a busy pool is judged by its last hours, a quiet one by its last weeks."""
DRIFTING_RATIO = 1.2
WATCHING_RATIO = 1.1
DRIFTING_MISCALIBRATION = 0.15
WATCHING_MISCALIBRATION = 0.08
"""Of 1,000 answers the observed share is off by 0.03 by chance (two standard deviations at the median)."""
PAUSE = timedelta(hours=6)
"""Between two jobs that drift starts: a job that was refused would be refused again until there are other rows."""

_ROWS_SQL = """
    SELECT quantiles, output_tokens FROM usage_prediction
    WHERE pool = %s AND length_model = %s AND length_model <> '' AND arrived_at >= %s AND is_complete
      AND quantiles IS NOT NULL AND source IN ('model', 'memory')
    ORDER BY arrived_at {order}, event {order} LIMIT %s
"""
Told = tuple[list[int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was seen of one pool."""

    state: Drift
    reason: str
    n: int = 0
    loss: float | None = None
    reference: float | None = None
    ratio: float | None = None
    miscalibration: float | None = None


def look(rows: Sequence[Told], reference: float | None) -> Look:
    """Judge answers and what they were told to be against the loss of the time of promotion."""
    if len(rows) < MIN_ROWS or reference is None:
        return Look(
            state=Drift.TOO_FEW, n=len(rows), reference=reference, reason=f"{len(rows):,} of {MIN_ROWS:,} answers"
        )
    loss = fmean(pinball(quantiles, actual) for quantiles, actual in rows)
    ratio = loss / max(reference, 1e-9)
    bins = [fmean(column) for column in zip(*(transform(q, y) for q, y in rows), strict=True)]
    shares = itertools.accumulate(bins[:-1])
    off, level, share = max((abs(s - level), level, s) for s, level in zip(shares, LEVELS, strict=True))
    said = (
        f"loss {loss:.3f}, {ratio:.2f} times the {reference:.3f} of its promotion; {share:.0%} of answers were up to "
        f"the quantile of {level:.0%}"
    )
    state = Drift.OK
    if ratio > DRIFTING_RATIO or off > DRIFTING_MISCALIBRATION:
        state = Drift.DRIFTING
    elif ratio > WATCHING_RATIO or off > WATCHING_MISCALIBRATION:
        state = Drift.WATCHING
    return Look(state=state, n=len(rows), loss=loss, reference=reference, ratio=ratio, miscalibration=off, reason=said)


def pinball(quantiles: Sequence[float], actual: int) -> float:
    """Mean over ``LEVELS`` of the pinball loss of ln(1 + tokens), as ``usage.accuracy`` defines it.

    Row by row in Python: ``predict.figures`` needs numpy, which the worker that watches does without.
    """
    log_actual = math.log1p(actual)
    gaps = [log_actual - math.log1p(quantile) for quantile in quantiles]
    return fmean(max(level * gap, (level - 1.0) * gap) for level, gap in zip(LEVELS, gaps, strict=True))


def watch(*, now: datetime | None = None) -> dict[str, Drift]:
    """Look at every pool and write down what was seen; returns the states by pool.

    Cost: reads at most ``WINDOW`` rows of a pool.
    """
    instant = now or utc_now()
    states: dict[str, Drift] = {}
    for pool in Pool.objects.order_by("id"):
        seen = _look_at(pool)
        states[pool.id] = seen.state
        before = DriftState.objects.filter(pk=pool.id).first()
        is_same = before is not None and (before.state, before.length_model) == (seen.state, pool.length_model_digest)
        if before is None or before.state != seen.state:
            logger.info("drift.changed", pool=pool.id, state=seen.state, reason=seen.reason)
        DriftState.objects.update_or_create(
            pool=pool.id,
            defaults={
                "state": seen.state,
                "since": before.since if is_same and before is not None else instant,
                "looked_at": instant,
                "length_model": pool.length_model_digest,
                **{
                    name: getattr(seen, name)
                    for name in ("n", "loss", "reference", "ratio", "miscalibration", "reason")
                },
            },
        )
    DriftState.objects.exclude(pk__in=states).delete()
    return states


def _look_at(pool: Pool) -> Look:
    promotion = current_promotion(pool.id)
    if not pool.length_model_digest or promotion is None:
        return Look(state=Drift.NO_MODEL, reason="no trained model serves this pool")
    rows = _rows(pool, promotion.created_at, "DESC", WINDOW)
    reference = promotion.pinball
    if reference is None and len(rows) >= MIN_ROWS:
        reference = fmean(pinball(q, y) for q, y in _rows(pool, promotion.created_at, "ASC", MIN_ROWS))
    return look(rows, reference)


def _rows(pool: Pool, since: datetime, order: str, limit: int) -> list[Told]:
    with connection.cursor() as cursor:
        cursor.execute(_ROWS_SQL.format(order=order), [pool.id, pool.length_model_digest, since, limit])
        return list(cursor.fetchall())


def retrain_if_drifting(*, now: datetime | None = None) -> Job | None:
    """Watch, and start a job where a pool drifts; at most one in ``PAUSE``, and none without enough samples."""
    states = watch(now=now)
    drifting = sorted(pool for pool, state in states.items() if state == Drift.DRIFTING)
    if not drifting or not is_trainable(now=now):
        return None
    recent = (now or utc_now()) - PAUSE
    if Job.objects.filter(kind=JobKind.MIXTURE, trigger=JobTrigger.DRIFT, created_at__gt=recent).exists():
        return None
    try:
        return start_job(actor=system_actor("drift monitor"), kind=JobKind.MIXTURE, trigger=JobTrigger.DRIFT)
    except Conflict:
        return None
