"""Limits through the whole router: headers, bodies in each dialect, and that every exit gives back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.scripted import BODY, Peer, World, running, stream, until

from router_ext.backends.fake import Ending, Script
from router_ext.sync.spool import scan
from router_ext.wire.controlplane import LimitsRecord, TierRecord, UsageEvent

COMPLETION = {"model": "main", "prompt": "a b c", "max_tokens": 5}
STREAMED = {**COMPLETION, "stream": True}
RESPONSE = {"model": "main", "input": "Hi", "max_output_tokens": 5}
COST = 8
"""Three prompt tokens and a cap of five."""

WAYS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", BODY), ("/generate_stream", BODY), ("/v1/completions", COMPLETION), ("/v1/completions", STREAMED),
]  # fmt: skip


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path) as made:
        yield made
        assert (made.router.limits.count, made.router.limits.tokens) == (0, 0)


async def limit(world: World, key: LimitsRecord | None = None, **tenant: Any) -> None:
    """Limits of the tenant by name, of its key as a record."""
    world.setup.tenant("alice", limits=LimitsRecord(**tenant))
    if key is not None:
        world.setup.keys[world.key] = msgspec.structs.replace(world.setup.keys[world.key], limits=key)
    await world.router.apply(world.setup.snapshot())


async def ask(world: World, path: str = "/generate", body: Any = BODY, **given: Any) -> Peer:
    peer = Peer(world, path, body, **given)
    await peer.wait()
    return peer


def events(tmp_path: Path) -> list[UsageEvent]:
    return [
        msgspec.json.decode(item[1], type=UsageEvent)
        for path in sorted((tmp_path / "state" / "spool").glob("*.seg"))
        for item in scan(path.read_bytes())
        if isinstance(item, tuple)
    ]


def head(peer: Peer) -> dict[str, str]:
    """Headers of the answer; those of a stream are in its bytes."""
    if peer.headers:
        return peer.headers
    lines = peer.data.partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_every_answer_tells_what_remains(world: World, path: str, body: Any) -> None:
    await limit(world, LimitsRecord(requests_per_minute=9), requests_per_minute=50, tokens_per_minute=1_000)
    for number in (1, 2):
        peer = await ask(world, path, body)
        found = head(peer)
        assert found["x-ratelimit-limit-requests"] == "9"
        assert found["x-ratelimit-remaining-requests"] == str(9 - number)
        assert found["x-ratelimit-reset-requests"] in ("1m0s", "1m1s", "1m2s")
        assert found["x-ratelimit-limit-tokens"] == "1000"
        assert 1_000 - COST * number <= int(found["x-ratelimit-remaining-tokens"]) < 1_000
    # A refusal of another kind says so as well, and has consumed nothing.
    refused = await ask(world, path, {**body, "parameters": {"max_new_tokens": 0}, "max_tokens": 0})
    assert refused.status in (400, 422)
    assert refused.headers["x-ratelimit-remaining-requests"] == "7"


async def test_without_limits_nothing_is_told(world: World) -> None:
    assert not [name for name in head(await ask(world)) if "ratelimit" in name]


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"requests_per_minute": 0}, "rate_limit_exceeded"),
        ({"tokens_per_minute": COST - 1}, "rate_limit_exceeded"),
        ({"concurrent": 0}, "rate_limit_exceeded"),
        ({"tokens_per_day": COST - 1}, "insufficient_quota"),
        ({"tokens_per_month": COST - 1}, "insufficient_quota"),
    ],
)
async def test_a_refusal_in_each_dialect(world: World, tmp_path: Path, limits: dict[str, int], code: str) -> None:
    await limit(world, **limits)
    for path, body in WAYS:
        peer = await ask(world, path, body)
        assert peer.status == 429
        answer = json.loads(peer.data)
        if path.startswith("/v1"):
            kind = "insufficient_quota" if code == "insufficient_quota" else "rate_limit_error"
            assert (answer["error"]["type"], answer["error"]["code"]) == (kind, code)
            text = answer["error"]["message"]
        else:
            assert answer["error_type"] == "overloaded"
            text = answer["error"]
        assert "tenant" in text
        assert " remaining" in text
        assert 1 <= int(peer.headers["retry-after"]) <= 120
        assert 0 <= int(peer.headers["retry-after"]) * 1_000 - int(peer.headers["retry-after-ms"]) < 1_000
        assert peer.headers["x-should-retry"] == "false"
    assert events(tmp_path) == []
    page = world.router.metrics.page().decode()
    lines = [line for line in page.splitlines() if line.startswith("fairlane_rejected_total{") and f'"{code}"' in line]
    assert sum(float(line.split()[-1]) for line in lines) == len(WAYS)


async def test_just_enough_is_enough(world: World) -> None:
    await limit(world, tokens_per_minute=COST, tokens_per_day=COST, tokens_per_month=COST, concurrent=1)
    assert (await ask(world)).status == 200
    assert (await ask(world)).status == 429


async def test_every_sequence_of_best_of_is_reserved_for(world: World) -> None:
    await limit(world, tokens_per_minute=COST + 4)
    parameters = {"max_new_tokens": 5, "best_of": 2, "do_sample": True}
    refused = await ask(world, "/generate", {"inputs": "a b c", "parameters": parameters})
    assert refused.status == 429, refused.data
    assert (await ask(world)).status == 200


async def test_what_costs_nothing(world: World) -> None:
    await limit(world, requests_per_minute=1, tokens_per_day=COST, concurrent=1)
    for path, body in (
        ("/v1/completions", {**COMPLETION, "model": "gpt-4"}),
        ("/tokenize", {"inputs": "a b c"}),
        ("/nowhere", {}),
        ("/v1/completions", {**COMPLETION, "prompt": [1]}),
        ("/v1/chat/completions", {"model": "main", "messages": [{"role": "user", "content": "Hi"}]}),
    ):
        assert (await ask(world, path, body)).status != 429
    for path in ("/v1/models", "/info", "/health"):
        assert (await ask(world, path, None, method="GET")).status == 200
    assert (await ask(world)).status == 200


async def test_a_gate_behind_the_admission_gives_everything_back(world: World) -> None:
    """The scheduler refuses it, the books are full, or the router drains: the minute and the quota are whole."""
    world.setup.scheduling = {"policy": "rpm", "rpm_limit": 1}
    await limit(world, requests_per_minute=2, tokens_per_minute=2 * COST, tokens_per_day=2 * COST, concurrent=1)
    assert (await ask(world)).status == 200
    for path, body in WAYS:
        peer = await ask(world, path, body)
        assert (peer.status, b"its limit is 1" in peer.data) == (429, True)
        assert peer.headers["x-ratelimit-remaining-requests"] == "1"
        assert peer.headers["x-ratelimit-remaining-tokens"] == "8"
    world.setup.scheduling = {}
    await world.router.apply(world.setup.snapshot())

    ledger = world.router.ledger
    bound, ledger._max_overflow_events = ledger._max_overflow_events, 0
    assert (await ask(world)).status == 503
    ledger._max_overflow_events = bound

    world.router.is_draining = True
    assert (await ask(world)).status == 503
    world.router.is_draining = False
    assert (await ask(world)).status == 200


@pytest.mark.parametrize("moment", ["before the first token", "streaming"])
async def test_a_client_that_leaves_is_settled_by_what_it_got(world: World, tmp_path: Path, moment: str) -> None:
    await limit(world, tokens_per_day=1_000, tokens_per_minute=1_000, concurrent=1)
    world.generation = stream(3 if moment == "streaming" else 0, ending=Ending.HANG)
    peer = Peer(world, "/generate_stream", BODY)
    limits = world.router.limits
    if moment == "streaming":
        await until(lambda: b"t3" in peer.data)
        assert limits.tokens == COST
    else:
        await until(lambda: limits.count == 1)
    peer.exchange.connection_lost()
    await peer.wait()
    assert (limits.count, limits.tokens) == (0, 0)
    (event,) = events(tmp_path)
    day = event.arrived_at_us // 86_400_000_000
    used = event.prompt_tokens + event.output_tokens
    assert used == (6 if moment == "streaming" else 0)
    assert world.router.quotas.used("ten_alice", day) == (used, used)
    assert list(limits._scopes["ten_alice"].window.sums) == [1, used]  # type: ignore[union-attr]


async def test_a_request_that_fails_on_every_backend_is_settled(world: World) -> None:
    """The second is refused as the suspect it has become: behind its admission."""
    await limit(world, tokens_per_day=1_000, concurrent=1)
    error = b'{"error":"Request failed during generation: out","error_type":"generation"}'
    world.generation = Script(status=424, pieces=(error,))
    for _ in range(2):
        assert (await ask(world)).status == 422
        assert world.router.limits.count == 0


async def test_two_at_once_and_not_three(world: World) -> None:
    await limit(world, concurrent=2)
    world.generation = stream(3, ending=Ending.HANG)
    peers = [Peer(world, "/generate_stream", BODY) for _ in range(2)]
    await until(lambda: world.router.limits.count == 2)
    refused = await ask(world)
    assert (refused.status, "x-should-retry" in refused.headers) == (429, False)
    peers[0].exchange.connection_lost()
    await peers[0].wait()
    world.generation = stream(5)
    assert (await ask(world)).status == 200
    peers[1].exchange.connection_lost()
    await peers[1].wait()


async def test_beyond_the_soft_quota_the_lowest_tier_serves(world: World, tmp_path: Path) -> None:
    world.setup.tiers.append(TierRecord(name="batch", rank=50))
    given = {"tiers": ["interactive", "standard", "batch"], "default_tier": "interactive"}
    world.setup.tenant("alice", limits=LimitsRecord(soft_tokens_per_day=COST), **given)
    await world.router.apply(world.setup.snapshot())
    served = [head(await ask(world))["x-fairlane-tier"] for _ in range(2)]
    assert served == ["interactive", "batch"]
    first, second = events(tmp_path)
    assert (first.tier, second.tier) == ("interactive", "batch")
    (reason,) = second.reasons
    assert reason.cause == "soft_quota"
    assert reason.text.startswith("tier batch instead of interactive: this tenant has used 8 tokens of this day")
    assert reason.text in second.explanation


async def test_a_restart_knows_what_was_used(tmp_path: Path) -> None:
    world = World()
    world.setup.tenant("alice", limits=LimitsRecord(tokens_per_day=COST * 2 - 1))
    async with running(tmp_path, world):
        assert (await ask(world)).status == 200
        assert (await ask(world)).status == 429
    async with running(tmp_path, world):
        peer = await ask(world)
        assert peer.status == 429
        assert b"7 remaining" in peer.data


async def test_a_router_without_totals_says_so(world: World) -> None:
    from router_ext.gateway.admin import _state

    await limit(world, tokens_per_day=1_000)
    found = _state(world.router)["limits"]
    assert found["totals"] == "none yet: only what this router has served counts"
    assert found["minutes"] == "of this router: no Valkey is configured"
    page = world.router.metrics.page().decode()
    assert "fairlane_limit_reservations 0.0" in page
    assert "fairlane_limit_totals_age_seconds" not in page
    assert "fairlane_limit_store_up" not in page


async def test_its_tenant_is_told_why_the_tier_is_lower(world: World) -> None:
    world.setup.tenant("alice", limits=LimitsRecord(soft_tokens_per_day=0), default_tier="interactive")
    await world.router.apply(world.setup.snapshot())
    assert (await ask(world, headers={"x-request-id": "mine"})).status == 200
    told = json.loads((await ask(world, "/v1/requests/mine", None, method="GET")).data)
    (found,) = told["requests"]
    assert found["tier"] == "standard"
    assert found["tier_reason"].startswith("tier standard instead of interactive")
