"""Use cases of training jobs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import structlog
from celery import current_app
from django.db import transaction
from django.db.models import Q
from kombu.exceptions import OperationalError

from controlplane.audit.actions import record
from controlplane.common.actor import Actor, system_actor
from controlplane.common.clock import utc_now
from controlplane.common.errors import Conflict
from controlplane.common.use_case import use_case
from controlplane.common.validation import get_or_not_found
from controlplane.fleet.actions import set_pool_predictor
from controlplane.fleet.models import Pool
from controlplane.training.lease import MAX_ATTEMPTS, LeaseLost
from controlplane.training.models import Artifact, Dataset, Job, JobState

logger = structlog.get_logger(__name__)

ACTIVE = (JobState.QUEUED, JobState.RUNNING)


@use_case()
def start_job(*, actor: Actor, kind: str = "baseline") -> Job:
    """Queue a training run; refused while one of its kind is queued or running."""
    if Job.objects.filter(kind=kind, state__in=ACTIVE).exists():
        raise Conflict(f"a {kind} job is already queued or running")
    job = Job.objects.create(kind=kind, requested_by=actor.label)
    record(actor=actor, action="job.queued", object_type="job", object_id=job.id, after={"kind": kind})
    transaction.on_commit(lambda: wake(job.id))
    return job


def wake(job_id: str) -> None:
    """Send the wake-up call. The row is the truth: if the broker is away, beat calls again within seconds."""
    try:
        current_app.send_task("controlplane.training.tasks.run_job", [job_id], retry=False)
    except OperationalError:
        logger.warning("job.wake_up_failed", job=job_id)


@use_case()
def cancel_job(*, actor: Actor, job_id: str) -> Job:
    """Cancel a queued or running job; its worker notices at its next heartbeat and leaves nothing behind."""
    job = get_or_not_found(Job.objects.select_for_update(), "job", job_id)
    if job.state not in ACTIVE:
        raise Conflict(f"job {job_id} is {job.state}")
    before = {"state": job.state}
    job.state, job.finished_at, job.lease, job.lease_until = JobState.CANCELLED, utc_now(), "", None
    job.save()
    record(
        actor=actor,
        action="job.cancelled",
        object_type="job",
        object_id=job.id,
        before=before,
        after={"state": job.state},
    )
    return job


@use_case()
def complete_job(
    *,
    actor: Actor,
    job_id: str,
    lease: str,
    kind: str,
    body: bytes,
    digest: str,
    metrics: Mapping[str, Any],
    from_at: datetime,
    to_at: datetime,
    n_rows: int,
    dataset_digest: str,
) -> Artifact:
    """Store the artifact, make it every pool's predictor and close the job, all or nothing.

    Raises:
        LeaseLost: the job belongs to somebody else by now; nothing is written.
    """
    job = Job.objects.select_for_update().filter(pk=job_id, state=JobState.RUNNING, lease=lease).first()
    if job is None:
        raise LeaseLost(job_id)
    dataset = Dataset.objects.create(from_at=from_at, to_at=to_at, n_rows=n_rows, digest=dataset_digest)
    artifact, is_new = Artifact.objects.get_or_create(
        digest=digest, defaults={"kind": kind, "body": body, "n_bytes": len(body), "metrics": dict(metrics)}
    )
    for pool_id in Pool.objects.order_by("id").values_list("id", flat=True):
        set_pool_predictor(actor=actor, pool_id=pool_id, artifact=artifact.id, digest=digest, kind=kind)
    now = utc_now()
    job.state, job.finished_at, job.heartbeat_at, job.progress = JobState.SUCCEEDED, now, now, 1.0
    job.lease, job.lease_until = "", None
    job.dataset, job.artifact = dataset, artifact
    job.log += f"{now:%H:%M:%S} artifact {artifact.id} ({'new' if is_new else 'same bytes as before'})\n"
    job.save()
    record(
        actor=actor,
        action="job.succeeded",
        object_type="job",
        object_id=job.id,
        after={"artifact": artifact.id, "digest": digest, "rows": n_rows},
    )
    return artifact


@use_case()
def fail_job(*, actor: Actor, job_id: str, lease: str, error: str) -> None:
    """Close a job that cannot succeed. A lost lease is nobody's to fail."""
    job = Job.objects.select_for_update().filter(pk=job_id, state=JobState.RUNNING, lease=lease).first()
    if job is None:
        return
    job.state, job.finished_at, job.error, job.lease, job.lease_until = JobState.FAILED, utc_now(), error, "", None
    job.save()
    record(actor=actor, action="job.failed", object_type="job", object_id=job.id, after={"error": error})


def wake_lapsed_jobs() -> list[str]:
    """Call for every job that waits or whose worker fell silent; give up one that was tried too often."""
    now = utc_now()
    lapsed = Q(state=JobState.QUEUED) | Q(state=JobState.RUNNING, lease_until__lt=now)
    woken = []
    for job in Job.objects.filter(lapsed).order_by("id"):
        if job.attempts >= MAX_ATTEMPTS:
            fail_job(
                actor=system_actor("training"),
                job_id=job.id,
                lease=job.lease,
                error=f"its worker fell silent {job.attempts} times",
            )
        else:
            wake(job.id)
            woken.append(job.id)
    return woken
