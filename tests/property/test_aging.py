"""Row 21: inside a tenant no tier can starve another, however much of the tenant's share it could use alone.

The bound: while a request older than ``aging_s`` waits in a lower tier, one of every ``1/ratio`` (and two) admissions
of its tenant goes to it or to one of a lower tier that is older. So it waits for ``aging_s``, then for as many such
periods as there are older ones, and one; how long a period takes is the tenant's share of the pool.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from router_ext.core.actions import Dispatch, Preempt
from router_ext.core.events import Event, Finished, Preempted, Progressed, SliceEnded
from router_ext.core.ids import RequestId
from router_ext.core.queues import Tenant
from router_ext.core.scheduler import Scheduler
from tests.property.oracle import LawBroken
from tests.property.tgi_steps import StepServer, Stream
from tests.unit.core.builders import arrival, pool, up

STEP_S = 0.05
AGING_S = 4.0
RATIO = 0.2
PERIOD = math.ceil(1 / RATIO) + 2
TIERS = [
    {"name": "express", "rank": 0, "ttft_target_s": 0.5},
    {"name": "chat", "rank": 1, "ttft_target_s": 3.0},
    {"name": "batch", "rank": 10},
]
RANKS = {"express": 0, "chat": 1, "batch": 10}


@dataclass
class Job:
    """One request: where it belongs and how far it is."""

    name: str
    order: int
    tenant: str
    tier: str
    prompt: int
    length: int
    arrival_s: float
    output: int = 0
    is_waiting: bool = True
    has_started: bool = False
    admissions: int = 0
    ahead: int = 0
    """Admissions of its tenant while it was aged and waited for its first; those of them that were ahead of it."""


@dataclass
class Pool:
    """One server; the first tenant floods its best tiers and sends some batch work, the others send what they like."""

    seed: int
    policy: str
    num_tenants: int
    now: float = 0.0
    jobs: dict[str, Job] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.kv = self.rng.randint(150, 400)
        self.server = StepServer(kv_tokens=self.kv)
        tenants = {name: self.rng.choice([0.5, 1.0, 2.0]) for name in "abcd"[: self.num_tenants]}
        self.names = list(tenants)
        self.scheduler = Scheduler(
            pool(
                kv=self.kv,
                policy=self.policy,
                tenants=tenants,
                tiers=TIERS,
                aging_s=AGING_S,
                aging_ratio=RATIO,
                max_slice_tokens=self.rng.choice([16, 1_024]),
                min_slice_tokens=8,
            )
        )
        self.send(up())

    def arrive(self, tenant: str, tier: str) -> None:
        order = len(self.jobs)
        prompt, length = self.rng.randint(1, 30), self.rng.randint(1, 40)
        job = Job(f"r{order}", order, tenant, tier, prompt, length, self.now)
        self.jobs[job.name] = job
        self.send(arrival(job.name, tenant=tenant, tier=tier, prompt=prompt, cap=length, slice_tokens=16))

    def send(self, event: Event) -> None:
        for action in self.scheduler.handle(event, self.now):
            if isinstance(action, Dispatch):
                self.dispatch(self.jobs[action.request_id], action.slice_tokens)
            elif isinstance(action, Preempt):
                self.cut(self.jobs[action.request_id])

    def dispatch(self, job: Job, slice_tokens: int) -> None:
        for other in self.jobs.values():
            if other.tenant != job.tenant or other.has_started or not other.is_waiting or other is job:
                continue
            if self.now - other.arrival_s > AGING_S:
                other.admissions += 1
                other.ahead += job.order < other.order and job.tier != "express"
                self.judge(other)
        job.is_waiting = False
        job.has_started = True
        self.server.open(Stream(job.name, job.prompt + job.output, slice_tokens, job.length - job.output))

    def judge(self, job: Job) -> None:
        if RANKS[job.tier] and job.admissions > PERIOD * (job.ahead + 1):
            raise LawBroken(
                f"aging: {job.name} ({job.tier}) waits since {job.arrival_s:.1f} s; its tenant had {job.admissions} "
                f"admissions since it was aged, {job.ahead} of them ahead of it"
            )

    def cut(self, job: Job) -> None:
        self.server.close(job.name)
        self.server.running = [stream for stream in self.server.running if stream.name != job.name]
        job.is_waiting = True
        prompt = job.prompt + job.output
        self.send(Preempted(request_id=RequestId(job.name), dropped_tokens=0, next_prompt_tokens=prompt))

    def step(self, rates: dict[str, dict[str, float]]) -> None:
        self.now = round(self.now + STEP_S, 6)
        for name, what in self.server.step():
            job = self.jobs[name]
            if job.is_waiting:
                continue
            if what == "token":
                job.output += 1
                self.send(Progressed(request_id=RequestId(name), output_tokens=1))
            elif what == "end" or job.output >= job.length:
                self.send(Finished(request_id=RequestId(name)))
            else:
                job.is_waiting = True
                prompt = job.prompt + job.output
                self.send(SliceEnded(request_id=RequestId(name), dropped_tokens=0, next_prompt_tokens=prompt))
        for tenant, tiers in rates.items():
            for tier, rate in tiers.items():
                if self.rng.random() < rate:
                    self.arrive(tenant, tier)

    def go(self, steps: int = 1_500) -> Pool:
        rates = {self.names[0]: {"express": 0.5, "chat": self.rng.choice([0.0, 0.05, 0.5]), "batch": 0.03}}
        for name in self.names[1:]:
            rates[name] = {tier: self.rng.choice([0.0, 0.05, 0.4]) for tier in RANKS}
        for _ in range(steps):
            self.step(rates)
        return self


CASES = [(policy, num) for policy in ("slo-fair", "vtc") for num in (1, 2, 4)]


@pytest.mark.parametrize(("policy", "num_tenants"), CASES)
@pytest.mark.parametrize("seed", range(4))
def test_an_aged_request_waits_for_no_more_than_its_turn_in_every_period(
    policy: str, num_tenants: int, seed: int
) -> None:
    outcome = Pool(seed, policy, num_tenants).go()
    aged = [job for job in outcome.jobs.values() if job.admissions and job.has_started]
    assert any(job.tier == "batch" for job in aged), "nobody was ever aged: the case proves nothing"


def linear_subtraction(patch: pytest.MonkeyPatch) -> None:
    """Priority falls linearly with the wait, down to nothing: under overload everybody ends in one queue."""

    def head(self: Any, now: float, aging_s: float) -> Any:
        heads = [queue.head for queue in self.by_rank if queue.head is not None]
        key = lambda request: (max(0.0, 10.0 * request.queue.rank - (now - request.arrival_s)), request.seq)  # noqa: E731
        return min(heads, key=key, default=None)

    patch.setattr(Tenant, "head", head)


def urgent_ones_never_stand_back(patch: pytest.MonkeyPatch) -> None:
    """Aging at the tenant's turn only: a tenant that lives on its pass never has one."""

    def head(self: Any, now: float, aging_s: float) -> Any:
        return original(self, now, aging_s) or next(queue.head for queue in self.by_rank if queue.head is not None)

    original = Tenant.aged
    patch.setattr(Tenant, "aged", lambda self, now, aging_s: None)
    patch.setattr(Tenant, "head", head)


def no_aging(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tenant, "aged", lambda self, now, aging_s: None)


@pytest.mark.parametrize(
    ("mutant", "policy"),
    [
        (linear_subtraction, "vtc"),
        (urgent_ones_never_stand_back, "slo-fair"),
        (no_aging, "slo-fair"),
        (no_aging, "vtc"),
    ],
)
def test_a_mutant_starves_lower_tiers(
    mutant: Callable[[pytest.MonkeyPatch], None], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(LawBroken, match=r"^aging"):
        run_many(policy)


def run_many(policy: str) -> None:
    for seed in range(6):
        Pool(seed, policy, 1 + seed % 3).go()


def test_the_best_tier_keeps_what_is_not_owed() -> None:
    """A period has one admission for aged requests, not more."""
    outcome = Pool(1, "slo-fair", 2).go()
    admitted = [job for job in outcome.jobs.values() if job.tenant == outcome.names[0] and job.has_started]
    lower = sum(1 for job in admitted if job.tier == "batch")
    assert 0 < lower <= len(admitted) / 4
