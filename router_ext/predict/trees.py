"""Boosted trees of the log length, trained by scikit-learn, served by numpy.

A few boosters that differ in the features their splits may look at are averaged.

A booster is taken apart into plain arrays, so that serving needs no scikit-learn and an artifact holds numbers only.
The arrays are checked against the booster's own predictions, because the layout they come from is not public.

Cost: training 10 s per booster and 50,000 rows on one core; a prediction goes down all trees at once, ``depth`` steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router_ext.errors import TrainingFailed

Array = NDArray[np.float32]

BOOSTERS = 3
_SETTINGS: dict[str, Any] = {
    "loss": "absolute_error",
    "learning_rate": 0.03,
    "max_iter": 400,
    "max_leaf_nodes": 31,
    "min_samples_leaf": 40,
    "max_features": 0.3,
    "l2_regularization": 1.0,
    "early_stopping": False,
}
_TOLERANCE = 1e-4
_DEEPEST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """All trees of all boosters. Node i of tree t is at ``start[t] + i``.

    Shape: ``feature`` [nodes] int16, -1 in leaves; ``threshold`` [nodes], go left at or below it; ``left``, ``right``
    [nodes] int32, places; ``value`` [nodes], already divided by the number of boosters; ``start`` [trees] int32;
    ``offset`` [1].
    """

    feature: NDArray[np.int16]
    threshold: Array
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    value: Array
    start: NDArray[np.int32]
    offset: Array
    depth: NDArray[np.int32]

    def predict(self, inputs: Array) -> Array:
        """Log lengths [n] of inputs [n, width]."""
        at = np.broadcast_to(self.start, (len(inputs), len(self.start)))
        rows = np.arange(len(inputs))[:, None]
        for _ in range(int(self.depth[0])):
            feature = self.feature[at]
            low = inputs[rows, np.maximum(feature, 0)] <= self.threshold[at]
            at = np.where(low, self.left[at], self.right[at])
        result: Array = self.value[at].sum(axis=1, dtype=np.float64).astype(np.float32) + self.offset[0]
        return result

    def check(self, width: int) -> None:
        """Raises:
        ValueError: nodes that lead nowhere, or ask for more than ``width`` inputs.
        """
        n = len(self.feature)
        same = {len(self.threshold), len(self.left), len(self.right), len(self.value)} == {n}
        inside = all(len(at) and at.min() >= 0 and at.max() < n for at in (self.left, self.right, self.start))
        if not same or not inside or self.feature.max() >= width or not 0 <= self.depth[0] <= _DEEPEST:
            raise ValueError("trees that lead nowhere")

    def tensors(self) -> dict[str, NDArray[np.generic]]:
        """By name, for an artifact."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def is_available() -> bool:
    """Whether trees can be trained here."""
    try:
        import sklearn.ensemble  # noqa: F401  # only whether it can
    except ImportError:
        return False
    return True


def fit_trees(
    inputs: Array,
    y: Array,
    *,
    seed: int,
    boosters: int = BOOSTERS,
    on_progress: Callable[[float], None],
) -> Trees:
    """Train on n rows.

    Raises:
        TrainingFailed: this version of scikit-learn lays its trees out in another way.
    """
    from sklearn.ensemble import HistGradientBoostingRegressor

    parts, offset, check = [], 0.0, np.zeros(min(len(y), 256))
    for i in range(boosters):
        booster = HistGradientBoostingRegressor(**_SETTINGS, random_state=seed + i)
        booster.fit(inputs, y)
        parts += [predictor[0].nodes for predictor in booster._predictors]
        offset += float(np.ravel(booster._baseline_prediction)[0])
        check += booster.predict(inputs[: len(check)])
        on_progress((i + 1) / boosters)
    trees = _from_nodes(parts, boosters, offset / boosters)
    if not np.allclose(trees.predict(inputs[: len(check)]), check / boosters, atol=_TOLERANCE):
        raise TrainingFailed("the trees of this version of scikit-learn cannot be read")
    return trees


def _from_nodes(parts: list[Any], boosters: int, offset: float) -> Trees:
    starts = np.concatenate(([0], np.cumsum([len(nodes) for nodes in parts])[:-1])).astype(np.int32)
    feature, threshold, left, right, value, deepest = [], [], [], [], [], 0
    for start, nodes in zip(starts, parts, strict=True):
        leaf = nodes["is_leaf"].astype(bool)
        own = np.arange(len(nodes))
        feature.append(np.where(leaf, -1, nodes["feature_idx"]).astype(np.int16))
        # Thresholds lie between two float32 inputs: rounding down keeps every one of them on its side.
        exact = nodes["num_threshold"].astype(np.float64)
        rounded = exact.astype(np.float32)
        threshold.append(np.where(rounded > exact, np.nextafter(rounded, np.float32(-np.inf)), rounded))
        left.append((np.where(leaf, own, nodes["left"]) + start).astype(np.int32))
        right.append((np.where(leaf, own, nodes["right"]) + start).astype(np.int32))
        value.append((np.where(leaf, nodes["value"], 0.0) / boosters).astype(np.float32))
        deepest = max(deepest, int(nodes["depth"].max()))
    return Trees(
        feature=np.concatenate(feature),
        threshold=np.concatenate(threshold),
        left=np.concatenate(left),
        right=np.concatenate(right),
        value=np.concatenate(value),
        start=starts,
        offset=np.array([offset], np.float32),
        depth=np.array([deepest], np.int32),
    )
