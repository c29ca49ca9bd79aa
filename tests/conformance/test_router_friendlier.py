"""What trips users of a TGI means on the router what they meant, and trips a TGI indeed; the documentation lists it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.documented import PAGE, documented
from support.exchange import call, events
from support.friendlier import Example, examples
from support.modelserver import ModelServer, model_server
from support.playback import recorded
from support.routers import Setup, backend, router
from support.tenants import Tenant, new_tenant

from router_ext.gateway.dialects import decode_request
from router_ext.gateway.friendly import JSON_OBJECT
from router_ext.gateway.generation import ModelLimits
from router_ext.guard.automaton import states_of

EXAMPLES = list(examples())
LIMITS = ModelLimits(model_id="m", max_input_tokens=2_048, max_total_tokens=4_096)


def name(example: Example) -> str:
    return f"{example.path} {example.what}"


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with model_server("--sim-step-ms", "0.2", "--sim-mean-tokens", "0") as running:
        yield running


@pytest.fixture(scope="module")
def tenant(server: ModelServer) -> Iterator[Tenant]:
    with router(Setup(backends=[backend(server.port)])) as running:
        yield new_tenant(running)


def text_of(answer: bytes) -> Any:
    """What was generated, and how it ended."""
    if answer.startswith(b"data: "):
        chunks = [event for event in events(answer) if event != "[DONE]"]
        return [
            (c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) if c["choices"] else "usage" for c in chunks
        ]
    data = json.loads(answer)
    data = data[0] if isinstance(data, list) else data
    if "choices" in data:
        return [{k: v for k, v in choice.items() if k != "index"} for choice in data["choices"]]
    return data


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_it_is_decoded_as_what_it_means(example: Example) -> None:
    found, meant = (
        decode_request(example.path, "application/json", json.dumps(body).encode(), LIMITS)
        for body in (example.body, example.meant)
    )
    assert found == meant


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_it_trips_a_tgi_and_not_the_router(server: ModelServer, tenant: Tenant, example: Example) -> None:
    status, _, _ = call(server.port, "POST", example.path, example.body)
    assert status == (200 if example.is_accepted else 422)
    status, _, direct = call(server.port, "POST", example.path, example.meant)
    assert status == 200, direct
    status, _, routed = call(tenant.router.port, "POST", example.path, example.body, headers=tenant.headers)
    assert status == 200, routed
    assert text_of(routed) == text_of(direct)


def test_a_presence_penalty_of_0_changes_what_a_tgi_says() -> None:
    chats = recorded("chat_and_completions")
    plain, penalised = ("".join(p for _, p in chats[n]["response"]["body"]) for n in ("plain", "presence_penalty 0"))
    assert not text_of(penalised.encode())[0]["message"]["content"].startswith(
        text_of(plain.encode())[0]["message"]["content"]
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logit_bias": {"50": 1}}, "logit_bias"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"top_p": 1.1}, "top_p"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(tenant: Tenant, body: dict[str, Any], param: str) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], **body}
    status, _, answer = call(tenant.router.port, "POST", "/v1/chat/completions", chat, headers=tenant.headers)
    assert (status, json.loads(answer)["error"]["param"]) == (400, param)


# --- the object of any shape -----------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
scalars = st.none() | st.booleans() | st.integers(-(10**6), 10**6) | texts
objects = st.dictionaries(texts, scalars | st.dictionaries(texts, scalars, max_size=3) | st.lists(scalars, max_size=3))


@given(value=objects, is_compact=st.booleans())
def test_every_object_of_two_levels_can_be_written(value: Any, is_compact: bool) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":") if is_compact else (", ", ": "))
    if "\\u" not in text and "\x7f" not in text:
        assert re.fullmatch(JSON_OBJECT, text)


def test_it_costs_a_backend_what_the_documentation_says() -> None:
    assert states_of(JSON_OBJECT) == 87


@given(text=st.from_regex(JSON_OBJECT, fullmatch=True))
def test_whatever_it_lets_through_is_a_json_object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "text", ["[]", "{}x", '{"a":01}', '{"a":}', "{'a':1}", '{"a":1,}', '{"a":"\n"}', '{"a":{"b":{}}}']
)
def test_what_is_no_such_object_is_not_let_through(text: str) -> None:
    assert not re.fullmatch(JSON_OBJECT, text)


def test_the_documentation_lists_every_case() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert documented(page) == page
