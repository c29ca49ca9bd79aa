"""Laws of ``slo-fair`` over random small pools, each with the mutant of the scheduler that must break it.

A mutant changes one rule of the product. Its case runs with a single law switched on, so it shows that this law, and
no other check, notices.
"""

from __future__ import annotations

import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from router_ext.core import bounds
from router_ext.core.admission import Backend
from router_ext.core.books import Books
from router_ext.core.cost import LinearCost
from router_ext.core.decision import Decider
from router_ext.core.explain import Gate
from router_ext.core.fairness import counters as counters_module
from router_ext.core.fairness.counters import Counters
from router_ext.core.fleet import Fleet
from router_ext.core.lanes import ArrivalOrder
from router_ext.core.scheduler import Scheduler
from tests.property.harness import ALL_LAWS, Run, Scenario, scenario
from tests.property.mutants import free_skipping, unlimited_going_on, unlimited_urgency
from tests.property.oracle import LawBroken
from tests.support.interpreters import printed

SEEDS = range(16)
plain = {"weighted": False, "with_targets": False}
tight = {
    **plain,
    "same_mode": "flood",
    "contrast": True,
    "passes": (0.0, 0.0),
    "num_servers": 1,
    "prices": (1.0, 2.0),
    "preemptive": False,
}
"""Where the bound is nearly reached; preemption keeps tenants closer together."""


def run(case: Scenario, *laws: str) -> Run:
    return Run(case, frozenset(laws) if laws else ALL_LAWS).go()


def run_many(cases: list[Scenario], law: str) -> None:
    for case in cases:
        run(case, law)


# --- the laws hold ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_all_laws_hold_with_mixed_tiers_weights_and_servers(seed: int) -> None:
    outcome = run(scenario(seed))
    assert outcome.log


@pytest.mark.parametrize("seed", range(100, 112))
def test_all_laws_hold_with_cancels_failures_crashes_and_dropped_tokens(seed: int) -> None:
    run(scenario(seed, with_faults=True))


@pytest.mark.parametrize("seed", range(200, 208))
def test_all_laws_hold_with_unit_weights_and_no_targets(seed: int) -> None:
    run(scenario(seed, weighted=False, with_targets=False, with_faults=seed % 2 == 0))


@pytest.mark.parametrize("seed", range(400, 416))
def test_all_laws_hold_with_unequal_servers_and_outages_of_the_largest(seed: int) -> None:
    run(scenario(seed, steps=400, unequal=True, with_faults=seed % 2 == 0))


def test_requests_are_parked_come_back_and_expire_in_the_random_outages() -> None:
    """The law above would prove nothing if nobody ever waited for the largest server."""
    came_back = expired = 0
    for seed in range(400, 408):
        outcome = run(scenario(seed, steps=400, unequal=True))
        smallest = min(server["kv_tokens"] for server in outcome.scenario.servers.values())
        large = {name for name, job in outcome.jobs.items() if job.input_tokens > smallest}
        expired += sum(1 for name in large if outcome.jobs[name].outcomes == ["no_backend_available"])
        came_back += sum(1 for entry in outcome.log if entry[1] in large and entry[-1] == 1)
    assert came_back > 5
    assert expired > 5


def test_the_random_pools_come_close_to_the_bound() -> None:
    """A law that is never nearly broken would prove nothing."""
    cases = [scenario(seed, steps=250, **tight) for seed in range(4)]
    assert max(run(case).oracle.worst_counter for case in cases) > 0.9


@pytest.mark.parametrize("seed", range(300, 304))
def test_fifo_keeps_ledger_and_books_too(seed: int) -> None:
    run(scenario(seed, policy="fifo", with_faults=True, unequal=seed % 2 == 0))


@pytest.mark.parametrize("seed", range(5))
def test_the_product_states_the_bound_the_oracle_judges_by(seed: int) -> None:
    outcome = run(scenario(seed, steps=20))
    config, oracle = outcome.scenario.config(), outcome.oracle
    assert bounds.peak_service(config) == pytest.approx(oracle.peak)
    shares = list(config.tenants.values())
    for share in shares:
        assert bounds.counter_bound(config, share) == pytest.approx(oracle.counter_bound(share.tenant))
    expected = oracle.counter_bound(shares[0].tenant) + oracle.counter_bound(shares[1].tenant)
    assert bounds.pair_bound(config, shares[0], shares[1]) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(4))
def test_the_largest_gap_shown_is_within_the_bound_shown(seed: int) -> None:
    stats = run(scenario(seed)).scheduler.stats()
    assert stats.bound_service is not None
    assert 0.0 < stats.largest_gap_service <= stats.bound_service


# --- mutants ---------------------------------------------------------------------------------------------------------


def no_lift(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(counters_module, "lift", lambda counter, virtual_time: counter)


def charge_at_completion(patch: pytest.MonkeyPatch) -> None:
    def output(self: LinearCost, request: Any) -> float:
        return 0.0

    def finished(self: Any, event: Any, now: float, actions: Any) -> None:
        request = self._requests.get(event.request_id)
        if request is not None:
            unpaid = request.output_tokens - request.paid_out
            request.paid_out = request.output_tokens
            self._books.policy.charge(request, self._books.cost.output_price * unpaid)
        original(self, event, now, actions)

    original = Scheduler._on_finished
    patch.setattr(LinearCost, "output", output)
    patch.setattr(Scheduler, "_on_finished", finished)


def wrong_weight(patch: pytest.MonkeyPatch) -> None:
    original = Counters.charge
    patch.setattr(
        Counters, "charge", lambda self, request, service: original(self, request, service * request.tenant.weight)
    )


def one_admission_per_event(patch: pytest.MonkeyPatch) -> None:
    original = Decider._admit

    def admit(self: Any, now: float, misfits: Any, actions: list[Any]) -> Gate | None:
        if any(type(action).__name__ == "Dispatch" for action in actions):
            return Gate.KV
        return original(self, now, misfits, actions)

    patch.setattr(Decider, "_admit", admit)


def last_come_first_served(patch: pytest.MonkeyPatch) -> None:
    def add(self: Any, request: Any) -> None:
        if request.is_resumed:
            original(self, request)
        else:
            self._fresh = OrderedDict([(request.seq, request), *self._fresh.items()])

    original = ArrivalOrder.add
    patch.setattr(ArrivalOrder, "add", add)


def resumed_go_last(patch: pytest.MonkeyPatch) -> None:
    def add(self: Any, request: Any) -> None:
        request.is_resumed = False
        original(self, request)

    original = ArrivalOrder.add
    patch.setattr(ArrivalOrder, "add", add)


def double_charge_on_finish(patch: pytest.MonkeyPatch) -> None:
    def finished(self: Any, event: Any, now: float, actions: Any) -> None:
        request = self._requests.get(event.request_id)
        if request is not None:
            self._books.policy.charge(request, self._books.cost.output_price * request.output_tokens)
        original(self, event, now, actions)

    original = Scheduler._on_finished
    patch.setattr(Scheduler, "_on_finished", finished)


def no_high_water_mark(patch: pytest.MonkeyPatch) -> None:
    """A resumed request pays for its prompt again."""

    def admit(self: LinearCost, request: Any) -> float:
        return float(self.prompt_price * request.prompt_tokens)

    patch.setattr(LinearCost, "admit", admit)


def lift_assigns(patch: pytest.MonkeyPatch) -> None:
    def lift(counter: float, virtual_time: float) -> float:
        return counter if virtual_time == float("-inf") else virtual_time

    patch.setattr(counters_module, "lift", lift)


def leak_on_cancel(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_close", lambda self, backend, ticket, at_s: None)


def release_at_once_on_cancel(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_close", lambda self, backend, ticket, at_s: backend.free(ticket))


def forget_the_reserved_block(patch: pytest.MonkeyPatch) -> None:
    original = Backend.apply

    def apply(self: Any, config: Any) -> None:
        original(self, config)
        self.ledger.usable_blocks += 1
        self.ledger.free_blocks += 1

    patch.setattr(Backend, "apply", apply)


def never_park(patch: pytest.MonkeyPatch) -> None:
    """A request that no usable backend could hold stays in line, and in turn."""

    def plan(self: Any, request: Any) -> bool:
        can_fit = original(self, request)
        request.is_stuck = False
        return can_fit

    original = Books.plan
    patch.setattr(Books, "plan", plan)


def never_come_back(patch: pytest.MonkeyPatch) -> None:
    original = Fleet.refresh

    def refresh(self: Any, now: float) -> bool:
        grew = len(self.shapes)
        is_changed = original(self, now)
        return is_changed and len(self.shapes) < grew

    patch.setattr(Fleet, "refresh", refresh)


Mutant = Callable[[pytest.MonkeyPatch], None]

MUTANTS: list[tuple[str, str, Mutant, dict[str, Any]]] = [
    ("1", "counter_bound", no_lift, plain),
    ("1", "counter_bound", charge_at_completion, tight),
    ("2", "pair_bound", wrong_weight, {"with_targets": False, "same_mode": "flood"}),
    ("2", "pair_bound", free_skipping, tight),
    ("2", "pair_bound", unlimited_urgency, {"same_mode": "flood"}),
    ("5", "no_skipping", unlimited_going_on, tight),
    ("4", "work_conserving", one_admission_per_event, plain),
    ("4", "work_conserving", never_park, {**plain, "unequal": True}),
    ("4", "audit", never_park, {"unequal": True}),
    ("4", "audit", never_come_back, {"unequal": True}),
    ("5", "no_skipping", free_skipping, {"with_targets": False}),
    ("5", "no_skipping", unlimited_urgency, {}),
    ("6", "client_fifo", last_come_first_served, {}),
    ("6", "client_fifo", resumed_go_last, {"with_faults": True}),
    ("7", "conservation", double_charge_on_finish, {"with_faults": True}),
    ("7", "conservation", no_high_water_mark, {"with_faults": True}),
    ("9", "lift", lift_assigns, {"with_targets": False}),
    ("9", "lift", no_lift, {"with_targets": False}),
    ("13", "ledger", leak_on_cancel, {"with_faults": True}),
    ("13", "server_queue_empty", release_at_once_on_cancel, {"with_faults": True}),
    ("13", "server_queue_empty", forget_the_reserved_block, {}),
]


@pytest.mark.parametrize(
    ("law", "mutant", "options"),
    [pytest.param(law, mutant, options, id=f"{row}-{law}-{mutant.__name__}") for row, law, mutant, options in MUTANTS],
)
def test_a_mutant_breaks_its_law(
    law: str, mutant: Mutant, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(LawBroken, match=f"^{law}"):
        run_many([scenario(seed, steps=300, **options) for seed in range(24)], law)


# --- permutation and determinism -------------------------------------------------------------------------------------


def renamed(name: str) -> str:
    """A permutation of tenant names that turns their order round."""
    return f"ten_{chr(ord('z') - (ord(name[-1]) - ord('a')))}"


def logs_of_both_names(seed: int) -> tuple[list[Any], list[Any]]:
    case = scenario(seed, steps=200, with_faults=True)
    return Run(case, frozenset()).go().log, Run(case, frozenset(), rename=renamed).go().log


@pytest.mark.parametrize("seed", range(6))
def test_renaming_tenants_changes_no_decision(seed: int) -> None:
    """Ties included: they are broken by who has waited longest, never by name."""
    first, second = logs_of_both_names(seed)
    assert first == second


def test_ties_broken_by_hash_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Counters.backlogged

    def backlogged(self: Any, tenant: Any) -> None:
        known = self._next_since
        self._next_since = 1 + zlib.crc32(tenant.tenant_id.encode())
        original(self, tenant)
        self._next_since = known

    monkeypatch.setattr(Counters, "backlogged", backlogged)
    assert any(first != second for first, second in map(logs_of_both_names, range(6)))


def test_the_same_events_give_the_same_actions() -> None:
    for seed in range(3):
        case = scenario(seed, steps=200, with_faults=True)
        assert Run(case, frozenset()).go().log == Run(case, frozenset()).go().log


def test_the_hash_seed_of_the_interpreter_changes_nothing() -> None:
    program = (
        "from tests.property.harness import *\n"
        "import hashlib\n"
        "log = [Run(scenario(seed, steps=150, with_faults=True), frozenset()).go().log for seed in range(2)]\n"
        "print(hashlib.sha256(repr(log).encode()).hexdigest())\n"
    )
    assert printed(program, hash_seed=1) == printed(program, hash_seed=2)


def test_a_wall_clock_in_the_scheduler_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler.handle
    monkeypatch.setattr(Scheduler, "handle", lambda self, event, now: original(self, event, time.perf_counter() * 50))
    case = scenario(3, steps=200, with_faults=True)
    assert Run(case, frozenset()).go().log != Run(case, frozenset()).go().log
