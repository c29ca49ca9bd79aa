"""Backends that hang, err, are overloaded, ill or taken away: answers go on elsewhere, no counter is left behind."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.routers import backend
from support.scripted import Peer, World, running, stream, until

from router_ext.backends.base import BackendUnreachable
from router_ext.backends.fake import Ending, FakeBackend, Script
from router_ext.backends.pool import State
from router_ext.core.ids import BackendId
from router_ext.gateway import engine as engine_module
from router_ext.gateway.engine import PoolEngine

JSON = ((b"content-type", b"application/json"),)
BATCH = Script(
    status=424,
    headers=JSON,
    pieces=(b'{"error":"Request failed during generation: Server error: ","error_type":"generation"}',),
)
BUSY = Script(status=429, headers=JSON, pieces=(b'{"error":"Model is overloaded","error_type":"overloaded"}',))
PAGE = Script(status=502, headers=((b"content-type", b"text/html"),), pieces=(b"<html>bad gateway</html>",))
DEATH = Script(ending=Ending.CUT)
REFUSED = Script(ending=Ending.REFUSED)
SILENT = Script(ending=Ending.HANG)


def noise(count: int) -> Script:
    """A stream that turns into something else after ``count`` tokens."""
    return Script(pieces=(*stream(count, ending=Ending.CUT).pieces, b"data: {nonsense\n\n"), ending=Ending.HANG)


class Ill(World):
    """Two backends; a generation meets the next of ``fates``, later ones are served. ``/health`` by backend."""

    def __init__(self) -> None:
        super().__init__()
        self.setup.backends = [backend(1), backend(2, "two")]
        self.cut = Script(pieces=(b'[{"id":1},{"id":2},{"id":3},{"id":101},{"id":102}]',))
        self.fates: list[Script] = []
        self.health: dict[str, Script] = {}
        self.sent: list[str] = []
        self.clients: dict[str, FakeBackend] = {}

    def make_client(self, record: Any) -> FakeBackend:
        name = record.backend
        client = self.clients[name] = self.client = FakeBackend(lambda path, body: self.meet(name, path, body))
        return client

    def meet(self, name: str, path: str, body: bytes) -> Script:
        if path == "/health":
            return self.health.get(name, Script())
        if path != "/generate_stream":
            return self.play(path, body)
        self.sent.append(name)
        return self.fates.pop(0) if self.fates else self.generation

    @property
    def engine(self) -> PoolEngine:
        return self.router.engines["pol_main"]

    def ask(self, *, path: str = "/generate_stream", key: str | None = None, **body: Any) -> Peer:
        asked = body or {"inputs": "a b c", "parameters": {"max_new_tokens": 9, "details": True}}
        return Peer(self, path, asked, key=key)

    def state(self, name: str) -> State:
        return self.engine.backends.members[BackendId(name)].state


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Ill]:
    async with running(tmp_path, Ill()) as made:
        assert isinstance(made, Ill)
        await until(lambda: len(made.engine.backends.up) == 2)
        yield made
        assert made.engine.scheduler.audit() == []
        assert not made.engine._generations


GENERATE = {"inputs": "a b c", "parameters": {"max_new_tokens": 9, "details": True}}
CHAT = {"model": "main", "prompt": "a b c", "max_tokens": 9, "stream": True}


@pytest.mark.parametrize("fate", [stream(2, ending=Ending.CUT), noise(2)], ids=["reset", "garbage"])
@pytest.mark.parametrize(("path", "body"), [("/generate_stream", GENERATE), ("/v1/completions", CHAT)])
async def test_what_breaks_in_mid_stream_goes_on_elsewhere(world: Ill, fate: Script, path: str, body: Any) -> None:
    world.fates = [fate]
    data = await world.ask(path=path, **body).wait()
    assert b'"error"' not in data
    assert len(set(world.sent)) == 2
    assert b" t1" in data


async def test_a_stream_that_falls_silent_goes_on_elsewhere(world: Ill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "FREEZE_S", 0.0)
    world.fates = [stream(2, ending=Ending.HANG)]
    peer = world.ask()
    await until(lambda: bool(world.sent) and b" t1" in peer.data)
    frozen = world.sent[0]
    world.health[frozen] = Script(ending=Ending.HANG)
    world.engine.backends.members[BackendId(frozen)].answered_s = world.engine.loop.time() - 1.0
    await asyncio.sleep(0.01)
    world.engine.look_for_frozen()
    data = await peer.wait()
    assert b'"error"' not in data
    assert world.sent[1] != frozen
    assert world.state(frozen) is State.DOWN


@pytest.mark.parametrize("fate", [BATCH, BUSY, PAGE, DEATH, REFUSED], ids=["424", "429", "502", "death", "refused"])
@pytest.mark.parametrize("path", ["/generate_stream", "/generate"])
async def test_what_has_shown_nothing_is_sent_elsewhere(world: Ill, fate: Script, path: str) -> None:
    world.fates = [fate]
    peer = world.ask(path=path)
    assert b'"generated_tokens":' in await peer.wait()
    assert len(set(world.sent)) == 2


@pytest.mark.parametrize("fate", [BUSY, PAGE], ids=["429", "502"])
async def test_when_all_fail_the_error_is_in_the_clients_dialect(world: Ill, fate: Script) -> None:
    for path, body in (("/generate", GENERATE), ("/v1/completions", {**CHAT, "stream": False})):
        world.fates = [fate] * 3
        peer = world.ask(path=path, **body)
        answer = json.loads(await peer.wait())
        assert peer.status in (429, 502)
        if path == "/generate":
            assert answer["error_type"] in ("overloaded", "generation")
        else:
            assert answer["error"]["code"] in ("queue_full", "upstream_error")
        if peer.status == 429:
            assert peer.headers["retry-after"]
        assert b"bke_" not in peer.data


async def test_an_ill_health_answer_leaves_running_streams_alone(world: Ill) -> None:
    """``/health`` says 503 while the backend serves: what runs there goes on, what is new goes elsewhere."""
    world.fates = [stream(2, ending=Ending.HANG)]
    peer = world.ask()
    await until(lambda: b" t1" in peer.data)
    ill = world.sent[0]
    world.health[ill] = Script(status=503)
    member = world.engine.backends.members[BackendId(ill)]
    for _ in range(world.router.settings.health_failures):
        await world.engine.backends._check(member)
    assert world.state(ill) is State.DOWN
    assert not peer.task.done()
    assert len(world.clients[ill].streams) == 1
    assert b'"generated_tokens":5' in await world.ask().wait()
    assert world.sent[1] != ill
    peer.exchange.connection_lost()
    await peer.wait()


@pytest.mark.parametrize(
    "page", [b"", b"tgi_queue_length 12\n", b"\xff\xfe", b'renamed_queue_size{a="b"} NaN\n'], ids=repr
)
async def test_metrics_that_tell_nothing_stop_nothing(world: Ill, page: bytes) -> None:
    """Neither full nor empty: dispatch follows the router's own ledger."""
    for client in world.clients.values():
        plain = client._play
        client._play = lambda path, body, plain=plain: (
            Script(pieces=(page,)) if path == "/metrics" else plain(path, body)
        )
    for member in world.engine.backends.up:
        await world.engine.backends._look_at_metrics(member)
    assert b'"generated_tokens":5' in await world.ask().wait()
    assert len(world.engine.backends.up) == 2


async def test_a_backend_taken_away_while_busy_finishes_what_it_has(world: Ill) -> None:
    world.fates = [stream(2, ending=Ending.HANG)]
    peer = world.ask()
    await until(lambda: b" t1" in peer.data)
    gone = world.sent[0]
    world.setup.backends = [each for each in world.setup.backends if each.backend != gone]
    await world.router.apply(world.setup.snapshot())
    assert gone not in world.engine.backends.members
    assert not peer.task.done()
    assert b'"generated_tokens":5' in await world.ask().wait()
    assert world.sent[-1] != gone
    # Its old stream breaks later, and goes on where the pool is now.
    (open_stream,) = world.clients[gone].streams
    sink = open_stream._sink
    assert sink is not None
    open_stream.abort()
    sink.on_end(BackendUnreachable("gone"))
    assert b'"error"' not in await peer.wait()


async def test_after_a_fall_one_request_tries_the_backend_before_the_others(tmp_path: Path) -> None:
    made = Ill()
    made.setup.backends = [backend(1)]
    async with running(tmp_path, made):
        engine = made.engine
        engine.backends.stream_failed(BackendId("bke_one"), BackendUnreachable("refused"))
        made.generation = stream(1, ending=Ending.HANG)
        made.fates = [SILENT]
        peers = [made.ask() for _ in range(5)]
        await until(lambda: len(made.sent) == 1)
        await asyncio.sleep(0.02)
        assert len(made.sent) == 1, "the others wait until it has shown a token"
        assert engine.backends.members[BackendId("bke_one")].is_on_trial
        page = made.router.metrics.page().decode()
        assert 'fairlane_backend_breaker_state{backend="bke_one",model="main"} 1.0' in page
        (trial,) = made.client.streams
        sink = trial._sink
        assert sink is not None
        sink.on_data(stream(1, ending=Ending.HANG).pieces[0])
        await until(lambda: len(made.sent) == 5)
        assert 'breaker_state{backend="bke_one",model="main"} 0.0' in made.router.metrics.page().decode()
        for peer in peers:
            peer.exchange.connection_lost()
            await peer.wait()


def negative(page: bytes) -> dict[str, float]:
    return {name: value for name, value in gauges(page).items() if value < 0 and not name.startswith(MAY_BE_NEGATIVE)}


def gauges(page: bytes) -> dict[str, float]:
    return {
        f"{sample.name}{sample.labels}": sample.value
        for family in text_string_to_metric_families(page.decode())
        if family.type in ("gauge", "counter")
        for sample in family.samples
    }


MAY_BE_NEGATIVE = ("fairlane_waste_budget_tokens", "fairlane_tenant_counter_service")
"""A budget that may be overdrawn, and a lead over the others, which is negative for who is behind."""
HELD = (
    "fairlane_queue_length",
    "fairlane_queue_bytes",
    "fairlane_inflight_requests",
    "fairlane_parked_requests",
    "fairlane_backend_running_requests",
    "fairlane_tenant_queue_length",
    "fairlane_tenant_inflight_requests",
)


@pytest.mark.parametrize("seed", range(3))
async def test_no_counter_is_negative_or_left_behind_by_any_mix_of_faults(world: Ill, seed: int) -> None:
    rng = random.Random(seed)
    engine = world.engine
    bob = world.setup.key("bob")
    await world.router.apply(world.setup.snapshot())
    fates = [BATCH, BUSY, PAGE, DEATH, REFUSED, noise(1), stream(2, ending=Ending.CUT), stream(3, ending=Ending.HANG)]
    peers: list[Peer] = []
    for step in range(120):
        if rng.random() < 0.5:
            world.fates.append(rng.choice(fates))
        path, body = rng.choice([("/generate_stream", GENERATE), ("/generate", GENERATE), ("/v1/completions", CHAT)])
        peers.append(world.ask(path=path, key=rng.choice([None, bob]), **body))
        if rng.random() < 0.3:
            rng.choice(peers).exchange.connection_lost()
        for member in engine.backends.members.values():
            member.breaker.not_before_s = 0.0
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
        if step % 10 == 0:
            assert engine.scheduler.audit() == []
            assert negative(world.router.metrics.page(is_admin=True)) == {}
    for peer in peers:
        peer.exchange.connection_lost()
    for peer in peers:
        await peer.wait()
    await until(lambda: not any(b.reserved_tokens for b in engine.stats().backends))
    found = gauges(world.router.metrics.page(is_admin=True))
    assert negative(world.router.metrics.page(is_admin=True)) == {}
    assert {name: value for name, value in found.items() if name.startswith(HELD) and value} == {}
    assert world.router.active == 0
    assert world.router.limits.count == 0
    assert not any(client.streams for client in world.clients.values())
