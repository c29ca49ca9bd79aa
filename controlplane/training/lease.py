"""Who runs a job, and until when. Every step is one conditional UPDATE, so two workers can never both succeed."""

from __future__ import annotations

import secrets
from datetime import timedelta

from django.db import transaction
from django.db.models import F, Q, Value
from django.db.models.functions import Concat, Right

from controlplane.audit.actions import record
from controlplane.common.actor import system_actor
from controlplane.common.clock import utc_now
from controlplane.training.models import Job, JobState

LEASE = timedelta(seconds=60)
"""A worker that is silent this long has lost the job. Heartbeats come several times within it."""
MAX_ATTEMPTS = 3
_LOG_CHARACTERS = 20_000


class LeaseLost(Exception):
    """The job was cancelled or taken over; whoever gets this stops without writing anything."""


class NotPossible(Exception):
    """The job cannot succeed, for a reason that is nobody's mistake; the message says it to whoever asked."""


def take_lease(job_id: str) -> str | None:
    """Token of the lease if the job could be taken: it is queued, or its worker fell silent. None otherwise."""
    now = utc_now()
    token = secrets.token_hex(16)
    free = Q(state=JobState.QUEUED) | Q(state=JobState.RUNNING, lease_until__lt=now)
    with transaction.atomic():
        is_taken = Job.objects.filter(free, pk=job_id, attempts__lt=MAX_ATTEMPTS).update(
            state=JobState.RUNNING,
            lease=token,
            lease_until=now + LEASE,
            heartbeat_at=now,
            started_at=now,
            progress=0.0,
            attempts=F("attempts") + 1,
        )
        if not is_taken:
            return None
        job = Job.objects.get(pk=job_id)
        record(
            actor=system_actor("training"),
            action="job.started",
            object_type="job",
            object_id=job_id,
            after={"attempt": job.attempts},
        )
    return token


def heartbeat(job_id: str, lease: str, *, progress: float, line: str = "") -> None:
    """Extend the lease and say how far the job is. ``line``: for its log, more than one if need be.

    Raises:
        LeaseLost: it was cancelled or taken over.
    """
    now = utc_now()
    text = "".join(f"{now:%H:%M:%S} {each}\n" for each in line.splitlines())
    is_held = Job.objects.filter(pk=job_id, state=JobState.RUNNING, lease=lease).update(
        lease_until=now + LEASE,
        heartbeat_at=now,
        progress=min(1.0, max(0.0, progress)),
        log=Right(Concat("log", Value(text)), _LOG_CHARACTERS),
    )
    if not is_held:
        raise LeaseLost(job_id)
