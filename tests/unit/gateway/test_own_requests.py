"""``GET /v1/requests/{id}``: what a tenant reads of its own requests, and that it reads nothing of others'."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.routers import backend
from support.scripted import BODY, Peer, World, running, stream, until

from router_ext.backends.fake import Ending
from router_ext.core.explain import Reason
from router_ext.core.ids import RequestId
from router_ext.gateway import explained, own_view
from router_ext.gateway.refused import Refusals, Refused
from router_ext.wire.controlplane import LimitsRecord, TenantRecord

POOL = "pol_main"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A backend with room for one request of ``BODY`` at a time."""
    made = World()
    made.setup.backends = [backend(1, "opaque7", kv_tokens=12, block_size=1)]
    async with running(tmp_path, made) as opened:
        yield opened


async def asked(world: World, wanted: str, *, key: str | None = None) -> tuple[int, Any]:
    peer = Peer(world, f"/v1/requests/{wanted}", {}, method="GET", key=key)
    await peer.wait()
    return peer.status, json.loads(peer.data)


async def own(world: World, wanted: str, *, key: str | None = None) -> dict[str, Any]:
    status, answer = await asked(world, wanted, key=key)
    assert status == 200, answer
    (found,) = answer["requests"]
    return dict(found)


async def hold(world: World, **named: Any) -> Peer:
    """A stream that keeps the backend until its client leaves."""
    world.generation = stream(2, ending=Ending.HANG)
    peer = Peer(world, "/generate_stream", BODY, **named)
    await until(lambda: peer.data.count(b"data: ") == 2)
    world.generation = stream(5)
    return peer


async def queued(world: World, wanted: str, **named: Any) -> Peer:
    peer = Peer(world, "/generate", BODY, headers={"x-request-id": wanted}, **named)
    await until(lambda: any(call.request_id == wanted for call in world.router.engines[POOL].calls))
    return peer


async def served(world: World, wanted: str) -> None:
    await Peer(world, "/generate", BODY, headers={"x-request-id": wanted}).wait()


async def test_a_request_tells_its_tenant_how_it_goes(world: World) -> None:
    other = world.setup.key("mallory")
    await world.router.apply(world.setup.snapshot())
    busy = await hold(world, key=other)
    first, second = await queued(world, "mine/1"), await queued(world, "mine/2")
    waiting = await own(world, "mine/2")
    assert (waiting["state"], waiting["outcome"], waiting["slices"]) == ("queued", None, 0)
    assert waiting["queue"] == {"position": 2, "own_queued": 2, "wait_s": None}
    assert {wait["cause"] for wait in waiting["waits"]} >= {"wait"}
    assert (await own(world, "mine/1"))["queue"]["position"] == 1
    busy.exchange.connection_lost()
    for peer in (busy, first, second):
        await peer.wait()
    ended = await own(world, "mine/2")
    assert (ended["state"], ended["outcome"], ended["finish_reason"]) == ("ended", "completed", "length")
    assert ended["queue"] is None
    assert ended["tokens"] == {
        "prompt": 3,
        "output": 5,
        "predicted_output": ended["tokens"]["predicted_output"],
        "max_output": 5,
        "recomputed": 0,
    }
    steps = [(moment["step"], moment["backend"]) for moment in ended["timeline"]]
    assert steps == [
        ("queued", None),
        ("dispatched", "backend 1"),
        ("first_token", "backend 1"),
        ("finished", None),
    ]
    seconds = ended["seconds"]
    assert 0 <= seconds["overhead"] <= seconds["first_token"] <= seconds["total"]
    # Another key of the same tenant sees it, by either id; the books agree.
    event = ended["event"]
    sibling = world.setup.key("alice")
    await world.router.apply(world.setup.snapshot())
    assert await own(world, event, key=sibling) == ended
    (operators,) = world.router.engines[POOL].explain("mine/2")
    assert [moment["step"] for moment in operators["timeline"]] == [step for step, _ in steps]
    assert (operators["event"], operators["output_tokens"]) == (event, 5)
    assert "opaque7" not in json.dumps(ended)


async def test_a_running_request_is_explained_while_it_runs(world: World) -> None:
    world.generation = stream(2, ending=Ending.HANG)
    peer = Peer(world, "/generate_stream", BODY, headers={"x-request-id": "mine"})
    await until(lambda: peer.data.count(b"data: ") == 2)
    now = await own(world, "mine")
    assert (now["state"], now["queue"], now["slices"], now["tokens"]["output"]) == ("running", None, 1, 2)
    peer.exchange.connection_lost()
    await peer.wait()
    assert (await own(world, "mine"))["outcome"] == "cancelled"


async def test_others_learn_as_much_as_of_a_request_that_never_was(world: World) -> None:
    stranger = world.setup.key("mallory")
    await world.router.apply(world.setup.snapshot())
    await served(world, "mine")
    event = (await own(world, "mine"))["event"]
    answers = [await asked(world, wanted, key=stranger) for wanted in ("mine", event, "never", "evt_0", "")]
    assert [status for status, _ in answers] == [404] * 5
    assert {json.dumps(body) for _, body in answers} == {json.dumps(answers[0][1])}
    assert answers[0][1]["error"]["code"] == "request_not_found"
    assert (await asked(world, "mine", key="sk-fl-wrong"))[0] == 401


async def test_the_memory_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explained, "_REMEMBERED", 3)
    for number in range(5):
        await served(world, f"mine{number % 2}")
    status, answer = await asked(world, "mine0")
    assert (status, len(answer["requests"])) == (200, 2)
    arrived = [found["arrived_at"] for found in answer["requests"]]
    assert arrived == sorted(arrived, reverse=True)
    kept = world.router.engines[POOL].books.explanations
    assert (len(kept._ended), sum(map(len, kept._events.values())), kept._live) == (3, 3, {})


async def refused(world: World, wanted: str, body: dict[str, Any], **named: Any) -> Peer:
    peer = Peer(world, "/v1/completions", body, headers={"x-request-id": wanted}, **named)
    await peer.wait()
    assert peer.status >= 400
    return peer


REFUSED = {
    "before its pool was known": ({"prompt": "a", "model": "nobodys"}, False),
    "as it was written": ({"prompt": "a", "max_tokens": 9_000_000}, True),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_refused_request_tells_its_tenant_why(world: World, case: str) -> None:
    body, has_pool = REFUSED[case]
    peer = await refused(world, "mine", body)
    told = json.loads(peer.data)["error"]
    found = await own(world, "mine")
    assert (found["state"], found["outcome"], found["error_code"]) == ("ended", "refused", told["code"])
    assert found["refusal"]["message"] == told["message"]
    assert found["refusal"]["status"] == peer.status
    assert (found["model"] is not None) == has_pool
    assert set(await own_fields(world)) <= set(found)
    page = world.router.metrics.page().decode()
    assert f'code="{told["code"]}"' in page
    # As much as nothing for anybody else, and in no books.
    stranger = world.setup.key("mallory")
    await world.router.apply(world.setup.snapshot())
    assert (await asked(world, "mine", key=stranger))[0] == 404
    assert (await asked(world, "mine", key="sk-fl-wrong"))[0] == 401
    engine = world.router.engines[POOL]
    operators = engine.explain("mine") if has_pool else list(world.router.refusals.find("mine"))
    assert len(operators) == 1
    assert not engine.books.explanations._live
    assert len(engine.books.explanations._events) == 1


async def own_fields(world: World) -> dict[str, Any]:
    """The fields of a request that was served."""
    await served(world, "served")
    return await own(world, "served")


async def test_a_limit_tells_its_own_numbers(world: World) -> None:
    world.setup.tenants["alice"] = TenantRecord(
        tenant="ten_alice",
        name="alice",
        tiers=["standard"],
        default_tier="standard",
        limits=LimitsRecord(requests_per_minute=1),
    )
    await world.router.apply(world.setup.snapshot())
    await served(world, "first")
    await refused(world, "second", {"prompt": "a", "max_tokens": 1})
    found = await own(world, "second")
    assert found["refusal"]["status"] == 429
    assert found["refusal"]["limits"]["x-ratelimit-limit-requests"] == "1"
    assert found["refusal"]["retry_after_s"] > 0


async def test_a_full_queue_is_told(world: World) -> None:
    world.setup.scheduling = {"max_queued": 1}
    await world.router.apply(world.setup.snapshot())
    peers = [await hold(world), await queued(world, "waits")]
    await refused(world, "late", {"prompt": "a b c", "max_tokens": 5})
    found = await own(world, "late")
    assert (found["outcome"], found["error_code"], found["refusal"]["status"]) == ("refused", "queue_full", 429)
    (operators,) = world.router.engines[POOL].explain("late")
    assert (operators["event"], operators["error_code"]) == (found["event"], "queue_full")
    assert (await own(world, found["event"])) == found
    for peer in peers:
        peer.exchange.connection_lost()
        await peer.wait()


async def test_strangers_leave_nothing(world: World) -> None:
    await refused(world, "theirs", {"prompt": "a"}, key="sk-fl-wrong")
    assert not len(world.router.refusals)
    assert (await asked(world, "theirs"))[0] == 404


def refusal(number: int, tenant: str) -> Refused:
    return Refused(
        request=f"r{number}",
        event=None,
        tenant=tenant,
        tier=None,
        tier_reason=None,
        arrived_at_us=number,
        code="rate_limited",
        status=429,
        message="no",
        retry_after_s=None,
        limits={},
        total_s=0.0,
    )


def test_what_is_remembered_of_refusals_is_bounded_and_no_tenant_has_all_of_it() -> None:
    kept = Refusals()
    kept.remember(refusal(0, "quiet"))
    for number in range(1, 3_000):
        kept.remember(refusal(number, f"flood{number % 8}"))
    assert len(kept) == 8 * 64 + 1
    assert [each.tenant for each in kept.find("r0", "quiet")] == ["quiet"]
    for number in range(3_000, 9_000):
        kept.remember(refusal(number, f"ten{number}"))
    assert (len(kept), len(kept._of)) == (1_024, 1_024)
    assert not list(kept.find("r0"))
    assert [each.request for each in kept.find("r8999")] == ["r8999"]


def told_of_others(view: Any, strangers: set[str]) -> list[str]:
    text = json.dumps(view)
    return [word for word in strangers if word in text]


async def _mix(world: World, seed: int) -> list[str]:
    """Names and ids of others that a random mix of three tenants lets slip."""
    rng = random.Random(seed)
    names = ["alice", "mallory", "trudy"]
    keys = {"alice": world.key} | {name: world.setup.key(name) for name in names[1:]}
    for name in names:
        world.setup.tenants[name] = TenantRecord(
            tenant=f"ten_{name}", name=name, tiers=["standard", "interactive"], default_tier="standard"
        )
    await world.router.apply(world.setup.snapshot())
    engine = world.router.engines[POOL]
    slips: list[str] = []
    peers: list[tuple[str, Peer]] = []

    async def look() -> None:
        known = [(line["event"], line["request"], line["tenant"]) for line in engine.requests(1_000)]
        for name in names:
            secret = {word for event, request, tenant in known if tenant != f"ten_{name}" for word in (event, request)}
            secret |= {f"ten_{other}" for other in names if other != name}
            secret |= {other for other in names if other != name} | {"bke_", "opaque7", "127.0.0.1"}
            for event, request, tenant in known:
                for wanted in (event, request):
                    status, answer = await asked(world, wanted, key=keys[name])
                    assert status == (200 if tenant == f"ten_{name}" else 404)
                    if status == 200:
                        slips.extend(told_of_others(answer, secret))

    for number in range(12):
        name = rng.choice(names)
        world.generation = stream(
            rng.randint(1, 5), ending=rng.choice([Ending.CLEAN, Ending.CLEAN, Ending.CUT, Ending.HANG])
        )
        wanted = f"rq{number:02d}{name[::-1]}"
        peers.append((name, Peer(world, "/generate_stream", BODY, key=keys[name], headers={"x-request-id": wanted})))
        await until(lambda: any(line["request"] == wanted for line in engine.requests(1_000)))  # noqa: B023
        if rng.random() < 0.4:
            rng.choice(peers)[1].exchange.connection_lost()
        if rng.random() < 0.3:
            missing = f"no{number:02d}{name[::-1]}"
            await refused(world, missing, {"prompt": "a", "max_tokens": 9_000_000}, key=keys[name])
            for each in names:
                status, answer = await asked(world, missing, key=keys[each])
                assert status == (200 if each == name else 404)
                slips.extend(told_of_others(answer, {f"ten_{other}" for other in names if other != each}))
    await look()
    world.generation = stream(5)
    for _, peer in peers:
        peer.exchange.connection_lost()
        await peer.wait()
    await look()
    return slips


@pytest.mark.parametrize("seed", range(3))
async def test_no_answer_of_a_random_mix_names_anybody_else(world: World, seed: int) -> None:
    assert not await _mix(world, seed)


async def test_that_test_notices_a_name(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = own_view._place

    def telling(line: Any) -> dict[str, Any]:
        return {**plain(line), "behind": "ten_mallory"}

    monkeypatch.setattr(own_view, "_place", telling)
    assert await _mix(world, 0)


def test_others_are_not_counted() -> None:
    words = "waited 1.5 s in 1 turn; meanwhile 2 requests of this tenant and 41 of others were dispatched"
    wait = Reason(cause="wait", seconds=1.5, counts={"turns": 1, "own": 2, "others": 41}, text=words)
    share = Reason(cause="share", seconds=None, counts={"own": 2, "others": 41}, text="... (41 dispatched first)")
    for reason in (wait, share):
        told = own_view._wait(reason)
        assert "41" not in json.dumps(told)
        assert told["counts"].get("own") == 2
    assert "2 requests of this tenant and some of others" in own_view._wait(wait)["text"]


async def test_headers_of_answers_and_refusals(world: World) -> None:
    stranger = world.setup.key("mallory", may_choose_tier=True)
    await world.router.apply(world.setup.snapshot())
    whole = Peer(world, "/generate", BODY, headers={"x-request-id": "mine"})
    await whole.wait()
    assert (whole.headers["x-request-id"], whole.headers["x-fairlane-tier"]) == ("mine", "standard")
    assert int(whole.headers["x-fairlane-queue-time"]) >= 0
    overhead_ms = float(whole.headers["x-fairlane-overhead"])
    assert 0 < overhead_ms < 60_000
    assert round(overhead_ms / 1_000, 6) == pytest.approx((await own(world, "mine"))["seconds"]["overhead"], abs=1e-6)
    streamed = Peer(world, "/v1/completions", {"prompt": "a b c", "max_tokens": 5, "stream": True})
    head = (await streamed.wait()).partition(b"\r\n\r\n")[0]
    for name in (b"x-request-id", b"x-fairlane-tier", b"x-fairlane-queue-time", b"x-fairlane-overhead"):
        assert head.count(b"\r\n" + name + b": ") == 1
    refused = Peer(world, "/generate", {"inputs": ""}, key=stranger, headers={"x-fairlane-tier": "interactive"})
    await refused.wait()
    assert (refused.status, refused.headers["x-fairlane-tier"]) == (422, "interactive")
    unknown = Peer(world, "/generate", BODY, key="sk-fl-wrong")
    await unknown.wait()
    assert unknown.status == 401
    assert "x-fairlane-tier" not in unknown.headers
    assert unknown.headers["x-request-id"].startswith("req_")


async def test_a_place_in_line_counts_the_better_tier_first(world: World) -> None:
    key = world.setup.key("alice", may_choose_tier=True)
    await world.router.apply(world.setup.snapshot())
    busy = await hold(world)
    peers = [await queued(world, "slow"), await queued(world, "late")]
    fast = Peer(world, "/generate", BODY, key=key, headers={"x-request-id": "fast", "x-fairlane-tier": "interactive"})
    engine = world.router.engines[POOL]
    await until(lambda: any(call.request_id == "fast" for call in engine.calls))
    places = {name: (await own(world, name))["queue"]["position"] for name in ("slow", "late", "fast")}
    assert places == {"fast": 1, "slow": 2, "late": 3}
    assert engine.scheduler.in_line(RequestId("none")) is None
    busy.exchange.connection_lost()
    for peer in (busy, fast, *peers):
        await peer.wait()


async def test_usage_is_told_by_the_control_plane_and_by_nobody_else(world: World) -> None:
    """There is none here; the whole way is in the browser's test, with a control plane."""
    peer = Peer(world, "/v1/usage", {}, method="GET")
    await peer.wait()
    assert (peer.status, json.loads(peer.data)["error"]["code"]) == (404, "usage_not_kept")
    stranger = Peer(world, "/v1/usage", {}, method="GET", key="flk_nobody")
    await stranger.wait()
    assert stranger.status == 401
