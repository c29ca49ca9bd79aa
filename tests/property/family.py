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
