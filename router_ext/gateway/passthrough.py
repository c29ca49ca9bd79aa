"""Answers that go through whole: TGI's bytes to the client, its tokens to the books.

Grammar, tools, response formats, best_of, prompt details and images cannot be resumed, so the matching endpoint serves
them in one piece. What TGI wrote is relayed byte for byte, but for what only the router asked for (the usage chunk of
a chat stream, details of a sequence count) and for errors, which take the router's shape.

    relay = StreamRelay(request)                       # event streams
    for payload in parser.feed(chunk): send(relay.feed(payload))
    relay.is_complete                                  # at the end of the body: False means the backend broke off
    relay = read_body_answer(request, status, headers, body)   # whole answers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from router_ext.gateway.generation import Dialect, GenerationRequest, PassThrough
from router_ext.wire.headers import Headers
from router_ext.wire.tgi import BadUpstreamAnswer, UpstreamError, classify_error, decode_error, decode_event

_OWN_HEADERS = frozenset({b"content-length", b"transfer-encoding", b"connection", b"date", b"vary", b"server"})
"""Set by the router's own server, or about one hop only."""


def relayed_headers(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """A backend's response headers as far as they belong to the client (its CORS answer does not)."""
    return [
        (name, value) for name, value in headers if name not in _OWN_HEADERS and not name.startswith(b"access-control-")
    ]


class StreamRelay:
    """One relayed event stream.

    Attributes:
        output_tokens: events so far; the exact number once the backend has told it. prompt_tokens: 0 until told.
        finish_reason: TGI's or OpenAI's word, None until told. error: an error event; nothing of it was relayed.
        is_complete: the stream ended as it should. is_exact: the backend told the token counts.
    """

    __slots__ = (
        "_is_openai",
        "_request",
        "error",
        "finish_reason",
        "is_complete",
        "is_exact",
        "output_tokens",
        "prompt_tokens",
    )

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._is_openai = request.dialect.is_openai
        self.output_tokens = 0
        self.prompt_tokens = 0
        self.finish_reason: str | None = None
        self.error: UpstreamError | None = None
        self.is_complete = False
        self.is_exact = False

    def feed(self, payload: bytes) -> bytes:
        """Bytes for the client of one event; empty for what only the router asked for, and for errors.

        Raises:
            BadUpstreamAnswer: not TGI's format.
        """
        return self._feed_openai(payload) if self._is_openai else self._feed_native(payload)

    def _feed_native(self, payload: bytes) -> bytes:
        event = decode_event(payload)
        if event.token is None:
            if event.error is None:
                raise BadUpstreamAnswer("an event with neither token nor error")
            self.error = classify_error(event.error, event.error_type or "")
            return b""
        self.output_tokens += 1
        if event.details is not None:
            self.finish_reason = event.details.finish_reason
            self.output_tokens = event.details.generated_tokens
            self.prompt_tokens = event.details.input_length
            self.is_exact = True
        if event.is_final:
            self.is_complete = True
            if not self._request.wants_details and event.details is not None:
                place = payload.rfind(b',"details":{')
                payload = payload[:place] + b',"details":null}'
        return b"data: " + payload + b"\n\n"

    def _feed_openai(self, payload: bytes) -> bytes:
        if payload == b"[DONE]":
            self.is_complete = self.error is None
            return b"data: [DONE]\n\n" if self.is_complete else b""
        try:
            chunk = orjson.loads(payload)
        except orjson.JSONDecodeError as error:
            raise BadUpstreamAnswer(f"not a chunk: {error}") from None
        if not isinstance(chunk, dict):
            raise BadUpstreamAnswer("a chunk that is not an object")
        if "error" in chunk:
            problem = chunk["error"]
            message = problem.get("message", "") if isinstance(problem, dict) else str(problem)
            self.error = classify_error(str(message), "")
            return b""
        usage = chunk.get("usage")
        choices = chunk.get("choices") or []
        if isinstance(usage, dict):
            self.output_tokens = int(usage.get("completion_tokens") or 0)
            self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self.is_exact = True
            if not choices and not self._request.include_usage:
                return b""
        elif choices:
            self.output_tokens += 1
            self.finish_reason = choices[0].get("finish_reason") or self.finish_reason
        return b"data: " + payload + b"\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyAnswer:
    """A whole relayed answer. ``error`` set: nothing to relay, refuse with ``refusals.refusal_of``."""

    headers: Headers = field(default_factory=list)
    body: bytes = b""
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    error: UpstreamError | None = None


def read_body_answer(
    request: GenerationRequest, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes
) -> BodyAnswer:
    """Relay a whole answer and read its counts: every sequence of ``best_of`` counts, not the best alone.

    Raises:
        BadUpstreamAnswer: a 200 that is not TGI's format.
    """
    if status != 200:
        return BodyAnswer(error=decode_error(status, body))
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadUpstreamAnswer(f"not an answer: {error}") from None
    answer: Any = data[0] if isinstance(data, list) and data else data
    if not isinstance(answer, dict):
        raise BadUpstreamAnswer("an answer that is not an object")
    values = dict(headers)
    prompt_tokens = _number(values.get(b"x-prompt-tokens"))
    output_tokens = _number(values.get(b"x-generated-tokens"))
    finish_reason = None
    if request.dialect.is_openai:
        usage = answer.get("usage") or {}
        prompt_tokens = int(usage.get("prompt_tokens") or prompt_tokens)
        output_tokens = int(usage.get("completion_tokens") or output_tokens)
        choices = answer.get("choices") or [{}]
        finish_reason = choices[0].get("finish_reason")
    else:
        details = answer.get("details")
        if isinstance(details, dict):
            finish_reason = details.get("finish_reason")
            sequences = [details, *(details.get("best_of_sequences") or [])]
            output_tokens = sum(int(s.get("generated_tokens") or 0) for s in sequences)
        if not request.wants_details and details is not None:
            text = b'{"generated_text":' + orjson.dumps(answer.get("generated_text")) + b"}"
            body = b"[" + text + b"]" if isinstance(data, list) else text
    return BodyAnswer(
        headers=relayed_headers(headers),
        body=body,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        finish_reason=finish_reason,
    )


def pass_chat(request: GenerationRequest, body: bytes, reason: str) -> PassThrough:
    """Pass a plain chat through after all (``bos.ChatPrompt.text`` is None). ``body``: the client's."""
    data = orjson.loads(body)
    if data.get("model") is not None:
        data["model"] = "tgi"
    if request.is_stream:
        data["stream_options"] = {**(data.get("stream_options") or {}), "include_usage": True}
    assert request.dialect is Dialect.CHAT
    return PassThrough(path="/v1/chat/completions", body=orjson.dumps(data), reason=reason)


def _number(value: bytes | None) -> int:
    return int(value) if value is not None and value.isdigit() else 0
