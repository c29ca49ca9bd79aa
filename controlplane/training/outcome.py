"""What a run of a job brings: an artifact, the rows behind it and, per pool, how it was judged. No numpy is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from controlplane.training.models import Dataset

CANDIDATE = "candidate"
ACTIVE = "active"
NAMES = {
    CANDIDATE: "the candidate",
    ACTIVE: "the active model",
    "fallback": "the empirical quantiles",
    "tenant_mean5": "the tenant's mean of five",
    "pool_median": "the pool's median",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Figures of one contender (``predict.figures``): pinball of ln(1 + tokens), Spearman's rho of the medians as
    ``rank``, ``mae`` in tokens, shares of answers inside [q0.1, q0.9] and [q0.05, q0.95]."""

    n: int
    pinball: float
    rank: float
    mae: float
    median_relative_error: float
    coverage_80: float
    coverage_90: float

    def as_json(self) -> dict[str, Any]:
        return {name: round(value, 6) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``scores`` by contender, on ``n_rows`` rows; empty where it was not judged."""

    is_passed: bool
    reason: str
    n_rows: int
    scores: Mapping[str, Score]


def not_judged(why: str, n_rows: int) -> Verdict:
    return Verdict(is_passed=False, reason=f"not judged: {why}", n_rows=n_rows, scores={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a job's run hands over to be stored. ``dataset``: not saved yet. ``verdicts``: by pool id, of a mixture."""

    body: bytes
    metrics: Mapping[str, Any]
    dataset: Dataset
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
