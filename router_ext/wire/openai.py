"""OpenAI's chat and completion answers as TGI prints them: same keys, same order, same nulls.

Chunks are built from fixed byte frames around the one JSON string that changes, which costs well under a microsecond
per token. ``id`` is empty, as TGI's is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from router_ext.wire.tgi import StreamEvent

DONE = b"data: [DONE]\n\n"

_dumps = orjson.dumps


def openai_finish_reason(reason: str) -> str:
    """TGI's word on chat answers and whole completions: only the end of text is renamed."""
    return "stop" if reason == "eos_token" else reason


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The ``usage`` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def logprob_item(event: StreamEvent) -> dict[str, Any]:
    """One item of ``logprobs.content``."""
    token = event.token
    assert token is not None
    return {
        "token": token.text,
        "logprob": token.logprob,
        "top_logprobs": [{"token": top.text, "logprob": top.logprob} for top in event.top_tokens or ()],
    }


class ChatChunks:
    """Chunks of one streamed chat answer."""

    __slots__ = ("_after_choices", "_before_content", "_head", "_with_logprobs")

    def __init__(self, *, model: str, system_fingerprint: str, created: int, with_logprobs: bool) -> None:
        self._head = (
            b'data: {"object":"chat.completion.chunk","id":"","created":%d,"model":' % created
            + _dumps(model)
            + b',"system_fingerprint":'
            + _dumps(system_fingerprint)
            + b',"choices":['
        )
        self._before_content = self._head + b'{"index":0,"delta":{"role":"assistant","content":'
        self._after_choices = b'},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
        self._with_logprobs = with_logprobs

    def token(self, event: StreamEvent) -> bytes:
        """A token that is not the last."""
        token = event.token
        assert token is not None
        content = b'""' if token.special else _dumps(token.text)
        if self._with_logprobs:
            return self._before_content + content + self._logprobs(event) + b',"finish_reason":null}],"usage":null}\n\n'
        return self._before_content + content + self._after_choices

    def last(self, event: StreamEvent, finish_reason: str) -> bytes:
        """The last token, with the finish reason (TGI's word)."""
        token = event.token
        assert token is not None
        content = b'""' if token.special else _dumps(token.text)
        logprobs = self._logprobs(event) if self._with_logprobs else b'},"logprobs":null'
        reason = _dumps(openai_finish_reason(finish_reason))
        return self._before_content + content + logprobs + b',"finish_reason":' + reason + b'}],"usage":null}\n\n'

    def usage(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """The chunk without choices that ``include_usage`` asks for."""
        return self._head + b'],"usage":' + _dumps(usage(prompt_tokens, completion_tokens)) + b"}\n\n"

    @staticmethod
    def _logprobs(event: StreamEvent) -> bytes:
        return b'},"logprobs":' + _dumps({"content": [logprob_item(event)]})


class CompletionChunks:
    """Chunks of one streamed completion; ``index`` is the prompt's place in the request."""

    __slots__ = ("_after", "_head", "_middle", "_model")

    def __init__(self, *, model: str, system_fingerprint: str, created: int) -> None:
        self._model = b'"model":' + _dumps(model) + b',"system_fingerprint":' + _dumps(system_fingerprint)
        self._head = b'data: {"object":"text_completion","id":"","created":%d,' % created
        self._middle = self._head + b'"choices":[{"index":'
        self._after = b',"logprobs":null,"finish_reason":""}],' + self._model + b"}\n\n"

    def token(self, index: int, event: StreamEvent) -> bytes:
        """A token that is not the last; TGI prints special tokens here."""
        token = event.token
        assert token is not None
        return self._middle + b'%d,"text":' % index + _dumps(token.text) + self._after

    def last(self, index: int, event: StreamEvent, finish_reason: str, prompt_tokens: int, tokens: int) -> bytes:
        """The last token of one prompt: TGI's own word for the end, and the usage of that prompt."""
        token = event.token
        assert token is not None
        choice = b'"choices":[{"index":%d,"text":' % index + _dumps(token.text)
        end = b',"logprobs":null,"finish_reason":' + _dumps(finish_reason) + b'}],"usage":'
        return self._head + self._model + b"," + choice + end + _dumps(usage(prompt_tokens, tokens)) + b"}\n\n"


def chat_body(
    *,
    model: str,
    system_fingerprint: str,
    created: int,
    text: str,
    logprobs: list[dict[str, Any]] | None,
    finish_reason: str,
    prompt_tokens: int,
    completion_tokens: int,
) -> bytes:
    """A whole chat answer."""
    return _dumps(
        {
            "object": "chat.completion",
            "id": "",
            "created": created,
            "model": model,
            "system_fingerprint": system_fingerprint,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "logprobs": None if logprobs is None else {"content": logprobs},
                    "finish_reason": openai_finish_reason(finish_reason),
                }
            ],
            "usage": usage(prompt_tokens, completion_tokens),
        }
    )


def completion_body(
    *,
    model: str,
    system_fingerprint: str,
    created: int,
    choices: Sequence[tuple[int, str, str]],
    prompt_tokens: int,
    completion_tokens: int,
) -> bytes:
    """A whole completion; ``choices``: (index, text, TGI's finish reason)."""
    return _dumps(
        {
            "object": "text_completion",
            "id": "",
            "created": created,
            "model": model,
            "system_fingerprint": system_fingerprint,
            "choices": [
                {
                    "index": index,
                    "text": text,
                    "logprobs": None,
                    "finish_reason": openai_finish_reason(reason),
                }
                for index, text, reason in choices
            ],
            "usage": usage(prompt_tokens, completion_tokens),
        }
    )
