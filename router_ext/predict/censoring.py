"""What became of answers that were cut: each is given a length that it may have had.

    residual = y - expected          survival of residuals by Kaplan-Meier: whole answers end, cut ones leave
    length of a cut answer = expected + a residual drawn from those beyond its own

A cut answer is longer than what is known of it. Taken for whole it pulls expectations down; left out, long answers are
missing where limits cut them; a loss that counts it only where it is longer than expected lets whole ones pull down, of
which nobody knows where they would have been cut. With a length drawn, any loss can take it for whole, and expectations
are right as long as what cuts (a limit, a client who leaves) does not know how long the answer would have become.

Source: Buckley and James, Linear Regression with Censored Data (1979), with draws in the place of means; Kaplan and
Meier (1958).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MIN_WHOLE = 200
"""Whole answers from which their residuals are believed: of one model, else of all, else a cut answer counts as
expected where that is longer."""


def lengthened(y: Array, is_cut: NDArray[np.bool_], expected: Array, models: Ints, chance: Array) -> Array:
    """Log lengths [n], those of cut answers drawn, never shorter than ``y``.

    Args:
        y, expected: [n], ln(1 + tokens) as known and as expected. models: [n]. chance: [n], uniform in [0, 1).

    Cost: O(n log n).
    """
    found = np.where(is_cut, np.maximum(y, expected), y).astype(np.float32)
    if not is_cut.any() or (~is_cut).sum() < MIN_WHOLE:
        return found
    rest: Floats = (y - expected).astype(np.float64)
    n_whole = np.bincount(models[~is_cut], minlength=int(models.max()) + 1)
    group = np.where(n_whole[models] >= MIN_WHOLE, models, -1)
    for name in np.unique(group[is_cut]):
        known = np.flatnonzero(group == name) if name >= 0 else np.arange(len(y))
        cut = np.flatnonzero(is_cut & (group == name))
        drawn = _draw(rest[known], is_cut[known], rest[cut], chance[cut])
        found[cut] = np.maximum(y[cut], expected[cut] + drawn.astype(np.float32))
    return found


def _draw(rest: Floats, is_cut: NDArray[np.bool_], beyond: Floats, chance: Array) -> Floats:
    """Residuals of whole answers beyond others [m], by chances [m]; the largest where none is."""
    order = np.lexsort((is_cut, rest))  # who ends and who leaves at the same place: the one who ends first
    at_risk = np.arange(len(rest), 0, -1)
    is_end = ~is_cut[order]
    survival = np.cumprod(np.where(is_end, 1.0 - 1.0 / at_risk, 1.0))[is_end]
    ends = rest[order][is_end]
    n_before = np.searchsorted(ends, beyond, "right")
    left = np.where(n_before > 0, survival[np.maximum(n_before, 1) - 1], 1.0)
    place = np.searchsorted(-survival, -left * chance, "left")
    found: Floats = ends[np.minimum(np.maximum(place, n_before), len(ends) - 1)]
    return found
