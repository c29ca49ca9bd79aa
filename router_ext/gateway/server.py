"""The HTTP server: uvicorn on uvloop and httptools, hardened, with an ``Exchange`` in every scope.

uvicorn alone keeps idle connections, half headers, half bodies and unread answers open for ever, takes any amount of
headers and a missing Host, frames HTTP/1.0 answers in chunks, and stops reading (and so stops seeing a client leave) as
soon as a client pipelines. The protocol class below bounds each of these.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import re
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router_ext.errors import SettingsError
from router_ext.gateway.exchange import EXTENSION, Exchange
from router_ext.gateway.lean import Line, Signal
from router_ext.settings import RouterSettings

SEND_BUFFER_BYTES = 32_768
"""Kernel buffer per client: a stalled reader absorbs some hundred events, not ten thousand."""

WRITE_HIGH_BYTES = 65_536
"""Bytes waiting in the process for one client before its upstream is paused."""

MAX_PIPELINED = 8
"""Further requests a client may send before its first is answered; beyond, its connection is cut."""

DISCARD_BYTES = 64_000_000
"""How much of a too large body is read and thrown away, so that its sender gets to see the 413."""


FRAMING_BYTES = 16
"""Framing of a chunked body allowed per byte of it, beyond the limit of a head: chunks of one byte, not endless
extensions of them."""

_HOST = re.compile(rb"[0-9A-Za-z._~!$&'()*+,;=%:\[\]-]+")
"""What RFC 3986 allows in a host with its port."""

LINGER_S = 1.0
"""How long a refused client may go on sending into the void before its connection is cut."""


ACCEPTS = 16
"""Connections taken in one loop turn, which is 20 ms long where a core is full of tokens."""


class _Refused(Exception):
    """Raised inside a parser callback; carries the status of the refusal."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class _Phase(enum.Enum):
    """What a connection owes us."""

    HEAD = enum.auto()
    BODY = enum.auto()
    SERVING = enum.auto()


def protocol_class(settings: RouterSettings) -> type[asyncio.Protocol]:
    """The protocol with this router's limits."""
    check_s = min(settings.header_timeout_s, settings.stall_limit_s)

    class LimitedProtocol(HttpToolsProtocol):
        """One client connection."""

        # More than 30 attributes, and the dict of uvicorn's own would no longer share its keys: a kilobyte for each.
        __slots__ = (
            "_body_bytes",
            "_exchanges",
            "_head_bytes",
            "_header_bytes",
            "_is_discarding",
            "_is_refused",
            "_phase",
            "_raw_bytes",
            "_since_s",
            "_timer",
            "_unread_bytes",
            "_unread_s",
        )

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.pipeline = Line()  # type: ignore[assignment]  # as much of a deque as is used
            self._phase = _Phase.HEAD
            self._since_s = 0.0
            self._head_bytes = 0
            self._header_bytes = 0
            self._body_bytes = 0
            self._raw_bytes = 0
            self._is_discarding = False
            self._is_refused = False
            self._timer: asyncio.TimerHandle | None = None
            self._unread_bytes = 0
            self._unread_s = 0.0
            self._exchanges: list[Exchange] = []

        # --- connection ---

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn narrows the argument
            self.flow._is_writable_event = Signal(is_set=True)  # type: ignore[assignment]
            self.transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES, low=WRITE_HIGH_BYTES // 4)
            self._since_s = self.loop.time()
            self._timer = self.loop.call_later(check_s, self._check_progress)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            super().connection_lost(exc)
            exchanges, self._exchanges = self._exchanges, []
            for exchange in exchanges:
                exchange.connection_lost()

        def _check_progress(self) -> None:
            """Cut a connection that owes the rest of a head or of a body, or does not take what it asked for.

            One timer serves its whole life, and beyond: a closing connection lives until its last byte is read.
            """
            self._timer = None
            now = self.loop.time()
            if self._is_stalled(now):
                self.transport.abort()
                return
            wait_s = check_s
            if self._phase is not _Phase.SERVING and not self.transport.is_closing():
                limit_s = settings.header_timeout_s if self._phase is _Phase.HEAD else settings.body_idle_timeout_s
                left_s = limit_s - (now - self._since_s)
                if left_s <= 0:
                    self._time_out()
                    return
                wait_s = min(wait_s, left_s)
            self._timer = self.loop.call_later(wait_s, self._check_progress)

        def _is_stalled(self, now: float) -> bool:
            """Nothing was read for too long of a connection to which nothing is being written."""
            if self._exchanges and self._exchanges[0].is_open:
                # A running stream has a clock of its own; ``Client`` says in the books why it ended.
                self._unread_bytes = 0
                return False
            unread = self.transport.get_write_buffer_size()
            if unread == 0 or unread != self._unread_bytes:
                self._unread_bytes, self._unread_s = unread, now
                return False
            return now - self._unread_s >= settings.stall_limit_s

        def _time_out(self) -> None:
            self._give_up_body()
            if self._phase is _Phase.HEAD and self._head_bytes == 0:
                self.transport.abort()
            else:
                self._refuse(408, "The request did not arrive in time.")

        def _give_up_body(self) -> None:
            """The body will not be whole: its handler learns that there is no client; the connection says why."""
            if self._phase is _Phase.BODY and not self.cycle.response_started and len(self._exchanges) == 1:
                self.cycle.response_complete = self.cycle.disconnected = True
                self.cycle.message_event.set()

        def data_received(self, data: bytes) -> None:
            self._unset_keepalive_if_required()
            if self._is_refused:
                return
            if self._phase is _Phase.BODY:
                self._since_s = self.loop.time()
                self._raw_bytes += len(data)
            else:
                self._head_bytes += len(data)
            if self._exchanges and self._exchanges[0].is_open:
                # The stream's answer closes the connection: nothing that follows is ever served.
                return
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserCallbackError as error:
                cause = error.__context__ or error.__cause__
                if not isinstance(cause, _Refused):
                    raise
                self._give_up_body()
                self._refuse(cause.status, cause.text)
            except httptools.HttpParserUpgrade:
                # Ignoring an upgrade is allowed; the parser has stopped, so this is the connection's last request.
                self.cycle.keep_alive = False
                self.cycle.more_body = False
                self.cycle.message_event.set()
                self._phase = _Phase.SERVING
            except httptools.HttpParserError:
                self._give_up_body()
                self._refuse(400, "Invalid HTTP request received.")
            else:
                framing = self._raw_bytes - self._body_bytes
                if self._phase is _Phase.BODY and framing > (
                    settings.header_limit_bytes + FRAMING_BYTES * self._body_bytes
                ):
                    self._give_up_body()
                    self._refuse(400, "The request's body is chopped too fine.")
                if self._phase is _Phase.HEAD and self._head_bytes > settings.header_limit_bytes:
                    self._refuse(431, "The request's headers are too large.")

        def _refuse(self, status: int, text: str) -> None:
            """Answer a connection that never became a request, and end it."""
            if self.transport.is_closing() or self._is_refused:
                return
            if self.cycle is not None and not self.cycle.response_complete:
                # An earlier request of this connection is being served; its answer must not be mixed with ours.
                self.transport.abort()
                return
            body = text.encode()
            head = b"HTTP/1.1 %d %b\r\ncontent-type: text/plain; charset=utf-8\r\n" % (status, _PHRASES[status])
            self.transport.write(head + b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
            # Closing with unread bytes would reset the connection and take the answer with it. TLS knows no half close.
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._is_refused = True
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_later(LINGER_S, self.transport.abort)

        # --- parser callbacks ---

        def on_message_begin(self) -> None:
            super().on_message_begin()
            # The clock of a head starts with its first byte and does not restart with each further one.
            self._phase = _Phase.HEAD
            self._since_s = self.loop.time()
            self._header_bytes = 0

        def on_url(self, url: bytes) -> None:
            super().on_url(url)
            self._header_bytes += len(url)
            if url[:1] != b"/" and self._header_bytes == len(url) and url != b"*":
                # A proxy's form of a target names a server, and this one is nobody's proxy.
                raise _Refused(400, "The request's target must be a path.")
            if self._header_bytes > settings.header_limit_bytes:
                raise _Refused(414, "The request's target is too long.")

        def on_header(self, name: bytes, value: bytes) -> None:
            super().on_header(name, value)
            self._header_bytes += len(name) + len(value) + 4
            if self._header_bytes > settings.header_limit_bytes or len(self.headers) > settings.header_limit_count:
                raise _Refused(431, "The request's headers are too large.")

        def on_headers_complete(self) -> None:
            version = self.parser.get_http_version()
            is_old = version != "1.1"
            if is_old and version != "1.0":
                raise _Refused(400, "This server speaks HTTP/1.1.")
            hosts = 0
            length = 0
            for name, value in self.headers:
                if name == b"host":
                    hosts += 1
                    if not _HOST.fullmatch(value):
                        raise _Refused(400, "The Host header is invalid.")
                elif name == b"transfer-encoding" and (is_old or value.lower() != b"chunked"):
                    # Whoever stands in front may read the body's length in another way.
                    raise _Refused(400, "No transfer encoding but chunked is understood.")
                elif name == b"content-length" and value.isdigit():
                    length = int(value)
            if hosts > 1 or (hosts == 0 and not is_old):
                raise _Refused(400, "Exactly one Host header is required.")
            self._phase = _Phase.BODY
            self._since_s = self.loop.time()
            self._head_bytes = 0
            self._body_bytes = self._raw_bytes = 0
            self._is_discarding = False
            if len(self.pipeline) >= MAX_PIPELINED:
                self.transport.abort()
                return
            try:
                super().on_headers_complete()
            except httptools.HttpParserInvalidURLError:
                raise _Refused(400, "The request's target is invalid.") from None
            # Nobody waits for it yet.
            self.cycle.message_event = Signal()  # type: ignore[assignment]
            exchange = Exchange(self.transport, self.cycle, has_chunks=not is_old)
            # The task of this request has been made, and runs in a later turn.
            self.scope["extensions"] = {EXTENSION: exchange}  # type: ignore[dict-item]  # typed for plain dicts
            self._exchanges.append(exchange)
            if length > settings.body_limit_bytes:
                self._start_discarding()
            # A paused connection hides that its client has gone.
            self.flow.resume_reading()

        def on_body(self, body: bytes) -> None:
            if self.transport.is_closing():
                return
            self._body_bytes += len(body)
            if self._is_discarding:
                if self._body_bytes > DISCARD_BYTES:
                    self.transport.abort()
                return
            if self._body_bytes > settings.body_limit_bytes:
                self._start_discarding()
                return
            super().on_body(body)
            # The body is bounded by the limit above; pausing would hide that its client has gone.
            self.flow.resume_reading()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._phase = _Phase.SERVING

        def _start_discarding(self) -> None:
            self._is_discarding = True
            exchange = self._exchanges[-1]
            exchange.is_body_too_large = True
            self.cycle.body = bytearray()
            self.cycle.keep_alive = False
            if self.cycle.waiting_for_100_continue:
                # The client waits for leave to send: answered without it, it need not send at all.
                self.cycle.waiting_for_100_continue = False
                self.cycle.more_body = False
                self.cycle.message_event.set()

        def on_response_complete(self) -> None:
            if self._exchanges:
                self._exchanges.pop(0)
            super().on_response_complete()

        # --- flow control ---

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._exchanges:
                self._exchanges[0].paused()

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._exchanges:
                self._exchanges[0].resumed()

    return LimitedProtocol


_PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 414: b"URI Too Long", 431: b"Request Header Fields Too Large"}


def tls_context(settings: RouterSettings) -> ssl.SSLContext | None:
    """What clients' connections are encrypted with, TLS 1.2 at least; None without a certificate.

    Raises:
        SettingsError: certificate and key cannot be read, or do not belong together.
    """
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, settings)
    return context


def load_certificate(context: ssl.SSLContext, settings: RouterSettings) -> None:
    """Read the certificate (anew): connections that begin from now on are given it.

    Raises:
        SettingsError: as ``tls_context``; the context keeps what it has.
    """
    cert, key = settings.tls_cert_file, settings.tls_key_file
    assert cert is not None
    assert key is not None
    try:
        # A pair that does not fit would leave the context with one half of it.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise SettingsError(f"the certificate {cert} with the key {key} cannot be used: {reason}") from None


def _no_password() -> str:
    """A router has nobody to ask for a key's password."""
    raise ValueError("the key is encrypted")


def listen(settings: RouterSettings, *, host: str, port: int, given: socket.socket | None = None) -> socket.socket:
    """The listening socket: ``given`` by the router that is replaced, handed down by a supervisor, or bound here.

    Raises:
        SettingsError: the port is busy or not ours to bind; the message names it.
    """
    if given is not None:
        listener = given
    elif settings.listen_fd is not None and port == settings.port:
        listener = socket.socket(fileno=settings.listen_fd)
    else:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                raise SettingsError(f"port {port} on {host} is busy: another program listens there") from None
            raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    # Accepted sockets inherit it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    listener.setblocking(False)
    return listener


class RouterServer(uvicorn.Server):
    """uvicorn's server whose first SIGTERM or SIGINT asks the router to drain, and whose second ends it.

    ``on_drain`` is called on the event loop; the router calls ``finish`` when the last stream has ended or the limit
    is over. Until then a port of our own stays open: readiness says no, and new requests are refused with a reason. A
    listening socket that a supervisor owns is let go at once, so that new connections wait for the next process.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_drain: Callable[[], None] | None,
        *,
        is_handed_down: bool,
        handshake_timeout_s: float,
    ) -> None:
        super().__init__(config)
        self._handshake_timeout_s = handshake_timeout_s
        self._on_drain = on_drain
        self._is_handed_down = is_handed_down
        self._is_draining = False
        self._handles: list[socket.socket] = []
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; on each socket through several handles, since libuv takes one connection a turn from each.

        uvicorn would leave a handshake the 60 s that asyncio does; to a client it is the first part of a head.
        """
        listeners = list(sockets or ())
        self._handles = [listener.dup() for listener in listeners for _ in range(ACCEPTS - 1)]
        await super().startup([])
        self.started = False
        config = self.config
        for listener in (*listeners, *self._handles):
            server = await self._loop.create_server(
                self._protocol,
                sock=listener,
                ssl=config.ssl,
                ssl_handshake_timeout=None if config.ssl is None else self._handshake_timeout_s,
                backlog=config.backlog,
            )
            self.servers.append(server)
        self.started = True

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close what ``startup`` has opened."""
        await super().shutdown([*(sockets or ()), *self._handles])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if self._on_drain is None:
            yield
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._begin_end)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.remove_signal_handler(number)

    def _begin_end(self) -> None:
        if self._is_draining:
            self.should_exit = self.force_exit = True
            return
        self._is_draining = True
        if self._is_handed_down:
            self.stop_accepting()
        for connection in list(self.server_state.connections):
            # Ends idle connections, and busy ones after their answer; one whose first request is still on its way gets
            # its answer.
            if getattr(connection, "cycle", None) is not None:
                connection.shutdown()
        if self._on_drain is not None:
            self._on_drain()

    def stop_accepting(self) -> None:
        """Let the listening socket go to another process that holds it; connections that are open stay."""
        for server in self.servers:
            server.close()

    @property
    def num_connections(self) -> int:
        """Connections that are open, idle ones included."""
        return len(self.server_state.connections)

    def finish(self) -> None:
        """Stop listening, close idle connections and return from ``serve``."""
        self.should_exit = True


def make_server(
    app: Any,
    settings: RouterSettings,
    *,
    on_drain: Callable[[], None] | None = None,
    tls: ssl.SSLContext | None = None,
) -> RouterServer:
    """Server for ``app`` with this router's limits. Without ``on_drain`` it leaves signals alone."""
    config = uvicorn.Config(
        app,
        http=protocol_class(settings),
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(settings.keep_alive_s),
        timeout_graceful_shutdown=5,
        backlog=4_096,
    )
    config.load()
    config.ssl = tls
    is_handed_down = on_drain is not None and settings.listen_fd is not None
    return RouterServer(config, on_drain, is_handed_down=is_handed_down, handshake_timeout_s=settings.header_timeout_s)
