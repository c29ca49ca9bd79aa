"""Figures of predictions against answers, all that the field reports.

``mae``, ``median_relative_error`` (|error| / answer), ``r2_log`` (of ln(1 + tokens)), ``spearman``, coverage of the 80%
and 90% intervals, ``pinball`` (mean over ``LEVELS``, of ln(1 + tokens)), ``mae_2048`` (both sides cut there: the 1% of
runaway answers are a third of the absolute error), accuracy in 2 and 5 classes of equal size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from router_ext.predict.baseline import LEVELS

Floats = NDArray[np.float64]
_MIDDLE = len(LEVELS) // 2
_CUT = 2_048.0


def figures(median: Floats, tokens: Floats) -> dict[str, float]:
    """Of medians [n] alone."""
    logs, predicted = np.log1p(tokens), np.log1p(median)
    total = float(((logs - logs.mean()) ** 2).sum())
    error = np.abs(median - tokens)
    return {
        "mae": float(error.mean()),
        "mae_2048": float(np.abs(np.minimum(median, _CUT) - np.minimum(tokens, _CUT)).mean()),
        "median_relative_error": float(np.median(error / tokens)),
        "r2_log": 1.0 - float(((logs - predicted) ** 2).sum()) / total if total > 0 else 0.0,
        "spearman": spearman(median, tokens),
        "accuracy_2": _accuracy(median, tokens, 2),
        "accuracy_5": _accuracy(median, tokens, 5),
    }


def interval_figures(quantiles: Floats, tokens: Floats) -> dict[str, float]:
    """Of quantiles [n, levels]: those of their medians, and of the intervals."""
    return {
        **figures(quantiles[:, _MIDDLE], tokens),
        "coverage_80": float(inside(quantiles, tokens, 1).mean()),
        "coverage_90": float(inside(quantiles, tokens, 0).mean()),
        "pinball": float(pinball_losses(quantiles, tokens).mean()),
    }


def pinball_losses(quantiles: Floats, tokens: Floats) -> Floats:
    """Pinball loss of each row [n]: the mean over ``LEVELS``, of ln(1 + tokens)."""
    rest = np.log1p(tokens)[:, None] - np.log1p(quantiles)
    levels = np.array(LEVELS)
    losses: Floats = np.maximum(levels * rest, (levels - 1.0) * rest).mean(axis=1)
    return losses


def inside(quantiles: Floats, tokens: Floats, pair: int) -> NDArray[np.bool_]:
    """Whether answers lie within a pair of quantiles [n], the outermost pair being 0."""
    within: NDArray[np.bool_] = (quantiles[:, pair] <= tokens) & (tokens <= quantiles[:, -1 - pair])
    return within


def coverage_by(names: Sequence[str], covered: NDArray[np.bool_], least: int) -> dict[str, dict[str, float]]:
    """Share covered by group of at least so many rows, lowest first."""
    of = np.array(names)
    found = {
        str(name): {"n": int((of == name).sum()), "coverage_90": float(covered[of == name].mean())}
        for name in np.unique(of)
        if (of == name).sum() >= least
    }
    return dict(sorted(found.items(), key=lambda item: item[1]["coverage_90"]))


def runaway_figures(probability: Floats, tokens: Floats, limit: int) -> dict[str, float]:
    """Of the probability of more than ``limit`` tokens: how many there were and were expected, area under the ROC
    curve, Brier score and that of always saying the share."""
    away = tokens > limit
    n, n_away = len(tokens), int(away.sum())
    ranks = _ranks(probability)
    pairs = n_away * (n - n_away)
    share = n_away / n
    return {
        "share": share,
        "predicted_share": float(probability.mean()),
        "auc": float((ranks[away].sum() - n_away * (n_away - 1) / 2) / pairs) if pairs else 0.5,
        "brier": float(((probability - away) ** 2).mean()),
        "brier_of_share": share * (1.0 - share),
    }


def spearman(left: Floats, right: Floats) -> float:
    """Rank correlation, ties by their mean rank; 0 where one side says the same of all."""
    a, b = _ranks(left), _ranks(right)
    a, b = a - a.mean(), b - b.mean()
    norm = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / norm if norm > 0 else 0.0


def _ranks(values: Floats) -> Floats:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(count)
    ranks: Floats = (ends - (count + 1) / 2.0)[place]
    return ranks


def _accuracy(median: Floats, tokens: Floats, n_classes: int) -> float:
    cuts = np.quantile(tokens, np.arange(1, n_classes) / n_classes)
    return float((np.searchsorted(cuts, median, "right") == np.searchsorted(cuts, tokens, "right")).mean())
