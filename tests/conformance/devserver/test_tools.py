"""Chats with tools on the model engine, which calls one, declines, or is cut: what TGI makes of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.exchange import call, events, gauges
from support.modelserver import ModelServer, model_server

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
DROPPED = 'tgi_request_failure{err="dropped"}'


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    """One permit: whoever generates a second time must have given back the first."""
    with model_server("--sim-step-ms", "0.2", "--sim-mean-tokens", "16", "--max-concurrent-requests", "1") as found:
        yield found


def chat(number: int, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"Say OK {number}."}
    return {"messages": [message], "tools": [WEATHER], "max_tokens": 200, "temperature": 0.0, **fields}


def ask(server: ModelServer, body: dict[str, Any]) -> tuple[int, Any]:
    status, _, data = call(server.port, "POST", "/v1/chat/completions", body)
    return status, events(data) if body.get("stream") else json.loads(data)


@pytest.fixture(scope="module")
def outcomes(server: ModelServer) -> dict[int, dict[str, Any]]:
    """Messages by the number in the prompt."""
    found = {}
    for number in range(24):
        status, page = ask(server, chat(number))
        if status == 200:
            found[number] = page["choices"][0]["message"]
    return found


def declined(outcomes: dict[int, dict[str, Any]]) -> int:
    return next(number for number, message in outcomes.items() if "content" in message)


def called(outcomes: dict[int, dict[str, Any]]) -> int:
    return next(number for number, message in outcomes.items() if "tool_calls" in message)


def test_most_chats_call_the_tool_with_arguments_that_fit(outcomes: dict[int, dict[str, Any]]) -> None:
    calls = [message["tool_calls"] for message in outcomes.values() if "tool_calls" in message]
    assert len(calls) > len(outcomes) / 2
    for (each,) in calls:
        assert each["function"]["name"] == "get_weather"
        assert json.loads(each["function"]["arguments"]).keys() == {"city"}


def test_a_stream_has_the_same_call(server: ModelServer, outcomes: dict[int, dict[str, Any]]) -> None:
    number = called(outcomes)
    _, found = ask(server, chat(number, stream=True))
    pieces = [chunk["choices"][0]["delta"]["tool_calls"][0] for chunk in found[:-1]]
    assert found[-1] == "[DONE]"
    assert pieces[0]["function"]["name"] == "get_weather"
    text = "".join(piece["function"]["arguments"] for piece in pieces)
    (expected,) = outcomes[number]["tool_calls"]
    assert text.split('"')[-2] == json.loads(expected["function"]["arguments"])["city"]


def test_a_model_that_declines_generates_again_without_tools(
    server: ModelServer, outcomes: dict[int, dict[str, Any]]
) -> None:
    number = declined(outcomes)
    plain = chat(number)
    del plain["tools"]
    _, expected = ask(server, plain)
    before = gauges(server.port)
    _, page = ask(server, chat(number))
    after = gauges(server.port)
    assert page["choices"] == expected["choices"]
    assert page["usage"] == expected["usage"], "of the second generation"
    assert after["tgi_request_count"] - before["tgi_request_count"] == 3
    assert after["tgi_request_success"] - before["tgi_request_success"] == 2

    _, found = ask(server, chat(number, stream=True, stream_options={"include_usage": True}))
    assert found[-1] == "[DONE]"
    assert found[-2]["usage"] == expected["usage"]
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in found[:-2])
    assert text == expected["choices"][0]["message"]["content"]
    assert gauges(server.port)[DROPPED] - after.get(DROPPED, 0) == 1, "the first generation has no reader any more"


def test_a_call_that_is_cut_is_an_error_of_the_tool(server: ModelServer, outcomes: dict[int, dict[str, Any]]) -> None:
    body = chat(called(outcomes), max_tokens=9)
    status, answer = ask(server, body)
    assert (status, answer["error_type"]) == (422, "tool_error")
    assert answer["error"].startswith("Tool error: Failed to parse generated text: ")
    assert ask(server, {**body, "stream": True}) == (200, ["[DONE]"])


def test_the_id_of_a_streamed_call_counts_the_calls_before(
    server: ModelServer, outcomes: dict[int, dict[str, Any]]
) -> None:
    before = {"id": "0", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    messages = [{"role": "assistant", "tool_calls": [before]}, {"role": "tool", "content": "sunny"}]
    for number in range(8):
        body = chat(number, stream=True, tool_choice="required")
        body["messages"] = [*body["messages"], *messages]
        _, found = ask(server, body)
        if len(found) > 1:
            assert found[0]["choices"][0]["delta"]["tool_calls"][0]["id"] == "1"
            return
    pytest.fail("no call among eight")


def test_a_grammar_kept_from_before_does_not_stall_again() -> None:
    grammar = {"type": "regex", "value": "[a-z]{2000}"}
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1, "grammar": grammar}}
    with model_server("--sim-step-ms", "1", "--sim-hazards", "--sim-time-scale", "20") as server:
        waited = [int(call(server.port, "POST", "/generate", body)[1]["x-inference-time"]) >= 700 for _ in range(3)]
    assert waited == [True, False, False]
