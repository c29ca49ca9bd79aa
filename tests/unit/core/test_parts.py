"""Lifecycle table, bounds, estimates, queues, slices and configuration, each by itself."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from router_ext.core import bounds
from router_ext.core.config import ConfigError, TenantConfig, TierConfig, build_pool, policy_names
from router_ext.core.cost import pool_tokens
from router_ext.core.estimates import LinearFit, Throughput
from router_ext.core.fairness import POLICIES
from router_ext.core.fairness.counters import Counters, lift
from router_ext.core.fairness.slo_fair import SloFair
from router_ext.core.ids import TenantId, TierName
from router_ext.core.lifecycle import TRANSITIONS, IllegalTransition, State, Trigger, advance, diagram
from router_ext.core.queues import Tenant, WaitingRoom
from router_ext.core.request import Request
from router_ext.core.slicing import SliceBudget, plan, shrunk_slice
from router_ext.core.tiers import ACTIVE_FOR_S, Tiers
from tests.unit.core.builders import arrival, dispatched, pool, started


def request(seq: int, tenant: Tenant, **fields: Any) -> Request:
    spec = arrival(f"r{seq}", tenant.tenant_id, **fields).request
    queue = tenant.queue(TierConfig(name=spec.tier, rank=1))
    made = Request(spec, tenant=tenant, queue=queue, seq=seq, arrival_s=float(seq))
    made.lane = queue.lane(spec.key)
    return made


def tenant(name: str = "a", weight: float = 1.0) -> Tenant:
    return Tenant(TenantConfig(tenant=TenantId(name), weight=weight))


# --- lifecycle -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "trigger"), list(product(State, Trigger)))
def test_only_the_table_moves_a_request(state: State, trigger: Trigger) -> None:
    if (state, trigger) in TRANSITIONS:
        assert not state.is_terminal
        assert advance(state, trigger) is TRANSITIONS[state, trigger]
    else:
        with pytest.raises(IllegalTransition, match=f"{state.name} cannot {trigger.name}"):
            advance(state, trigger)


def test_the_diagram_shows_every_transition() -> None:
    text = diagram()
    assert text.startswith("stateDiagram-v2")
    for (old, trigger), new in TRANSITIONS.items():
        assert f"{old.name} --> {new.name}: {trigger.name.lower()}" in text


def test_the_documentation_carries_the_diagram_of_the_table() -> None:
    assert diagram() in (Path(__file__).parents[3] / "docs" / "scheduling.md").read_text()


def test_every_state_can_be_reached_and_every_living_one_left() -> None:
    reached = {State.NEW} | set(TRANSITIONS.values())
    assert reached == set(State)
    assert {old for old, _ in TRANSITIONS} == {state for state in State if not state.is_terminal}


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_the_bound_is_one_full_pool_of_output_and_the_largest_pass() -> None:
    config = pool(kv=[10_001, 5_001], w_prompt=1.0, w_output=2.0, tenants={"a": 1.0, "b": 4.0})
    assert pool_tokens(config) == 15_000
    assert bounds.peak_service(config) == 2.0 * 15_001
    heavy = config.tenants[TenantId("b")]
    assert bounds.counter_bound(config, heavy) == pytest.approx(30_002 * 1.25 / 4)
    light = config.tenants[TenantId("a")]
    assert bounds.pair_bound(config, heavy, light) == pytest.approx(30_002 * 1.25 * (1 + 1 / 4))
    assert bounds.bound_service(config) == pytest.approx(30_002 * 1.25)


@pytest.mark.parametrize(("sequences", "prompts"), [(1, 4_000), (2, 8_000), (3, 10_000)])
def test_dear_prompts_enlarge_the_bound_by_those_of_the_longest_request(sequences: int, prompts: int) -> None:
    limits = {"max_input_tokens": 4_000, "max_sequences": sequences}
    config = pool(kv=10_001, w_prompt=5.0, w_output=1.0, backend=limits)
    assert bounds.peak_service(config) == 10_000 + sequences + 4 * prompts


def test_without_a_target_only_backfill_may_go_ahead() -> None:
    config = pool(tiers=[{"name": "batch", "rank": 1}])
    assert bounds.bound_service(config) == pytest.approx(1.02 * bounds.peak_service(config))


def test_gamma_enlarges_the_bound_of_heavy_tenants_only() -> None:
    config = pool(gamma=0.5, tenants={"a": 1.0, "b": 4.0})
    peak = bounds.peak_service(config)
    assert bounds.counter_bound(config, config.tenants[TenantId("a")]) == pytest.approx(1.25 * peak)
    assert bounds.counter_bound(config, config.tenants[TenantId("b")]) == pytest.approx(0.5 * peak + 0.25 * peak / 4)


def test_fifo_promises_nothing() -> None:
    config = pool(policy="fifo")
    assert bounds.bound_service(config) is None
    assert bounds.pair_bound(config, *config.tenants.values()) is None


# --- counters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("counter", "floor", "lifted"), [(5.0, 9.0, 9.0), (9.0, 5.0, 9.0), (5.0, float("-inf"), 5.0)])
def test_lift_takes_the_larger(counter: float, floor: float, lifted: float) -> None:
    assert lift(counter, floor) == lifted


def test_a_tenant_returning_to_an_empty_pool_is_lifted_to_who_left_last() -> None:
    counters = Counters()
    first, second = tenant("a"), tenant("b")
    counters.backlogged(first)
    counters.charge(request(0, first), 500.0)
    counters.idle(first)
    counters.charge(request(0, first), 100.0)
    counters.backlogged(second)
    assert second.counter == 600.0


def test_the_floor_follows_counters_that_grow_without_being_told() -> None:
    counters = Counters()
    tenants = [tenant(name) for name in "abcd"]
    for each in tenants:
        counters.backlogged(each)
    for round_ in range(50):
        for index, each in enumerate(tenants):
            counters.charge(request(0, each), float((index * 7 + round_ * 3) % 11))
        assert counters.floor() == min(each.counter for each in tenants)


def test_many_short_backlogs_leave_no_entries_behind() -> None:
    counters = Counters()
    steady, restless = tenant("a"), tenant("b")
    counters.backlogged(steady)
    for _ in range(1_000):
        counters.backlogged(restless)
        counters.charge(request(0, restless), 1.0)
        counters.idle(restless)
    assert len(counters.index._heap) < 200


def test_shifting_all_counters_changes_no_difference() -> None:
    counters = Counters()
    first, second = tenant("a"), tenant("b")
    for each, service in ((first, 2.0**41), (second, 8.0)):
        counters.backlogged(each)
        counters.charge(request(0, each), service)
    counters.rebase([first, second])
    assert (first.counter, second.counter) == (0.0, 8.0)
    assert counters.floor() == 0.0


# --- queues ----------------------------------------------------------------------------------------------------------


def test_resumed_requests_go_before_fresh_ones_each_by_arrival_and_leave_from_anywhere() -> None:
    owner = tenant()
    requests = [request(seq, owner) for seq in range(1, 7)]
    queue = requests[0].queue
    for each in requests[2:]:
        queue.add(each)
    for each in (requests[1], requests[0]):
        each.is_resumed = True
        queue.add(each)
    assert queue.requests() == requests
    for each in (requests[0], requests[3], requests[1]):
        queue.remove(each)
    assert queue.requests() == [requests[2], requests[4], requests[5]]
    assert queue.head is requests[2]


def test_the_least_need_is_a_lower_bound_and_forgets_who_left() -> None:
    room = WaitingRoom()
    owner = tenant()
    sizes = [500, 40, 300]
    requests = []
    for seq, size in enumerate(sizes, start=1):
        each = request(seq, owner, prompt=size)
        each.slice_busy = each.slice_idle = 10
        each.state = State.QUEUED
        room.add(each)
        requests.append(each)
    assert room.least_need() == 50
    requests[1].state = State.CANCELLED
    room.remove(requests[1])
    assert room.least_need() == 310


# --- policies --------------------------------------------------------------------------------------------------------


def test_a_policy_in_the_registry_can_be_configured_scheduled_by_and_asked_for_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unbounded(SloFair):
        is_bounded = False

    with pytest.raises(ConfigError, match="unknown policy 'mine'"):
        pool(policy="mine")
    monkeypatch.setitem(POLICIES, "mine", Unbounded)
    config = pool(policy="mine")
    assert policy_names()[-1] == "mine"
    assert bounds.bound_service(config) is None
    assert dispatched(started(config).handle(arrival("r0"), 1.0)) == ["r0"]


# --- slices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cap", "preferred", "busy", "idle"),
    [(4_000, 300, 300, 1_024), (599, 300, 599, 599), (600, 300, 300, 600), (50, 1_024, 50, 50)],
)
def test_a_request_is_sliced_only_if_two_slices_remain(cap: int, preferred: int, busy: int, idle: int) -> None:
    each = request(1, tenant(), cap=cap, slice_tokens=preferred)
    assert plan(each, pool(kv=50_000), (), is_sliced=True)
    assert (each.slice_busy, each.slice_idle) == (busy, idle)
    assert plan(each, pool(kv=50_000), (), is_sliced=False)
    assert each.slice_busy == idle


def test_a_slice_is_never_larger_than_the_largest_backend_holds() -> None:
    each = request(1, tenant(), prompt=600, cap=1_024)
    assert plan(each, pool(kv=[301, 1_001]), (), is_sliced=True)
    assert each.slice_idle == 1_001 - 600
    assert not plan(request(2, tenant(), prompt=990, cap=500), pool(kv=[301, 1_001]), (), is_sliced=True)


def test_a_slice_is_planned_for_the_backends_that_are_usable() -> None:
    config = pool(kv=[301, 1_001])
    small, large = config.backends.values()
    each = request(1, tenant(), prompt=200, cap=600)
    assert plan(each, config, [small, large], is_sliced=True)
    assert (each.slice_idle, each.is_stuck) == (600, False)
    assert plan(each, config, [small], is_sliced=True)
    assert (each.slice_idle, each.is_stuck) == (301 - 200, False)
    each.input_tokens = 250
    assert plan(each, config, [small], is_sliced=True)
    assert each.is_stuck
    assert plan(each, config, [], is_sliced=True)
    assert each.is_stuck
    assert plan(each, config, [small, large], is_sliced=True)
    assert not each.is_stuck


def test_work_that_cannot_be_sliced_is_stuck_unless_it_fits_whole() -> None:
    config = pool(kv=[301, 1_001])
    small, large = config.backends.values()
    each = request(1, tenant(), prompt=200, cap=600, is_sliceable=False)
    assert plan(each, config, [small], is_sliced=True)
    assert (each.slice_idle, each.is_stuck) == (600, True)
    assert plan(each, config, [small, large], is_sliced=True)
    assert (each.slice_idle, each.is_stuck) == (600, False)


def test_every_sequence_of_a_request_needs_room() -> None:
    config = pool(kv=1_001)
    assert plan(
        request(1, tenant(), prompt=300, cap=201, num_sequences=2, is_sliceable=False), config, (), is_sliced=True
    )
    assert not plan(
        request(2, tenant(), prompt=300, cap=202, num_sequences=2, is_sliceable=False), config, (), is_sliced=True
    )


def test_shrinking_respects_the_smallest_slice_and_the_two_slices_rule() -> None:
    each = request(1, tenant(), prompt=100, cap=400)
    config = pool(min_slice_tokens=64)
    assert shrunk_slice(each, config, free_tokens=300, slice_tokens=400) == 200
    assert shrunk_slice(each, config, free_tokens=180, slice_tokens=400) == 80
    assert shrunk_slice(each, config, free_tokens=150, slice_tokens=400) == 0
    each.is_sliceable = False
    assert shrunk_slice(each, config, free_tokens=300, slice_tokens=400) == 0


def test_the_budget_of_shrunk_slices_closes_when_overdrawn_and_refills_from_output() -> None:
    budget = SliceBudget()
    each = request(1, tenant(), prompt=900)
    budget.spend(each, 150)
    assert not budget.is_open
    budget.refill(3_000)
    assert not budget.is_open
    budget.refill(500)
    assert budget.is_open


# --- estimates -------------------------------------------------------------------------------------------------------


def test_the_fit_finds_the_line_behind_its_observations() -> None:
    fit = LinearFit()
    assert fit.line is None
    for x in (100, 800, 300, 2_000, 1_200, 50):
        fit.observe(x, 0.03 + 0.0002 * x)
    assert fit.line == pytest.approx((0.03, 0.0002))


def test_observations_of_one_size_give_the_line_through_the_origin() -> None:
    fit = LinearFit()
    for _ in range(10):
        fit.observe(200, 0.1)
    assert fit.line == pytest.approx((0.0, 0.0005))


def test_a_fit_never_says_that_more_work_takes_less_time() -> None:
    fit = LinearFit()
    for x in (1, 2, 3, 4, 5):
        fit.observe(x, 1.0 / x)
    line = fit.line
    assert line is not None
    assert line[1] == 0.0


def test_throughput_counts_busy_time_only() -> None:
    throughput = Throughput()
    throughput.tick(0.0, 0, is_busy=True)
    throughput.tick(2.0, 200, is_busy=True)
    assert throughput.rate == 100.0
    throughput.tick(3.0, 300, is_busy=False)
    throughput.tick(1_000.0, 300, is_busy=True)
    throughput.tick(1_002.0, 500, is_busy=True)
    assert throughput.rate == pytest.approx(100.0)


def test_a_tier_is_active_for_a_minute_after_its_last_traffic() -> None:
    fast = TierConfig(name=TierName("fast"), rank=0, ttft_target_s=0.5)
    slow = TierConfig(name=TierName("slow"), rank=1, ttft_target_s=5.0)
    tiers = Tiers({fast.name: fast, slow.name: slow})
    tiers.touch(fast, 0.0)
    tiers.touch(slow, 30.0)
    assert tiers.tightest_target_s == 0.5
    tiers.refresh(ACTIVE_FOR_S)
    assert tiers.tightest_target_s == 5.0
    tiers.refresh(ACTIVE_FOR_S + 30.0)
    assert tiers.tightest_target_s is None


# --- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("policy", "lottery", "unknown policy 'lottery'"),
        ("w_output", 0, "w_output 0 is out of range"),
        ("burst_ratio", float("nan"), "burst_ratio must be a number"),
        ("max_slice_tokens", 2_000, "max_slice_tokens 2000 is out of range"),
        ("aging_ratio", 0.9, "aging_ratio 0.9 is out of range"),
        ("max_queued", 1.5, "max_queued must be a whole number"),
    ],
)
def test_a_bad_value_is_refused_by_name_and_range(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_pool(pool={"name": "p", field: value}, backends=[], tiers=[], tenants=[])


def test_a_weight_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="weight 0 is out of range"):
        build_pool(pool={"name": "p"}, backends=[], tiers=[], tenants=[{"tenant": "a", "weight": 0}])
