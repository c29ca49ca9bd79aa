"""FairServe's throttle and its counter, in pools small enough to follow by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from router_ext.core.actions import Reject, RejectCode
from router_ext.core.events import Arrived, Cancelled, Finished, Reconfigured
from router_ext.core.ids import KeyId, RequestId
from router_ext.core.scheduler import Scheduler
from tests.unit.core.builders import arrival, dispatched, pool, started, tokens


def overloaded(**knobs: Any) -> Scheduler:
    """All of the KV is taken by ``z1``, and ``z2`` waits."""
    scheduler = started(
        pool(kv=401, policy="fairserve", tenants={"z": 1.0, "a": 1.0, "b": 1.0}, fairserve_limit=2, **knobs)
    )
    scheduler.handle(request("z1", "z"), 0.0)
    scheduler.handle(request("z2", "z"), 0.0)
    return scheduler


def request(name: str, tenant: str, agent: str | None = None, prompt: int = 300, key: str = "key_1") -> Arrived:
    """Fills the pool: 400 tokens."""
    event = arrival(name, tenant, agent_id=agent, prompt=prompt, cap=400 - prompt)
    return Arrived(request=replace(event.request, key=KeyId(key)))


def refusal(scheduler: Scheduler, event: Arrived, now: float) -> Reject | None:
    return next((action for action in scheduler.handle(event, now) if isinstance(action, Reject)), None)


def done(scheduler: Scheduler, name: str, output: int, now: float) -> list[str]:
    if output:
        scheduler.handle(tokens(name, output), now)
    return dispatched(scheduler.handle(Finished(request_id=RequestId(name)), now))


def test_a_tenant_over_its_limit_cannot_begin_an_interaction_under_overload() -> None:
    scheduler = overloaded()
    assert refusal(scheduler, request("a1", "a", "x"), 1.0) is None
    assert refusal(scheduler, request("a2", "a"), 5.0) is None
    refused = refusal(scheduler, request("a3", "a", "y"), 11.0)
    assert refused is not None
    assert refused.code is RejectCode.RATE_LIMITED
    assert refused.retry_after_s == pytest.approx(50.0)
    assert refusal(scheduler, request("a4", "a", "x"), 11.0) is None
    assert refusal(scheduler, request("b1", "b"), 11.0) is None
    # a1 has left the window by then; a2 and a4 are in it.
    assert refusal(scheduler, request("a5", "a", "y"), 62.0) is not None
    assert refusal(scheduler, request("a6", "a", "y"), 66.0) is None


def test_the_limit_grows_with_the_weight() -> None:
    config = pool(kv=401, policy="fairserve", tenants={"z": 1.0, "a": 3.0}, fairserve_limit=2)
    scheduler = started(config)
    for number in range(2):
        scheduler.handle(request(f"z{number}", "z"), 0.0)
    outcomes = [refusal(scheduler, request(f"a{number}", "a"), 1.0) for number in range(7)]
    assert [outcome is None for outcome in outcomes] == [True] * 6 + [False]


def test_a_key_has_a_limit_of_its_own() -> None:
    scheduler = overloaded(fairserve_key_limit=1)
    assert refusal(scheduler, request("a1", "a", key="k1"), 1.0) is None
    refused = refusal(scheduler, request("a2", "a", key="k1"), 1.0)
    assert refused is not None
    assert "this key" in refused.detail
    assert refusal(scheduler, request("a3", "a", key="k2"), 1.0) is None


def test_an_interaction_that_has_been_silent_for_an_hour_begins_anew() -> None:
    scheduler = overloaded()
    scheduler.handle(request("a1", "a", "x"), 0.0)
    for name in ("a2", "a3"):
        scheduler.handle(request(name, "a", "w"), 3_700.0)
    assert refusal(scheduler, request("a4", "a", "w"), 3_701.0) is None
    assert refusal(scheduler, request("a5", "a", "x"), 3_701.0) is not None


def test_what_goes_on_goes_before_what_begins_whoever_has_the_smaller_counter() -> None:
    scheduler = overloaded()
    scheduler.handle(request("a1", "a", "x"), 0.0)
    scheduler.handle(request("b1", "b"), 0.0)
    scheduler.handle(Cancelled(request_id=RequestId("z2")), 0.0)
    scheduler.handle(request("a2", "a", "x"), 0.5)
    # a1 begins x; its second request, which waits already, goes on with it from then on.
    assert done(scheduler, "z1", 10, 1.0) == ["a1"]
    assert done(scheduler, "a1", 100, 2.0) == ["a2"]
    assert done(scheduler, "a2", 100, 3.0) == ["b1"]


def normal_answers(size_a: int, size_b: int, turns: int = 40) -> dict[str, int]:
    """How many requests each gets done if all of ``a`` have one size and all of ``b`` another."""
    scheduler = started(pool(kv=401, policy="fairserve", tenants={"z": 1.0, "a": 1.0, "b": 1.0}))
    scheduler.handle(request("z1", "z"), 0.0)
    for number in range(turns):
        for tenant in "ab":
            scheduler.handle(request(f"{tenant}{number}", tenant), 0.0)
    outputs = {"z": 1, "a": size_a, "b": size_b}
    counts = {"z": 0, "a": 0, "b": 0}
    running = "z1"
    for turn in range(turns):
        (running,) = done(scheduler, running, outputs[running[0]], 1.0 + turn)
        counts[running[0]] += 1
    return counts


@pytest.mark.parametrize(("size_a", "size_b"), [(100, 10), (10, 100), (50, 50)])
def test_tenants_whose_requests_are_as_expected_get_equal_rates_of_requests(size_a: int, size_b: int) -> None:
    counts = normal_answers(size_a, size_b)
    assert abs(counts["a"] - counts["b"]) <= 2


def test_a_request_larger_than_expected_costs_more_turns_than_one() -> None:
    scheduler = started(pool(kv=401, policy="fairserve", tenants={"z": 1.0, "a": 1.0, "b": 1.0}))
    scheduler.handle(request("z1", "z", prompt=10), 0.0)
    for number in range(6):
        for tenant in "ab":
            event = arrival(f"{tenant}{number}", tenant, prompt=10, cap=390, predicted_output_tokens=10)
            scheduler.handle(event, 0.0)
    order = done(scheduler, "z1", 1, 1.0)
    for turn in range(4):
        output = {"a": 40, "b": 10}[order[-1][0]]
        order += done(scheduler, order[-1], output, 2.0 + turn)
    assert order[:4] == ["a0", "b0", "b1", "b2"]


def test_a_change_of_configuration_forgets_neither_limits_nor_interactions() -> None:
    scheduler = overloaded()
    scheduler.handle(request("a1", "a", "x"), 1.0)
    scheduler.handle(request("a2", "a"), 1.0)
    scheduler.handle(Reconfigured(config=replace(scheduler.config, max_queued=50)), 2.0)
    assert refusal(scheduler, request("a3", "a", "y"), 3.0) is not None
    assert refusal(scheduler, request("a4", "a", "x"), 3.0) is None
    assert done(scheduler, "z1", 10, 4.0) == ["a1"]


def test_a_policy_that_takes_over_serves_those_who_wait() -> None:
    scheduler = started(pool(kv=401, policy="vtc"))
    for name, tenant in [("a1", "a"), ("a2", "a"), ("b1", "b")]:
        scheduler.handle(request(name, tenant), 0.0)
    scheduler.handle(Reconfigured(config=pool(kv=401, policy="fairserve")), 1.0)
    assert done(scheduler, "a1", 10, 2.0) == ["a2"]
    assert done(scheduler, "a2", 10, 3.0) == ["b1"]
    assert done(scheduler, "b1", 10, 4.0) == []
    assert scheduler.audit() == []
