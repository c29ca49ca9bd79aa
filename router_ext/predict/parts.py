"""What every part of a length model gets to see of a request; the same for training and serving.

    kernel      basis vectors, served model                                   -> own, average
    trees       dense numbers, a model's figures, own, average, first words   -> expected
    mixture     the same in standard units, embedding of the model            -> quantiles, runaway
    blend       quantiles moved, as they are, toward expected

``own`` is the kernel's log length for the request's model, ``average`` for an average one. Trees and mixture make
different mistakes, so neither sees what the other says and their medians are averaged: the mixture on top of the trees
was worse than the trees.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from router_ext.predict.basis import standard

Array = NDArray[np.float32]
Ints = NDArray[np.int64]

N_FIRST_WORDS = 32
"""Directions of the words that trees and mixture look at themselves; more of them fit chance."""
RUNAWAY_TOKENS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Shape: ``mean``, ``scale`` [dense]; ``word_scale`` [N_FIRST_WORDS or fewer]; ``figures`` [models + 1, 8], of each
    model what trees can tell it by, the last row for an unknown one; ``middle`` [1], the log length about which the
    mixture works.
    """

    mean: Array
    scale: Array
    word_scale: Array
    figures: Array
    middle: Array

    def tree_inputs(self, dense: Array, words: Array, models: Ints, own: Array, average: Array) -> Array:
        """[n, width]"""
        kernel = np.stack((own, average), axis=1)
        return np.concatenate((dense, self.figures[models], kernel, words[:, : len(self.word_scale)]), axis=1)

    def mixture_inputs(self, dense: Array, words: Array, own: Array, average: Array) -> Array:
        """[n, width]"""
        units = standard(dense, self.mean, self.scale)
        words = words[:, : len(self.word_scale)] * self.word_scale
        others = np.float32(1.5) * (np.stack((own, average), axis=1) - self.middle)
        return np.concatenate((units, words, others), axis=1)

    def tensors(self) -> dict[str, NDArray[np.generic]]:
        """By name, for an artifact."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def blend(log_quantiles: Array, expected: Array, share: float) -> Array:
    """Quantiles [n, levels] moved so that their medians are ``share`` of the way to ``expected`` [n]."""
    middle = log_quantiles.shape[1] // 2
    moved: Array = log_quantiles + np.float32(share) * (expected - log_quantiles[:, middle])[:, None]
    return moved


def fit_scaling(dense: Array, words: Array, y: Array, models: Ints, n_models: int, level: Array, own: Array) -> Scaling:
    """From n training rows; ``own`` as the kernel says it of prompts that it has not seen."""
    rest = y - own
    figures = np.zeros((n_models + 1, 8), np.float32)
    for model in range(n_models):
        of = models == model
        figures[model] = (level[model], model, *_figures(y[of], rest[of]))
    figures[-1] = (level[-1], n_models // 2, *_figures(y, rest))
    first = words[:, :N_FIRST_WORDS]
    return Scaling(
        mean=dense.mean(0),
        scale=np.float32(1.0) / (dense.std(0) + np.float32(1e-3)),
        word_scale=np.float32(1.0) / (first.std(0) + np.float32(1e-4)),
        figures=figures,
        middle=np.array([np.median(y)], np.float32),
    )


def _figures(y: Array, rest: Array) -> tuple[float, ...]:
    """Middle and top of a model's log lengths; middle, spread, bottom and top of what the kernel leaves of them.

    With the model's place in the alphabet, where families are neighbours, they let numeric splits set apart any few
    models; a category with 50 values would need another kind of node, for 0.002 of median relative error.
    """
    low, middle, high = np.quantile(rest, (0.1, 0.5, 0.9))
    return (
        float(np.median(y)),
        float(np.quantile(y, 0.9)),
        float(middle),
        min(float(rest.std()), 2.0),
        float(low),
        float(high),
    )
