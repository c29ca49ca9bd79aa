"""Backends that fall: who streamed goes on, who waited is tried alone, who strikes twice is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.routers import backend
from support.scripted import Peer, World, running, stream, until

from router_ext.backends.fake import Ending, FakeBackend, Script
from router_ext.gateway import engine as engine_module
from router_ext.gateway import suspects as suspects_module
from router_ext.gateway.engine import PoolEngine
from router_ext.gateway.suspects import HazardKind
from router_ext.wire.controlplane import parse_key

DEATH = Script(ending=Ending.CUT)
BATCH = Script(
    status=424,
    headers=((b"content-type", b"application/json"),),
    pieces=(b'{"error":"Request failed during generation: Server error: ","error_type":"generation"}',),
)


class Falling(World):
    """Two backends, or so many. What a generation meets is the next of ``fates`` of its prompt's first word; then it is
    served."""

    def __init__(self, backends: int = 2) -> None:
        super().__init__()
        self.setup.backends = [backend(1), *(backend(n, f"number {n}") for n in range(2, backends + 1))]
        self.bob = self.setup.key("bob")
        self.fates: dict[str, list[Script]] = {}
        self.sent: list[tuple[str, str]] = []
        """(backend, first word) of every generation, in order."""
        self.clients: dict[str, FakeBackend] = {}

    def make_client(self, record: Any) -> FakeBackend:
        name = record.backend
        client = FakeBackend(lambda path, body: self.meet(name, path, body))
        self.clients[name] = self.client = client
        return client

    def meet(self, name: str, path: str, body: bytes) -> Script:
        if path not in ("/generate_stream", "/generate"):
            return self.play(path, body)
        word = json.loads(body)["inputs"].split()[0]
        self.sent.append((name, word))
        fates = self.fates.get(word, [])
        return fates.pop(0) if fates else self.generation


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Falling]:
    async with running(tmp_path, Falling()) as made:
        assert isinstance(made, Falling)
        engine = engine_of(made)
        await until(lambda: len(engine.backends.up) == 2)
        yield made
        assert engine.scheduler.audit() == []
        assert not engine._generations


def engine_of(world: World) -> PoolEngine:
    return world.router.engines["pol_main"]


def ask(world: World, word: str, *, key: str | None = None, **parameters: Any) -> Peer:
    body = {"inputs": f"{word} b c", "parameters": {"max_new_tokens": 5, "details": True, **parameters}}
    return Peer(world, "/generate_stream", body, key=key)


@pytest.mark.parametrize(("fate", "kind"), [(DEATH, HazardKind.DEATH), (BATCH, HazardKind.BATCH)])
async def test_the_second_strike_ends_a_request_and_keeps_its_like_away(
    world: Falling, fate: Script, kind: HazardKind
) -> None:
    world.fates["evil"] = [fate] * 9
    peer = ask(world, "evil")
    answer = json.loads(await peer.wait())
    assert peer.status == 422
    assert "Backends failed while they began this request" in answer["error"]
    assert len(world.sent) == 2, "two backends at most"
    again = ask(world, "evil", seed=7)
    assert b"This request made 2 backends fail" in await again.wait()
    assert again.status == 422
    assert len(world.sent) == 2, "whatever its seed, it met no third one"
    (hazard,) = engine_of(world).suspects.recent
    assert (hazard.kind, hazard.request) == (kind, peer.headers["x-request-id"])
    assert hazard.key == parse_key(world.key)
    assert world.key not in repr(hazard), "the public id, never the key"
    assert engine_of(world).suspects.strikes[kind] == 2


async def test_each_variation_meets_one_backend_once_its_tenant_is_known(world: Falling) -> None:
    world.fates["evil"] = [DEATH] * 2
    await ask(world, "evil").wait()
    world.fates["worse"] = [DEATH] * 9
    assert b"Backends failed" in await ask(world, "worse").wait()
    assert [word for _, word in world.sent] == ["evil", "evil", "worse"]
    assert b"generated_text" in await ask(world, "fine").wait(), "its harmless requests are served"
    assert b"generated_text" in await ask(world, "fine", key=world.bob).wait()


async def test_mates_of_a_culprit_are_tried_alone_and_served(world: Falling) -> None:
    for word in ("one", "two", "three"):
        world.fates[word] = [BATCH]
    peers = [ask(world, word, key=world.bob) for word in ("one", "two", "three")]
    for peer in peers:
        assert b'"generated_tokens":5' in await peer.wait()
    assert not engine_of(world).suspects.recent
    assert engine_of(world).suspects.strikes[HazardKind.BATCH] == 3


async def test_who_has_streamed_is_innocent_however_often(world: Falling) -> None:
    world.cut = Script(pieces=(b'[{"id":1},{"id":2},{"id":3},{"id":101},{"id":102}]',))
    world.fates["good"] = [stream(2, ending=Ending.CUT), stream(1, ending=Ending.CUT), stream(1, ending=Ending.CUT)]
    data = await ask(world, "good", max_new_tokens=9).wait()
    assert b"error" not in data
    assert not any(engine_of(world).suspects.strikes.values())


async def test_a_strike_is_forgiven_with_the_first_token(world: Falling) -> None:
    """Struck while it waited, served for a while, struck while it waited again: twice a mate, never a culprit."""
    world.cut = Script(pieces=(b'[{"id":1},{"id":2},{"id":3},{"id":101},{"id":102}]',))
    world.fates["good"] = [DEATH, stream(2, ending=Ending.CUT), DEATH, stream(5)]
    data = await ask(world, "good", max_new_tokens=9).wait()
    assert b"error" not in data
    assert not engine_of(world).suspects.recent


async def test_a_backend_that_refuses_connections_accuses_nobody(world: Falling) -> None:
    world.fates["good"] = [Script(ending=Ending.REFUSED)]
    assert b"generated_text" in await ask(world, "good").wait()
    assert not any(engine_of(world).suspects.strikes.values())


async def test_a_frozen_backend_is_left_by_all(world: Falling, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(world)
    world.fates["evil"] = [Script(ending=Ending.HANG)]
    evil = ask(world, "evil")
    await until(lambda: world.sent == [(world.sent[0][0], "evil")] if world.sent else False)
    frozen = world.sent[0][0]
    engine.look_for_frozen()
    assert engine.backends.members[frozen].state == "up", "five seconds have not gone by"  # type: ignore[index]
    monkeypatch.setattr(engine_module, "FREEZE_S", 0.0)
    engine.backends.members[frozen].answered_s = engine.loop.time() - 1.0  # type: ignore[index]
    monkeypatch.setattr(world.clients[frozen], "_play", lambda path, body: Script(ending=Ending.HANG))
    engine.look_for_frozen()
    assert engine.backends.members[frozen].state == "down"  # type: ignore[index]
    monkeypatch.setattr(engine_module, "FREEZE_S", 5.0)
    assert b"generated_text" in await evil.wait()
    assert [name for name, _ in world.sent][1] != frozen
    assert engine.suspects.strikes[HazardKind.FREEZE] == 1


async def test_what_is_sent_to_a_frozen_backend_is_innocent_and_hides_nothing(tmp_path: Path) -> None:
    """The silence counts from the backend's last word, whatever comes after, and who came later has not caused it."""
    async with running(tmp_path, Falling(1)) as world:
        assert isinstance(world, Falling)
        engine = engine_of(world)
        (member,) = engine.backends.members.values()
        world.fates.update(evil=[Script(ending=Ending.HANG)], late=[Script(ending=Ending.HANG)])
        evil, late = ask(world, "evil"), ask(world, "late", key=world.bob)
        await until(lambda: len(world.sent) == 2)
        now = engine.loop.time()
        first = next(g for g in engine._generations.values() if g.call.identity.tenant == "ten_alice")
        first.started_s, member.answered_s = now - 5.5, now - 6.0
        engine.look_for_frozen()
        assert engine.suspects.strikes[HazardKind.FREEZE] == 1
        for peer in (evil, late):
            assert b"generated_text" in await peer.wait()
        assert [word for _, word in world.sent].count("late") == 2


async def test_nobody_answers_for_a_culprit_whose_client_has_left(tmp_path: Path) -> None:
    """The backend had been silent for seconds when the first of those was sent there that still run."""
    async with running(tmp_path, Falling(1)) as world:
        assert isinstance(world, Falling)
        engine = engine_of(world)
        (member,) = engine.backends.members.values()
        world.fates["good"] = [Script(ending=Ending.HANG)]
        good = ask(world, "good")
        await until(lambda: bool(world.sent))
        (generation,) = engine._generations.values()
        now = engine.loop.time()
        generation.started_s, member.answered_s = now - 5.5, now - 9.0
        engine.look_for_frozen()
        assert not any(engine.suspects.strikes.values())
        assert b"generated_text" in await good.wait()


async def test_all_backends_may_be_gone_one_after_the_other(tmp_path: Path) -> None:
    async with running(tmp_path, Falling(4)) as world:
        assert isinstance(world, Falling)
        await until(lambda: len(engine_of(world).backends.up) == 4)
        world.fates["good"] = [Script(ending=Ending.REFUSED)] * 4
        assert b"generated_text" in await ask(world, "good").wait()
        world.fates["good"] = [Script(ending=Ending.REFUSED)] * 99
        assert b"refused the connection" in await ask(world, "good").wait(), "but not for ever"
        assert not any(engine_of(world).suspects.strikes.values())


async def test_another_seed_makes_no_other_request_of_one_that_goes_whole(world: Falling) -> None:
    world.fates["evil"] = [DEATH] * 2
    grammar = {"type": "regex", "value": "[0-9]"}
    assert b"Backends failed" in await ask(world, "evil", grammar=grammar, seed=1).wait()
    assert b"This request made 2 backends fail" in await ask(world, "evil", grammar=grammar, seed=2).wait()


async def test_a_refusal_ends_with_its_time(world: Falling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects_module, "REFUSED_S", 0.0)
    world.fates["evil"] = [DEATH] * 2
    assert b"Backends failed" in await ask(world, "evil").wait()
    assert b"generated_text" in await ask(world, "evil").wait()
