"""The promotion gate: a candidate serves a pool only if nobody else predicts that pool's newest answers better.

Judged on the rows of the pool in the newest time span, none of which the candidate has seen. It passes if its pinball
loss is not larger and its rank not lower than those of every other contender: the model that serves, if there is one,
and the trivial baselines. Anything else is refused, and the reason says by whom and by how much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controlplane.training.scores import Score, score

MIN_ROWS = 100
"""Answers of a pool without which nothing is promoted: with fewer the rank is off by more than a tenth (1 / sqrt n)."""
CANDIDATE = "candidate"
ACTIVE = "active"
_EPSILON = 1e-9
"""Rounding only: the same model judged twice is not worse than itself."""

NAMES = {
    CANDIDATE: "the candidate",
    ACTIVE: "the active model",
    "fallback": "the empirical quantiles",
    "tenant_mean5": "the tenant's mean of five",
    "pool_median": "the pool's median",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``scores`` by contender, on ``n_rows`` rows; empty where there were too few."""

    is_passed: bool
    reason: str
    n_rows: int
    scores: Mapping[str, Score]


def judge(predicted: Mapping[str, Sequence[Sequence[float]]], actual: Sequence[int]) -> Verdict:
    """Judge the candidate of one pool.

    Args:
        predicted: quantiles at ``LEVELS`` row by row, by contender; ``CANDIDATE`` is one of them.
        actual: tokens of the same rows, answers that came to their natural end.
    """
    if len(actual) < MIN_ROWS:
        reason = f"only {len(actual):,} answers of this pool are in the newest time span; at least {MIN_ROWS:,} decide"
        return Verdict(is_passed=False, reason=reason, n_rows=len(actual), scores={})
    scores = {name: score(rows, actual) for name, rows in predicted.items()}
    mine = scores[CANDIDATE]
    faults = []
    for name, other in scores.items():
        if name == CANDIDATE:
            continue
        if mine.pinball > other.pinball + _EPSILON:
            faults.append(f"its pinball loss {_fine(mine.pinball, other.pinball)} of {NAMES.get(name, name)}")
        if mine.rank < other.rank - _EPSILON:
            faults.append(f"its rank {_fine(mine.rank, other.rank)} of {NAMES.get(name, name)}")
    on = f"on {len(actual):,} answers held out"
    if faults:
        return Verdict(is_passed=False, reason=f"worse: {'; '.join(faults)} ({on})", n_rows=len(actual), scores=scores)
    best = min((o for n, o in scores.items() if n != CANDIDATE), key=lambda o: o.pinball, default=None)
    against = f" against {best.pinball:.4f} of the best other" if best is not None else ""
    reason = f"not worse than any other: pinball loss {mine.pinball:.4f}{against}, rank {mine.rank:.3f} ({on})"
    return Verdict(is_passed=True, reason=reason, n_rows=len(actual), scores=scores)


def _fine(mine: float, other: float) -> str:
    """Both numbers with as many digits as it takes to see that they differ."""
    digits = next((d for d in (3, 4, 5, 6) if f"{mine:.{d}f}" != f"{other:.{d}f}"), 9)
    return f"{mine:.{digits}f} against {other:.{digits}f}"
