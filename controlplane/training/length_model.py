"""Where rows of the database meet the predictor. Imports torch: for the process that trains, and for no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from controlplane.common.clock import to_us, utc_now
from controlplane.training.dataset import Row
from controlplane.training.lease import LeaseLost
from router_ext.predict import training
from router_ext.predict.features import Features
from router_ext.predict.predictor import Predictor, Request

_BATCH = 256


@dataclass(frozen=True, slots=True)
class Trained:
    """Bytes of an artifact and the figures that its training gave."""

    body: bytes
    metrics: dict[str, Any]


def train(
    rows: Sequence[Row], *, seed: int, on_progress: Callable[[float, str], None], should_stop: Callable[[], bool]
) -> Trained:
    """Train on rows.

    Raises:
        LeaseLost: ``should_stop`` said so.
        TrainingFailed: too few rows or prompts.
    """
    samples = [
        training.Sample(
            features=Features.unpack(row.features),
            model=row.model,
            output_tokens=row.output_tokens,
            is_complete=row.is_complete,
        )
        for row in rows
    ]
    try:
        trained = training.train(
            samples, seed=seed, built_at_us=to_us(utc_now()), on_progress=on_progress, should_stop=should_stop
        )
    except training.Cancelled:
        raise LeaseLost from None
    return Trained(trained.artifact, trained.metrics)


def predict(body: bytes, rows: Sequence[Row]) -> list[Sequence[float]]:
    """Quantiles at ``LEVELS``, row by row, of the model alone: what was learned on line is not in it."""
    predictor = Predictor.load(body)
    predicted: list[Sequence[float]] = []
    for first in range(0, len(rows), _BATCH):
        requests = [
            Request(features=Features.unpack(row.features), model=row.model, max_new_tokens=row.max_new_tokens or 0)
            for row in rows[first : first + _BATCH]
        ]
        predicted += [prediction.quantiles for prediction in predictor.predict_batch(requests)]
    return predicted
