"""What the router would know of an output's length when a request arrives.

Whoever knows a distribution states its quantiles, from which the scheduler takes what it expects and slices
(``core.survival``); ``noisy`` and ``mean5`` state an expected length alone. Whoever knows nothing states nothing, and
the scheduler goes by what has finished (``core.lengths``), as a router without a predictor does.
"""

from __future__ import annotations

import enum
import math
from bisect import insort
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

from router_ext.errors import SimulationError
from router_ext.predict.baseline import DEFAULT_TOKENS, LEVELS, MIN_SAMPLES
from router_ext.sim.foresight import Foresight
from router_ext.sim.jobs import Agent, Job

_WINDOW = 5
"""Outputs of one tenant whose mean is the prediction of ``mean5`` (VTC's predictor)."""

_MEDIAN = 0.5


class Predictor(enum.StrEnum):
    """Where predicted lengths come from.

    ``none``: nothing is predicted. ``mean5``: mean of the tenant's last five outputs. ``trivial``: quantiles of the
    key's finished outputs, else the tenant's, else the pool's: the router's fallback predictor, if it were trained
    after every request. ``model``: a trained length model with history and memory. ``noisy``: true length times a
    factor drawn evenly from 0.5 to 1.5. ``oracle``: true length.
    """

    NOISY = "noisy"
    ORACLE = "oracle"
    MODEL = "model"
    TRIVIAL = "trivial"
    MEAN5 = "mean5"
    NONE = "none"


class Guess(NamedTuple):
    """What is stated when a request arrives; None: nothing is, the scheduler's own estimate holds."""

    output_tokens: int | None = None
    quantiles: tuple[int, ...] | None = None


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

    def quantile(self, job: Job, level: float) -> int | None:
        """The smallest length whose share of the finished requests reaches ``level``; None while nothing is known."""
        for known in (self._by_key.get(job.key, ()), self._by_tenant.get(job.tenant, ()), self._pool):
            if len(known) >= MIN_SAMPLES:
                return known[math.ceil(level * len(known) - 1e-9) - 1]
        return None

    def quantiles(self, job: Job) -> tuple[int, ...] | None:
        """The quantiles at ``LEVELS``; None while nothing is known."""
        known = [self.quantile(job, level) for level in LEVELS]
        return tuple(tokens for tokens in known if tokens is not None) if known[0] is not None else None

    def recent_mean(self, tenant: int) -> int:
        """Mean of the tenant's last five outputs; 1,024 before the first."""
        last = self._last.get(tenant)
        return round(sum(last) / len(last)) if last else DEFAULT_TOKENS


class Prediction:
    """What is predicted in one run.

    Args:
        foresight: of ``model``, which needs one.
    """

    __slots__ = ("_foresight", "_kind", "_lengths")

    def __init__(self, kind: Predictor, foresight: Foresight | None = None) -> None:
        if (foresight is None) is (kind is Predictor.MODEL):
            raise SimulationError(f"predictor {Predictor.MODEL} goes with a length model, others go without")
        self._kind = kind
        self._foresight = foresight
        self._lengths = Lengths()

    def guess(self, job: Job) -> Guess:
        """What the router states of a request that has just arrived."""
        match self._kind:
            case Predictor.NOISY:
                return Guess(_within(round(job.output_tokens * job.guess), job))
            case Predictor.ORACLE:
                return Guess(job.output_tokens, (job.output_tokens,) * len(LEVELS))
            case Predictor.MEAN5:
                return Guess(_within(self._lengths.recent_mean(job.tenant), job))
            case Predictor.TRIVIAL:
                return _distributed(self._lengths.quantiles(job), job)
            case Predictor.MODEL:
                base = self._lengths.quantiles(job)
                assert self._foresight is not None
                return _distributed(self._foresight.quantiles(job, base) or base, job)
        return Guess()

    def finished(self, job: Job) -> None:
        """A request came to its end, and its client has seen all of it."""
        self._lengths.finished(job)
        if self._foresight is not None:
            self._foresight.finished(job)

    def agent_cost(self, agent: Agent) -> float:
        """KV token-time of all calls of an agent, as predicted when it arrives: it stays what it declared."""
        if agent.cost is None:
            calls = agent.calls if agent.reduce is None else [*agent.calls, agent.reduce]
            agent.cost = 0.0
            for call in calls:
                output = self.guess(call).output_tokens
                if output is None:
                    output = _within(self._lengths.quantile(call, _MEDIAN) or DEFAULT_TOKENS, call)
                agent.cost += call.input_tokens * output + output * (output + 1) / 2.0
        return agent.cost


def _distributed(quantiles: tuple[int, ...] | None, job: Job) -> Guess:
    """A distribution, as far as the client's limit allows; nothing, if there is none."""
    if quantiles is None:
        return Guess()
    known = tuple(_within(tokens, job) for tokens in quantiles)
    return Guess(known[LEVELS.index(_MEDIAN)], known)


def _within(tokens: int, job: Job) -> int:
    """A length that the client's limit allows."""
    return max(1, min(tokens, job.max_new_tokens))
