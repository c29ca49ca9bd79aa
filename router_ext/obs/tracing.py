"""Trace context as W3C defines it: taken from the client, handed to the backend, named in the log.

Without OpenTelemetry a request that brings a ``traceparent`` goes on under a new span id, and one that brings none has
no trace at all: nothing is kept, nothing is made. With it (``obs.otel``) each request is a span.

Source: W3C Trace Context, level 1.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

Value = str | int | float | bool

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_MAX_STATE = 512
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16


@dataclass(frozen=True, slots=True)
class Parent:
    """What a client sent. ``flags``: bit 0 is "sampled". ``state``: of other vendors, handed on as it is."""

    trace_id: str
    span_id: str
    flags: int
    state: str


def read_parent(headers: Iterable[tuple[bytes, bytes]]) -> Parent | None:
    """The trace context of a request; None if there is none, more than one, or a malformed one."""
    found: list[bytes] = []
    states: list[bytes] = []
    for name, value in headers:
        if name == b"traceparent":
            found.append(value)
        elif name == b"tracestate":
            states.append(value)
    if len(found) != 1:
        return None
    match = _PARENT.fullmatch(found[0].decode("latin-1").strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    # A later version may say more; version 0 may not, and 255 is forbidden.
    if version == "ff" or (version == "00" and more) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    state = b",".join(states).decode("latin-1").strip()
    is_plain = state.isascii() and state.isprintable() and len(state) <= _MAX_STATE
    return Parent(trace_id, span_id, int(flags, 16), state if is_plain else "")


class Trace:
    """The trace of one request, and the router's own place in it. This one records nothing."""

    __slots__ = ("flags", "span_id", "state", "trace_id")

    is_recording = False

    def __init__(self, trace_id: str, span_id: str, flags: int, state: str) -> None:
        self.trace_id = trace_id
        self.span_id = span_id
        self.flags = flags
        self.state = state

    @property
    def upstream_headers(self) -> bytes:
        """Header lines for a backend."""
        lines = f"traceparent: 00-{self.trace_id}-{self.span_id}-{self.flags:02x}\r\n"
        if self.state:
            lines += f"tracestate: {self.state}\r\n"
        return lines.encode("ascii")

    def event(self, name: str, attributes: Mapping[str, Value] | None = None) -> None:
        """Something happened to the request."""

    def end(self, attributes: Mapping[str, Value | list[str]], *, name: str | None = None, error: str | None) -> None:
        """The request has ended; ``error``: its code if it ended badly. Only the first call counts."""


class Tracing(Protocol):
    """Makes the traces of requests."""

    def begin(self, headers: Iterable[tuple[bytes, bytes]], *, path: str, arrived_us: int) -> Trace | None:
        """The trace of a request that begins; None if it has none."""
        ...

    async def close(self) -> None:
        """Deliver what is pending, within a limit."""
        ...


class PassedOn:
    """Implements ``Tracing`` without OpenTelemetry."""

    def begin(self, headers: Iterable[tuple[bytes, bytes]], *, path: str, arrived_us: int) -> Trace | None:
        parent = read_parent(headers)
        if parent is None:
            return None
        return Trace(parent.trace_id, secrets.token_hex(8), parent.flags & 1, parent.state)

    async def close(self) -> None:
        return
