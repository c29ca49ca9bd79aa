"""What the recordings do not show: later slices, odd texts, backends that order their keys otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router_ext.gateway.encoders import AnswerContext, encoder_for, model_name
from router_ext.gateway.generation import Completion, Dialect, GenerationRequest
from router_ext.wire.tgi import StreamEvent, decode_event

CONTEXT = AnswerContext(model_id="backend-model", system_fingerprint="v-native", created=7)
ODD_TEXTS = [
    "},",
    "true},",
    'true},"generated_text":null',
    ',"details":{',
    '"',
    "\\",
    "\n\t\x00\u2028",
    "日本🎉",
    'false},"top_tokens":[',
]


def event(index: int, text: str, *, offset: int = 0, special: bool = False, **more: Any) -> StreamEvent:
    token = {"id": index, "text": text, "logprob": -0.5, "special": special}
    body = {"index": index, "token": token, **more, "generated_text": None, "details": None}
    decoded = decode_event(json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode())
    decoded.index += offset
    return decoded


def completion(text: str, tokens: int) -> Completion:
    return Completion(finish_reason="length", generated_text=text, prompt_tokens=3, output_tokens=tokens, seed=None)


def request(dialect: Dialect, **fields: Any) -> GenerationRequest:
    arguments = {"is_stream": True, "prompts": ("p",), "wants_details": True, **fields}
    return GenerationRequest(dialect=dialect, **arguments)


def parse(stream: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in stream.decode().split("\n\n") if line]


def test_events_of_a_later_slice_are_numbered_on() -> None:
    encoder = encoder_for(request(Dialect.GENERATE_STREAM), CONTEXT)
    stream = encoder.tokens([event(1, "a", offset=8)]) + encoder.tokens([event(2, "b", offset=8)])
    stream += encoder.finish([event(3, "c", offset=8)], completion("abc", 11))
    assert [item["index"] for item in parse(stream)] == [9, 10, 11]
    assert [item["token"]["id"] for item in parse(stream)] == [1, 2, 3]
    assert parse(stream)[-1]["details"] == {
        "finish_reason": "length",
        "generated_tokens": 11,
        "seed": None,
        "input_length": 3,
    }


@pytest.mark.parametrize("text", ODD_TEXTS)
@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("more", [{}, {"top_tokens": [{"id": 1, "text": "}", "logprob": -1.0, "special": False}]}])
def test_no_text_can_break_the_frame(text: str, offset: int, more: dict[str, Any]) -> None:
    events = [event(1, text, offset=offset, **more), event(2, text, offset=offset, **more)]
    done = completion(text + text, 2)
    stream = encoder_for(request(Dialect.GENERATE_STREAM), CONTEXT)
    native = parse(stream.tokens(events[:1]) + stream.finish(events[1:], done))
    assert [item["token"]["text"] for item in native] == [text, text]
    assert native[-1]["generated_text"] == text + text
    whole = encoder_for(request(Dialect.GENERATE, is_stream=False), CONTEXT)
    whole.tokens(events[:1])
    whole.finish(events[1:], done)
    body = json.loads(whole.end())
    assert [token["text"] for token in body["details"]["tokens"]] == [text, text]
    chat = encoder_for(request(Dialect.CHAT), CONTEXT)
    chunks = parse(chat.tokens(events[:1]) + chat.finish(events[1:], done))
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == [text, text]
    texts = encoder_for(request(Dialect.COMPLETIONS), CONTEXT)
    chunks = parse(texts.tokens(events[:1]) + texts.finish(events[1:], done))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [text, text]


def test_a_backend_with_another_key_order_is_written_in_tgis() -> None:
    raw = b'{"token":{"text":"a","special":false,"id":4,"logprob":-0.5},"index":1,"details":null}'
    encoder = encoder_for(request(Dialect.GENERATE_STREAM), CONTEXT)
    odd = decode_event(raw)
    odd.index = 6
    expected = {
        "index": 6,
        "token": {"id": 4, "text": "a", "logprob": -0.5, "special": False},
        "generated_text": None,
        "details": None,
    }
    assert parse(encoder.tokens([odd])) == [expected]
    final = parse(encoder.finish([odd], completion("a", 6)))[0]
    assert list(final) == ["index", "token", "generated_text", "details"]
    assert final["generated_text"] == "a"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (None, "backend-model"),
        ("", "backend-model"),
        ("tgi", "backend-model"),
        ("dummy", "backend-model"),
        ("my-pool", "my-pool"),
    ],
)
def test_an_answer_names_the_model_the_client_named(asked: str | None, told: str) -> None:
    assert model_name(request(Dialect.CHAT, model=asked), CONTEXT.model_id) == told


def test_held_tokens_come_out_in_one_write() -> None:
    encoder = encoder_for(request(Dialect.CHAT, include_usage=True), CONTEXT)
    stream = encoder.tokens([event(i, "x") for i in range(1, 5)])
    assert stream.count(b"data: ") == 4
    stream = encoder.finish([event(5, "y"), event(6, "<eos>", special=True)], completion("xxxxy", 6))
    assert stream.count(b'"finish_reason":"length"') == 1
    end = encoder.end()
    assert end.endswith(b"data: [DONE]\n\n")
    assert b'"usage":{"prompt_tokens":3,"completion_tokens":6,"total_tokens":9}' in end
