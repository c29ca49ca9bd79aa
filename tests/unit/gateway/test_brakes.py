"""What an operator stops is stopped with the next snapshot: a request, a tenant, grammars, a backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.routers import backend
from support.scripted import Peer, World, running, stream, until

from router_ext.backends.fake import Ending, FakeBackend, Script
from router_ext.gateway.engine import PoolEngine
from router_ext.wire.controlplane import OwnCancellation

CUT = Script(pieces=(b'[{"id":1},{"id":2},{"id":3},{"id":101},{"id":102}]',))


class Two(World):
    """Two backends; every generation shows two tokens and hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.setup.backends = [backend(1), backend(2, "two")]
        self.bob = self.setup.key("bob")
        self.generation = stream(2, ending=Ending.HANG)
        self.cut = CUT
        self.clients: dict[str, FakeBackend] = {}

    def make_client(self, record: Any) -> FakeBackend:
        client = self.clients[record.backend] = self.client = FakeBackend(self.play)
        return client

    async def publish(self, **changes: Any) -> None:
        """A further snapshot with changed fields: of itself, or of the pool by ``pool``, of tenants by ``tenant``."""
        snapshot = self.setup.snapshot()
        pool, tenant = changes.pop("pool", {}), changes.pop("tenant", {})
        pools = [msgspec.structs.replace(each, **pool) for each in snapshot.pools]
        tenants = [msgspec.structs.replace(t, **tenant.get(t.tenant, {})) for t in snapshot.tenants]
        await self.router.apply(msgspec.structs.replace(snapshot, pools=pools, tenants=tenants, **changes))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Two]:
    async with running(tmp_path, Two()) as made:
        assert isinstance(made, Two)
        await until(lambda: len(engine_of(made).backends.up) == 2)
        yield made
        engine_of(made).end_all(engine_of(made).model.no_backend())
        assert engine_of(made).scheduler.audit() == []


def engine_of(world: World) -> PoolEngine:
    return world.router.engines["pol_main"]


def ask(world: World, *, key: str | None = None, path: str = "/generate_stream", **parameters: Any) -> Peer:
    return Peer(
        world, path, {"inputs": "a b c", "parameters": {"max_new_tokens": 9, "details": True, **parameters}}, key=key
    )


async def test_one_request_is_cancelled_and_no_other(world: Two) -> None:
    mine, other = ask(world), ask(world)
    await until(lambda: b" t2" in mine.data and b" t2" in other.data)
    (first, _) = sorted(engine_of(world).calls, key=lambda call: call.slot.start.event)
    await world.publish(cancelled=["evt_unknown", first.slot.start.event])
    cancelled = mine if mine.exchange is first.client.exchange else other
    data = await cancelled.wait()
    assert b"The operator has cancelled this request." in data
    assert data.count(b'"token"') == 2
    assert len(engine_of(world).calls) == 1


async def test_a_tenant_ends_its_own_request_and_none_of_the_same_id_of_another(world: Two) -> None:
    """Clients choose ids: here both chose the same."""
    body = {"inputs": "a b c", "parameters": {"max_new_tokens": 9, "details": True}}
    mine, others = (
        Peer(world, "/generate_stream", body, key=key, headers={"x-request-id": "req_same"})
        for key in (None, world.bob)
    )
    await until(lambda: b" t2" in mine.data and b" t2" in others.data)
    calls = {call.identity.tenant: call for call in engine_of(world).calls}
    assert {call.request_id for call in calls.values()} == {"req_same"}
    (tenant,) = (t for t, call in calls.items() if call.client.exchange is mine.exchange)
    await world.publish(own_cancelled=[OwnCancellation(tenant=tenant, request="req_same")])
    assert b"Your tenant has cancelled this request." in await mine.wait()
    assert [call.identity.tenant for call in engine_of(world).calls] == [t for t in calls if t != tenant]
    (left,) = engine_of(world).calls
    await world.publish(own_cancelled=[OwnCancellation(tenant=left.identity.tenant, request=left.slot.start.event)])
    assert b"Your tenant has cancelled this request." in await others.wait()


async def test_a_request_is_cancelled_by_the_id_its_client_got(world: Two) -> None:
    peer = ask(world)
    await until(lambda: b" t2" in peer.data)
    (call,) = engine_of(world).calls
    await world.publish(cancelled=[call.request_id])
    assert b"The operator has cancelled this request." in await peer.wait()
    assert not engine_of(world).calls


async def test_what_waits_or_runs_is_told_in_heartbeats(world: Two) -> None:
    peers = [ask(world), ask(world, key=world.bob)]
    await until(lambda: all(b" t2" in peer.data for peer in peers))
    (pool,) = world.router.heartbeat().pools
    calls = {call.slot.start.event: call for call in engine_of(world).calls}
    assert {live.event for live in pool.oldest} == set(calls)
    assert [live.arrived_at_us for live in pool.oldest] == sorted(live.arrived_at_us for live in pool.oldest)
    for live in pool.oldest:
        start = calls[live.event].slot.start
        assert (live.request, live.tenant, live.key) == (start.request, start.tenant, start.key)
        assert (live.output_tokens, live.backend) == (2, calls[live.event].backends[-1])
    assert {live.tenant for live in pool.oldest} == {"ten_alice", "ten_bob"}
    await world.publish(tenant={"ten_alice": {"state": "stopped"}, "ten_bob": {"state": "stopped"}})
    (pool,) = world.router.heartbeat().pools
    assert pool.oldest == []


async def test_a_request_that_waits_is_told_to_be_nowhere(world: Two) -> None:
    world.setup.backends = [msgspec.structs.replace(b, is_cordoned=True) for b in world.setup.backends]
    await world.router.apply(world.setup.snapshot())
    ask(world)
    await until(lambda: engine_of(world).stats().queued == 1)
    (pool,) = world.router.heartbeat().pools
    assert [(live.backend, live.output_tokens) for live in pool.oldest] == [(None, 0)]


async def test_a_stopped_tenant_ends_and_is_refused(world: Two) -> None:
    alice, bob = ask(world), ask(world, key=world.bob)
    await until(lambda: b" t2" in alice.data and b" t2" in bob.data)
    await world.publish(tenant={"ten_alice": {"state": "stopped"}})
    assert b"stopped all requests of this tenant" in await alice.wait()
    refused = ask(world)
    await refused.wait()
    assert refused.status == 403
    assert [call.identity.tenant for call in engine_of(world).calls] == ["ten_bob"]


async def test_a_suspended_tenant_finishes_what_runs_and_what_waits_ends(world: Two) -> None:
    running_one = ask(world)
    await until(lambda: b" t2" in running_one.data)
    backends = [msgspec.structs.replace(b, is_cordoned=True) for b in world.setup.snapshot().pools[0].backends]
    await world.publish(pool={"backends": backends})
    openai = Peer(world, "/v1/completions", {"model": "tgi", "prompt": "a b c", "max_tokens": 9, "stream": True})
    waiting = [ask(world), openai, ask(world, key=world.bob)]
    await until(lambda: engine_of(world).stats().queued == 3)
    await world.publish(pool={"backends": backends}, tenant={"ten_alice": {"state": "suspended"}})
    for peer in waiting[:2]:
        data = await peer.wait()
        assert (peer.status, b"This tenant is suspended." in data) == (403, True)
    assert b"tenant_disabled" in waiting[1].data
    assert engine_of(world).stats().queued == 1
    assert len(engine_of(world).calls) == 2, "what runs goes on, and so does the other tenant's request"
    refused = ask(world)
    await refused.wait()
    assert refused.status == 403


async def test_what_is_still_being_read_when_its_tenant_is_suspended_is_refused(
    world: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, may_go_on = asyncio.Event(), asyncio.Event()
    judge = world.router.guarding.judge

    async def judge_later(*args: Any) -> Any:
        reading.set()
        await may_go_on.wait()
        return await judge(*args)

    monkeypatch.setattr(world.router.guarding, "judge", judge_later)
    for state in ("suspended", "stopped"):
        reading.clear()
        may_go_on.clear()
        peer = ask(world)
        await reading.wait()
        await world.publish(tenant={"ten_alice": {"state": state}})
        may_go_on.set()
        await peer.wait()
        assert (peer.status, len(engine_of(world).calls)) == (403, 0)
        await world.publish()


@pytest.mark.parametrize("how", ["revoked", "rotated", "expired"])
async def test_what_was_sent_with_a_key_that_ends_goes_on_and_nothing_more_is_taken(world: Two, how: str) -> None:
    runs = ask(world)
    await until(lambda: b" t2" in runs.data)
    backends = [msgspec.structs.replace(b, is_cordoned=True) for b in world.setup.snapshot().pools[0].backends]
    await world.publish(pool={"backends": backends})
    waits = ask(world)
    await until(lambda: engine_of(world).stats().queued == 1)
    old, new = world.key, world.setup.key("alice") if how == "rotated" else None
    ended = world.setup.keys.pop(old)
    if how == "expired":
        world.setup.keys[old] = msgspec.structs.replace(ended, expires_at_us=1)
    # The stream has to find another backend, and the other request its first: neither asks for the key again.
    world.generation = stream(5)
    busy = next(call.backends[-1] for call in engine_of(world).calls if call.backends)
    backends = [
        msgspec.structs.replace(b, is_drained=b.backend == busy) for b in world.setup.snapshot().pools[0].backends
    ]
    await world.publish(pool={"backends": backends})
    for peer, tokens in ((runs, 7), (waits, 5)):
        data = await peer.wait()
        assert data.count(b'"token"') == tokens
        assert b'"generated_text":"' in data
    refused = ask(world, key=old)
    await refused.wait()
    assert refused.status == 401
    if new is not None:
        taken = ask(world, key=new)
        assert b'"generated_text":"' in await taken.wait()


async def test_a_drained_backend_is_empty_at_once_and_nothing_is_lost(world: Two) -> None:
    peers = [ask(world), ask(world)]
    await until(lambda: all(b" t2" in peer.data for peer in peers))
    world.generation = stream(5)
    backends = [
        msgspec.structs.replace(each, is_drained=each.backend == "bke_one")
        for each in world.setup.snapshot().pools[0].backends
    ]
    await world.publish(pool={"backends": backends})
    await until(lambda: any(b'"generated_text":"' in peer.data for peer in peers))
    done = next(peer for peer in peers if b'"generated_text":"' in peer.data)
    assert done.data.count(b'"token"') == 7, "two tokens from the first backend, five from the second"
    running = {b.backend: b.running for b in engine_of(world).stats().backends}
    assert running == {"bke_one": 0, "bke_two": 1}
