"""JSON bodies read as Rust's serde_json reads them: the same refusals, texts and positions, in the same order.

TGI answers a body of the wrong shape with serde's own message, so a client that shows or parses it sees the same
thing here. A schema is a function from a ``Reader`` to a value; the functions below build schemas from schemas.
Deserialisation runs along the bytes, so the first mistake in the text is the one reported, be it of syntax (400) or
of shape (422). Positions count bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router_ext.devserver.json_reader import IDENTS, BodyError, Reader, rust_float

Schema = Callable[[Reader], Any]


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
    """A number rounded to single precision: what is too small for it becomes 0, what is too large infinite."""
    byte = r.peek()
    if byte != 0x2D and not 0x30 <= byte <= 0x39:
        raise r.invalid_type(byte, "f32")
    return ctypes.c_float(r.number()).value


def anything(r: Reader) -> Any:
    """Any JSON value."""
    byte = r.peek()
    if byte == 0x22:
        return r.string()
    if byte == 0x7B:
        return {key: _value(r, anything) for key in r.members()}
    if byte == 0x5B:
        return [anything(r) for _ in r.items()]
    if byte in IDENTS:
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
