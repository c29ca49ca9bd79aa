"""The promotion gate: a candidate serves a pool only if it predicts that pool's newest answers better than all others.

Judged on rows that neither the candidate nor the active model has learnt from. It passes if, against every other
contender (the model that serves, if there is one, and the trivial baselines),

    its mean pinball loss is lower by more than ``CONFIDENCE`` standard errors of the difference, and
    its rank is not lower by more than ``CONFIDENCE`` standard errors of the difference.

A tie is no reason to change: a new model begins without the histories of tenants and keys. A rank that differs by less
than its noise says nothing, above all where answers are chance and every rank is near 0; there the loss alone decides.

Standard errors are those of the delete-a-block jackknife over ``N_BLOCKS`` stretches of time. It is paired, since both
contenders lose the same rows; it holds for ranks as for means; and rows of one stretch may depend on each other, which
an error per row would take for more evidence than there is. Source: Künsch, The jackknife and the bootstrap for general
stationary observations (1989).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from controlplane.training.outcome import ACTIVE, CANDIDATE, NAMES, Score, Verdict, not_judged
from router_ext.predict.baseline import LEVELS
from router_ext.predict.figures import interval_figures, pinball_losses, spearman

MIN_ROWS = 100
"""Answers of a pool without which nothing is promoted: with fewer the rank is off by more than a tenth (1 / sqrt n)."""
N_BLOCKS = 20
CONFIDENCE = 1.729
"""One-sided 95% of Student's t with ``N_BLOCKS`` - 1 degrees of freedom."""

_MIDDLE = len(LEVELS) // 2
_EPSILON = 1e-9
"""Rounding only: the same model judged twice is not better than itself."""
Floats = NDArray[np.float64]


def judge(predicted: Mapping[str, Sequence[Sequence[float]]], actual: Sequence[int]) -> Verdict:
    """Judge the candidate of one pool.

    Args:
        predicted: quantiles at ``LEVELS`` row by row, by contender; ``CANDIDATE`` is one of them.
        actual: tokens of the same rows, answers that came to their natural end, in order of arrival.

    Cost: O(``N_BLOCKS`` n log n) per contender; half a second for 10,000 rows and five contenders.

    Raises:
        ValueError: a contender has not one prediction per answer.
    """
    n = len(actual)
    for name, rows in predicted.items():
        if len(rows) != n:
            raise ValueError(f"{len(rows)} predictions of {name} for {n} answers")
    if n < MIN_ROWS:
        whom = "the candidate or the active model" if ACTIVE in predicted else "the candidate"
        return not_judged(
            f"only {n:,} answers of this pool are newer than what {whom} learnt from; at least {MIN_ROWS:,} decide", n
        )
    tokens = np.asarray(actual, np.float64)
    quantiles = {name: np.asarray(rows, np.float64) for name, rows in predicted.items()}
    scores = {name: _score(rows, tokens) for name, rows in quantiles.items()}
    losses = {name: pinball_losses(rows, tokens) for name, rows in quantiles.items()}
    mine, worse, ties = scores[CANDIDATE], [], []
    for name, other in scores.items():
        if name == CANDIDATE:
            continue
        whose = NAMES.get(name, name)
        gain = losses[name] - losses[CANDIDATE]
        noise = CONFIDENCE * _standard_error(n, partial(_mean_of, gain)) + _EPSILON
        said = f"its pinball loss {_fine(mine.pinball, other.pinball)} of {whose}"
        if float(gain.mean()) < -noise:
            worse.append(said)
        elif float(gain.mean()) <= noise:
            ties.append(f"{said}, which chance alone may differ by {noise:.2g}")
        if mine.rank < other.rank - _EPSILON:
            behind = partial(_rank_gap, quantiles[name][:, _MIDDLE], quantiles[CANDIDATE][:, _MIDDLE], tokens)
            if other.rank - mine.rank > CONFIDENCE * _standard_error(n, behind) + _EPSILON:
                worse.append(f"its rank {_fine(mine.rank, other.rank)} of {whose}")
    on = f"on {n:,} answers held out"
    if worse or ties:
        faults = [f"{head}: {'; '.join(found)}" for head, found in (("worse", worse), ("no better", ties)) if found]
        return Verdict(is_passed=False, reason=f"{'; '.join(faults)} ({on})", n_rows=n, scores=scores)
    best = min((o for name, o in scores.items() if name != CANDIDATE), key=lambda o: o.pinball, default=None)
    against = f" against {best.pinball:.4f} of the best other" if best is not None else ""
    reason = f"better than all others: pinball loss {mine.pinball:.4f}{against}, rank {mine.rank:.3f} ({on})"
    return Verdict(is_passed=True, reason=reason, n_rows=n, scores=scores)


def _score(quantiles: Floats, tokens: Floats) -> Score:
    found = interval_figures(quantiles, tokens)
    names = ("pinball", "mae", "median_relative_error", "coverage_80", "coverage_90")
    return Score(n=len(tokens), rank=found["spearman"], **{name: found[name] for name in names})


def _mean_of(values: Floats, kept: NDArray[np.bool_]) -> float:
    return float(values[kept].mean())


def _rank_gap(left: Floats, right: Floats, tokens: Floats, kept: NDArray[np.bool_]) -> float:
    return spearman(left[kept], tokens[kept]) - spearman(right[kept], tokens[kept])


def _standard_error(n: int, statistic: Callable[[NDArray[np.bool_]], float]) -> float:
    """Of a statistic of n rows, by leaving out one stretch of them after another."""
    values = []
    for block in np.array_split(np.arange(n), N_BLOCKS):
        kept = np.ones(n, np.bool_)
        kept[block] = False
        values.append(statistic(kept))
    return math.sqrt((N_BLOCKS - 1) * float(np.var(values)))


def _fine(mine: float, other: float) -> str:
    """Both numbers with as many digits as it takes to see that they differ."""
    digits = next((d for d in (3, 4, 5, 6) if f"{mine:.{d}f}" != f"{other:.{d}f}"), 9)
    return f"{mine:.{digits}f} against {other:.{digits}f}"
