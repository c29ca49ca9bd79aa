"""Answers that tools have forced into a call: whole, streamed in any pieces, cut, or declined."""

from __future__ import annotations

import json

import pytest

from router_ext.devserver.generation import GenerationFailed
from router_ext.devserver.tool_calls import NO_TOOL, CallStream, Fragment, parse_call

TEXT = '{ "function": {"_name": "weather", "city": "Rome, {it}", "days": [1, 2]} }'


def test_a_call_is_its_name_and_arguments_in_order() -> None:
    call = parse_call(TEXT)
    assert (call.name, call.arguments_json()) == ("weather", '{"city":"Rome, {it}","days":[1,2]}')


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"function": {"_name": "a", "b": "c', "EOF while parsing a string at line 1 column 35"),
        ("{}", "missing field `function` at line 1 column 2"),
        ('{"function": {"x": 1}}', "missing field `_name` at line 1 column 22"),
        ('{"function": {"_name": "a"}} x', "trailing characters at line 1 column 30"),
    ],
)
def test_what_is_no_call_is_an_error_of_the_tool(text: str, problem: str) -> None:
    with pytest.raises(GenerationFailed) as caught:
        parse_call(text)
    assert (caught.value.status, caught.value.error_type) == (422, "tool_error")
    assert problem in caught.value.message
    assert caught.value.message.startswith("Tool error: Failed to parse generated text: ")
    assert caught.value.message.endswith(f" {json.dumps(text)}")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_streamed_call_shows_its_arguments(size: int) -> None:
    stream = CallStream()
    pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
    found = [stream.push(piece, is_special=False) for piece in pieces]
    shown = [each for each in found if isinstance(each, Fragment)]
    assert [each.name for each in shown] == ["weather"] + [None] * (len(shown) - 1)
    text = "".join(each.text or "" for each in shown)
    assert text.startswith("{")
    assert '"city": "Rome, {it}", "days": [1, 2]}' in text
    assert stream.push("<|im_end|>", is_special=True) is None


def test_the_pieces_are_the_recorded_ones() -> None:
    tokens = ['{"', "function", '":', ' {"', "_", "name", '":', ' "', "get", "_", "weather", '",']
    tokens += [' "', "city", '":', ' "', "Rome", '"', " }", "}"]
    stream = CallStream()
    found = [stream.push(token, is_special=False) for token in tokens]
    assert found[:11] == [None] * 11
    assert found[11:] == [
        Fragment("get_weather", "{"),
        *(Fragment(None, text) for text in (' "', "city", '":', ' "', "Rome", '"', " }", "")),
    ]


def test_a_model_that_declines_is_noticed_once_the_name_is_there() -> None:
    stream = CallStream()
    found = [stream.push(piece, is_special=False) for piece in ('{"function":', ' {"_name": "no', '_tool"', "}")]
    assert found[:3] == [None, None, NO_TOOL]
