"""The mixture of experts: quantiles and the probability of running away.

    input --two layers--> gate [K], experts [K, outputs] --weighted sum--> correction of the base, spreads, runaway
    median = base + correction        upper quantiles = median + running sum of softplus(spread), lower ones minus it

so quantiles rise whatever the weights are. ``base`` is the log length that the kernel expects. All in ln(1 + tokens).

Trained with the pinball loss; of an answer that was cut only what lies below its length is a loss (Powell 1986). The
served model is drawn as unknown now and then, so that the place of an unknown one in the table has learned something.

``Mixture`` trains with torch; ``forward`` is the same function in numpy, for serving: for one request torch's calls
cost more than their arithmetic.

Source: Jacobs et al., Adaptive Mixtures of Local Experts (1991); Koenker, Quantile Regression (2005).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from router_ext.predict.baseline import LEVELS

Array = NDArray[np.float32]

HIDDEN, EMBEDDING = 96, 12
_DROPOUT = 0.35
_UNKNOWN_SHARE = 0.05
_EPOCHS, _BATCH = 12, 512
_RATE, _DECAY = 3e-3, 0.05
_LEVEL_WEIGHTS = (0.5, 0.5, 1.0, 2.0, 1.0, 0.5, 0.5)
"""The median is what most uses read."""
_RUNAWAY_WEIGHT = 0.1
_OUTPUTS = len(LEVELS) + 1
_MIDDLE = len(LEVELS) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """n training rows. ``inputs`` [n, width]; ``base``, ``y`` [n]; ``models`` [n], from 0; ``weight`` [n]."""

    inputs: Array
    base: Array
    models: NDArray[np.int64]
    y: Array
    is_cut: NDArray[np.bool_]
    is_runaway: NDArray[np.bool_]
    weight: Array

    def take(self, which: NDArray[np.int64]) -> Rows:
        """Some of the rows."""
        return Rows(
            inputs=self.inputs[which],
            base=self.base[which],
            models=self.models[which],
            y=self.y[which],
            is_cut=self.is_cut[which],
            is_runaway=self.is_runaway[which],
            weight=self.weight[which],
        )


class Mixture(nn.Module):
    """See the module. Model ``n_models`` is the unknown one."""

    def __init__(self, width: int, n_models: int, n_experts: int) -> None:
        super().__init__()
        self.n_experts = n_experts
        self.embedding = nn.Embedding(n_models + 1, EMBEDDING)
        self.first = nn.Linear(width + EMBEDDING, HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.gate = nn.Linear(HIDDEN, n_experts)
        self.experts = nn.Linear(HIDDEN, n_experts * _OUTPUTS)
        self.dropout = nn.Dropout(_DROPOUT)
        nn.init.normal_(self.embedding.weight, std=0.3)
        nn.init.normal_(self.experts.weight, std=0.02)
        nn.init.zeros_(self.experts.bias)

    def forward(self, inputs: Tensor, models: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        """Log quantiles [n, levels] and logits of running away [n]."""
        hidden = torch.cat((inputs, self.embedding(models)), dim=1)
        hidden = self.dropout(nn.functional.silu(self.first(hidden)))
        hidden = self.dropout(nn.functional.silu(self.second(hidden)) + hidden)
        gate = torch.softmax(self.gate(hidden), dim=1)
        each = self.experts(hidden).view(-1, self.n_experts, _OUTPUTS)
        out = (gate[:, :, None] * each).sum(1)
        median = (base + out[:, 0])[:, None]
        spread = nn.functional.softplus(out[:, 1:-1] - 1.0)
        upper = median + torch.cumsum(spread[:, :_MIDDLE], dim=1)
        lower = median - torch.cumsum(spread[:, _MIDDLE:], dim=1).flip(1)
        return torch.cat((lower, median, upper), dim=1), out[:, -1]


class Cancelled(Exception):
    """Training was told to stop."""


def fit_mixture(
    rows: Rows,
    *,
    n_models: int,
    n_experts: int,
    seed: int,
    on_progress: Callable[[float], None],
    should_stop: Callable[[], bool],
) -> Mixture:
    """Train on rows. Deterministic by seed on one thread.

    Cost: about 0.15 ms per batch of 512 and epoch: 8 s for 50,000 rows.

    Raises:
        Cancelled: ``should_stop`` said so.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mixture = Mixture(rows.inputs.shape[1], n_models, n_experts)
        inputs, base, y = (torch.from_numpy(array) for array in (rows.inputs, rows.base, rows.y))
        models, is_cut = torch.from_numpy(rows.models), torch.from_numpy(rows.is_cut)
        runaway, weight = torch.from_numpy(rows.is_runaway.astype(np.float32)), torch.from_numpy(rows.weight)
        n, size = len(y), min(_BATCH, len(y))
        optimizer = torch.optim.AdamW(mixture.parameters(), lr=_RATE, weight_decay=_DECAY)
        steps = _EPOCHS * (n // size)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps + 1, pct_start=0.15)
        levels, level_weights = torch.tensor(LEVELS), torch.tensor(_LEVEL_WEIGHTS)
        mixture.train()
        for epoch in range(_EPOCHS):
            order = torch.randperm(n, generator=generator)
            for i in range(n // size):
                if should_stop():
                    raise Cancelled
                of = order[i * size : (i + 1) * size]
                chosen = torch.where(torch.rand(size, generator=generator) < _UNKNOWN_SHARE, n_models, models[of])
                quantiles, logit = mixture(inputs[of], chosen, base[of])
                rest = y[of, None] - quantiles
                rest = torch.where(is_cut[of, None], rest.clamp_min(0.0), rest)
                pinball = torch.maximum(levels * rest, (levels - 1.0) * rest) @ level_weights
                away = nn.functional.binary_cross_entropy_with_logits(logit, runaway[of], reduction="none")
                loss = ((pinball + _RUNAWAY_WEIGHT * away) * weight[of]).mean()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                optimizer.step()
                schedule.step()
            on_progress((epoch + 1) / _EPOCHS)
    mixture.eval()
    return mixture


def tensors(mixture: Mixture) -> dict[str, Array]:
    """Weights by name, for an artifact and for ``forward``."""
    return {name: value.detach().numpy().copy() for name, value in mixture.state_dict().items()}
