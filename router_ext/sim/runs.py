"""Many runs: every policy and seed of a suite, over processes.

A run depends on its task alone, so the result is the same however many processes there are.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from router_ext.obs import collector
from router_ext.sim.engine import Run
from router_ext.sim.prediction import Predictor
from router_ext.sim.recording import Recording
from router_ext.sim.suites import SuiteChoice

ALONE_POLICY = "fifo"
"""A tenant alone needs no policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run. ``alone``: only this tenant's requests."""

    choice: SuiteChoice
    policy: str
    seed: int
    alone: str | None = None
    predictor: Predictor = Predictor.NOISY
    is_slice_oracle: bool = False


def perform(task: Task) -> Recording:
    """Carry out one task in this process."""
    suite = task.choice.build()
    if task.alone is not None:
        suite = suite.alone(task.alone)
    run = Run(suite, task.policy, task.seed, predictor=task.predictor, is_slice_oracle=task.is_slice_oracle)
    with collector.tuned():
        return run.run()


def perform_all(tasks: Sequence[Task], *, jobs: int) -> Iterator[Recording]:
    """The recordings in the order of the tasks. Closing the iterator stops what has not begun."""
    if jobs <= 1 or len(tasks) <= 1:
        for task in tasks:
            yield perform(task)
        return
    # A fresh interpreter per worker: forking a process that draws progress in a thread may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context) as pool:
        futures = [pool.submit(perform, task) for task in tasks]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def default_jobs() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0))
