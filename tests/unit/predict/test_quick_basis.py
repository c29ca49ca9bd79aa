"""Basis and kernel read together say what they say one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from router_ext.predict.basis import Basis
from router_ext.predict.features import DENSE, ID_BITS, N_FACTS, Features
from router_ext.predict.kernel import Kernel
from router_ext.predict.quick_basis import QuickBasis

N_WORDS, N_MARKS, VOCABULARY, LANDMARKS, FIRST = 24, 10, 500, 30, 6
WIDTH = len(DENSE) - N_FACTS
rng = np.random.default_rng(5)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def parts(n_models: int, rank: int) -> tuple[Basis, Kernel]:
    row = np.full(1 << ID_BITS, -1, np.int32)
    row[rng.choice(1 << ID_BITS, VOCABULARY, replace=False)] = np.arange(VOCABULARY)
    basis = Basis(
        row=row,
        idf=np.abs(normal(VOCABULARY)) + 1,
        projection=normal(VOCABULARY, N_WORDS).astype(np.float16),
        mean=normal(WIDTH),
        scale=np.abs(normal(WIDTH)),
        landmarks=normal(LANDMARKS, WIDTH),
        whitening=normal(LANDMARKS, N_MARKS),
    )
    weights = normal(n_models + 1, rank) @ normal(rank, N_WORDS + N_MARKS)
    return basis, Kernel(level=normal(n_models + 1), weights=weights)


def prompts(basis: Basis, n: int) -> list[Features]:
    known = np.flatnonzero(basis.row >= 0)
    found = []
    for size in range(n):
        ids = np.unique(np.concatenate((rng.choice(known, size), rng.integers(0, 1 << ID_BITS, size))))
        counts = rng.integers(1, 256, len(ids)).astype(np.uint8)
        found.append(Features(normal(len(DENSE)), ids.astype(np.uint16), counts))
    return found


@pytest.mark.parametrize(("n_models", "rank"), [(1, 1), (8, 3), (8, 9), (50, 3), (50, 34)])
def test_it_is_the_same_function_whatever_the_rank(n_models: int, rank: int) -> None:
    basis, kernel = parts(n_models, rank)
    asked = prompts(basis, 40)
    models = rng.integers(-1, n_models, len(asked))
    batch = basis.transform(asked)
    words, own, average = QuickBasis(basis, kernel, FIRST).predict(asked, np.stack([a.dense for a in asked]), models)
    np.testing.assert_allclose(words, batch.words[:, :FIRST], atol=1e-5)
    expected = kernel.predict(batch.prompt, models)
    np.testing.assert_allclose(own, expected[0], atol=1e-3 * np.abs(expected[0]).max())
    np.testing.assert_allclose(average, expected[1], atol=1e-3 * np.abs(expected[0]).max())


def test_a_kernel_that_weighs_nothing_says_the_levels() -> None:
    basis, kernel = parts(3, 1)
    nothing = Kernel(level=kernel.level, weights=np.zeros_like(kernel.weights))
    asked = prompts(basis, 3)
    _, own, _ = QuickBasis(basis, nothing, FIRST).predict(
        asked, np.stack([a.dense for a in asked]), np.array([0, 2, -1])
    )
    assert own.tolist() == kernel.level[[0, 2, -1]].tolist()


def test_parts_of_different_widths_are_refused() -> None:
    basis, kernel = parts(3, 1)
    with pytest.raises(ValueError, match="a kernel over 33 numbers"):
        QuickBasis(basis, Kernel(level=kernel.level, weights=kernel.weights[:, :-1]), FIRST)
