"""One client request on its connection, as the token path sees it: synchronous writes and three callbacks.

ASGI's ``send`` is a coroutine and says nothing when the client has gone. A stream of tokens needs neither a task nor
an await per event, so the server puts an ``Exchange`` into ``scope["extensions"]["fairlane.exchange"]``. Whole answers
go through it too: uvicorn looks at every header with three regular expressions, and writes head and body apart.

    on_gone      the connection closed, in whatever state, in the turn in which the kernel told
    on_pause     the client does not read: stop reading upstream
    on_resume    it reads again
"""

from __future__ import annotations

import http
from collections.abc import Callable, Iterable
from typing import Any, Protocol

EXTENSION = "fairlane.exchange"

_PHRASES = {status.value: status.phrase.encode() for status in http.HTTPStatus}


class _Cycle(Protocol):
    """What is used of uvicorn's ``RequestResponseCycle``."""

    response_started: bool
    response_complete: bool
    keep_alive: bool
    disconnected: bool
    waiting_for_100_continue: bool
    chunked_encoding: bool | None
    default_headers: list[tuple[bytes, bytes]]
    flow: Any
    message_event: Any
    on_response: Callable[[], None]


class Exchange:
    """Writes one answer. A streamed one always closes its connection.

    Attributes:
        is_gone: the client's connection has closed; writes do nothing.
        is_body_too_large: the body exceeds the limit; what follows is thrown away unread.
    """

    __slots__ = (
        "_cycle",
        "_has_chunks",
        "_transport",
        "is_body_too_large",
        "is_gone",
        "is_open",
        "is_paused",
        "on_gone",
        "on_pause",
        "on_resume",
    )

    def __init__(self, transport: Any, cycle: Any, *, has_chunks: bool) -> None:
        self._transport = transport
        self._cycle: _Cycle = cycle
        self._has_chunks = has_chunks
        self.is_gone = False
        self.is_open = False
        self.is_paused = False
        self.is_body_too_large = False
        self.on_gone: Callable[[], None] | None = None
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None

    def open(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Write the head of a stream. It leaves in the same system call as what is written in the same loop turn."""
        if self.is_gone or self._cycle.response_started:
            return
        cycle = self._cycle
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        cycle.keep_alive = False
        cycle.chunked_encoding = self._has_chunks
        self.is_open = True
        parts = [b"HTTP/1.1 %d %b\r\n" % (status, _PHRASES.get(status, b""))]
        for name, value in (*cycle.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
        parts.append(b"connection: close\r\n")
        if self._has_chunks:
            parts.append(b"transfer-encoding: chunked\r\n")
        parts.append(b"\r\n")
        if not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    async def answer(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, is_head: bool, is_last: bool
    ) -> None:
        """Write a whole answer, once the client has read enough of those before. Names are in lower case.

        Args:
            is_head: the request was a HEAD: the answer has no body. is_last: the connection takes no further request.

        Raises:
            ValueError: a header holds the end of a line; nothing was written.
        """
        cycle = self._cycle
        if cycle.flow.write_paused and not self.is_gone:
            await cycle.flow.drain()
        if self.is_gone or cycle.disconnected or cycle.response_started:
            # Disconnected, though it is not gone: the server itself has told it what was wrong with its request.
            return
        keep_alive = cycle.keep_alive and not is_last
        lines = [b"HTTP/1.1 %d %b" % (status, _PHRASES.get(status, b""))]
        lines += [name + b": " + value for name, value in cycle.default_headers]
        lines += [name + b": " + value for name, value in headers]
        lines.append(b"content-length: %d" % len(body))
        if not keep_alive:
            lines.append(b"connection: close")
        head = b"\r\n".join(lines)
        ends = len(lines) - 1
        if head.count(b"\n") != ends or head.count(b"\r") != ends:
            raise ValueError("a header holds the end of a line")
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        cycle.keep_alive = keep_alive
        self._transport.write(head + b"\r\n\r\n" if is_head else b"%b\r\n\r\n%b" % (head, body))
        cycle.response_complete = True
        cycle.message_event.set()
        if not keep_alive:
            self._transport.close()
        cycle.on_response()

    def write(self, data: bytes) -> None:
        """Write a piece of the body."""
        if self.is_gone or not data or self._transport.is_closing():
            return
        if self._has_chunks:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            # HTTP/1.0 knows no chunks; the end of the connection is the end of the body.
            self._transport.write(data)

    def finish(self) -> None:
        """End the body cleanly and close the connection once it is written out."""
        cycle = self._cycle
        if cycle.response_complete or not self.is_open:
            return
        cycle.response_complete = True
        cycle.message_event.set()
        if not self.is_gone and not self._transport.is_closing():
            if self._has_chunks:
                self._transport.write(b"0\r\n\r\n")
            self._transport.close()
            cycle.on_response()

    def abort(self) -> None:
        """Cut the connection: the client must not take what it has for a complete answer."""
        self._cycle.response_complete = True
        self._transport.abort()

    # --- called by the server's protocol ---

    def connection_lost(self) -> None:
        if self.is_gone:
            return
        self.is_gone = True
        # The server itself tells only the request that came last; others wait behind it on the same connection.
        self._cycle.disconnected = True
        callback, self.on_gone = self.on_gone, None
        self.on_pause = self.on_resume = None
        if callback is not None:
            callback()

    def paused(self) -> None:
        self.is_paused = True
        if self.on_pause is not None:
            self.on_pause()

    def resumed(self) -> None:
        self.is_paused = False
        if self.on_resume is not None:
            self.on_resume()
