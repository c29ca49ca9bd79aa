"""Limits per minute over several routers through one Valkey: together, while it is away, and when it is back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from support.scripted import BODY, Peer, World, running, until

from router_ext.core.ids import KeyId, TenantId, TierName
from router_ext.errors import LimitExceeded
from router_ext.gateway.auth import Identity
from router_ext.gateway.limits import Limiter
from router_ext.ops.embedded import EmbeddedValkey
from router_ext.sync import minutes
from router_ext.sync.minutes import EXPIRE_MS, SharedMinutes
from router_ext.sync.quota import DAY_US, QuotaBook
from router_ext.sync.session import Backoff
from router_ext.sync.window import N_BUCKETS, MinuteWindow
from router_ext.wire.controlplane import LimitsRecord, Totals, UsageEvent

NOON = 20_787 * DAY_US + DAY_US // 2
PATIENT_S = 5.0
"""Long enough for any answer on a busy machine: these tests are not about being late."""


def who(number: int = 0) -> Identity:
    return Identity(
        tenant=TenantId(f"ten_{number}"), tenant_name="alice", key=KeyId(f"key_{number}"), public_id="a",
        default_pool="main", tiers=(TierName("t"),), default_tier=TierName("t"), may_choose_tier=False,
    )  # fmt: skip


class Node:
    """The limiter of one router."""

    def __init__(self, url: str, *, limit_s: float, routers: int) -> None:
        self.quotas = QuotaBook()
        self.quotas.apply(Totals(as_of_us=1, day="2026-11-30", live_routers=routers))
        self.limiter = Limiter(self.quotas, clock=asyncio.get_running_loop().time, lifetime_s=3_600.0)
        self.shared = self.limiter.shared = SharedMinutes(
            url,
            limit_s=limit_s,
            windows=self.limiter.windows,
            backoff=Backoff(first_s=0.01, limit_s=0.05, rng=random.Random(1)),
        )
        self.task = asyncio.create_task(self.shared.run())
        self.number = 0

    async def admit(self, tokens: int = 10, *, of: int = 0) -> str | None:
        """The reservation's owner; None if it was refused."""
        self.number += 1
        event = f"evt_{self.number}"
        try:
            counting = self.limiter.admit(who(of), event, tokens, NOON, float)
            if counting is not None:
                await counting
        except LimitExceeded:
            return None
        return event

    async def admitted(self, times: int, tokens: int = 10, *, of: int = 0) -> int:
        return sum([await self.admit(tokens, of=of) is not None for _ in range(times)])

    def end(self, event: str, tokens: int | None, *, of: int = 0) -> None:
        if tokens is None:
            self.limiter.end(event, None)
            return
        self.limiter.end(
            event,
            UsageEvent(
                event=event, request="r", router="r", tenant=who(of).tenant, key=who(of).key, pool="p", model="m",
                tier="t", dialect="chat", outcome="completed", arrived_at_us=NOON, ended_at_us=NOON,
                output_tokens=tokens,
            ),
        )  # fmt: skip

    def window(self, of: int = 0) -> MinuteWindow:
        window = self.limiter._scopes[f"ten_{of}"].window
        assert window is not None
        return window

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - what is awaited has no event
                await asyncio.sleep(0.002)

    async def told(self) -> None:
        """Everything that was changed is in the store."""
        await self.until(lambda: self.shared.is_up and not self.shared._dirty and not self.shared._wake.is_set())
        # One more batch, behind all that is under way.
        await self.shared.take((MinuteWindow("fairlane:minute:{probe}:"),), ((None, None),), 0)


Cluster = Callable[..., Awaitable[list[Node]]]


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path / "valkey")
    server.start()
    yield server
    assert server.process is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(server.process.pid, signal.SIGCONT)
    server.stop()


@pytest.fixture
async def cluster(valkey: EmbeddedValkey) -> AsyncIterator[Cluster]:
    nodes: list[Node] = []

    async def start(count: int, limits: LimitsRecord, *, limit_s: float = PATIENT_S) -> list[Node]:
        begun = [Node(valkey.url, limit_s=limit_s, routers=count) for _ in range(count)]
        nodes.extend(begun)
        for node in begun:
            node.limiter.apply({f"ten_{n}": limits for n in range(5)}, {})
            await node.until(lambda node=node: node.shared.is_up)
        return begun

    yield start
    for node in nodes:
        node.task.cancel()
    await asyncio.gather(*(node.task for node in nodes), return_exceptions=True)


async def in_store(url: str, of: int = 0) -> tuple[int, int]:
    """Requests and tokens of a tenant in the store; the sums of its buckets are those of its routers' counts."""
    async with Redis.from_url(url, decode_responses=True) as client:
        found = await client.hgetall(f"fairlane:minute:{{ten_{of}}}:")
    sums = []
    for letter in "rt":
        totals = sum(int(count) for name, count in found.items() if name.endswith(letter))
        parts = sum(int(count) for name, count in found.items() if letter in name and not name.endswith(letter))
        assert totals == parts
        sums.append(totals)
    return sums[0], sums[1]


async def test_two_routers_share_one_minute(cluster: Cluster, valkey: EmbeddedValkey) -> None:
    one, two = await cluster(2, LimitsRecord(requests_per_minute=10, tokens_per_minute=1_000))
    first = [await one.admit(20) for _ in range(6)]
    assert await two.admitted(10, 20) == 4
    assert await one.admit() is None
    assert dict(two.limiter.headers(who()))[b"x-ratelimit-remaining-requests"] == b"0"
    # What one gives back the other may take.
    assert first[0] is not None
    one.end(first[0], None)
    await one.told()
    assert await two.admitted(3, 20) == 1
    assert await in_store(valkey.url) == (10, 200)
    # Settled: tokens that were not used, and those on top.
    assert first[1] is not None
    assert first[2] is not None
    one.end(first[1], 5)
    one.end(first[2], 500)
    await one.told()
    assert await in_store(valkey.url) == (10, 200 - 15 + 480)


async def test_many_at_once_never_pass_the_limit(cluster: Cluster, valkey: EmbeddedValkey) -> None:
    nodes = await cluster(3, LimitsRecord(requests_per_minute=25, tokens_per_minute=200))
    taken = await asyncio.gather(*(node.admitted(10, 7) for node in nodes for _ in range(3)))
    assert sum(taken) == 25
    assert await in_store(valkey.url) == (25, 175)
    # Tenants do not share with each other.
    assert await nodes[0].admitted(30, 10, of=1) == 20


async def test_what_is_over_is_told_with_the_time_it_fits(cluster: Cluster) -> None:
    one, two = await cluster(2, LimitsRecord(tokens_per_minute=100))
    assert await one.admitted(1, 90) == 1
    await two.admit(1)  # it hears of the other's
    counting = two.limiter.admit(who(), "e", 50, NOON, float)
    assert counting is not None
    with pytest.raises(LimitExceeded) as found:
        await counting
    assert "100 tokens per minute: 9 remaining" in found.value.message
    assert found.value.retry_after_s is not None
    assert 55 <= found.value.retry_after_s <= 62 * 1.25
    assert (two.limiter.count, two.limiter.tokens) == (1, 1)


@pytest.mark.parametrize("is_wiped", [False, True])
async def test_valkey_dies_and_comes_back(cluster: Cluster, valkey: EmbeddedValkey, is_wiped: bool) -> None:
    one, two = await cluster(2, LimitsRecord(requests_per_minute=20))
    assert await one.admitted(6) == 6
    assert await two.admitted(1) == 1  # has heard of six
    assert valkey.process is not None
    valkey.process.kill()
    valkey.process.wait()
    # Its share is ten, of which the minute before counts.
    assert await one.admitted(20) == 4
    assert await two.admitted(20) == 9
    assert not one.shared.is_up
    assert not two.shared.is_up
    valkey.stop()
    if is_wiped:
        shutil.rmtree(valkey.directory / "data")
    valkey.start()
    for node in (one, two):
        await node.until(lambda node=node: node.shared.is_up)
        await node.told()
    # Twenty in all, none forgotten and none twice.
    assert await in_store(valkey.url) == (20, 200)
    assert await one.admitted(3) == await two.admitted(3) == 0
    assert one.window().sums == two.window().sums == [10, 100]


async def test_a_store_that_hangs_costs_one_wait(cluster: Cluster, valkey: EmbeddedValkey) -> None:
    (one,) = await cluster(1, LimitsRecord(requests_per_minute=30), limit_s=0.005)
    await one.until(lambda: one.shared.is_up)
    assert valkey.process is not None
    os.kill(valkey.process.pid, signal.SIGSTOP)
    late = one.shared.n_late
    assert await one.admitted(10) == 10
    assert one.shared.n_late == late + 1
    assert not one.shared.is_up
    os.kill(valkey.process.pid, signal.SIGCONT)
    await one.until(lambda: one.shared.is_up)
    one.shared._limit_s = PATIENT_S
    await one.told()
    assert await in_store(valkey.url) == (10, 100)
    assert await one.admitted(30) == 20
    assert await in_store(valkey.url) == (30, 300)


@pytest.mark.parametrize("is_broken", [False, True])
async def test_a_client_that_leaves_while_it_is_counted_takes_nothing(
    cluster: Cluster, valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    """Also where the connection is given up before the answer tells that the store has counted it."""
    if is_broken:
        monkeypatch.setattr(minutes, "BATCH_LIMIT_S", 0.05)
    (one,) = await cluster(1, LimitsRecord(requests_per_minute=30))
    assert valkey.process is not None
    os.kill(valkey.process.pid, signal.SIGSTOP)
    task = asyncio.create_task(one.admit())
    await one.until(lambda: one.limiter.count == 1)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert one.limiter.count == 0
    if is_broken:
        await one.until(lambda: not one.shared._is_connected)
    os.kill(valkey.process.pid, signal.SIGCONT)
    await one.told()
    assert await in_store(valkey.url) == (0, 0)
    assert one.window().sums == [0, 0]


@pytest.mark.parametrize("command", ["SCRIPT FLUSH", "CLIENT KILL TYPE normal SKIPME yes"])
async def test_it_connects_again(cluster: Cluster, valkey: EmbeddedValkey, command: str) -> None:
    (one,) = await cluster(1, LimitsRecord(requests_per_minute=5))
    assert await one.admitted(2) == 2
    async with Redis.from_url(valkey.url) as client:
        await client.execute_command(*command.split())
    assert await one.admitted(1) == 1
    await one.until(lambda: one.shared.n_connects == 2)
    await one.told()
    assert await in_store(valkey.url) == (3, 30)
    assert await one.admitted(5) == 2


async def test_nothing_stays_and_nothing_secret_goes(cluster: Cluster, valkey: EmbeddedValkey) -> None:
    (one,) = await cluster(1, LimitsRecord(requests_per_minute=5))
    one.limiter.apply({"ten_0": LimitsRecord(requests_per_minute=5), "key_0": LimitsRecord(tokens_per_minute=50)}, {})
    assert await one.admitted(2) == 2
    async with Redis.from_url(valkey.url, decode_responses=True) as client:
        names = await client.keys("*")
        assert sorted(names) == ["fairlane:minute:{ten_0}:", "fairlane:minute:{ten_0}:key_0"]
        for name in names:
            assert 0 < await client.pttl(name) <= EXPIRE_MS
            for field, value in (await client.hgetall(name)).items():
                assert field[0].isdigit()
                assert value.isdigit()


async def test_old_buckets_are_thrown_away(cluster: Cluster, valkey: EmbeddedValkey) -> None:
    (one,) = await cluster(1, LimitsRecord(requests_per_minute=500))
    # As if the router had been at it for long: its buckets lie in the past of the one that comes.
    start = one.shared._shift
    assert start is not None
    for age in range(3 * N_BUCKETS, 0, -1):
        one.shared._shift = start - age
        assert await one.admitted(1) == 1
    async with Redis.from_url(valkey.url) as client:
        n_fields = await client.hlen("fairlane:minute:{ten_0}:")
    assert n_fields <= 4 * (N_BUCKETS + 3)


async def test_a_random_course_ends_with_every_count_in_place(cluster: Cluster, valkey: EmbeddedValkey) -> None:
    """Three routers, breaks, hangs, refunds; at the end the store has what the routers have, and within the limit."""
    rng = random.Random(20261130)
    nodes = await cluster(3, LimitsRecord(requests_per_minute=100_000, tokens_per_minute=10_000_000), limit_s=0.005)
    held: list[tuple[Node, str, int]] = []
    assert valkey.process is not None
    for step in range(600):
        node = rng.choice(nodes)
        match rng.randrange(12):
            case 0:
                async with Redis.from_url(valkey.url) as client:
                    await client.execute_command("CLIENT", "KILL", "TYPE", "normal")
            case 1 if step % 3 == 0:
                os.kill(valkey.process.pid, signal.SIGSTOP)
                await node.admit(5)
                os.kill(valkey.process.pid, signal.SIGCONT)
            case 2 | 3 | 4 if held:
                owner, event, tokens = held.pop(rng.randrange(len(held)))
                owner.end(event, rng.choice([None, 0, tokens, tokens * 3]))
            case _:
                tokens = rng.randrange(1, 50)
                event = await node.admit(tokens)
                assert event is not None
                held.append((node, event, tokens))
    for node in nodes:
        node.shared._limit_s = PATIENT_S
        await node.told()
    sums = [sum(node.window().sums[kind] for node in nodes) for kind in (0, 1)]
    assert await in_store(valkey.url) == tuple(sums)
    assert sums[0] > 100


async def test_a_new_connection_numbers_the_same_buckets_alike(cluster: Cluster) -> None:
    """The store's clock and the router's have their edges at different instants; only a step counts as one."""
    (one,) = await cluster(1, LimitsRecord(requests_per_minute=5))
    shared = one.shared
    shared._shift = 100
    for ahead, shift in ((100.4, 100), (99.1, 100), (100.99, 100), (101.01, 101), (40.2, 40)):
        shared._align(ahead)
        assert shared._shift == shift


async def test_two_whole_routers_hold_one_tenant_to_its_minute(tmp_path: Path, valkey: EmbeddedValkey) -> None:
    """From the HTTP request to the counters and back: requests of both count, the refused do not."""
    one = World()
    one.setup.tenant("alice", limits=LimitsRecord(requests_per_minute=3))
    two = World()
    two.setup, two.key = one.setup, one.key
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    given = {"redis_url": valkey.url, "redis_timeout_s": 0.1, "predictor": False}
    async with running(tmp_path / "one", one, **given), running(tmp_path / "two", two, **given):
        for world in (one, two):
            await until(lambda world=world: world.router.limits.shared.is_up)
            assert b"fairlane_limit_store_up 1.0" in world.router.metrics.page()
        answers = []
        for world in (one, two, one, two, one):
            peer = Peer(world, "/generate", BODY)
            await peer.wait()
            answers.append((peer.status, peer.headers["x-ratelimit-remaining-requests"]))
        assert answers == [(200, "2"), (200, "1"), (200, "0"), (429, "0"), (429, "0")]
    async with Redis.from_url(valkey.url, decode_responses=True) as client:
        (name,) = await client.keys("*")
    assert one.key not in name
