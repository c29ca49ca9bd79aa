"""The closed-form part: log length as a low-rank function of prompt and served model.

    ln(1 + tokens) of model m on prompt p  =  a_m + sum over r of b_mr <w_r, x_p>          b_m0 = 1

``x_p`` is the prompt's vector (``basis``), ridge-regularised, so each ``w_r`` is a Gaussian process over prompts by
its finite features. What all models have in common (r = 0) is learned from the answers of all of them; the others say
in which ways models differ. Alternating least squares: all w given b in one solve, then a and b model by model.

Outliers (runaway answers) are pulled in to ``_REACH`` of the fit; answers that were cut are given lengths that they may
have had (``censoring``).

Cost: per iteration O(n D^2 + (R D)^3), D the length of a vector, R ``RANK`` + 1: 2 s for 50,000 rows.
Source: the intrinsic model of coregionalisation (Bonilla et al., Multi-task Gaussian Process Prediction, 2007).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from router_ext.predict.censoring import lengthened

Array = NDArray[np.float32]
Ints = NDArray[np.int64]

RANK = 2
_MIN_MODELS = 4
"""Below, differences between models are left to the mixture."""
_RIDGE, _RIDGE_DIFFERENCES = 30.0, 60.0
_RIDGE_MODEL = 3.0
_ITERATIONS = 4
_REACH = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Shape: ``level`` [models + 1], ``weights`` [models + 1, D]; the last is for models that were not seen."""

    level: Array
    weights: Array

    def predict(self, vectors: Array, models: Ints) -> tuple[Array, Array]:
        """Log length [n] by the request's model, and by an average one; ``models`` [n], -1 for an unknown one."""
        own = self.level[models] + np.einsum("nd,nd->n", vectors, self.weights[models])
        average = self.level[-1] + vectors @ self.weights[-1]
        return own, average


def fit_kernel(
    vectors: Array, prompt_of: Ints, models: Ints, n_models: int, y: Array, is_cut: NDArray[np.bool_], *, seed: int
) -> Kernel:
    """Fit to n rows.

    Args:
        vectors: [prompts, D]. prompt_of: [n], the row of each answer's prompt. models: [n], from 0.
        y: [n], ln(1 + tokens). is_cut: [n], the answer is longer than that.
    """
    rank = RANK if n_models >= _MIN_MODELS else 0
    width = vectors.shape[1]
    random = np.random.default_rng(seed)
    mixing = np.concatenate((np.ones((n_models, 1)), 0.5 * random.standard_normal((n_models, rank))), axis=1)
    chance = random.random(len(y), np.float32)
    middle = float(np.median(y))
    level = np.full(n_models, middle)
    rows = [np.flatnonzero(models == m) for m in range(n_models)]
    inputs = [vectors[prompt_of[of]].astype(np.float64) for of in rows]
    grams = [x.T @ x for x in inputs]
    ridge = np.repeat([_RIDGE] + [_RIDGE_DIFFERENCES] * rank, width)
    target = y.astype(np.float64)
    weights = np.zeros((rank + 1, width))
    fit = np.zeros(len(y), np.float32)
    for iteration in range(_ITERATIONS):
        left = np.zeros(((rank + 1) * width,) * 2)
        right = np.zeros((rank + 1) * width)
        for m in range(n_models):
            left += np.kron(np.outer(mixing[m], mixing[m]), grams[m])
            right += np.kron(mixing[m], inputs[m].T @ (target[rows[m]] - level[m]))
        left[np.diag_indices_from(left)] += ridge
        weights = np.linalg.solve(left, right).reshape(rank + 1, width)
        for m in range(n_models):
            scores = inputs[m] @ weights.T
            design = np.concatenate((np.ones((len(scores), 1)), scores[:, 1:]), axis=1)
            rest = target[rows[m]] - scores[:, 0] - middle
            penalty = np.diag([_RIDGE_MODEL] + [_RIDGE_MODEL] * rank)
            solution = np.linalg.solve(design.T @ design + penalty, design.T @ rest)
            level[m], mixing[m, 1:] = middle + solution[0], solution[1:]
            fit[rows[m]] = level[m] + scores @ mixing[m]
        if iteration < _ITERATIONS - 1:
            seen = lengthened(y, is_cut, fit, models, chance)
            target = np.clip(seen, fit - _REACH, fit + _REACH).astype(np.float64)
    all_weights = mixing @ weights
    share = np.array([len(of) for of in rows], np.float64) ** 0.5
    share /= share.sum()
    return Kernel(
        level=np.append(level, share @ level).astype(np.float32),
        weights=np.concatenate((all_weights, (share @ all_weights)[None])).astype(np.float32),
    )
