"""What the HTTP server refuses, bounds and notices, on real sockets."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from router_ext.errors import SettingsError
from router_ext.gateway.exchange import EXTENSION, Exchange
from router_ext.gateway.server import DISCARD_BYTES, MAX_PIPELINED, RouterServer, listen, make_server
from router_ext.settings import RouterSettings


def settings(**values: Any) -> RouterSettings:
    return RouterSettings(key_pepper="ab" * 32, controlplane_url="", port=0, dir=Path("unused"), **values)


async def talk_to_echo(data: bytes) -> bytes:
    async with serving(echo) as (port, _):
        return await talk(port, data)


@contextlib.asynccontextmanager
async def serving(app: Any, **values: Any) -> AsyncIterator[tuple[int, RouterServer]]:
    chosen = settings(**values)
    listener = listen(chosen, host="127.0.0.1", port=0)
    port = listener.getsockname()[1]
    server = make_server(app, chosen)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        try:
            yield port, server
        finally:
            server.finish()


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.002)


async def read_all(reader: asyncio.StreamReader, limit_s: float = 5.0) -> bytes:
    async with asyncio.timeout(limit_s):
        return await reader.read()


async def talk(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await read_all(reader)
    finally:
        writer.close()


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the size of the body, or 413."""
    exchange: Exchange = scope["extensions"][EXTENSION]
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message["body"])
        if not message["more_body"]:
            break
    status = 413 if exchange.is_body_too_large else 200
    body = b"%d" % size
    await exchange.answer(status, [], body, is_head=scope["method"] == "HEAD", is_last=scope["path"] == "/last")


GET = b"GET /x HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"


async def test_the_last_answer_says_so_and_closes() -> None:
    answer = await talk_to_echo(b"GET /last HTTP/1.1\r\nhost: a\r\n\r\n" + GET)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert answer.endswith(b"connection: close\r\n\r\n0")


async def test_an_answer_to_a_head_has_no_body() -> None:
    answer = await talk_to_echo(GET.replace(b"GET", b"HEAD"))
    assert b"\r\ncontent-length: 1\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


async def test_a_request_that_is_refused_while_it_is_read_gets_one_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def hasty(scope: Any, receive: Any, send: Any) -> None:
        exchange: Exchange = scope["extensions"][EXTENSION]
        await exchange.answer(404, [], b"", is_head=False, is_last=False)

    async with serving(hasty) as (port, _):
        answer = await talk(port, b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    # Nor is one tried.
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb"])
async def test_a_header_never_becomes_two(value: bytes) -> None:
    async def careless(scope: Any, receive: Any, send: Any) -> None:
        exchange: Exchange = scope["extensions"][EXTENSION]
        await exchange.answer(200, [(b"x-told", value)], b"", is_head=False, is_last=False)

    async with serving(careless) as (port, _):
        answer = await talk(port, GET)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"x-told" not in answer


async def test_a_plain_request_is_served() -> None:
    async with serving(echo) as (port, _):
        answer = await talk(port, GET)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\n0")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /x HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /x HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", b"400"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /x HTTP/1.1\r\nhost: a\r\n" + b"".join(b"x-%d: 1\r\n" % i for i in range(120)) + b"\r\n", b"431"),
        (b"GET /x HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 40_000 + b"\r\n\r\n", b"431"),
        (b"GET /" + b"y" * 40_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", b"414"),
        (b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc", b"400"),
        (b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
    ],
)
async def test_a_bad_head_is_refused(request_bytes: bytes, status: bytes) -> None:
    async with serving(echo) as (port, _):
        answer = await talk(port, request_bytes)
    assert answer.split(b" ", 2)[1] == status


async def test_a_header_that_never_ends_is_cut_at_the_limit() -> None:
    async with serving(echo) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /x HTTP/1.1\r\nhost: a\r\nx: ")
        for _ in range(40):
            writer.write(b"y" * 1_000)
            await asyncio.sleep(0)
        assert b" 431 " in await read_all(reader)
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET /x HT", b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nabc"])
async def test_a_connection_that_owes_its_request_is_closed(sent: bytes) -> None:
    async with serving(echo, header_timeout_s=0.1, body_idle_timeout_s=0.1) as (port, server):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        try:
            answer = await read_all(reader, 3)
        except ConnectionResetError:
            answer = b""
        writer.close()
        assert answer == b"" if not sent else b" 408 " in answer
        await until(lambda: not server.server_state.connections and not server.server_state.tasks)


async def test_a_half_head_on_a_kept_connection_is_closed() -> None:
    async with serving(echo, header_timeout_s=0.1) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")
        writer.write(b"GET /x HT")
        assert b" 408 " in await read_all(reader, 3)
        writer.close()


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_over_the_limit_is_reported_before_it_is_kept(is_chunked: bool) -> None:
    body = b"z" * 300_000
    async with serving(echo, body_limit_bytes=100_000) as (port, _):
        if is_chunked:
            head = b"transfer-encoding: chunked\r\n\r\n"
            payload = b"".join(b"%x\r\n%b\r\n" % (10_000, body[:10_000]) for _ in range(30)) + b"0\r\n\r\n"
        else:
            head = b"content-length: %d\r\n\r\n" % len(body)
            payload = body
        answer = await talk(port, b"POST /x HTTP/1.1\r\nhost: a\r\n" + head + payload)
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_client_that_waits_for_leave_is_refused_without_sending() -> None:
    async with serving(echo, body_limit_bytes=1_000) as (port, _):
        head = b"POST /x HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
        answer = await talk(port, head % (DISCARD_BYTES * 2))
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_http_1_0_streams_are_not_chunked() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange: Exchange = scope["extensions"][EXTENSION]
        exchange.open(200, [(b"content-type", b"text/plain")])
        exchange.write(b"one")
        exchange.write(b"two")
        exchange.finish()

    async with serving(app) as (port, _):
        old = await talk(port, b"GET /x HTTP/1.0\r\n\r\n")
        new = await talk(port, GET)
    assert old.endswith(b"\r\n\r\nonetwo")
    assert b"chunked" not in old
    assert new.endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
    assert b"connection: close\r\n" in new


class Waiting:
    """Holds its request open and notes when the client has gone."""

    def __init__(self, *, opens: bool) -> None:
        self.exchange: Exchange | None = None
        self.gone = asyncio.Event()
        self._opens = opens

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange: Exchange = scope["extensions"][EXTENSION]
        if self.exchange is None:
            self.exchange = exchange
            exchange.on_gone = self.gone.set
            if self._opens:
                exchange.open(200, [])
                exchange.write(b"x")
        await self.gone.wait()


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("pipelined", [0, 3])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
async def test_a_client_that_leaves_is_noticed_in_every_state(opens: bool, pipelined: int, how: str) -> None:
    app = Waiting(opens=opens)
    async with serving(app) as (port, _):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n" * (1 + pipelined))
        await until(lambda: app.exchange is not None)
        assert not app.gone.is_set()
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        if how == "half":
            client.shutdown(socket.SHUT_WR)
        else:
            client.close()
        async with asyncio.timeout(2):
            await app.gone.wait()
        client.close()


async def test_too_many_pipelined_requests_cut_the_connection() -> None:
    app = Waiting(opens=False)
    async with serving(app) as (port, _):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n" * (MAX_PIPELINED + 3))
        async with asyncio.timeout(2):
            await app.gone.wait()
        client.close()


async def test_pipelined_answers_come_in_order() -> None:
    async with serving(echo) as (port, _):
        posts = b"".join(
            b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (n, b"a" * n) for n in (3, 100_000, 5)
        )
        answer = await talk(port, posts + GET)
    bodies = [part.split(b"\r\n\r\n", 1)[1] for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [b"3", b"100000", b"5", b"0"]


async def test_a_stalled_reader_pauses_and_a_reading_one_resumes() -> None:
    seen: list[str] = []
    holder: list[Exchange] = []
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange: Exchange = scope["extensions"][EXTENSION]
        holder.append(exchange)
        exchange.on_pause = lambda: seen.append("pause")
        exchange.on_resume = lambda: seen.append("resume")
        exchange.open(200, [])
        await ended.wait()
        exchange.finish()

    async with serving(app) as (port, _):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.connect(("127.0.0.1", port))
        client.sendall(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n")
        await until(lambda: bool(holder))
        written = 0
        while "pause" not in seen:
            holder[0].write(b"x" * 1_000)
            written += 1_000
            assert written < 1_000_000
            await asyncio.sleep(0)
        assert written < 400_000
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        while "resume" not in seen:
            await loop.sock_recv(client, 65_536)
        ended.set()
        while await loop.sock_recv(client, 65_536):
            pass
        client.close()
    assert seen[:2] == ["pause", "resume"]


def test_a_busy_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"port {port} on 127.0.0.1 is busy"):
            listen(settings(), host="127.0.0.1", port=port)


LARGE = b"z" * 250_000
"""More than the kernel takes for a client that does not read."""


async def large(scope: Any, receive: Any, send: Any) -> None:
    """A large stream at ``/stream``, a large whole answer elsewhere."""
    exchange: Exchange = scope["extensions"][EXTENSION]
    if scope["path"] == "/stream":
        exchange.open(200, [])
        exchange.write(LARGE)
        exchange.finish()
        return
    await exchange.answer(200, [], LARGE, is_head=False, is_last=False)


def deaf_client(port: int, data: bytes) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.connect(("127.0.0.1", port))
    client.sendall(data)
    return client


@pytest.mark.parametrize(
    "data",
    [
        b"GET /stream HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /stream HTTP/1.0\r\n\r\n",
        b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n",
        GET,
        b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n" * 3,
    ],
    ids=["stream", "old stream", "kept", "closed", "pipelined"],
)
async def test_an_answer_nobody_reads_keeps_no_connection(data: bytes) -> None:
    await answer_the_deaf(data)


def test_nothing_is_written_to_a_connection_that_was_cut(caplog: pytest.LogCaptureFixture) -> None:
    """On the loop the router runs on, which refuses that; the request behind the cut one is not told by uvicorn."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(answer_the_deaf(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n" * 3))
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def answer_the_deaf(data: bytes) -> None:
    async with serving(large, stall_limit_s=0.2, header_timeout_s=0.3, keep_alive_s=1) as (port, server):
        client = deaf_client(port, data)
        await until(lambda: bool(server.server_state.connections))
        await until(lambda: not server.server_state.connections and not server.server_state.tasks)
        client.close()


@pytest.mark.parametrize("path", [b"/stream", b"/x"])
async def test_a_slow_reader_gets_everything(path: bytes) -> None:
    async with serving(large, stall_limit_s=0.3, header_timeout_s=0.1) as (port, _):
        client = deaf_client(port, b"GET " + path + b" HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        received = 0
        async with asyncio.timeout(20):
            while data := await loop.sock_recv(client, 30_000):
                received += data.count(b"z")
                await asyncio.sleep(0.02)  # the reader's own pace
        client.close()
    assert received == len(LARGE)
