"""A cursor over a JSON body that fails as serde_json fails: the same messages at the same positions, in bytes."""

from __future__ import annotations

import json
import re
from typing import Any

_SPACE = re.compile(rb"[ \t\r\n]*")
_PLAIN = re.compile(rb'"([^"\\\x00-\x1f]*)"')
_QUOTED = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
IDENTS = {b"n"[0]: (b"null", None), b"t"[0]: (b"true", True), b"f"[0]: (b"false", False)}
_MAX_DEPTH = 128


class BodyError(Exception):
    """A body that cannot be read: ``status`` 400 (syntax) or 422 (shape), ``text`` as axum words it."""

    def __init__(self, message: str, position: int | None, *, is_syntax: bool) -> None:
        super().__init__(message)
        self.message = message
        self.position = position
        self.is_syntax = is_syntax
        self.path: list[str] = []

    @property
    def status(self) -> int:
        return 400 if self.is_syntax else 422

    def described(self, body: bytes) -> str:
        """serde's message: where in the structure, what, and at which line and column."""
        path = "".join(part if part.startswith("[") else f".{part}" for part in self.path).removeprefix(".")
        what = f"{path}: {self.message}" if path else self.message
        if self.position is not None:
            before = body[: self.position]
            column = len(before) - (before.rfind(b"\n") + 1)
            line = before.count(b"\n") + 1
            what += f" at line {line} column {column}"
        return what

    def text(self, body: bytes) -> str:
        what = self.described(body)
        if self.is_syntax:
            return f"Failed to parse the request body as JSON: {what}"
        return f"Failed to deserialize the JSON body into the target type: {what}"


class Reader:
    """A cursor over one body."""

    __slots__ = ("at", "body", "depth")

    def __init__(self, body: bytes, at: int = 0) -> None:
        self.body = body
        self.at = at
        self.depth = 0

    def peek(self) -> int:
        """Next byte after white space, or -1 at the end."""
        match = _SPACE.match(self.body, self.at)
        assert match is not None
        self.at = match.end()
        return self.body[self.at] if self.at < len(self.body) else -1

    def syntax(self, message: str, *, is_peek: bool = True) -> BodyError:
        return BodyError(message, min(len(self.body), self.at + is_peek), is_syntax=True)

    def shape(self, message: str) -> BodyError:
        return BodyError(message, self.at, is_syntax=False)

    def enter(self) -> None:
        self.depth += 1
        if self.depth >= _MAX_DEPTH:
            raise self.syntax("recursion limit exceeded")

    def string(self) -> str:
        """The string at the cursor, which stands on a quote."""
        match = _PLAIN.match(self.body, self.at)
        try:
            if match is not None:
                text = match.group(1).decode()
                self.at = match.end()
                return text
            match = _QUOTED.match(self.body, self.at)
            if match is None:
                self.at = len(self.body)
                raise self.syntax("EOF while parsing a string")
            text = json.loads(match.group())
            text.encode()
        except UnicodeDecodeError as e:
            self.at += e.start + 1
            raise self.syntax("invalid unicode code point", is_peek=False) from e
        except UnicodeEncodeError as e:
            raise self.syntax("lone leading surrogate in hex escape") from e
        except json.JSONDecodeError as e:
            self.at += e.pos
            control = "control character (\\u0000-\\u001F) found while parsing a string"
            raise self.syntax("invalid escape" if "escape" in e.msg else control) from e
        self.at = match.end()
        return str(text)

    def number(self) -> int | float:
        match = _NUMBER.match(self.body, self.at)
        if match is None:
            self.at += 1
            raise self.syntax("invalid number")
        self.at = match.end()
        if match.group(1) is None and match.group(2) is None:
            whole = int(match.group())
            if -(1 << 63) <= whole < (1 << 64):
                return whole
        value = float(match.group())
        if value in (float("inf"), float("-inf")):
            raise self.syntax("number out of range", is_peek=False)
        return value

    def ident(self, first: int) -> bool | None:
        word, value = IDENTS[first]
        if self.body[self.at : self.at + len(word)] != word:
            self.at += 1
            raise self.syntax("expected ident")
        self.at += len(word)
        return value

    def members(self) -> Any:
        """Keys of the object at the cursor, one by one; the caller reads each value before asking for the next."""
        self.enter()
        self.at += 1
        is_first = True
        while True:
            byte = self.peek()
            if byte == -1:
                raise self.syntax("EOF while parsing an object")
            if byte == 0x7D:
                self.at += 1
                self.depth -= 1
                return
            if not is_first:
                if byte != 0x2C:
                    raise self.syntax("expected `,` or `}`")
                self.at += 1
                byte = self.peek()
                if byte == 0x7D:
                    raise self.syntax("trailing comma")
                if byte == -1:
                    raise self.syntax("EOF while parsing a value")
            is_first = False
            if byte != 0x22:
                raise self.syntax("key must be a string")
            yield self.string()

    def colon(self) -> None:
        byte = self.peek()
        if byte == -1:
            raise self.syntax("EOF while parsing an object")
        if byte != 0x3A:
            raise self.syntax("expected `:`")
        self.at += 1

    def items(self) -> Any:
        """Positions in the array at the cursor; the caller reads each value before asking for the next."""
        self.enter()
        self.at += 1
        index = 0
        while True:
            byte = self.peek()
            if byte == -1:
                raise self.syntax("EOF while parsing a list")
            if byte == 0x5D:
                self.at += 1
                self.depth -= 1
                return
            if index:
                if byte != 0x2C:
                    raise self.syntax("expected `,` or `]`")
                self.at += 1
                byte = self.peek()
                if byte == 0x5D:
                    raise self.syntax("trailing comma")
                if byte == -1:
                    raise self.syntax("EOF while parsing a value")
            yield index
            index += 1

    def invalid_type(self, byte: int, expected: str) -> BodyError:
        """serde's complaint about a value of the wrong kind; scalars are consumed, containers are not."""
        if byte == -1:
            return self.syntax("EOF while parsing a value")
        if byte == 0x22:
            found = f"string {json.dumps(self.string(), ensure_ascii=False)}"
        elif byte in IDENTS:
            value = self.ident(byte)
            found = "null" if value is None else f"boolean `{str(value).lower()}`"
        elif byte == 0x5B:
            found = "sequence"
        elif byte == 0x7B:
            found = "map"
        elif byte == 0x2D or 0x30 <= byte <= 0x39:
            number = self.number()
            found = f"integer `{number}`" if isinstance(number, int) else f"floating point `{rust_float(number)}`"
        else:
            return self.syntax("expected value")
        return self.shape(f"invalid type: {found}, expected {expected}")


def rust_float(value: float) -> str:
    return repr(value).replace("e+", "e")
