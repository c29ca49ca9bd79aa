"""Whatever a running TGI refused, the router refuses before anything goes upstream: with TGI's words, and with a real
status where TGI answers a stream with 200 first.

Differences on purpose: errors of the JSON layer are JSON, not plain text; OpenAI's paths answer 400 in OpenAI's shape.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from router_ext.errors import FairlaneError
from router_ext.gateway.dialects import (
    decode_request,
    decode_tokenize,
    dialect_of,
    error_response,
    fit_lengths,
    read_body,
    stream_error,
)
from router_ext.gateway.generation import ModelLimits

TRANSCRIPTS = Path(__file__).parent / "transcripts"
LIMITS = ModelLimits(model_id="SmolLM2-135M-Instruct", max_input_tokens=200, max_total_tokens=300)
ELSEWHERE = {"vertex: bad", "tokenize: missing inputs"}
SERVED = {"content type with charset", "chat: no messages"}
FRIENDLIER = {
    "parameters null",
    "top_p 1",
    "typical_p 1",
    "stop as string",
    "stop null",
    "chat: stop as string",
    "chat: both token limits",
    "chat: stream null",
    "chat: stream_options null",
    "chat: top_p 1",
    "chat stream: top_p 1",
    "chat: OpenAI json_schema shape",
    "chat: json_object without value",
}
"""Taken on purpose: ``gateway/friendly.py``."""
LEFT_TO_A_COMPILER = {"bad grammar regex"}

ERRORS: dict[str, dict[str, Any]] = {
    exchange["name"]: exchange
    for exchange in map(json.loads, (TRANSCRIPTS / "errors.jsonl").read_text(encoding="utf-8").splitlines())
}
REFUSED = [name for name in ERRORS if name not in ELSEWHERE | SERVED | FRIENDLIER | LEFT_TO_A_COMPILER]


def sent(exchange: dict[str, Any]) -> tuple[str, str | None, bytes]:
    request = exchange["request"]
    if exchange["name"] == "body over the payload limit":
        raw = b'{"inputs": "' + b"x" * 2_000_000 + b'"}'
    else:
        raw = json.dumps(request["body"]).encode() if "body" in request else request["raw"].encode()
    return request["path"], request["headers"].get("Content-Type"), raw


def told(exchange: dict[str, Any]) -> str:
    """TGI's message, wherever it put it; without the position in the text."""
    text = "".join(piece for _, piece in exchange["response"]["body"])
    if text.startswith(("{", "data: ")):
        error = json.loads(text.removeprefix("data: ").split("\n")[0])["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    return re.sub(r" at line \d+ column \d+$", "", text)


def decode(exchange: dict[str, Any]) -> None:
    """As the gateway does; a prompt's length is what TGI counted."""
    request = decode_request(*sent(exchange), LIMITS)
    counted = re.search(r"Given: (\d+) `inputs`", told(exchange))
    fit_lengths(request, int(counted[1]) if counted else 1, LIMITS)


def refuse(exchange: dict[str, Any]) -> FairlaneError:
    with pytest.raises(FairlaneError) as refusal:
        decode(exchange)
    return refusal.value


@pytest.mark.parametrize("name", REFUSED)
def test_what_tgi_refuses_the_router_refuses_in_its_words(name: str) -> None:
    exchange = ERRORS[name]
    error = refuse(exchange)
    expected = told(exchange)
    if "JSON: EOF" in expected:  # another parser, another account of the fault
        assert error.message.startswith("Failed to parse the request body as JSON: ")
    elif "1.8446744073709552e19" in expected:  # the same number, spelt by another language
        assert "seed: invalid type: floating point `1.8446744073709552e+19`, expected u64" in error.message
    else:
        assert error.message.startswith(expected)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_has_the_status_and_shape_of_its_dialect(name: str) -> None:
    exchange = ERRORS[name]
    path = exchange["request"]["path"]
    recorded = int(exchange["response"]["status"].split()[1])
    status, headers, body = error_response(refuse(exchange), dialect_of(path))
    assert dict(headers)[b"content-type"] == b"application/json"
    answer = json.loads(body)
    if path.startswith("/v1/"):
        assert status == 400
        assert answer["error"].keys() == {"message", "type", "param", "code"}
        assert answer["error"]["type"] == "invalid_request_error"
    else:
        assert status == (recorded if recorded in (413, 415) else 422)
        assert answer.keys() == {"error", "error_type"}
        assert answer["error_type"] == "validation"


@pytest.mark.parametrize("name", sorted(SERVED | FRIENDLIER | LEFT_TO_A_COMPILER))
def test_what_tgi_takes_and_what_trips_its_users_the_router_takes(name: str) -> None:
    decode_request(*sent(ERRORS[name]), LIMITS)


def test_a_tokenize_body_needs_inputs() -> None:
    path, content_type, raw = sent(ERRORS["tokenize: missing inputs"])
    with pytest.raises(FairlaneError) as refusal:
        decode_tokenize(read_body(path, content_type, raw))
    assert refusal.value.message.startswith(told(ERRORS["tokenize: missing inputs"]))


@pytest.mark.parametrize("name", ["stream: validation error", "root stream: validation error", "stream: best_of"])
def test_a_native_error_event_is_tgis_own(name: str) -> None:
    exchange = ERRORS[name]
    recorded = "".join(piece for _, piece in exchange["response"]["body"]).encode()
    assert stream_error(refuse(exchange), dialect_of(exchange["request"]["path"])) == recorded


def test_an_error_inside_an_openai_stream_is_no_clean_end() -> None:
    event = stream_error(refuse(ERRORS["chat stream: max_tokens too large"]), dialect_of("/v1/chat/completions"))
    assert event.startswith(b'data: {"error":{"message":"Input validation error: `inputs` tokens')
    assert b"[DONE]" not in event


@pytest.mark.parametrize(
    ("name", "param", "code"),
    [
        ("chat: missing messages", "messages", "invalid_parameter"),
        ("chat: max_tokens too large", "messages", "context_length_exceeded"),
        ("chat: logit_bias object", "logit_bias", "invalid_parameter"),
        ("chat: unknown tool choice", "tool_choice", "invalid_parameter"),
        ("completions: suffix", "suffix", "invalid_parameter"),
        ("completions: token ids", "prompt", "invalid_parameter"),
    ],
)
def test_openais_shape_names_the_parameter(name: str, param: str, code: str) -> None:
    error = refuse(ERRORS[name])
    assert (error.param, error.code) == (param, code)
