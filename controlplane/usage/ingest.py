"""Books batches of usage events: at least once on the wire, exactly once in the table.

COPY into a temporary table, then INSERT .. ON CONFLICT DO NOTHING in the order of the key. What cannot be booked is
quarantined with its bytes, never dropped and never in the way of the rest of its batch. Predictions and features that
come with an event go beside it (``usage.samples``).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec
import psycopg
import structlog
from django.db import OperationalError, connection, transaction

from controlplane.common.clock import from_us, to_us, utc_now
from controlplane.keys.actions import note_used
from controlplane.usage import samples, totals
from controlplane.usage.models import QuarantinedEvent
from controlplane.usage.partitions import ensure_days
from controlplane.usage.rollup import QUARTER_SQL
from router_ext.wire.controlplane import MomentRecord, ReasonRecord, UsageAck, UsageEvent
from router_ext.wire.decoding import NotDecoded

logger = structlog.get_logger(__name__)

MAX_AGE = timedelta(days=90)
"""As long as events are kept: what comes later can no longer be told from what was booked."""
MAX_AHEAD = timedelta(days=1)
EXPLAINED_WAIT_US = 1_000_000
"""Explanations are kept for requests that waited longer than this, were preempted or did not complete."""
MAX_LINES = 32
MAX_MOMENTS = 64
_DEADLOCK_RETRIES = 5
_RECENT_US = 86_400_000_000
_INT32 = 2**31 - 1
_INT64 = 2**63 - 1

_COLUMNS = (
    "arrived_at", "event", "request", "router", "tenant", "key", "pool", "model", "tier", "dialect", "outcome",
    "ended_at", "first_dispatch_at", "first_token_at", "prompt_tokens", "output_tokens", "token_source", "segments",
    "preemptions", "recomputed_tokens", "resumed_prefill_tokens", "kv_token_seconds", "max_new_tokens",
    "predicted_tokens", "predictor", "finish_reason", "resume_class", "backends", "error_code",
)  # fmt: skip
_TYPES = (
    "timestamptz", "text", "text", "text", "text", "text", "text", "text", "text", "text", "text",
    "timestamptz", "timestamptz", "timestamptz", "int8", "int8", "text", "int4",
    "int4", "int8", "int8", "float8", "int8",
    "int8", "text", "text", "text", "text[]", "text",
)  # fmt: skip
_LIST = ", ".join(_COLUMNS)


class RawBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A ``UsageBatch`` whose events are still bytes, so that one bad event does not spoil the others."""

    router: str
    events: list[msgspec.Raw]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refused:
    body: bytes
    reason: str
    event: UsageEvent | None


_batch_decoder = msgspec.json.Decoder(RawBatch)
_event_decoder = msgspec.json.Decoder(UsageEvent)


def decode_batch(body: bytes) -> RawBatch:
    """The batch of a request body.

    Raises:
        msgspec.MsgspecError: not JSON, or not a batch.
    """
    return _batch_decoder.decode(body)


def ingest(batch: RawBatch) -> UsageAck:
    """Make everything in the batch durable. One transaction; deadlocks with other batches are tried again.

    Returns:
        How many events were new, already known (those twice in one batch included) and quarantined.
    """
    now = utc_now()
    good: dict[tuple[int, str], tuple[UsageEvent, tuple[Any, ...]]] = {}
    refused: list[_Refused] = []
    unreadable_predictions: set[tuple[int, str]] = set()
    n_twice = 0
    for raw in batch.events:
        body = bytes(raw)
        try:
            event, is_whole = _decode(body)
        except NotDecoded as error:
            refused.append(_Refused(body=body, reason=f"unreadable: {error}", event=None))
            continue
        if not is_whole:
            unreadable_predictions.add((event.arrived_at_us, event.event))
        reason = _fault(event, body, now)
        if reason is not None:
            refused.append(_Refused(body=body, reason=reason, event=event))
        elif (event.arrived_at_us, event.event) in good:
            n_twice += 1
        else:
            good[event.arrived_at_us, event.event] = (event, _row(event))
    ordered = [good[key] for key in sorted(good)]
    ensure_days({row[0].date() for _, row in ordered})
    samples.prepare_days([(event, row[0]) for event, row in ordered])
    for attempt in range(_DEADLOCK_RETRIES + 1):
        try:
            with transaction.atomic():
                new = _book(ordered, unreadable_predictions, router=batch.router) if ordered else []
                n_quarantined = _quarantine(refused, router=batch.router, now=now) if refused else 0
                booked_at_us = totals.add(new)
            break
        except OperationalError as error:
            if not isinstance(error.__cause__, psycopg.errors.DeadlockDetected) or attempt == _DEADLOCK_RETRIES:
                raise
            logger.warning("usage.deadlock_retried", attempt=attempt + 1)
    if n_quarantined:
        # The alarm: one line per batch with new ones; the console and REST show how many there are.
        logger.error("usage.quarantined", router=batch.router, events=n_quarantined, reason=refused[0].reason)
    return UsageAck(
        accepted=len(new),
        known=len(ordered) - len(new) + n_twice,
        quarantined=len(refused),
        booked_at_us=booked_at_us,
    )


def copy_rate(given: Sequence[bytes]) -> float:
    """Events per second of a bare COPY of these batches' rows into a table without keys: what booking is held against.

    The rows are made before; those sent twice are among them. Nothing stays.
    """
    rows = [[_row(_event_decoder.decode(bytes(raw))) for raw in decode_batch(body).events] for body in given]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("CREATE TABLE usage_bare (LIKE usage_event INCLUDING DEFAULTS)")
        began = time.perf_counter()
        for batch in rows:
            with cursor.copy(f"COPY usage_bare ({_LIST}) FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(_TYPES)
                for row in batch:
                    copy.write_row(row)
        seconds = time.perf_counter() - began
        transaction.set_rollback(True)
    return sum(map(len, rows)) / seconds


def _decode(body: bytes) -> tuple[UsageEvent, bool]:
    """An event, and whether its prediction could be read too: the books do not wait for the training data.

    Raises:
        what ``NotDecoded`` names: it is no event.
    """
    try:
        return _event_decoder.decode(body), True
    except msgspec.ValidationError:
        plain = msgspec.json.decode(body)
        if not isinstance(plain, dict) or plain.pop("prediction", None) is None:
            raise
        return msgspec.convert(plain, UsageEvent), False


def _fault(event: UsageEvent, body: bytes, now: datetime) -> str | None:
    """Why an event cannot be booked, None if it can."""
    fault = _time_fault(event, now)
    if fault is not None:
        return fault
    if not event.event:
        return "without an id"
    for name in ("prompt_tokens", "output_tokens", "recomputed_tokens", "resumed_prefill_tokens"):
        if not 0 <= getattr(event, name) <= _INT64:
            return f"{name} {getattr(event, name)} is out of range"
    for name in ("segments", "preemptions"):
        if not 0 <= getattr(event, name) <= _INT32:
            return f"{name} {getattr(event, name)} is out of range"
    for name in ("max_new_tokens", "predicted_tokens"):
        if not -_INT64 <= (getattr(event, name) or 0) <= _INT64:
            return f"{name} {getattr(event, name)} is out of range"
    if b"\\u0000" not in body:  # JSON has no other way to write NUL, and few events have it
        return None
    texts = (getattr(event, n) for n, t in zip(_COLUMNS, _TYPES, strict=True) if t == "text")
    kept = msgspec.to_builtins((event.explanation, event.reasons, event.timeline))
    if any(text is not None and "\0" in text for text in (*texts, *event.backends, *_texts(kept))):
        return "a text contains NUL"
    return None


def _time_fault(event: UsageEvent, now: datetime) -> str | None:
    given = (event.arrived_at_us, event.ended_at_us, event.first_dispatch_us, event.first_token_us)
    now_us = to_us(now)
    # Nearly all are of the last minutes, and numbers are compared faster than dates are made.
    if all(t is None or now_us - _RECENT_US <= t <= now_us for t in given):
        return None
    try:
        arrived = from_us(event.arrived_at_us)
        ends = [from_us(t) for t in (event.ended_at_us, event.first_dispatch_us, event.first_token_us) if t is not None]
    except OverflowError:
        return f"an instant outside the calendar (arrived_at_us {event.arrived_at_us})"
    if arrived < now - MAX_AGE:
        return f"older than {MAX_AGE.days} days: {arrived.isoformat()}"
    if arrived > now + MAX_AHEAD or any(t > now + MAX_AHEAD for t in ends):
        return f"from the future: {max(arrived, *ends).isoformat()}"
    return None


def _texts(value: Any) -> Iterator[str]:
    """Every text in builtins, the names of mappings included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _row(event: UsageEvent) -> tuple[Any, ...]:
    def instant(microseconds: int | None) -> datetime | None:
        return None if microseconds is None else from_us(microseconds)

    return (
        from_us(event.arrived_at_us), event.event, event.request, event.router, event.tenant, event.key, event.pool,
        event.model, event.tier, event.dialect, event.outcome, instant(event.ended_at_us),
        instant(event.first_dispatch_us), instant(event.first_token_us), event.prompt_tokens, event.output_tokens,
        event.token_source, event.segments, event.preemptions, event.recomputed_tokens, event.resumed_prefill_tokens,
        event.kv_token_seconds, event.max_new_tokens, event.predicted_tokens, event.predictor, event.finish_reason,
        event.resume_class, event.backends, event.error_code,
    )  # fmt: skip


def _book(
    ordered: Sequence[tuple[UsageEvent, tuple[Any, ...]]], unreadable_predictions: Set[tuple[int, str]], *, router: str
) -> list[totals.Arrived]:
    """Insert rows in key order; returns the events that were new. Marks the quarters and hours that changed."""
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TEMPORARY TABLE IF NOT EXISTS usage_incoming (LIKE usage_event INCLUDING DEFAULTS) "
            "ON COMMIT DELETE ROWS"
        )
        cursor.execute("TRUNCATE usage_incoming")
        with cursor.copy(f"COPY usage_incoming ({_LIST}) FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(_TYPES)
            for _, row in ordered:
                copy.write_row(row)
        cursor.execute(
            f"""
            WITH booked AS (
                INSERT INTO usage_event ({_LIST}) SELECT {_LIST} FROM usage_incoming ORDER BY arrived_at, event
                ON CONFLICT DO NOTHING RETURNING arrived_at, event
            ), quarters AS (
                SELECT DISTINCT {QUARTER_SQL.format(at="arrived_at")} AS quarter FROM booked
            ), hours AS (
                INSERT INTO usage_touched_hour (hour)
                SELECT DISTINCT date_trunc('hour', quarter, 'UTC') FROM quarters RETURNING hour
            ), marked AS (
                INSERT INTO usage_touched_quarter (quarter)
                SELECT quarter FROM quarters
                UNION
                SELECT hour + n * interval '15 minutes' FROM hours CROSS JOIN generate_series(0, 3) AS n
                WHERE EXISTS (SELECT FROM usage_quarter WHERE at = hour AND minutes = 60)
            )
            SELECT arrived_at, event FROM booked
            """
        )
        booked = set(cursor.fetchall())
    new = [(event, row[0]) for event, row in ordered if (row[0], row[1]) in booked]
    events = [event for event, _ in new]
    _explain(events)
    unreadable = [e for e in events if (e.arrived_at_us, e.event) in unreadable_predictions]
    samples.keep(new, unreadable=unreadable, router=router)
    # In order of arrival: the last one of each key stays.
    note_used({event.key: arrived for event, arrived in new if event.key})
    return new


def _explain(events: Sequence[UsageEvent]) -> None:
    rows: list[tuple[datetime | str, ...]] = [
        (from_us(e.arrived_at_us), e.event, e.tenant, *(msgspec.json.encode(v).decode() for v in _kept(e)))
        for e in events
        if e.explanation
        and (
            e.outcome != "completed"
            or e.preemptions
            or (e.first_dispatch_us or e.ended_at_us) - e.arrived_at_us > EXPLAINED_WAIT_US
        )
    ]
    if rows:
        with connection.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO usage_explanation (arrived_at, event, tenant, lines, reasons, timeline) "
                "VALUES (%s, %s, %s, %s::jsonb, %s::jsonb, %s::jsonb) ON CONFLICT DO NOTHING",
                rows,
            )


def _kept(event: UsageEvent) -> tuple[list[str], list[ReasonRecord], list[MomentRecord]]:
    """What is kept of an explanation, whoever sent it."""
    return event.explanation[:MAX_LINES], event.reasons[:MAX_LINES], event.timeline[:MAX_MOMENTS]


def _quarantine(refused: Sequence[_Refused], *, router: str, now: datetime) -> int:
    """Keep the bytes; the same bytes sent again are one row. Returns how many were new."""
    rows = {
        hashlib.sha256(r.body).hexdigest(): QuarantinedEvent(
            digest=hashlib.sha256(r.body).hexdigest(),
            router=_clean(router),
            event=_clean(r.event.event if r.event else ""),
            tenant=_clean(r.event.tenant if r.event else ""),
            arrived_at_us=r.event.arrived_at_us if r.event and abs(r.event.arrived_at_us) < 10**39 else None,
            reason=_clean(r.reason),
            body=r.body,
            received_at=now,
        )
        for r in refused
    }
    known = set(QuarantinedEvent.objects.filter(pk__in=rows).values_list("pk", flat=True))
    QuarantinedEvent.objects.bulk_create([rows[d] for d in sorted(rows)], ignore_conflicts=True)
    return len(rows) - len(known)


def _clean(text: str) -> str:
    return text.replace("\0", "\\0")[:500]
