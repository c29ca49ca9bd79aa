"""Capacity: the rate up to which a suite's targets are met.

The rate goes up a grid of 0.02 req/s; at each rate violations of ten runs to the end are pooled. Capacity is the last
rate before the first at which more than 1% of the requests of the worst tenant miss its target.

Rates below ``_FIRST_RATE`` are looked at only if that one is too high already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from router_ext.sim.metrics import violations
from router_ext.sim.recording import Recording
from router_ext.sim.runs import Task

GRID_RPS = 0.02
NUM_SEEDS = 10
ALLOWED_RATIO = 0.01
_FIRST_STEP = 15
"""0.3 req/s: half of what the servers of ``tiers`` can do at all."""

_LAST_STEP = 500


def capacity(task: Task, *, perform: Callable[[Sequence[Task], str], Sequence[Recording]]) -> float:
    """The capacity of one policy, in requests per second; 0 if even the lowest rate is too much.

    Args:
        task: suite and policy; its seed is the first of ten, its rate is replaced.
        perform: carries out tasks in any way it likes, under a title.
    """

    def is_met(step: int) -> bool:
        rate = step * GRID_RPS
        tasks = [
            replace(task, choice=replace(task.choice, rate=rate), seed=task.seed + index) for index in range(NUM_SEEDS)
        ]
        return worst_ratio(perform(tasks, f"{task.policy} at {rate:.2f} req/s")) <= ALLOWED_RATIO

    step = _FIRST_STEP
    if not is_met(step):
        step = 1
        if not is_met(step):
            return 0.0
    while step < _LAST_STEP and is_met(step + 1):
        step += 1
    return round(step * GRID_RPS, 2)


def worst_ratio(recordings: Sequence[Recording]) -> float:
    """Share of requests that missed their target over several runs, in the tenant where it is largest."""
    missed: dict[int, int] = {}
    totals: dict[int, int] = {}
    for recording in recordings:
        for tenant, (misses, total) in violations(recording).items():
            missed[tenant] = missed.get(tenant, 0) + misses
            totals[tenant] = totals.get(tenant, 0) + total
    return max((missed[tenant] / total for tenant, total in totals.items() if total), default=0.0)
