"""Laws of the counter policies over random small pools, with the exact constants, and the mutants that break them."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from router_ext.core import bounds
from router_ext.core.books import Books
from router_ext.core.decision import Decider
from router_ext.core.fairness.base import Standing
from router_ext.core.fairness.counters import Counters
from router_ext.core.fairness.drr import Drr
from router_ext.core.fairness.vtc import Vtc
from router_ext.core.fairness.vtc_predict import VtcPredict
from tests.property.family import ArbitraryOracle, DrrOracle, PredictOracle, VtcOracle, Watched, returning
from tests.property.harness import ALL_LAWS, Run, Scenario, scenario
from tests.property.oracle import LawBroken, Oracle
from tests.property.test_laws import (
    Mutant,
    charge_at_completion,
    double_charge_on_finish,
    last_come_first_served,
    lift_assigns,
    no_high_water_mark,
    no_lift,
    one_admission_per_event,
    plain,
    renamed,
    resumed_go_last,
    tight,
    wrong_weight,
)

ORACLES: dict[str, type[Oracle]] = {"vtc": VtcOracle, "lcf": VtcOracle, "drr": DrrOracle, "vtc-predict": PredictOracle}
FAMILY = ["vtc", "vtc-predict", "drr"]
LAWS = ALL_LAWS | {"advance_bound", "monotone", "refunds"}


def run(case: Scenario, *laws: str) -> Run:
    return Watched(case, frozenset(laws) if laws else LAWS, oracle_type=ORACLES[case.policy]).go()


def run_against_all(case: Scenario, *laws: str) -> ArbitraryOracle:
    oracle = Run(case, frozenset(laws), oracle_type=ArbitraryOracle).go().oracle
    assert isinstance(oracle, ArbitraryOracle)
    return oracle


def run_many(cases: list[Scenario], law: str) -> None:
    for case in cases:
        if law in ("arbitrary", "latency"):
            run_against_all(case, law)
        else:
            run(case, law)


# --- the laws hold ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", FAMILY)
@pytest.mark.parametrize("seed", range(8))
def test_all_laws_hold(policy: str, seed: int) -> None:
    options: dict[str, Any] = {"with_faults": seed % 3 == 0, "unequal": seed % 4 == 3, "weighted": seed % 2 == 0}
    assert run(scenario(seed, policy=policy, steps=250, **options)).log


@pytest.mark.parametrize("seed", range(20, 24))
def test_no_tenant_is_far_behind_any_other_and_none_waits_for_long(seed: int) -> None:
    run_against_all(scenario(seed, policy="vtc", steps=300, weighted=False), "arbitrary", "latency")


@pytest.mark.parametrize("policy", FAMILY)
def test_who_was_away_for_long_takes_nothing_of_what_it_missed(policy: str) -> None:
    for seed in range(3):
        run(returning(seed, policy=policy, weighted=seed == 1), *LAWS)
    if policy == "vtc":
        run_against_all(returning(3, policy=policy, **back), "arbitrary", "latency")


@pytest.mark.parametrize("policy", FAMILY)
def test_the_random_pools_come_close_to_the_bound(policy: str) -> None:
    """A law that is never nearly broken would prove nothing."""
    cases = [scenario(seed, policy=policy, steps=250, **tight) for seed in range(4)]
    assert max(run(case).oracle.worst_counter for case in cases) > 0.9


@pytest.mark.parametrize("policy", FAMILY)
@pytest.mark.parametrize("seed", range(5))
def test_the_product_states_the_bound_the_oracle_judges_by(policy: str, seed: int) -> None:
    outcome = run(scenario(seed, policy=policy, steps=20))
    config, oracle = outcome.scenario.config(), outcome.oracle
    heaviest = max(config.tenants.values(), key=lambda share: share.weight)
    assert bounds.counter_bound(config, heaviest) == pytest.approx(oracle.counter_bound(heaviest.tenant))
    for share in config.tenants.values():
        stated = bounds.counter_bound(config, share)
        assert stated is not None
        assert stated >= oracle.counter_bound(share.tenant) - 1e-6


@pytest.mark.parametrize("policy", FAMILY)
@pytest.mark.parametrize("seed", range(2))
def test_the_largest_gap_shown_is_within_the_bound_shown(policy: str, seed: int) -> None:
    stats = run(scenario(seed, policy=policy, steps=300)).scheduler.stats()
    assert stats.bound_service is not None
    assert 0.0 < stats.largest_gap_service <= stats.bound_service


# --- mutants ---------------------------------------------------------------------------------------------------------


def skip_on_no_fit(patch: pytest.MonkeyPatch) -> None:
    """Whoever fits may go ahead of a head in turn that does not."""

    def candidates(self: Any, now: float) -> Any:
        popped: list[Any] = []
        try:
            while (entry := self._keys.pop()) is not None:
                popped.append(entry)
                yield entry[2].head(now, self._aging_s), Standing.HEAD
        finally:
            self._keys.restore(popped)

    patch.setattr(Vtc, "candidates", candidates)
    patch.setattr(Decider, "_unclaimed", lambda self, options, *rest: options)


def first_come_first_served(patch: pytest.MonkeyPatch) -> None:
    def candidates(self: Any, now: float) -> Any:
        for tenant in self._keys._live:
            first = min((q for t in self._keys._live for q in t.by_rank if q.head), key=lambda q: q.head.seq)
            assert tenant is not None
            yield first.head, Standing.HEAD
            return

    patch.setattr(Vtc, "candidates", candidates)


def no_clip(patch: pytest.MonkeyPatch) -> None:
    """The prediction counts in full, whatever the slice in flight can produce."""

    def update(self: Any, request: Any) -> None:
        expected = 0.0
        if self._is_gamma and request.state.is_running:
            expected = self.cost.ahead(request, 3 * request.predicted_output_tokens)
        request.tenant.expected_rest += expected - request.expected_rest
        request.expected_rest = expected

    patch.setattr(Books, "_update_expected", update)


def unbounded_refund(patch: pytest.MonkeyPatch) -> None:
    """What ends gives back the whole prediction, whether or not it was produced."""
    original = Books.leave

    def leave(self: Any, request: Any, now: float) -> Any:
        request.expected_rest = self.cost.ahead(request, 2 * request.predicted_output_tokens)
        return original(self, request, now)

    patch.setattr(Books, "leave", leave)


def refund_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The order of keys does not learn of refunds."""
    patch.setattr(VtcPredict, "stopped", lambda self, request, now: None)


def no_lift_in_advance(patch: pytest.MonkeyPatch) -> None:
    """A tenant comes back at the smallest counter, ahead of those who are charged for what runs."""
    patch.setattr(VtcPredict, "backlogged", lambda self, tenant: super(VtcPredict, self).backlogged(tenant))


def rounds_too_long(patch: pytest.MonkeyPatch) -> None:
    """The quantum is divided by nobody's weight."""
    original = Drr.__init__

    def init(self: Any, around: Any) -> None:
        original(self, around)
        self._quantum = around.peak_service

    patch.setattr(Drr, "__init__", init)


def debt_forgiven(patch: pytest.MonkeyPatch) -> None:
    """A tenant that comes back starts like one that owes nothing."""

    def backlogged(self: Any, tenant: Any) -> None:
        tenant.counter = min(tenant.counter, self.floor_or_last())
        original(self, tenant)

    original = Counters.backlogged
    patch.setattr(Counters, "backlogged", backlogged)


back: dict[str, Any] = {"weighted": False, "with_targets": False}
"""Of ``returning`` in place of a random pool."""

flood: dict[str, Any] = {"with_targets": False, "same_mode": "flood"}


def make(policy: str, seed: int, options: dict[str, Any]) -> Scenario:
    if options is back:
        return returning(seed, policy=policy, **options)
    return scenario(seed, policy=policy, steps=300, **options)


MUTANTS: list[tuple[str, str, str, Mutant | None, dict[str, Any]]] = [
    ("1", "lcf", "counter_bound", None, back),
    ("1", "vtc", "counter_bound", no_lift, plain),
    ("1", "drr", "counter_bound", no_lift, back),
    ("1", "drr", "counter_bound", rounds_too_long, flood),
    ("1", "vtc", "counter_bound", charge_at_completion, tight),
    ("1", "vtc-predict", "advance_bound", no_clip, flood),
    ("2", "vtc", "pair_bound", wrong_weight, flood),
    ("2", "drr", "pair_bound", wrong_weight, flood),
    ("2", "vtc-predict", "pair_bound", wrong_weight, flood),
    ("2", "vtc", "pair_bound", skip_on_no_fit, tight),
    ("3", "lcf", "arbitrary", None, back),
    ("3", "vtc", "arbitrary", no_lift, back),
    ("4", "vtc", "work_conserving", one_admission_per_event, plain),
    ("5", "vtc", "no_skipping", skip_on_no_fit, flood),
    ("5", "drr", "no_skipping", skip_on_no_fit, flood),
    ("5", "vtc-predict", "no_skipping", skip_on_no_fit, flood),
    ("5", "vtc-predict", "no_skipping", refund_forgotten, flood),
    ("5", "vtc-predict", "no_skipping", no_lift_in_advance, {}),
    ("6", "vtc", "client_fifo", last_come_first_served, {}),
    ("6", "drr", "client_fifo", resumed_go_last, {"with_faults": True}),
    ("7", "vtc", "conservation", double_charge_on_finish, {"with_faults": True}),
    ("7", "vtc-predict", "conservation", no_high_water_mark, {"with_faults": True}),
    ("8", "vtc-predict", "refunds", unbounded_refund, {}),
    ("8", "vtc", "monotone", debt_forgiven, {}),
    ("9", "vtc", "lift", lift_assigns, {"with_targets": False}),
    ("9", "drr", "lift", no_lift, {"with_targets": False}),
    ("14", "vtc", "latency", first_come_first_served, back),
]


@pytest.mark.parametrize(
    ("policy", "law", "mutant", "options"),
    [
        pytest.param(policy, law, mutant, options, id=f"{row}-{policy}-{law}-{mutant.__name__ if mutant else 'itself'}")
        for row, policy, law, mutant, options in MUTANTS
    ],
)
def test_a_mutant_breaks_its_law(
    policy: str, law: str, mutant: Mutant | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if mutant is not None:
        mutant(monkeypatch)
    with pytest.raises(LawBroken, match=f"^{law}"):
        run_many([make(policy, seed, options) for seed in range(24)], law)


def test_ties_broken_by_hash_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renaming tenants changes no decision of any policy (see the conformance suite) unless names break ties."""
    original = Counters.enter

    def enter(self: Any, tenant: Any) -> None:
        known = self._next_since
        self._next_since = 1 + zlib.crc32(tenant.tenant_id.encode())
        original(self, tenant)
        self._next_since = known + 1

    monkeypatch.setattr(Counters, "enter", enter)
    for policy in FAMILY:
        cases = [scenario(seed, policy=policy, steps=200) for seed in range(4)]
        logs = [(Run(case, frozenset()).go().log, Run(case, frozenset(), rename=renamed).go().log) for case in cases]
        assert any(first != second for first, second in logs)
