"""Jobs that people start, cancel and try again, audited; training runs by their own use cases."""

from __future__ import annotations

from django.db import IntegrityError, transaction

from controlplane.audit.actions import record
from controlplane.common.actor import Actor
from controlplane.common.background import Kind, kinds, wake
from controlplane.common.clock import utc_now
from controlplane.common.errors import Conflict, Invalid
from controlplane.common.leases import ACTIVE, JobState, JobTrigger
from controlplane.common.models import BackgroundJob
from controlplane.common.use_case import use_case
from controlplane.common.validation import get_or_not_found
from controlplane.jobs.queries import all_kinds, job
from controlplane.training import actions as training
from controlplane.training.models import Job, JobKind


@use_case()
def start_job(*, actor: Actor, kind: str) -> BackgroundJob | Job:
    """Queue a job of any kind, beside the schedule.

    Raises:
        Invalid: no such kind. Conflict: one of it is queued or running.
    """
    if kind in JobKind.values:
        return training.start_job(actor=actor, kind=kind)
    known = kinds().get(kind)
    if known is None:
        raise Invalid({"kind": f"one of {', '.join(all_kinds())}, not {kind[:40]!r}"})
    return _queue(actor, known)


def _queue(actor: Actor, kind: Kind) -> BackgroundJob:
    try:
        with transaction.atomic():
            row = BackgroundJob.objects.create(
                kind=kind.name, queue=kind.queue, trigger=JobTrigger.REQUEST, requested_by=actor.label
            )
    except IntegrityError as error:
        raise Conflict(f"a job {kind.name} is already queued or running") from error
    record(
        actor=actor,
        action="job.queued",
        object_type="job",
        object_id=row.id,
        after={"kind": kind.name, "trigger": JobTrigger.REQUEST},
    )
    transaction.on_commit(lambda: wake(kind))
    return row


@use_case()
def cancel_job(*, actor: Actor, job_id: str) -> None:
    """Cancel a job: a queued one never runs, a running one stops at its next report. What it has done already stays.

    Raises:
        Conflict: it has ended, or is of a kind that ends by itself within moments.
    """
    found = job(actor=actor, job_id=job_id)
    if isinstance(found.row, Job):
        training.cancel_job(actor=actor, job_id=job_id)
        return
    row = get_or_not_found(BackgroundJob.objects.select_for_update(), "job", job_id)
    if row.state not in ACTIVE:
        raise Conflict(f"job {job_id} is {row.state}")
    if not found.can_be_cancelled:
        raise Conflict(f"a running job {row.kind} ends by itself and cannot be stopped in between")
    before = {"state": row.state}
    row.state, row.finished_at, row.lease, row.lease_until = JobState.CANCELLED, utc_now(), "", None
    row.save(update_fields=["state", "finished_at", "lease", "lease_until"])
    record(
        actor=actor,
        action="job.cancelled",
        object_type="job",
        object_id=job_id,
        before=before,
        after={"state": row.state},
    )


@use_case()
def retry_job(*, actor: Actor, job_id: str) -> BackgroundJob | Job:
    """Queue a new job like one that failed or was cancelled.

    Raises:
        Conflict: it did not, or one of its kind is queued or running.
    """
    found = job(actor=actor, job_id=job_id)
    if not found.can_be_retried:
        raise Conflict(f"job {job_id} is {found.state}; failed and cancelled ones can be tried again")
    row = found.row
    if isinstance(row, Job):
        return training.start_job(actor=actor, kind=row.kind, pools=row.pools, from_at=row.from_at, to_at=row.to_at)
    return start_job(actor=actor, kind=row.kind)
