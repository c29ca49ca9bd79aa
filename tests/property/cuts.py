"""What running work may be cut for, and what that may cost: kept a second time, from what the servers see."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from router_ext.core.actions import Preempt
from tests.property.oracle import Job, LawBroken

if TYPE_CHECKING:
    from tests.property.harness import Run

SECOND = 20
"""Steps."""

PATIENCE = 400
"""Steps within which something new is delivered, if anything runs or waits."""


class Cuts:
    """Judge of one run.

    Laws: ``cuts`` (guards, and enough is freed for somebody who waits), ``waste`` (the budget), ``progress``.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.spent = 0.0
        """Tokens sent again because of cuts, estimates of those that have not resumed included, less what was earned
        back."""
        self.peak = 0
        """Largest number of tokens within two seconds: no window of the product can have seen more per second."""
        self.recent: deque[int] = deque([0], maxlen=2 * SECOND)
        self.delivered = (0.0, 0)
        """Service delivered, and steps since it last grew."""

    # --- what happens ----------------------------------------------------------------------------------------------

    def token(self) -> None:
        self.recent[-1] += 1
        self.spent = max(0.0, self.spent - self.run.scenario.waste)

    def stepped(self) -> None:
        self.peak = max(self.peak, sum(self.recent))
        self.recent.append(0)
        total = self.run.oracle.total_delivered()
        before, steps = self.delivered
        is_busy = bool(self.run.streams) or any(self.run.oracle.queues.values())
        is_stuck = is_busy and total <= before
        self.delivered = (total, steps + 1 if is_stuck else 0)
        if "progress" in self.run.laws and self.delivered[1] > PATIENCE:
            raise LawBroken(
                f"progress: {len(self.run.streams)} requests have run for {steps} steps and made nothing new"
            )

    def resumed(self, job: Job) -> None:
        if job.owed:
            self.spent = max(0.0, self.spent + job.input_tokens - job.owed)
            job.owed = 0

    def spared(self, job: Job) -> None:
        self.spent = max(0.0, self.spent - job.owed)
        job.owed = 0

    # --- judging ---------------------------------------------------------------------------------------------------

    def told(self, cuts: list[Preempt]) -> None:
        run = self.run
        victims = [run.jobs[cut.request_id] for cut in cuts]
        names = {str(cut.backend) for cut in cuts}
        if "waste" in run.laws:
            capacity = min(1_000.0, 0.03 * 60 * max(self.peak, sum(self.recent)))
            if self.spent >= capacity:
                raise LawBroken(f"waste: {self.spent:.0f} tokens are spent, of {capacity:.0f} that may be")
        for job in victims:
            job.cuts += 1
            job.owed = job.input_tokens + job.output - job.slice_start
            self.spent += job.owed
        if "cuts" in run.laws:
            if len(names) != 1:
                raise LawBroken(f"cuts: victims lie on several servers: {cuts}")
            for job in victims:
                self.judge_guards(job, cuts[0].backend)
            self.judge_enough(victims, cuts[0].backend)

    def judge_guards(self, job: Job, server: str) -> None:
        s = self.run.scenario
        if (job.place, job.backend) != ("running", server):
            raise LawBroken(f"cuts: {job.name} is {job.place} on {job.backend}, not running on {server}")
        if job.output == job.slice_start:
            raise LawBroken(f"cuts: {job.name} is in prefill")
        if job.cuts > s.max_preemptions:
            raise LawBroken(f"cuts: {job.name} was cut {job.cuts} times")
        if job.output > 0.8 * job.predicted:
            raise LawBroken(f"cuts: {job.name} had {job.output} of {job.predicted} predicted tokens")
        if job.prompt + job.output > s.prefill_budget:
            raise LawBroken(f"cuts: {job.name} would send {job.prompt + job.output} tokens again")
        if job.tier in self.run.oracle.targets:
            raise LawBroken(f"cuts: {job.name} belongs to a tier with a target")

    def judge_enough(self, victims: list[Job], name: str) -> None:
        """With the victims and all that is closing gone, somebody who waits fits; without them nobody in turn did."""
        run = self.run
        server = run.servers[name]
        leaving = {job.upstream for job in victims}
        held = [s for s in server.running + server.queue if not s.is_closing and s.name not in leaving]
        free = server.usable() - sum(server.blocks(s.input_tokens, s.new_tokens) for s in held)
        waiting = [job for queue in run.oracle.queues.values() for job in queue]
        least = min(server.blocks(job.input_tokens, run.next_slice(job)) for job in waiting)
        if least > free:
            raise LawBroken(f"cuts: {leaving} leave {free} blocks on {name}, nobody who waits takes less than {least}")
