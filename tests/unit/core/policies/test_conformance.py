"""What every policy owes to whoever waits, whatever its rule. A policy in ``POLICIES`` is tested by being there."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from router_ext.core import bounds
from router_ext.core.config import ConfigError, policy_names
from router_ext.core.decision import Decider
from router_ext.core.events import Cancelled, Finished
from router_ext.core.explain import Gate
from router_ext.core.fairness import POLICIES, TEST_POLICIES, policy_class, switch
from router_ext.core.fairness.base import Standing
from router_ext.core.fairness.drr import Drr
from router_ext.core.fairness.fifo import Fifo
from router_ext.core.fairness.vtc import Vtc
from router_ext.core.ids import RequestId
from router_ext.ops import bench_scheduler
from tests.property.harness import scenario
from tests.property.oracle import LawBroken
from tests.support.interpreters import printed
from tests.unit.core.builders import arrival, dispatched, pool, started, tokens
from tests.unit.core.policies.load import ALL, Flood, Pool, Probed, Settled, Shifted, Switching, every_switch, left_in

UNJUDGED: frozenset[str] = frozenset()
"""For runs of which only the log is compared."""

every_policy = pytest.mark.parametrize("policy", ALL)

# --- every request ends, once, and every token is charged, once -------------------------------------------------------


@every_policy
@pytest.mark.parametrize("seed", [500, 501, 502])
def test_nobody_is_lost_and_every_token_is_charged_once(policy: str, seed: int) -> None:
    """With cancels, failures, crashes, slice ends, forced cuts, keys and agents; the harness judges at the end."""
    case = scenario(seed, policy=policy, steps=200, with_faults=True, unequal=seed == 502)
    outcome = Pool(case, cut_rate=0.02).go()
    ends = Counter(job.outcomes[0] for job in outcome.jobs.values())
    assert ends["finished"] > 5
    assert any(entry[-1] == "preempt" for entry in outcome.log)


@every_policy
@pytest.mark.parametrize("tenants", [{"neither": 1.0}, {"a": 1.0}, {"a": 0.5, "b": 4.0}])
def test_a_pool_without_backends_keeps_and_gives_back_its_requests(policy: str, tenants: dict[str, float]) -> None:
    scheduler = started(pool(kv=[], policy=policy, tenants=tenants))
    for number in range(6):
        assert dispatched(scheduler.handle(arrival(f"r{number}", "ab"[number % 2]), 1.0)) == []
    for number in range(6):
        scheduler.handle(Cancelled(request_id=RequestId(f"r{number}")), 2.0)
    stats = scheduler.stats()
    assert (stats.queued, stats.running, scheduler.audit()) == (0, 0, [])


@every_policy
def test_a_tenant_alone_is_served_in_the_order_of_arrival(policy: str) -> None:
    scheduler = started(pool(kv=301, policy=policy, tenants={"a": 2.0}, tiers=[{"name": "batch", "rank": 1}]))
    order = []
    for number in range(8):
        order += dispatched(scheduler.handle(arrival(f"r{number}", prompt=101, cap=100), 1.0 + number))
    for number in range(8):
        scheduler.handle(tokens(f"r{number}", 100), 20.0 + number)
        order += dispatched(scheduler.handle(Finished(request_id=RequestId(f"r{number}")), 20.0 + number))
    assert order == [f"r{number}" for number in range(8)]


# --- work conservation ------------------------------------------------------------------------------------------------


@every_policy
@pytest.mark.parametrize("seed", [510, 511])
def test_whoever_is_in_turn_and_fits_has_started(policy: str, seed: int) -> None:
    Settled(scenario(seed, policy=policy, steps=150, with_faults=seed == 511)).go()


@every_policy
def test_a_decision_that_stops_early_is_noticed(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Decider._admit

    def admit(self: Any, now: float, misfits: Any, actions: list[Any]) -> Gate | None:
        if any(type(action).__name__ == "Dispatch" for action in actions):
            return Gate.KV
        return original(self, now, misfits, actions)

    monkeypatch.setattr(Decider, "_admit", admit)
    with pytest.raises(LawBroken, match="settled"):
        Settled(scenario(510, policy=policy, steps=150)).go()


# --- no starvation ----------------------------------------------------------------------------------------------------

SIZES = {"small beside large": ((200, 200), (10, 10)), "large beside small": ((50, 50), (400, 590))}


NO_SHARE_OF_TENANTS = {"justitia": 60}
"""Policies that are fair to something else than tenants: who floods such a pool has many shares. There the flood must
end, after so many requests, before a large request of somebody else is sure to start."""


def starts_ahead(policy: str, sizes: str) -> int:
    """Requests of the flooding tenant that start before the one request of the other tenant does."""
    (prompt, cap), quiet = SIZES[sizes]
    flood = Flood(policy, prompt, cap, ends_after=NO_SHARE_OF_TENANTS.get(policy))
    for number in flood.rounds(400):
        if number == 10:
            before = len(flood.order)
            flood.arrive("b", "b", *quiet)
        if "b" in flood.order:
            return flood.order.index("b") - before
    raise AssertionError(f"starved behind {len(flood.order) - before} others")


@every_policy
@pytest.mark.parametrize("sizes", SIZES)
def test_nobody_starves_behind_a_flood(policy: str, sizes: str) -> None:
    """Twenty are ahead on arrival; the rest is what policies that stop for nobody's size take meanwhile."""
    assert starts_ahead(policy, sizes) <= 60


def test_a_policy_that_skips_who_does_not_fit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def candidates(self: Any, now: float) -> Any:
        for request in list(self._room.in_line.values()):
            yield request, Standing.BACKFILL

    monkeypatch.setattr(Fifo, "candidates", candidates)
    with pytest.raises(AssertionError, match="starved"):
        starts_ahead("fifo", "large beside small")


# --- determinism ------------------------------------------------------------------------------------------------------


def renamed(name: str) -> str:
    """A permutation of tenant names that turns their order round."""
    return f"ten_{chr(ord('z') - (ord(name[-1]) - ord('a')))}"


@every_policy
def test_names_change_no_decision_and_neither_does_a_second_run(policy: str) -> None:
    case = scenario(520, policy=policy, steps=200, with_faults=True)
    first, again = Pool(case, UNJUDGED).go().log, Pool(case, UNJUDGED).go().log
    other = Pool(case, UNJUDGED, rename=renamed).go().log
    assert first == again == other
    assert len(first) > 50


def rescaled_logs(policy: str) -> list[list[Any]]:
    """The same load: as it is, with all prices times 4, and with all counters starting higher."""
    case = scenario(525, policy=policy, steps=150, with_faults=True)
    dear = replace(case, w_prompt=4.0 * case.w_prompt, w_output=4.0 * case.w_output)
    runs = [Pool(case, UNJUDGED), Pool(dear, UNJUDGED), Shifted(case, UNJUDGED, counter=4_096.0 + 37.5)]
    return [run.go().log for run in runs]


@every_policy
def test_only_differences_and_ratios_of_service_decide(policy: str) -> None:
    plain, dear, shifted = rescaled_logs(policy)
    assert plain == dear
    assert plain == shifted


@pytest.mark.parametrize("number", [1, 2])
def test_an_absolute_threshold_is_noticed(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drr, "key", lambda self, tenant: tenant.counter // 100.0)
    logs = rescaled_logs("drr")
    assert logs[0] != logs[number]


def test_the_hash_seed_of_the_interpreter_changes_nothing_under_any_policy() -> None:
    program = (
        "from tests.unit.core.policies.load import *\n"
        "from tests.property.harness import scenario\n"
        "import hashlib\n"
        "log = [Pool(scenario(521, policy=name, steps=100, with_faults=True)).go().log for name in ALL]\n"
        "print(hashlib.sha256(repr(log).encode()).hexdigest())\n"
    )
    assert printed(program, hash_seed=1) == printed(program, hash_seed=2)


# --- what is promised -------------------------------------------------------------------------------------------------


@every_policy
@pytest.mark.parametrize("seed", [550, 551])
def test_the_largest_gap_seen_is_within_the_bound_shown_if_there_is_one(policy: str, seed: int) -> None:
    case = scenario(seed, policy=policy, steps=150, same_mode="flood")
    stats = Pool(case, UNJUDGED, cut_rate=0.005).go().scheduler.stats()
    assert (stats.bound_service is not None) == POLICIES[policy].is_bounded
    assert stats.bound_service is None or 0.0 < stats.largest_gap_service <= stats.bound_service


@pytest.mark.parametrize(("policy", "share"), [("vtc", 0.0), ("vtc-predict", 0.0), ("drr", 0.025), ("dlpm", 0.25)])
def test_the_pass_of_a_policy_is_part_of_its_bound(policy: str, share: float) -> None:
    config = pool(policy=policy, tenants={"a": 1.0, "b": 2.0})
    first = bounds.peak_service(config) * (2.0 if policy == "vtc-predict" else 1.0)
    assert bounds.bound_service(config) == pytest.approx(first + share * bounds.peak_service(config))


# --- changing the policy under load -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [530, 531])
def test_every_policy_follows_every_other_under_load(seed: int) -> None:
    walk = every_switch()
    assert set(pairwise(walk)) >= {(a, b) for a in ALL for b in ALL if a != b}
    case = scenario(seed, policy=walk[0], steps=2 * len(walk) + 20, same_mode="flood", with_faults=True)
    outcome = Switching(case, policies=walk)
    outcome.is_judged = False
    outcome.go()
    assert not outcome.policies


def test_a_switch_that_starts_counters_anew_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = switch._apply_tiers

    def forget(tenant: Any, tiers: Any) -> None:
        tenant.counter = 0.0
        original(tenant, tiers)

    monkeypatch.setattr(switch, "_apply_tiers", forget)
    case = scenario(530, policy="fifo", steps=60, same_mode="flood")
    with pytest.raises(LawBroken, match=r"switch|audit"):
        Switching(case, policies=["vtc", "fifo"] * 8).go()


# --- asking and stopping to ask ---------------------------------------------------------------------------------------


@every_policy
def test_asking_who_is_in_turn_changes_nothing(policy: str) -> None:
    case = scenario(540, policy=policy, steps=150, with_faults=True)
    assert Probed(case).go().log == Pool(case, UNJUDGED).go().log


def test_an_index_that_loses_what_was_looked_at_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def candidates(self: Any, now: float) -> Any:
        entry = self._keys.pop()
        if entry is not None:
            yield entry[2].head(now, self._aging_s), Standing.HEAD
            self._keys.restore([entry])

    monkeypatch.setattr(Vtc, "candidates", candidates)
    with pytest.raises(LawBroken):
        Probed(scenario(540, policy="vtc", steps=150)).go()


# --- cost -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_scheduler, "_WARM_UP_DECISIONS", 100)


def calls_per_decision(policy: str, tenants: int) -> float:
    """Function calls, Python's and built-in ones, per decision in a saturated pool. No clock is read."""
    load = bench_scheduler.Saturated(policy=policy, tenants=tenants, queued=2 * tenants, seed=7)
    scheduler = load._scheduler
    handle = scheduler.handle
    total = decisions = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal total
        total += event in ("call", "c_call")

    def counted(event: Any, now: float) -> Any:
        nonlocal total, decisions
        before = total
        sys.setprofile(count)
        try:
            actions = handle(event, now)
        finally:
            sys.setprofile(None)
        if dispatched(actions):
            decisions += 1
        else:
            total = before
        return actions

    scheduler.handle = counted  # type: ignore[method-assign]
    while decisions < 100:
        load.step()
    return total / decisions


@pytest.mark.usefixtures("short_warm_up")
@every_policy
def test_a_decision_costs_the_same_with_twenty_times_the_tenants(policy: str) -> None:
    assert calls_per_decision(policy, 500) <= 2.0 * calls_per_decision(policy, 25)


@pytest.mark.usefixtures("short_warm_up")
def test_a_scan_over_all_tenants_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def candidates(self: Any, now: float) -> Any:
        waiting = list(self._keys._live)
        if waiting:
            yield min(waiting, key=lambda tenant: tenant.counter).head(now, self._aging_s), Standing.HEAD

    monkeypatch.setattr(Vtc, "candidates", candidates)
    assert calls_per_decision("vtc", 500) > 2.0 * calls_per_decision("vtc", 25)


@every_policy
def test_what_a_policy_keeps_of_those_who_are_gone_is_bounded(policy: str) -> None:
    tenants = {f"t{number}": 1.0 for number in range(20)}
    scheduler = started(pool(kv=2_001, policy=policy, tenants=tenants, max_queued=100_000))
    for number in range(3_000):
        scheduler.handle(arrival(f"r{number}", f"t{number % 20}", prompt=10, cap=10), number * 0.05)
        scheduler.handle(tokens(f"r{number}", 10), number * 0.05)
        scheduler.handle(Finished(request_id=RequestId(f"r{number}")), number * 0.05)
    scheduler.handle(arrival("last", "t0", prompt=10, cap=10), 1_000.0)
    assert not {part: size for part, size in left_in(scheduler).items() if size > 200}


# --- what is said of it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [*POLICIES, *TEST_POLICIES])
def test_its_module_says_rule_guarantee_cost_failure_mode_and_source(policy: str) -> None:
    text = inspect.getmodule(policy_class(policy)).__doc__ or ""
    assert text.startswith(f"``{policy}``")
    for part in ("Rule:", "Guarantee:", "Cost:", "Failure mode:", "Source:"):
        assert part in text, part


def test_policies_for_tests_are_not_offered() -> None:
    for name in TEST_POLICIES:
        assert name not in policy_names()
        with pytest.raises(ConfigError, match="unknown policy"):
            pool(policy=name)
