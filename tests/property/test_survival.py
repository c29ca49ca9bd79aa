"""What is left of a predicted answer, against a distribution that is drawn from, and mutants that must be noticed."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_ext.core.survival import LEVELS, Survival, next_look

Quantiles = tuple[int, ...]
QUANTILES = st.lists(st.integers(1, 5_000), min_size=7, max_size=7).map(lambda values: tuple(sorted(values)))
EXAMPLES: list[Quantiles] = [
    (1,) * 7,
    (400,) * 7,
    (1, 1, 1, 2, 2, 2, 2),
    (10, 20, 60, 150, 300, 700, 1_200),
    (5, 5, 100, 100, 100, 2_000, 2_000),
    (30, 60, 90, 120, 150, 180, 10_000),
]
PRODUCED = (0, 1, 5, 50, 99, 100, 101, 399, 400, 401, 1_000, 12_000)


class Written:
    """The docstring's formulas once more: ``S`` as a list of corners, inverted and integrated by small steps."""

    def __init__(self, quantiles: Quantiles) -> None:
        factor = quantiles[6] / quantiles[5]
        self.power = min(64.0, max(1.25, math.log(2) / math.log(factor))) if factor > 1 else 64.0
        self.corners = [(0.0, 1.0), *((float(q), 1 - p) for q, p in zip(quantiles, LEVELS, strict=True))]

    def beyond(self, x: float) -> float:
        top = self.corners[-1][0]
        if x >= top:
            last = top * 5 ** (1 / self.power)
            return 0.05 * (top / min(x, last)) ** self.power * (last / max(x, last)) ** min(4.0, self.power)
        return next(
            s1 + (s2 - s1) * (x - x1) / (x2 - x1) for (x1, s1), (x2, s2) in pairwise(self.corners) if x1 <= x < x2
        )

    def mean_rest(self, produced: int, cap: int) -> float:
        steps = 20_000
        width = (cap - produced) / steps
        heights = [self.beyond(produced + (i + 0.5) * width) for i in range(steps)]
        return sum(heights) * width / self.beyond(produced)


# --- laws: each says of a class whether it holds for a prediction ---------------------------------------------------


def stays_ahead(kind: type[Survival], quantiles: Quantiles) -> bool:
    """A running answer is never predicted to be as short as it is by now."""
    survival = kind(quantiles)
    return all(survival.total(k, p) >= k + 1 for k in PRODUCED for p in (0.01, 0.5, 0.99))


def rises(kind: type[Survival], quantiles: Quantiles) -> bool:
    """More certainty and more output never make an answer shorter."""
    survival = kind(quantiles)
    levels = (0.01, 0.05, 0.3, 0.5, 0.8, 0.95, 0.97, 0.99)
    by_level = all(survival.total(k, p) <= survival.total(k, q) for k in PRODUCED for p, q in pairwise(levels))
    by_output = all(survival.total(j, p) <= survival.total(k, p) for j, k in pairwise(PRODUCED) for p in levels)
    return by_level and by_output


def states_its_quantiles(kind: type[Survival], quantiles: Quantiles) -> bool:
    """Of an answer that has not begun it says what it was told."""
    survival = kind(quantiles)
    return [survival.total(0, level) for level in LEVELS] == list(quantiles)


def inverts(kind: type[Survival], quantiles: Quantiles) -> bool:
    """A quantile is the first whole length that no more than ``1 - p`` of those that got here exceed."""
    survival, written = kind(quantiles), Written(quantiles)
    for k in PRODUCED:
        for p in (0.1, 0.5, 0.9, 0.97):
            total = survival.total(k, p)
            left = (1 - p) * written.beyond(k) * (1 + 1e-9)
            if written.beyond(total + 1e-5) > left:
                return False
            if total > k + 1 and written.beyond(total - 1 - 1e-5) < left * (1 - 1e-8):
                return False
    return True


def averages(kind: type[Survival], quantiles: Quantiles) -> bool:
    """The expected rest is the integral, as far as steps can take it."""
    survival, written = kind(quantiles), Written(quantiles)
    for k in (0, 5, 100, 400, 1_500):
        for cap in (k + 10, k + 700, 9_000):
            exact = max(1.0, written.mean_rest(k, cap))
            if abs(survival.expected_rest(k, cap) - exact) > 0.002 * exact + (cap - k) / 10_000:
                return False
    return True


LAWS: list[Callable[[type[Survival], Quantiles], bool]] = [stays_ahead, rises, states_its_quantiles, inverts, averages]


class Unconditional(Survival):
    """Forgets what has been written."""

    def total(self, produced: int, level: float) -> int:
        return super().total(0, level)


class Subtracting(Survival):
    """Takes what has been written off the mean of all answers."""

    def expected_rest(self, produced: int, cap: int) -> float:
        return max(1.0, super().expected_rest(0, cap) - produced)


class Undivided(Survival):
    """Does not ask how many got here."""

    def expected_rest(self, produced: int, cap: int) -> float:
        return max(1.0, super().expected_rest(produced, cap) * self.beyond(produced))


class Early(Survival):
    """Rounds down."""

    def total(self, produced: int, level: float) -> int:
        return max(produced + 1, super().total(produced, level) - 1)


class Still(Survival):
    """Lets an answer stay as long as it is."""

    def total(self, produced: int, level: float) -> int:
        return max(produced, super().total(produced, level) - 1)


class Bounded(Survival):
    """Knows no answer beyond the 0.95 quantile."""

    def total(self, produced: int, level: float) -> int:
        return max(produced + 1, min(super().total(produced, level), super().total(0, 0.95)))


MUTANTS = [
    (inverts, Unconditional),
    (stays_ahead, Unconditional),
    (averages, Subtracting),
    (averages, Undivided),
    (states_its_quantiles, Early),
    (inverts, Early),
    (stays_ahead, Still),
    (inverts, Bounded),
]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("quantiles", EXAMPLES)
def test_law(law: Callable[..., bool], quantiles: Quantiles) -> None:
    assert law(Survival, quantiles)


@given(QUANTILES)
def test_the_cheap_laws_hold_for_any_rising_numbers(quantiles: Quantiles) -> None:
    for law in (stays_ahead, rises, states_its_quantiles, inverts):
        assert law(Survival, quantiles), law.__doc__


@pytest.mark.parametrize(("law", "mutant"), MUTANTS)
def test_a_mutant_breaks_its_law(law: Callable[..., bool], mutant: type[Survival]) -> None:
    assert not all(law(mutant, quantiles) for quantiles in EXAMPLES)


def test_it_is_looked_at_ever_more_rarely() -> None:
    looks = [0]
    while looks[-1] < 8_000:
        looks.append(next_look(looks[-1]))
    gaps = [b - a for a, b in pairwise(looks)]
    assert min(gaps) == 32
    assert all(a <= b for a, b in pairwise(gaps))
    assert len(looks) < 40
