"""What waits before the queue: turns by tenant, places within limits, outages that are over when they are over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.scripted import BODY, Peer, World, running, until

from router_ext.backends.fake import Ending, Script
from router_ext.core.ids import TenantId
from router_ext.errors import UpstreamFailed
from router_ext.gateway.engine import PoolEngine
from router_ext.gateway.waiting import Turns


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path) as made:
        yield made


def engine_of(world: World) -> PoolEngine:
    return world.router.engines["pol_main"]


async def test_a_tenant_waits_for_one_of_another_not_for_all() -> None:
    turns, served, gate = Turns(), [], asyncio.Event()

    async def one(tenant: str) -> None:
        async with turns.take(TenantId(tenant)):
            served.append(tenant)
            await gate.wait()

    async with asyncio.TaskGroup() as tasks:
        for tenant in ["flood"] * 20 + ["small", "other"]:
            tasks.create_task(one(tenant))
            await asyncio.sleep(0)
        assert served == ["flood"]
        gate.set()
    assert served[:6] == ["flood", "flood", "small", "other", "flood", "flood"]
    assert served.count("flood") == 20
    assert turns._is_free
    assert not turns._waiting


async def test_turns_survive_those_who_leave() -> None:
    turns, served = Turns(), []

    async def one(number: int) -> None:
        async with turns.take(TenantId(str(number % 3))):
            served.append(number)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(one(number)) for number in range(30)]
    await asyncio.sleep(0)
    for step, task in enumerate(tasks):
        if step % 2:
            task.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert {number for number in range(30) if number % 2 == 0} <= set(served)
    assert turns._is_free
    assert not turns._waiting


async def down(world: World) -> None:
    plain = world.play
    world.client._play = lambda path, body: (
        Script(ending=Ending.REFUSED) if path == "/health" or path == "/info" else plain(path, body)
    )
    engine = engine_of(world)
    next(iter(engine.backends.members.values())).kick.set()
    await until(lambda: not engine.backends.up)


async def test_an_outage_is_waited_for_once(world: World) -> None:
    world.setup.scheduling = {"backend_wait_s": 0.4}
    await world.router.apply(world.setup.snapshot())
    await down(world)
    loop = asyncio.get_running_loop()
    began = loop.time()
    first = Peer(world, "/generate", BODY)
    await first.wait()
    assert first.status == 503
    assert loop.time() - began >= 0.3
    began = loop.time()
    late = Peer(world, "/generate", BODY)
    await late.wait()
    assert late.status == 503
    assert loop.time() - began < 0.3


async def test_who_waits_for_a_backend_is_bounded_by_tenant(world: World) -> None:
    world.setup.tenants["alice"] = msgspec.structs.replace(world.setup.tenants["alice"], max_queued=3)
    bob = world.setup.key("bob")
    await world.router.apply(world.setup.snapshot())
    await down(world)
    peers = [Peer(world, "/generate", BODY) for _ in range(5)]
    await until(lambda: sum(peer.task.done() for peer in peers) == 2)
    assert sorted(peer.status for peer in peers) == [0, 0, 0, 429, 429]
    world.key = bob
    other = Peer(world, "/generate", BODY)
    await until(lambda: engine_of(world).model.places.count == 4)
    for peer in [*peers, other]:
        peer.exchange.connection_lost()
        await peer.wait()
    assert engine_of(world).model.places.count == 0


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/tokenize"])
async def test_a_flood_of_large_texts_lets_others_through(world: World, path: str) -> None:
    """Without a tokenizer file a backend counts large texts one by one: the other tenant's comes second, not last."""
    gate = asyncio.Event()
    asked: list[bytes] = []
    plain = world.client.call

    async def call(method: str, to: str, body: bytes = b"", *, timeout_s: float | None = None) -> Any:
        if len(body) > 100_000:
            asked.append(b"b" if b'xb"' in body else b"a")
            await gate.wait()
        return await plain(method, to, body, timeout_s=timeout_s)

    world.client.call = call  # type: ignore[method-assign]

    def ask(key: str, mark: str) -> Peer:
        world.key = key
        text = "x" * 110_000 + mark
        if path == "/v1/chat/completions":
            return Peer(world, path, {"messages": [{"role": "user", "content": text}], "max_tokens": 5})
        return Peer(world, path, {"inputs": text})

    alice, bob = world.key, world.setup.key("bob")
    await world.router.apply(world.setup.snapshot())
    flood = [ask(alice, "a") for _ in range(6)]
    await until(lambda: len(asked) == 1)
    other = ask(bob, "b")
    await until(lambda: engine_of(world).model.places.count == 6)
    assert len(asked) == 1
    gate.set()
    for peer in [*flood, other]:
        await peer.wait()
    assert asked[:3] == [b"a", b"a", b"b"]


async def test_tokenize_asks_another_backend(world: World) -> None:
    """The one asked first refuses the connection: that is its own affair."""
    plain = world.client.call
    failures = []

    async def call(method: str, to: str, body: bytes = b"", *, timeout_s: float | None = None) -> Any:
        if to == "/tokenize" and not failures:
            failures.append(to)
            raise UpstreamFailed("the connection broke")
        return await plain(method, to, body, timeout_s=timeout_s)

    world.client.call = call  # type: ignore[method-assign]
    peer = Peer(world, "/tokenize", {"inputs": "a b c"})
    assert json.loads(await peer.wait()) == [{"id": 1}, {"id": 2}, {"id": 3}]
    assert failures


async def test_tokenize_counts_as_running_and_is_refused_while_draining(world: World) -> None:
    world.client._play = lambda path, body: (
        Script(ending=Ending.HANG) if path == "/tokenize" else world.play(path, body)
    )
    peer = Peer(world, "/tokenize", {"inputs": "a b c"})
    await until(lambda: world.router.active == 1)
    world.router.is_draining = True
    late = Peer(world, "/tokenize", {"inputs": "a b c"})
    await late.wait()
    assert late.status == 503
    peer.exchange.connection_lost()
    await peer.wait()
    assert world.router.active == 0
