"""A client that leaves, at eight points, streaming or not: everything ends inside the turn in which its close is seen.

Sockets on both sides are real; the order of what happens in the router is written down. Between the first and the last
word of the server about the closed connection lie: the upstream's abort, the scheduler told, the usage event.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.preempting import ForcedCuts
from support.routers import backend
from support.scripted import INFO, World, running
from support.upstream import Upstream, UpstreamStream

from router_ext.backends import tgi
from router_ext.backends.fake import Script
from router_ext.backends.tgi import TgiBackend
from router_ext.core.events import Cancelled
from router_ext.gateway.engine import PoolEngine
from router_ext.gateway.exchange import Exchange
from router_ext.sync.spool import scan
from router_ext.wire.controlplane import LimitsRecord, UsageEvent
from tests.unit.gateway.test_server import serving, until

SLICE = 16
LIMIT = LimitsRecord(concurrent=50, tokens_per_day=1_000_000)


class Stage(World):
    """One backend with room for one request, a router with real sockets in front, and what happened in order."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.upstream = Upstream(self.play)
        self.port = 0
        self.order: list[str] = []
        self.streaming: list[Any] = []
        """Exchanges with the backend that carry generations."""
        self.setup.tenants["alice"] = msgspec.structs.replace(self.setup.tenants["alice"], limits=LIMIT)
        self.setup.scheduling = {"min_slice_tokens": SLICE, "max_slice_tokens": SLICE, "max_preemptions": 5}

    def play(self, path: str, body: bytes) -> Script:
        if path == "/info":
            return Script(pieces=(INFO.replace(b"{", b'{"max_concurrent_requests":1,'),))
        return super().play(path, body)

    def make_client(self, record: Any) -> TgiBackend:
        return TgiBackend(record.url)

    @property
    def engine(self) -> PoolEngine:
        return self.router.engines["pol_main"]

    def ask(self, *, is_stream: bool, max_new_tokens: int = 40) -> socket.socket:
        path = "/generate_stream" if is_stream else "/generate"
        body = json.dumps(
            {"inputs": "a b c", "parameters": {"max_new_tokens": max_new_tokens, "details": True}}
        ).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {self.key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        client = socket.create_connection(("127.0.0.1", self.port))
        client.sendall(head.encode() + body)
        return client

    async def asked(self, count: int) -> UpstreamStream:
        await until(lambda: len(self.upstream.streams) >= count)
        return self.upstream.streams[count - 1]

    def usage(self) -> list[UsageEvent]:
        return [
            msgspec.json.decode(item[1], type=UsageEvent)
            for path in sorted((self.folder / "state" / "spool").glob("*.seg"))
            for item in scan(path.read_bytes())
            if isinstance(item, tuple)
        ]

    async def leave(self, client: socket.socket, *, aborts: bool) -> UsageEvent:
        """Close, and judge: the order, what came back, and the one usage event."""
        booked = len(self.usage())
        self.order.clear()
        client.close()
        await until(lambda: "over" in self.order)
        seen, over = self.order.index("seen"), self.order.index("over")
        inside = self.order[seen + 1 : over]
        assert inside == ["abort", "told", "booked"] if aborts else inside == ["told", "booked"], self.order
        assert self.order.count("booked") == 1
        (event,) = self.usage()[booked:]
        assert event.outcome == "cancelled"
        return event

    async def is_clean(self) -> None:
        """Queue, seats, KV (once the backend has noticed), limits, tasks: all back."""
        engine = self.engine
        assert not engine._generations
        assert not engine.calls
        await until(lambda: not engine._cuts)

        def is_back() -> bool:
            stats = engine.stats()
            return (stats.queued, stats.running, stats.queued_bytes) == (0, 0, 0) and not any(
                each.reserved_tokens for each in stats.backends
            )

        await until(is_back)
        assert engine.scheduler.audit() == []
        assert self.router.limits.count == 0
        await until(lambda: self.router.active == 0)


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    made = Stage(tmp_path)
    lost, abort = Exchange.connection_lost, tgi._Exchange.abort

    def seen(self: Exchange) -> None:
        made.order.append("seen")
        lost(self)
        made.order.append("over")

    def aborted(self: Any) -> None:
        if not self._is_done and self in made.streaming:
            made.order.append("abort")
        abort(self)

    opened = TgiBackend.open_stream

    def open_stream(self: TgiBackend, *args: Any, **values: Any) -> Any:
        exchange = opened(self, *args, **values)
        made.streaming.append(exchange)
        return exchange

    monkeypatch.setattr(Exchange, "connection_lost", seen)
    monkeypatch.setattr(tgi._Exchange, "abort", aborted)
    monkeypatch.setattr(TgiBackend, "open_stream", open_stream)
    async with made.upstream.serving():
        made.setup.backends = [backend(made.upstream.port, kv_tokens=64, block_size=1)]
        async with running(tmp_path, made), serving(made.app) as (port, _):
            made.port = port
            handle, finish = made.engine.scheduler.handle, made.router.ledger.finish

            def told(event: Any, now: float) -> Any:
                if isinstance(event, Cancelled):
                    made.order.append("told")
                return handle(event, now)

            def booked(*args: Any, **values: Any) -> Any:
                made.order.append("booked")
                return finish(*args, **values)

            monkeypatch.setattr(made.engine.scheduler, "handle", told)
            monkeypatch.setattr(made.router.ledger, "finish", booked)
            yield made
            await made.is_clean()


WAYS = pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])


@WAYS
async def test_queued(stage: Stage, is_stream: bool) -> None:
    first = stage.ask(is_stream=True)
    await stage.asked(1)
    second = stage.ask(is_stream=is_stream)
    await until(lambda: stage.engine.stats().queued == 1)
    event = await stage.leave(second, aborts=False)
    assert (event.output_tokens, event.backends) == (0, [])
    await stage.leave(first, aborts=True)
    assert len(stage.upstream.streams) == 1


@WAYS
async def test_before_the_upstream_is_connected(stage: Stage, is_stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection never comes about, and the attempt ends with the request."""
    attempts: list[asyncio.Task[Any]] = []
    (member,) = stage.engine.backends.members.values()
    client = member.client
    assert isinstance(client, TgiBackend)
    plain, idle, connect = client.open_stream, client.take_idle, client.loop.create_connection

    async def never(*args: Any, **values: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        attempts.append(task)
        await asyncio.get_running_loop().create_future()

    def open_stream(*args: Any, **values: Any) -> Any:
        monkeypatch.setattr(client, "take_idle", lambda: None)
        monkeypatch.setattr(client.loop, "create_connection", never)
        return plain(*args, **values)

    monkeypatch.setattr(client, "open_stream", open_stream)
    peer = stage.ask(is_stream=is_stream)
    await until(lambda: bool(attempts))
    event = await stage.leave(peer, aborts=True)
    assert (event.output_tokens, event.backends) == (0, ["bke_one"])
    monkeypatch.setattr(client.loop, "create_connection", connect)
    monkeypatch.setattr(client, "take_idle", idle)
    await until(lambda: bool(attempts) and attempts[0].done())
    assert stage.upstream.streams == []


@WAYS
async def test_before_the_first_token(stage: Stage, is_stream: bool) -> None:
    client = stage.ask(is_stream=is_stream)
    stream = await stage.asked(1)
    event = await stage.leave(client, aborts=True)
    assert event.output_tokens == 0
    await stream.is_closed.wait()


@WAYS
async def test_in_mid_stream(stage: Stage, is_stream: bool) -> None:
    client = stage.ask(is_stream=is_stream)
    stream = await stage.asked(1)
    for _ in range(2):
        stream.token()
    await until(lambda: any(call.output_tokens == 2 for call in stage.engine.calls))
    event = await stage.leave(client, aborts=True)
    assert (event.output_tokens, event.prompt_tokens) == (2, 3)
    await stream.is_closed.wait()


@WAYS
async def test_at_a_slices_end(stage: Stage, is_stream: bool) -> None:
    """The slice is over and the place of its cut is being looked for."""
    stage.upstream.is_held = lambda path, body: path == "/tokenize" and b" t1" in body
    client = stage.ask(is_stream=is_stream)
    stream = await stage.asked(1)
    for n in range(SLICE):
        stream.token(is_last=n == SLICE - 1)
    await until(lambda: bool(stage.upstream.held))
    event = await stage.leave(client, aborts=False)
    # The last tokens of a slice wait for the cut, and are nobody's yet.
    assert 0 < event.output_tokens < SLICE
    assert event.segments == 1


@WAYS
async def test_while_preempted(stage: Stage, is_stream: bool) -> None:
    """Told to stop, its upstream closed, waiting to go on behind somebody else."""
    wishes = ForcedCuts(stage.engine, lambda request: request.num_preempted == 0 and request.output_tokens >= 2)
    stage.upstream.is_held = lambda path, body: path == "/tokenize" and b" t1" in body
    client = stage.ask(is_stream=is_stream)
    stream = await stage.asked(1)
    for _ in range(3):
        stream.token()
    await until(lambda: bool(wishes.cut))
    await stream.is_closed.wait()
    event = await stage.leave(client, aborts=False)
    assert event.preemptions == 1
    assert event.output_tokens <= 3


@WAYS
async def test_after_the_last_byte(stage: Stage, is_stream: bool) -> None:
    """The answer is complete: who leaves then has been served, and pays for all of it, once."""
    client = stage.ask(is_stream=is_stream, max_new_tokens=2)
    stream = await stage.asked(1)
    stream.token()
    stream.token(is_last=True)
    await until(lambda: bool(stage.usage()))
    client.close()
    await stage.is_clean()
    (event,) = stage.usage()
    assert (event.outcome, event.output_tokens, event.prompt_tokens) == ("completed", 2, 3)


@WAYS
async def test_on_a_pooled_connection(stage: Stage, is_stream: bool) -> None:
    """The upstream's connection has served before: it is closed all the same, and never used again."""
    warm = stage.ask(is_stream=True, max_new_tokens=1)
    stream = await stage.asked(1)
    stream.token(is_last=True)
    await until(lambda: bool(stage.usage()))
    warm.close()
    client = stage.ask(is_stream=is_stream)
    again = await stage.asked(2)
    assert again.connection == stream.connection, "pooled"
    again.token()
    await until(lambda: any(call.output_tokens == 1 for call in stage.engine.calls))
    event = await stage.leave(client, aborts=True)
    assert event.output_tokens == 1
    await again.is_closed.wait()
    last = stage.ask(is_stream=True)
    other = await stage.asked(3)
    assert other.connection != stream.connection
    await stage.leave(last, aborts=True)
