"""Why requests of one pool waited: what the scheduler says, as it is booked and as an operator may read it here.

Live requests are asked for as they are. Of those that have ended the newest are remembered, as many as the scheduler
remembers; everything older is in the control plane's books.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from router_ext.core.ids import RequestId
from router_ext.core.scheduler import Scheduler
from router_ext.core.timeline import Moment, Step, words
from router_ext.gateway.call import Call
from router_ext.wire.controlplane import LiveRequest, MomentRecord, ReasonRecord

_REMEMBERED = 1_024

_ENDS = {
    "completed": Step.FINISHED,
    "failed": Step.FAILED,
    "cancelled": Step.CANCELLED,
    "expired": Step.EXPIRED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A request as far as it can be named: ids, whose it is, what became of it (None while it lives)."""

    request: str
    event: str
    tenant: str
    tier: str
    arrived_at_us: int
    outcome: str | None
    code: str | None
    predicted_tokens: int | None
    output_tokens: int


class Explanations:
    """See the module."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._ended: OrderedDict[str, Known] = OrderedDict()

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

    def ended(self, call: Call, *, outcome: str, code: str | None) -> None:
        """Remember a call that has ended."""
        known = _known(call, outcome, code)
        self._ended[known.event] = known
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def newest(self, live: Iterable[Call], limit: int) -> list[dict[str, Any]]:
        """Live requests, then those that have ended, newest first; without their explanations."""
        now = sorted((_known(call, None, None) for call in live), key=lambda known: -known.arrived_at_us)
        return [self._line(known) for known in [*now, *reversed(self._ended.values())][:limit]]

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

    def find(self, live: Iterable[Call], wanted: str) -> Iterator[dict[str, Any]]:
        """Everything of the requests with this id: what their client got as ``x-request-id``, or that of the books."""
        alive = [_known(call, None, None) for call in live]
        for known in [*alive, *reversed(self._ended.values())]:
            if wanted in (known.request, known.event):
                yield {
                    **self._line(known),
                    "reasons": [_plain(reason) for reason in self.reasons(known.event)],
                    "timeline": [_plain(moment) for moment in self.timeline(known.event)],
                }

    def _line(self, known: Known) -> dict[str, Any]:
        steps = self._scheduler.timeline(RequestId(known.event))
        return {
            "request": known.request,
            "event": known.event,
            "tenant": known.tenant,
            "tier": known.tier,
            "arrived_at_us": known.arrived_at_us,
            "is_live": known.outcome is None,
            "outcome": known.outcome,
            "error_code": known.code,
            "predicted_tokens": known.predicted_tokens,
            "output_tokens": known.output_tokens,
            "last_step": steps[-1].step.value if steps else None,
        }


def _known(call: Call, outcome: str | None, code: str | None) -> Known:
    start = call.slot.start
    return Known(
        request=start.request,
        event=start.event,
        tenant=start.tenant,
        tier=call.tier,
        arrived_at_us=start.arrived_at_us,
        outcome=outcome,
        code=code,
        predicted_tokens=call.predicted_tokens,
        output_tokens=call.output_tokens,
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
