"""Basis and kernel read together: as much of a prompt's vector as anything that is served looks at.

The kernel weighs the whole vector, but as models differ in a few ways only, its weights have a low rank r:

    weights = mixing [models + 1, r] @ directions [r, D]

So each hashed word needs r numbers for the kernel and the first directions for trees and mixture, not all ``N_WORDS``,
and each landmark r numbers, not ``N_MARKS``. The same function as ``Basis.transform`` and ``Kernel.predict``, but for
rounding, at a fifth of the time and half the memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from router_ext.predict.basis import WIDTH, WORD_SCALE, Basis, squares, standard
from router_ext.predict.features import N_FACTS, Features
from router_ext.predict.kernel import Kernel

Array = NDArray[np.float32]
Ints = NDArray[np.int64]

_NEGLIGIBLE = 1e-6
"""Of the largest singular value: rounding, not a way in which models differ."""
_LOGS = (1.0 + np.log(np.maximum(np.arange(256), 1))).astype(np.float32)
"""By count: how much a word says that is there so often."""


class QuickBasis:
    """See the module.

    Cost: 25 us for one request. Memory: 4 (n_first + r) bytes for each word of the vocabulary.
    """

    __slots__ = (
        "_falloff",
        "_idf",
        "_landmarks",
        "_level",
        "_marks",
        "_mean",
        "_mixing",
        "_n_first",
        "_row",
        "_scale",
        "_words",
    )

    def __init__(self, basis: Basis, kernel: Kernel, n_first: int) -> None:
        """Read parts that belong together; ``basis`` is checked, and needed no longer than this.

        Raises:
            ValueError: they do not belong together.
        """
        n_words = basis.projection.shape[1]
        if kernel.weights.shape[1] != n_words + basis.whitening.shape[1]:
            raise ValueError(f"a kernel over {kernel.weights.shape[1]} numbers")
        left, values, directions = np.linalg.svd(kernel.weights.astype(np.float64), full_matrices=False)
        rank = max(1, int(np.count_nonzero(values > _NEGLIGIBLE * values[0])))
        self._mixing = (left[:, :rank] * values[:rank]).astype(np.float32)
        self._level = kernel.level
        directions = directions[:rank].astype(np.float32)
        # The last row is for ids that are not in the vocabulary: -1 leads there.
        self._words = np.zeros((len(basis.idf) + 1, n_first + rank), np.float32)
        self._words[:-1, :n_first] = basis.projection[:, :n_first]
        of_words = np.ascontiguousarray(directions[:, :n_words].T) * np.float32(WORD_SCALE)
        for first in range(0, len(basis.projection), 1_024):
            block = basis.projection[first : first + 1_024].astype(np.float32) @ of_words
            self._words[first : first + len(block), n_first:] = block
        self._marks = basis.whitening @ directions[:, n_words:].T
        self._n_first = n_first
        self._row = basis.row
        self._idf = np.append(basis.idf, np.float32(0.0))
        self._mean, self._scale = basis.mean, basis.scale
        # exp(-|x - l|^2 / w) = exp(2 x l / w) exp(-|l|^2 / w) exp(-|x|^2 / w): the second goes with the marks.
        self._falloff = np.float32(-0.5 / (WIDTH**2 * basis.landmarks.shape[1]))
        self._landmarks = np.ascontiguousarray(basis.landmarks.T) * (np.float32(-2.0) * self._falloff)
        self._marks *= np.exp(self._falloff * squares(basis.landmarks))[:, None]

    def predict(self, features: Sequence[Features], dense: Array, models: Ints) -> tuple[Array, Array, Array]:
        """First words [n, n_first]; log length by the request's model and by an average one [n]; ``models`` [n], -1 for
        an unknown one."""
        words = np.zeros((len(features), self._words.shape[1]), np.float32)
        for i, one in enumerate(features):
            rows = self._row.take(one.ids)
            weights = _LOGS.take(one.counts)
            weights *= self._idf.take(rows)
            length = float(weights @ weights) ** 0.5
            if length:
                weights *= np.float32(1.0 / length)
                np.dot(weights, self._words.take(rows, axis=0), out=words[i])
        units = standard(dense[:, N_FACTS:], self._mean, self._scale)
        near = units @ self._landmarks
        np.exp(near, out=near)
        ways = near @ self._marks
        ways *= np.exp(self._falloff * squares(units))[:, None]
        ways += words[:, self._n_first :]
        own = self._level[models] + (ways * self._mixing[models]).sum(1)
        return words[:, : self._n_first], own, self._level[-1] + ways @ self._mixing[-1]
