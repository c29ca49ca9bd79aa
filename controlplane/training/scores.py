"""Figures of one predictor on given answers: what the gate compares and the pages show.

Pinball is defined as in ``usage.accuracy``: the mean over ``LEVELS`` of the loss of ln(1 + tokens). Rank is Spearman's
rho of the medians, ties by their mean rank; a predictor that says the same to everybody has none and counts as 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from router_ext.predict.baseline import LEVELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """``mae`` in tokens; coverage as shares of answers inside [q0.1, q0.9] and [q0.05, q0.95]."""

    n: int
    pinball: float
    rank: float
    mae: float
    median_relative_error: float
    coverage_80: float
    coverage_90: float

    def as_json(self) -> dict[str, Any]:
        return {name: round(value, 6) for name, value in asdict(self).items()}


def score(predicted: Sequence[Sequence[float]], actual: Sequence[int]) -> Score:
    """Figures of quantiles at ``LEVELS``, row by row, against answers of at least one token.

    Cost: O(n log n).

    Raises:
        ValueError: no rows, or not as many predictions as answers.
    """
    if not actual or len(predicted) != len(actual):
        raise ValueError(f"{len(predicted)} predictions for {len(actual)} answers")
    pairs = list(zip(predicted, actual, strict=True))
    middle = len(LEVELS) // 2
    return Score(
        n=len(pairs),
        pinball=fmean(pinball(q, y) for q, y in pairs),
        rank=spearman([q[middle] for q in predicted], actual),
        mae=fmean(abs(q[middle] - y) for q, y in pairs),
        median_relative_error=median(abs(q[middle] - y) / y for q, y in pairs),
        coverage_80=fmean(q[1] <= y <= q[-2] for q, y in pairs),
        coverage_90=fmean(q[0] <= y <= q[-1] for q, y in pairs),
    )


def pinball(quantiles: Sequence[float], actual: int) -> float:
    """Mean over ``LEVELS`` of the pinball loss of ln(1 + tokens); 0 is perfect."""
    log_actual = math.log1p(actual)
    total = 0.0
    for level, quantile in zip(LEVELS, quantiles, strict=True):
        gap = log_actual - math.log1p(quantile)
        total += level * gap if gap >= 0 else (level - 1.0) * gap
    return total / len(LEVELS)


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's rho, -1 to 1; 0 where one side is constant.

    Source: Spearman, The proof and measurement of association between two things (1904), with mean ranks for ties.
    """
    ranks = [_ranks(left), _ranks(right)]
    mean = (len(left) + 1) / 2
    deviations = [[rank - mean for rank in side] for side in ranks]
    spreads = [math.sqrt(sum(d * d for d in side)) for side in deviations]
    if not spreads[0] or not spreads[1]:
        return 0.0
    rho: float = sum(a * b for a, b in zip(*deviations, strict=True)) / (spreads[0] * spreads[1])
    return min(1.0, max(-1.0, rho))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    begin = 0
    while begin < len(order):
        end = begin
        while end < len(order) and values[order[end]] == values[order[begin]]:
            end += 1
        for place in order[begin:end]:
            ranks[place] = (begin + 1 + end) / 2
        begin = end
    return ranks
