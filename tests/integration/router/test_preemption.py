"""Streams of real servers are cut at random tokens: in every dialect, many at once, while servers die."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from support.exchange import Wire, call
from support.modelserver import DATA_DIR, ModelServer, model_server
from support.preempting import ForcedCuts, RealWorld
from support.routers import RouterProcess, Setup, backend, router
from support.scripted import Peer, running, until

from router_ext.core.request import Request
from router_ext.gateway.engine import PoolEngine
from router_ext.wire.controlplane import TierRecord

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


# --- the scheduler's own decision -----------------------------------------------------------------------------------

KV_TOKENS = 1_280
BATCH = {"parameters": {"max_new_tokens": 290, "details": True}}
QUESTION = {"inputs": "Are you there?", "parameters": {"max_new_tokens": 60}}


class Stream:
    """One batch request, read by a thread of its own."""

    def __init__(self, running: RouterProcess, key: str, prompt: str) -> None:
        self.tokens = 0
        self.data = b""
        self._running, self._key, self._prompt = running, key, prompt
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        with Wire(self._running.port) as wire:
            body = {"inputs": self._prompt, **BATCH}
            wire.send("POST", "/generate_stream", body, headers={"Authorization": f"Bearer {self._key}"})
            wire.head()
            for piece in wire.chunks():
                self.data += piece
                self.tokens += piece.count(b"data: ")


@pytest.mark.parametrize("is_on", [True, False], ids=["preemption", "no preemption"])
def test_a_chatbot_does_not_wait_for_a_batch_to_end(server: ModelServer, is_on: bool) -> None:
    """Four long answers hold the KV; a question with a target comes. One of them yields and later goes on unchanged."""
    flags = ("--sim-step-ms", "10", "--sim-mean-tokens", "0", "--max-total-tokens", "1024")
    limits = ("--max-batch-total-tokens", str(KV_TOKENS), "--max-batch-prefill-tokens", str(KV_TOKENS))
    # None of them ends inside a character, which TGI answers in its own way.
    prompts = [f"Tale number {n}" for n in range(4)]
    wanted = [call(server.port, "POST", "/generate_stream", {"inputs": prompt, **BATCH})[2] for prompt in prompts]
    with model_server(*flags, *limits) as small:
        setup = Setup(
            backends=[backend(small.port, kv_tokens=KV_TOKENS, prefill_budget_tokens=KV_TOKENS)],
            scheduling={"max_preemptions": 1 if is_on else 0},
            tiers=[TierRecord(name="interactive", rank=1, ttft_target_s=0.5), TierRecord(name="batch", rank=50)],
            tokenizer_path=str(next(DATA_DIR.rglob("tokenizer.json"))),
        )
        setup.tenant("batch", tiers=["batch"], default_tier="batch")
        setup.tenant("chatbot", tiers=["interactive"], default_tier="interactive")
        batch, chatbot = setup.key("batch"), setup.key("chatbot")
        with router(setup) as running:
            streams = [Stream(running, batch, prompt) for prompt in prompts]
            # From here on the pool's rate is known, and with it what may be computed again.
            running.wait(lambda: running.metric("fairlane_waste_budget_tokens") > 200)
            running.wait(lambda: all(stream.tokens > 20 for stream in streams))
            headers = {"Authorization": f"Bearer {chatbot}"}
            status, _, _ = call(running.port, "POST", "/generate", QUESTION, headers=headers)
            assert status == 200
            for stream in streams:
                stream.thread.join(60)
            running.wait(lambda: len(running.usage()) == 5)
            booked = running.usage()
            assert [stream.data for stream in streams] == wanted
            assert running.metric("fairlane_preemptions_total", trigger="deadline") == is_on
            assert running.metric("fairlane_preemptions_total") == is_on
            running.wait(running.is_idle)
        (question,) = [event for event in booked if event.tenant == "ten_chatbot"]
        answers = [event for event in booked if event.tenant == "ten_batch"]
        assert {event.output_tokens for event in answers} == {290}
        assert {event.outcome for event in booked} == {"completed"}
        assert question.first_token_us is not None
        # Nothing fitted before an answer ended by itself, unless one was cut.
        first_release_us = min(event.ended_at_us for event in answers)
        assert (question.first_token_us < first_release_us) is is_on
        cut = [event for event in answers if event.preemptions]
        assert [(event.preemptions, event.resume_class) for event in cut] == [(1, "exact")] * is_on
        for event in cut:
            assert event.first_dispatch_us is not None
            assert 20 < event.recomputed_tokens < 300
            # It may go on at once in what was freed and not needed, and then once more.
            assert (event.resumed_prefill_tokens > 0) is (event.segments > 2)
            assert any("told to stop" in line for line in event.explanation)
            # It held its reservation from its start to its end, but for the time in which it had yielded.
            assert event.kv_token_seconds < 300 * (event.ended_at_us - event.first_dispatch_us) / 1e6
