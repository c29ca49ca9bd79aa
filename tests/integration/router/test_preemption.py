"""Streams of real servers are cut at random tokens: in every dialect, many at once, while servers die."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from support.modelserver import DATA_DIR, ModelServer, model_server
from support.preempting import ForcedCuts, RealWorld
from support.routers import backend
from support.scripted import Peer, running, until

from router_ext.core.request import Request
from router_ext.gateway.engine import PoolEngine

FLAGS = ("--sim-step-ms", "2", "--sim-mean-tokens", "0", "--max-total-tokens", "2048")
TOKENS = 60
PARAMETERS = {"max_new_tokens": TOKENS, "details": True}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": TOKENS, "temperature": 0}
TEXT = {"prompt": "Tell me a story", "max_tokens": TOKENS, "temperature": 0}
ASKED: list[tuple[str, Any]] = [
    ("/generate_stream", {"inputs": "Tell me a story", "parameters": PARAMETERS}),
    ("/generate_stream", {"inputs": "Sing", "parameters": {**PARAMETERS, "top_n_tokens": 3, "return_full_text": True}}),
    ("/generate", {"inputs": "Tell me a story", "parameters": PARAMETERS}),
    ("/", {"inputs": "Count", "stream": True, "parameters": PARAMETERS}),
    ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    ("/v1/completions", {**TEXT, "stream": True}),
    ("/v1/completions", {**TEXT, "prompt": ["Tell me a story", "Tell me a joke"]}),
]


def engine_of(world: RealWorld) -> PoolEngine:
    return world.router.engines["pol_main"]


def answer_of(peer: Peer) -> bytes:
    """Without the head, and what differs between any two answers; several choices stand in the order of their ends."""
    data = peer.data.split(b"\r\n\r\n", 1)[1] if peer.data.startswith(b"HTTP/1.1") else peer.data
    plain = re.sub(rb'"id":"[^"]*",|"created":\d+,', b"", data)
    if plain.startswith(b"{") and len(choices := json.loads(plain).get("choices", ())) > 1:
        return json.dumps(sorted(choices, key=lambda choice: int(choice["index"]))).encode()
    return plain


async def play(world: RealWorld, asked: list[tuple[str, Any]]) -> list[bytes]:
    peers = [Peer(world, path, body, headers={"x-request-id": str(n)}) for n, (path, body) in enumerate(asked)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(peer.task for peer in peers))
    return [answer_of(peer) for peer in peers]


def usage(world: RealWorld) -> list[dict[str, Any]]:
    """What came into the books since this was asked last, in the order of the requests."""
    events: list[dict[str, Any]] = []
    while (batch := world.router.ledger.read_batch()) is not None:
        events += map(json.loads, batch.payloads)
        world.router.ledger.ack(batch)
    return sorted(events, key=lambda event: int(event["request"]))


def nothing_is_left(world: RealWorld) -> None:
    engine = engine_of(world)
    stats = engine.stats()
    assert (stats.running, stats.queued) == (0, 0)
    assert not engine._generations
    assert not engine._cuts
    assert world.router.ledger.running == 0
    assert engine.scheduler.audit() == []


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("has_file", [True, False])
async def test_no_dialect_shows_a_cut(server: ModelServer, tmp_path: Path, has_file: bool, seed: int) -> None:
    """Byte for byte; whether the seam is found with the pool's tokenizer or by asking a server."""
    path = next(DATA_DIR.rglob("tokenizer.json")) if has_file else None
    chance = random.Random(seed)
    async with running(tmp_path, RealWorld(backend(server.port), tokenizer_path=path)) as world:
        assert isinstance(world, RealWorld)
        await until(lambda: (engine_of(world).model.tokenizer is not None) is has_file)
        wanted = await play(world, ASKED)
        plain = usage(world)
        cuts = ForcedCuts(engine_of(world), lambda request: chance.random() < 0.04)
        assert await play(world, ASKED) == wanted
        booked = usage(world)
        assert len(cuts.cut) > 5
        assert sum(event["preemptions"] for event in booked) > 5
        for before, after in zip(plain, booked, strict=True):
            assert (before["preemptions"], before["recomputed_tokens"]) == (0, 0)
            assert after["resume_class"] == "exact" or not after["preemptions"]
            assert after["segments"] == before["segments"] + after["preemptions"]
            for field in ("outcome", "finish_reason", "prompt_tokens", "output_tokens", "resumed_prefill_tokens"):
                assert after[field] == before[field], field
            # Each went on from its prompt and at least one token more, at most from the whole answer.
            least = after["preemptions"] * (after["prompt_tokens"] // _prompts(after) + 1)
            most = after["preemptions"] * (after["prompt_tokens"] + after["output_tokens"])
            assert least <= after["recomputed_tokens"] <= most or not after["preemptions"]
        nothing_is_left(world)


def _prompts(event: dict[str, Any]) -> int:
    """Prompts of one request: ``prompt_tokens`` counts all of them."""
    return 2 if event["output_tokens"] > TOKENS else 1


async def test_a_server_that_dies_while_its_streams_are_cut(tmp_path: Path) -> None:
    """Some are running, some wait for their cut, some wait to go on: all of them end on the other server."""
    with model_server(*FLAGS) as one, model_server(*FLAGS) as two:
        setup = (backend(one.port, "one"), backend(two.port, "two"))
        async with running(tmp_path, RealWorld(*setup)) as world:
            assert isinstance(world, RealWorld)
            engine = engine_of(world)
            await until(lambda: len(engine.backends.up) == 2)
            asked = [ASKED[0], ASKED[2], ASKED[4]] * 4
            wanted = await play(world, asked)
            usage(world)
            chance = random.Random(3)

            def choose(request: Request) -> bool:
                if len(cuts.cut) == 6 and one.process.poll() is None:
                    one.process.kill()
                return chance.random() < 0.04

            cuts = ForcedCuts(engine, choose)
            assert await play(world, asked) == wanted
            cuts.stop()
            assert one.process.poll() is not None
            booked = usage(world)
            assert [event["outcome"] for event in booked] == ["completed"] * len(asked)
            assert sum(event["preemptions"] for event in booked) > 6
            assert any(len(event["backends"]) == 2 for event in booked)
            nothing_is_left(world)
