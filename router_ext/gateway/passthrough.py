"""Answers that go through whole: TGI's bytes to the client, its tokens to the books.

Grammar, tools, response formats, best_of, prompt details and images cannot be resumed, so the matching endpoint serves
them in one piece. What TGI wrote is relayed byte for byte, but for what only the router asked for (the usage chunk of
a chat stream, details of a sequence count), for the client's name of the model, and for errors, which take the
router's shape. For ``/v1/responses`` the chat's answer is written anew.

    relay = relay_for(request)                         # event streams
    for payload in parser.feed(chunk): send(relay.feed(payload))
    relay.is_complete                                  # at the end of the body: False means the backend broke off
    relay = read_body_answer(request, status, headers, body)   # whole answers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from router_ext.errors import FairlaneError
from router_ext.gateway.encoders import model_name, new_response_key, response_failure, response_frame
from router_ext.gateway.generation import Dialect, GenerationRequest
from router_ext.gateway.refusals import stream_error
from router_ext.wire.headers import Headers
from router_ext.wire.responses import (
    Item,
    ResponseEvents,
    call_item,
    message_item,
    response_logprob,
    response_object,
    response_status,
    response_usage,
)
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
            return self._done() if self.is_complete else b""
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
        return self._chunk(chunk, payload)

    def _chunk(self, chunk: dict[str, Any], payload: bytes) -> bytes:
        return b"data: " + _renamed(self._request, chunk, payload) + b"\n\n"

    def _done(self) -> bytes:
        return b"data: [DONE]\n\n"

    def failed(self, error: FairlaneError) -> bytes:
        """An error after something was relayed; nothing follows."""
        return stream_error(error, self._request.dialect)


class ResponseRelay(StreamRelay):
    """A chat's chunks, written as the events of ``/v1/responses``."""

    __slots__ = ("_call", "_events")

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__(request)
        self._events: ResponseEvents | None = None
        self._call: Any = None

    def _chunk(self, chunk: dict[str, Any], payload: bytes) -> bytes:
        events = self._events
        if events is None:
            frame = response_frame(self._request, str(chunk.get("model")), int(chunk.get("created") or 0))
            events = self._events = ResponseEvents(frame, new_response_key())
        out = b""
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                if self._call != (place := call.get("index", 0)):
                    self._call = place
                    out += events.call(function.get("name") or "")
                out += events.arguments(function.get("arguments") or "")
            if self._call is None:
                out += events.text(delta.get("content") or "", _response_logprobs(self._request, choice))
        return out

    def _done(self) -> bytes:
        if self._events is None:
            raise BadUpstreamAnswer("a stream without a chunk")
        return self._events.end(self.finish_reason, prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens)

    def failed(self, error: FairlaneError) -> bytes:
        return b"" if self._events is None else response_failure(self._events, error)


def relay_for(request: GenerationRequest) -> StreamRelay:
    """The relay of a request that is passed through."""
    return ResponseRelay(request) if request.dialect is Dialect.RESPONSES else StreamRelay(request)


def _renamed(request: GenerationRequest, answer: dict[str, Any], payload: bytes) -> bytes:
    """``payload`` with the client's own name for the model, which the backend was not told."""
    told = answer.get("model")
    name = model_name(request, told) if isinstance(told, str) else told
    if name == told:
        return payload
    # Nothing but constants and numbers stands before it.
    return payload.replace(b'"model":' + orjson.dumps(told), b'"model":' + orjson.dumps(name), 1)


def _response_logprobs(request: GenerationRequest, choice: dict[str, Any]) -> list[Item]:
    if not request.wants_logprobs:
        return []
    return [
        response_logprob(
            item["token"], item["logprob"], [(top["token"], top["logprob"]) for top in item.get("top_logprobs") or ()]
        )
        for item in (choice.get("logprobs") or {}).get("content") or ()
    ]


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
        if request.dialect is Dialect.RESPONSES:
            body = _response_body(request, answer, choices[0], prompt_tokens, output_tokens)
        else:
            body = _renamed(request, answer, body)
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


def _response_body(
    request: GenerationRequest, answer: dict[str, Any], choice: dict[str, Any], prompt_tokens: int, output_tokens: int
) -> bytes:
    """A whole chat answer as a response object."""
    key, status = new_response_key(), response_status(choice.get("finish_reason"))
    message = choice.get("message") or {}
    output = [
        call_item(key, place, call["function"]["name"], call["function"]["arguments"], status=status)
        for place, call in enumerate(message.get("tool_calls") or ())
    ]
    if not output:
        logprobs = _response_logprobs(request, choice)
        output = [message_item(key, 0, message.get("content") or "", status=status, logprobs=logprobs)]
    frame = response_frame(request, str(answer.get("model")), int(answer.get("created") or 0))
    usage = response_usage(prompt_tokens, output_tokens)
    return orjson.dumps(response_object(frame, key, status=status, output=output, usage=usage))


def _number(value: bytes | None) -> int:
    return int(value) if value is not None and value.isdigit() else 0
