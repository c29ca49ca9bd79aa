"""How a call ended, in the log and as the attributes of its span. Ids, counts and times; nothing that a user wrote."""

from __future__ import annotations

from typing import Any

from router_ext.gateway.call import Call
from router_ext.gateway.generation import Dialect
from router_ext.obs.logs import has_request_lines, request_ended
from router_ext.obs.tracing import Value

PROVIDER = "huggingface.tgi"


def tell_end(call: Call, *, model: str, outcome: str, code: str | None, now: float) -> None:
    """Write the one line of a call and end its span."""
    trace = call.trace
    if trace is not None and trace.is_recording:
        operation = "chat" if call.request.dialect in (Dialect.CHAT, Dialect.RESPONSES) else "text_completion"
        is_good = outcome == "completed"
        attributes = _attributes(call, operation, model, outcome)
        trace.end(attributes, name=f"{operation} {model}", error=None if is_good else code or outcome)
    if has_request_lines():
        request_ended(_fields(call, model=model, outcome=outcome, code=code, now=now))


def _attributes(call: Call, operation: str, model: str, outcome: str) -> dict[str, Value | list[str]]:
    start = call.slot.start
    attributes: dict[str, Value | list[str]] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": call.prompt_tokens,
        "gen_ai.usage.output_tokens": call.output_tokens,
        "fairlane.request": start.request,
        "fairlane.event": start.event,
        "fairlane.tenant": start.tenant,
        "fairlane.tier": call.tier,
        "fairlane.outcome": outcome,
        "http.response.status_code": call.status,
        "fairlane.slices": call.segments,
        "fairlane.preemptions": call.preemptions,
        "fairlane.overhead_ms": call.overhead_s * 1_000,
    }
    if start.max_new_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = start.max_new_tokens
    if call.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = [call.finish_reason]
    if call.predicted_tokens is not None:
        attributes["fairlane.predicted_tokens"] = call.predicted_tokens
    if call.dispatched_s is not None:
        attributes["fairlane.queue_ms"] = (call.dispatched_s - call.validated_s) * 1_000
    if call.first_token_s is not None:
        attributes["gen_ai.server.time_to_first_token"] = call.first_token_s - call.arrived_s
    return attributes


def _fields(call: Call, *, model: str, outcome: str, code: str | None, now: float) -> dict[str, Any]:
    start = call.slot.start
    return {
        "request": start.request,
        "trace": None if call.trace is None else call.trace.trace_id,
        "id": start.event,
        "client": call.client.peer.address,
        "proto": call.client.peer.proto,
        "tenant": start.tenant,
        "key": start.key,
        "model": model,
        "tier": call.tier,
        "dialect": start.dialect,
        "outcome": outcome,
        "status": call.status,
        "code": code,
        "finish_reason": call.finish_reason,
        "prompt_tokens": call.prompt_tokens,
        "output_tokens": call.output_tokens,
        "slices": call.segments,
        "preemptions": call.preemptions,
        "backends": call.backends,
        "overhead_ms": round(call.overhead_s * 1_000, 3),
        "queue_ms": _ms(call.dispatched_s, call.validated_s),
        "ttft_ms": _ms(call.first_token_s, call.arrived_s),
        "duration_ms": _ms(now, call.arrived_s),
    }


def _ms(at_s: float | None, since_s: float) -> float | None:
    return None if at_s is None else round((at_s - since_s) * 1_000, 3)
