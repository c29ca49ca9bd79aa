"""Answers of backends that do not tell how many tokens they have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router_ext.gateway.cuts import TextTokenizer
from router_ext.gateway.generation import Dialect, GenerationRequest
from router_ext.gateway.measure import INLINE_CHARACTERS, answer_tokens
from router_ext.gateway.passthrough import StreamRelay, read_body_answer

TEXT = "Fair shares are measured in tokens, not in requests."


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path: Path) -> TextTokenizer:
    return TextTokenizer.load(tokenizer_path)


def test_a_text_is_counted_by_the_pools_tokenizer_and_else_estimated(tokenizer: TextTokenizer) -> None:
    exact = len(tokenizer.encode(TEXT))
    assert answer_tokens(tokenizer, TEXT) == (exact, "counted")
    assert answer_tokens(None, TEXT) == (len(TEXT) // 4, "estimated")
    long = TEXT * (3 * INLINE_CHARACTERS // len(TEXT))
    tokens, source = answer_tokens(tokenizer, long)
    assert source == "estimated"
    assert tokens == pytest.approx(len(tokenizer.encode(long)), rel=0.02)
    assert answer_tokens(tokenizer, "")[0] == 0


def test_the_end_of_text_counts_where_it_ended_the_answer() -> None:
    def tokens(reason: str, stop: tuple[str, ...] = ()) -> int:
        request = GenerationRequest(dialect=Dialect.CHAT, is_stream=False, stop=stop)
        body = {"model": "m", "choices": [{"finish_reason": reason, "message": {"content": "abcdefgh"}}]}
        return read_body_answer(request, 200, [], json.dumps(body).encode()).output_tokens

    assert (tokens("length"), tokens("stop"), tokens("stop", ("h",))) == (2, 3, 2)


def test_a_response_says_what_is_booked() -> None:
    request = GenerationRequest(dialect=Dialect.RESPONSES, is_stream=False)
    body = {"model": "m", "choices": [{"finish_reason": "length", "message": {"content": "abcdefgh"}}]}
    answer = read_body_answer(request, 200, [], json.dumps(body).encode(), prompt_tokens=7)
    usage = json.loads(answer.body)["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (7, answer.output_tokens) == (7, 2)


def test_a_prompt_that_comes_back_is_no_answer() -> None:
    request = GenerationRequest(
        dialect=Dialect.GENERATE, is_stream=False, prompts=("a long prompt ",), return_full_text=True
    )
    body = json.dumps({"generated_text": "a long prompt abcdefgh"}).encode()
    answer = read_body_answer(request, 200, [], body)
    assert (answer.output_tokens, answer.token_source, answer.body) == (2, "estimated", body)


def test_headers_stand_in_for_details_that_tell_nothing() -> None:
    request = GenerationRequest(dialect=Dialect.GENERATE, is_stream=False)
    body = json.dumps({"generated_text": "abcdefgh", "details": {"finish_reason": "length"}}).encode()
    answer = read_body_answer(request, 200, [(b"x-generated-tokens", b"5")], body)
    assert (answer.output_tokens, answer.token_source) == (5, "backend")


def test_a_native_stream_that_ends_with_zero_keeps_its_own_count() -> None:
    relay = StreamRelay(GenerationRequest(dialect=Dialect.GENERATE, is_stream=True))
    token = {"id": 1, "text": " a", "logprob": -0.5, "special": False}
    details = {"finish_reason": "length", "generated_tokens": 0, "seed": None, "input_length": 3}
    relay.feed(json.dumps({"index": 1, "token": token, "generated_text": None, "details": None}).encode())
    relay.feed(json.dumps({"index": 2, "token": token, "generated_text": " a a", "details": details}).encode())
    assert (relay.is_complete, relay.output_tokens, relay.is_exact) == (True, 2, False)
