"""Where rows of the database meet the predictor. Imports torch: for the process that trains, and for no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from controlplane.training.dataset import Row


class NoModelYet(Exception):
    """This program trains no length models."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Bytes of an artifact and the figures that its training gave."""

    body: bytes
    metrics: dict[str, Any]


def train(
    rows: Sequence[Row], *, seed: int, on_progress: Callable[[float, str], None], should_stop: Callable[[], bool]
) -> Trained:
    """Train on rows."""
    raise NoModelYet(f"{len(rows)} rows were read, and this program trains no length models")


def predict(body: bytes, rows: Sequence[Row]) -> list[Sequence[float]]:
    """Quantiles at ``LEVELS``, row by row."""
    raise NoModelYet(f"{len(body)} bytes cannot be loaded, {len(rows)} rows")
