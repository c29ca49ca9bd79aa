"""Scores against closed forms; the gate refuses both ways and says by whom and by how much."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.training import gate
from controlplane.training.gate import judge
from controlplane.training.scores import pinball, score, spearman

ACTUAL = list(range(1, 201))
PERFECT = [[y] * 7 for y in ACTUAL]
LONGER = [[2 * y] * 7 for y in ACTUAL]  # the same order, a larger loss
CONSTANT = [[100] * 7 for _ in ACTUAL]


def test_the_perfect_predictor_scores_perfectly() -> None:
    perfect = score(PERFECT, ACTUAL)
    assert (perfect.pinball, perfect.mae, perfect.median_relative_error) == (0, 0, 0)
    assert perfect.rank == pytest.approx(1)
    assert (perfect.coverage_80, perfect.coverage_90) == (1, 1)


def test_the_loss_is_lowest_at_the_quantiles_themselves() -> None:
    """Of answers of 1 to 200 tokens, at any level: moving the quantile either way costs."""
    true = [10, 20, 50, 100, 150, 180, 190]
    best = sum(pinball(true, y) for y in ACTUAL)
    for index in range(7):
        for shift in (-5, 5):
            moved = [q + shift * (i == index) for i, q in enumerate(true)]
            assert sum(pinball(moved, y) for y in ACTUAL) > best


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=40))
def test_rank_is_the_correlation_of_mean_ranks(pairs: list[tuple[int, int]]) -> None:
    left, right = [a for a, _ in pairs], [b for _, b in pairs]

    def rank(values: Sequence[int]) -> list[float]:
        return [sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values]

    a, b, mean = rank(left), rank(right), (len(pairs) + 1) / 2
    spread = (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5
    expected = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True)) / spread if spread else 0.0
    assert spearman(left, right) == pytest.approx(expected, abs=1e-9)
    assert spearman(left, right) == spearman(right, left)


@pytest.mark.parametrize(("predicted", "actual"), [([], []), (PERFECT[:3], ACTUAL[:2])])
def test_rows_that_do_not_fit_are_no_score(predicted: list[list[int]], actual: list[int]) -> None:
    with pytest.raises(ValueError, match="predictions for"):
        score(predicted, actual)


class TestGate:
    def test_the_better_one_passes(self) -> None:
        verdict = judge({"candidate": PERFECT, "active": LONGER, "pool_median": CONSTANT}, ACTUAL)
        assert verdict.is_passed
        assert "not worse than any other" in verdict.reason
        assert "200 answers" in verdict.reason
        assert set(verdict.scores) == {"candidate", "active", "pool_median"}

    def test_the_same_one_passes(self) -> None:
        assert judge({"candidate": LONGER, "active": LONGER}, ACTUAL).is_passed

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
        assert verdict.reason.startswith("only 99 answers")
        assert "100" in verdict.reason
        assert verdict.scores == {}

    def test_numbers_that_differ_are_shown_as_different(self) -> None:
        assert gate._fine(0.30004, 0.30001) == "0.30004 against 0.30001"
        assert gate._fine(0.31, 0.3) == "0.310 against 0.300"
