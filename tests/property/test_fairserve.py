"""FairServe: who may be refused, in random pools with low limits."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from router_ext.core.actions import Action, Reject, RejectCode
from router_ext.core.fairness.fairserve import FairServe
from router_ext.core.interactions import Interactions
from tests.property.harness import Run, scenario
from tests.property.oracle import SLACK, Job, LawBroken

LAWS = frozenset({"ledger", "server_queue_empty", "audit", "conservation"})
LIMIT, MARK = 6, 0.6
SEEDS = range(12)


class InteractionRun(Run):
    """Remembers who has begun what, and looks at every refusal."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.interactions: dict[str, str] = {}
        self.begun: set[str] = set()
        self.accepted: dict[str, list[float]] = defaultdict(list)
        self.agent_rng = random.Random(self.scenario.seed)
        self.refused = self.went_on_over_the_limit = 0

    def interaction_of(self, job: Job) -> dict[str, Any]:
        rng = self.agent_rng
        if rng.random() < 0.3:
            return {}
        name = f"agent-{job.order // 30}-{rng.randrange(2)}"
        self.interactions[job.name] = f"{job.tenant}/{name}"
        return {"agent_id": name}

    def arrive(self, tenant: str, *rest: Any) -> None:
        used = self.used_ratio()
        waiting = self.scheduler.stats().queued
        super().arrive(tenant, *rest)
        job = list(self.jobs.values())[-1]
        name = self.interactions.get(job.name)
        recent = [at for at in self.accepted[job.tenant] if at > self.now - 60.0]
        is_over = len(recent) >= max(1, int(LIMIT * self.scenario.weights[job.tenant]))
        if job.outcomes == [RejectCode.RATE_LIMITED.value]:
            self.refused += 1
            if name in self.begun:
                raise LawBroken(f"midway: {job.name} goes on with {name} and was refused")
            if used < MARK or not waiting:
                raise LawBroken(f"idle: {job.name} was refused with {used:.0%} of the KV in use, {waiting} waiting")
            if not is_over:
                raise LawBroken(f"limit: {job.name} was refused after {len(recent)} requests")
            return
        self.accepted[job.tenant].append(self.now)
        if is_over and used >= MARK and waiting:
            if name is None or name not in self.begun:
                raise LawBroken(f"limit: {job.name} begins something after {len(recent)} requests")
            self.went_on_over_the_limit += 1
        if name is not None:
            self.begun.add(name)

    def used_ratio(self) -> float:
        backends = [backend for backend in self.scheduler.stats().backends if backend.is_up]
        usable = sum(backend.usable_tokens for backend in backends)
        return sum(backend.reserved_tokens for backend in backends) / usable if usable else 0.0

    def carry_out(self, action: Action) -> None:
        super().carry_out(action)
        if isinstance(action, Reject) and action.code is RejectCode.RATE_LIMITED:
            assert action.retry_after_s is not None
            assert 0.0 < action.retry_after_s <= 60.0 + SLACK


def run(seed: int) -> InteractionRun:
    case = scenario(seed, steps=300, policy="fairserve", with_faults=seed % 2 == 0)
    knobs = {"fairserve_limit": LIMIT, "fairserve_overload": MARK}
    outcome = InteractionRun(replace(case, knobs=knobs), LAWS)
    outcome.fields = outcome.interaction_of
    outcome.go()
    return outcome


def run_many() -> None:
    for seed in SEEDS:
        run(seed)


def test_no_interaction_is_refused_midway_and_nothing_below_the_mark() -> None:
    runs = [run(seed) for seed in SEEDS]
    assert sum(outcome.refused for outcome in runs) > 100
    assert sum(outcome.went_on_over_the_limit for outcome in runs) > 100


def test_an_interaction_refused_midway_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interactions, "get", lambda self, request: None)
    with pytest.raises(LawBroken, match=r"^midway"):
        run_many()


def test_a_limit_that_holds_without_overload_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = FairServe.__init__

    def init(self: Any, around: Any) -> None:
        original(self, around)
        self._overload = 0.0

    monkeypatch.setattr(FairServe, "__init__", init)
    with pytest.raises(LawBroken, match=r"^idle"):
        run_many()
