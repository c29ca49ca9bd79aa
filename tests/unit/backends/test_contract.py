"""What every ``Backend`` owes its callers; the TGI client on real sockets, the fake without."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from router_ext.backends.base import Backend, BackendTimeout, BackendUnreachable, Headers
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


class ScriptServer:
    """Plays scripts over HTTP/1.1."""

    def __init__(self, play: Callable[[str, bytes], Script]) -> None:
        self._play = play
        self.connections = 0
        self.open = 0
        self.requests: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            self.open -= 1

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        self.requests.append(head)
        length = next((int(h[16:]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length: ")), 0)
        body = await reader.readexactly(length)
        script = self._play(head.split(b" ")[1].decode(), body)
        out = b"HTTP/1.1 %d X\r\n" % script.status
        out += b"".join(b"%b: %b\r\n" % pair for pair in script.headers)
        writer.write(out + b"transfer-encoding: chunked\r\n\r\n")
        for piece in script.pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0)
        if script.ending is Ending.HANG:
            await reader.read()
            return False
        if script.ending is Ending.CUT:
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


@pytest.fixture(params=["tgi", "fake"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """Makes a backend that plays a script."""
    servers: list[asyncio.Server] = []
    scripts: list[ScriptServer] = []
    backends: list[Backend] = []

    async def build(script: Script, **limits: float) -> Backend:
        backend: Any
        if request.param == "fake":
            unary = limits.get("unary_timeout_s", 30.0)
            backend = FakeBackend(lambda path, body: script, unary_timeout_s=unary)
        else:
            scripts.append(ScriptServer(lambda path, body: script))
            server = await asyncio.start_server(scripts[-1].serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            if script.ending is Ending.REFUSED:
                server.close()
            servers.append(server)
            backend = TgiBackend(f"http://127.0.0.1:{port}", **limits)
        backends.append(backend)
        return backend

    yield build
    for backend in backends:
        await backend.close()
    await until(lambda: not any(script.open for script in scripts))
    for server in servers:
        server.close()
        await server.wait_closed()


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


@pytest.fixture
async def played() -> AsyncIterator[Callable[..., Awaitable[tuple[TgiBackend, ScriptServer]]]]:
    servers: list[asyncio.Server] = []
    scripts: list[ScriptServer] = []
    backends: list[TgiBackend] = []

    async def build(play: Callable[[str, bytes], Script], **fields: Any) -> tuple[TgiBackend, ScriptServer]:
        script_server = ScriptServer(play)
        scripts.append(script_server)
        server = await asyncio.start_server(script_server.serve, "127.0.0.1", 0)
        servers.append(server)
        backend = TgiBackend(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", **fields)
        backends.append(backend)
        return backend, script_server

    yield build
    for backend in backends:
        await backend.close()
    await until(lambda: not any(script.open for script in scripts))
    for server in servers:
        server.close()
        await server.wait_closed()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.001)


async def test_a_connection_serves_again_after_a_clean_end_only(played: Any) -> None:
    scripts = [Script(pieces=PIECES), Script(pieces=PIECES), Script(pieces=PIECES, ending=Ending.HANG), Script()]
    backend, server = await played(lambda path, body: scripts[len(server.requests) - 1])
    for _ in range(2):
        sink = Recorder()
        backend.open_stream("/generate_stream", b"{}", sink)
        await sink.wait()
    assert server.connections == 1
    sink = Recorder()
    handle = backend.open_stream("/generate_stream", b"{}", sink)
    await asyncio.wait_for(sink.received.wait(), 5)
    handle.abort()
    await until(lambda: server.open == 0)
    await backend.call("GET", "/health")
    assert server.connections == 2


@pytest.mark.parametrize("closes", ["while idle", "at the next request"])
async def test_a_connection_closed_between_two_requests_is_not_a_failure(closes: str) -> None:
    """A server whose idle limit passes closes the socket, perhaps just as the next request is on its way."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        if closes == "at the next request":
            await reader.read(1)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    backend = TgiBackend(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    for _ in range(3):
        assert (await backend.call("GET", "/info")).body == b"{}"
    assert connections == 3
    await backend.close()
    server.close()
    await server.wait_closed()


async def test_the_key_goes_in_the_header_and_nowhere_else(played: Any) -> None:
    backend, server = await played(lambda path, body: Script(), api_key="secret")
    await backend.call("GET", "/info")
    assert b"\r\nauthorization: Bearer secret\r\n" in server.requests[0]
    assert b"secret" not in server.requests[0].split(b"\r\n")[0]


async def test_a_silent_stream_is_given_up(played: Any) -> None:
    backend, _ = await played(lambda path, body: Script(pieces=PIECES, ending=Ending.HANG), idle_timeout_s=0.1)
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
async def test_malformed_answers_are_failures(raw: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    backend = TgiBackend(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    sink = Recorder()
    backend.open_stream("/generate_stream", b"{}", sink)
    await sink.wait()
    assert isinstance(sink.error, UpstreamFailed)
    await backend.close()
    server.close()
    await server.wait_closed()
