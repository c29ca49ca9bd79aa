"""Who is up: the watch over a pool's backends, on scripted answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from router_ext.backends.base import Backend, BackendUnreachable
from router_ext.backends.fake import Ending, FakeBackend, Script
from router_ext.backends.pool import STREAM_FAILURES, BackendPool, Member, State
from router_ext.errors import UpstreamFailed
from router_ext.wire.controlplane import BackendRecord

INFO = b'{"model_id":"m","max_input_tokens":4095,"max_total_tokens":%d}'


class World:
    """Scripts by path that tests change while the pool looks on; a listener that writes down what it hears."""

    def __init__(self) -> None:
        self.total = 4_096
        self.health = Script()
        self.info: Script | None = None
        self.metrics = Script(pieces=(b"tgi_queue_size 0\n",))
        self.probes = 0
        self.heard: list[str] = []
        self.clients: dict[str, FakeBackend] = {}

    def play(self, path: str, body: bytes) -> Script:
        if path == "/info":
            return self.info or Script(pieces=(INFO % self.total,))
        return self.health if path == "/health" else self.metrics

    def make(self, record: BackendRecord) -> Backend:
        client = self.clients[record.url] = FakeBackend(self.play)
        return client

    async def probe(self, backend: Backend) -> int:
        self.probes += 1
        return self.probes

    def backend_changed(self, member: Member[int]) -> None:
        self.heard.append(str(member.state))

    def backend_learned(self, member: Member[int]) -> None:
        assert member.info is not None
        self.heard.append(f"learned {member.info.max_total_tokens}")


def record(name: str = "one", url: str = "http://one:80") -> BackendRecord:
    return BackendRecord(backend=f"bke_{name}", name=name, url=url)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def watched(world: World, **limits: float) -> AsyncIterator[BackendPool[int]]:
    pool: BackendPool[int] = BackendPool(
        listener=world,
        make_client=world.make,
        probe=world.probe,
        interval_s=limits.get("interval_s", 0.01),
        timeout_s=0.1,
        max_failures=int(limits.get("max_failures", 3)),
    )
    pool.apply([record()])
    task = asyncio.create_task(pool.run())
    try:
        yield pool
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await pool.close()


async def test_a_backend_is_asked_before_it_is_used() -> None:
    world = World()
    async with watched(world) as pool:
        await until(lambda: bool(pool.up))
        assert world.heard == ["learned 4096", "up"]
        assert pool.up[0].knowledge == 1


async def test_a_backend_that_answers_nonsense_stays_out() -> None:
    world = World()
    world.info = Script(pieces=(b"not json",))
    async with watched(world) as pool:
        member = next(iter(pool.members.values()))
        await until(lambda: "not understood" in member.detail)
        assert pool.up == []
        world.info = None
        await until(lambda: bool(pool.up))


@pytest.mark.parametrize("script", [Script(status=503), Script(ending=Ending.HANG)])
async def test_one_bad_check_is_not_the_end_several_are(script: Script) -> None:
    world = World()
    async with watched(world, max_failures=3) as pool:
        await until(lambda: bool(pool.up))
        member = pool.up[0]
        world.health = script
        await until(lambda: member.failures == 1)
        assert member.state is State.UP
        await until(lambda: member.state is State.DOWN)
        world.health = Script()
        await until(lambda: member.state is State.UP)
        assert world.heard == ["learned 4096", "up", "down", "up"]
        # The same server came back: its model need not be probed again.
        assert world.probes == 1


async def test_a_refused_connection_is_the_end_at_once() -> None:
    world = World()
    async with watched(world, max_failures=50) as pool:
        await until(lambda: bool(pool.up))
        world.health = Script(ending=Ending.REFUSED)
        await until(lambda: not pool.up)


async def test_a_backend_that_comes_back_as_another_model_is_probed_again() -> None:
    world = World()
    async with watched(world) as pool:
        await until(lambda: bool(pool.up))
        world.health = Script(ending=Ending.REFUSED)
        await until(lambda: not pool.up)
        world.total = 8_192
        world.health = Script()
        await until(lambda: bool(pool.up))
        assert world.heard == ["learned 4096", "up", "down", "learned 8192", "up"]
        assert world.probes == 2


async def test_a_broken_stream_opens_the_breaker_and_a_good_check_closes_it() -> None:
    world = World()
    async with watched(world, interval_s=30) as pool:
        await until(lambda: bool(pool.up))
        member = pool.up[0]
        pool.stream_failed(member.backend, UpstreamFailed("one stream only"))
        assert member.state is State.UP
        pool.stream_failed(member.backend, BackendUnreachable("refused"))
        assert member.state is State.DOWN
        # Far sooner than the interval: the failure asks for a look.
        await until(lambda: member.state is State.UP)


async def test_a_backend_that_comes_back_is_on_trial_until_it_has_spoken() -> None:
    world = World()
    async with watched(world) as pool:
        await until(lambda: bool(pool.up))
        member = pool.up[0]
        assert not member.is_on_trial, "one that never failed is not"
        pool.stream_failed(member.backend, BackendUnreachable("refused"))
        await until(lambda: member.state is State.UP)
        assert member.is_on_trial
        assert "one request at a time" in member.detail
        world.heard.clear()
        pool.spoke(member.backend)
        assert not member.is_on_trial
        assert (world.heard, member.detail) == (["up"], "")
        pool.spoke(member.backend)
        assert world.heard == ["up"], "told once"


async def test_a_trial_that_fails_however_opens_the_breaker_for_longer() -> None:
    world = World()
    async with watched(world) as pool:
        await until(lambda: bool(pool.up))
        member = pool.up[0]
        pool.stream_failed(member.backend, BackendUnreachable("refused"))
        await until(lambda: member.state is State.UP)
        pool.stream_failed(member.backend, UpstreamFailed("garbage"))
        assert member.state is State.DOWN
        wait_s = member.breaker.not_before_s - asyncio.get_running_loop().time()
        assert wait_s > 0.3
        checks = len(world.clients["http://one:80"].requests)
        await asyncio.sleep(0.05)
        assert len(world.clients["http://one:80"].requests) == checks, "nor is it asked before"
        member.breaker.not_before_s = 0.0
        await until(lambda: member.state is State.UP)


async def test_a_healthy_backend_that_serves_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures of one turn count once: they are one batch."""
    world = World()
    async with watched(world, interval_s=30) as pool:
        await until(lambda: bool(pool.up))
        member = pool.up[0]
        clock = iter(range(1_000, 2_000))
        for _ in range(STREAM_FAILURES - 1):
            now = float(next(clock))
            monkeypatch.setattr(pool._loop, "time", lambda now=now: now)
            for _ in range(10):
                pool.stream_failed(member.backend, UpstreamFailed("424"))
        assert member.state is State.UP
        monkeypatch.setattr(pool._loop, "time", lambda: 3_000.0)
        pool.spoke(member.backend)
        pool.stream_failed(member.backend, UpstreamFailed("424"))
        assert member.state is State.UP, "a token in between: it serves"
        for now in range(4_000, 4_000 + STREAM_FAILURES):
            monkeypatch.setattr(pool._loop, "time", lambda now=now: float(now))
            pool.stream_failed(member.backend, UpstreamFailed("424"))
        assert member.state is State.DOWN
        monkeypatch.undo()


@pytest.mark.parametrize("script", [Script(status=500), Script(ending=Ending.REFUSED), Script(pieces=(b"\xff{",))])
async def test_metrics_that_are_missing_or_broken_stop_nothing(script: Script) -> None:
    world = World()
    world.metrics = script
    async with watched(world) as pool:
        await until(lambda: bool(pool.up))
        member = pool.up[0]
        asked = world.clients["http://one:80"].requests
        await until(lambda: sum(path == "/metrics" for path, _ in asked) >= 2)
        assert member.state is State.UP
        assert not member.queue_size


async def test_a_new_configuration_adds_removes_and_replaces() -> None:
    world = World()
    async with watched(world) as pool:
        await until(lambda: bool(pool.up))
        kept = pool.up[0]
        pool.apply([record(), record("two", "http://two:80")])
        await until(lambda: len(pool.up) == 2)
        assert pool.up[0] is kept
        pool.apply([record("two", "http://two:80"), record("one", "http://other:80")])
        assert kept.state is State.DOWN
        await until(lambda: len(pool.up) == 2)
        assert [member.record.url for member in pool.up] == ["http://two:80", "http://other:80"]
        pool.apply([])
        assert pool.up == []
