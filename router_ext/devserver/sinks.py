"""Where tokens go: events of each dialect, or a collected answer. Event bytes are put together from prebuilt pieces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import orjson

from router_ext.devserver.codec import Codec
from router_ext.devserver.generation import Ending, Generation, GenerationFailed, Token, logprob_json
from router_ext.devserver.http import Exchange
from router_ext.devserver.tool_calls import NO_TOOL, CallStream, Fragment

DONE = b"data: [DONE]\n\n"
_FINISH = {"eos_token": "stop", "length": "length", "stop_sequence": "stop_sequence"}


def sse(value: Any) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(value)


def native_error(error: GenerationFailed) -> bytes:
    return orjson.dumps({"error": error.message, "error_type": error.error_type})


def openai_error_event(error: GenerationFailed) -> bytes:
    """OpenAI-shaped stream error; TGI says 422 whatever happened."""
    return sse({"error": {"message": error.message, "http_status_code": 422}})


def token_json(codec: Codec, token: Token) -> bytes:
    """``{"id","text","logprob","special"}`` of one token."""
    return b'{%b,"logprob":%b,"special":%b}' % (
        codec.token_json(token.token_id)
        if token.is_whole
        else b'"id":%d,"text":%b' % (token.token_id, orjson.dumps(token.text)),
        logprob_json(token.logprob),
        b"true" if token.special else b"false",
    )


def plain_token_json(codec: Codec, token_id: int, logprob: float) -> bytes:
    """A token that is not part of the stream (a top token): its text by itself."""
    return b'{"id":%d,"text":%b,"logprob":%b,"special":%b}' % (
        token_id,
        orjson.dumps(codec.text_of(token_id)),
        logprob_json(logprob),
        b"true" if token_id in codec.special else b"false",
    )


def top_json(codec: Codec, token: Token) -> bytes:
    return b"[%b]" % b",".join(plain_token_json(codec, i, logprob) for i, logprob in token.top)


class StreamSink:
    """``/generate_stream`` and POST ``/`` with ``stream``."""

    def __init__(self, exchange: Exchange, *, details: bool, prefix: str) -> None:
        self._exchange = exchange
        self._details = details
        self._prefix = prefix

    def on_token(self, generation: Generation, token: Token, ending: Ending | None) -> None:
        codec = generation.codec
        head = b'data: {"index":%d,"token":%b' % (generation.generated, token_json(codec, token))
        if token.top:
            head += b',"top_tokens":%b' % top_json(codec, token)
        if ending is None:
            self._exchange.event(head + b',"generated_text":null,"details":null}\n\n')
            return
        details = b"null"
        if self._details:
            details = b'{"finish_reason":"%b","generated_tokens":%d,"seed":%b,"input_length":%d}' % (
                ending.finish_reason.encode(),
                ending.generated_tokens,
                b"null" if ending.seed is None else b"%d" % ending.seed,
                generation.input_length,
            )
        text = orjson.dumps(self._prefix + ending.generated_text)
        self._exchange.last_event(head + b',"generated_text":%b,"details":%b}\n\n' % (text, details))

    def on_error(self, generation: Generation | None, error: GenerationFailed) -> None:
        self._exchange.last_event(b"data: %b\n\n" % native_error(error))


class ChatSink:
    """``/v1/chat/completions`` with ``stream``.

    Args:
        call_id: of the call that tools force the answer into, None where the answer is text.
        on_no_tool: called when the model declines to call; this sink is then done with.
    """

    def __init__(
        self,
        exchange: Exchange,
        codec: Codec,
        *,
        model: str,
        fingerprint: str,
        logprobs: bool,
        include_usage: bool,
        call_id: str | None = None,
        on_no_tool: Callable[[Generation], None] = lambda _: None,
    ) -> None:
        self._exchange = exchange
        self._codec = codec
        self._tail = b',"model":%b,"system_fingerprint":%b,"choices":[' % (
            orjson.dumps(model),
            orjson.dumps(fingerprint),
        )
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._call = None if call_id is None else CallStream()
        self._call_id = call_id
        self._on_no_tool = on_no_tool
        self._is_over = False

    def _head(self) -> bytes:
        return b'data: {"object":"chat.completion.chunk","id":"","created":%d%b' % (int(time.time()), self._tail)

    def on_token(self, generation: Generation, token: Token, ending: Ending | None) -> None:
        if self._is_over:
            return
        if self._call is None:
            delta = b'"content":%b' % (b'""' if token.special else orjson.dumps(token.text))
        else:
            found = self._call.push(token.text, is_special=token.special)
            if found == NO_TOOL:
                self._is_over = True
                self._on_no_tool(generation)
                return
            delta = b"" if not isinstance(found, Fragment) else self._fragment(found)
        chunks = []
        if delta:
            logprobs = orjson.dumps({"content": [chat_logprob(self._codec, token)]}) if self._logprobs else b"null"
            finish = b"null" if ending is None else b'"%b"' % _FINISH[ending.finish_reason].encode()
            chunks.append(
                b'%b{"index":0,"delta":{"role":"assistant",%b},"logprobs":%b,"finish_reason":%b}],"usage":null}\n\n'
                % (self._head(), delta, logprobs, finish)
            )
        if ending is not None and self._include_usage:
            usage = usage_json(generation.input_length, ending.generated_tokens)
            chunks.append(b'%b],"usage":%b}\n\n' % (self._head(), usage))
        if ending is not None:
            chunks.append(DONE)
        for chunk in chunks[:-1]:
            self._exchange.event(chunk)
        if ending is not None:
            self._exchange.last_event(DONE)
        elif chunks:
            self._exchange.event(chunks[-1])

    def _fragment(self, fragment: Fragment) -> bytes:
        if fragment.text is None:
            return b'"content":""'
        function = {"name": fragment.name, "arguments": fragment.text}
        call = {"index": 0, "id": self._call_id, "type": "function", "function": function}
        return b'"tool_calls":[%b]' % orjson.dumps(call)

    def on_error(self, generation: Generation | None, error: GenerationFailed) -> None:
        self._exchange.last_event(openai_error_event(error), then=DONE)


class CompletionSink:
    """``/v1/completions`` with ``stream``; several prompts share one body, which ends with the last of them."""

    def __init__(self, exchange: Exchange, *, model: str, fingerprint: str, prompts: int) -> None:
        self._exchange = exchange
        self._left = prompts
        self._model = orjson.dumps(model)
        self._fingerprint = orjson.dumps(fingerprint)
        self._indices: dict[int, int] = {}

    def add(self, generation: Generation, index: int) -> None:
        self._indices[id(generation)] = index

    def on_token(self, generation: Generation, token: Token, ending: Ending | None) -> None:
        index = self._indices[id(generation)]
        text = orjson.dumps(token.text)
        created = int(time.time())
        if ending is None:
            self._exchange.event(
                b'data: {"object":"text_completion","id":"","created":%d,"choices":[{"index":%d,"text":%b,'
                b'"logprobs":null,"finish_reason":""}],"model":%b,"system_fingerprint":%b}\n\n'
                % (created, index, text, self._model, self._fingerprint)
            )
            return
        self._end(
            b'data: {"object":"text_completion","id":"","created":%d,"model":%b,"system_fingerprint":%b,"choices":['
            b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":"%b"}],"usage":%b}\n\n'
            % (
                created,
                self._model,
                self._fingerprint,
                index,
                text,
                ending.finish_reason.encode(),
                usage_json(generation.input_length, ending.generated_tokens),
            )
        )

    def on_error(self, generation: Generation | None, error: GenerationFailed) -> None:
        self._end(openai_error_event(error))

    def _end(self, event: bytes) -> None:
        self._left -= 1
        if self._left:
            self._exchange.event(event)
        else:
            self._exchange.last_event(event, then=DONE)


class Collected:
    """The finished generation of a non-streaming answer."""

    __slots__ = ("ending", "generation", "tokens")

    def __init__(self, generation: Generation, tokens: list[Token], ending: Ending) -> None:
        self.generation = generation
        self.tokens = tokens
        self.ending = ending

    def details_json(self) -> bytes:
        """Members of ``details`` up to ``tokens``, without braces."""
        codec, ending = self.generation.codec, self.ending
        return b'"finish_reason":"%b","generated_tokens":%d,"seed":%b,"prefill":%b,"tokens":[%b]' % (
            ending.finish_reason.encode(),
            ending.generated_tokens,
            b"null" if ending.seed is None else b"%d" % ending.seed,
            self._prefill_json(),
            b",".join(token_json(codec, token) for token in self.tokens),
        )

    def top_tokens_json(self) -> bytes:
        """``,"top_tokens":[[...]]``, or nothing where none were asked for."""
        if not self.generation.request.sampling.top_n_tokens:
            return b""
        return b',"top_tokens":[%b]' % b",".join(top_json(self.generation.codec, token) for token in self.tokens)

    def _prefill_json(self) -> bytes:
        request = self.generation.request
        if not request.decoder_input_details:
            return b"[]"
        logprobs = self.generation.prefill_logprobs or ()
        codec = self.generation.codec
        parts = []
        for n, token_id in enumerate(request.input_ids):
            known = n > 0 and n <= len(logprobs)
            parts.append(
                b'{"id":%d,"text":%b,"logprob":%b}'
                % (token_id, orjson.dumps(codec.text_of(token_id)), logprob_json(logprobs[n - 1]) if known else b"null")
            )
        return b"[%b]" % b",".join(parts)

    @property
    def mean_logprob(self) -> float:
        return sum(token.logprob for token in self.tokens) / len(self.tokens)


class Collector:
    """Collects a generation for a non-streaming answer; ``future`` holds it, or the error."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Collected] = loop.create_future()
        self._tokens: list[Token] = []

    def on_token(self, generation: Generation, token: Token, ending: Ending | None) -> None:
        self._tokens.append(token)
        if ending is not None and not self.future.done():
            self.future.set_result(Collected(generation, self._tokens, ending))

    def on_error(self, generation: Generation | None, error: GenerationFailed) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # the first of several failures is reported; the others are not "never retrieved"


def usage_json(prompt: int, completion: int) -> bytes:
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (prompt, completion, prompt + completion)


def chat_logprob(codec: Codec, token: Token) -> dict[str, Any]:
    """One entry of OpenAI's ``logprobs.content``."""
    return {
        "token": token.text,
        "logprob": orjson.Fragment(logprob_json(token.logprob)),
        "top_logprobs": [
            {"token": codec.text_of(i), "logprob": orjson.Fragment(logprob_json(logprob))} for i, logprob in token.top
        ],
    }


__all__ = [
    "DONE",
    "ChatSink",
    "Collected",
    "Collector",
    "CompletionSink",
    "StreamSink",
    "chat_logprob",
    "native_error",
    "usage_json",
]
