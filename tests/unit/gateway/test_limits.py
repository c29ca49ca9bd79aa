"""What the scheduler refuses on arrival, as clients see it: status, shape and hint in both dialects."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.scripted import BODY, Peer, World, running, until

from router_ext.core.actions import Dispatch
from router_ext.core.events import Arrived, Event, Finished, Progressed, RequestSpec
from router_ext.core.ids import KeyId, RequestId, TenantId, TierName
from router_ext.wire.controlplane import TierRecord

COMPLETION = {"model": "main", "prompt": "a b c", "max_tokens": 5}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/generate", BODY), ("/generate_stream", BODY), ("/v1/completions", COMPLETION),
]  # fmt: skip


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path) as made:
        yield made


def judge(peer: Peer, path: str, code: str, text: str) -> None:
    """429 in the dialect of the path, with the text in its message and a hint that SDKs follow."""
    answer = json.loads(peer.data)
    assert peer.status == 429
    if path.startswith("/v1"):
        assert answer["error"]["type"] == "rate_limit_error"
        assert answer["error"]["code"] == code
        assert text in answer["error"]["message"]
    else:
        assert set(answer) == {"error", "error_type"}
        assert answer["error_type"] == "overloaded"
        assert text in answer["error"]
    assert 1 <= int(peer.headers["retry-after"]) <= 120
    assert 0 <= int(peer.headers["retry-after"]) * 1_000 - int(peer.headers["retry-after-ms"]) < 1_000


async def test_requests_beyond_the_limit_per_minute_are_told_when_to_come_again(world: World) -> None:
    world.setup.scheduling = {"policy": "rpm", "rpm_limit": 1}
    await world.router.apply(world.setup.snapshot())
    first = Peer(world, "/generate", BODY)
    await first.wait()
    assert first.status == 200
    for path, body in ASKED:
        refused = Peer(world, path, body)
        await refused.wait()
        judge(refused, path, "rate_limit_exceeded", "its limit is 1")
        assert int(refused.headers["retry-after"]) >= 59
    assert world.router.metrics.page().count(b'code="rate_limit_exceeded"') >= 1


def flood(world: World, seconds: float) -> None:
    """Let the pool's scheduler see another tenant's flood for a while, at instants that lie ahead of the clock.

    One step of 0.1 s is one token for everybody who runs; what the pool delivers under load is known afterwards.
    """
    engine = world.router.engines["pol_main"]
    scheduler, start = engine.scheduler, engine.loop.time()
    produced: dict[str, int] = {}
    number = 0
    now = start

    def send(event: Event) -> None:
        for action in scheduler.handle(event, now):
            if isinstance(action, Dispatch):
                produced[action.request_id] = 0

    while now < start + seconds:
        now += 0.1
        while scheduler.stats().queued < 40:
            number += 1
            spec = RequestSpec(
                request_id=RequestId(f"flood_{number}"),
                tenant=TenantId("ten_alice"),
                key=KeyId("key_of_the_flood"),
                tier=TierName("standard"),
                prompt_tokens=1_000,
                max_new_tokens=100,
                predicted_output_tokens=100,
                slice_tokens=100,
            )
            send(Arrived(request=spec))
        for name in list(produced):
            produced[name] += 1
            send(Progressed(request_id=RequestId(name), output_tokens=1))
            if produced[name] == 100:
                del produced[name]
                send(Finished(request_id=RequestId(name)))


async def test_a_request_that_would_wait_in_vain_is_refused_at_once(world: World) -> None:
    """40 requests of 100 tokens wait in the tier above, and the pool makes some 180 tokens per second."""
    world.setup.scheduling = {"aging_ratio": 0}
    world.setup.tiers = [
        TierRecord(name="standard", rank=10),
        TierRecord(name="interactive", rank=20, max_queue_wait_s=2.0),
        TierRecord(name="patient", rank=30, max_queue_wait_s=600.0),
    ]
    world.setup.tenant("alice", tiers=["standard", "interactive", "patient"], default_tier="interactive")
    patient = world.setup.key("alice", default_tier="patient")
    await world.router.apply(world.setup.snapshot())
    flood(world, 30.0)
    for path, body in ASKED:
        refused = Peer(world, path, body)
        await refused.wait()
        judge(refused, path, "deadline_unreachable", "the tier allows 2 s")
        assert 5 <= int(refused.headers["retry-after"]) <= 40
    waiting = Peer(world, "/generate", BODY, key=patient)
    scheduler = world.router.engines["pol_main"].scheduler
    await until(lambda: waiting.task.done() or scheduler.stats().queued_by_tier[TierName("patient")] == 1)
    assert not waiting.task.done()
    waiting.exchange.connection_lost()
    await waiting.wait()
