"""Bodies are refused with serde's words at serde's positions (those not covered by the recorded exchanges)."""

from __future__ import annotations

import pytest

from router_ext.devserver import schemas
from router_ext.devserver.json_reader import BodyError
from router_ext.devserver.serde import Schema, parse

SYNTAX = "Failed to parse the request body as JSON: "
SHAPE = "Failed to deserialize the JSON body into the target type: "


@pytest.mark.parametrize(
    ("schema", "body", "text"),
    [
        (schemas.GENERATE, '{"inputs": "a",}', SYNTAX + "trailing comma at line 1 column 16"),
        (schemas.GENERATE, '{"inputs" "a"}', SYNTAX + "expected `:` at line 1 column 11"),
        (schemas.GENERATE, "{'inputs': 1}", SYNTAX + "key must be a string at line 1 column 2"),
        (schemas.GENERATE, '{"inputs": "a" "b"}', SYNTAX + "expected `,` or `}` at line 1 column 16"),
        (
            schemas.GENERATE,
            '{\n "inputs": 3}',
            SHAPE + "inputs: invalid type: integer `3`, expected a string at line 2 column 12",
        ),
        (
            schemas.GENERATE,
            '{"inputs": "a", "inputs": "b"}',
            SHAPE + "duplicate field `inputs` at line 1 column 24",
        ),
        (
            schemas.GENERATE,
            '{"inputs":"a","parameters":{"do_sample":1}}',
            SHAPE + "parameters.do_sample: invalid type: integer `1`, expected a boolean at line 1 column 41",
        ),
        (
            schemas.CHAT,
            '{"messages":[{"role":"user","content":"a"},{"role":"user"}]}',
            SHAPE + "messages[1]: data did not match any variant of untagged enum MessageBody at line 1 column 58",
        ),
        (
            schemas.CHAT,
            '{"messages":[{"content":"a"}]}',
            SHAPE + "messages[0]: missing field `role` at line 1 column 28",
        ),
        (schemas.COMPLETION, "{}", SHAPE + "missing field `prompt` at line 1 column 2"),
    ],
)
def test_refusal(schema: Schema, body: str, text: str) -> None:
    with pytest.raises(BodyError) as caught:
        parse(schema, body.encode())
    assert caught.value.text(body.encode()) == text


def test_the_first_mistake_in_the_text_wins() -> None:
    with pytest.raises(BodyError) as caught:
        parse(schemas.GENERATE, b'{"inputs": 3, "parameters"')
    assert caught.value.status == 422
    with pytest.raises(BodyError) as caught:
        parse(schemas.GENERATE, b'{"parameters" 1, "inputs": 3}')
    assert caught.value.status == 400


def test_a_deep_body_is_refused_and_not_recursed_into() -> None:
    with pytest.raises(BodyError, match="recursion limit exceeded"):
        parse(schemas.GENERATE, b'{"x": ' + b"[" * 100_000)


def test_unknown_fields_are_skipped_and_defaults_filled_in() -> None:
    found = parse(schemas.COMPAT, b'{"x": [1, {"y": null}], "inputs": "a\\u00e9\\ud83d\\ude00"}')
    assert found["inputs"] == "aé😀"
    assert found["stream"] is False
    assert found["parameters"]["do_sample"] is True
    assert parse(schemas.GENERATE, b'{"inputs":"a","parameters":{}}')["parameters"]["do_sample"] is False


def test_contents_of_messages_become_text() -> None:
    body = (
        b'{"messages":[{"role":"user","content":[{"type":"text","text":"a"},'
        b'{"type":"image_url","image_url":{"url":"u"}}]},{"role":"assistant","content":null,"tool_calls":'
        b'[{"id":"0","type":"function","function":{"name":"f","arguments":{}}}]}],"stop":null}'
    )
    first, second = parse(schemas.CHAT, body)["messages"]
    assert first["content"] == "a![](u)"
    assert "content" not in second
    assert second["tool_calls"][0]["function"]["name"] == "f"
