"""What TGI makes of an answer that a chat's tools forced into ``{"function": {"_name": ..., <arguments>}}``.

Source: ``router/src/chat.rs`` of TGI.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import orjson

from router_ext.devserver.generation import GenerationFailed
from router_ext.devserver.json_reader import BodyError, Reader
from router_ext.devserver.serde import Member, anything, struct

NO_TOOL = "no_tool"
"""The name under which a model declines to call anything: TGI then generates again, without tools."""


def tool_error(message: str) -> GenerationFailed:
    return GenerationFailed(message=f"Tool error: {message}", error_type="tool_error", status=422)


@dataclass(frozen=True, slots=True)
class Call:
    """One function call. ``arguments`` keep their order."""

    name: str
    arguments: dict[str, Any]

    def arguments_json(self) -> str:
        return orjson.dumps(self.arguments).decode()


def _function(r: Reader) -> Call:
    byte = r.peek()
    if byte != 0x7B:
        raise r.invalid_type(byte, "struct ToolCall")
    found = anything(r)
    name = found.pop("_name", None)
    if not isinstance(name, str):
        raise BodyError("missing field `_name`", None, is_syntax=False)
    return Call(name, found)


_CALL = struct("Call", {"function": Member(_function)})


def parse_call(text: str) -> Call:
    """The call in a finished answer.

    Raises:
        GenerationFailed: the answer is none, for instance because it was cut.
    """
    data = text.encode()
    reader = Reader(data)
    try:
        call: Call = _CALL(reader)["function"]
        if reader.peek() != -1:
            raise reader.syntax("trailing characters")
    except BodyError as e:
        shown = json.dumps(text, ensure_ascii=False)
        raise tool_error(f"Failed to parse generated text: {e.described(data)} {shown}") from e
    return call


def _call_of(text: str) -> Call | None:
    """The call, if the text is one by now."""
    try:
        function = orjson.loads(text)["function"]
        name = function.pop("_name")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None
    return Call(name, function) if isinstance(name, str) else None


@dataclass(frozen=True, slots=True)
class Fragment:
    """A piece of a streamed call. ``name`` is in the first one; ``text`` None where a token has none to show."""

    name: str | None
    text: str | None


class CallStream:
    """Tokens of a forced answer in, pieces of the call out.

    Nothing comes out until the name is known; then every token's text as it is, except that an opening brace stands for
    the token that completes the name, and the closing brace of the outer object is left out. What follows, the end
    token, is swallowed with the reason of the end, as in TGI.
    """

    def __init__(self) -> None:
        self._text = ""
        self._is_open = False

    def push(self, text: str, *, is_special: bool) -> Fragment | str | None:
        """A fragment, ``NO_TOOL`` when the model declines, or nothing."""
        self._text += text
        if self._is_open:
            if _call_of(self._text) is not None:
                self._is_open = False
                text = text.rstrip()
                text = text.removesuffix("}")
            return Fragment(None, None if is_special else text)
        call = _call_of(self._text.rstrip().rstrip(",} \t\r\n") + "}}")
        if call is None:
            return None
        if call.name == NO_TOOL:
            return NO_TOOL
        self._is_open = True
        return Fragment(call.name, None if is_special else "{")
