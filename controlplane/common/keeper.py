"""Keeps the lease of a long job from a thread of its own, so that no step of it has to be short."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, Protocol, Self

import structlog
from django.db import DatabaseError, connection
from django.db.models import QuerySet
from psycopg_pool import PoolTimeout

from controlplane.common.leases import LEASE, LeaseLost, heartbeat

logger = structlog.get_logger(__name__)

BEAT_S = 2.0
"""How soon a cancelled job notices, and how fresh its progress is; the lease lasts thirty times as long."""


class Report(Protocol):
    """How a long piece of work says how far it is, 0 to 1; it raises LeaseLost once nobody wants the work any more."""

    def __call__(self, progress: float, line: str = "") -> None: ...


def unreported(progress: float, line: str = "") -> None:
    """For work that nobody follows."""


class Keeper:
    """Sends heartbeats until it is left, with the newest progress and the log lines since the last one.

    ``is_lost`` is true once the job was cancelled or taken over, or nobody could be told of it for as long as the lease
    lasts: whoever works for it stops then. A job that hangs is ended by the time limit of its task, not here.

    Usage: ``with Keeper(rows, job_id, lease) as keeper: ...``; all methods may be called from any thread. ``rows``: all
    jobs of the table. Taking the lease was the first heartbeat: what ends before the second costs no further one.
    """

    def __init__(self, rows: QuerySet[Any], job_id: str, lease: str) -> None:
        self._rows, self._job_id, self._lease = rows, job_id, lease
        self._guard = threading.Lock()
        self._progress = 0.0
        self._lines: list[str] = []
        self._left = threading.Event()
        self._is_lost = False
        self._kept_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"keeper-{job_id}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()
        if self._lines and not self._is_lost:
            self._beat()  # what was said since the last one belongs to the log, above all before a failure
        if kind is None:
            self.check()

    def tell(self, progress: float, line: str = "") -> None:
        """How far the job is, 0 to 1, and a line for its log; shown within ``BEAT_S``."""
        with self._guard:
            self._progress = max(self._progress, min(1.0, progress))
            if line:
                self._lines.append(line)

    def report(self, progress: float, line: str = "") -> None:
        """``tell``, then ``check``."""
        self.tell(progress, line)
        self.check()

    def is_lost(self) -> bool:
        return self._is_lost

    def check(self) -> None:
        """Raises LeaseLost if the job is no longer ours."""
        if self._is_lost:
            raise LeaseLost(self._job_id)

    def _run(self) -> None:
        try:
            while not self._left.wait(BEAT_S) and not self._is_lost:
                self._beat()
        finally:
            connection.close()

    def _beat(self) -> None:
        with self._guard:
            progress, lines = self._progress, self._lines
            self._lines = []
        try:
            heartbeat(self._rows, self._job_id, self._lease, progress=progress, line="\n".join(lines))
        except LeaseLost:
            self._is_lost = True
        except (DatabaseError, PoolTimeout):
            with self._guard:
                self._lines = lines + self._lines
            logger.warning("job.heartbeat_failed", job=self._job_id)
            self._is_lost = time.monotonic() - self._kept_at > LEASE.total_seconds()
        else:
            self._kept_at = time.monotonic()
