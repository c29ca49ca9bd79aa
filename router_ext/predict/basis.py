"""From hashed features to a short vector: words by a truncated SVD, numbers by their likeness to landmarks.

    ids, counts --(1 + ln count) * idf, length 1--> sparse row --projection--> words   [n, N_WORDS]
    dense --standard units, kernel to landmark prompts, whitened (Nystroem)--> marks   [n, N_MARKS]

Fitted without lengths of answers, on distinct prompts. Everything that is served needs numpy alone.

Source: latent semantic analysis (Deerwester et al. 1990) by subspace iteration (Halko, Martinsson, Tropp 2011);
Williams and Seeger, Using the Nystroem Method (2001).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from router_ext.predict.features import ID_BITS, N_FACTS, Features

Array = NDArray[np.float32]

N_WORDS, N_MARKS = 256, 192
MAX_VOCABULARY = 24_576
"""Hashed words kept, the most frequent; with ``N_WORDS`` float16 each they are the largest part of a model, 12 MB."""
_MIN_PROMPTS = 2
"""A word of a single prompt says nothing of another one."""
_LANDMARKS = 768
WIDTH = 1.0
"""Width of the kernel in standard deviations per feature."""
_CLIP = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Vectors of n requests; see the module. ``prompt``: words and marks side by side, what the kernel works on."""

    words: Array
    marks: Array

    @property
    def prompt(self) -> Array:
        return np.concatenate((self.words * np.float32(WORD_SCALE), self.marks), axis=1)


WORD_SCALE = 2.0**0.5
"""Words count twice as much as numbers, which was best on three splits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """Shape: ``row`` [65,536] int32, the place of an id in the vocabulary or -1; ``idf`` [V]; ``projection``
    [V, N_WORDS] float16; ``mean``, ``scale`` [dense of the prompt]; ``landmarks`` [L, same]; ``whitening``
    [L, N_MARKS].
    """

    row: NDArray[np.int32]
    idf: Array
    projection: NDArray[np.float16]
    mean: Array
    scale: Array
    landmarks: Array
    whitening: Array

    def transform(self, features: Sequence[Features]) -> Batch:
        """Vectors of requests, for training; ``quick_basis`` serves. Cost: about 0.1 ms each."""
        dense = np.stack([one.dense for one in features])
        words = np.zeros((len(features), self.projection.shape[1]), np.float32)
        for i, one in enumerate(features):
            rows, weights = self.weighted(one)
            if len(rows):
                words[i] = weights @ self.projection[rows].astype(np.float32)
        return Batch(words=words, marks=self._marks(dense))

    def weighted(self, one: Features) -> tuple[NDArray[np.int32], Array]:
        """The sparse row of a prompt: places in the vocabulary, weights of length 1."""
        rows = self.row[one.ids]
        known = rows >= 0
        rows = rows[known]
        weights = (1.0 + np.log(one.counts[known].astype(np.float32))) * self.idf[rows]
        length = float(np.sqrt(weights @ weights))
        return rows, (weights / max(length, 1e-6)).astype(np.float32)

    def _marks(self, dense: Array) -> Array:
        units = standard(dense[:, N_FACTS:], self.mean, self.scale)
        marks: Array = likeness(units, self.landmarks, squares(self.landmarks)) @ self.whitening
        return marks

    def check(self) -> None:
        """Raises:
        ValueError: ids that lead nowhere.
        """
        n = len(self.idf)
        if self.row.shape != (1 << ID_BITS,) or self.row.max(initial=-1) >= n or len(self.projection) != n:
            raise ValueError("a vocabulary that leads nowhere")

    def tensors(self) -> dict[str, NDArray[np.generic]]:
        """By name, for an artifact."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def standard(dense: Array, mean: Array, scale: Array) -> Array:
    """In standard units [n, width], outliers pulled in."""
    units: Array = (dense - mean) * scale
    np.minimum(units, _CLIP, out=units)
    np.maximum(units, -_CLIP, out=units)
    return units


def squares(rows: Array) -> Array:
    """Squared lengths [n] of rows [n, width]."""
    result: Array = np.einsum("nd,nd->n", rows, rows)
    return result


def likeness(left: Array, right: Array, right_squares: Array) -> Array:
    """The kernel between rows [n, width] and [m, width]: [n, m], 1 for equal ones."""
    distances: Array = left @ right.T
    distances *= np.float32(-2.0)
    distances += squares(left)[:, None]
    distances += right_squares
    distances *= np.float32(-0.5 / (WIDTH**2 * left.shape[1]))
    result: Array = np.exp(distances, out=distances)
    return result


def fit_basis(prompts: Sequence[Features], *, seed: int, on_progress: Callable[[float], None]) -> Basis:
    """A basis from distinct prompts. Deterministic by seed.

    Cost: two passes over all ids per iteration; 3,000 prompts 2 s, 40,000 prompts 30 s on one core.
    """
    random = np.random.default_rng(seed)
    row, idf = _vocabulary(prompts)
    dense = np.stack([one.dense for one in prompts])
    own = dense[:, N_FACTS:]
    mean, scale = own.mean(0), np.float32(1.0) / (own.std(0) + np.float32(1e-3))
    units = standard(own, mean, scale)
    landmarks = units[np.sort(random.choice(len(units), min(_LANDMARKS, len(units)), replace=False))]
    values, vectors = np.linalg.eigh(likeness(landmarks, landmarks, squares(landmarks)).astype(np.float64))
    kept = np.argsort(values)[::-1][:N_MARKS]
    kept = kept[values[kept] > 1e-4 * values[kept[0]]]
    whitening = (vectors[:, kept] / np.sqrt(values[kept])).astype(np.float32)
    basis = Basis(
        row=row,
        idf=idf,
        projection=np.zeros((len(idf), 0), np.float16),
        mean=mean,
        scale=scale,
        landmarks=landmarks,
        whitening=whitening,
    )
    projection = _directions([basis.weighted(one) for one in prompts], len(idf), random, on_progress)
    return Basis(**{**basis.tensors(), "projection": projection})  # type: ignore[arg-type]  # names and types are the fields'


def _vocabulary(prompts: Sequence[Features]) -> tuple[NDArray[np.int32], Array]:
    n_with = np.bincount(np.concatenate([one.ids for one in prompts]), minlength=1 << ID_BITS)
    kept = np.flatnonzero(n_with >= min(_MIN_PROMPTS, len(prompts)))
    kept = np.sort(kept[np.argsort(-n_with[kept], kind="stable")[:MAX_VOCABULARY]])
    row = np.full(1 << ID_BITS, -1, np.int32)
    row[kept] = np.arange(len(kept), dtype=np.int32)
    return row, (np.log(len(prompts) / n_with[kept]) + 1.0).astype(np.float32)


def _directions(
    rows: Sequence[tuple[NDArray[np.int32], Array]],
    n_words: int,
    random: np.random.Generator,
    on_progress: Callable[[float], None],
) -> NDArray[np.float16]:
    """Right singular vectors of the sparse matrix with these rows [n_words, at most N_WORDS]."""
    import torch

    rank = min(N_WORDS, len(rows), n_words)
    where = np.repeat(np.arange(len(rows)), [len(places) for places, _ in rows])
    places = torch.from_numpy(np.stack((where, np.concatenate([places for places, _ in rows]))).astype(np.int64))
    weights = torch.from_numpy(np.concatenate([weights for _, weights in rows]))
    size = (len(rows), n_words)
    matrix = torch.sparse_coo_tensor(places, weights, size, check_invariants=False).coalesce()
    turned = matrix.t().coalesce()
    basis = torch.from_numpy(random.standard_normal((n_words, min(rank + 16, n_words)), dtype=np.float32))
    for i in range(_ITERATIONS):
        basis = torch.linalg.qr(turned @ torch.linalg.qr(matrix @ basis).Q).Q
        on_progress((i + 1) / _ITERATIONS)
    _, _, right = torch.linalg.svd(matrix @ basis, full_matrices=False)
    return np.asarray((basis @ right[:rank].T).numpy(), np.float16)


_ITERATIONS = 4
