"""Requests that no usable backend could hold: they wait where they hold up nobody, and come back where they stood."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from router_ext.core.actions import Dispatch, Expire, Reject, RejectCode, SetTimer
from router_ext.core.events import (
    Cancelled,
    Failed,
    Finished,
    PromptMeasured,
    Reconfigured,
    SliceEnded,
    TimerFired,
)
from router_ext.core.ids import RequestId
from router_ext.core.scheduler import Scheduler
from tests.unit.core.builders import BATCH, CHAT, arrival, dispatched, down, pool, said, started, tokens, up

SMALL, LARGE = "bke_0", "bke_1"
UNEQUAL: dict[str, Any] = {"kv": [301, 1_001]}


def finished(name: str) -> Finished:
    return Finished(request_id=RequestId(name))


def failed(name: str, prompt: int) -> Failed:
    return Failed(request_id=RequestId(name), is_retryable=True, next_prompt_tokens=prompt)


def parked(scheduler: Scheduler) -> list[str]:
    return [row["request"] for row in scheduler.snapshot()["requests"] if row["is_parked"]]


def lost(**fields: Any) -> Scheduler:
    """A pool whose large backend is down."""
    scheduler = started(pool(**UNEQUAL, **fields))
    scheduler.handle(down(LARGE), 0.0)
    return scheduler


@pytest.mark.parametrize("policy", ["slo-fair", "fifo"])
def test_a_request_of_a_lost_backend_holds_up_nobody(policy: str) -> None:
    scheduler = started(pool(policy=policy, **UNEQUAL))
    assert dispatched(scheduler.handle(arrival("large", "a", prompt=600), 1.0)) == ["large"]
    scheduler.handle(down(LARGE), 2.0)
    assert scheduler.handle(failed("large", 600), 2.0) == [SetTimer(at_s=32.0)]
    assert parked(scheduler) == ["large"]
    for turn in range(50):
        name = f"b{turn}"
        assert dispatched(scheduler.handle(arrival(name, "b", prompt=200), 3.0 + turn / 10)) == [name]
        scheduler.handle(finished(name), 3.05 + turn / 10)
        assert scheduler.audit() == []
    assert dispatched(scheduler.handle(up(LARGE), 9.0)) == ["large"]
    assert scheduler.audit() == []


def test_an_arrival_of_that_size_waits_and_expires_with_the_sizes() -> None:
    scheduler = lost(backend_wait_s=10.0)
    assert scheduler.handle(arrival("large", prompt=600), 1.0) == [SetTimer(at_s=11.0)]
    assert scheduler.stats().held_by == "no_backend"
    assert scheduler.handle(TimerFired(), 10.9) == [SetTimer(at_s=11.0)]
    (expired,) = scheduler.handle(TimerFired(), 11.0)
    assert isinstance(expired, Expire)
    assert expired.code is RejectCode.NO_BACKEND
    assert "600 input tokens and 100 new tokens have waited 10 s" in expired.detail
    assert "bke_0, holds 301 tokens" in expired.detail
    assert scheduler.stats().held_by == "none"


def test_the_wait_of_a_continuation_counts_from_the_loss_not_from_its_arrival() -> None:
    scheduler = started(pool(backend_wait_s=10.0, tiers=[{**BATCH, "max_queue_wait_s": 5.0}], **UNEQUAL))
    scheduler.handle(arrival("large", prompt=600), 1.0)
    scheduler.handle(tokens("large", 10), 2.0)
    scheduler.handle(down(LARGE), 100.0)
    scheduler.handle(failed("large", 610), 100.0)
    assert scheduler.handle(TimerFired(), 109.9) == [SetTimer(at_s=110.0)]
    (expired,) = scheduler.handle(TimerFired(), 110.0)
    assert isinstance(expired, Expire)
    assert expired.code is RejectCode.NO_BACKEND


def test_the_clock_runs_on_while_everything_is_down_and_through_unrelated_changes() -> None:
    scheduler = lost(backend_wait_s=10.0)
    scheduler.handle(arrival("large", prompt=600), 1.0)
    scheduler.handle(down(SMALL), 8.0)
    scheduler.handle(up(SMALL), 9.0)
    scheduler.handle(Reconfigured(config=pool(tenants={"a": 3.0}, backend_wait_s=10.0, **UNEQUAL)), 9.5)
    assert [type(action) for action in scheduler.handle(TimerFired(), 11.0)] == [Expire]


def test_the_time_limit_of_the_tier_applies_to_parked_requests() -> None:
    scheduler = lost(tiers=[{**BATCH, "max_queue_wait_s": 5.0}])
    scheduler.handle(arrival("large", prompt=600), 1.0)
    (expired,) = scheduler.handle(TimerFired(), 6.0)
    assert isinstance(expired, Expire)
    assert expired.code is RejectCode.QUEUE_TIMEOUT


def test_waiting_requests_are_parked_when_their_backend_is_cordoned() -> None:
    scheduler = started(pool(**UNEQUAL))
    scheduler.handle(arrival("r0", "a", prompt=900), 1.0)
    scheduler.handle(arrival("large", "a", prompt=600), 1.0)
    scheduler.handle(arrival("small", "b", prompt=200), 1.0)
    config = pool(**UNEQUAL)
    large = up(LARGE).backend
    cordoned = replace(config, backends={**config.backends, large: replace(config.backends[large], is_cordoned=True)})
    scheduler.handle(Reconfigured(config=cordoned), 2.0)
    assert parked(scheduler) == ["large"]
    scheduler.handle(finished("r0"), 3.0)
    assert parked(scheduler) == ["large"]
    assert dispatched(scheduler.handle(Reconfigured(config=config), 4.0)) == ["large"]


def test_a_slice_becomes_as_small_as_the_usable_backend_asks() -> None:
    scheduler = lost()
    (start,) = scheduler.handle(arrival("r0", prompt=100, cap=800), 1.0)
    assert isinstance(start, Dispatch)
    assert (start.backend, start.slice_tokens) == (SMALL, 201)
    scheduler.handle(tokens("r0", 201), 2.0)
    scheduler.handle(SliceEnded(request_id=RequestId("r0"), dropped_tokens=0, next_prompt_tokens=301), 2.0)
    assert parked(scheduler) == ["r0"]
    (again,) = scheduler.handle(up(LARGE), 3.0)
    assert isinstance(again, Dispatch)
    assert (again.backend, again.slice_tokens) == (LARGE, 599)


def test_a_prompt_that_proves_shorter_brings_its_request_back_and_a_longer_one_parks_it() -> None:
    scheduler = lost()
    scheduler.handle(arrival("r0", prompt=600), 1.0)
    assert dispatched(scheduler.handle(PromptMeasured(request_id=RequestId("r0"), prompt_tokens=200), 1.1)) == ["r0"]
    scheduler.handle(arrival("r1", prompt=200), 1.2)
    scheduler.handle(PromptMeasured(request_id=RequestId("r1"), prompt_tokens=600), 1.3)
    assert parked(scheduler) == ["r1"]
    assert scheduler.audit() == []


def test_parked_requests_count_against_the_limits_of_their_queues() -> None:
    scheduler = lost(max_queued=2)
    scheduler.handle(arrival("r0", "a", prompt=600), 1.0)
    scheduler.handle(arrival("r1", "b", prompt=600), 1.0)
    refused = [action for action in scheduler.handle(arrival("r2", prompt=600), 1.0) if isinstance(action, Reject)]
    assert [action.code for action in refused] == [RejectCode.QUEUE_FULL]
    stats = scheduler.stats()
    assert (stats.queued, stats.parked, stats.queued_by_tier["batch"]) == (2, 2, 2)
    assert [tenant.queued for tenant in stats.tenants] == [1, 1]


def test_a_parked_request_can_be_cancelled() -> None:
    scheduler = lost()
    scheduler.handle(arrival("r0", prompt=600), 1.0)
    scheduler.handle(Cancelled(request_id=RequestId("r0")), 2.0)
    assert scheduler.stats().queued == 0
    assert scheduler.audit() == []
    assert dispatched(scheduler.handle(up(LARGE), 3.0)) == []


def test_everybody_comes_back_in_the_place_it_had() -> None:
    scheduler = lost()
    scheduler.handle(arrival("running", prompt=200), 1.0)
    for number in range(6):
        scheduler.handle(arrival(f"r{number}", prompt=600 if number % 2 else 190, cap=101), 1.0)
    assert parked(scheduler) == ["r1", "r3", "r5"]
    order = []
    actions = [*scheduler.handle(up(LARGE), 2.0), *scheduler.handle(down(SMALL), 2.0)]
    actions += scheduler.handle(finished("running"), 2.0)
    while names := dispatched(actions):
        order += names
        actions = [action for name in names for action in scheduler.handle(finished(name), 3.0)]
    assert order == [f"r{number}" for number in range(6)]


@pytest.mark.parametrize("policy", ["slo-fair", "fifo"])
def test_a_retried_request_goes_first_when_its_backend_comes_back(policy: str) -> None:
    scheduler = started(pool(policy=policy, **UNEQUAL))
    scheduler.handle(arrival("first", prompt=600, cap=300), 1.0)
    scheduler.handle(arrival("second", prompt=600, cap=300), 1.0)
    scheduler.handle(down(LARGE), 2.0)
    scheduler.handle(failed("first", 600), 2.0)
    assert parked(scheduler) == ["first", "second"]
    assert dispatched(scheduler.handle(up(LARGE), 3.0)) == ["first"]


def test_a_tenant_is_not_backlogged_by_what_is_parked() -> None:
    """Otherwise its counter would stay the floor, and it would come back with credit for the whole outage."""
    scheduler = lost(tenants={"a": 1.0, "b": 1.0, "c": 1.0})
    scheduler.handle(arrival("large", "a", "chat", prompt=600), 1.0)
    for number in range(10):
        scheduler.handle(arrival(f"b{number}", "b", prompt=200), 1.0)
        scheduler.handle(arrival(f"c{number}", "c", prompt=200), 1.0)
    for number in range(5):
        for name in (f"b{number}", f"c{number}"):
            scheduler.handle(tokens(name, 50), 2.0)
            scheduler.handle(finished(name), 2.0)
    floor = min(t.raw_counter for t in scheduler.stats().tenants if t.tenant != "a")
    assert floor > 0
    scheduler.handle(down(SMALL), 3.0)
    scheduler.handle(up(SMALL), 3.0)
    scheduler.handle(
        Reconfigured(config=pool(tiers=[CHAT, BATCH], tenants={"b": 1.0, "c": 1.0, "a": 1.0}, **UNEQUAL)), 4.0
    )
    scheduler.handle(up(LARGE), 5.0)
    own = next(t.raw_counter for t in scheduler.stats().tenants if t.tenant == "a")
    assert own >= floor


def test_losing_one_of_two_equal_backends_looks_at_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = started(pool(kv=[301, 301]))
    for number in range(4):
        scheduler.handle(arrival(f"r{number}", prompt=200), 1.0)
    looked: list[object] = []
    monkeypatch.setattr(type(scheduler._limits), "recheck", lambda self, *rest: looked.append(rest))
    scheduler.handle(down("bke_1"), 2.0)
    scheduler.handle(up("bke_1"), 3.0)
    assert looked == []


def test_an_explanation_says_that_no_usable_backend_could_hold_it() -> None:
    scheduler = lost()
    scheduler.handle(arrival("large", prompt=600), 1.0)
    scheduler.handle(arrival("other", "b", prompt=200), 2.0)
    assert "no backend that could hold it was usable (1.000 s)" in said(scheduler, "large")
    scheduler.handle(up(LARGE), 5.0)
    assert "no backend that could hold it was usable (4.000 s)" in said(scheduler, "large")
