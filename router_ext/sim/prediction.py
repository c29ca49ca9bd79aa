"""What the router would know of an output's length: predictions, and slices from what has finished.

Predictions serve victims, estimates and the decision key; they come from the true length with a stated error. Slices
never do: the scheduler takes them from what has finished so far (``core.lengths``), as in a router without a predictor.
"""

from __future__ import annotations

import enum
import math
from bisect import insort
from collections import deque
from collections.abc import Hashable

from router_ext.core.lengths import LEAST_SLICE
from router_ext.predict.baseline import DEFAULT_TOKENS, MIN_SAMPLES
from router_ext.sim.jobs import Agent, Job

_WINDOW = 5
"""Outputs of one tenant whose mean is the prediction of ``mean5`` (VTC's predictor)."""


class Predictor(enum.StrEnum):
    """Where predicted lengths come from.

    ``noisy``: true length times a factor drawn evenly from 0.5 to 1.5. ``oracle``: the true length. ``mean5``: mean of
    the tenant's last five outputs. ``none``: the empirical median, what a router without a model goes by.
    """

    NOISY = "noisy"
    ORACLE = "oracle"
    MEAN5 = "mean5"
    NONE = "none"


class Lengths:
    """Output lengths of finished requests: the key's own, else the tenant's, else the pool's, each from 20 on.

    Cost: O(log n) look-ups, and one insertion into three sorted lists per finished request.
    """

    __slots__ = ("_by_key", "_by_tenant", "_last", "_pool")

    def __init__(self) -> None:
        self._by_key: dict[Hashable, list[int]] = {}
        self._by_tenant: dict[int, list[int]] = {}
        self._pool: list[int] = []
        self._last: dict[int, deque[int]] = {}

    def finished(self, job: Job) -> None:
        """Learn the length of a request that is over."""
        length = job.output_tokens
        if job.key is not None:
            insort(self._by_key.setdefault(job.key, []), length)
        insort(self._by_tenant.setdefault(job.tenant, []), length)
        insort(self._pool, length)
        self._last.setdefault(job.tenant, deque(maxlen=_WINDOW)).append(length)

    def quantile(self, job: Job, level: float) -> int:
        """The smallest length whose share of the finished requests reaches ``level``; 1,024 while nothing is known."""
        for known in (self._by_key.get(job.key, ()), self._by_tenant.get(job.tenant, ()), self._pool):
            if len(known) >= MIN_SAMPLES:
                return known[math.ceil(level * len(known) - 1e-9) - 1]
        return DEFAULT_TOKENS

    def recent_mean(self, tenant: int) -> int:
        """Mean of the tenant's last five outputs; 1,024 before the first."""
        last = self._last.get(tenant)
        return round(sum(last) / len(last)) if last else DEFAULT_TOKENS


class Prediction:
    """Predicted lengths and slices of one run.

    Args:
        is_slice_oracle: slices are true lengths, to show what perfect knowledge would be worth.
    """

    __slots__ = ("_is_slice_oracle", "_kind", "lengths")

    def __init__(self, kind: Predictor, *, is_slice_oracle: bool = False) -> None:
        self._kind = kind
        self._is_slice_oracle = is_slice_oracle
        self.lengths = Lengths()

    def output_tokens(self, job: Job) -> int:
        """Predicted output of a request that has just arrived, within what its limit allows."""
        match self._kind:
            case Predictor.NOISY:
                guess = round(job.output_tokens * job.guess)
            case Predictor.ORACLE:
                guess = job.output_tokens
            case Predictor.MEAN5:
                guess = self.lengths.recent_mean(job.tenant)
            case Predictor.NONE:
                guess = self.lengths.quantile(job, 0.5)
        return max(1, min(guess, job.max_new_tokens))

    def slice_tokens(self, job: Job) -> int | None:
        """The slice the router states for a request that arrives; None: the scheduler's own."""
        return max(LEAST_SLICE, job.output_tokens) if self._is_slice_oracle else None

    def agent_cost(self, agent: Agent) -> float:
        """KV token-time of all calls of an agent, as predicted when it arrives: it stays what it declared."""
        if agent.cost is None:
            calls = agent.calls if agent.reduce is None else [*agent.calls, agent.reduce]
            agent.cost = 0.0
            for call in calls:
                output = self.output_tokens(call)
                agent.cost += call.input_tokens * output + output * (output + 1) / 2.0
        return agent.cost
