"""A request as its own tenant may read it: the operator's explanation without anything that tells of others.

Other tenants are "others", without a name, an id or a number; backends are numbered in the order the request met them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from router_ext.core.explain import GATE_TEXT, Gate, Reason
from router_ext.core.in_line import InLine
from router_ext.gateway.refused import Refused
from router_ext.wire.controlplane import MomentRecord

if TYPE_CHECKING:
    from router_ext.gateway.explained import Known


def own_view(
    known: Known, *, reasons: Iterable[Reason], moments: Iterable[MomentRecord], in_line: InLine | None
) -> dict[str, Any]:
    """JSON of one request. ``in_line``: its place if it waits now."""
    state = "queued" if known.queue_s is None or in_line is not None else "running"
    return {
        "id": known.request,
        "event": known.event,
        "object": "fairlane.request",
        "arrived_at": _instant(known.arrived_at_us),
        "tier": known.tier,
        "tier_reason": known.tier_reason,
        "state": "ended" if known.outcome is not None else state,
        "outcome": known.outcome,
        "error_code": known.code,
        "finish_reason": known.finish_reason,
        "queue": None if known.outcome is not None or in_line is None else _place(in_line),
        "tokens": {
            "prompt": known.prompt_tokens,
            "output": known.output_tokens,
            "predicted_output": known.predicted_tokens,
            "max_output": known.max_new_tokens,
            "recomputed": known.recomputed_tokens,
        },
        "seconds": {
            "overhead": round(known.overhead_s, 6),
            "queue": _rounded(known.queue_s),
            "first_token": _rounded(known.first_token_s),
            "total": round(known.total_s, 6),
        },
        "slices": known.slices,
        "preemptions": known.preemptions,
        "waits": [_wait(reason) for reason in reasons],
        "timeline": _timeline(moments),
    }


def refused_view(refused: Refused) -> dict[str, Any]:
    """JSON of one that never waited: the fields of ``own_view``, and ``refusal`` as its client was told."""
    return {
        "id": refused.request,
        "event": refused.event,
        "object": "fairlane.request",
        "arrived_at": _instant(refused.arrived_at_us),
        "tier": refused.tier,
        "tier_reason": refused.tier_reason,
        "state": "ended",
        "outcome": "refused",
        "error_code": refused.code,
        "finish_reason": None,
        "queue": None,
        "tokens": dict.fromkeys(("prompt", "output", "predicted_output", "max_output", "recomputed")),
        "seconds": {"overhead": None, "queue": None, "first_token": None, "total": round(refused.total_s, 6)},
        "slices": 0,
        "preemptions": 0,
        "waits": [],
        "timeline": [],
        "refusal": {
            "status": refused.status,
            "message": refused.message,
            "retry_after_s": _rounded(refused.retry_after_s),
            "limits": refused.limits,
        },
    }


def _instant(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1e6, UTC).isoformat(timespec="microseconds")


def _place(line: InLine) -> dict[str, Any]:
    return {
        "position": None if line.is_aside else line.own_ahead + 1,
        "own_queued": line.own_queued,
        "wait_s": None if line.wait_s is None else round(line.wait_s, 1),
    }


def _wait(reason: Reason) -> dict[str, Any]:
    counts = {name: count for name, count in reason.counts.items() if name != "others"}
    return {"cause": reason.cause, "seconds": _rounded(reason.seconds), "counts": counts, "text": _text(reason)}


def _text(reason: Reason) -> str:
    """The two causes whose words count the requests of others, without the number."""
    own, others = reason.counts.get("own", 0), reason.counts.get("others", 0)
    if reason.cause == "wait":
        turns = reason.counts["turns"]
        went = f"{own} request{'' if own == 1 else 's'} of this tenant" + (" and some of others" if others else "")
        length = f"waited {reason.seconds or 0.0:.3f} s in {turns} turn{'' if turns == 1 else 's'}"
        return f"{length}; meanwhile {went} were dispatched"
    if reason.cause == "share" and others:
        return GATE_TEXT[Gate.SHARE]
    return reason.text


def _timeline(moments: Iterable[MomentRecord]) -> list[dict[str, Any]]:
    numbers: dict[str, int] = {}
    return [
        {
            "at_s": moment.at_s,
            "step": moment.step,
            "backend": moment.backend and f"backend {numbers.setdefault(moment.backend, len(numbers) + 1)}",
            "tokens": moment.tokens,
            "text": moment.text,
        }
        for moment in moments
    ]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
