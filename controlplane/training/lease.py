"""The lease of a training run; taking it is in the audit log."""

from __future__ import annotations

from django.db import transaction

from controlplane.audit.actions import record
from controlplane.common import leases
from controlplane.common.actor import system_actor
from controlplane.training.models import Job


def take_lease(job_id: str) -> str | None:
    """Token of the lease if the job could be taken: it is queued, or its worker fell silent. None otherwise."""
    with transaction.atomic():
        token = leases.take_lease(Job.objects.all(), job_id)
        if token is None:
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
