"""What cannot be resumed is served in one piece, is booked as such, and is counted by its reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.exchange import call
from support.routers import RouterProcess
from support.tenants import Tenant

GRAMMAR = {"type": "regex", "value": "[a-z]{3,5}"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}


def native(**parameters: Any) -> tuple[str, Any]:
    return "/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": 6, **parameters}}


def chat(content: Any = "Hi", **fields: Any) -> tuple[str, Any]:
    body = {"model": "main", "messages": [{"role": "user", "content": content}], "max_tokens": 40, **fields}
    return "/v1/chat/completions", body


@pytest.mark.parametrize(
    ("reason", "request_"),
    [
        ("grammar", native(grammar=GRAMMAR)),
        ("best_of", native(best_of=2, do_sample=True)),
        ("decoder_input_details", native(decoder_input_details=True, details=True)),
        ("response_format", chat(response_format={"type": "json_object", "value": SCHEMA})),
        ("tools", chat(tools=TOOLS, tool_choice="required", temperature=0)),
        ("image", chat([{"type": "text", "text": "Hi"}, IMAGE])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_resumed_is_counted(
    shared_router: RouterProcess, tenant: Tenant, reason: str, request_: tuple[str, Any]
) -> None:
    before = shared_router.metric("fairlane_unresumable_requests_total", reason=reason)
    path, body = request_
    status, _, answer = call(shared_router.port, "POST", path, body, headers=tenant.headers)
    assert status == 200, json.loads(answer)
    (event,) = tenant.usage(1)
    assert (event.outcome, event.segments, event.resume_class) == ("completed", 1, "never")
    assert shared_router.metric("fairlane_unresumable_requests_total", reason=reason) == before + 1


@pytest.mark.parametrize("request_", [native(), chat(), chat(tools=TOOLS, tool_choice="none")])
def test_plain_requests_are_exact_and_not_counted(
    shared_router: RouterProcess, tenant: Tenant, request_: tuple[str, Any]
) -> None:
    before = shared_router.metric("fairlane_unresumable_requests_total")
    assert call(shared_router.port, "POST", request_[0], request_[1], headers=tenant.headers)[0] == 200
    (event,) = tenant.usage(1)
    assert event.resume_class == "exact"
    assert shared_router.metric("fairlane_unresumable_requests_total") == before
