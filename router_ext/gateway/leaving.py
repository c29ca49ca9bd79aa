"""Requests of a router that is being replaced, as its successor has to know them: the record of each, kept up to date.

The first successor gets them from the scheduler that decided so far. From then on that scheduler stands still, and
``Mirror`` follows the same requests by what happens to them (events that go out) and what is decided (orders that come
in), so that a second successor can be told as well if the first one dies.

Cost: O(1) per event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from router_ext.core.actions import Action, Dispatch, Expire, Preempt, Reject, RejectCode
from router_ext.core.events import (
    Arrived,
    Cancelled,
    Event,
    Failed,
    Finished,
    Heir,
    Preempted,
    Progressed,
    PromptMeasured,
    RequestSpec,
    SliceEnded,
)
from router_ext.core.ids import BackendId, KeyId, RequestId, TenantId, TierName
from router_ext.core.inheritance import Standing
from router_ext.wire.handover import LeftRequest, Occurrence, Order


@dataclass(slots=True)
class Entry:
    """A live request: its record, and the instants from which its ages are counted."""

    record: LeftRequest
    arrived_s: float
    dispatched_s: float


class Mirror:
    """The live requests of one pool. ``clock``: seconds, never decreasing."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.entries: dict[str, Entry] = {}

    def fill(self, heirs: Iterable[Heir]) -> None:
        """Begin with what a scheduler says of its requests."""
        now = self._clock()
        for heir in heirs:
            record = record_of(heir.request, heir.standing)
            self.entries[record.request_id] = Entry(record, now - record.age_s, now - record.running_s)

    def requests(self) -> list[LeftRequest]:
        """All of them as of now: those who run in the order of their dispatch, then the others."""
        now = self._clock()
        running = []
        waiting = []
        for entry in self.entries.values():
            record = entry.record
            record.age_s = max(0.0, now - entry.arrived_s)
            if record.backend is None:
                waiting.append(record)
            else:
                record.running_s = max(0.0, now - entry.dispatched_s)
                running.append((entry.dispatched_s, record))
        running.sort(key=lambda each: each[0])
        return [record for _, record in running] + waiting

    def happened(self, event: Event) -> Occurrence | None:
        """Follow an event; what to say of it, None if it is nobody's here."""
        if isinstance(event, Arrived):
            record = record_of(event.request, None)
            now = self._clock()
            self.entries[record.request_id] = Entry(record, now, now)
            return Occurrence(kind="arrived", request_id=record.request_id, arrival=record)
        said = occurrence_of(event)
        entry = None if said is None else self.entries.get(said.request_id)
        if said is None or entry is None:
            return None
        record = entry.record
        match said.kind:
            case "measured":
                if record.input_tokens == record.measured_tokens:
                    record.measured_tokens = said.tokens
                    if record.is_charged:
                        record.paid_in = said.tokens * record.num_sequences
                record.input_tokens = said.tokens
            case "progressed":
                record.output_tokens += said.tokens
                record.slice_output += said.tokens
                record.paid_out = max(record.paid_out, record.output_tokens)
                record.has_first_token = True
                record.is_suspect = False
            case "slice_ended" | "preempted":
                self._wait(entry, said)
            case "failed" if said.is_retryable:
                record.is_suspect = said.is_suspect
                self._wait(entry, said)
            case _:
                del self.entries[said.request_id]
        return said

    def _wait(self, entry: Entry, said: Occurrence) -> None:
        record = entry.record
        record.output_tokens = max(0, record.output_tokens - said.dropped_tokens)
        record.input_tokens = said.next_prompt_tokens or record.input_tokens
        record.is_resumed = True
        record.is_preempting = False
        record.backend = None
        record.running_s = 0.0
        record.slice_tokens = record.slice_output = 0
        record.has_first_token = False

    def told(self, order: Order) -> None:
        """Follow a decision."""
        entry = self.entries.get(order.request_id)
        if entry is None:
            return
        record = entry.record
        match order.kind:
            case "dispatch":
                entry.dispatched_s = self._clock()
                record.backend = order.backend
                record.slice_tokens = order.slice_tokens
                record.slice_output = 0
                record.has_first_token = False
                record.segment = order.segment + 1
                record.is_charged = True
                record.paid_in = max(record.paid_in, record.measured_tokens * record.num_sequences)
            case "preempt":
                record.is_preempting = True
                record.num_preempted += 1
            case "reject" | "expire":
                del self.entries[order.request_id]


# --- between the wire and the core ----------------------------------------------------------------------------------


def record_of(spec: RequestSpec, standing: Standing | None) -> LeftRequest:
    """The record of a request; without ``standing`` it has just arrived."""
    record = LeftRequest(
        request_id=spec.request_id,
        tenant=spec.tenant,
        key=spec.key,
        tier=spec.tier,
        prompt_tokens=spec.prompt_tokens,
        max_new_tokens=spec.max_new_tokens,
        predicted_output_tokens=spec.predicted_output_tokens,
        preferred_slice_tokens=spec.slice_tokens,
        is_sliceable=spec.is_sliceable,
        num_sequences=spec.num_sequences,
        agent_id=spec.agent_id,
        agent_cost=spec.agent_cost,
        prefix=list(spec.prefix),
        quantiles=None if spec.quantiles is None else list(spec.quantiles),
        grammar=spec.grammar,
        stall_s=spec.stall_s,
        was_suspect=spec.is_suspect,
        prompt_bytes=spec.prompt_bytes,
        measured_tokens=spec.prompt_tokens,
        input_tokens=spec.prompt_tokens,
        is_suspect=spec.is_suspect,
    )
    if standing is not None:
        record.measured_tokens = standing.prompt_tokens
        for name in _SAME:
            setattr(record, name, getattr(standing, name))
    return record


_SAME = (
    "age_s",
    "input_tokens",
    "output_tokens",
    "paid_in",
    "paid_out",
    "paid_cached",
    "is_charged",
    "has_paid_stall",
    "is_suspect",
    "segment",
    "num_preempted",
    "is_resumed",
    "backend",
    "running_s",
    "slice_tokens",
    "slice_output",
    "has_first_token",
    "is_preempting",
)


def event_id(spec: RequestSpec) -> str:
    """The event of the books that a request belongs to: several where a call has several prompts (``app._submit``)."""
    return spec.request_id.partition("-")[0]


def spec_of(record: LeftRequest) -> RequestSpec:
    """The request as it arrived."""
    return RequestSpec(
        request_id=RequestId(record.request_id),
        tenant=TenantId(record.tenant),
        key=KeyId(record.key),
        tier=TierName(record.tier),
        prompt_tokens=record.prompt_tokens,
        max_new_tokens=record.max_new_tokens,
        predicted_output_tokens=record.predicted_output_tokens,
        slice_tokens=record.preferred_slice_tokens,
        is_sliceable=record.is_sliceable,
        num_sequences=record.num_sequences,
        agent_id=record.agent_id,
        agent_cost=record.agent_cost,
        prefix=tuple(record.prefix),
        quantiles=None if record.quantiles is None else tuple(record.quantiles),
        grammar=record.grammar,
        stall_s=record.stall_s,
        is_suspect=record.was_suspect,
        prompt_bytes=record.prompt_bytes,
    )


def heir_of(record: LeftRequest) -> Heir:
    """The request as a successor takes it in."""
    return Heir(
        request=spec_of(record),
        standing=Standing(
            request_id=RequestId(record.request_id),
            age_s=record.age_s,
            prompt_tokens=record.measured_tokens,
            input_tokens=record.input_tokens,
            output_tokens=record.output_tokens,
            paid_in=record.paid_in,
            paid_out=record.paid_out,
            paid_cached=record.paid_cached,
            is_charged=record.is_charged,
            has_paid_stall=record.has_paid_stall,
            is_suspect=record.is_suspect,
            segment=record.segment,
            num_preempted=record.num_preempted,
            is_resumed=record.is_resumed,
            backend=None if record.backend is None else BackendId(record.backend),
            running_s=record.running_s,
            slice_tokens=record.slice_tokens,
            slice_output=record.slice_output,
            has_first_token=record.has_first_token,
            is_preempting=record.is_preempting,
        ),
    )


def occurrence_of(event: Event) -> Occurrence | None:
    """An event in words; None for those that are of no request, and for arrivals (``record_of``)."""
    match event:
        case PromptMeasured():
            return Occurrence(kind="measured", request_id=event.request_id, tokens=event.prompt_tokens)
        case Progressed():
            return Occurrence(kind="progressed", request_id=event.request_id, tokens=event.output_tokens)
        case SliceEnded() | Preempted():
            return Occurrence(
                kind="slice_ended" if isinstance(event, SliceEnded) else "preempted",
                request_id=event.request_id,
                dropped_tokens=event.dropped_tokens,
                next_prompt_tokens=event.next_prompt_tokens,
            )
        case Finished():
            return Occurrence(kind="finished", request_id=event.request_id, is_upstream_over=event.is_upstream_over)
        case Failed():
            return Occurrence(
                kind="failed",
                request_id=event.request_id,
                is_retryable=event.is_retryable,
                dropped_tokens=event.dropped_tokens,
                next_prompt_tokens=event.next_prompt_tokens,
                is_suspect=event.is_suspect,
            )
        case Cancelled():
            return Occurrence(kind="cancelled", request_id=event.request_id)
        case _:
            return None


def event_of(said: Occurrence) -> Event | None:
    """The event behind the words; None for one this version does not know."""
    request_id = RequestId(said.request_id)
    match said.kind:
        case "arrived" if said.arrival is not None:
            return Arrived(request=spec_of(said.arrival))
        case "measured":
            return PromptMeasured(request_id=request_id, prompt_tokens=said.tokens)
        case "progressed":
            return Progressed(request_id=request_id, output_tokens=said.tokens)
        case "slice_ended":
            return SliceEnded(
                request_id=request_id,
                dropped_tokens=said.dropped_tokens,
                next_prompt_tokens=said.next_prompt_tokens,
            )
        case "preempted":
            return Preempted(
                request_id=request_id,
                dropped_tokens=said.dropped_tokens,
                next_prompt_tokens=said.next_prompt_tokens,
            )
        case "finished":
            return Finished(request_id=request_id, is_upstream_over=said.is_upstream_over)
        case "failed":
            return Failed(
                request_id=request_id,
                is_retryable=said.is_retryable,
                dropped_tokens=said.dropped_tokens,
                next_prompt_tokens=said.next_prompt_tokens,
                is_suspect=said.is_suspect,
            )
        case "cancelled":
            return Cancelled(request_id=request_id)
        case _:
            return None


def order_of(action: Dispatch | Preempt | Reject | Expire) -> Order:
    """An action in words."""
    if isinstance(action, Dispatch):
        return Order(
            kind="dispatch",
            request_id=action.request_id,
            backend=action.backend,
            slice_tokens=action.slice_tokens,
            segment=action.segment,
            reason=action.reason,
        )
    if isinstance(action, Preempt):
        return Order(kind="preempt", request_id=action.request_id, backend=action.backend, reason=action.reason)
    return Order(
        kind="reject" if isinstance(action, Reject) else "expire",
        request_id=action.request_id,
        code=action.code.value,
        reason=action.detail,
        retry_after_s=action.retry_after_s,
    )


def action_of(order: Order) -> Action | None:
    """The action behind the words; None for ``end`` and for one this version does not know."""
    request_id = RequestId(order.request_id)
    match order.kind:
        case "dispatch":
            return Dispatch(request_id, BackendId(order.backend), order.slice_tokens, order.segment, order.reason)
        case "preempt":
            return Preempt(request_id=request_id, backend=BackendId(order.backend), reason=order.reason)
        case "reject" | "expire":
            try:
                code = RejectCode(order.code)
            except ValueError:
                code = RejectCode.NO_BACKEND
            kind = Reject if order.kind == "reject" else Expire
            return kind(request_id=request_id, code=code, detail=order.reason, retry_after_s=order.retry_after_s)
        case _:
            return None
