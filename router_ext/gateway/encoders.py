"""Answers in the client's dialect, as TGI itself would have written them.

    encoder = encoder_for(request, context)
    if encoder.is_stream:
        headers = encoder.headers()                          # status 200, with the first token
        send(encoder.tokens(events))                         # bytes for the tokens the continuation shows
        send(encoder.finish(events, completion))             # the last ones, with the end of that generation
        send(encoder.end())                                  # usage chunk and [DONE] where the dialect has them
    else:
        encoder.tokens(events)                               # collects; returns b""
        encoder.finish(events, completion)
        headers, body = encoder.headers(timings), encoder.end()

``index`` tells which prompt (only completions have several); ``end`` comes once, after all have finished.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import orjson

from router_ext.errors import FairlaneError
from router_ext.gateway.generation import Completion, Dialect, GenerationRequest
from router_ext.gateway.refusals import stream_error
from router_ext.wire.headers import Headers, Timings, body_headers, stream_headers
from router_ext.wire.openai import (
    DONE,
    ChatChunks,
    CompletionChunks,
    chat_body,
    completion_body,
    logprob_item,
)
from router_ext.wire.responses import (
    Item,
    ResponseEvents,
    message_item,
    response_logprob,
    response_object,
    response_status,
    response_usage,
)
from router_ext.wire.tgi import StreamEvent, Token

DEFAULT_MODEL_NAMES = frozenset({"", "tgi", "dummy"})
"""Names that mean the key's default pool; answers then carry the backend's model id, as TGI does for ``tgi``."""


class AnswerContext(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer says beyond the generation itself.

    Attributes:
        model_id, system_fingerprint: of the backend (``/info``). created: Unix time in whole seconds.
        compute_type: the backend's ``x-compute-type``. compute_characters: characters of all prompts (a chat:
            of the templated text).
    """

    model_id: str
    system_fingerprint: str
    created: int
    compute_type: str = "cpu"
    compute_characters: int = 0


class Encoder(Protocol):
    """One client's answer. ``output_tokens`` and ``prompt_tokens`` are sums over finished generations."""

    is_stream: bool
    output_tokens: int
    prompt_tokens: int

    def headers(self, timings: Timings | None = None) -> Headers:
        """Head of the answer; a whole answer needs the timings."""
        ...

    def tokens(self, events: Sequence[StreamEvent], index: int = 0) -> bytes:
        """Tokens that are not the last."""
        ...

    def finish(self, events: Sequence[StreamEvent], completion: Completion, index: int = 0) -> bytes:
        """The last tokens of one generation (at least one) and its end."""
        ...

    def end(self) -> bytes:
        """After the last generation: rest of the stream, or the whole body."""
        ...

    def failed(self, error: FairlaneError) -> bytes:
        """An error inside a stream; nothing follows."""
        ...


def encoder_for(request: GenerationRequest, context: AnswerContext) -> Encoder:
    """The encoder of a request that is not passed through."""
    match request.dialect:
        case Dialect.CHAT:
            return ChatStream(request, context) if request.is_stream else ChatBody(request, context)
        case Dialect.COMPLETIONS:
            return CompletionStream(request, context) if request.is_stream else CompletionBody(request, context)
        case Dialect.RESPONSES:
            return ResponseStream(request, context) if request.is_stream else ResponseBody(request, context)
        case _:
            return GenerateStream(request, context) if request.is_stream else GenerateBody(request, context)


def model_name(request: GenerationRequest, model_id: str) -> str:
    """What ``model`` says in an answer: the client's own name for it, or the backend's ``model_id``."""
    if request.model is None or request.model in DEFAULT_MODEL_NAMES:
        return model_id
    return request.model


def response_frame(request: GenerationRequest, model_id: str, created: int) -> Item:
    """What a response object says of its request and its making."""
    return {"created_at": created, "model": model_name(request, model_id), **request.echo}


def new_response_key() -> str:
    """Of which the ids of one response are made."""
    return secrets.token_hex(24)


class _Streaming:
    is_stream = True

    def __init__(self, request: GenerationRequest, context: AnswerContext) -> None:
        self._request = request
        self._context = context
        self.output_tokens = 0
        self.prompt_tokens = 0

    def headers(self, timings: Timings | None = None) -> Headers:
        return stream_headers(self._context.compute_type, self._context.compute_characters)

    def failed(self, error: FairlaneError) -> bytes:
        return stream_error(error, self._request.dialect)

    def _count(self, completion: Completion) -> None:
        self.output_tokens += completion.output_tokens
        self.prompt_tokens += completion.prompt_tokens


class _Whole:
    """``keeps_events``: the answer lists its tokens, so they are kept until the end."""

    is_stream = False
    has_compute_time = True

    def __init__(self, request: GenerationRequest, context: AnswerContext, *, keeps_events: bool = False) -> None:
        self._request = request
        self._context = context
        self._keeps_events = keeps_events
        self._events: list[StreamEvent] = []
        self._completion: Completion | None = None
        self.output_tokens = 0
        self.prompt_tokens = 0

    def headers(self, timings: Timings | None = None) -> Headers:
        assert timings is not None
        context = self._context
        return body_headers(
            context.compute_type,
            context.compute_characters,
            timings,
            self.prompt_tokens,
            self.output_tokens,
            has_compute_time=self.has_compute_time,
        )

    def _count(self, completion: Completion) -> None:
        self.output_tokens += completion.output_tokens
        self.prompt_tokens += completion.prompt_tokens

    def tokens(self, events: Sequence[StreamEvent], index: int = 0) -> bytes:
        if self._keeps_events:
            self._events.extend(events)
        return b""

    def finish(self, events: Sequence[StreamEvent], completion: Completion, index: int = 0) -> bytes:
        self.tokens(events)
        self._count(completion)
        self._completion = completion
        return b""

    def failed(self, error: FairlaneError) -> bytes:
        return b""


# --- TGI's own paths ---------------------------------------------------------------------------------------------

_INDEX = b'{"index":'
_TOKEN = b'"token":{'
_END = b',"generated_text":'


class GenerateStream(_Streaming):
    """``/generate_stream`` and ``/`` with ``stream``: upstream's bytes, the index rewritten where slices follow."""

    def tokens(self, events: Sequence[StreamEvent], index: int = 0) -> bytes:
        if len(events) == 1:
            event = events[0]
            if event.index == event.upstream_index and event.details is None:
                return b"data: " + event.payload + b"\n\n"
        elif events and all(event.index == event.upstream_index and event.details is None for event in events):
            return b"data: " + b"\n\ndata: ".join([event.payload for event in events]) + b"\n\n"
        return b"".join([b"data: " + _inner(event) + b"\n\n" for event in events])

    def finish(self, events: Sequence[StreamEvent], completion: Completion, index: int = 0) -> bytes:
        self._count(completion)
        text = completion.generated_text
        if self._request.return_full_text:
            text = self._request.prompts[index] + text
        details = b"null"
        if self._request.wants_details:
            details = orjson.dumps(
                {
                    "finish_reason": completion.finish_reason,
                    "generated_tokens": completion.output_tokens,
                    "seed": completion.seed,
                    "input_length": completion.prompt_tokens,
                }
            )
        payload = _numbered(events[-1])
        last = payload[: payload.index(_END)] + _END + orjson.dumps(text) + b',"details":' + details + b"}"
        return self.tokens(events[:-1]) + b"data: " + last + b"\n\n"

    def end(self) -> bytes:
        return b""


def _numbered(event: StreamEvent) -> bytes:
    """The event's JSON with the client's index. Everything else stays as the backend wrote it."""
    payload = event.payload
    if not payload.startswith(_INDEX) or _END not in payload:
        return _rewritten(event)
    if event.index == event.upstream_index:
        return payload
    return _INDEX + b"%d" % event.index + payload[payload.index(b",") :]


def _inner(event: StreamEvent) -> bytes:
    """A token that is not the client's last; it may have been the last of its slice upstream."""
    payload = _numbered(event)
    if not event.is_final:
        return payload
    return payload[: payload.index(_END)] + b',"generated_text":null,"details":null}'


def _rewritten(event: StreamEvent) -> bytes:
    """For a backend with another key order: the event in TGI's order."""
    data: dict[str, Any] = {"index": event.index, "token": _token(event.token)}
    if event.top_tokens is not None:
        data["top_tokens"] = [_token(token) for token in event.top_tokens]
    data["generated_text"] = None
    data["details"] = None
    return orjson.dumps(data)


def _token(token: Token | None) -> dict[str, Any]:
    assert token is not None
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}


class GenerateBody(_Whole):
    """``/generate`` and ``/`` without ``stream``."""

    def __init__(self, request: GenerationRequest, context: AnswerContext) -> None:
        super().__init__(request, context, keeps_events=request.wants_details)

    def end(self) -> bytes:
        completion = self._completion
        assert completion is not None
        request = self._request
        text = completion.generated_text
        if request.return_full_text:
            text = request.prompts[0] + text
        parts = [b'{"generated_text":', orjson.dumps(text)]
        if request.wants_details:
            details: dict[str, Any] = {
                "finish_reason": completion.finish_reason,
                "generated_tokens": completion.output_tokens,
                "seed": completion.seed,
                "prefill": [],
                "tokens": [orjson.Fragment(_raw_token(event)) for event in self._events],
            }
            if request.parameters.get("top_n_tokens"):
                details["top_tokens"] = [[_token(t) for t in event.top_tokens or ()] for event in self._events]
            parts += [b',"details":', orjson.dumps(details)]
        parts.append(b"}")
        if request.dialect is Dialect.COMPAT:
            return b"[" + b"".join(parts) + b"]"
        return b"".join(parts)


def _raw_token(event: StreamEvent) -> bytes:
    """``token`` as the backend wrote it, so that numbers keep their form."""
    payload = event.payload
    start = payload.find(_TOKEN)
    # Quotes are escaped inside strings, so these keys cannot be part of a token's text.
    end = payload.find(b'},"top_tokens":', start)
    if end < 0:
        end = payload.find(b"}" + _END, start)
    if start < 0 or end < 0:
        return orjson.dumps(_token(event.token))
    return payload[start + len(_TOKEN) - 1 : end + 1]


# --- OpenAI's ----------------------------------------------------------------------------------------------------


class ChatStream(_Streaming):
    """``/v1/chat/completions`` with ``stream``."""

    def __init__(self, request: GenerationRequest, context: AnswerContext) -> None:
        super().__init__(request, context)
        self._chunks = ChatChunks(
            model=model_name(request, context.model_id),
            system_fingerprint=context.system_fingerprint,
            created=context.created,
            with_logprobs=request.wants_logprobs,
        )
        self._chunk = self._chunks.token

    def tokens(self, events: Sequence[StreamEvent], index: int = 0) -> bytes:
        if len(events) == 1:
            return self._chunk(events[0])
        return b"".join(map(self._chunk, events))

    def finish(self, events: Sequence[StreamEvent], completion: Completion, index: int = 0) -> bytes:
        self._count(completion)
        return self.tokens(events[:-1]) + self._chunks.last(events[-1], completion.finish_reason)

    def end(self) -> bytes:
        if self._request.include_usage:
            return self._chunks.usage(self.prompt_tokens, self.output_tokens) + DONE
        return DONE


class ChatBody(_Whole):
    """``/v1/chat/completions`` without ``stream``."""

    def __init__(self, request: GenerationRequest, context: AnswerContext) -> None:
        super().__init__(request, context, keeps_events=request.wants_logprobs)

    def end(self) -> bytes:
        completion = self._completion
        assert completion is not None
        return chat_body(
            model=model_name(self._request, self._context.model_id),
            system_fingerprint=self._context.system_fingerprint,
            created=self._context.created,
            text=completion.generated_text,
            logprobs=[logprob_item(event) for event in self._events] if self._request.wants_logprobs else None,
            finish_reason=completion.finish_reason,
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.output_tokens,
        )


class CompletionStream(_Streaming):
    """``/v1/completions`` with ``stream``; several prompts share one stream."""

    def __init__(self, request: GenerationRequest, context: AnswerContext) -> None:
        super().__init__(request, context)
        self._chunks = CompletionChunks(
            model=model_name(request, context.model_id),
            system_fingerprint=context.system_fingerprint,
            created=context.created,
        )

    def tokens(self, events: Sequence[StreamEvent], index: int = 0) -> bytes:
        chunk = self._chunks.token
        if len(events) == 1:
            return chunk(index, events[0])
        return b"".join([chunk(index, event) for event in events])

    def finish(self, events: Sequence[StreamEvent], completion: Completion, index: int = 0) -> bytes:
        self._count(completion)
        return self.tokens(events[:-1], index) + self._chunks.last(
            index, events[-1], completion.finish_reason, completion.prompt_tokens, completion.output_tokens
        )

    def end(self) -> bytes:
        return DONE


class CompletionBody(_Whole):
    """``/v1/completions`` without ``stream``; choices in the order of their prompts (TGI: in that of their ends)."""

    has_compute_time = False

    def __init__(self, request: GenerationRequest, context: AnswerContext) -> None:
        super().__init__(request, context)
        self._choices: list[tuple[int, str, str]] = []

    def finish(self, events: Sequence[StreamEvent], completion: Completion, index: int = 0) -> bytes:
        self._choices.append((index, completion.generated_text, completion.finish_reason))
        return super().finish(events, completion, index)

    def end(self) -> bytes:
        return completion_body(
            model=model_name(self._request, self._context.model_id),
            system_fingerprint=self._context.system_fingerprint,
            created=self._context.created,
            choices=sorted(self._choices),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.output_tokens,
        )


class ResponseStream(_Streaming):
    """``/v1/responses`` with ``stream``."""

    def __init__(self, request: GenerationRequest, context: AnswerContext) -> None:
        super().__init__(request, context)
        self._events = ResponseEvents(response_frame(request, context.model_id, context.created), new_response_key())
        self._finish_reason: str | None = None

    def tokens(self, events: Sequence[StreamEvent], index: int = 0) -> bytes:
        return b"".join([self._token(event) for event in events])

    def _token(self, event: StreamEvent) -> bytes:
        token = event.token
        assert token is not None
        logprobs = [_response_logprob(event)] if self._request.wants_logprobs else ()
        return self._events.text("" if token.special else token.text, logprobs)

    def finish(self, events: Sequence[StreamEvent], completion: Completion, index: int = 0) -> bytes:
        self._count(completion)
        self._finish_reason = completion.finish_reason
        return self.tokens(events)

    def end(self) -> bytes:
        return self._events.end(self._finish_reason, prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens)

    def failed(self, error: FairlaneError) -> bytes:
        return response_failure(self._events, error)


class ResponseBody(_Whole):
    """``/v1/responses`` without ``stream``."""

    def __init__(self, request: GenerationRequest, context: AnswerContext) -> None:
        super().__init__(request, context, keeps_events=request.wants_logprobs)

    def end(self) -> bytes:
        completion = self._completion
        assert completion is not None
        key, status = new_response_key(), response_status(completion.finish_reason)
        logprobs = [_response_logprob(event) for event in self._events] if self._request.wants_logprobs else ()
        item = message_item(key, 0, completion.generated_text, status=status, logprobs=logprobs)
        frame = response_frame(self._request, self._context.model_id, self._context.created)
        usage = response_usage(completion.prompt_tokens, completion.output_tokens)
        return orjson.dumps(response_object(frame, key, status=status, output=[item], usage=usage))


def _response_logprob(event: StreamEvent) -> Item:
    token = event.token
    assert token is not None
    return response_logprob(token.text, token.logprob, [(top.text, top.logprob) for top in event.top_tokens or ()])


def response_failure(events: ResponseEvents, error: FairlaneError) -> bytes:
    """The end of a streamed response that failed."""
    return events.failed(message=error.message, code=error.code, kind=error.openai_type, param=error.param)
