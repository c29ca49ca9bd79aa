"""Oracles of the counter policies that stop at the head in turn. Their constants are computed here, by hand."""

from __future__ import annotations

from tests.property.oracle import SLACK, Job, LawBroken, Oracle


class VtcOracle(Oracle):
    """No urgency, no passes: who starts has the smallest counter."""

    def urgency_pass(self, tenant: str) -> float:
        return 0.0

    def backfill_pass(self, tenant: str) -> float:
        return 0.0

    def is_urgent(self, job: Job) -> bool:
        return False


class DrrOracle(VtcOracle):
    """Grants walked round by round: one level for all, and who is below it."""

    quantum_ratio = 1 / 40

    @property
    def quantum(self) -> float:
        return self.quantum_ratio * self.peak / max(self.weights.values())

    def counter_bound(self, tenant: str) -> float:
        return self.peak / self.weights[tenant] + self.quantum

    def judge_turn(self, job: Job) -> None:
        level = 0.0
        backlogged = self.backlogged()
        while all(self.counter[tenant] >= level - SLACK for tenant in backlogged):
            level += self.quantum
        if self.counter[job.tenant] > level + SLACK:
            raise LawBroken(f"no_skipping: {job.name} of {job.tenant} has no deficit left in the round up to {level:g}")


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

    def judge_turn(self, job: Job) -> None:
        ahead = {tenant: self.charged_in_advance(tenant) for tenant in self.backlogged()}
        if ahead[job.tenant] > min(ahead.values()) + SLACK:
            raise LawBroken(f"no_skipping: {job.name} of {job.tenant} starts at {ahead[job.tenant]:g} of {ahead}")

    def _watch_counter(self, tenant: str) -> None:
        super()._watch_counter(tenant)
        waiting = [self.charged_in_advance(other) for other in self.backlogged()]
        gap = self.charged_in_advance(tenant) - min(waiting)
        if "advance_bound" in self.laws and gap > self.counter_bound(tenant) * (1.0 + SLACK):
            raise LawBroken(f"advance_bound: {tenant} is charged {gap:g} more in advance than another")
