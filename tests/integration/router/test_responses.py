"""``/v1/responses`` with OpenAI's own package, unchanged: plain text on the model server, tools and formats on the
recorded answers of a running TGI."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import APIError, BadRequestError, OpenAI
from pydantic import BaseModel
from support.exchange import call
from support.modelserver import ModelServer
from support.playback import Playback, playback, recorded
from support.routers import RouterProcess, Setup, backend, router
from support.tenants import Tenant, new_tenant

PROMPT = "What is the capital of France?"
CHAT = recorded("chat_and_completions")
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}


class Person(BaseModel):
    name: str


@pytest.fixture
def client(tenant: Tenant) -> Iterator[OpenAI]:
    with OpenAI(base_url=tenant.base + "/v1", api_key=tenant.key, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def tgi(server: ModelServer) -> Iterator[Playback]:
    with playback(server.base) as running:
        yield running


@pytest.fixture(scope="module")
def relaying(tgi: Playback) -> Iterator[RouterProcess]:
    with router(Setup(backends=[backend(tgi.port)])) as running:
        yield running


@pytest.fixture
def teller(relaying: RouterProcess) -> Iterator[OpenAI]:
    """A client whose answers are recorded ones."""
    tenant = new_tenant(relaying)
    with OpenAI(base_url=tenant.base + "/v1", api_key=tenant.key, max_retries=0) as made:
        yield made


def test_a_text_is_that_of_the_chat(client: OpenAI, tenant: Tenant) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(model="main", messages=messages, max_tokens=12, temperature=0)
    found = client.responses.create(
        model="main", instructions="Be brief.", input=PROMPT, max_output_tokens=12, temperature=0, metadata={"a": "b"}
    )
    assert found.output_text == chat.choices[0].message.content
    assert (found.status, found.incomplete_details and found.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert found.usage is not None
    assert chat.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    assert found.usage.total_tokens == chat.usage.total_tokens
    assert (found.model, found.metadata, found.instructions) == ("main", {"a": "b"}, "Be brief.")
    assert found.output[0].id.startswith("msg_")
    first, second = tenant.usage(2)
    assert (first.prompt_tokens, first.output_tokens) == (second.prompt_tokens, second.output_tokens)
    assert second.dialect == "responses"


def test_a_stream_has_every_event_and_the_same_text(client: OpenAI) -> None:
    arguments: Any = {"model": "main", "input": PROMPT, "max_output_tokens": 9, "temperature": 0}
    whole = client.responses.create(**arguments)
    events = list(client.responses.create(**arguments, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last: Any = events[-1]
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage
    assert {event.response.id for event in events if hasattr(event, "response")} == {last.response.id}


def test_the_packages_own_stream_helper(client: OpenAI) -> None:
    """It raises for whatever is missing, twice or out of order."""
    with client.responses.stream(model="main", input=PROMPT, max_output_tokens=500, temperature=0) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] == "response.incomplete"


def test_a_conversation_with_parts_and_a_tools_result(client: OpenAI, server: ModelServer) -> None:
    given: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather"}, {"type": "input_text", "text": "?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city":"Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Sunny.", "annotations": []}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
    ]
    function = {"name": "get_weather", "arguments": '{"city":"Rome"}'}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "Sunny."},
        {"role": "user", "content": "And now?"},
    ]
    body = {"messages": messages, "max_tokens": 7, "temperature": 0}
    status, _, direct = call(server.port, "POST", "/v1/chat/completions", body)
    assert status == 200
    chat = json.loads(direct)
    found = client.responses.create(model="main", input=given, max_output_tokens=7, temperature=0)
    assert found.output_text == chat["choices"][0]["message"]["content"]
    assert found.usage is not None
    assert found.usage.input_tokens == chat["usage"]["prompt_tokens"]


def test_logprobs(client: OpenAI) -> None:
    arguments: Any = {
        "model": "main",
        "input": PROMPT,
        "max_output_tokens": 3,
        "temperature": 0,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole: Any = client.responses.create(**arguments)
    told = whole.output[0].content[0].logprobs
    assert len(told) == 3
    assert [len(item.top_logprobs) for item in told] == [2, 2, 2]
    assert bytes(told[0].bytes).decode() == told[0].token
    last: Any = list(client.responses.create(**arguments, stream=True))[-1]
    assert last.response.output[0].content[0].logprobs == told


def test_a_function_call(tgi: Playback, teller: OpenAI) -> None:
    tgi.exchange = CHAT["tools required"]
    found: Any = teller.responses.create(
        model="main", input="Weather in Rome?", tools=[WEATHER], tool_choice="required", temperature=0
    )
    (item,) = found.output
    assert (item.type, item.name, json.loads(item.arguments), item.status) == (
        "function_call",
        "get_weather",
        {"city": "Rome"},
        "completed",
    )
    assert (found.usage.input_tokens, found.usage.output_tokens) == (154, 22)
    assert (found.status, found.tools[0].name) == ("completed", "get_weather")
    path, sent = tgi.asked[-1]
    assert path == "/v1/chat/completions"
    # What a TGI takes: the recorded client's own body, in another dialect.
    assert sent["tools"] == CHAT["tools required"]["request"]["body"]["tools"]
    assert (sent["tool_choice"], sent["messages"]) == ("required", [{"role": "user", "content": "Weather in Rome?"}])


def test_a_streamed_function_call(tgi: Playback, teller: OpenAI) -> None:
    exchange = CHAT["stream tools auto"]
    tgi.exchange = exchange
    with teller.responses.stream(model="main", input="Weather?", tools=[WEATHER], temperature=0) as stream:
        events: Any = list(stream)
        final: Any = stream.get_final_response()
    assert [event.type for event in events if "delta" not in event.type] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    (item,) = final.output
    assert json.loads(item.arguments) == {"city": "New York"}
    assert events[2].item.call_id == item.call_id
    assert (final.usage.input_tokens, final.usage.output_tokens) == (191, 23)


def test_a_format_by_schema_is_parsed_by_the_package(tgi: Playback, teller: OpenAI) -> None:
    tgi.exchange = CHAT["response_format json_schema"]
    found = teller.responses.parse(model="main", input="A person as JSON.", text_format=Person, temperature=0)
    assert found.output_parsed == Person(name="Ava")
    sent = tgi.asked[-1][1]["response_format"]
    assert (sent["type"], sent["value"]["name"]) == ("json_schema", "Person")
    assert sent["value"]["schema"]["properties"]["name"]["type"] == "string"


def test_tools_and_formats_on_the_model_server(client: OpenAI) -> None:
    """The same without a recording: what the model server gives is in the form that was asked for."""
    parsed = client.responses.parse(model="main", input=PROMPT, text_format=Person, temperature=0)
    assert isinstance(parsed.output_parsed, Person)
    free = client.responses.create(model="main", input=PROMPT, text={"format": {"type": "json_object"}}, temperature=0)
    assert isinstance(json.loads(free.output_text), dict)
    with client.responses.stream(model="main", input=PROMPT, text_format=Person, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_parsed == parsed.output_parsed
    assert kinds[-1] == "response.completed"
    arguments: Any = {"model": "main", "input": PROMPT, "tools": [WEATHER], "tool_choice": "required", "temperature": 0}
    called: Any = client.responses.create(**arguments)
    assert called.output[0].name == "get_weather"
    given: Any = [
        {"role": "user", "content": PROMPT},
        called.output[0].to_dict(),
        {"type": "function_call_output", "call_id": called.output[0].call_id, "output": "sunny"},
    ]
    answered = client.responses.create(
        model="main", input=given, tools=[WEATHER], tool_choice="none", max_output_tokens=5
    )
    assert answered.output[0].type == "message"


def played(body: str) -> dict[str, Any]:
    exchange = CHAT["stream tools auto"]
    return {**exchange, "response": {**exchange["response"], "body": [[0, body]]}}


def test_a_stream_that_breaks_off_raises_in_the_package(tgi: Playback, teller: OpenAI) -> None:
    pieces = [piece for _, piece in CHAT["stream tools auto"]["response"]["body"]]
    tgi.exchange = played("".join(pieces[:3]))
    stream = teller.responses.create(model="main", input="Weather?", tools=[WEATHER], temperature=0, stream=True)
    events: list[Any] = []

    def read() -> None:
        for event in stream:
            events.append(event)  # noqa: PERF402 - those before the error count

    with pytest.raises(APIError, match="ended the stream without"):
        read()
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error"
    assert events[-1].response.output[0].status == "incomplete"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, {"type": "code_interpreter", "container": {"type": "auto"}}]}, "tools[1].type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": " word" * 2_500}, "input"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_logprobs": 6}, "top_logprobs"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "string"}}}}, "text.format"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_is_not_served_is_refused_by_name(
    client: OpenAI, tenant: Tenant, fields: dict[str, Any], param: str, is_stream: bool
) -> None:
    with pytest.raises(BadRequestError) as refusal:
        client.responses.create(**{"model": "main", "input": PROMPT, "stream": is_stream, **fields})
    assert refusal.value.param == param
    assert tenant.events() == []


def test_what_changes_nothing_is_ignored(client: OpenAI) -> None:
    found = client.responses.create(
        model="main",
        input=PROMPT,
        max_output_tokens=4,
        store=True,
        user="u",
        reasoning={"effort": "low"},
        include=["reasoning.encrypted_content"],
        parallel_tool_calls=True,
        service_tier="auto",
        prompt_cache_key="k",
        truncation="disabled",
        previous_response_id=None,
        text={"format": {"type": "text"}, "verbosity": "low"},
        top_p=1.0,
    )
    assert found.status == "incomplete"
    assert (found.store, found.parallel_tool_calls) == (False, False)  # type: ignore[attr-defined]


def test_nothing_can_be_fetched_later(tenant: Tenant) -> None:
    for method, path in [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
    ]:
        status, _, body = call(tenant.router.port, method, path, headers=tenant.headers)
        assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")
