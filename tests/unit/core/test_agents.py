"""Tags of agents against a fluid pool that keeps everybody's remaining work."""

from __future__ import annotations

import random
from typing import Any

import pytest

from router_ext.core import agents as agents_module
from router_ext.core.agents import QUIET_S, Agents, FluidClock, call_cost
from router_ext.core.config import BackendConfig, TenantConfig, TierConfig
from router_ext.core.events import RequestSpec
from router_ext.core.fleet import Fleet
from router_ext.core.ids import BackendId, KeyId, RequestId, TenantId, TierName
from router_ext.core.queues import Tenant
from router_ext.core.request import Request

RATE = 100.0


@pytest.fixture(autouse=True)
def full_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fluid pool as fast as the rate, to count in whole numbers."""
    monkeypatch.setattr(agents_module, "SPEED", 1.0)


class FluidPool:
    """The reference itself: every active agent's remaining work shrinks by its share of the rate."""

    def __init__(self) -> None:
        self.now = 0.0
        self.left: dict[int, list[float]] = {}
        self.order: list[int] = []

    def advance(self, now: float) -> None:
        while self.left and self.now < now:
            total = sum(weight for _, weight in self.left.values())
            first = min(work / weight for work, weight in self.left.values())
            elapsed = min(now - self.now, first * total / RATE)
            self.now += elapsed
            for entry in self.left.values():
                entry[0] -= RATE * elapsed * entry[1] / total
            for name in [name for name, (work, _) in self.left.items() if work < 1e-9]:
                self.order.append(name)
                del self.left[name]
        self.now = now


@pytest.mark.parametrize("seed", range(20))
def test_agents_leave_the_fluid_pool_in_the_order_of_their_tags(seed: int) -> None:
    rng = random.Random(seed)
    clock, pool = FluidClock(lambda: RATE), FluidPool()
    tags: dict[int, float] = {}
    now = 0.0
    for name in range(60):
        now += rng.choice([0.0, 0.01, 0.3, 5.0])
        clock.advance(now)
        pool.advance(now)
        assert len(clock) == len(pool.left)
        cost, weight = rng.uniform(1.0, 200.0), rng.choice([0.5, 1.0, 4.0])
        tags[name] = clock.enter(cost, weight)
        pool.left[name] = [cost, weight]
    pool.advance(now + 10_000.0)
    assert pool.order == sorted(tags, key=lambda name: tags[name])


def test_virtual_time_stands_still_while_nobody_is_active_and_never_falls() -> None:
    clock = FluidClock(lambda: RATE)
    clock.advance(50.0)
    assert clock.virtual_time == 0.0
    clock.enter(300.0, 2.0)
    clock.advance(51.0)
    assert clock.virtual_time == pytest.approx(50.0)
    clock.advance(40.0)
    assert clock.virtual_time == pytest.approx(50.0)
    clock.advance(1_000.0)
    assert clock.virtual_time == pytest.approx(150.0)


def test_the_cost_of_a_call_is_the_tokens_held_over_the_steps() -> None:
    assert call_cost(7, 4) == sum(7 + step for step in range(1, 5))


def tenant(name: str = "a", weight: float = 1.0) -> Tenant:
    return Tenant(TenantConfig(tenant=TenantId(name), weight=weight))


class Calls:
    """Requests of one tenant, in the order of their arrival."""

    def __init__(self, owner: Tenant) -> None:
        self.owner = owner
        self.seq = 0

    def one(self, agent: str | None, **fields: Any) -> Request:
        self.seq += 1
        spec = RequestSpec(
            request_id=RequestId(f"r{self.seq}"),
            tenant=self.owner.tenant_id,
            key=KeyId("k"),
            tier=TierName("batch"),
            max_new_tokens=fields.pop("cap", 100),
            agent_id=agent,
            **{"prompt_tokens": 10, "predicted_output_tokens": 10, **fields},
        )
        queue = self.owner.queue(TierConfig(name=TierName("batch"), rank=1))
        return Request(spec, tenant=self.owner, queue=queue, seq=self.seq, arrival_s=0.0)


def test_a_tag_is_made_at_the_first_call_and_never_again() -> None:
    agents, calls = Agents(lambda: RATE), Calls(tenant(weight=2.0))
    first = calls.one("x", agent_cost=500.0)
    agent = agents.join(first, 0.0)
    agents.join(calls.one("other", agent_cost=1e6), 1.0)
    later = agents.join(calls.one("x", agent_cost=9e9), 2.0)
    assert later is agent
    assert agent.tag == 250.0
    assert agents.join(first, 3.0) is agent
    assert (agent.num_calls, agent.num_open) == (2, 2)


def test_requests_without_an_id_are_agents_of_one_call() -> None:
    agents, calls = Agents(lambda: RATE), Calls(tenant())
    one, other = calls.one(None), calls.one(None, predicted_output_tokens=1_000, cap=20)
    assert agents.join(one, 0.0) is not agents.join(other, 0.0)
    assert one.agent is not None
    assert other.agent is not None
    assert one.agent.tag == call_cost(10, 10)
    assert other.agent.tag == call_cost(10, 20)
    assert len(agents) == 0


def test_ids_of_two_tenants_are_two_agents() -> None:
    agents = Agents(lambda: RATE)
    mine, yours = Calls(tenant("a")).one("x"), Calls(tenant("b")).one("x")
    assert agents.join(mine, 0.0) is not agents.join(yours, 0.0)


def over(agents: Agents, calls: list[Request], now: float, output: int = 10) -> None:
    """The calls ran to their end, each with so many output tokens."""
    for call in calls:
        call.slice_output = output
        agents.deliver(call)
        agents.leave(call, now, is_finished=True)


def test_an_agent_is_over_when_it_was_quiet_for_long() -> None:
    agents, calls = Agents(lambda: RATE), Calls(tenant())
    group = [calls.one("x") for _ in range(5)]
    for call in group:
        agents.join(call, 0.0)
    over(agents, group, 10.0)
    again = calls.one("x")
    assert agents.join(again, 10.0 + QUIET_S - 1.0) is group[0].agent
    over(agents, [again], 100.0)
    assert agents.join(calls.one("x"), 100.0 + QUIET_S) is not group[0].agent


def test_the_cost_of_an_agent_is_predicted_by_how_many_calls_others_made() -> None:
    agents, calls = Agents(lambda: RATE), Calls(tenant())
    for name, count in [("x", 3), ("y", 5)]:
        group = [calls.one(name, agent_cost=count * call_cost(10, 10)) for _ in range(count)]
        for call in group:
            agents.join(call, 0.0)
        over(agents, group, 0.0)
    over(agents, [calls.one(None)], 0.0)
    agent = agents.join(calls.one("z"), QUIET_S)
    mean = (3 * 31 / 32 + 5) / (31 / 32 + 1)
    assert agent.tag == pytest.approx(agents.clock.virtual_time + mean * call_cost(10, 10))


@pytest.mark.parametrize(("claim", "expected"), [(0.8, 1.0), (0.1, 0.2), (30.0, 15.0)])
def test_costs_are_corrected_by_what_the_tenants_last_agents_really_cost(claim: float, expected: float) -> None:
    agents, calls = Agents(lambda: 0.0), Calls(tenant())
    real = call_cost(10, 10)
    for number in range(40):
        call = calls.one(f"agent-{number}", agent_cost=claim * real)
        agents.join(call, 0.0)
        over(agents, [call], 0.0)
    agent = agents.join(calls.one("z", agent_cost=claim * real), QUIET_S)
    assert agent.tag == pytest.approx(expected * real)


def test_nothing_is_learned_from_agents_that_were_given_up() -> None:
    agents, calls = Agents(lambda: 0.0), Calls(tenant())
    call = calls.one("x", agent_cost=500.0)
    agents.join(call, 0.0)
    agents.leave(call, 0.0, is_finished=False)
    assert agents.join(calls.one("y", agent_cost=500.0), QUIET_S).tag == 500.0


@pytest.mark.parametrize("cost", [0.0, -5.0, float("nan")])
def test_a_senseless_declared_cost_is_predicted_instead(cost: float) -> None:
    agents, calls = Agents(lambda: RATE), Calls(tenant())
    assert agents.join(calls.one("x", agent_cost=cost), 0.0).tag == call_cost(10, 10)


def test_an_agent_that_declares_everything_does_not_stop_virtual_time() -> None:
    agents, calls = Agents(lambda: RATE), Calls(tenant())
    agents.join(calls.one("x", agent_cost=float("inf")), 0.0)
    agents.clock.advance(1e10)
    assert len(agents.clock) == 0


def test_the_books_of_agents_do_not_grow_for_ever() -> None:
    agents, calls = Agents(lambda: RATE), Calls(tenant())
    for number in range(10_000):
        call = calls.one(f"agent-{number}", agent_cost=1.0)
        agents.join(call, number * 0.001)
        agents.leave(call, number * 0.001, is_finished=True)
    assert len(agents) <= 8_192


def test_the_fluid_pool_does_not_grow_for_ever_and_virtual_time_still_never_falls() -> None:
    clock = FluidClock(lambda: 0.0)
    seen = 0.0
    for number in range(70_000):
        clock.enter(1e6 + number, 1.0)
        assert clock.virtual_time >= seen
        seen = clock.virtual_time
    assert len(clock) == 65_536
    assert seen > 0.0


def test_the_rate_is_what_slices_make_of_the_kv_they_reserve() -> None:
    fleet = Fleet()
    config = BackendConfig(backend=BackendId("bke_0"), kv_tokens=1_001)
    fleet.apply({config.backend: config}, [])
    assert fleet.kv_rate() == 0.0
    fleet.backends[config.backend].is_up = True
    fleet.refresh(0.0)
    assert fleet.kv_rate() == pytest.approx(1_000 / fleet.step_s())
    # 200 tokens reserved for 3 s delivered 1,200 token-steps: two per token and second.
    fleet.note_held(1_200.0, 200, 3.0)
    assert fleet.kv_rate() == pytest.approx(2_000.0)
    for _ in range(500):
        fleet.note_held(600.0, 200, 3.0)
    assert fleet.kv_rate() == pytest.approx(1_000.0, rel=0.01)
