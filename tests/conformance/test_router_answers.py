"""What the router writes is what TGI wrote: recorded upstream bytes, cut anywhere, through parser, continuation and
encoder, compared byte for byte with the recorded answers.

What the backend sends is ``/generate_stream`` of the same tokens (``support.recorded_streams``).
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.playback import recorded as recorded_by_name
from support.recorded_streams import BASICS, CHAT, GENERATE, SAME_TOKENS, STREAMS, body_of, upstreams

from router_ext.gateway.bos import BosKind, chat_prompt, probe
from router_ext.gateway.continuation import Continuation, Phase
from router_ext.gateway.dialects import decode_request
from router_ext.gateway.encoders import AnswerContext, Encoder, encoder_for
from router_ext.gateway.generation import GenerationRequest, ModelLimits, ResumeClass
from router_ext.gateway.passthrough import StreamRelay, read_body_answer
from router_ext.wire.headers import Timings
from router_ext.wire.metrics_text import TgiGauges, parse_gauges
from router_ext.wire.sse import SseParser
from router_ext.wire.tgi import decode_chat_tokenize, decode_info, decode_tokenize

BOS = recorded_by_name("bos")
LIMITS = ModelLimits(model_id="SmolLM2-135M-Instruct", max_input_tokens=2_048, max_total_tokens=4_096)


def request_of(exchange: dict[str, Any]) -> GenerationRequest:
    request = exchange["request"]
    raw = json.dumps(request["body"]).encode()
    return decode_request(request["path"], request["headers"].get("Content-Type"), raw, LIMITS)


def context_of(exchange: dict[str, Any]) -> AnswerContext:
    recorded = body_of(exchange)
    created = re.search(rb'"created":(\d+)', recorded)
    headers = dict(exchange["response"]["headers"])
    return AnswerContext(
        model_id="SmolLM2-135M-Instruct",
        system_fingerprint="3.3.6-dev0-native",
        created=int(created[1]) if created else 0,
        compute_type=headers["x-compute-type"],
        compute_characters=int(headers["x-compute-characters"]),
    )


def answer(request: GenerationRequest, upstream: list[bytes], context: AnswerContext) -> tuple[Encoder, bytes]:
    """The whole body the client gets; ``upstream`` is one stream in chunks."""
    encoder = encoder_for(request, context)
    flow = Continuation.for_request(
        request,
        max_new_tokens=request.max_new_tokens or 2_000,
        limits=LIMITS,
        base_seed=1,
        prompt=None if request.prompts else "chat",
    )
    flow.next_slice(1_024)
    parser, out = SseParser(), b""
    for chunk in upstream:
        for payload in parser.feed(chunk):
            events = flow.feed(payload)
            if flow.completion is not None:
                out += encoder.finish(events, flow.completion)
            elif events:
                out += encoder.tokens(events)
    assert flow.phase is Phase.DONE
    assert not parser.has_partial_event
    return encoder, out + encoder.end()


def same_created(recorded: bytes) -> bytes:
    """TGI stamps every chunk anew; the router keeps the first instant."""
    first = re.search(rb'"created":\d+', recorded)
    assert first is not None
    return re.sub(rb'"created":\d+', first[0], recorded)


# --- TGI's own streams -------------------------------------------------------------------------------------------

NATIVE_STREAMS = [name for file, name in SAME_TOKENS if file == "streams" and "non-stream" not in name]


@pytest.mark.parametrize("name", NATIVE_STREAMS)
def test_a_stream_cut_at_any_byte_is_tgis_own(name: str) -> None:
    exchange = STREAMS[name]
    (upstream,) = upstreams("streams", exchange)
    request, context, expected = request_of(exchange), context_of(exchange), body_of(exchange)
    assert answer(request, [upstream[i : i + 1] for i in range(len(upstream))], context)[1] == expected
    for place in range(len(upstream) + 1):
        assert answer(request, [upstream[:place], upstream[place:]], context)[1] == expected


def test_the_head_of_a_stream_is_tgis_own() -> None:
    exchange = STREAMS["details"]
    headers = encoder_for(request_of(exchange), context_of(exchange)).headers()
    hop = {"vary", "access-control-allow-origin", "transfer-encoding", "date"}
    assert [(k.decode(), v.decode()) for k, v in headers] == [
        (name, value) for name, value in exchange["response"]["headers"] if name not in hop
    ]


def test_older_and_odder_framing_gives_the_same() -> None:
    """No space behind the colon, CRLF, comments, other fields."""
    exchange = STREAMS["details"]
    recorded = body_of(exchange)
    request, context = request_of(exchange), context_of(exchange)
    for odd in (
        recorded.replace(b"data: ", b"data:"),
        recorded.replace(b"\n", b"\r\n"),
        recorded.replace(b"data: ", b":\n\n: ping\n\nevent: x\nid: 1\ndata: "),
    ):
        for step in (1, 7, len(odd)):
            assert answer(request, [odd[i : i + step] for i in range(0, len(odd), step)], context)[1] == recorded


# --- whole answers of TGI's own paths ------------------------------------------------------------------------------

GENERATE_FROM_DETAILS = (
    "details with top_n",
    "stop inside a token is missed",
    "truncate",
    "seeded sampling",
    "unseeded sampling reports its seed",
    "temperature alone switches sampling on",
)


@pytest.mark.parametrize("name", [name for file, name in SAME_TOKENS if file == "generate"])
def test_a_whole_answer_is_tgis_own(name: str) -> None:
    exchange = GENERATE[name]
    encoder, body = answer(request_of(exchange), upstreams("generate", exchange), context_of(exchange))
    assert body == body_of(exchange)
    headers = dict(exchange["response"]["headers"])
    assert encoder.prompt_tokens == int(headers["x-prompt-tokens"])
    assert encoder.output_tokens == int(headers["x-generated-tokens"])


@pytest.mark.parametrize("name", GENERATE_FROM_DETAILS)
def test_a_whole_answer_with_details_is_tgis_own(name: str) -> None:
    exchange = GENERATE[name]
    assert answer(request_of(exchange), upstreams("generate", exchange), context_of(exchange))[1] == body_of(exchange)


def test_an_answer_that_ends_inside_a_character() -> None:
    exchange = STREAMS["ends inside a character, non-stream"]
    upstream = body_of(STREAMS["ends inside a character"])
    assert answer(request_of(exchange), [upstream], context_of(exchange))[1] == body_of(exchange)


def test_the_head_of_a_whole_answer_is_tgis_own() -> None:
    exchange = GENERATE["minimal"]
    encoder, _ = answer(request_of(exchange), [body_of(STREAMS["details"])], context_of(exchange))
    recorded = [h for h in exchange["response"]["headers"] if h[0].startswith(("content-type", "x-"))]
    timings = Timings(total_s=0.376334232, inference_s=0.376334232)
    assert [[k.decode(), v.decode()] for k, v in encoder.headers(timings)] == recorded


# --- OpenAI's paths ------------------------------------------------------------------------------------------------


PLAIN_CHATS = [
    name
    for name, exchange in CHAT.items()
    if exchange["request"]["path"] == "/v1/chat/completions"
    and not exchange["request"]["body"].get("stream")
    and request_of(exchange).passthrough is None
]


@pytest.mark.parametrize("name", PLAIN_CHATS)
def test_a_chat_is_tgis_own(name: str) -> None:
    exchange = CHAT[name]
    request = request_of(exchange)
    if name == "other model name":  # TGI takes any name; the router has resolved it to a pool before
        assert request.model == "gpt-4o"
    assert answer(request, upstreams("chat_and_completions", exchange), context_of(exchange))[1] == body_of(exchange)


CHAT_STREAMS = ["stream", "stream with usage", "stream to its end", "stream with logprobs", "stream with stop"]


@pytest.mark.parametrize("name", CHAT_STREAMS)
def test_a_streamed_chat_is_tgis_own(name: str) -> None:
    exchange = CHAT[name]
    (upstream,) = upstreams("chat_and_completions", exchange)
    pieces = [upstream[i : i + 11] for i in range(0, len(upstream), 11)]
    assert answer(request_of(exchange), pieces, context_of(exchange))[1] == same_created(body_of(exchange))


def test_every_recorded_plain_stream_is_compared() -> None:
    plain = [
        name
        for name, exchange in CHAT.items()
        if exchange["request"]["path"] == "/v1/chat/completions"
        and exchange["request"]["body"].get("stream")
        and request_of(exchange).passthrough is None
    ]
    assert sorted(plain) == sorted(CHAT_STREAMS)


@pytest.mark.parametrize("name", [name for name in CHAT if name.startswith("completions")])
def test_a_completion_is_tgis_own(name: str) -> None:
    exchange = CHAT[name]
    request, context = request_of(exchange), context_of(exchange)
    expected = body_of(exchange)
    streams = upstreams("chat_and_completions", exchange)
    order = [index for index, stream in enumerate(streams) for _ in range(stream.count(b"data: "))]
    if request.is_stream:
        chunks = [json.loads(payload) for payload in SseParser().feed(expected) if payload != b"[DONE]"]
        order = [chunk["choices"][0]["index"] for chunk in chunks]
        expected = same_created(expected)
    encoder, out = encoder_for(request, context), b""
    flows = {}
    for index, upstream in enumerate(streams):
        flow = Continuation.for_request(
            request, max_new_tokens=request.max_new_tokens or 99, limits=LIMITS, base_seed=1, prompt_index=index
        )
        flow.next_slice(1_024)
        flows[index] = (flow, iter(SseParser().feed(upstream)))
    for index in order:
        flow, payloads = flows[index]
        events = flow.feed(next(payloads))
        if flow.completion is None:
            out += encoder.tokens(events, index)
        else:
            out += encoder.finish(events, flow.completion, index)
    assert out + encoder.end() == expected


# --- passed through ------------------------------------------------------------------------------------------------

PASSED_BODIES = {
    **{name: GENERATE[name] for name in ("grammar regex", "grammar json", "best_of", "decoder_input_details")},
    **{
        name: CHAT[name]
        for name in ("tools required", "tools auto", "response_format json_object", "response_format json_schema")
    },
}


@pytest.mark.parametrize("name", PASSED_BODIES)
def test_a_relayed_answer_keeps_its_bytes_and_counts_its_tokens(name: str) -> None:
    exchange = PASSED_BODIES[name]
    request = request_of(exchange)
    assert request.passthrough is not None
    assert request.passthrough.path == exchange["request"]["path"]
    headers = [(k.encode(), v.encode()) for k, v in exchange["response"]["headers"]]
    relayed = read_body_answer(request, 200, headers, body_of(exchange))
    assert relayed.body == body_of(exchange)
    told = dict(exchange["response"]["headers"])
    assert relayed.prompt_tokens == int(told["x-prompt-tokens"])
    sequences = 2 if name == "best_of" else 1
    assert relayed.output_tokens == sequences * int(told["x-generated-tokens"])
    assert [k for k, _ in relayed.headers] == [k for k, _ in headers if k == b"content-type" or k.startswith(b"x-")]


def test_details_only_the_router_asked_for_are_taken_off() -> None:
    exchange = GENERATE["best_of"]
    exchange = {
        **exchange,
        "request": {**exchange["request"], "body": {"inputs": "a", "parameters": {"best_of": 2, "do_sample": True}}},
    }
    request = request_of(exchange)
    assert request.passthrough is not None
    assert json.loads(request.passthrough.body)["parameters"]["details"] is True
    relayed = read_body_answer(request, 200, [], body_of(exchange))
    assert json.loads(relayed.body) == {"generated_text": json.loads(body_of(exchange))["generated_text"]}
    assert relayed.output_tokens == 8


def test_a_relayed_grammar_stream_keeps_its_bytes_and_counts_its_tokens() -> None:
    exchange = STREAMS["grammar"]
    request, recorded = request_of(exchange), body_of(exchange)
    assert request.passthrough is not None
    assert request.passthrough.reason == "grammar"
    relay, parser = StreamRelay(request), SseParser()
    out = b"".join(relay.feed(p) for i in range(len(recorded)) for p in parser.feed(recorded[i : i + 1]))
    assert out == recorded
    assert (relay.prompt_tokens, relay.output_tokens, relay.finish_reason) == (4, 8, "eos_token")
    assert relay.is_complete


@pytest.mark.parametrize(("name", "usage"), [("stream tools required", (154, 22)), ("stream tools auto", (191, 23))])
def test_relayed_tools_keep_their_bytes_and_count_their_tokens(name: str, usage: tuple[int, int]) -> None:
    """The router always asks for the usage chunk and drops it again where the client did not."""
    exchange = CHAT[name]
    request, recorded = request_of(exchange), body_of(exchange)
    assert request.passthrough is not None
    assert json.loads(request.passthrough.body)["stream_options"]["include_usage"] is True
    upstream = recorded
    if not request.include_usage:
        prompt, output = usage
        chunk = {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": 0}}
        upstream = recorded.replace(b"data: [DONE]", b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]")
    relay = StreamRelay(request)
    assert b"".join(map(relay.feed, SseParser().feed(upstream))) == recorded
    assert (relay.prompt_tokens, relay.output_tokens) == usage
    assert relay.is_complete
    assert relay.is_exact


def test_a_relayed_stream_that_breaks_off_is_not_complete() -> None:
    exchange = CHAT["stream tools required"]
    relay = StreamRelay(request_of(exchange))
    for payload in SseParser().feed(body_of(exchange))[:4]:
        relay.feed(payload)
    assert not relay.is_complete
    assert relay.output_tokens == 4


# --- BOS, gauges, info ---------------------------------------------------------------------------------------------


def test_the_bos_of_a_template_is_taken_off_where_the_tokenizer_adds_it() -> None:
    added = decode_tokenize(body_of(BOS["tokenize of the empty string shows what the tokenizer adds"]))
    chat = decode_chat_tokenize(body_of(BOS["chat_tokenize adds nothing itself"]))
    rule = probe(added, chat)
    assert (rule.kind, rule.bos_text) == (BosKind.STRIP, "<|im_start|>")
    recorded = BOS["templated text without its first BOS: same as chat"]
    prefill = json.loads(body_of(recorded))["details"]["prefill"]
    assert rule.check_text(chat) == recorded["request"]["body"]["inputs"]
    assert [t["id"] for t in prefill] == [t.id for t in chat.tokenize_response]
    rule = rule.verified(chat, chat.tokenize_response)
    prompt = chat_prompt(rule, chat)
    assert prompt.text == recorded["request"]["body"]["inputs"]
    assert (prompt.prompt_tokens, prompt.characters, prompt.resume_class) == (34, 167, ResumeClass.EXACT)


def test_without_an_added_bos_the_template_stays_as_it_is() -> None:
    added = decode_tokenize(body_of(BASICS["tokenize empty"]))
    chat = decode_chat_tokenize(body_of(BASICS["chat_tokenize"]))
    rule = probe(added, chat).verified(chat, chat.tokenize_response)
    assert chat_prompt(rule, chat).text == chat.templated_text


def test_a_template_without_the_added_bos_goes_through_the_chat_endpoint() -> None:
    added = decode_tokenize(b'[{"id":99,"text":"","start":0,"stop":0}]')
    chat = decode_chat_tokenize(body_of(BASICS["chat_tokenize"]))
    rule = probe(added, chat)
    assert rule.kind is BosKind.MISMATCH
    assert chat_prompt(rule, chat).text is None
    both = [*added, *decode_tokenize(b'[{"id":2,"text":"","start":0,"stop":0}]')]
    assert probe(both, chat).kind is BosKind.MISMATCH
    assert probe([], chat).verified(chat, chat.tokenize_response[1:]).kind is BosKind.MISMATCH


def test_gauges_of_a_real_metrics_page() -> None:
    early = parse_gauges(body_of(BASICS["metrics, early"]))
    assert early == TgiGauges(
        queue_size=0, batch_current_size=0, batch_current_max_tokens=0, request_count=1, request_success=1
    )
    late = parse_gauges(body_of(CHAT["metrics, after all of these"]))
    assert (late.request_count, late.request_success) == (62, 32)
    assert parse_gauges(b"# nothing yet\n") == TgiGauges()


def test_info_of_a_real_server() -> None:
    info = decode_info(body_of(BASICS["info"]))
    assert ModelLimits.from_info(info).max_total_tokens == 4_096
    assert info.system_fingerprint == "3.3.6-dev0-native"
