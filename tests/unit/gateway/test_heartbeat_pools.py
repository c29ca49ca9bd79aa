"""What a router's heartbeat says of its pools, from requests that were really served and refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.scripted import Peer, World, running, until

from router_ext.core import snapshot
from router_ext.gateway.engine import PoolEngine
from router_ext.wire.controlplane import MAX_LIVE_TENANTS, PoolState


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    chooses = World()
    chooses.key = chooses.setup.key("alice", may_choose_tier=True)
    async with running(tmp_path, chooses) as made:
        await until(lambda: len(engine_of(made).backends.up) == 1)
        yield made


def engine_of(world: World) -> PoolEngine:
    return world.router.engines["pol_main"]


def told(world: World) -> PoolState:
    (pool,) = world.router.heartbeat().pools
    return pool


async def ask(world: World, *, tier: str = "interactive", **parameters: Any) -> Peer:
    body = {"inputs": "a b c", "parameters": {"max_new_tokens": 9, **parameters}}
    peer = Peer(world, "/generate_stream", body, headers={"x-fairlane-tier": tier})
    await peer.wait()
    return peer


async def test_first_tokens_and_refusals_are_told_by_tier_and_code(world: World) -> None:
    assert [(t.tier, t.ttft_target_s, t.counts) for t in told(world).tiers] == [
        ("interactive", 1.0, []),
        ("standard", None, []),
    ]
    for _ in range(3):
        await ask(world)
    await ask(world, tier="standard")
    refused = await ask(world, tier="no-such-tier")
    assert refused.status == 403
    pool = told(world)
    assert {t.tier: (sum(t.counts), t.in_time) for t in pool.tiers} == {"interactive": (3, 3), "standard": (1, 0)}
    assert pool.recent_refused == {"tier_not_allowed": 1}
    assert pool.recent_output_tokens == 4 * 5
    (tenant,) = pool.tenants
    assert tenant.recent_service == tenant.entitled_service == 4 * (3 + 2 * 5)
    assert pool.other_tenants is None


def fill(engine: PoolEngine, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the scheduler say that so many tenants have requests: the first the fewest."""
    stats = engine.stats()
    tenants = [
        snapshot.TenantStats(
            tenant=f"ten_{n}",  # type: ignore[arg-type]
            group=None,
            weight=1.0,
            queued=n,
            running=1,
            counter=0.0,
            raw_counter=0.0,
            prompt_tokens_total=1,
            output_tokens_total=10,
            dispatched_total=1,
        )
        for n in range(number)
    ]
    monkeypatch.setattr(engine.scheduler, "stats", lambda **_: _replaced(stats, tenants))


def _replaced(stats: snapshot.PoolStats, tenants: list[snapshot.TenantStats]) -> snapshot.PoolStats:
    fields = {name: getattr(stats, name) for name in stats.__dataclass_fields__}
    return snapshot.PoolStats(**{**fields, "tenants": tenants})


async def test_a_heartbeat_names_the_busiest_two_hundred_and_sums_the_rest(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = MAX_LIVE_TENANTS + 57
    fill(engine_of(world), monkeypatch, number)
    pool = told(world)
    assert {t.tenant for t in pool.tenants} == {f"ten_{n}" for n in range(57, number)}
    others = pool.other_tenants
    assert others is not None
    assert (others.tenants, others.queued, others.running) == (57, sum(range(57)), 57)
    assert (others.output_tokens_total, others.prompt_tokens_total) == (570, 57)
    fill(engine_of(world), monkeypatch, MAX_LIVE_TENANTS)
    assert told(world).other_tenants is None
    assert len(msgspec.json.encode(world.router.heartbeat())) < 100_000
