"""Response objects and events hold what OpenAI's own types demand, in whatever order text and calls come."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from router_ext.wire.responses import (
    ResponseEvents,
    call_item,
    message_item,
    response_logprob,
    response_object,
    response_usage,
)

FRAME: dict[str, Any] = {
    "created_at": 1,
    "model": "m",
    "metadata": {},
    "parallel_tool_calls": False,
    "tool_choice": "auto",
    "tools": [],
}
LIFE = {  # events of an item: before its text, with it, and behind it
    "message": (
        ["response.output_item.added", "response.content_part.added"],
        "response.output_text.delta",
        ["response.output_text.done", "response.content_part.done", "response.output_item.done"],
    ),
    "function_call": (
        ["response.output_item.added"],
        "response.function_call_arguments.delta",
        ["response.function_call_arguments.done", "response.output_item.done"],
    ),
}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def parsed(stream: bytes) -> list[dict[str, Any]]:
    found = []
    for part in stream.decode().split("\n\n")[:-1]:
        first, second = part.split("\n")
        data = json.loads(second.removeprefix("data: "))
        assert first == f"event: {data['type']}"
        found.append(data)
    return found


def check(events: list[dict[str, Any]]) -> None:
    for number, event in enumerate(events):
        EVENT.validate_python(event)
        assert event["sequence_number"] == number


steps = st.lists(
    st.one_of(
        st.tuples(st.just("text"), st.text(max_size=4)),
        st.tuples(st.just("call"), st.sampled_from(["f", "g"])),
        st.tuples(st.just("arguments"), st.text(max_size=4)),
    ),
    max_size=8,
)


@given(steps=steps, ending=st.sampled_from(["stop", "length", None, "error"]))
def test_any_answer_is_a_well_formed_stream(steps: list[tuple[str, str]], ending: str | None) -> None:
    events = ResponseEvents(FRAME, "ab")
    stream = b""
    wanted: list[list[str]] = []
    for kind, text in steps:
        if kind == "arguments" and (not wanted or wanted[-1][0] == "text"):
            continue
        if kind == "text" and (not wanted or wanted[-1][0] != "text"):
            wanted.append(["text", ""])
        elif kind == "call":
            wanted.append([text, ""])
        if kind != "call":
            wanted[-1][1] += text
        stream += getattr(events, kind)(text)
    if ending == "error":
        stream += events.failed(message="no", code="upstream_error", kind="server_error", param=None)
    else:
        stream += events.end(ending, prompt_tokens=3, output_tokens=4)
        wanted = wanted or [["text", ""]]
    found = parsed(stream)
    check(found)
    last = found[-2 if ending == "error" else -1]
    output = last["response"]["output"]
    assert [[i["name"], i["arguments"]] if "name" in i else ["text", i["content"][0]["text"]] for i in output] == wanted
    assert len({item["id"] for item in output}) == len(output)
    # What the deltas add up to is what the items say.
    sums: dict[str, str] = {item["id"]: "" for item in output}
    for event in found:
        if event["type"].endswith(".delta"):
            sums[event["item_id"]] += event["delta"]
    assert list(sums.values()) == [text for _, text in wanted]
    added = [event["item"]["id"] for event in found if event["type"] == "response.output_item.added"]
    assert added == list(sums)
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == (output[:-1] if ending == "error" and output else output)
    for place, item in enumerate(output):
        kinds = [event["type"] for event in found if event.get("output_index") == place]
        is_cut = ending == "error" and place == len(output) - 1
        before, delta, after = LIFE[item["type"]]
        assert [kind for kind in kinds if kind != delta] == (before if is_cut else before + after)
        assert set(kinds[len(before) : len(kinds) - (0 if is_cut else len(after))]) <= {delta}
    statuses = {"stop": "completed", None: "completed", "length": "incomplete", "error": "failed"}
    assert last["type"] == f"response.{statuses[ending]}"
    assert (last["response"]["error"] is not None) is (ending == "error")
    assert (found[-1].get("error") is not None) is (ending == "error")


def test_a_whole_response_is_openais() -> None:
    logprob = response_logprob("é", -0.5, [("e", -1.0)])
    output = [message_item("ab", 0, "é", status="completed", logprobs=[logprob])]
    output.append(call_item("ab", 1, "f", "{}", status="completed"))
    made = response_object(FRAME, "ab", status="completed", output=output, usage=response_usage(3, 4))
    found = Response.model_validate(json.loads(json.dumps(made)))
    assert found.output_text == "é"
    assert found.usage is not None
    assert found.usage.total_tokens == 7
    assert logprob["bytes"] == [0xC3, 0xA9]
    assert logprob["top_logprobs"][0]["bytes"] == [0x65]
