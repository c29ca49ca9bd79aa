"""Predictions and training samples of booked events: what is kept of them, for how long, and how much at most.

Both are written with the event, in its transaction and only when it is new, so each is there exactly once. A part that
cannot be kept is dropped and counted (``DroppedSample``); it never keeps an event from being booked.

    UsageEvent.prediction -> usage_prediction   every one, 28 days; what accuracy is computed from
                          -> predictor_sample   with features, 28 days, at most MAX_PER_POOL_DAY; what training reads
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import structlog
from django.db import connection, transaction

from controlplane.common.clock import from_us, utc_now
from controlplane.usage.models import AccuracyHour, DroppedSample, RolledUp, SampleDay
from controlplane.usage.partitions import KEPT_DAYS, PREDICTIONS, SAMPLES, drop_old_days, ensure_days, oldest_day
from router_ext.predict.baseline import LEVELS, MAX_TOKENS, is_complete
from router_ext.wire.controlplane import PredictionRecord, UsageEvent

logger = structlog.get_logger(__name__)

MAX_FEATURE_BYTES = 8_192
"""Four times what an extractor sends; a larger one is damage, or somebody's attempt to fill the disk."""
MAX_PER_POOL_DAY = 20_000
"""Samples kept of one pool and UTC day: 28 days are 560,000 rows, ten times what one training run reads."""
MAX_PER_TENANT_DAY = 5_000
"""Of those from one tenant, so that a busy one leaves room for the others."""

ACCURACY_DAYS = 400
"""Hourly figures are kept as long as events may be booked late."""

SOURCES = frozenset(("model", "memory", "key", "tenant", "pool", "default"))

_PREDICTION_COLUMNS = (
    "arrived_at", "event", "ended_at", "pool", "tenant", "key", "output_tokens", "is_complete", "quantiles", "fallback",
    "source", "fallback_reason", "runaway", "length_model",
)  # fmt: skip
_PREDICTION_TYPES = (
    "timestamptz", "text", "timestamptz", "text", "text", "text", "int8", "bool", "int4[]", "int4[]",
    "text", "text", "float8", "text",
)  # fmt: skip
_SAMPLE_COLUMNS = (
    "arrived_at", "event", "pool", "tenant", "feature_version", "features", "key", "model", "prompt_tokens",
    "max_new_tokens", "output_tokens", "is_complete",
)  # fmt: skip
_SAMPLE_TYPES = (
    "timestamptz", "text", "text", "text", "int4", "bytea", "text", "text", "int8", "int8", "int8", "bool",
)  # fmt: skip


def prepare_days(events: Sequence[UsageEvent]) -> None:
    """Make the partitions that ``keep`` will need. Outside the transaction."""
    days = {from_us(event.arrived_at_us).date() for event in events if event.prediction is not None}
    for parent in (PREDICTIONS, SAMPLES):
        oldest = oldest_day(parent)
        ensure_days({day for day in days if day >= oldest}, parent)


def keep(events: Sequence[UsageEvent], *, unreadable: Sequence[UsageEvent] = (), router: str) -> None:
    """Keep predictions and features of events that were booked just now, in their transaction.

    Args:
        events: in the order of their key. unreadable: those among them whose prediction could not even be decoded.
    """
    predictions: list[tuple[Any, ...]] = []
    samples: list[tuple[Any, ...]] = []
    dropped: Counter[tuple[str, str]] = Counter((e.pool, "unreadable prediction") for e in unreadable)
    oldest = min(oldest_day(PREDICTIONS), oldest_day(SAMPLES))
    for event in events:
        record = event.prediction
        # An answer cut before its first token says nothing of its length.
        if record is None or not 1 <= event.output_tokens <= MAX_TOKENS:
            continue
        arrived = from_us(event.arrived_at_us)
        if arrived.date() < oldest:
            dropped[event.pool, "older than 28 days"] += 1
            continue
        fault = prediction_fault(record)
        if fault is not None:
            dropped[event.pool, fault] += 1
            continue
        predictions.append(_prediction_row(event, arrived, record))
        if record.features is not None:
            fault = feature_fault(record)
            if fault is not None:
                dropped[event.pool, fault] += 1
            else:
                samples.append(_sample_row(event, arrived, record))
    with connection.cursor() as cursor:
        for table, columns, types, rows in (
            (PREDICTIONS, _PREDICTION_COLUMNS, _PREDICTION_TYPES, predictions),
            (SAMPLES, _SAMPLE_COLUMNS, _SAMPLE_TYPES, samples),
        ):
            if rows:
                with cursor.copy(f"COPY {table} ({', '.join(columns)}) FROM STDIN (FORMAT BINARY)") as copy:
                    copy.set_types(types)
                    for row in rows:
                        copy.write_row(row)
        if predictions:
            # One row per minute and batch, as the marks of hours: appending waits for nobody.
            minutes = sorted({row[0].replace(second=0, microsecond=0) for row in predictions})
            cursor.execute("INSERT INTO predictor_touched_minute (minute) SELECT unnest(%s::timestamptz[])", [minutes])
    if dropped:
        now = utc_now()
        clean = router.replace("\0", "\\0")[:100]
        DroppedSample.objects.bulk_create(
            [DroppedSample(at=now, router=clean, pool=p, reason=r, n=n) for (p, r), n in sorted(dropped.items())]
        )
        logger.warning("predictor.samples_dropped", router=clean, reasons=sorted({r for _, r in dropped}))


def prediction_fault(record: PredictionRecord) -> str | None:
    """Why a prediction cannot be kept, None if it can."""
    for values in (record.quantiles, record.fallback):
        if values is None:
            continue
        if len(values) != len(LEVELS) or values[0] < 1 or values[-1] > MAX_TOKENS or values != sorted(values):
            return "damaged quantiles"
    if record.source not in SOURCES:
        return "unknown source"
    if record.runaway is not None and not (math.isfinite(record.runaway) and 0 <= record.runaway <= 1):
        return "damaged probability"
    if any(t is not None and (len(t) > 64 or "\0" in t) for t in (record.length_model, record.fallback_reason)):
        return "damaged model or reason"
    return None


def feature_fault(record: PredictionRecord) -> str | None:
    """Why features cannot be kept, None if they can. What is inside is checked by whoever reads them."""
    features = record.features or b""
    if not features:
        return "empty features"
    if len(features) > MAX_FEATURE_BYTES:
        return f"features of more than {MAX_FEATURE_BYTES:,} bytes"
    if record.feature_version is None or not 0 < record.feature_version < 2**31:
        return "features without a version"
    return None


def _prediction_row(event: UsageEvent, arrived: datetime, record: PredictionRecord) -> tuple[Any, ...]:
    return (
        arrived, event.event, from_us(event.ended_at_us), event.pool, event.tenant, event.key,
        event.output_tokens, is_complete(event.outcome, event.finish_reason), record.quantiles, record.fallback,
        record.source, record.fallback_reason, record.runaway, record.length_model or "",
    )  # fmt: skip


def _sample_row(event: UsageEvent, arrived: datetime, record: PredictionRecord) -> tuple[Any, ...]:
    return (
        arrived, event.event, event.pool, event.tenant, record.feature_version, record.features,
        event.key, event.model, event.prompt_tokens, event.max_new_tokens, event.output_tokens,
        is_complete(event.outcome, event.finish_reason),
    )  # fmt: skip


# Which samples of a day stay is decided by the hash of their event's id: a fair choice, the same whenever and however
# often it is made, and nobody can see from a prompt whether it will be among them.
_THIN_SQL = """
    WITH by_tenant AS (
        SELECT arrived_at, event, pool, md5(event) AS hash,
               row_number() OVER (PARTITION BY pool, tenant ORDER BY md5(event)) AS place
        FROM predictor_sample WHERE arrived_at >= %(from)s AND arrived_at < %(to)s
    ), by_pool AS (
        SELECT arrived_at, event, place, row_number() OVER (PARTITION BY pool ORDER BY place > %(tenant)s, hash) AS rank
        FROM by_tenant
    )
    DELETE FROM predictor_sample USING by_pool
    WHERE predictor_sample.arrived_at = by_pool.arrived_at AND predictor_sample.event = by_pool.event
      AND (place > %(tenant)s OR rank > %(pool)s)
"""


def thin_samples(*, now: datetime | None = None) -> int:
    """Delete the samples above the limits of their day; returns how many.

    Cost: one look into the index of every kept day, whose length the limits themselves bound.
    """
    today = (now or utc_now()).replace(hour=0, minute=0, second=0, microsecond=0)
    n_deleted = 0
    # All days: a spool that was away for a week brings events of a week ago.
    for back in range(-1, KEPT_DAYS[SAMPLES] + 1):
        start = today - timedelta(days=back)
        with transaction.atomic(), connection.cursor() as cursor:
            limits = {"tenant": MAX_PER_TENANT_DAY, "pool": MAX_PER_POOL_DAY}
            cursor.execute(_THIN_SQL, {"from": start, "to": start + timedelta(days=1), **limits})
            n_deleted += cursor.rowcount
    return n_deleted


def count_samples(days: Iterable[date], *, now: datetime | None = None) -> None:
    """Count the samples of these days for those who show how many there are.

    Cost: one look into the index of each day.
    """
    for day in sorted(set(days)):
        start = datetime.combine(day, time(), UTC)
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("DELETE FROM predictor_sample_day WHERE day = %s", [day])
            cursor.execute(
                "INSERT INTO predictor_sample_day (day, pool, feature_version, n) "
                "SELECT %s, pool, feature_version, count(*) FROM predictor_sample "
                "WHERE arrived_at >= %s AND arrived_at < %s GROUP BY pool, feature_version ON CONFLICT DO NOTHING",
                [day, start, start + timedelta(days=1)],
            )
    RolledUp.objects.update_or_create(what=SAMPLES, defaults={"at": now or utc_now()})


def count_recent_samples(*, now: datetime | None = None) -> None:
    """Of today and yesterday, where nearly all new ones are; the others with every clean-up."""
    today = (now or utc_now()).date()
    count_samples((today - timedelta(days=1), today), now=now)


def forget_old(*, now: datetime | None = None) -> None:
    """The regular clean-up: days past their time, samples above their number, old counts of what was dropped."""
    drop_old_days(now=now)
    n_thinned = thin_samples(now=now)
    today = (now or utc_now()).date()
    SampleDay.objects.filter(day__lt=oldest_day(SAMPLES, now=now)).delete()
    count_samples((today - timedelta(days=back) for back in range(-1, KEPT_DAYS[SAMPLES] + 1)), now=now)
    DroppedSample.objects.filter(at__lt=(now or utc_now()) - timedelta(days=28)).delete()
    AccuracyHour.objects.filter(hour__lt=(now or utc_now()) - timedelta(days=ACCURACY_DAYS)).delete()
    if n_thinned:
        logger.info("predictor.samples_thinned", samples=n_thinned)
