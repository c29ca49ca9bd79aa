"""Who runs a job, and until when: the columns of every job's row, and the steps that change hands.

A job's row is the truth, the queue's message a wake-up call. Every step is one conditional UPDATE, so two workers can
never both succeed:

    queued --take_lease--> running --(its use case)--> succeeded | failed | cancelled
                             ^  |
                             +--+  take_lease by another worker, once the lease has lapsed
"""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta
from typing import Any

from django.db import models
from django.db.models import F, Q, QuerySet, Value
from django.db.models.functions import Concat, Right

from controlplane.common.clock import utc_now

LEASE = timedelta(seconds=60)
"""A worker that is silent this long has lost the job. Heartbeats come several times within it."""
MAX_ATTEMPTS = 3
_LOG_CHARACTERS = 20_000


class LeaseLost(Exception):
    """The job was cancelled or taken over; whoever gets this stops without writing anything."""


class NotPossible(Exception):
    """The job cannot succeed, for a reason that is nobody's mistake; the message says it to whoever asked."""


class JobState(models.TextChoices):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobTrigger(models.TextChoices):
    REQUEST = "request"
    SCHEDULE = "schedule"
    DRIFT = "drift"


ACTIVE = (JobState.QUEUED, JobState.RUNNING)
LAPSED = "lapsed"
"""What a running job is called whose worker fell silent; no state of its own, time alone makes it so."""


class Leased(models.Model):
    """What rows of jobs have in common.

    ``lease``: token of the worker that holds the job; ``lease_until``: when others may take it. ``progress``: 0 to 1.
    """

    state = models.CharField(max_length=16, choices=JobState.choices, default=JobState.QUEUED)
    attempts = models.PositiveIntegerField(default=0)
    lease = models.CharField(max_length=40, blank=True, default="")
    lease_until = models.DateTimeField(null=True)
    heartbeat_at = models.DateTimeField(null=True)
    progress = models.FloatField(default=0.0)
    log = models.TextField(blank=True, default="")
    error = models.TextField(blank=True, default="")
    requested_by = models.TextField()
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        abstract = True


def constraints(name: str) -> list[models.BaseConstraint]:
    """What the database holds rows of jobs to, at most one active per kind; each constraint's name begins with
    ``name``."""
    return [
        models.UniqueConstraint(fields=["kind"], condition=Q(state__in=ACTIVE), name=f"{name}_one_active"),
        models.CheckConstraint(condition=Q(state__in=JobState.values), name=f"{name}_state_known"),
        models.CheckConstraint(condition=Q(progress__gte=0, progress__lte=1), name=f"{name}_progress_range"),
        models.CheckConstraint(
            condition=~Q(state=JobState.RUNNING) | (Q(lease_until__isnull=False) & ~Q(lease="")),
            name=f"{name}_running_has_lease",
        ),
    ]


def free(now: datetime) -> Q:
    """Jobs that nobody runs: queued ones, and those whose worker fell silent."""
    return Q(state=JobState.QUEUED) | lapsed(now)


def lapsed(now: datetime) -> Q:
    """Running jobs whose worker fell silent."""
    return Q(state=JobState.RUNNING, lease_until__lt=now)


def lease_columns(now: datetime) -> dict[str, Any]:
    """What a row says from the moment its job is taken; ``lease`` is a fresh token."""
    return {
        "state": JobState.RUNNING,
        "lease": secrets.token_hex(16),
        "lease_until": now + LEASE,
        "heartbeat_at": now,
        "started_at": now,
        "progress": 0.0,
    }


def take_lease(rows: QuerySet[Any], job_id: str) -> str | None:
    """Token of the lease if the job could be taken: nobody runs it. None otherwise."""
    now = utc_now()
    columns = lease_columns(now)
    is_taken = rows.filter(free(now), pk=job_id, attempts__lt=MAX_ATTEMPTS).update(
        **columns, attempts=F("attempts") + 1
    )
    return str(columns["lease"]) if is_taken else None


def heartbeat(rows: QuerySet[Any], job_id: str, lease: str, *, progress: float, line: str = "") -> None:
    """Extend the lease and say how far the job is. ``line``: for its log, more than one if need be.

    Raises:
        LeaseLost: it was cancelled or taken over.
    """
    now = utc_now()
    text = "".join(f"{now:%H:%M:%S} {each}\n" for each in line.splitlines())
    is_held = rows.filter(pk=job_id, state=JobState.RUNNING, lease=lease).update(
        lease_until=now + LEASE,
        heartbeat_at=now,
        progress=min(1.0, max(0.0, progress)),
        log=Right(Concat("log", Value(text)), _LOG_CHARACTERS),
    )
    if not is_held:
        raise LeaseLost(job_id)
