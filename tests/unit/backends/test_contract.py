"""What every ``Backend`` owes its callers; the TGI client on real sockets, the fake without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from router_ext.backends.base import Backend, BackendRefused, BackendTimeout, BackendUnreachable, Headers
from router_ext.backends.fake import Ending, FakeBackend, Script
from router_ext.backends.tgi import TgiBackend
from router_ext.errors import UpstreamFailed

Make = Callable[..., Awaitable[Backend]]


class Recorder:
    """A sink that writes down what it was told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.data = b""
        self.error: UpstreamFailed | None = None
        self.ended = asyncio.Event()
        self.received = asyncio.Event()
        self.on_first: Callable[[], None] | None = None

    def on_head(self, status: int, headers: Headers) -> None:
        self.calls.append(f"head {status}")

    def on_data(self, data: bytes) -> None:
        assert data
        if self.calls[-1] != "data":
            self.calls.append("data")
        self.data += data
        self.received.set()
        if self.on_first is not None:
            self.on_first()
            self.on_first = None

    def on_end(self, error: UpstreamFailed | None) -> None:
        self.calls.append("end")
        self.error = error
        self.ended.set()

    async def wait(self) -> None:
        async with asyncio.timeout(5):
            await self.ended.wait()


class ByteServer:
    """A TCP server that answers each request (head and declared body) by ``answer(head, body, transport)``."""

    def __init__(self, answer: Callable[[bytes, bytes, asyncio.Transport], None]) -> None:
        self.answer = answer
        self.connections = 0
        self.requests: list[bytes] = []
        self.transports: set[asyncio.Transport] = set()
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(lambda: _Peer(self), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop_listening(self) -> None:
        assert self._server is not None
        self._server.close()

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        # Connections that the kernel has accepted show up within a few turns.
        for _ in range(5):
            await asyncio.sleep(0.001)
        for transport in list(self.transports):
            transport.abort()
        await until(lambda: not self.transports)
        await self._server.wait_closed()


class _Peer(asyncio.Protocol):
    def __init__(self, server: ByteServer) -> None:
        self._server = server
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.connections += 1
        self._server.transports.add(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.transports.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, rest = self._data.partition(b"\r\n\r\n")
        length = next((int(h[16:]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length: ")), 0)
        if found and len(rest) >= length:
            self._data = rest[length:]
            self._server.requests.append(head)
            self._server.answer(head, rest[:length], self._transport)


def played(play: Callable[[str, bytes], Script]) -> Callable[[bytes, bytes, asyncio.Transport], None]:
    """Answers that follow scripts."""

    def answer(head: bytes, body: bytes, transport: asyncio.Transport) -> None:
        script = play(head.split(b" ")[1].decode(), body)
        out = b"HTTP/1.1 %d X\r\n" % script.status
        out += b"".join(b"%b: %b\r\n" % pair for pair in script.headers)
        transport.write(out + b"transfer-encoding: chunked\r\n\r\n")
        for piece in script.pieces:
            transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        if script.ending is Ending.CLEAN:
            transport.write(b"0\r\n\r\n")
        elif script.ending is Ending.CUT:
            transport.close()

    return answer


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.001)


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[tuple[TgiBackend, ByteServer]]]]:
    """Starts a server and makes a client for it."""
    servers: list[ByteServer] = []
    backends: list[TgiBackend] = []

    async def build(answer: Any, **fields: Any) -> tuple[TgiBackend, ByteServer]:
        server = ByteServer(answer)
        await server.start()
        servers.append(server)
        backends.append(TgiBackend(f"http://127.0.0.1:{server.port}", **fields))
        return backends[-1], server

    yield build
    for backend in backends:
        await backend.close()
    for server in servers:
        await server.stop()


@pytest.fixture(params=["tgi", "fake"])
async def make(request: pytest.FixtureRequest, serve: Any) -> AsyncIterator[Make]:
    """Makes a backend that plays a script."""
    backends: list[FakeBackend] = []

    async def build(script: Script, **limits: float) -> Backend:
        if request.param == "fake":
            backends.append(FakeBackend(lambda path, body: script, unary_timeout_s=limits.get("unary_timeout_s", 30.0)))
            return backends[-1]
        backend, server = await serve(played(lambda path, body: script), **limits)
        if script.ending is Ending.REFUSED:
            server._server.close()
        client: Backend = backend
        return client

    yield build
    for backend in backends:
        await backend.close()


PIECES = (b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n")


async def test_callbacks_come_in_order(make: Make) -> None:
    backend = await make(Script(pieces=PIECES))
    sink = Recorder()
    backend.open_stream("/generate_stream", b"{}", sink)
    await sink.wait()
    assert sink.calls == ["head 200", "data", "end"]
    assert sink.data == b"".join(PIECES)
    assert sink.error is None


async def test_a_cut_is_never_a_clean_end(make: Make) -> None:
    backend = await make(Script(pieces=PIECES, ending=Ending.CUT))
    sink = Recorder()
    backend.open_stream("/generate_stream", b"{}", sink)
    await sink.wait()
    assert sink.data == b"".join(PIECES)
    assert isinstance(sink.error, UpstreamFailed)
    assert not isinstance(sink.error, BackendUnreachable)


async def test_a_refused_connection_says_so(make: Make) -> None:
    backend = await make(Script(ending=Ending.REFUSED))
    sink = Recorder()
    backend.open_stream("/generate_stream", b"{}", sink)
    await sink.wait()
    assert sink.calls == ["end"]
    assert isinstance(sink.error, BackendUnreachable)
    with pytest.raises(BackendUnreachable):
        await backend.call("GET", "/info")


async def test_other_statuses_carry_their_body(make: Make) -> None:
    backend = await make(Script(status=424, pieces=(b'{"error":"x"}',)))
    sink = Recorder()
    backend.open_stream("/generate_stream", b"{}", sink)
    await sink.wait()
    assert (sink.calls[0], sink.data) == ("head 424", b'{"error":"x"}')
    reply = await backend.call("POST", "/tokenize", b"{}")
    assert (reply.status, reply.body) == (424, b'{"error":"x"}')


@pytest.mark.parametrize("way", ["abort", "release"])
@pytest.mark.parametrize("moment", ["at once", "in a callback", "after some data"])
async def test_nothing_follows_an_end_from_outside(make: Make, moment: str, way: str) -> None:
    backend = await make(Script(pieces=PIECES * 3, ending=Ending.HANG))
    sink = Recorder()
    handle = backend.open_stream("/generate_stream", b"{}", sink)
    stop = getattr(handle, way)
    if moment == "at once":
        stop()
    elif moment == "in a callback":
        sink.on_first = stop
        await asyncio.wait_for(sink.received.wait(), 5)
    else:
        await asyncio.wait_for(sink.received.wait(), 5)
        stop()
    before = list(sink.calls), sink.data
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert (sink.calls, sink.data) == before
    assert "end" not in sink.calls
    stop()


async def test_a_paused_stream_delivers_nothing_until_resumed(make: Make) -> None:
    backend = await make(Script(pieces=PIECES))
    sink = Recorder()
    handle = backend.open_stream("/generate_stream", b"{}", sink)
    handle.pause_reading()
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert sink.data == b""
    handle.resume_reading()
    await sink.wait()
    assert sink.data == b"".join(PIECES)


async def test_a_short_call_has_a_limit(make: Make) -> None:
    backend = await make(Script(ending=Ending.HANG), unary_timeout_s=0.05)
    with pytest.raises(BackendTimeout):
        await backend.call("GET", "/health")
    with pytest.raises(BackendTimeout):
        await backend.call("GET", "/health", timeout_s=0.01)


async def test_closing_ends_everything_quietly(make: Make) -> None:
    backend = await make(Script(pieces=PIECES, ending=Ending.HANG))
    sink = Recorder()
    backend.open_stream("/generate_stream", b"{}", sink)
    await asyncio.wait_for(sink.received.wait(), 5)
    await backend.close()
    assert "end" not in sink.calls


# --- the TGI client alone --------------------------------------------------------------------------------------------


async def test_a_connection_serves_again_after_a_clean_end_only(serve: Any) -> None:
    endings = [Ending.CLEAN, Ending.CLEAN, Ending.HANG, Ending.CLEAN]
    backend, server = await serve(
        played(lambda path, body: Script(pieces=PIECES, ending=endings[len(server.requests) - 1]))
    )
    for _ in range(2):
        sink = Recorder()
        backend.open_stream("/generate_stream", b"{}", sink)
        await sink.wait()
    assert server.connections == 1
    sink = Recorder()
    handle = backend.open_stream("/generate_stream", b"{}", sink)
    await asyncio.wait_for(sink.received.wait(), 5)
    handle.abort()
    await until(lambda: not server.transports)
    await backend.call("GET", "/health")
    assert server.connections == 2


@pytest.mark.parametrize("closes", ["while idle", "at the next request"])
async def test_a_connection_closed_between_two_requests_is_not_a_failure(serve: Any, closes: str) -> None:
    """A server whose idle limit passes closes the socket, perhaps just as the next request is on its way."""
    answered: set[asyncio.Transport] = set()

    def answer(head: bytes, body: bytes, transport: asyncio.Transport) -> None:
        if transport in answered:
            transport.abort()
            return
        answered.add(transport)
        transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        if closes == "while idle":
            transport.close()

    backend, server = await serve(answer)
    for _ in range(3):
        assert (await backend.call("GET", "/info")).body == b"{}"
    assert server.connections == 3


async def test_a_server_that_dies_of_a_request_on_a_kept_connection_has_not_refused_it(serve: Any) -> None:
    """Only who was never sent there is innocent of the death for sure."""
    answered: set[asyncio.Transport] = set()

    def answer(head: bytes, body: bytes, transport: asyncio.Transport) -> None:
        if transport in answered:
            server.stop_listening()
            transport.abort()
            return
        answered.add(transport)
        transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    backend, server = await serve(answer)
    await backend.call("GET", "/info")
    with pytest.raises(BackendUnreachable) as caught:
        await backend.call("GET", "/info")
    assert not isinstance(caught.value, BackendRefused)
    with pytest.raises(BackendRefused):
        await backend.call("GET", "/info")


async def test_the_key_goes_in_the_header_and_nowhere_else(serve: Any) -> None:
    backend, server = await serve(played(lambda path, body: Script()), api_key="secret")
    await backend.call("GET", "/info")
    assert b"authorization: Bearer secret" in server.requests[0].split(b"\r\n")
    assert b"secret" not in server.requests[0].split(b"\r\n")[0]


async def test_a_silent_stream_is_given_up(serve: Any) -> None:
    script = Script(pieces=PIECES, ending=Ending.HANG)
    backend, _ = await serve(played(lambda path, body: script), idle_timeout_s=0.1)
    sink = Recorder()
    backend.open_stream("/generate_stream", b"{}", sink)
    await sink.wait()
    assert isinstance(sink.error, BackendTimeout)
    assert sink.data == b"".join(PIECES)


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabcdefgh",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000,
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n",
    ],
)
async def test_malformed_answers_are_failures(serve: Any, raw: bytes) -> None:
    def answer(head: bytes, body: bytes, transport: asyncio.Transport) -> None:
        transport.write(raw)
        transport.close()

    backend, _ = await serve(answer)
    sink = Recorder()
    backend.open_stream("/generate_stream", b"{}", sink)
    await sink.wait()
    assert isinstance(sink.error, UpstreamFailed)
