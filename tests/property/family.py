"""Oracles of the counter policies that stop at the head in turn. Their constants are computed here, by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from router_ext.core.events import Arrived, Event, Progressed
from tests.property.harness import Run, Scenario, scenario
from tests.property.oracle import SLACK, Job, LawBroken, Oracle


class VtcOracle(Oracle):
    """No urgency, no passes: who starts has the smallest counter."""

    def urgency_pass(self, tenant: str) -> float:
        return 0.0

    def backfill_pass(self, tenant: str) -> float:
        return 0.0

    def is_urgent(self, job: Job) -> bool:
        return False


class ArbitraryOracle(VtcOracle):
    """Unit weights: what a tenant that waits receives, against any other, and until its request starts.

    ``arbitrary``: it receives at most ``4 U'`` less, over any interval in which it waits, than a tenant that comes and
    goes as it likes. ``latency``: with ``n`` tenants, ``2 (n - 1) U'`` is the most that the pool delivers before the
    request of one starts that had nothing here and is not over-served.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.least: dict[tuple[str, str], float] = {}
        self.seen: dict[str, float] = {}
        self.running: dict[str, Job] = {}
        self.worst_arbitrary = self.worst_latency = 0.0

    def enqueue(self, job: Job) -> None:
        tenant = job.tenant
        was_idle = not self.queues[tenant]
        self.running = {name: other for name, other in self.running.items() if other.place == "running"}
        was_absent = was_idle and all(other.tenant != tenant for other in self.running.values())
        super().enqueue(job)
        if was_idle:
            for other in self.weights:
                self.least[tenant, other] = self.delivered[other] - self.delivered[tenant]
            floor = self.floor()
            assert floor is not None
            if was_absent and self.counter[tenant] <= floor + SLACK:
                self.seen[job.name] = self.total_delivered()

    def dispatch(self, job: Job) -> None:
        since = self.seen.pop(job.name, None)
        if since is not None:
            ratio = (self.total_delivered() - since) / (2 * (len(self.weights) - 1) * self.peak)
            self.worst_latency = max(self.worst_latency, ratio)
            if "latency" in self.laws and ratio > 1.0 + SLACK:
                raise LawBroken(f"latency: {job.name} started after {ratio:.3f} of the service it may wait for")
        super().dispatch(job)
        self.running[job.name] = job

    def _charge(self, job: Job, service: float) -> None:
        super()._charge(job, service)
        for waiting in self.backlogged():
            for other in self.weights:
                ahead = self.delivered[other] - self.delivered[waiting]
                least = self.least[waiting, other] = min(self.least[waiting, other], ahead)
                ratio = (ahead - least) / (4 * self.peak)
                self.worst_arbitrary = max(self.worst_arbitrary, ratio)
                if "arbitrary" in self.laws and ratio > 1.0 + SLACK:
                    raise LawBroken(f"arbitrary: {waiting} waits and {other} gets {ratio:.3f} of what it may get more")


class DrrOracle(VtcOracle):
    """Grants walked round by round: one level for all, and who is below it."""

    quantum_ratio = 1 / 40
    start = 0.0

    @property
    def quantum(self) -> float:
        return self.quantum_ratio * self.peak / max(self.weights.values())

    def counter_bound(self, tenant: str) -> float:
        return self.peak / self.weights[tenant] + self.quantum

    def lift(self, tenant: str) -> None:
        super().lift(tenant)
        if not self.backlogged():
            self.start = self.counter[tenant]

    def in_turn(self) -> list[str]:
        level = self.start
        backlogged = self.backlogged()
        while backlogged and all(self.counter[tenant] >= level - SLACK for tenant in backlogged):
            level += self.quantum
        return [tenant for tenant in backlogged if self.counter[tenant] <= level + SLACK]

    def judge_turn(self, job: Job) -> None:
        if job.tenant not in self.in_turn():
            raise LawBroken(f"no_skipping: {job.name} of {job.tenant} has no deficit left in this round")


class PredictOracle(VtcOracle):
    """Counters charged in advance, from what runs: ``p = c + w_output * expected / w``.

    Between waiting tenants ``p`` is judged by the same bound as ``c``.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.running: dict[str, Job] = {}

    def counter_bound(self, tenant: str) -> float:
        return max(self.peak / self.weights[tenant], self.peak / min(self.weights.values()))

    def expected(self, tenant: str) -> int:
        self.running = {name: job for name, job in self.running.items() if job.place == "running"}
        mine = [job for job in self.running.values() if job.tenant == tenant]
        return sum(max(0, min(job.predicted, job.slice_end) - job.paid_out) for job in mine)

    def enqueue(self, job: Job) -> None:
        job.place = "queued"
        super().enqueue(job)

    def dispatch(self, job: Job) -> None:
        super().dispatch(job)
        self.running[job.name] = job

    def charged_in_advance(self, tenant: str) -> float:
        return self.counter[tenant] + self.w_output * self.expected(tenant) / self.weights[tenant]

    def lift(self, tenant: str) -> None:
        ahead = [self.charged_in_advance(other) for other in self.backlogged()]
        if not ahead and self.last_left is not None:
            ahead = [self.charged_in_advance(self.last_left)]
        if ahead:
            self.counter[tenant] += max(0.0, min(ahead) - self.charged_in_advance(tenant))
        super().lift(tenant)

    def in_turn(self) -> list[str]:
        ahead = {tenant: self.charged_in_advance(tenant) for tenant in self.backlogged()}
        least = min(ahead.values(), default=0.0)
        return [tenant for tenant, charge in ahead.items() if charge <= least + SLACK]

    def judge_turn(self, job: Job) -> None:
        if job.tenant not in self.in_turn():
            raise LawBroken(f"no_skipping: {job.name} of {job.tenant} is charged more in advance than another")

    def _watch_counter(self, tenant: str) -> None:
        super()._watch_counter(tenant)
        waiting = [self.charged_in_advance(other) for other in self.backlogged()]
        gap = self.charged_in_advance(tenant) - min(waiting)
        if "advance_bound" in self.laws and gap > self.counter_bound(tenant) * (1.0 + SLACK):
            raise LawBroken(f"advance_bound: {tenant} is charged {gap:g} more in advance than another")


class Watched(Run):
    """Counters never fall; the charge in advance falls by refunds alone, never by more than was charged in advance."""

    def send(self, event: Event, *, decides: bool = True) -> None:
        if not hasattr(self, "scheduler"):
            super().send(event, decides=decides)
            return
        tenants = self.scheduler._tenants.by_id
        before = {name: (tenant.counter, tenant.expected_rest) for name, tenant in tenants.items()}
        super().send(event, decides=decides)
        for name, (counter, expected) in before.items():
            tenant = tenants[name]
            if "monotone" in self.laws and tenant.counter < counter - SLACK:
                raise LawBroken(f"monotone: the counter of {name} fell from {counter:g} to {tenant.counter:g}")
            if "refunds" not in self.laws:
                continue
            if tenant.expected_rest < -SLACK:
                raise LawBroken(f"refunds: {name} got back {-tenant.expected_rest:g} that it had not paid for")
            fell = counter + expected / tenant.weight - (tenant.counter + tenant.expected_rest / tenant.weight)
            if isinstance(event, Progressed | Arrived) and fell > SLACK:
                raise LawBroken(f"refunds: the charge of {name} fell by {fell:g} though nothing of it ended")

    def judge_end(self) -> None:
        super().judge_end()
        if "refunds" in self.laws and any(tenant.expected_rest for tenant in self.scheduler._tenants.by_id.values()):
            raise LawBroken("refunds: something is still charged in advance in an empty pool")


def returning(seed: int, **options: Any) -> Scenario:
    """One server and small requests. One tenant sends all the time; another is away for long, then comes and stays."""
    rng = random.Random(seed)
    case = scenario(seed, num_servers=1, **options)
    stays, comes = list(case.weights)[:2]
    tier = case.tiers[0]["name"]
    arrivals = []
    for step in range(600):
        names = [stays] if step < 300 else [stays, comes]
        small = [(name, tier, 4, length := rng.randint(10, 30), length, 1_024) for name in names]
        arrivals.append(small if rng.random() < 0.9 else [])
    return replace(case, arrivals=arrivals)
