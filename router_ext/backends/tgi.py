"""HTTP client for one TGI server, on ``asyncio.Protocol`` and httptools.

Cancelling is closing the socket: a connection carries one exchange at a time and is used again only after an answer
that was read to its declared end. Nothing is awaited per token: ``data_received`` parses and calls the sink in the same
loop turn, with everything one read brought in one call.

    _Connection   a socket, idle or carrying an exchange
    _Exchange     one request and its answer; the handle that callers hold
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

import httptools

from router_ext.backends.base import (
    BackendClosed,
    BackendRefused,
    BackendTimeout,
    BackendUnreachable,
    Headers,
    Reply,
    StreamSink,
)
from router_ext.errors import UpstreamFailed

MAX_HEAD_BYTES = 65_536
"""An answer whose status line and headers exceed this is broken."""

IDLE_S = 4.0
"""How long an unused connection is kept: less than the 5 s after which common servers close theirs."""

MAX_IDLE = 64
"""Unused connections kept; more would only hold sockets."""

RELEASE_S = 5.0
"""How long an answer whose content is known may take to its end; then its connection is closed."""


def parse_address(url: str) -> SplitResult:
    """A backend's address, in parts.

    Raises:
        ValueError: with the reason.
    """
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises for what is none
    except ValueError as error:
        raise ValueError(f"{url!r} is no http(s) address: {error}") from None
    is_plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is no http(s) address: http://host:port or https://host:port is one")
    if "@" in parts.netloc:
        raise ValueError(f"{parts.hostname!r}: an address carries no credentials; name the key of the backend instead")
    return parts


class _Connection(asyncio.Protocol):
    """A socket to the server. ``idle_since_s`` counts while no exchange uses it."""

    __slots__ = ("_client", "exchange", "idle_since_s", "transport")

    def __init__(self, client: TgiBackend, exchange: _Exchange) -> None:
        self._client = client
        self.exchange: _Exchange | None = exchange
        self.transport: asyncio.Transport | None = None
        self.idle_since_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self.transport = cast(asyncio.Transport, transport)
        if self.exchange is None:
            self.transport.abort()
        else:
            self.exchange.attach(self, is_reused=False)

    def data_received(self, data: bytes) -> None:
        if self.exchange is not None:
            self.exchange.received(data)
        else:
            # Bytes that nobody asked for: whatever they are, they must not be taken for the next answer.
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.lost()
        else:
            self._client.forget(self)

    def abort(self) -> None:
        """Close at once."""
        self.exchange = None
        if self.transport is not None:
            self.transport.abort()


class _Ignored:
    """Sink of an exchange whose answer is known already."""

    def on_head(self, status: int, headers: Headers) -> None:
        return

    def on_data(self, data: bytes) -> None:
        return

    def on_end(self, error: UpstreamFailed | None) -> None:
        return


_IGNORED = _Ignored()


class _Exchange:
    """One request and its answer."""

    __slots__ = (
        "_client",
        "_connect_task",
        "_connection",
        "_error",
        "_head_bytes",
        "_headers",
        "_is_complete",
        "_is_done",
        "_is_headed",
        "_is_kept_alive",
        "_is_paused",
        "_is_reused",
        "_last_byte_s",
        "_parser",
        "_parts",
        "_released_s",
        "_request",
        "_sink",
        "_was_sent",
    )

    def __init__(self, client: TgiBackend, request: bytes, sink: StreamSink) -> None:
        self._client = client
        self._request = request
        self._sink = sink
        self._parser: Any = httptools.HttpResponseParser(self)
        self._connection: _Connection | None = None
        self._connect_task: asyncio.Task[None] | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._head_bytes = 0
        self._is_headed = False
        self._is_complete = False
        self._is_done = False
        self._is_kept_alive = False
        self._is_paused = False
        self._is_reused = False
        self._was_sent = False
        self._last_byte_s = 0.0
        self._released_s = 0.0
        self._error: UpstreamFailed | None = None

    # --- StreamHandle ---

    def abort(self) -> None:
        if not self._is_done:
            self._detach(is_kept=False)

    def release(self) -> None:
        self._sink = _IGNORED
        if self._is_done:
            return
        if self._is_paused:
            self.resume_reading()
        self._released_s = self._client.loop.time()

    def pause_reading(self) -> None:
        self._is_paused = True
        transport = self._transport
        if transport is not None:
            transport.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._last_byte_s = self._client.loop.time()
        transport = self._transport
        if transport is not None:
            transport.resume_reading()

    @property
    def _transport(self) -> asyncio.Transport | None:
        transport = None if self._connection is None else self._connection.transport
        return None if transport is None or transport.is_closing() else transport

    # --- connection ---

    def connect(self) -> None:
        """Use an idle connection, or open one within the client's limit; failures go to the sink."""
        connection = self._client.take_idle()
        if connection is not None:
            self.attach(connection, is_reused=True)
        else:
            # The exchange owns this task and cancels it in ``abort``; it ends within the limit.
            self._connect_task = self._client.loop.create_task(self._open())

    async def _open(self) -> None:
        client = self._client
        connection = _Connection(client, self)
        try:
            async with asyncio.timeout(client.connect_timeout_s):
                await client.loop.create_connection(lambda: connection, client.host, client.port, ssl=client.tls)
        except TimeoutError:
            self._finish(BackendRefused("The backend did not accept a connection in time"))
        except (OSError, ValueError):  # a name that no resolver takes is a ValueError
            if self._was_sent:
                # The server is gone, and this request may be why.
                self._finish(BackendUnreachable("The backend closed the connection without an answer"))
            else:
                self._finish(BackendRefused("The backend refused the connection"))
        except asyncio.CancelledError:
            connection.abort()
            raise
        finally:
            self._connect_task = None

    def attach(self, connection: _Connection, *, is_reused: bool) -> None:
        """Send the request on a connection that is open."""
        transport = connection.transport
        if self._is_done or transport is None:
            connection.abort()
            return
        connection.exchange = self
        self._connection = connection
        self._is_reused = is_reused
        loop = self._client.loop
        self._last_byte_s = loop.time()
        transport.write(self._request)
        self._was_sent = True
        if self._is_paused:
            # uvloop undoes a pause made inside connection_made.
            loop.call_soon(self._repause)

    def _repause(self) -> None:
        if self._is_paused:
            self.pause_reading()

    def received(self, data: bytes) -> None:
        """One read."""
        self._last_byte_s = self._client.loop.time()
        if not self._is_headed:
            self._head_bytes += len(data)
            self._request = b""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._error = UpstreamFailed("The backend sent a malformed answer")
        if not self._is_headed and self._head_bytes > MAX_HEAD_BYTES:
            self._error = UpstreamFailed("The backend sent a malformed answer")
        parts = self._parts
        if parts:
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            self._sink.on_data(body)
        if self._is_done:
            return
        if self._error is not None:
            self._finish(self._error)
        elif self._is_complete:
            self._finish(None)

    def lost(self) -> None:
        """The connection has closed."""
        self._connection = None
        if self._is_done:
            return
        if self._is_reused and not self._head_bytes:
            # As a rule the server closed it while it was idle. One that died of the request refuses the next one.
            self._is_reused = False
            self._connect_task = self._client.loop.create_task(self._open())
        elif self._is_headed:
            self._finish(BackendClosed("The backend closed the stream before its end"))
        else:
            self._finish(BackendUnreachable("The backend closed the connection without an answer"))

    # --- httptools callbacks ---

    def on_message_begin(self) -> None:
        if self._is_complete:
            self._error = UpstreamFailed("The backend sent more than it was asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = []
            return
        self._is_headed = True
        # Once the message is complete the parser has forgotten the answer's headers.
        self._is_kept_alive = self._parser.should_keep_alive()
        headers, self._headers = self._headers, []
        self._sink.on_head(status, headers)

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if self._is_headed:
            self._is_complete = True

    # --- ends ---

    def check_idle(self, now: float) -> None:
        """Give up a silent answer, or one that is known and does not end."""
        if self._released_s:
            if now - self._released_s >= RELEASE_S:
                self.abort()
        elif not self._is_paused and self._was_sent and now - self._last_byte_s >= self._client.idle_timeout_s:
            self._finish(BackendTimeout("The backend sent nothing for too long"))

    def _detach(self, *, is_kept: bool) -> None:
        self._is_done = True
        self._client.exchanges.discard(self)
        if self._connect_task is not None:
            self._connect_task.cancel()
            self._connect_task = None
        connection, self._connection = self._connection, None
        # The two refer to each other; without this every exchange would wait for the garbage collector.
        self._parser = None
        if connection is None:
            return
        if is_kept:
            connection.exchange = None
            self._client.give_back(connection)
        else:
            connection.abort()

    def _finish(self, error: UpstreamFailed | None) -> None:
        if self._is_done:
            return
        self._connect_task = None
        self._detach(is_kept=error is None and not self._is_paused and self._is_kept_alive)
        self._sink.on_end(error)


class _Collector:
    """Sink of a short call: the whole answer, with a bound."""

    def __init__(self, future: asyncio.Future[Reply], max_bytes: int) -> None:
        self._future = future
        self._max_bytes = max_bytes
        self._status = 0
        self._headers: Headers = ()
        self._body = bytearray()

    def on_head(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers

    def on_data(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > self._max_bytes and not self._future.done():
            self._future.set_exception(UpstreamFailed("The backend's answer is too large"))

    def on_end(self, error: UpstreamFailed | None) -> None:
        if self._future.done():
            return
        if error is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(Reply(self._status, self._headers, bytes(self._body)))


def _give_up(future: asyncio.Future[Reply]) -> None:
    if not future.done():
        future.set_exception(BackendTimeout("The backend did not answer in time"))


class TgiBackend:
    """Implements ``Backend`` over HTTP/1.1.

    Args:
        url: base address, ``http://host:port`` or ``https://…``; a path is kept as a prefix.
        api_key: sent as a bearer token if given.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        connect_timeout_s: float = 5.0,
        idle_timeout_s: float = 60.0,
        unary_timeout_s: float = 30.0,
        max_reply_bytes: int = 64_000_000,
    ) -> None:
        parts = parse_address(url)
        assert parts.hostname is not None
        self.loop = asyncio.get_running_loop()
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.connect_timeout_s = connect_timeout_s
        self.idle_timeout_s = idle_timeout_s
        self.unary_timeout_s = unary_timeout_s
        self.exchanges: set[_Exchange] = set()
        self._max_reply_bytes = max_reply_bytes
        self._prefix = parts.path.rstrip("/").encode()
        authority = f"[{self.host}]" if ":" in self.host else self.host
        head = f"host: {authority}:{self.port}\r\n"
        if api_key is not None:
            head += f"authorization: Bearer {api_key}\r\n"
        self._common = head.encode()
        self._idle: list[_Connection] = []
        self._trim_timer: asyncio.TimerHandle | None = None
        # One clock for all exchanges: a timer each would cost half a kilobyte and more time than a token.
        self._look_s = min(RELEASE_S, idle_timeout_s) / 4
        self._look_timer: asyncio.TimerHandle | None = None

    def _request(self, method: bytes, path: str, body: bytes, headers: bytes = b"") -> bytes:
        head = b"%b %b%b HTTP/1.1\r\n%b%b" % (method, self._prefix, path.encode(), self._common, headers)
        if method == b"POST":
            head += b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        return head + b"\r\n" + body

    def _start(self, request: bytes, sink: StreamSink) -> _Exchange:
        exchange = _Exchange(self, request, sink)
        self.exchanges.add(exchange)
        if self._look_timer is None:
            self._look_timer = self.loop.call_later(self._look_s, self._look)
        exchange.connect()
        return exchange

    def _look(self) -> None:
        """End exchanges that are silent for too long, at most a quarter of the shorter limit later than they should."""
        now = self.loop.time()
        for exchange in list(self.exchanges):
            exchange.check_idle(now)
        self._look_timer = self.loop.call_later(self._look_s, self._look) if self.exchanges else None

    # --- idle connections ---

    def take_idle(self) -> _Connection | None:
        """The connection used last, which is the one most likely to be open still."""
        now = self.loop.time()
        while self._idle:
            connection = self._idle.pop()
            transport = connection.transport
            if transport is not None and not transport.is_closing() and now - connection.idle_since_s < IDLE_S:
                return connection
            connection.abort()
        return None

    def give_back(self, connection: _Connection) -> None:
        """Keep a connection whose last answer was read to its end."""
        if len(self._idle) >= MAX_IDLE:
            connection.abort()
            return
        connection.idle_since_s = self.loop.time()
        self._idle.append(connection)
        if self._trim_timer is None:
            self._trim_timer = self.loop.call_later(IDLE_S, self._trim)

    def forget(self, connection: _Connection) -> None:
        """An idle connection was closed by the server."""
        if connection in self._idle:
            self._idle.remove(connection)

    def _trim(self) -> None:
        self._trim_timer = None
        oldest = self.loop.time() - IDLE_S
        kept = [connection for connection in self._idle if connection.idle_since_s > oldest]
        stale = [connection for connection in self._idle if connection.idle_since_s <= oldest]
        self._idle = kept
        for connection in stale:
            connection.abort()
        if kept:
            self._trim_timer = self.loop.call_later(IDLE_S / 2, self._trim)

    # --- Backend ---

    def open_stream(self, path: str, body: bytes, sink: StreamSink, headers: bytes = b"") -> _Exchange:
        return self._start(self._request(b"POST", path, body, headers), sink)

    async def call(self, method: str, path: str, body: bytes = b"", *, timeout_s: float | None = None) -> Reply:
        future: asyncio.Future[Reply] = self.loop.create_future()
        exchange = self._start(self._request(method.encode(), path, body), _Collector(future, self._max_reply_bytes))
        # A timer and a future: a quarter of what ``asyncio.timeout`` costs, and prompts are counted by such a call.
        timer = self.loop.call_later(self.unary_timeout_s if timeout_s is None else timeout_s, _give_up, future)
        try:
            return await future
        finally:
            timer.cancel()
            exchange.abort()

    async def close(self) -> None:
        for exchange in list(self.exchanges):
            exchange.abort()
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.abort()
        for timer in (self._trim_timer, self._look_timer):
            if timer is not None:
                timer.cancel()
        self._trim_timer = self._look_timer = None
