"""The bound, taken apart and in seconds of GPU time, next to the largest gap seen."""

from __future__ import annotations

import pytest

from router_ext.core import bounds
from router_ext.core.bounds import gpu_seconds
from router_ext.core.events import Finished, Reconfigured
from router_ext.core.ids import RequestId, TenantId
from router_ext.core.scheduler import Scheduler
from tests.unit.core.builders import arrival, dispatched, pool, started, tokens


def test_the_terms_of_the_default_policy_are_the_peak_and_two_passes() -> None:
    config = pool(kv=10_001, tenants={"a": 1.0, "b": 4.0})
    stated = bounds.terms(config)
    assert stated is not None
    assert (stated.peak_service, stated.pool_tokens, stated.longest_prompt) == (20_002.0, 10_000, 10_000)
    assert stated.passes == {"urgency": pytest.approx(5_000.5), "backfill": pytest.approx(400.04)}
    assert (stated.lightest_weight, stated.heaviest_weight) == (1.0, 4.0)
    assert stated.bound_service == pytest.approx(25_002.5)
    assert stated.counter_bound(4.0) == pytest.approx(25_002.5 / 4)
    assert stated.pair_bound(1.0, 4.0) == pytest.approx(25_002.5 * 1.25)


def test_the_charge_for_a_stall_is_part_of_the_bound_where_grammars_are_taken() -> None:
    stated = bounds.terms(pool(kv=10_001, stall_ratio=0.05))
    assert stated is not None
    assert stated.stall_service == pytest.approx(1_000.1)
    assert stated.bound_service == pytest.approx(26_002.6)
    assert stated.counter_bound(2.0) == pytest.approx(26_002.6 / 2)
    assert stated.inside_bound(2.0) == pytest.approx(26_002.6 / 2)
    without = bounds.terms(pool(kv=10_001, stall_ratio=0.05, backend={"takes_grammars": False}))
    assert without is not None
    assert without.bound_service == pytest.approx(25_002.5)


@pytest.mark.parametrize(
    ("policy", "passes"), [("vtc", []), ("drr", ["quantum"]), ("slo-fair", ["backfill", "urgency"])]
)
def test_every_bounded_policy_names_its_ways_of_going_ahead(policy: str, passes: list[str]) -> None:
    stated = bounds.terms(pool(policy=policy))
    assert stated is not None
    assert sorted(stated.passes) == passes
    assert stated.pass_service == max(stated.passes.values(), default=0.0)


def test_work_in_flight_counts_against_the_lightest_tenant() -> None:
    config = pool(gamma=0.5, tenants={"a": 1.0, "b": 4.0})
    stated = bounds.terms(config)
    assert stated is not None
    peak = stated.peak_service
    assert stated.bound_service == pytest.approx(2.0 * peak + stated.pass_service)
    heavy = config.tenants[TenantId("b")]
    assert (bounds.counter_bound(config, heavy) or 0.0) * heavy.weight == pytest.approx(stated.bound_service)


def test_nothing_is_said_in_seconds_before_it_was_measured() -> None:
    assert gpu_seconds(100.0, None) is None
    assert gpu_seconds(None, 50.0) is None
    assert gpu_seconds(100.0, 50.0) == 2.0
    stats = started(pool()).stats()
    assert (stats.service_per_gpu_s, stats.bound_gpu_s, stats.largest_gap_gpu_s) == (None, None, None)
    assert stats.bound_service is not None


def backlog(num_backends: int = 1) -> tuple[Scheduler, list[str]]:
    """Backends full with two requests each, and a long queue."""
    scheduler = started(pool(kv=[401] * num_backends, policy="vtc"))
    running: list[str] = []
    for number in range(100):
        running += dispatched(scheduler.handle(arrival(f"r{number}", "ab"[number % 2]), 0.0))
    assert len(running) == 2 * num_backends
    return scheduler, running


def serve(scheduler: Scheduler, running: list[str], now: float, until: float) -> float:
    """Every running request gets 10 tokens per second; one that ends makes room for the next."""
    produced = dict.fromkeys(running, 0)
    while now < until:
        now += 0.1
        for name in list(running):
            scheduler.handle(tokens(name, 1), now)
            produced[name] = produced.get(name, 0) + 1
            if produced[name] == 100:
                running.remove(name)
                running += dispatched(scheduler.handle(Finished(request_id=RequestId(name)), now))
    return now


@pytest.mark.parametrize("num_backends", [1, 2])
def test_the_rate_is_that_of_one_busy_backend_while_somebody_waits(num_backends: int) -> None:
    """2 requests of 100 prompt and 100 output tokens in 10 s: (2 x 100 + 2 x 2 x 100) / 10 s."""
    scheduler, running = backlog(num_backends)
    serve(scheduler, running, 0.0, 150.0)
    stats = scheduler.stats()
    assert stats.service_per_gpu_s == pytest.approx(60.0, rel=0.15)
    assert stats.bound_gpu_s == pytest.approx((stats.bound_service or 0.0) / (stats.service_per_gpu_s or 1.0))
    assert stats.largest_gap_gpu_s == pytest.approx(stats.largest_gap_service / (stats.service_per_gpu_s or 1.0))


def test_a_pool_in_which_nobody_waits_measures_nothing() -> None:
    scheduler = started(pool(kv=10_001))
    scheduler.handle(arrival("r0", cap=1_000), 0.0)
    for step in range(600):
        scheduler.handle(tokens("r0", 1), step / 10)
        scheduler.handle(arrival(f"x{step}", prompt=1, cap=1), step / 10)
        scheduler.handle(Finished(request_id=RequestId(f"x{step}")), step / 10)
    assert scheduler.stats().service_per_gpu_s is None


def test_units_of_another_cost_model_are_measured_anew() -> None:
    scheduler, running = backlog()
    now = serve(scheduler, running, 0.0, 30.0)
    assert scheduler.stats().service_per_gpu_s is not None
    scheduler.handle(Reconfigured(config=pool(kv=401, policy="vtc", cost_model="step-time")), now)
    assert scheduler.stats().service_per_gpu_s is None
