"""What answers that were cut teach: without knowing how long they would have been, nothing false."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.lengths import samples

from router_ext.predict import censoring, kernel, training, trees
from router_ext.predict.censoring import MIN_WHOLE, lengthened
from router_ext.predict.predictor import Predictor, Request
from router_ext.predict.training import Options, Sample, train


def cut_some(whole: list[Sample], how: str) -> list[Sample]:
    """Clients who leave at a random place, or limits that do not know the answer."""
    rng = random.Random(4)
    found = []
    for one in whole:
        limit = max(1, int(one.output_tokens * rng.random())) if how == "leaving" else rng.choice((60, 250, 10**6))
        is_cut = rng.random() < 0.4 if how == "leaving" else one.output_tokens > limit
        found.append(replace(one, output_tokens=limit, is_complete=False) if is_cut else one)
    return found


def as_known(y: Any, *others: Any) -> Any:
    return y


@pytest.mark.skipif(not trees.is_available(), reason="scikit-learn is not installed")
@pytest.mark.parametrize("is_mutant", [False, True])
@pytest.mark.parametrize("how", ["leaving", "limits"])
def test_cut_answers_leave_expectations_where_they_are(
    how: str, is_mutant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On whole answers to prompts that were not seen; the mutant's trees and what judges take cut ones for whole."""
    monkeypatch.setitem(trees._SETTINGS, "max_iter", 80)
    monkeypatch.setitem(trees._SETTINGS, "learning_rate", 0.12)
    if is_mutant:
        monkeypatch.setattr(training, "lengthened", as_known)
        monkeypatch.setattr(kernel, "lengthened", as_known)
        monkeypatch.setattr(training, "MIN_WHOLE", 10**9)
    rows = cut_some(samples(300, seed=7), how)
    assert 0.2 < np.mean([not one.is_complete for one in rows]) < 0.5
    served = Predictor.load(train(rows, seed=1, built_at_us=1, options=Options(experts=(1,))).artifact)
    fresh = samples(100, seed=21)
    pairs = zip(served.predict_batch([Request(features=o.features, model=o.model) for o in fresh]), fresh, strict=True)
    bias = float(np.mean([math.log1p(p.median) - math.log1p(one.output_tokens) for p, one in pairs]))
    assert (abs(bias) < 0.06) is not is_mutant


def censored(seed: int, n: int = 4_000) -> tuple[Any, ...]:
    """Log lengths, as known, whether cut, expected, models; a limit knows nothing of the answer."""
    rng = np.random.default_rng(seed)
    expected = rng.uniform(3.0, 7.0, n).astype(np.float32)
    models = rng.integers(0, 2, n)
    true = expected + (0.2 + 0.4 * models) * rng.standard_normal(n)
    limit = expected + rng.normal(0.1, 0.7, n)
    return true, np.minimum(true, limit).astype(np.float32), true > limit, expected, models


@pytest.mark.parametrize("is_mutant", [False, True])
def test_lengths_are_drawn_as_they_would_have_been(is_mutant: bool) -> None:
    """The mutant lets a cut answer be as long as expected."""
    true, y, is_cut, expected, models = censored(1)
    chance = np.random.default_rng(2).random(len(y), np.float32)
    drawn = np.maximum(y, expected) if is_mutant else lengthened(y, is_cut, expected, models, chance)
    far = max(
        float(np.abs(np.quantile((drawn - expected)[of], levels) - np.quantile((true - expected)[of], levels)).max())
        for of in (models == 0, models == 1)
        for levels in [(0.25, 0.5, 0.75, 0.9)]
    )
    assert (far < 0.05) is not is_mutant


def test_whole_answers_stay_and_none_becomes_shorter() -> None:
    _, y, is_cut, expected, models = censored(3)
    chance = np.random.default_rng(2).random(len(y), np.float32)
    drawn = lengthened(y, is_cut, expected, models, chance)
    assert (drawn[~is_cut] == y[~is_cut]).all()
    assert (drawn >= y).all()
    assert (lengthened(y, is_cut, expected, models, chance) == drawn).all()


def test_where_too_few_are_whole_a_cut_answer_counts_as_expected() -> None:
    y = np.full(MIN_WHOLE + 1, 4.0, np.float32)
    expected = np.linspace(3.0, 5.0, len(y), dtype=np.float32)
    is_cut, models = np.ones(len(y), np.bool_), np.zeros(len(y), np.int64)
    drawn = censoring.lengthened(y, is_cut, expected, models, np.zeros(len(y), np.float32))
    assert (drawn == np.maximum(y, expected)).all()


def test_where_nearly_all_were_cut_training_goes_on_with_all() -> None:
    rows = [replace(one, is_complete=i % 10 == 0) for i, one in enumerate(samples(80, seed=3))]
    metrics = train(rows, seed=1, built_at_us=1, options=Options(experts=(1, 2), with_trees=False)).metrics
    assert metrics["cut_rows"] == 216
    assert math.isfinite(metrics["new_prompts"]["pinball"])
