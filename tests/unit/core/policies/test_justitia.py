"""Justitia's order, pampering and backfill in pools small enough to follow by hand."""

from __future__ import annotations

import pytest

from router_ext.core.events import Cancelled, Finished, Reconfigured, SliceEnded
from router_ext.core.ids import RequestId
from router_ext.core.scheduler import Scheduler
from tests.unit.core.builders import arrival, dispatched, pool, started, tokens


def finish(scheduler: Scheduler, name: str, now: float) -> list[str]:
    return dispatched(scheduler.handle(Finished(request_id=RequestId(name)), now))


def full_pool(**fields: object) -> Scheduler:
    """A pool of 400 tokens in which one request runs that takes all of it."""
    scheduler = started(pool(kv=401, policy="justitia", **fields))
    assert dispatched(scheduler.handle(arrival("filler", prompt=300, cap=100), 1.0)) == ["filler"]
    return scheduler


def test_the_agent_with_the_smallest_tag_goes_first_whichever_tenant_it_is_of() -> None:
    scheduler = full_pool()
    for name, tenant, agent, cost in [("a1", "a", "big", 9_000.0), ("b1", "b", "small", 1_000.0)]:
        scheduler.handle(arrival(name, tenant, agent_id=agent, agent_cost=cost, prompt=150, cap=150), 2.0)
    assert finish(scheduler, "filler", 3.0) == ["b1"]


def test_all_calls_of_the_pampered_agent_go_before_anybody_else() -> None:
    scheduler = full_pool()
    scheduler.handle(arrival("other", "b", agent_id="y", agent_cost=6_000.0, prompt=100, cap=100), 2.0)
    for name in ("x1", "x2", "x3"):
        scheduler.handle(arrival(name, agent_id="x", agent_cost=5_000.0, prompt=50, cap=51), 2.0)
    assert finish(scheduler, "filler", 3.0) == ["x1", "x2", "x3"]
    assert finish(scheduler, "x1", 4.0) == ["other"]


def test_a_heavier_tenant_has_smaller_tags_for_the_same_cost() -> None:
    scheduler = full_pool(tenants={"a": 1.0, "b": 3.0})
    scheduler.handle(arrival("a1", "a", prompt=150, cap=150), 2.0)
    scheduler.handle(arrival("b1", "b", prompt=200, cap=200), 2.0)
    assert finish(scheduler, "filler", 3.0) == ["b1"]


@pytest.mark.parametrize("agent", ["x", None])
def test_one_agent_alone_and_agents_that_are_all_alike_are_first_come_first_served(agent: str | None) -> None:
    scheduler = full_pool()
    names = [f"r{number}" for number in range(6)]
    for number, name in enumerate(names):
        scheduler.handle(arrival(name, "ab"[number % 2], agent_id=agent, prompt=201, cap=100), 2.0 + number)
    order = finish(scheduler, "filler", 20.0)
    while len(order) < 6:
        order += finish(scheduler, order[-1], 20.0 + len(order))
    expected = names if agent is None else names[::2] + names[1::2]
    assert order == expected


def test_backfill_uses_only_what_the_call_in_turn_leaves_when_it_fits() -> None:
    scheduler = started(pool(kv=401, policy="justitia"))
    scheduler.handle(arrival("filler", prompt=200, cap=51), 1.0)
    scheduler.handle(arrival("turn", agent_id="x", agent_cost=1.0, prompt=250, cap=101), 2.0)
    # 150 tokens are free; when the filler is over 400 are, and the call in turn takes 350 of them.
    assert dispatched(scheduler.handle(arrival("large", "b", prompt=60, cap=60), 2.0)) == []
    assert dispatched(scheduler.handle(arrival("small", "b", prompt=20, cap=31), 2.0)) == ["small"]
    assert finish(scheduler, "filler", 3.0) == ["turn"]


def test_a_smaller_call_of_the_pampered_agent_is_its_own_backfill() -> None:
    scheduler = started(pool(kv=401, policy="justitia"))
    scheduler.handle(arrival("filler", prompt=200, cap=51), 1.0)
    scheduler.handle(arrival("turn", agent_id="x", agent_cost=1.0, prompt=250, cap=101), 2.0)
    scheduler.handle(arrival("next", "b", agent_id="y", agent_cost=2.0, prompt=20, cap=31), 2.0)
    scheduler.handle(Cancelled(request_id=RequestId("next")), 2.0)
    assert dispatched(scheduler.handle(arrival("own", agent_id="x", prompt=20, cap=31), 2.5)) == ["own"]


def test_a_call_that_ran_before_goes_before_fresh_ones_of_its_agent() -> None:
    scheduler = started(pool(kv=401, policy="justitia"))
    scheduler.handle(arrival("long", agent_id="x", prompt=100, cap=250, slice_tokens=64), 1.0)
    scheduler.handle(arrival("fill", agent_id="x", prompt=150, cap=50), 1.0)
    scheduler.handle(arrival("fresh", agent_id="x", prompt=200, cap=100), 1.0)
    scheduler.handle(tokens("long", 64), 2.0)
    ended = SliceEnded(request_id=RequestId("long"), dropped_tokens=0, next_prompt_tokens=164)
    assert "fresh" not in dispatched(scheduler.handle(ended, 3.0))


def test_a_change_of_configuration_keeps_the_tags() -> None:
    scheduler = full_pool()
    scheduler.handle(arrival("first", agent_id="x", agent_cost=2_000.0, prompt=150, cap=150), 2.0)
    scheduler.handle(arrival("second", agent_id="y", agent_cost=3_000.0, prompt=150, cap=150), 2.0)
    scheduler.handle(Reconfigured(config=pool(kv=401, policy="slo-fair")), 3.0)
    scheduler.handle(arrival("x2", agent_id="z", agent_cost=1.0, prompt=150, cap=150), 3.5)
    scheduler.handle(Reconfigured(config=pool(kv=401, policy="justitia")), 4.0)
    assert finish(scheduler, "filler", 5.0) == ["first"]
    assert finish(scheduler, "first", 6.0) == ["second"]


def test_cancelled_agents_leave_nothing_behind() -> None:
    scheduler = full_pool()
    for number in range(2_000):
        name = f"r{number}"
        scheduler.handle(arrival(name, "b", agent_id=name, agent_cost=5.0 + number, prompt=200, cap=200), 2.0)
        if number:
            scheduler.handle(Cancelled(request_id=RequestId(name)), 2.0)
    assert finish(scheduler, "filler", 3.0) == ["r0"]
    assert scheduler.audit() == []
