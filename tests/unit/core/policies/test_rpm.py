"""The limit of requests per minute: who is refused, what is told, what is remembered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router_ext.core.actions import Action, Dispatch, Reject, RejectCode
from router_ext.core.config import GroupConfig
from router_ext.core.events import Cancelled, Reconfigured
from router_ext.core.ids import RequestId
from router_ext.core.scheduler import Scheduler
from tests.unit.core.builders import arrival, pool, started

WEIGHTS = {"a": 1.0, "b": 2.5, "c": 0.01}


def limited(limit: int = 4) -> Scheduler:
    return started(pool(kv=100_001, policy="rpm", rpm_limit=limit, tenants=WEIGHTS))


def send(scheduler: Scheduler, name: str, now: float, tenant: str = "a") -> Reject | None:
    actions = scheduler.handle(arrival(name, tenant, prompt=10, cap=10), now)
    return next((action for action in actions if isinstance(action, Reject)), None)


@pytest.mark.parametrize(("tenant", "limit"), [("a", 4), ("b", 10), ("c", 1)])
def test_the_limit_goes_by_weight_and_is_never_nothing(tenant: str, limit: int) -> None:
    scheduler = limited()
    refusals = [send(scheduler, f"r{number}", 1.0, tenant) for number in range(limit + 3)]
    assert refusals[:limit] == [None] * limit
    for refusal in refusals[limit:]:
        assert refusal is not None
        assert refusal.code is RejectCode.RATE_LIMITED
        assert f"its limit is {limit} requests per minute" in refusal.detail


def test_others_are_not_limited_by_it() -> None:
    scheduler = limited(1)
    assert send(scheduler, "r1", 1.0) is None
    assert send(scheduler, "r2", 1.0) is not None
    assert send(scheduler, "r3", 1.0, "b") is None


def test_members_of_a_group_have_limits_of_their_own() -> None:
    config = pool(kv=100_001, policy="rpm", rpm_limit=4, tenants={"a": 1.0, "b": 0.5})
    members = {name: replace(share, group="g") for name, share in config.tenants.items()}
    scheduler = started(replace(config, tenants=members, groups={"g": GroupConfig(group="g", weight=9.0)}))
    assert [send(scheduler, f"a{number}", 1.0) is None for number in range(6)] == [True] * 4 + [False] * 2
    assert [send(scheduler, f"b{number}", 1.0, "b") is None for number in range(4)] == [True] * 2 + [False] * 2


@pytest.mark.parametrize("instant", [0.1, 1.7, 1_234_567.891, 86_400.3])
def test_who_comes_again_when_told_to_is_accepted_and_not_before(instant: float) -> None:
    scheduler = limited(2)
    assert send(scheduler, "r1", instant) is None
    assert send(scheduler, "r2", instant + 7.3) is None
    refusal = send(scheduler, "r3", instant + 20.0)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(40.0)
    assert send(scheduler, "early", instant + 59.9) is not None
    assert send(scheduler, "r4", instant + 20.0 + refusal.retry_after_s) is None
    second = send(scheduler, "r5", instant + 61.0)
    assert second is not None
    assert second.retry_after_s == pytest.approx(6.3)


def test_what_was_refused_does_not_count_and_what_was_cancelled_does() -> None:
    scheduler = limited(1)
    assert send(scheduler, "r1", 0.0) is None
    scheduler.handle(Cancelled(request_id=RequestId("r1")), 1.0)
    for number in range(50):
        assert send(scheduler, f"x{number}", 2.0 + number) is not None
    assert send(scheduler, "r2", 60.0) is None


def test_a_changed_limit_gives_nobody_a_new_minute() -> None:
    scheduler = limited(4)
    for number in range(4):
        assert send(scheduler, f"r{number}", float(number)) is None
    scheduler.handle(Reconfigured(config=pool(kv=100_001, policy="rpm", rpm_limit=2, tenants=WEIGHTS)), 5.0)
    refusal = send(scheduler, "r4", 5.0)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(57.0)
    assert send(scheduler, "r5", 61.5) is not None
    assert send(scheduler, "r6", 62.0) is None


def test_what_is_accepted_goes_first_come_first_served() -> None:
    scheduler = started(pool(kv=101, policy="rpm", tenants=WEIGHTS))
    actions: list[Action] = []
    for number, tenant in enumerate("abbaba"):
        actions += scheduler.handle(arrival(f"r{number}", tenant, prompt=60, cap=40), float(number))
    assert [action.request_id for action in actions if isinstance(action, Dispatch)] == ["r0"]
    for number in range(5):
        actions = scheduler.handle(Cancelled(request_id=RequestId(f"r{number}")), 10.0 + number)
        actions += scheduler.handle(arrival(f"x{number}", "a", prompt=60, cap=40), 10.5 + number)
        started_now = [action.request_id for action in actions if isinstance(action, Dispatch)]
        assert started_now == [f"r{number + 1}"]


def test_ten_thousand_tenants_are_remembered_for_a_minute_only() -> None:
    names = {f"t{number}": 1.0 for number in range(10_000)}
    scheduler = started(pool(kv=100_001, policy="rpm", tenants=names, max_queued=100_000))
    for number, name in enumerate(names):
        scheduler.handle(arrival(f"r{number}", name, prompt=10, cap=10), number * 0.001)
        scheduler.handle(Cancelled(request_id=RequestId(f"r{number}")), number * 0.001)
    recent = scheduler._decider._policy._recent  # type: ignore[attr-defined]  # only rpm has one
    assert (len(recent._by_owner), len(recent._all)) == (10_000, 10_000)
    assert send(scheduler, "late", 100.0, "t0") is None
    assert (len(recent._by_owner), len(recent._all)) == (1, 1)
