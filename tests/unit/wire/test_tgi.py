"""TGI's own records: events, errors, gauges."""

from __future__ import annotations

import pytest

from router_ext.wire.headers import retry_headers, stream_headers
from router_ext.wire.metrics_text import parse_gauges
from router_ext.wire.tgi import (
    BadUpstreamAnswer,
    ErrorKind,
    decode_chat_tokenize,
    decode_error,
    decode_event,
    decode_info,
    decode_tokenize,
)


def test_an_event_keeps_its_bytes_and_unknown_fields_do_not_matter() -> None:
    raw = b'{"index":3,"token":{"id":1,"text":"a","logprob":null,"special":false,"new":1},"x":[],"generated_text":null}'
    event = decode_event(raw)
    assert event.payload == raw
    assert event.token is not None
    assert event.token.logprob is None
    assert not event.is_final


def test_a_seed_uses_all_64_bits() -> None:
    raw = (
        b'{"index":1,"token":{"id":1,"text":"a","logprob":-1.0,"special":false},"generated_text":"a",'
        b'"details":{"finish_reason":"length","generated_tokens":1,"seed":17797942556627553532,"input_length":4}}'
    )
    details = decode_event(raw).details
    assert details is not None
    assert details.seed == 17797942556627553532


@pytest.mark.parametrize("raw", [b"", b"[DONE]", b"[]", b'{"index":"x"}', b'{"token":{"text":"a"}}', b"\xff"])
def test_what_is_no_event_is_refused(raw: bytes) -> None:
    with pytest.raises(BadUpstreamAnswer):
        decode_event(raw)


@pytest.mark.parametrize("decode", [decode_tokenize, decode_chat_tokenize, decode_info])
def test_what_is_no_answer_is_refused(decode: object) -> None:
    assert callable(decode)
    for raw in (b"", b"null", b"Bad Gateway", b'[{"text":1}]', b'{"model_id":1}'):
        with pytest.raises(BadUpstreamAnswer):
            decode(raw)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (422, b'{"error":"Input validation error: x","error_type":"validation"}', ErrorKind.VALIDATION),
        (422, b'{"error":"Template error: x","error_type":"template_error"}', ErrorKind.VALIDATION),
        (422, b"Failed to deserialize the JSON body into the target type: x", ErrorKind.VALIDATION),
        (429, b'{"error":"Model is overloaded","error_type":"overloaded"}', ErrorKind.OVERLOADED),
        (424, b'{"error":"Request failed during generation: Server error: ","error_type":"generation"}', "generation"),
        (500, b'{"error":"Incomplete generation","error_type":"incomplete_generation"}', ErrorKind.GENERATION),
        (422, b'{"error":{"message":"Model is overloaded","http_status_code":422}}', ErrorKind.OVERLOADED),
        (401, b"", ErrorKind.UNKNOWN),
        (502, b"<html>", ErrorKind.UNKNOWN),
    ],
)
def test_errors_mean_what_they_say(status: int, body: bytes, kind: str) -> None:
    error = decode_error(status, body)
    assert (error.kind, error.status) == (kind, status)


def test_gauges_with_labels_and_odd_values() -> None:
    text = b"""# TYPE tgi_queue_size gauge
tgi_queue_size 3
tgi_queue_size_other 9
tgi_request_success{a="}",b="x y"} 2
tgi_request_success{a="b"} 1 1700000000
tgi_batch_current_size NaN
tgi_batch_current_max_tokens
tgi_request_count 1e3
"""
    gauges = parse_gauges(text)
    assert (gauges.queue_size, gauges.request_success, gauges.request_count) == (3, 3, 1_000)
    assert gauges.batch_current_size is gauges.batch_current_max_tokens is None


@pytest.mark.parametrize(("estimate", "seconds"), [(0.0, b"1"), (0.2, b"1"), (7.0, b"7"), (7.2, b"8"), (600.0, b"120")])
def test_retry_after_is_never_zero_and_never_above_what_clients_follow(estimate: float, seconds: bytes) -> None:
    headers = dict(retry_headers(estimate))
    assert headers[b"retry-after"] == seconds
    assert 1 <= int(headers[b"retry-after-ms"]) <= 120_000


def test_a_backends_word_cannot_break_out_of_a_header() -> None:
    assert dict(stream_headers("gpu\r\nset-cookie: x", 1))[b"x-compute-type"] == b"gpuset-cookie: x"


@pytest.mark.parametrize("number", [b"-1", b"4294967296", b"1e3", b"99999999999999999999"])
def test_a_token_id_has_32_bits(number: bytes) -> None:
    with pytest.raises(BadUpstreamAnswer):
        decode_event(b'{"index":1,"token":{"id":' + number + b',"text":"a","logprob":null,"special":false}}')
