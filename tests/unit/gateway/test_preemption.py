"""A running stream is cut for others and goes on later: its client sees what it would have seen, the books see more.

The router, its scheduler and its books are the real ones; only the wish to preempt is the test's.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs
from support.preempting import ForcedCuts, ModelWorld
from support.scripted import Peer, World, running, until

from router_ext.backends.fake import Ending, Script
from router_ext.core.actions import Action
from router_ext.core.events import BackendChanged, Event, TimerFired
from router_ext.core.ids import BackendId
from router_ext.core.request import Request
from router_ext.gateway.continuation import Continuation, Phase
from router_ext.gateway.engine import PoolEngine
from router_ext.gateway.slices import TextGeneration
from router_ext.gateway.upstream import Step


@pytest.fixture
async def world(tmp_path: Path, tokenizer_path: Path) -> AsyncIterator[ModelWorld]:
    made = ModelWorld(tokenizer_path)
    async with running(tmp_path, made):
        await until(lambda: engine_of(made).model.tokenizer is not None)
        yield made


def engine_of(world: World) -> PoolEngine:
    return world.router.engines["pol_main"]


def usage(world: World) -> dict[str, dict[str, Any]]:
    """What is in the books, by event id; what was read is gone."""
    found: dict[str, dict[str, Any]] = {}
    while (batch := world.router.ledger.read_batch()) is not None:
        for payload in batch.payloads:
            event = json.loads(payload)
            found[event["event"]] = event
        world.router.ledger.ack(batch)
    return found


def at_tokens(*places: int) -> Callable[[Request], bool]:
    """Cut every request once it has so many tokens, at each of these places once."""
    done: dict[str, int] = defaultdict(int)

    def choose(request: Request) -> bool:
        position = done[request.request_id]
        if position >= len(places) or request.output_tokens < places[position]:
            return False
        done[request.request_id] += 1
        return True

    return choose


def body_of(peer: Peer) -> bytes:
    """The answer without what differs between any two: head, id and instant."""
    data = peer.data.split(b"\r\n\r\n", 1)[1] if peer.data.startswith(b"HTTP/1.1") else peer.data
    return re.sub(rb'"id":"[^"]*",|"created":\d+,', b"", data)


def nothing_is_left(world: World) -> None:
    engine = engine_of(world)
    stats = engine.stats()
    assert (stats.running, stats.queued) == (0, 0)
    assert not engine.calls
    assert not engine._generations
    assert not engine._cuts
    assert not world.client.streams
    assert world.router.ledger.running == 0
    assert engine.scheduler.audit() == []


def requests(kinds: int, tokens: int, *, prompt: str = "Once upon a time") -> list[tuple[str, Any]]:
    """(path, body) of one request in so many dialects."""
    parameters = {"max_new_tokens": tokens, "details": True}
    native = {"inputs": prompt, "parameters": parameters}
    plain = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    made = [
        ("/generate_stream", native),
        ("/v1/completions", {**plain, "stream": True}),
        ("/generate", native),
        ("/v1/completions", plain),
        ("/", {**native, "stream": True}),
    ]
    return made[:kinds]


async def play(world: World, asked: list[tuple[str, Any]]) -> list[bytes]:
    """All of them at once; their answers in order."""
    peers = [Peer(world, path, body) for path, body in asked]
    await asyncio.gather(*(peer.wait() for peer in peers))
    return [body_of(peer) for peer in peers]


# --- the law --------------------------------------------------------------------------------------------------------


async def check_law(world: ModelWorld, seed: int, *, stories: int = 4) -> tuple[int, int]:
    """Answers cut at random places equal uninterrupted ones wherever the books say ``exact``.

    Returns:
        number of cuts, and of answers whose seam was told to be inexact.
    """
    chance = random.Random(seed)
    asked = [
        item
        for number in range(stories)
        for item in requests(5, chance.randint(8, 40), prompt=f"Story {seed}.{number}: once upon a time")
    ]
    wanted = await play(world, asked)
    usage(world)
    cuts = ForcedCuts(engine_of(world), lambda request: chance.random() < 0.06)
    found = await play(world, asked)
    cuts.stop()
    events = usage(world)
    assert len(events) == len(asked)
    count: dict[str, int] = defaultdict(int)
    for request, _ in cuts.cut:
        count[request] += 1
    # Books are written in the order of ends, requests begin in the order asked: event ids sort by arrival.
    approximate = 0
    for event, expected, answer in zip(sorted(events), wanted, found, strict=True):
        booked = events[event]
        assert booked["outcome"] == "completed"
        assert booked["preemptions"] <= count[event]
        assert booked["segments"] == 1 + booked["preemptions"]
        if booked["resume_class"] == "exact":
            assert answer == expected
        else:
            approximate += 1
    nothing_is_left(world)
    return sum(event["preemptions"] for event in events.values()), approximate


@pytest.mark.parametrize("seed", range(4))
async def test_preempted_answers_are_the_uninterrupted_ones(world: ModelWorld, seed: int) -> None:
    cuts, approximate = await check_law(world, seed)
    assert cuts > 10
    assert approximate <= 15, "hardly an exact one: this would prove nothing"


class DropsToken(Continuation):
    """Sends the next backend one token less than its client has seen."""

    __slots__ = ()

    def _keep(self, count: int) -> None:
        if self._is_interrupted and count > 1:
            self._texts = [*self._texts[: count - 1], ""]
        super()._keep(count)


class KeepsStream(TextGeneration):
    """Leaves the backend's stream open while the cut is chosen."""

    __slots__ = ()

    def _close(self) -> None:
        if self.flow.phase is not Phase.CUT:
            super()._close()


@pytest.mark.parametrize(("place", "mutant"), [("Continuation", DropsToken), ("TextGeneration", KeepsStream)])
async def test_a_seam_that_is_wrong_is_noticed(
    world: ModelWorld, monkeypatch: pytest.MonkeyPatch, place: str, mutant: type
) -> None:
    monkeypatch.setattr(f"router_ext.gateway.app.{place}", mutant)
    # A defect may also leave its client without an answer. Nobody reads what is logged of it.
    with capture_logs(), pytest.raises((AssertionError, TimeoutError)):
        await check_law(world, 0, stories=1)


# --- the books ------------------------------------------------------------------------------------------------------


async def test_the_books_tell_a_preemption_from_a_continuation(world: ModelWorld) -> None:
    """30 tokens in slices of 16, cut after 5 and 20: what was sent again is booked by its cause."""
    world.setup.scheduling = {"max_slice_tokens": 16, "min_slice_tokens": 16}
    await world.router.apply(world.setup.snapshot())
    engine = engine_of(world)
    (kind,) = requests(1, 40)
    prompt = len(world.tokenizer.encode(kind[1]["inputs"]).ids)
    is_due = at_tokens(5, 25)

    def choose(request: Request) -> bool:
        """Nobody may go on for a while after a cut, so that waiting would be seen in the books."""
        if not is_due(request):
            return False
        engine.loop.call_soon(engine.post, BackendChanged(backend=BackendId("bke_one"), is_up=False))
        engine.loop.call_later(0.1, engine.post, BackendChanged(backend=BackendId("bke_one"), is_up=True))
        return True

    cuts = ForcedCuts(engine, choose)
    await play(world, [kind])
    (event,) = usage(world).values()
    assert [tokens for _, tokens in cuts.cut] == [5, 25]
    asked = [json.loads(body) for path, body in world.client.requests if path == "/generate_stream"]
    inputs = [len(world.tokenizer.encode(body["inputs"]).ids) for body in asked]
    # Slices begin at 0, 5 (cut), 21 (slice end) and 25 (cut); what the cuts dropped is in none of them.
    assert inputs == [prompt, prompt + 5, prompt + 21, prompt + 25]
    assert (event["preemptions"], event["segments"], event["output_tokens"]) == (2, 4, 40)
    assert event["recomputed_tokens"] == inputs[1] + inputs[3]
    assert event["resumed_prefill_tokens"] == inputs[2]
    assert event["prompt_tokens"] == prompt
    assert event["explanation"].count("told to stop once for others (a test's wish)") == 2
    # A reservation is a slice and its prompt, held while the slice is open and not while the request waits to go on.
    sizes = [size + body["parameters"]["max_new_tokens"] - 1 for size, body in zip(inputs, asked, strict=True)]
    most = sum(size * span for size, span in zip(sizes, cuts.held_s(), strict=True))
    assert 0 < event["kv_token_seconds"] < most + 1e-3
    nothing_is_left(world)


# --- races ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slice_tokens", [1_024, 8])
async def test_an_end_that_comes_first_overtakes_the_cut(world: ModelWorld, slice_tokens: int) -> None:
    """The wish comes with the last token of the slice or of the answer, whose end is being reported already."""
    world.setup.scheduling = {"max_slice_tokens": slice_tokens, "min_slice_tokens": 1}
    await world.router.apply(world.setup.snapshot())
    asked = requests(5, 16)
    wanted = await play(world, asked)
    usage(world)
    cuts = ForcedCuts(engine_of(world), at_tokens(*range(min(slice_tokens, 16), 17, 8)))
    assert await play(world, asked) == wanted
    assert len(cuts.cut) == (10 if slice_tokens == 8 else 5)
    assert [event["preemptions"] for event in usage(world).values()] == [0] * 5
    nothing_is_left(world)


async def test_a_client_that_leaves_while_its_cut_is_chosen(world: ModelWorld) -> None:
    engine = engine_of(world)
    peers: list[Peer] = []

    def choose(request: Request) -> bool:
        if request.output_tokens < 5:
            return False
        engine.loop.call_soon(peers[0].exchange.connection_lost)
        return True

    ForcedCuts(engine, choose)
    peers.append(Peer(world, *requests(1, 40)[0]))
    await peers[0].wait()
    await until(lambda: not engine._cuts)
    (event,) = usage(world).values()
    assert (event["outcome"], event["preemptions"], event["segments"]) == ("cancelled", 1, 1)
    nothing_is_left(world)


async def test_a_client_that_leaves_while_it_waits_to_go_on(world: ModelWorld) -> None:
    engine = engine_of(world)
    lost = BackendChanged(backend=BackendId("bke_one"), is_up=False)

    def choose(request: Request) -> bool:
        engine.loop.call_soon(engine.post, lost)
        return True

    ForcedCuts(engine, choose)
    peer = Peer(world, *requests(1, 40)[0])
    await until(lambda: engine.stats().queued == 1 and not engine._cuts)
    assert [call.preemptions for call in engine.calls] == [1]
    peer.exchange.connection_lost()
    await peer.wait()
    (event,) = usage(world).values()
    assert (event["outcome"], event["preemptions"]) == ("cancelled", 1)
    nothing_is_left(world)


async def test_a_wish_that_comes_twice_is_granted_once(world: ModelWorld) -> None:
    engine = engine_of(world)
    cuts = ForcedCuts(engine, at_tokens(5))
    plain = TextGeneration.preempt
    seen: list[Step] = []

    def twice(self: TextGeneration) -> None:
        plain(self)
        seen.append(self.step)
        plain(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TextGeneration, "preempt", twice)
        (answer,) = await play(world, requests(1, 40))
    cuts.stop()
    assert seen == [Step.CUTTING]
    assert [answer] == await play(world, requests(1, 40))
    assert sorted(event["preemptions"] for event in usage(world).values()) == [0, 1]


async def test_work_that_cannot_be_resumed_is_left_alone(world: ModelWorld) -> None:
    """The scheduler does not ask for it; if it did, the answer would still come whole."""
    engine = engine_of(world)
    cuts = ForcedCuts(engine, at_tokens(1))
    grammar = {"type": "regex", "value": "[a-z]+"}
    body = {"inputs": "a b c", "parameters": {"max_new_tokens": 9, "details": True, "grammar": grammar}}
    (answer,) = await play(world, [("/generate_stream", body)])
    assert len(cuts.cut) == 1
    assert answer == b"".join(world.play("/generate_stream", json.dumps(body).encode()).pieces)
    (event,) = usage(world).values()
    assert (event["outcome"], event["preemptions"]) == ("completed", 0)
    nothing_is_left(world)


async def test_an_answer_at_the_input_limit_runs_to_its_end(world: ModelWorld) -> None:
    """Cut there, it could not be sent again."""
    info = b'{"model_id":"m","max_input_tokens":20,"max_total_tokens":64}'
    world.alter = lambda path, body, script: Script(pieces=(info,)) if path == "/info" else script
    world.setup.backends = [msgspec.structs.replace(world.setup.backends[0], url="http://127.0.0.1:2")]
    await world.router.apply(world.setup.snapshot())
    await until(lambda: [each.max_input_tokens for each in engine_of(world).config.backends.values()] == [20])
    await engine_of(world).model.wait_up()
    cuts = ForcedCuts(engine_of(world), at_tokens(30))
    await play(world, requests(1, 40))
    assert len(cuts.cut) == 1
    (event,) = usage(world).values()
    assert (event["outcome"], event["preemptions"], event["output_tokens"]) == ("completed", 0, 40)
    nothing_is_left(world)


async def test_a_wish_lost_in_a_defect_is_made_up_for(world: ModelWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler decides to preempt, and raises before it says so; the stream would never end by itself."""
    monkeypatch.setattr("router_ext.gateway.engine.RECONCILE_S", 0.01)
    engine = engine_of(world)
    (kind,) = requests(1, 40)
    (wanted,) = await play(world, [kind])
    hanging = [True]

    def hang(path: str, body: bytes, script: Script) -> Script:
        if path == "/generate_stream" and hanging:
            hanging.pop()
            return replace(script, pieces=script.pieces[:8], ending=Ending.HANG)
        return script

    world.alter = hang
    peer = Peer(world, *kind)
    # As the scheduler counts them: it is told of tokens at the end of the turn in which they came.
    await until(lambda: [each["output_tokens"] for each in engine.scheduler.snapshot()["requests"]] == [8])
    cuts = ForcedCuts(engine, at_tokens(8))
    forced = engine.scheduler.handle

    def handle(event: Event, now: float) -> list[Action]:
        forced(event, now)
        cuts.stop()
        raise RuntimeError("a defect")

    engine.scheduler.handle = handle  # type: ignore[method-assign]
    engine.post(TimerFired())
    await peer.wait()
    assert body_of(peer) == wanted
    assert sorted(event["preemptions"] for event in usage(world).values()) == [0, 1]
    nothing_is_left(world)
