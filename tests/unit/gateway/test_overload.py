"""A full queue: the lowest tier gives way, in its client's dialect; what waits is bounded in bytes; nothing leaks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.routers import backend
from support.scripted import Peer, World, running, stream, until

from router_ext.backends.fake import Ending
from router_ext.gateway.engine import PoolEngine
from router_ext.wire.controlplane import LimitsRecord

HANGS = stream(1, ending=Ending.HANG)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """Room for one request at a time: the second one waits. Two may."""
    made = World()
    made.setup.tenant("alice", limits=LimitsRecord(requests_per_minute=100))
    made.key = made.setup.key("alice", may_choose_tier=True)
    made.setup.backends = [backend(1, kv_tokens=128)]
    made.setup.scheduling = {"max_queued": 2, "tenant_queued_bytes": 4_000, "max_preemptions": 0}
    made.generation = HANGS
    async with running(tmp_path, made):
        yield made
        stats = engine_of(made).stats()
        assert engine_of(made).scheduler.audit() == []
        assert not engine_of(made)._generations
        assert (stats.queued, stats.queued_bytes, stats.running) == (0, 0, 0)
        assert (made.router.active, made.router.limits.count) == (0, 0)


def engine_of(world: World) -> PoolEngine:
    return world.router.engines["pol_main"]


def ask(world: World, tier: str, *, path: str = "/generate_stream", text: str = "a b c", **body: Any) -> Peer:
    asked = body or {"inputs": text, "parameters": {"max_new_tokens": 90}}
    return Peer(world, path, asked, headers={"x-fairlane-tier": tier})


async def waits(world: World, count: int) -> None:
    await until(lambda: engine_of(world).stats().queued == count)


async def ended(*peers: Peer) -> None:
    for peer in peers:
        peer.exchange.connection_lost()
    for peer in peers:
        await peer.wait()


async def test_an_arrival_of_a_higher_tier_displaces_the_newest_of_the_lowest(world: World) -> None:
    runs = ask(world, "standard")
    await until(lambda: engine_of(world).stats().running == 1)
    older = ask(world, "standard")
    await waits(world, 1)
    newer = ask(world, "standard", path="/v1/completions", model="main", prompt="a b c", max_tokens=90)
    await waits(world, 2)
    urgent = ask(world, "interactive")
    answer = json.loads(await newer.wait())
    assert (newer.status, answer["error"]["code"]) == (429, "queue_full")
    assert "displaced by a request of a higher tier" in answer["error"]["message"]
    assert 1 <= int(newer.headers["retry-after"]) <= 120
    assert newer.headers["x-ratelimit-remaining-requests"] == "97"  # it has taken none of the minute
    assert not older.task.done()
    assert engine_of(world).stats().queued == 2
    page = world.router.metrics.page().decode()
    assert 'fairlane_displaced_requests_total{model="main",tier="standard"} 1.0' in page
    await ended(runs, older, urgent)


async def test_nobody_is_displaced_for_an_equal(world: World) -> None:
    runs = ask(world, "interactive")
    await until(lambda: engine_of(world).stats().running == 1)
    queued = [ask(world, "interactive"), ask(world, "interactive")]
    await waits(world, 2)
    for tier in ("interactive", "standard"):
        late = ask(world, tier)
        assert b"the pool's limit is 2" in await late.wait()
        assert late.status == 429
    assert not any(peer.task.done() for peer in queued)
    await ended(runs, *queued)


async def test_what_a_tenant_has_waiting_is_bounded_in_bytes(world: World) -> None:
    runs = ask(world, "standard")
    await until(lambda: engine_of(world).stats().running == 1)
    first = ask(world, "standard", text="a " * 1_500)
    await waits(world, 1)
    size = engine_of(world).stats().queued_bytes
    assert 3_000 <= size <= 3_200
    assert f'fairlane_queue_bytes{{model="main"}} {float(size)}' in world.router.metrics.page().decode()
    second = ask(world, "standard", text="b " * 1_500)
    assert b"bytes of this tenant are waiting, its limit is 4000" in await second.wait()
    assert second.status == 429
    small = ask(world, "standard")
    await waits(world, 2)
    await ended(runs, first, small)
