"""Where rows of the database meet the predictor. ``train`` imports torch: for the process that trains, no other."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from controlplane.common.clock import to_us
from controlplane.training.dataset import Row
from router_ext.errors import FeaturesRefused
from router_ext.predict import conformal
from router_ext.predict.baseline import MAX_TOKENS
from router_ext.predict.features import Features
from router_ext.predict.history import History
from router_ext.predict.predictor import Predictor, in_tokens

_BATCH = 256
Example = tuple[Row, Features]


def readable(rows: Sequence[Row]) -> list[Example]:
    """The rows whose features can be read, with them; what is damaged is left out."""
    examples: list[Example] = []
    for row in rows:
        try:
            examples.append((row, Features.unpack(row.features)))
        except FeaturesRefused:
            continue
    return examples


def train(
    examples: Sequence[Example],
    *,
    seed: int,
    built_at: datetime,
    on_progress: Callable[[float, str], None],
    should_stop: Callable[[], bool],
) -> tuple[bytes, dict[str, Any]] | None:
    """Bytes of an artifact and the figures of its training; None if ``should_stop`` said so.

    Raises:
        TrainingFailed: too few different prompts.
    """
    from router_ext.predict.training import Cancelled, Sample
    from router_ext.predict.training import train as train_model

    samples = [
        Sample(features=features, model=row.model, output_tokens=row.output_tokens, is_complete=row.is_complete)
        for row, features in examples
    ]
    try:
        trained = train_model(
            samples, seed=seed, built_at_us=to_us(built_at), on_progress=on_progress, should_stop=should_stop
        )
    except Cancelled:
        return None
    return trained.artifact, trained.metrics


def replay(body: bytes, examples: Sequence[Example]) -> list[Sequence[float]]:
    """Quantiles at ``LEVELS`` that a router with this model would have told, in the order of the examples.

    The history of tenants and keys, which corrects the model on line, begins empty and learns from the examples as
    they end, in their time order. The memory of prompts cannot take part: its signatures never leave the router.

    Raises:
        ArtifactRefused: not a model of this program.
    """
    predictor = Predictor.load(body)
    if not examples:
        return []
    logs = np.concatenate(
        [
            predictor.log_quantiles(
                [features for _, features in examples[i : i + _BATCH]],
                [row.model for row, _ in examples[i : i + _BATCH]],
            )[0]
            for i in range(0, len(examples), _BATCH)
        ]
    )
    medians = logs[:, conformal.MIDDLE]
    history = History()
    running: list[tuple[datetime, int]] = []
    corrections = [0.0] * len(examples)
    for i in sorted(range(len(examples)), key=lambda i: (examples[i][0].arrived_at, examples[i][0].event)):
        row = examples[i][0]
        while running and running[0][0] <= row.arrived_at:
            ended_at, ended = heapq.heappop(running)
            past = examples[ended][0]
            history.add(
                past.pool,
                past.tenant,
                past.key,
                math.log1p(past.output_tokens) - float(medians[ended]),
                ended_at.timestamp(),
                is_complete=past.is_complete,
            )
        corrections[i] = history.correction(row.pool, row.tenant, row.key, row.arrived_at.timestamp())
        heapq.heappush(running, (row.ended_at, i))
    return [
        list(in_tokens(log, correction, 1.0, row.max_new_tokens or MAX_TOKENS))
        for log, correction, (row, _) in zip(logs.tolist(), corrections, examples, strict=True)
    ]
