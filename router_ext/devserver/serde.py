"""JSON bodies read as Rust's serde_json reads them: the same refusals, texts and positions, in the same order.

TGI answers a body of the wrong shape with serde's own message, so a client that shows or parses it sees the same
thing here. A schema is a function from a ``Reader`` to a value; the functions below build schemas from schemas.
Deserialisation runs along the bytes, so the first mistake in the text is the one reported, be it of syntax (400) or
of shape (422). Positions count bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_SPACE = re.compile(rb"[ \t\r\n]*")
_PLAIN = re.compile(rb'"([^"\\\x00-\x1f]*)"')
_QUOTED = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_IDENT = {b"n"[0]: (b"null", None), b"t"[0]: (b"true", True), b"f"[0]: (b"false", False)}
_MAX_DEPTH = 128

Schema = Callable[["Reader"], Any]


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

    def text(self, body: bytes) -> str:
        path = "".join(part if part.startswith("[") else f".{part}" for part in self.path).removeprefix(".")
        what = f"{path}: {self.message}" if path else self.message
        if self.position is not None:
            before = body[: self.position]
            column = len(before) - (before.rfind(b"\n") + 1)
            line = before.count(b"\n") + 1
            what += f" at line {line} column {column}"
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
        word, value = _IDENT[first]
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
        elif byte in _IDENT:
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


def string(r: Reader) -> str:
    byte = r.peek()
    if byte != 0x22:
        raise r.invalid_type(byte, "a string")
    return r.string()


def boolean(r: Reader) -> bool:
    byte = r.peek()
    if byte in (0x74, 0x66):
        return bool(r.ident(byte))
    raise r.invalid_type(byte, "a boolean")


def integer(name: str, low: int, high: int) -> Schema:
    """A whole number in [low, high]; ``name`` is Rust's name of the type."""

    def read(r: Reader) -> int:
        byte = r.peek()
        if byte != 0x2D and not 0x30 <= byte <= 0x39:
            raise r.invalid_type(byte, name)
        number = r.number()
        if isinstance(number, float):
            raise r.shape(f"invalid type: floating point `{rust_float(number)}`, expected {name}")
        if not low <= number <= high:
            raise r.shape(f"invalid value: integer `{number}`, expected {name}")
        return number

    return read


U32 = integer("u32", 0, 2**32 - 1)
U64 = integer("u64", 0, 2**64 - 1)
I32 = integer("i32", -(2**31), 2**31 - 1)
USIZE = integer("usize", 0, 2**64 - 1)


def f32(r: Reader) -> float:
    byte = r.peek()
    if byte != 0x2D and not 0x30 <= byte <= 0x39:
        raise r.invalid_type(byte, "f32")
    return float(r.number())


def anything(r: Reader) -> Any:
    """Any JSON value."""
    byte = r.peek()
    if byte == 0x22:
        return r.string()
    if byte == 0x7B:
        return {key: _value(r, anything) for key in r.members()}
    if byte == 0x5B:
        return [anything(r) for _ in r.items()]
    if byte in _IDENT:
        return r.ident(byte)
    if byte == 0x2D or 0x30 <= byte <= 0x39:
        return r.number()
    raise r.syntax("EOF while parsing a value" if byte == -1 else "expected value")


def _value(r: Reader, schema: Schema) -> Any:
    r.colon()
    return schema(r)


def option(inner: Schema) -> Schema:
    """The value, or null."""

    def read(r: Reader) -> Any:
        if r.peek() == 0x6E:
            return r.ident(0x6E)
        return inner(r)

    return read


def sequence(inner: Schema) -> Schema:
    def read(r: Reader) -> list[Any]:
        byte = r.peek()
        if byte != 0x5B:
            raise r.invalid_type(byte, "a sequence")
        values: list[Any] = []
        try:
            values.extend(inner(r) for _ in r.items())
        except BodyError as e:
            _locate(r, e, f"[{len(values)}]", 0x5D)
            raise
        return values

    return read


_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Member:
    """A field of a struct; ``default`` makes it optional (a callable is called for a fresh value)."""

    schema: Schema
    default: Any = _REQUIRED


def struct(name: str, members: dict[str, Member], aliases: dict[str, str] | None = None) -> Schema:
    """An object with known fields; unknown ones are skipped, a field given twice is refused."""
    other = aliases or {}

    def read(r: Reader) -> dict[str, Any]:
        byte = r.peek()
        if byte != 0x7B:
            raise r.invalid_type(byte, f"struct {name}")
        found: dict[str, Any] = {}
        part = ""
        try:
            for key in r.members():
                part = ""
                known = other.get(key, key)
                member = members.get(known)
                if member is None:
                    _value(r, anything)
                    continue
                if known in found:
                    raise BodyError(f"duplicate field `{known}`", None, is_syntax=False)
                r.colon()
                part = key
                found[known] = member.schema(r)
                part = ""
        except BodyError as e:
            _locate(r, e, part, 0x7D)
            raise
        for known, member in members.items():
            if known not in found:
                if member.default is _REQUIRED:
                    raise r.shape(f"missing field `{known}`")
                found[known] = member.default() if callable(member.default) else member.default
        return found

    return read


def _locate(r: Reader, error: BodyError, part: str, closing: int) -> None:
    """Extend the path, and give an error that has no position yet the one serde gives it: where the container ends,
    if it ends right here."""
    if part:
        error.path.insert(0, part)
    if error.position is None:
        if r.peek() == closing:
            r.at += 1
        error.position = r.at


def untagged(name: str, *variants: Schema) -> Schema:
    """The first variant that reads the value; the value is consumed whatever happens."""

    def read(r: Reader) -> Any:
        r.peek()
        start = r.at
        anything(r)
        for variant in variants:
            try:
                return variant(Reader(r.body, start))
            except BodyError as e:
                if e.message.startswith("\0"):
                    raise BodyError(e.message[1:], None, is_syntax=False) from e
        raise BodyError(f"data did not match any variant of untagged enum {name}", None, is_syntax=False)

    return read


def tagged(name: str, variants: dict[str, Schema], *, content: str = "value") -> Schema:
    """An object ``{"type": <variant>, <content>: <value>}``."""

    def read(r: Reader) -> tuple[str, Any]:
        byte = r.peek()
        if byte != 0x7B:
            raise r.invalid_type(byte, f"adjacently tagged enum {name}")
        tag, start, value, is_read = None, -1, None, False
        part = ""
        try:
            for key in r.members():
                r.colon()
                part = key
                if key == "type":
                    tag = string(r)
                    if tag not in variants:
                        known = ", ".join(f"`{v}`" for v in variants)
                        raise r.shape(f"unknown variant `{tag}`, expected one of {known}")
                elif key == content:
                    r.peek()
                    start = r.at
                    value = anything(r) if tag is None else variants[tag](r)
                    is_read = tag is not None
                else:
                    anything(r)
                part = ""
        except BodyError as e:
            _locate(r, e, part, 0x7D)
            raise
        if tag is None:
            raise r.shape("missing field `type`")
        if start < 0:
            raise r.shape(f"missing field `{content}`")
        return tag, value if is_read else variants[tag](Reader(r.body, start))

    return read


def parse(schema: Schema, body: bytes) -> Any:
    """Read ``body``.

    Raises:
        BodyError: it is not JSON, or not of this shape.
    """
    return schema(Reader(body))
