"""Who is next among siblings, and lanes of keys inside one tenant and tier."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from router_ext.core.events import Arrived, Finished, PromptMeasured, Reconfigured
from router_ext.core.ids import KeyId, RequestId
from router_ext.core.lanes import ArrivalOrder, Lane
from router_ext.core.siblings import Siblings
from tests.unit.core.builders import arrival, dispatched, pool, started, tokens


def keyed(event: Arrived, key: str) -> Arrived:
    return Arrived(request=replace(event.request, key=KeyId(key)))


def ended(name: str) -> Finished:
    return Finished(request_id=RequestId(name))


def test_the_one_in_front_is_always_the_least_of_those_that_wait() -> None:
    rng = random.Random(5)
    level: Siblings[Lane] = Siblings()
    lanes = [Lane(KeyId(str(number)), ArrivalOrder()) for number in range(8)]
    for _ in range(3_000):
        lane = rng.choice(lanes)
        what = rng.random()
        if what < 0.3 and not lane.since:
            level.enter(lane)
        elif what < 0.5 and lane.since:
            level.leave(lane)
        elif what < 0.9:
            lane.counter += rng.randint(1, 5)
            if lane is level.front and lane.counter >= level.rival:
                level.reorder()
        else:
            lane.counter -= rng.randint(0, 3)
            level.lowered(lane)
        waiting = [lane for lane in lanes if lane.since]
        assert level.front is min(waiting, key=lambda lane: (lane.counter, lane.since), default=None)
        assert level.waiting() == sorted(waiting, key=lambda lane: (lane.counter, lane.since))


def test_a_sibling_alone_is_never_lifted_and_a_second_one_is_lifted_to_it() -> None:
    level: Siblings[Lane] = Siblings()
    first, second = (Lane(KeyId(name), ArrivalOrder()) for name in "ab")
    level.enter(first)
    first.counter += 70.0
    level.leave(first)
    level.enter(first)
    assert first.counter == 70.0
    level.leave(first)
    level.enter(second)
    assert second.counter == 70.0


def test_keys_of_one_tenant_take_turns_by_what_they_have_received() -> None:
    scheduler = started(pool(kv=201, policy="slo-fair"))
    for number in range(4):
        scheduler.handle(keyed(arrival(f"a{number}"), "key_a"), 1.0)
    scheduler.handle(keyed(arrival("b0"), "key_b"), 1.0)
    order = ["a0"]
    for _ in range(4):
        order += dispatched(scheduler.handle(ended(order[-1]), 2.0))
    assert order == ["a0", "a1", "b0", "a2", "a3"]


def test_a_refund_brings_a_key_forward() -> None:
    scheduler = started(pool(kv=401, policy="slo-fair"))
    first = dispatched(scheduler.handle(keyed(arrival("a0", prompt=300, cap=50), "key_a"), 1.0))
    assert first == ["a0"]
    scheduler.handle(keyed(arrival("b0", prompt=200, cap=100), "key_b"), 1.0)
    scheduler.handle(keyed(arrival("a1", prompt=200, cap=100), "key_a"), 1.0)
    # Both keys are at 300; once the true length is known, a is at 10.
    actions = scheduler.handle(PromptMeasured(request_id=RequestId("a0"), prompt_tokens=10), 1.0)
    assert dispatched(actions) == ["a1"]


def test_idle_keys_that_owe_nothing_are_forgotten() -> None:
    scheduler = started(pool(kv=1_001, policy="slo-fair"))
    for number in range(2_000):
        name = f"r{number}"
        scheduler.handle(keyed(arrival(name, prompt=10, cap=10), f"key_{number}"), float(number))
        scheduler.handle(tokens(name, 5), float(number))
        scheduler.handle(ended(name), float(number))
    (queue,) = scheduler._tenants.by_id["a"].by_rank  # type: ignore[index]  # a plain string names the tenant here
    assert len(queue.lanes) < 300


@pytest.mark.parametrize("num_keys", [1, 3])
def test_a_key_keeps_what_it_is_ahead_while_it_has_no_request(num_keys: int) -> None:
    """Going away for a moment would otherwise be a way to be forgiven."""
    scheduler = started(pool(kv=301, policy="slo-fair"))
    scheduler.handle(keyed(arrival("a0", prompt=100, cap=200), "key_a"), 1.0)
    for number in range(num_keys):
        scheduler.handle(keyed(arrival(f"b{number}", prompt=100, cap=100), f"key_b{number}"), 1.0)
    scheduler.handle(tokens("a0", 150), 1.5)
    scheduler.handle(ended("a0"), 2.0)
    scheduler.handle(keyed(arrival("a1", prompt=100, cap=100), "key_a"), 2.0)
    order = [f"b{number}" for number in range(num_keys)]
    started_now = []
    for name in order:
        started_now += dispatched(scheduler.handle(ended(name), 3.0))
    assert started_now[-1] == "a1"


# --- agents ----------------------------------------------------------------------------------------------------------


def call(name: str, agent: str, cost: float, key: str | None = None, **fields: Any) -> Arrived:
    return keyed(arrival(name, agent_id=agent, agent_cost=cost, **fields), key or f"key_{agent}")


def test_agents_of_all_keys_go_by_tag_and_all_calls_of_one_before_the_next() -> None:
    scheduler = started(pool(kv=201, policy="slo-fair"))
    scheduler.handle(call("large0", "large", 9e6), 1.0)
    for number in (1, 2):
        scheduler.handle(call(f"large{number}", "large", 9e6), 1.0)
        scheduler.handle(call(f"small{number}", "small", 10.0), 1.0)
    order = ["large0"]
    for _ in range(4):
        order += dispatched(scheduler.handle(ended(order[-1]), 2.0))
    assert order == ["large0", "small1", "small2", "large1", "large2"]


def test_under_a_policy_that_does_not_order_agents_their_keys_take_turns() -> None:
    scheduler = started(pool(kv=201, policy="vtc"))
    scheduler.handle(call("large0", "large", 9e6), 1.0)
    for number in (1, 2):
        scheduler.handle(call(f"large{number}", "large", 9e6), 1.0)
        scheduler.handle(call(f"small{number}", "small", 10.0), 1.0)
    order = ["large0"]
    for _ in range(4):
        order += dispatched(scheduler.handle(ended(order[-1]), 2.0))
    assert order == ["large0", "large1", "small1", "large2", "small2"]


def test_all_agents_together_share_like_one_key() -> None:
    scheduler = started(pool(kv=201, policy="slo-fair"))
    scheduler.handle(keyed(arrival("p0"), "key_p"), 1.0)
    for number in range(1, 4):
        scheduler.handle(keyed(arrival(f"p{number}"), "key_p"), 1.0)
        scheduler.handle(call(f"x{number}", f"agent{number}", 10.0), 1.0)
    order = ["p0"]
    for _ in range(6):
        order += dispatched(scheduler.handle(ended(order[-1]), 2.0))
    assert [name[0] for name in order] == ["p", "p", "x", "p", "x", "p", "x"]


def test_calls_behind_one_that_does_not_fit_use_what_it_leaves() -> None:
    scheduler = started(pool(kv=401, policy="slo-fair"))
    scheduler.handle(call("first", "a", 10.0, prompt=200, cap=100), 1.0)
    assert dispatched(scheduler.handle(call("wide", "a", 10.0, prompt=300, cap=100), 1.0)) == []
    assert dispatched(scheduler.handle(call("narrow", "b", 20.0, prompt=50, cap=20), 1.0)) == []
    # The wide one claims the only server, which will be empty when the first ends; nothing is left until then.
    assert dispatched(scheduler.handle(ended("first"), 2.0)) == ["wide"]


def test_a_change_of_policy_gives_everybody_a_place_anew() -> None:
    scheduler = started(pool(kv=201, policy="vtc"))
    scheduler.handle(call("large0", "large", 9e6), 1.0)
    for number in (1, 2):
        scheduler.handle(call(f"large{number}", "large", 9e6), 1.0)
        scheduler.handle(call(f"small{number}", "small", 10.0), 1.0)
    scheduler.handle(Reconfigured(config=pool(kv=201, policy="slo-fair")), 1.5)
    assert scheduler.audit() == []
    order = dispatched(scheduler.handle(ended("large0"), 2.0))
    assert order == ["small1"]
    scheduler.handle(Reconfigured(config=pool(kv=201, policy="vtc")), 2.5)
    assert scheduler.audit() == []
    for _ in range(3):
        order += dispatched(scheduler.handle(ended(order[-1]), 3.0))
    assert sorted(order) == ["large1", "large2", "small1", "small2"]
    assert scheduler.audit() == []
