"""A backend without a socket, for tests of what stands above it: answers are scripts, delivered turn by turn.

Obeys the contract tests of ``tgi``: order of callbacks, nothing after ``abort`` or ``release``, a cut is a failure.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from router_ext.backends.base import (
    BackendClosed,
    BackendRefused,
    BackendTimeout,
    Headers,
    Reply,
    StreamSink,
)


class Ending(enum.Enum):
    """How an answer ends."""

    CLEAN = enum.auto()
    CUT = enum.auto()
    """The connection breaks behind the last piece."""
    HANG = enum.auto()
    """Nothing follows the last piece."""
    REFUSED = enum.auto()
    """There was no connection at all: no head, no piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One answer. Each piece is one read."""

    status: int = 200
    headers: Headers = ((b"content-type", b"text/event-stream"),)
    pieces: tuple[bytes, ...] = ()
    ending: Ending = Ending.CLEAN


Play = Callable[[str, bytes], Script]
"""(path, body) -> the answer."""


class _FakeStream:
    def __init__(self, backend: FakeBackend, script: Script, sink: StreamSink) -> None:
        self._backend = backend
        self._script = script
        self._sink: StreamSink | None = sink
        self._pieces = deque(script.pieces)
        self._is_paused = False
        self._is_headed = False
        self._next: asyncio.Handle | None = backend.loop.call_soon(self._step)

    def abort(self) -> None:
        self._end()

    def release(self) -> None:
        self._end()

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self._schedule()

    def _schedule(self) -> None:
        if self._next is None and self._sink is not None and not self._is_paused:
            self._next = self._backend.loop.call_soon(self._step)

    def _end(self) -> None:
        self._sink = None
        self._backend.streams.discard(self)
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _step(self) -> None:
        self._next = None
        sink, script = self._sink, self._script
        if sink is None or self._is_paused:
            return
        if script.ending is Ending.REFUSED:
            self._end()
            sink.on_end(BackendRefused("The backend refused the connection"))
        elif not self._is_headed:
            self._is_headed = True
            sink.on_head(script.status, script.headers)
            self._schedule()
        elif self._pieces:
            sink.on_data(self._pieces.popleft())
            self._schedule()
        elif script.ending is Ending.CLEAN:
            self._end()
            sink.on_end(None)
        elif script.ending is Ending.CUT:
            self._end()
            sink.on_end(BackendClosed("The backend closed the stream before its end"))


class FakeBackend:
    """Implements ``Backend``.

    Attributes:
        requests: (path, body) of everything asked, in order. streams: those still open.
        headers: header lines that streams were opened with.
    """

    def __init__(self, play: Play, *, unary_timeout_s: float = 30.0) -> None:
        self.loop = asyncio.get_running_loop()
        self.requests: list[tuple[str, bytes]] = []
        self.headers: list[bytes] = []
        self.streams: set[_FakeStream] = set()
        self._play = play
        self._unary_timeout_s = unary_timeout_s

    def open_stream(self, path: str, body: bytes, sink: StreamSink, headers: bytes = b"") -> _FakeStream:
        self.requests.append((path, body))
        self.headers.append(headers)
        stream = _FakeStream(self, self._play(path, body), sink)
        self.streams.add(stream)
        return stream

    async def call(self, method: str, path: str, body: bytes = b"", *, timeout_s: float | None = None) -> Reply:
        self.requests.append((path, body))
        script = self._play(path, body)
        if script.ending is Ending.REFUSED:
            raise BackendRefused("The backend refused the connection")
        if script.ending is Ending.CUT:
            raise BackendClosed("The backend closed the stream before its end")
        if script.ending is Ending.HANG:
            await asyncio.sleep(self._unary_timeout_s if timeout_s is None else timeout_s)
            raise BackendTimeout("The backend did not answer in time")
        return Reply(script.status, script.headers, b"".join(script.pieces))

    async def close(self) -> None:
        for stream in list(self.streams):
            stream.abort()
