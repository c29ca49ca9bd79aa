"""Every field of TGI's requests, OpenAI's that it takes included, does through the router what it does without it.

The same text, tokens, counts and ends as the model server gives directly, whole and streamed. Penalties and the
watermark change nothing in the model engine; that they are sent is seen in what the backend is asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.exchange import call, events
from support.modelserver import ModelServer, model_server
from support.routers import Setup, backend, router
from support.tenants import Tenant, new_tenant

from router_ext.gateway.continuation import Continuation
from router_ext.gateway.dialects import decode_request
from router_ext.gateway.generation import ModelLimits

LIMITS = ModelLimits(model_id="m", max_input_tokens=2_048, max_total_tokens=4_096)
PROMPT = "Count: 1, 2, 3,"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "now", "description": "The time", "parameters": SCHEMA}}
CALL = {"id": "0", "type": "function", "function": {"name": "now", "arguments": '{"n":1}'}}
PICTURE = "data:image/png;base64,iVBORw0KGgo="
USER = {"role": "user", "content": "Name three colours."}

NATIVE: list[dict[str, Any]] = [
    {},
    {"best_of": 1},
    {"best_of": 2, "do_sample": True, "details": True},
    {"temperature": 0.7, "seed": 5},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": -0.5},
    {"top_k": 3, "seed": 5},
    {"top_p": 0.9, "seed": 5},
    {"typical_p": 0.9, "seed": 5},
    {"do_sample": True, "seed": (1 << 64) - 1, "details": True},
    {"max_new_tokens": None},
    {"max_new_tokens": 1},
    {"return_full_text": True},
    {"return_full_text": False},
    {"stop": [" 4", ","]},
    {"stop": []},
    {"truncate": 3, "details": True},
    {"watermark": True},
    {"details": True},
    {"decoder_input_details": True},
    {"decoder_input_details": True, "details": True, "top_n_tokens": 2, "truncate": 4},
    {"top_n_tokens": 2},
    {"top_n_tokens": 5, "details": True},
    {"grammar": {"type": "regex", "value": "[0-9]{4}-[0-9]{2}"}},
    {"grammar": {"type": "regex", "value": ""}},
    {"grammar": {"type": "json", "value": SCHEMA}, "details": True, "max_new_tokens": 40},
    {"grammar": {"type": "json_object", "value": json.dumps(SCHEMA)}, "max_new_tokens": 40, "return_full_text": True},
    {"grammar": {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, "max_new_tokens": 40},
    {"adapter_id": "nobody"},
    {"nonsense": 1},
]
CHAT: list[dict[str, Any]] = [
    {},
    {"messages": [{"role": "system", "content": "Be brief."}, {**USER, "name": "alice"}], "max_tokens": 12},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Name "}, {"type": "text", "text": "one."}]}]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE, "detail": "low"}}]}
        ]
    },
    {
        "messages": [
            USER,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "12", "tool_call_id": "0"},
        ]
    },
    {"messages": [USER, {"role": "assistant", "content": "Red, green and"}]},
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"logprobs": False, "top_logprobs": 3},
    {"max_tokens": None},
    {"max_tokens": ..., "max_completion_tokens": 5},
    {"n": 1},
    {"n": 2, "logit_bias": [0.5], "user": "x", "parallel_tool_calls": False, "metadata": {"a": "b"}},
    {"stop": [","]},
    {"temperature": 0.7, "seed": 5},
    {"temperature": None, "seed": 5},
    {"temperature": 0.7, "top_p": 0.9, "seed": 5},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": "now"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "now"}}, "logprobs": True},
    {"tools": [TOOL], "tool_choice": "required", "tool_prompt": "Call something."},
    {"response_format": {"type": "json", "value": SCHEMA}},
    {"response_format": {"type": "json_object", "value": SCHEMA}, "logprobs": True, "top_logprobs": 2},
    {"response_format": {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}},
    {"response_format": {"type": "regex", "value": "(yes|no)"}, "stop": ["o"]},
    {"guideline": "No colours."},
    {"model": "tgi"},
]
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"prompt": [PROMPT, "The sky is"]},
    {"prompt": ["a", "b", "c", "d"], "max_tokens": 2},
    {"max_tokens": None},
    {"temperature": 0.7, "seed": 5},
    {"temperature": None, "top_p": 0.9, "seed": 5},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5},
    {"stop": [" 4"]},
    {"suffix": None, "model": "tgi"},
    {"echo": True, "n": 2, "logprobs": 1, "best_of": 2, "user": "x"},
]


def native(path: str) -> list[tuple[str, dict[str, Any]]]:
    base: dict[str, Any] = {"inputs": PROMPT}
    bodies: list[dict[str, Any]] = [{**base, "parameters": {"max_new_tokens": 7, **p}} for p in NATIVE]
    return [(path, body) for body in bodies]


def streamed(cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    return [(path, {**body, "stream": True}) for path, body in cases]


def streams(body: dict[str, Any]) -> bool:
    p = body.get("parameters", {})
    return p.get("best_of") in (None, 1) and not p.get("decoder_input_details")


def openai(path: str, base: dict[str, Any], changes: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    bodies = [{**base, "temperature": 0.0, **change} for change in changes]
    return [(path, {name: value for name, value in body.items() if value is not ...}) for body in bodies]


CHATS = openai("/v1/chat/completions", {"messages": [USER], "max_tokens": 40}, CHAT)
TEXTS = openai("/v1/completions", {"prompt": PROMPT, "max_tokens": 7}, COMPLETIONS)
ALL = [
    *native("/generate"),
    *native("/"),
    *[case for case in native("/generate_stream") if streams(case[1])],
    *streamed([case for case in native("/") if streams(case[1])]),
    *CHATS,
    *streamed(CHATS),
    *streamed([(path, {**body, "stream_options": {"include_usage": True}}) for path, body in CHATS[:1] + CHATS[19:21]]),
    *TEXTS,
    *streamed(TEXTS),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    limits = ("--max-input-tokens", "250", "--max-total-tokens", "300")
    with model_server("--sim-step-ms", "0.2", "--sim-mean-tokens", "0", *limits) as running:
        yield running


@pytest.fixture(scope="module")
def tenant(server: ModelServer) -> Iterator[Tenant]:
    with router(Setup(backends=[backend(server.port)])) as running:
        yield new_tenant(running)


def has_seed(body: dict[str, Any]) -> bool:
    return (body.get("parameters") or body).get("seed") is not None


def answer_of(body: bytes, headers: dict[str, str], *, is_sampled: bool) -> Any:
    """Everything a client is told, but for the time; without the words where each run draws its own."""
    if headers["content-type"].startswith("text/event-stream"):
        told = [_plain(event, is_sampled) for event in events(body)]
        # Streams of several prompts run side by side.
        return sorted(told, key=lambda event: event["choices"][0]["index"] if _has_index(event) else 1 << 30)
    counts = {name: headers.get(name) for name in ("x-prompt-tokens", "x-generated-tokens", "x-compute-characters")}
    data = json.loads(body)
    if isinstance(data, dict) and data.get("object") == "text_completion":
        data["choices"].sort(key=lambda choice: choice["index"])
    return counts, _plain(data, is_sampled)


def _has_index(event: Any) -> bool:
    return isinstance(event, dict) and event.get("object") == "text_completion"


def _plain(value: Any, is_sampled: bool) -> Any:
    if isinstance(value, dict):
        left = {"created"} | ({"seed", "generated_text", "text", "id", "logprob", "special"} if is_sampled else set())
        return {k: _plain(v, is_sampled) for k, v in value.items() if k not in left}
    return [_plain(item, is_sampled) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("path", "body"), ALL, ids=[f"{path} {json.dumps(body)[:150]}" for path, body in ALL])
def test_a_field_does_what_it_does_without_a_router(
    server: ModelServer, tenant: Tenant, path: str, body: dict[str, Any]
) -> None:
    status, headers, direct = call(server.port, "POST", path, body)
    assert status == 200, direct
    status, found, routed = call(tenant.router.port, "POST", path, body, headers=tenant.headers)
    assert status == 200, routed
    is_sampled = bool((body.get("parameters") or {}).get("do_sample")) and not has_seed(body)
    assert answer_of(routed, found, is_sampled=is_sampled) == answer_of(direct, headers, is_sampled=is_sampled)


def test_what_changes_no_text_here_is_sent() -> None:
    """Numbers too come upstream as they were written."""
    p = {"repetition_penalty": 1.3, "frequency_penalty": -0.5, "watermark": True, "adapter_id": "nobody", "top_k": 3}
    p |= {
        "temperature": 0.1,
        "top_p": 0.9,
        "typical_p": 0.95,
        "seed": 5,
        "truncate": 3,
        "top_n_tokens": 2,
        "stop": ["x"],
    }
    chat = {"messages": [USER], "presence_penalty": -0.5, "frequency_penalty": 0.5, "top_logprobs": 1, "temperature": 2}
    text = {"prompt": PROMPT, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "temperature": 2, "top_p": 0.9}
    wanted_chat = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "top_n_tokens": 1, "temperature": 2}
    for path, body, wanted in [
        ("/generate", {"inputs": PROMPT, "parameters": p}, {**p, "do_sample": False}),
        ("/v1/chat/completions", chat, {**wanted_chat, "do_sample": True, "seed": 1}),
        ("/v1/completions", text, {**text, "do_sample": True, "seed": 1}),
    ]:
        request = decode_request(path, "application/json", json.dumps(body).encode(), LIMITS)
        flow = Continuation.for_request(request, max_new_tokens=9, limits=LIMITS, base_seed=1, prompt=PROMPT)
        sent = json.loads(flow.next_slice(1_024))
        wanted = {k: v for k, v in wanted.items() if k != "prompt"}
        assert sent["parameters"] == {**wanted, "max_new_tokens": 9, "details": True, "return_full_text": False}


OF_TGI = {  # ``router/src/lib.rs``
    "GenerateParameters": (
        "best_of temperature repetition_penalty frequency_penalty top_k top_p typical_p do_sample max_new_tokens "
        "return_full_text stop truncate watermark details decoder_input_details seed top_n_tokens grammar adapter_id"
    ),
    "ChatRequest": (
        "model messages frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n "
        "presence_penalty stop stream seed temperature top_p tools tool_prompt tool_choice response_format guideline "
        "stream_options"
    ),
    "CompletionRequest": (
        "model prompt max_tokens temperature top_p stream seed suffix repetition_penalty frequency_penalty stop"
    ),
}


@pytest.mark.parametrize(
    ("name", "tried"),
    [
        ("GenerateParameters", [body["parameters"] for _, body in native("/generate")]),
        ("ChatRequest", [body for path, body in ALL if path == "/v1/chat/completions"]),
        ("CompletionRequest", [body for path, body in ALL if path == "/v1/completions"]),
    ],
)
def test_no_field_is_left_out(name: str, tried: list[dict[str, Any]]) -> None:
    assert set(OF_TGI[name].split()) <= {field for body in tried for field in body}
