"""HTTP/1.1 on a bare ``asyncio.Protocol``: what TGI's hyper does with connections, bodies and disconnects.

One ``Exchange`` at a time per connection; pipelined requests wait, and while one waits the socket is not read, so a
disconnect then goes unnoticed, as with hyper. Otherwise the end of the client's sending side (close, reset or half
close) ends the exchange at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from typing import Protocol

import httptools

_MAX_HEAD_BYTES = 417_792  # hyper's read buffer at its largest
_PHRASES = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Payload Too Large",
    415: "Unsupported Media Type",
    422: "Unprocessable Entity",
    424: "Failed Dependency",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_VARY = b"vary: origin, access-control-request-method, access-control-request-headers\r\n"
_KEEP_ALIVE_S = 15.0
Headers = list[tuple[str, str]]


class Handler(Protocol):
    """The application. Called on the event loop when a request is complete (or its head refuses a body)."""

    def handle(self, exchange: Exchange) -> None: ...

    def body_limit(self, method: str, path: str) -> int | None:
        """Bytes of body to read at most, None where nobody reads one."""
        ...


class _Date:
    """The ``date`` line, made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def line(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = f"date: {formatdate(second, usegmt=True)}\r\n".encode()
        return self._line


_date = _Date()


class Exchange:
    """One request and its answer.

    Attributes:
        on_gone: called when the client has left before the answer was complete.
        last_event_at: monotonic seconds of the last event, for keep-alive comments.
    """

    __slots__ = (
        "_connection",
        "_is_chunked",
        "_timer",
        "allow_origin",
        "arrived",
        "body",
        "headers",
        "is_done",
        "is_gone",
        "is_streaming",
        "is_too_large",
        "keep_alive",
        "last_event_at",
        "method",
        "on_gone",
        "path",
        "version",
        "write",
    )

    def __init__(
        self, connection: Connection, method: str, path: str, headers: dict[str, str], version: str, keep_alive: bool
    ) -> None:
        self._connection = connection
        self.method = method
        self.path = path
        self.headers = headers
        self.version = version
        self.keep_alive = keep_alive
        self.body = bytearray()
        self.arrived = time.monotonic()
        self.is_too_large = self.is_gone = self.is_done = self.is_streaming = False
        self._is_chunked = version != "1.0"
        self.on_gone: Callable[[], None] | None = None
        self.last_event_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.allow_origin = b"access-control-allow-origin: *\r\n"
        self.write = connection.transport.write

    def respond(self, status: int, headers: Headers, body: bytes = b"", *, after_cors: Headers | None = None) -> None:
        """A whole answer."""
        if self.is_gone or self.is_done:
            return
        lines = b"".join(f"{k}: {v}\r\n".encode() for k, v in headers)
        later = b"".join(f"{k}: {v}\r\n".encode() for k, v in after_cors or ())
        head = b"HTTP/%b %d %b\r\n%b%b%b%b%bcontent-length: %d\r\n%b\r\n" % (
            self.version.encode(),
            status,
            _PHRASES[status].encode(),
            lines,
            _VARY,
            self.allow_origin,
            later,
            self._close_line(),
            len(body),
            _date.line(),
        )
        self.write(head if self.method == "HEAD" else head + body)
        self._finish()

    def _close_line(self) -> bytes:
        return b"" if self.keep_alive or self.version == "1.0" else b"connection: close\r\n"

    def start_stream(self, headers: Headers) -> None:
        """The head of an event stream; comments keep it alive while no event is sent."""
        if self.is_gone:
            return
        lines = b"".join(f"{k}: {v}\r\n".encode() for k, v in headers)
        chunked = b"transfer-encoding: chunked\r\n" if self._is_chunked else b""
        if not self._is_chunked:
            self.keep_alive = False
        self.is_streaming = True
        self.write(
            b"HTTP/%b 200 OK\r\n%b%b%b%b%b%b\r\n"
            % (self.version.encode(), lines, _VARY, self.allow_origin, self._close_line(), chunked, _date.line())
        )
        self.last_event_at = self._connection.loop.time()
        self._arm(_KEEP_ALIVE_S)

    def event(self, data: bytes) -> None:
        """One event, framed already (``data: ...`` and its blank line)."""
        if self.is_gone or self.is_done:
            return
        self.last_event_at = self._connection.loop.time()
        self.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def last_event(self, data: bytes, *, then: bytes = b"") -> None:
        """The final event, optionally one more chunk (``[DONE]``), and the end of the body."""
        if self.is_gone or self.is_done:
            return
        if self._is_chunked:
            more = b"%x\r\n%b\r\n" % (len(then), then) if then else b""
            self.write(b"%x\r\n%b\r\n%b0\r\n\r\n" % (len(data), data, more))
        else:
            self.write(data + then)
        self._finish()

    def gone(self) -> None:
        """The client has left."""
        if self.is_done or self.is_gone:
            return
        self.is_gone = True
        self._disarm()
        if self.on_gone is not None:
            self.on_gone()

    def _finish(self) -> None:
        self.is_done = True
        self._disarm()
        self._connection.exchange_done(self)

    def _arm(self, delay: float) -> None:
        self._timer = self._connection.loop.call_later(delay, self._comment)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _comment(self) -> None:
        due = self.last_event_at + _KEEP_ALIVE_S
        now = self._connection.loop.time()
        if now + 0.002 >= due:
            self.event(b":\n\n")
            due = now + _KEEP_ALIVE_S
        self._arm(max(0.001, due - now))


class Connections(set["Connection"]):
    """The open connections; ``emptied`` is set while there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.emptied = asyncio.Event()
        self.emptied.set()


class Connection(asyncio.Protocol):
    """One client connection."""

    transport: asyncio.Transport

    def __init__(self, handler: Handler, loop: asyncio.AbstractEventLoop, connections: Connections) -> None:
        self.handler = handler
        self.loop = loop
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Exchange] = deque()
        self.current: Exchange | None = None
        self._url = b""
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._in_head = True
        self._reading: Exchange | None = None
        self._limit: int | None = 0
        self.is_draining = False
        self._is_broken = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # the loop hands a TCP transport to a TCP server
        self._connections.add(self)
        self._connections.emptied.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if not self._connections:
            self._connections.emptied.set()
        for exchange in [self.current, *self._waiting]:
            if exchange is not None:
                exchange.gone()
        self._waiting.clear()

    def eof_received(self) -> bool:
        return False  # a client that only ends its sending side counts as gone

    def data_received(self, data: bytes) -> None:
        if self._is_broken:
            return
        if self._in_head:
            end = data.find(b"\r\n\r\n")
            self._head_bytes += len(data) if end < 0 else end
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._refuse(431)
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError:
            self._refuse(400)

    def _refuse(self, status: int) -> None:
        """The connection is beyond use: answer if nobody else is being answered, and close."""
        self._is_broken = True
        if self.current is None and not self.transport.is_closing():
            self.transport.write(
                b"HTTP/1.1 %d %b\r\nconnection: close\r\ncontent-length: 0\r\n%b\r\n"
                % (status, _PHRASES[status].encode(), _date.line())
            )
        self.transport.close()

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = {}
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        parser = self._parser
        method = parser.get_method().decode("latin-1")
        path = self._url.decode("latin-1").split("?", 1)[0]
        version = parser.get_http_version()
        exchange = Exchange(self, method, path, self._headers, version, parser.should_keep_alive())
        if exchange.headers.get("expect", "").lower() == "100-continue" and self.current is None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._reading = exchange
        self._limit = self.handler.body_limit(method, path)

    def on_body(self, body: bytes) -> None:
        exchange = self._reading
        if exchange is None or self._limit is None or exchange.is_too_large:
            return
        if len(exchange.body) + len(body) > self._limit:
            exchange.is_too_large = True
            exchange.body.clear()
        else:
            exchange.body += body

    def on_message_complete(self) -> None:
        exchange, self._reading = self._reading, None
        if exchange is None:
            return
        if self.current is None:
            self._begin(exchange)
        else:
            self._waiting.append(exchange)
            self.transport.pause_reading()

    def _begin(self, exchange: Exchange) -> None:
        self.current = exchange
        self.handler.handle(exchange)

    def exchange_done(self, exchange: Exchange) -> None:
        self.current = None
        if not exchange.keep_alive or self.is_draining:
            self.transport.close()
        elif self._waiting:
            self.loop.call_soon(self._next)

    def _next(self) -> None:
        if self.current is None and self._waiting and not self.transport.is_closing():
            self._begin(self._waiting.popleft())
            if not self._waiting:
                self.transport.resume_reading()

    def drain(self) -> None:
        """Close as soon as the answer in progress is complete."""
        self.is_draining = True
        if self.current is None:
            self.transport.close()


__all__ = ["Connection", "Connections", "Exchange", "Handler", "Headers"]
