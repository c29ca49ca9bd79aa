"""Answers of TGI that a relay passes on, as far as it looks into them: counts, ends, and what a response is made of.

Everything else is forwarded unread, so fields that nobody needs have no type here. ``ChatChunk`` and ``ChatAnswer``
are for those that are written anew (``/v1/responses``) and are typed to the end.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from router_ext.wire.decoding import NotDecoded
from router_ext.wire.tgi import BadUpstreamAnswer, TokenCount

_T = TypeVar("_T")


class Usage(msgspec.Struct, gc=False):
    """``usage`` of a chat or a completion."""

    prompt_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None


class EndOfChoice(msgspec.Struct, gc=False):
    """A choice, of which only the end matters."""

    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """One event of an OpenAI stream, or a whole answer. ``error`` is set if there is such a field at all."""

    model: str | None = None
    usage: Usage | None = None
    choices: list[EndOfChoice] | None = None
    error: Any | UnsetType = UNSET


class TopLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float | None = None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float | None = None
    top_logprobs: list[TopLogprob] | None = None


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob] | None = None


class FunctionPart(msgspec.Struct):
    """A function's name and arguments, or a part of them. TGI before 3.1 prints arguments as an object, not as text."""

    name: str | None = None
    arguments: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def text(self) -> str:
        """The arguments as OpenAI has them: the text of an object.

        Raises:
            BadUpstreamAnswer: not UTF-8.
        """
        given = bytes(self.arguments)
        try:
            return _text.decode(given) or "" if given[:1] in (b'"', b"n") else given.decode()
        except NotDecoded as error:
            raise BadUpstreamAnswer(f"not a function's arguments: {error}") from None


class ToolCall(msgspec.Struct):
    function: FunctionPart | None = None
    index: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)] = 0


class ChatMessage(msgspec.Struct):
    """A message, or the part of one that a chunk brings. A single call is one of TGI before 3.1."""

    content: str | None = None
    tool_calls: list[ToolCall] | ToolCall | None = None

    @property
    def calls(self) -> list[ToolCall]:
        """Its calls as a list."""
        calls = self.tool_calls
        return [calls] if isinstance(calls, ToolCall) else calls or []


class ChatChoice(msgspec.Struct):
    finish_reason: str | None = None
    delta: ChatMessage | None = None
    message: ChatMessage | None = None
    logprobs: Logprobs | None = None
    text: str | None = None

    @property
    def written(self) -> str:
        """What was generated for it, as far as a client sees it: text, names and arguments of calls."""
        message = self.message or ChatMessage()
        functions = [call.function for call in message.calls if call.function is not None]
        return "".join([self.text or "", message.content or "", *((f.name or "") + f.text for f in functions)])


class Chat(msgspec.Struct):
    """A chat's chunk or whole answer, or a completion's."""

    model: str = ""
    created: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF_FFFF)] = 0
    choices: list[ChatChoice] | None = None


class Sequence(msgspec.Struct, gc=False):
    """One of ``best_of``."""

    generated_text: str | None = None
    generated_tokens: TokenCount | None = None


class GeneratedDetails(msgspec.Struct):
    finish_reason: str | None = None
    generated_tokens: TokenCount | None = None
    best_of_sequences: list[Sequence] | None = None

    @property
    def output_tokens(self) -> int:
        """Of all sequences."""
        return (self.generated_tokens or 0) + sum(each.generated_tokens or 0 for each in self.best_of_sequences or ())


class Generated(msgspec.Struct):
    """A whole answer of TGI's own paths."""

    generated_text: str | None = None
    details: GeneratedDetails | None = None

    @property
    def written(self) -> str:
        """The text of all its sequences."""
        others = (self.details and self.details.best_of_sequences) or ()
        return "".join([self.generated_text or "", *(each.generated_text or "" for each in others)])


_text = msgspec.json.Decoder(str | None)
_chunk = msgspec.json.Decoder(Chunk)
_chat = msgspec.json.Decoder(Chat)
_generated = msgspec.json.Decoder(Generated | list[Generated])


def decode_chunk(payload: bytes) -> Chunk:
    """Counts, end and model's name of a chunk or a whole answer.

    Raises:
        BadUpstreamAnswer: not in OpenAI's format, as are the errors of the functions below.
    """
    return _decode(_chunk, payload, "a chunk")


def decode_chat(payload: bytes) -> Chat:
    """A chat's chunk or answer with everything in it."""
    return _decode(_chat, payload, "a chat's answer")


def decode_generated(body: bytes) -> tuple[Generated, bool]:
    """The answer, and whether it came in a list."""
    found = _decode(_generated, body, "an answer")
    if isinstance(found, Generated):
        return found, False
    if not found:
        raise BadUpstreamAnswer("an answer that is an empty list")
    return found[0], True


def _decode(decoder: msgspec.json.Decoder[_T], data: bytes, what: str) -> _T:
    try:
        return decoder.decode(data)
    except NotDecoded as error:
        raise BadUpstreamAnswer(f"not {what}: {error}") from None
