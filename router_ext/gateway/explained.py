"""Why requests of one pool waited: what the scheduler says, as it is booked and as an operator may read it here.

Live requests are asked for as they are. Of those that have ended the newest are remembered, as many as the scheduler
remembers; everything older is in the control plane's books.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

from router_ext.core.ids import RequestId
from router_ext.core.scheduler import Scheduler
from router_ext.core.timeline import Moment, Step, words
from router_ext.gateway.call import Call
from router_ext.gateway.own_view import own_view
from router_ext.gateway.refused import Refusals, Refused
from router_ext.wire.controlplane import LiveRequest, MomentRecord, ReasonRecord

_REMEMBERED = 1_024

_ENDS = {
    "completed": Step.FINISHED,
    "failed": Step.FAILED,
    "cancelled": Step.CANCELLED,
    "expired": Step.EXPIRED,
}


_SAME_ID = 16
"""Requests told of one id; clients may send the same one again and again."""


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A request as far as it can be named: ids, whose it is, what became of it (``outcome`` None while it lives).

    ``tier_reason``: why its tier is lower than it would have been, if it is.

    Times are seconds since it arrived, None if it did not come so far. ``queue_s``: from there to its first dispatch,
    less ``overhead_s``, the router's own work before the queue. ``total_s``: to its end, or to now.
    """

    request: str
    event: str
    tenant: str
    tier: str
    tier_reason: str | None
    arrived_at_us: int
    outcome: str | None
    code: str | None
    finish_reason: str | None
    predicted_tokens: int | None
    prompt_tokens: int
    output_tokens: int
    max_new_tokens: int | None
    slices: int
    preemptions: int
    recomputed_tokens: int
    overhead_s: float
    queue_s: float | None
    first_token_s: float | None
    total_s: float


class Explanations:
    """See the module. ``refusals``: those of the pool's requests that were never queued."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.refusals = Refusals()
        self._scheduler = scheduler
        self._ended: OrderedDict[str, Known] = OrderedDict()
        self._live: dict[str, Call] = {}
        # Event ids by the id the client knows, oldest first.
        self._events: dict[str, list[str]] = {}

    def reasons(self, event: str) -> list[ReasonRecord]:
        """Why the first generation of this call waited, the longest cause first."""
        return [
            ReasonRecord(cause=r.cause, text=r.text, seconds=r.seconds, counts=dict(r.counts))
            for r in self._scheduler.explain(RequestId(event))
        ]

    def timeline(self, event: str) -> list[MomentRecord]:
        """What became of it, step by step."""
        return [_moment(moment) for moment in self._scheduler.timeline(RequestId(event))]

    def whole_timeline(self, call: Call, outcome: str, now: float) -> list[MomentRecord]:
        """The same of a call that is ending just now: the scheduler may hear of it a moment later."""
        moments = self.timeline(call.slot.start.event)
        if moments and moments[-1].step not in _ENDS.values():
            step = _ENDS.get(outcome, Step.FAILED)
            at_s = round(max(moments[-1].at_s, now - call.validated_s), 6)
            moments.append(MomentRecord(at_s=at_s, step=step, text=words(step), tokens=call.output_tokens))
        return moments

    def began(self, call: Call) -> None:
        """A call is about to be queued."""
        start = call.slot.start
        self._live[start.event] = call
        self._events.setdefault(start.request, []).append(start.event)

    def dropped(self, call: Call) -> None:
        """Forget a call that was not queued, or whose end met a defect."""
        start = call.slot.start
        if self._live.pop(start.event, None) is not None:
            self._forget(start.request, start.event)

    def ended(self, call: Call, *, outcome: str, code: str | None, now: float) -> None:
        """Remember a call that has ended."""
        known = _known(call, outcome, code, now)
        self._live.pop(known.event, None)
        self._ended[known.event] = known
        if len(self._ended) > _REMEMBERED:
            _, oldest = self._ended.popitem(last=False)
            self._forget(oldest.request, oldest.event)

    def _forget(self, request: str, event: str) -> None:
        events = self._events.get(request)
        if events is not None and event in events:
            events.remove(event)
            if not events:
                del self._events[request]

    def newest(self, limit: int, now: float) -> list[dict[str, Any]]:
        """Live requests, then those that have ended, newest first; without their explanations."""
        live = heapq.nlargest(limit, self._live.values(), key=lambda call: call.slot.start.arrived_at_us)
        known = [_known(call, None, None, now) for call in live]
        return [self._line(each) for each in [*known, *islice(reversed(self._ended.values()), limit)][:limit]]

    def oldest(self, live: Iterable[Call], limit: int) -> list[LiveRequest]:
        """Live requests that arrived first, and where they run. O(live log limit)."""
        calls = heapq.nsmallest(limit, live, key=lambda call: call.slot.start.arrived_at_us)
        return [
            LiveRequest(
                request=call.slot.start.request,
                event=call.slot.start.event,
                tenant=call.slot.start.tenant,
                key=call.slot.start.key,
                tier=call.tier,
                arrived_at_us=call.slot.start.arrived_at_us,
                output_tokens=call.output_tokens,
                backend=self._where(call.slot.start.event),
            )
            for call in calls
        ]

    def _where(self, event: str) -> str | None:
        moments = self._scheduler.timeline(RequestId(event))
        if not moments or moments[-1].step not in (Step.DISPATCHED, Step.FIRST_TOKEN):
            return None
        return next((m.backend for m in reversed(moments) if m.backend is not None), None)

    def find(self, wanted: str, now: float) -> Iterator[dict[str, Any]]:
        """Everything of the requests with this id, newest first, for an operator."""
        for known in self._named(wanted, now):
            yield {
                **self._line(known),
                "reasons": [_plain(reason) for reason in self.reasons(known.event)],
                "timeline": [_plain(moment) for moment in self.timeline(known.event)],
            }
        yield from map(refused_line, self.refusals.find(wanted))

    def knows(self, wanted: str) -> bool:
        """Whether any request that was queued, of whatever tenant, has this id."""
        return wanted in self._events or wanted in self._live or wanted in self._ended

    def find_own(self, wanted: str, tenant: str, now: float) -> Iterator[dict[str, Any]]:
        """The same as their own tenant may read it; nothing of other tenants' requests."""
        for known in self._named(wanted, now):
            if known.tenant == tenant:
                event = RequestId(known.event)
                yield own_view(
                    known,
                    reasons=self._scheduler.explain(event),
                    moments=self.timeline(known.event),
                    in_line=self._scheduler.in_line(event),
                )

    def _named(self, wanted: str, now: float) -> Iterator[Known]:
        """By what their client got as ``x-request-id``, or by the id of the books; newest first."""
        for event in [*reversed(self._events.get(wanted, ())), wanted][:_SAME_ID]:
            call, known = self._live.get(event), self._ended.get(event)
            if call is not None:
                yield _known(call, None, None, now)
            elif known is not None:
                yield known

    def _line(self, known: Known) -> dict[str, Any]:
        steps = self._scheduler.timeline(RequestId(known.event))
        return {
            "request": known.request,
            "event": known.event,
            "tenant": known.tenant,
            "tier": known.tier,
            "tier_reason": known.tier_reason,
            "arrived_at_us": known.arrived_at_us,
            "is_live": known.outcome is None,
            "outcome": known.outcome,
            "error_code": known.code,
            "predicted_tokens": known.predicted_tokens,
            "output_tokens": known.output_tokens,
            "last_step": steps[-1].step.value if steps else None,
        }


def refused_line(refused: Refused) -> dict[str, Any]:
    """A refused request for an operator. Its message is its client's alone: it may quote what that wrote."""
    return {
        "request": refused.request,
        "event": refused.event,
        "tenant": refused.tenant,
        "tier": refused.tier,
        "tier_reason": refused.tier_reason,
        "arrived_at_us": refused.arrived_at_us,
        "is_live": False,
        "outcome": "refused",
        "error_code": refused.code,
        "predicted_tokens": None,
        "output_tokens": 0,
        "last_step": None,
        "reasons": [],
        "timeline": [],
    }


def _known(call: Call, outcome: str | None, code: str | None, now: float) -> Known:
    start = call.slot.start
    return Known(
        request=start.request,
        event=start.event,
        tenant=start.tenant,
        tier=call.tier,
        tier_reason=call.demotion,
        arrived_at_us=start.arrived_at_us,
        outcome=outcome,
        code=code,
        finish_reason=call.finish_reason,
        predicted_tokens=call.predicted_tokens,
        prompt_tokens=call.prompt_tokens,
        output_tokens=call.output_tokens,
        max_new_tokens=start.max_new_tokens,
        slices=call.segments,
        preemptions=call.preemptions,
        recomputed_tokens=call.recomputed_tokens,
        overhead_s=call.overhead_s,
        queue_s=None if call.dispatched_s is None else call.dispatched_s - call.validated_s,
        first_token_s=None if call.first_token_s is None else call.first_token_s - call.arrived_s,
        total_s=now - call.arrived_s,
    )


def _moment(moment: Moment) -> MomentRecord:
    return MomentRecord(
        at_s=round(moment.at_s, 6),
        step=moment.step.value,
        text=moment.text,
        backend=moment.backend,
        tokens=moment.tokens,
    )


def _plain(record: ReasonRecord | MomentRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}
