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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import orjson
from msgspec import UNSET

from router_ext.errors import FairlaneError
from router_ext.gateway.encoders import model_name, new_response_key, response_failure, response_frame
from router_ext.gateway.generation import Dialect, GenerationRequest
from router_ext.gateway.refusals import stream_error
from router_ext.wire.headers import Headers
from router_ext.wire.relayed import (
    Chat,
    ChatChoice,
    ChatMessage,
    Chunk,
    FunctionPart,
    Usage,
    decode_chat,
    decode_chunk,
    decode_generated,
)
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

CHARACTERS_PER_TOKEN = 4.0
"""Of English text and the byte-pair vocabularies of today, where nothing better is known."""

Count = Callable[[str], tuple[int, str]]
"""Tokens of a text, and what the books call such a count (``counted``, ``estimated``)."""


def estimate(text: str) -> tuple[int, str]:
    """Tokens of a text by its length."""
    return math.ceil(len(text) / CHARACTERS_PER_TOKEN), "estimated"


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
        if self.is_complete:
            return b""  # the client has its end, and what follows is not counted
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
            if event.details.generated_tokens:
                self.output_tokens = event.details.generated_tokens
                self.is_exact = True
            self.prompt_tokens = event.details.input_length
        if event.is_final:
            self.is_complete = True
            if not self._request.wants_details and event.details is not None:
                payload = _without_details(payload)
        return b"data: " + payload + b"\n\n"

    def _feed_openai(self, payload: bytes) -> bytes:
        if payload == b"[DONE]":
            self.is_complete = self.error is None
            return self._done() if self.is_complete else b""
        chunk = decode_chunk(payload)
        if chunk.error is not UNSET:
            problem = chunk.error
            message = problem.get("message", "") if isinstance(problem, dict) else str(problem)
            self.error = classify_error(str(message), "")
            return b""
        if chunk.usage is not None:
            # Null or 0 is no count: what was relayed is.
            if chunk.usage.completion_tokens:
                self.output_tokens = chunk.usage.completion_tokens
                self.is_exact = True
            self.prompt_tokens = chunk.usage.prompt_tokens or self.prompt_tokens
            if not chunk.choices and not self._request.include_usage:
                return b""
        elif chunk.choices:
            self.output_tokens += 1
        if chunk.choices:
            self.finish_reason = chunk.choices[0].finish_reason or self.finish_reason
        return self._chunk(chunk, payload)

    def _chunk(self, chunk: Chunk, payload: bytes) -> bytes:
        return b"data: " + _renamed(self._request, chunk.model, payload) + b"\n\n"

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
        self._call: int | None = None

    def _chunk(self, chunk: Chunk, payload: bytes) -> bytes:
        chat = decode_chat(payload)
        events = self._events
        if events is None:
            frame = response_frame(self._request, chat.model, chat.created)
            events = self._events = ResponseEvents(frame, new_response_key())
        out = b""
        for choice in chat.choices or ():
            delta = choice.delta or _NO_MESSAGE
            for call in delta.calls:
                function = call.function or _NO_FUNCTION
                if self._call != call.index:
                    self._call = call.index
                    out += events.call(function.name or "")
                out += events.arguments(function.text)
            if self._call is None:
                out += events.text(delta.content or "", _response_logprobs(self._request, choice))
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


def _without_details(payload: bytes) -> bytes:
    """A final event with ``details`` as null: what a client gets that did not ask for them."""
    place = payload.rfind(b',"details":{')
    if place >= 0:
        return payload[:place] + b',"details":null}'
    try:
        return orjson.dumps({**orjson.loads(payload), "details": None})  # not spelt as TGI does
    except orjson.JSONDecodeError as error:
        raise BadUpstreamAnswer(f"not a stream event: {error}") from None


def _renamed(request: GenerationRequest, told: str | None, payload: bytes) -> bytes:
    """``payload`` with the client's own name for the model, which the backend was not told."""
    if told is None or (name := model_name(request, told)) == told:
        return payload
    # Nothing but constants and numbers stands before it.
    return payload.replace(b'"model":' + orjson.dumps(told), b'"model":' + orjson.dumps(name), 1)


def _response_logprobs(request: GenerationRequest, choice: ChatChoice) -> list[Item]:
    if not request.wants_logprobs or choice.logprobs is None:
        return []
    return [
        response_logprob(item.token, item.logprob, [(top.token, top.logprob) for top in item.top_logprobs or ()])
        for item in choice.logprobs.content or ()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyAnswer:
    """A whole relayed answer. ``error`` set: nothing to relay, refuse with ``refusals.refusal_of``.

    ``prompt_tokens``: 0 if the backend did not tell. ``token_source``: who counted ``output_tokens``, as in the books.
    """

    headers: Headers = field(default_factory=list)
    body: bytes = b""
    prompt_tokens: int = 0
    output_tokens: int = 0
    token_source: str = "backend"
    finish_reason: str | None = None
    error: UpstreamError | None = None


def read_body_answer(
    request: GenerationRequest,
    status: int,
    headers: Sequence[tuple[bytes, bytes]],
    body: bytes,
    *,
    prompt_tokens: int = 0,
    count: Count = estimate,
) -> BodyAnswer:
    """Relay a whole answer and read its counts: every sequence of ``best_of`` counts, not the best alone.

    What a proxy or another server left out (no usage, no headers, or zeros beside a text) is counted by the text.

    Args:
        prompt_tokens: the router's own count, for an answer that tells none. count: for a text whose tokens are not
            told.

    Raises:
        BadUpstreamAnswer: a 200 that is not TGI's format.
    """
    if status != 200:
        return BodyAnswer(error=decode_error(status, body))
    values = dict(headers)
    told_tokens = _number(values.get(b"x-prompt-tokens"))
    output_tokens = _number(values.get(b"x-generated-tokens"))
    source, finish_reason = "backend", None
    if request.dialect.is_openai:
        chunk = decode_chunk(body)
        usage = chunk.usage or _NO_USAGE
        told_tokens = usage.prompt_tokens or told_tokens
        output_tokens = usage.completion_tokens or output_tokens
        finish_reason = chunk.choices[0].finish_reason if chunk.choices else None
        if not output_tokens:
            written = "".join(choice.written for choice in decode_chat(body).choices or ())
            output_tokens, source = _counted(request, written, finish_reason, count)
        if request.dialect is Dialect.RESPONSES:
            body = _response_body(request, decode_chat(body), told_tokens or prompt_tokens, output_tokens)
        else:
            body = _renamed(request, chunk.model, body)
    else:
        answer, is_list = decode_generated(body)
        if answer.details is not None:
            finish_reason = answer.details.finish_reason
            output_tokens = answer.details.output_tokens or output_tokens
        if not output_tokens:
            written = answer.written
            if request.return_full_text and request.prompts:
                written = written.removeprefix(request.prompts[0])
            output_tokens, source = _counted(request, written, finish_reason, count)
        if answer.details is not None and not request.wants_details:
            text = b'{"generated_text":' + orjson.dumps(answer.generated_text) + b"}"
            body = b"[" + text + b"]" if is_list else text
    return BodyAnswer(
        headers=relayed_headers(headers),
        body=body,
        prompt_tokens=told_tokens,
        output_tokens=output_tokens,
        token_source=source,
        finish_reason=finish_reason,
    )


def _counted(request: GenerationRequest, written: str, finish_reason: str | None, count: Count) -> tuple[int, str]:
    """Tokens of a text, and the one that ended it and is not in it."""
    tokens, source = count(written)
    is_ended = finish_reason == "eos_token" or (finish_reason == "stop" and not request.stop)
    return tokens + is_ended, source


def _response_body(request: GenerationRequest, chat: Chat, prompt_tokens: int, output_tokens: int) -> bytes:
    """A whole chat answer as a response object."""
    choice = chat.choices[0] if chat.choices else ChatChoice()
    key, status = new_response_key(), response_status(choice.finish_reason)
    message = choice.message or _NO_MESSAGE
    functions = [call.function or _NO_FUNCTION for call in message.calls]
    output = [
        call_item(key, place, function.name or "", function.text, status=status)
        for place, function in enumerate(functions)
    ]
    if not output:
        logprobs = _response_logprobs(request, choice)
        output = [message_item(key, 0, message.content or "", status=status, logprobs=logprobs)]
    frame = response_frame(request, chat.model, chat.created)
    usage = response_usage(prompt_tokens, output_tokens)
    return orjson.dumps(response_object(frame, key, status=status, output=output, usage=usage))


def _number(value: bytes | None) -> int:
    """A count of a header; 0 for what no backend can have counted."""
    return int(value) if value is not None and value.isdigit() and len(value) < 10 else 0


_NO_MESSAGE = ChatMessage()
_NO_FUNCTION = FunctionPart()
_NO_USAGE = Usage()
