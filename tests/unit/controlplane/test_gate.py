"""The gate passes what is better beyond chance, refuses the rest, and says by whom and by how much."""

from __future__ import annotations

import random

import numpy as np
import pytest

from controlplane.training import gate
from controlplane.training.drift import pinball
from controlplane.training.gate import judge
from router_ext.predict.figures import interval_figures

ACTUAL = list(range(1, 201))
PERFECT = [[y] * 7 for y in ACTUAL]
LONGER = [[2 * y] * 7 for y in ACTUAL]  # the same order, a larger loss
CONSTANT = [[100] * 7 for _ in ACTUAL]


def test_the_loss_is_lowest_at_the_quantiles_themselves() -> None:
    """Of answers of 1 to 200 tokens, at any level: moving the quantile either way costs."""
    true = [10, 20, 50, 100, 150, 180, 190]
    best = sum(pinball(true, y) for y in ACTUAL)
    for index in range(7):
        for shift in (-5, 5):
            moved = [q + shift * (i == index) for i, q in enumerate(true)]
            assert sum(pinball(moved, y) for y in ACTUAL) > best


def test_the_drift_monitor_and_the_gate_mean_the_same_loss() -> None:
    draw = random.Random(1)
    rows = [sorted(draw.randrange(1, 900) for _ in range(7)) for _ in ACTUAL]
    mean = sum(pinball(q, y) for q, y in zip(rows, ACTUAL, strict=True)) / len(ACTUAL)
    found = interval_figures(np.array(rows, np.float64), np.array(ACTUAL, np.float64))
    assert found["pinball"] == pytest.approx(mean, rel=1e-12)


def test_rows_that_do_not_fit_are_no_verdict() -> None:
    with pytest.raises(ValueError, match="199 predictions of active for 200 answers"):
        judge({"candidate": PERFECT, "active": LONGER[:199]}, ACTUAL)


def told(draw: random.Random, actual: list[int], noise: float) -> list[list[float]]:
    """Quantiles around the answers, each row off by as much as chance says."""
    factors = (0.5, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0)
    return [[y * off * factor for factor in factors] for y in actual for off in (draw.lognormvariate(0.0, noise),)]


def share_passed(noise: float, other: float, *, n: int = 300, trials: int = 60) -> float:
    """How often a candidate of this noise replaces an active model of another."""
    n_passed = 0
    for seed in range(trials):
        draw = random.Random(seed)
        actual = [max(1, round(draw.lognormvariate(5, 1))) for _ in range(n)]
        verdict = judge({"candidate": told(draw, actual, noise), "active": told(draw, actual, other)}, actual)
        n_passed += verdict.is_passed
    return n_passed / trials


def share_refused_by_rank(trials: int = 60) -> float:
    """Answers are chance: of candidates with the right spread beside one that says odd things, all with no rank."""
    n_refused = 0
    for seed in range(trials):
        draw = random.Random(seed)
        actual = [max(1, round(draw.lognormvariate(5, 1))) for _ in range(300)]
        about = told(draw, [148] * 300, 0.05)
        far = [[30 * draw.lognormvariate(0, 1)] * 7 for _ in actual]
        n_refused += "its rank" in judge({"candidate": about, "tenant_mean5": far}, actual).reason
    return n_refused / trials


def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: whatever differs, differs for a reason."""
    monkeypatch.setattr(gate, "CONFIDENCE", 0.0)


class TestChance:
    def test_an_equal_model_hardly_ever_replaces_the_active_one(self) -> None:
        assert share_passed(0.3, 0.3) <= 0.15

    def test_a_better_one_nearly_always_does(self) -> None:
        assert share_passed(0.25, 0.4) >= 0.95

    def test_ranks_that_are_chance_refuse_nobody(self) -> None:
        assert share_refused_by_rank() <= 0.15

    def test_a_gate_that_took_chance_for_a_reason_would_fail_both(self, monkeypatch: pytest.MonkeyPatch) -> None:
        without_noise(monkeypatch)
        assert share_passed(0.3, 0.3) > 0.3
        assert share_refused_by_rank() > 0.3

    def test_the_error_is_that_of_the_mean_where_rows_are_independent(self) -> None:
        values = np.random.default_rng(1).normal(size=4_000)
        error = gate._standard_error(len(values), lambda kept: float(values[kept].mean()))
        assert error == pytest.approx(4_000**-0.5, rel=0.35)

    def test_rows_that_depend_on_their_neighbours_are_less_evidence(self) -> None:
        """The same number fifty times over is one observation."""
        values = np.repeat(np.random.default_rng(1).normal(size=80), 50)
        error = gate._standard_error(len(values), lambda kept: float(values[kept].mean()))
        assert error == pytest.approx(80**-0.5, rel=0.35)


class TestGate:
    def test_the_better_one_passes(self) -> None:
        verdict = judge({"candidate": PERFECT, "active": LONGER, "pool_median": CONSTANT}, ACTUAL)
        assert verdict.is_passed
        assert "better than all others" in verdict.reason
        assert "200 answers" in verdict.reason
        assert set(verdict.scores) == {"candidate", "active", "pool_median"}

    def test_a_tie_is_no_reason_to_change(self) -> None:
        verdict = judge({"candidate": LONGER, "active": LONGER, "pool_median": CONSTANT}, ACTUAL)
        assert not verdict.is_passed
        assert verdict.reason.startswith("no better: its pinball loss")
        assert "of the active model" in verdict.reason
        assert "worse" not in verdict.reason

    def test_a_larger_loss_alone_is_refused(self) -> None:
        verdict = judge({"candidate": LONGER, "active": PERFECT}, ACTUAL)
        assert not verdict.is_passed
        assert "pinball loss" in verdict.reason
        assert "of the active model" in verdict.reason
        assert "rank" not in verdict.reason
        assert "against 0.000" in verdict.reason

    def test_a_lower_rank_alone_is_refused(self) -> None:
        worse = [[10_000] * 7 for _ in ACTUAL]
        candidate = [[80, 90, 95, 100, 105, 110, 120]] * len(ACTUAL)
        ordered_but_far = [[5_000 + y] * 7 for y in ACTUAL]
        verdict = judge({"candidate": candidate, "fallback": worse, "tenant_mean5": ordered_but_far}, ACTUAL)
        assert not verdict.is_passed
        assert verdict.reason.startswith("worse: its rank 0.000 against 1.000 of the tenant's mean of five")
        assert "pinball" not in verdict.reason

    @pytest.mark.parametrize("name", ["active", "fallback", "tenant_mean5", "pool_median"])
    def test_one_better_contender_is_enough_to_refuse(self, name: str) -> None:
        others = {"active": LONGER, "fallback": LONGER, "tenant_mean5": CONSTANT, "pool_median": CONSTANT}
        candidate = [[y * 1.3] * 7 for y in ACTUAL]
        assert judge({"candidate": candidate, **others}, ACTUAL).is_passed
        assert not judge({"candidate": candidate, **others, name: PERFECT}, ACTUAL).is_passed

    def test_too_few_rows_decide_nothing(self) -> None:
        verdict = judge({"candidate": PERFECT[:99]}, ACTUAL[:99])
        assert not verdict.is_passed
        assert verdict.reason.startswith("not judged: only 99 answers")
        assert "at least 100 decide" in verdict.reason
        assert verdict.scores == {}

    def test_numbers_that_differ_are_shown_as_different(self) -> None:
        assert gate._fine(0.30004, 0.30001) == "0.30004 against 0.30001"
        assert gate._fine(0.31, 0.3) == "0.310 against 0.300"
