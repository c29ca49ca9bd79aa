"""Many runs: every policy and seed of a suite, over processes.

A run depends on its task alone, so the result is the same however many processes there are.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from router_ext import compiled
from router_ext.obs import collector
from router_ext.sim import worker
from router_ext.sim.engine import Run
from router_ext.sim.foresight import Foresight, read_model
from router_ext.sim.prediction import Predictor
from router_ext.sim.recording import Recording
from router_ext.sim.suites import SuiteChoice

ALONE_POLICY = "fifo"
"""A tenant alone needs no policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run. ``alone``: only this tenant's requests. ``model``: artifact of predictor ``model``."""

    choice: SuiteChoice
    policy: str
    seed: int
    alone: str | None = None
    predictor: Predictor = Predictor.NOISY
    model: Path | None = None


def perform(task: Task) -> Recording:
    """Carry out one task in this process."""
    suite = task.choice.build()
    if task.alone is not None:
        suite = suite.alone(task.alone)
    foresight = None
    if task.predictor is Predictor.MODEL and task.model is not None:
        foresight = Foresight(read_model(task.model))
    run = Run(suite, task.policy, task.seed, predictor=task.predictor, foresight=foresight)
    with collector.tuned():
        return run.run()


class Workers:
    """Processes that carry out tasks, as many as ``jobs``; none but this one if that is 1. A context manager.

    Whoever is interrupted does not wait for what the others are at: they are ended.
    """

    def __init__(self, jobs: int) -> None:
        self._strangers = set(multiprocessing.active_children())
        # A fresh interpreter per worker: forking a process that draws progress in a thread may hang.
        context = multiprocessing.get_context("spawn")
        self._pool = (
            ProcessPoolExecutor(jobs, mp_context=context, initializer=worker.prepare, initargs=(compiled.running(),))
            if jobs > 1
            else None
        )

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is None:
            return
        if kind is not None:
            for process in multiprocessing.active_children():
                if process not in self._strangers:
                    process.terminate()
        self._pool.shutdown(cancel_futures=True)

    def perform(self, tasks: Sequence[Task]) -> Iterator[Recording]:
        """The recordings in the order of the tasks, as they are done."""
        if self._pool is None or len(tasks) <= 1:
            return map(perform, tasks)
        return self._pool.map(perform, tasks)


def default_jobs() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0))
