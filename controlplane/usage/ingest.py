"""Books batches of usage events: at least once on the wire, exactly once in the table.

The events of a batch that are known already are looked up by key, the others go straight into the table by COPY, in
the order of the key; its primary key has the last word. Where another batch books one of them in between, COPY fails,
and the batch is begun again: by then the other one is known. What cannot be booked is quarantined with its bytes, never
dropped and never in the way of the rest of its batch. Predictions and features that come with an event go beside it
(``usage.samples``).
"""

from __future__ import annotations

import functools
import hashlib
import struct
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec
import psycopg
import structlog
from django.db import IntegrityError, OperationalError, connection, transaction

from controlplane.common.bound import EPOCH_US, bound_cursor
from controlplane.common.clock import from_us, to_us, utc_now
from controlplane.usage import samples, totals
from controlplane.usage.models import QuarantinedEvent
from controlplane.usage.partitions import ensure_days
from router_ext.wire.controlplane import MomentRecord, ReasonRecord, UsageAck, UsageBatch, UsageEvent
from router_ext.wire.decoding import NotDecoded

logger = structlog.get_logger(__name__)

MAX_AGE = timedelta(days=90)
"""As long as events are kept: what comes later can no longer be told from what was booked."""
MAX_AHEAD = timedelta(days=1)
EXPLAINED_WAIT_US = 1_000_000
"""Explanations are kept for requests that waited longer than this, were preempted or did not complete."""
MAX_LINES = 32
MAX_MOMENTS = 64
_RETRIES = 20
"""Each time another batch has booked something, so there are as many as batches with the same events at most."""
_DAY_US = 86_400_000_000
_QUARTER_US = 900_000_000
_MAX_AGE_US = MAX_AGE // timedelta(microseconds=1)
_INT32 = 2**31 - 1
_INT64 = 2**63 - 1

_COLUMNS = (
    "arrived_at", "event", "request", "router", "tenant", "key", "pool", "model", "tier", "dialect", "outcome",
    "ended_at", "first_dispatch_at", "first_token_at", "prompt_tokens", "output_tokens", "token_source", "segments",
    "preemptions", "recomputed_tokens", "resumed_prefill_tokens", "kv_token_seconds", "max_new_tokens",
    "predicted_tokens", "predictor", "finish_reason", "resume_class", "backends", "error_code",
)  # fmt: skip
# Instants and backends are given in PostgreSQL's binary form: microseconds since 2000, and the bytes of an array.
_TYPES = (
    "int8", "text", "text", "text", "text", "text", "text", "text", "text", "text", "text",
    "int8", "int8", "int8", "int8", "int8", "text", "int4",
    "int4", "int8", "int8", "float8", "int8",
    "int8", "text", "text", "text", "bytea", "text",
)  # fmt: skip
_TEXTS = tuple(name for name, kind in zip(_COLUMNS, _TYPES, strict=True) if kind == "text")
_TEXT_OID = 25
_LIST = ", ".join(_COLUMNS)


class _RawBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A ``UsageBatch`` whose events are still bytes, so that one bad event does not spoil the others."""

    router: str
    events: list[msgspec.Raw]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch as it came. ``events``: None where one of them could not be read, or a text may contain NUL."""

    router: str
    body: bytes
    events: Sequence[UsageEvent] | None

    def raw(self) -> list[bytes]:
        """The bytes of each event."""
        return [bytes(raw) for raw in _raw_decoder.decode(self.body).events]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refused:
    body: bytes
    reason: str
    event: UsageEvent | None


_batch_decoder = msgspec.json.Decoder(UsageBatch)
_raw_decoder = msgspec.json.Decoder(_RawBatch)
_event_decoder = msgspec.json.Decoder(UsageEvent)


def decode_batch(body: bytes) -> Batch:
    """The batch of a request body.

    Raises:
        msgspec.MsgspecError: not JSON, or not a batch.
    """
    # JSON has no other way to write NUL, and few bodies have it.
    if b"\\u0000" not in body:
        try:
            batch = _batch_decoder.decode(body)
            return Batch(router=batch.router, body=body, events=batch.events)
        except msgspec.ValidationError:
            pass
    return Batch(router=_raw_decoder.decode(body).router, body=body, events=None)


def ingest(batch: Batch) -> UsageAck:
    """Make everything in the batch durable. One transaction; where it met another batch, it is tried again.

    Returns:
        How many events were new, already known (those twice in one batch included) and quarantined.
    """
    now = utc_now()
    sorted_out = _sort_out(batch, now)
    ordered = [sorted_out.good[key] for key in sorted(sorted_out.good)]
    ensure_days({from_us(day * _DAY_US).date() for day in {event.arrived_at_us // _DAY_US for event in ordered}})
    samples.prepare_days(ordered)
    for attempt in range(_RETRIES + 1):
        try:
            with transaction.atomic(), connection.wrap_database_errors:
                new = _book(ordered, sorted_out.unreadable_predictions, router=batch.router) if ordered else []
                refused = sorted_out.refused
                n_quarantined = _quarantine(refused, router=batch.router, now=now) if refused else 0
                booked_at_us = totals.add(new)
            break
        except (OperationalError, IntegrityError) as error:
            met = (psycopg.errors.DeadlockDetected, psycopg.errors.UniqueViolation)
            if not isinstance(error.__cause__, met) or attempt == _RETRIES:
                raise
            logger.warning("usage.batch_retried", attempt=attempt + 1, reason=type(error.__cause__).__name__)
    if n_quarantined:
        # The alarm: one line per batch with new ones; the console and REST show how many there are.
        logger.error("usage.quarantined", router=batch.router, events=n_quarantined, reason=refused[0].reason)
    return UsageAck(
        accepted=len(new),
        known=len(ordered) - len(new) + sorted_out.n_twice,
        quarantined=len(refused),
        booked_at_us=booked_at_us,
    )


@dataclass(slots=True)
class _SortedOut:
    """What can be booked by key, what cannot, and whose prediction could not be read. ``n_twice``: in this batch."""

    good: dict[tuple[int, str], UsageEvent]
    refused: list[_Refused]
    unreadable_predictions: set[tuple[int, str]]
    n_twice: int = 0


def _sort_out(batch: Batch, now: datetime) -> _SortedOut:
    if batch.events is None:
        return _sort_out_raw(batch, now)
    now_us = to_us(now)
    oldest_us = now_us - _MAX_AGE_US
    good: dict[tuple[int, str], UsageEvent] = {}
    refused: list[_Refused] = []
    raw: list[bytes] = []
    for number, event in enumerate(batch.events):
        if not _is_sound(event, oldest_us, now_us):
            raw = raw or batch.raw()
            reason = _fault(event, raw[number], now)
            if reason is not None:
                refused.append(_Refused(body=raw[number], reason=reason, event=event))
                continue
        good.setdefault((event.arrived_at_us, event.event), event)
    return _SortedOut(good, refused, set(), n_twice=len(batch.events) - len(refused) - len(good))


def _sort_out_raw(batch: Batch, now: datetime) -> _SortedOut:
    """Event by event."""
    found = _SortedOut({}, [], set())
    for body in batch.raw():
        try:
            event, is_whole = _decode(body)
        except NotDecoded as error:
            found.refused.append(_Refused(body=body, reason=f"unreadable: {error}", event=None))
            continue
        key = (event.arrived_at_us, event.event)
        if not is_whole:
            found.unreadable_predictions.add(key)
        reason = _fault(event, body, now)
        if reason is not None:
            found.refused.append(_Refused(body=body, reason=reason, event=event))
        elif key in found.good:
            found.n_twice += 1
        else:
            found.good[key] = event
    return found


def n_events(body: bytes) -> int:
    """How many events a batch has, whatever they are."""
    return len(_raw_decoder.decode(body).events)


def copy_rate(given: Sequence[bytes]) -> float:
    """Events per second of a bare COPY of these batches' rows into a table without keys: what booking is held against.

    The rows are made before; those sent twice are among them. Nothing stays.
    """
    rows = [[_row(event) for event in _batch_decoder.decode(body).events] for body in given]
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


def _is_sound(event: UsageEvent, oldest_us: int, now_us: int) -> bool:
    """Whether nothing is the matter with an event without NUL, as with nearly all: what ``_fault`` says, quickly."""
    return (
        oldest_us <= event.arrived_at_us <= now_us
        and 0 <= event.ended_at_us <= now_us
        and 0 <= (event.first_dispatch_us or 0) <= now_us
        and 0 <= (event.first_token_us or 0) <= now_us
        and 0 <= event.prompt_tokens <= _INT64
        and 0 <= event.output_tokens <= _INT64
        and 0 <= event.recomputed_tokens <= _INT64
        and 0 <= event.resumed_prefill_tokens <= _INT64
        and 0 <= event.segments <= _INT32
        and 0 <= event.preemptions <= _INT32
        and -_INT64 <= (event.max_new_tokens or 0) <= _INT64
        and -_INT64 <= (event.predicted_tokens or 0) <= _INT64
        and event.event != ""
    )


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
    if b"\\u0000" not in body:
        return None
    texts = (getattr(event, name) for name in _TEXTS)
    kept = msgspec.to_builtins((event.explanation, event.reasons, event.timeline))
    if any(text is not None and "\0" in text for text in (*texts, *event.backends, *_texts(kept))):
        return "a text contains NUL"
    return None


def _time_fault(event: UsageEvent, now: datetime) -> str | None:
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
    """What COPY is given; instants must be of the calendar."""
    dispatch, token = event.first_dispatch_us, event.first_token_us
    return (
        event.arrived_at_us - EPOCH_US, event.event, event.request, event.router, event.tenant, event.key, event.pool,
        event.model, event.tier, event.dialect, event.outcome, event.ended_at_us - EPOCH_US,
        None if dispatch is None else dispatch - EPOCH_US, None if token is None else token - EPOCH_US,
        event.prompt_tokens, event.output_tokens,
        event.token_source, event.segments, event.preemptions, event.recomputed_tokens, event.resumed_prefill_tokens,
        event.kv_token_seconds, event.max_new_tokens, event.predicted_tokens, event.predictor, event.finish_reason,
        event.resume_class, _array(tuple(event.backends)), event.error_code,
    )  # fmt: skip


@functools.lru_cache(maxsize=4_096)
def _array(texts: tuple[str, ...]) -> bytes:
    """A text array as PostgreSQL takes it. Few are different: an event's backends are one or two of its pool's."""
    if not texts:
        return struct.pack("!3i", 0, 0, _TEXT_OID)
    parts = [struct.pack("!5i", 1, 0, _TEXT_OID, len(texts), 1)]
    for text in map(str.encode, texts):
        parts += (struct.pack("!i", len(text)), text)
    return b"".join(parts)


# One look into the index of its day for each, whatever the planner knows of a day that fills. The multiplication is
# exact: both
# factors, and what comes out, are below 2 ** 53.
_KNOWN_SQL = """
    SELECT ordinal FROM unnest(%b::int8[], %b::text[]) WITH ORDINALITY AS sent (us, event, ordinal)
    CROSS JOIN LATERAL (
        SELECT FROM usage_event AS booked
        WHERE booked.arrived_at = TIMESTAMPTZ 'epoch' + us * interval '1 microsecond' AND booked.event = sent.event
          AND booked.arrived_at BETWEEN %s AND %s
        LIMIT 1
    ) AS found
"""
_MARK_SQL = """
    WITH quarters AS (
        SELECT unnest(%s::timestamptz[]) AS quarter
    ), hours AS (
        INSERT INTO usage_touched_hour (hour)
        SELECT DISTINCT date_trunc('hour', quarter, 'UTC') FROM quarters RETURNING hour
    )
    INSERT INTO usage_touched_quarter (quarter)
    SELECT quarter FROM quarters
    UNION
    SELECT hour + n * interval '15 minutes' FROM hours CROSS JOIN generate_series(0, 3) AS n
    WHERE EXISTS (SELECT FROM usage_quarter WHERE at = hour AND minutes = 60)
"""


def _book(
    ordered: Sequence[UsageEvent], unreadable_predictions: Set[tuple[int, str]], *, router: str
) -> list[UsageEvent]:
    """Insert rows in key order; returns the events that were new. Marks the quarters and hours that changed.

    Raises:
        IntegrityError: another batch has booked one of them since it was looked up.
    """
    with bound_cursor() as cursor:
        first, last = (from_us(ordered[place].arrived_at_us) for place in (0, -1))
        cursor.execute(_KNOWN_SQL, [[e.arrived_at_us for e in ordered], [e.event for e in ordered], first, last])
        known = {ordinal - 1 for (ordinal,) in cursor.fetchall()}
        new = [event for number, event in enumerate(ordered) if number not in known] if known else list(ordered)
        if not new:
            return []
        with cursor.copy(f"COPY usage_event ({_LIST}) FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(_TYPES)
            for event in new:
                copy.write_row(_row(event))
        quarters = {event.arrived_at_us // _QUARTER_US for event in new}
        cursor.execute(_MARK_SQL, [[from_us(quarter * _QUARTER_US) for quarter in sorted(quarters)]])
    _explain(new)
    unreadable = [e for e in new if (e.arrived_at_us, e.event) in unreadable_predictions]
    samples.keep(new, unreadable=unreadable, router=router)
    return new


_EXPLAIN_SQL = """
    INSERT INTO usage_explanation (arrived_at, event, tenant, lines, reasons, timeline)
    SELECT TIMESTAMPTZ 'epoch' + us * interval '1 microsecond', event, tenant,
           convert_from(lines, 'UTF8')::jsonb, convert_from(reasons, 'UTF8')::jsonb,
           convert_from(timeline, 'UTF8')::jsonb
    FROM unnest(%b::int8[], %b::text[], %b::text[], %b::bytea[], %b::bytea[], %b::bytea[])
      AS kept (us, event, tenant, lines, reasons, timeline)
    ON CONFLICT DO NOTHING
"""


def _explain(events: Sequence[UsageEvent]) -> None:
    rows = [
        (e.arrived_at_us, e.event, e.tenant, *map(msgspec.json.encode, _kept(e)))
        for e in events
        if e.explanation
        and (
            e.outcome != "completed"
            or e.preemptions
            or (e.first_dispatch_us or e.ended_at_us) - e.arrived_at_us > EXPLAINED_WAIT_US
        )
    ]
    if rows:
        with bound_cursor() as cursor:
            cursor.execute(_EXPLAIN_SQL, [list(column) for column in zip(*rows, strict=True)])


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
