"""Reads of jobs and artifacts."""

from __future__ import annotations

from django.db.models import QuerySet

from controlplane.common.actor import Actor, Scope
from controlplane.training.models import Artifact, Job


def jobs(*, actor: Actor) -> QuerySet[Job]:
    actor.require(Scope.READ)
    return Job.objects.select_related("dataset", "artifact").defer("artifact__body").order_by("-id")


def artifact_body(digest: str) -> bytes | None:
    """Bytes of the artifact with this digest. For routers."""
    body = Artifact.objects.filter(digest=digest).values_list("body", flat=True).first()
    return None if body is None else bytes(body)


def body_of_dataset(digest: str) -> bytes | None:
    """Bytes of the newest artifact built from exactly these rows."""
    job = Job.objects.filter(dataset__digest=digest, artifact__isnull=False).order_by("-id").first()
    return None if job is None or job.artifact is None else bytes(job.artifact.body)
