"""Intervals that cover what they say: each pair of quantiles is widened or narrowed about the median.

    f = the (1 - e)(1 + 1/m) quantile over m answers of
        max((median - y) / (median - low), (y - median) / (high - median))

in logs, of answers that the predictor had not seen. Then [median - f (median - low), median + f (high - median)] covers
1 - e of exchangeable answers. Answers to the same and to alike prompts are no independent draws, so what n answers of a
served model say is believed by n / (n + SHRINK) against those of all, and narrows no outermost pair: factors by model
covered 0.885 to 0.889 of new prompts' answers where 0.9 was asked, and least those of single models and hard kinds.

Source: split-conformal prediction of quantiles (Romano, Patterson, Candes 2019), with widths as the unit.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from router_ext.predict.baseline import LEVELS

Array = NDArray[np.float32]

MIDDLE = len(LEVELS) // 2
PAIRS = MIDDLE
_MIN_OWN, _SHRINK = 200, 500.0
"""Answers from which a served model's own quantile counts, and answers' worth of doubt of it."""
_LEAST, _MOST = 0.25, 4.0


def factors(log_quantiles: Array, y: Array, models: NDArray[np.int64], n_models: int) -> Array:
    """Factors [n_models + 1, PAIRS], outermost pair first; the last row is over all, for models that were not seen."""
    median = log_quantiles[:, MIDDLE]
    table = np.ones((n_models + 1, PAIRS), np.float32)
    for pair in range(PAIRS):
        low, high = median - log_quantiles[:, pair], log_quantiles[:, -1 - pair] - median
        outside = np.maximum((median - y) / np.maximum(low, 1e-3), (y - median) / np.maximum(high, 1e-3))
        covered = LEVELS[-1 - pair] - LEVELS[pair]
        table[-1, pair] = _quantile(outside, covered)
        for model in range(n_models):
            own = outside[models == model]
            table[model, pair] = table[-1, pair]
            if len(own) >= _MIN_OWN:
                share = len(own) / (len(own) + _SHRINK)
                more = _quantile(own, covered) - table[-1, pair]
                table[model, pair] += share * (max(more, 0.0) if pair == 0 else more)
    return np.clip(table, _LEAST, _MOST)


def _quantile(values: Array, covered: float) -> float:
    n = len(values)
    rank = min(n, math.ceil(covered * (n + 1)))
    return float(np.partition(values, rank - 1)[rank - 1])


def widen(log_quantiles: Array, factor: Array) -> Array:
    """Quantiles [n, levels] about their medians by factors [n, PAIRS]; rising whatever the factors are."""
    return widen_levels(log_quantiles, by_level(factor))


def by_level(factor: Array) -> Array:
    """Factors [n, levels] of factors [n, PAIRS]."""
    return np.concatenate((factor, np.ones((len(factor), 1), np.float32), factor[:, ::-1]), axis=1)


def widen_levels(log_quantiles: Array, factor: Array) -> Array:
    """``widen`` by factors [n, levels]."""
    median = log_quantiles[:, MIDDLE : MIDDLE + 1]
    spread: Array = (log_quantiles - median) * factor
    upper, lower = spread[:, MIDDLE:], spread[:, MIDDLE::-1]
    np.maximum.accumulate(upper, axis=1, out=upper)
    np.minimum.accumulate(lower, axis=1, out=lower)
    spread += median
    return spread
