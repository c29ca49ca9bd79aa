"""Base models and the records of creates that may be asked for twice."""

from __future__ import annotations

from django.db import models

from controlplane.common import leases
from controlplane.common.ids import new_id
from controlplane.common.leases import JobTrigger, Leased


class Versioned(models.Model):
    """A row with a version for lost updates: an update names the version it has read."""

    version = models.PositiveIntegerField(default=1)

    class Meta:
        abstract = True


class Record(Versioned):
    """A versioned row that says when it was made and changed."""

    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        abstract = True


class Credential(models.Model):
    """A row that knows a secret by a digest of it, made under this version of the pepper."""

    pepper_version = models.PositiveSmallIntegerField(default=1)

    class Meta:
        abstract = True


class Managed(models.Model):
    """What a file may be the truth of: ``managed_by`` names the program that keeps the row as its file says, "" none.

    Only a label: whoever may change the row may do so.
    """

    managed_by = models.CharField(max_length=63, blank=True, default="", db_index=True)

    class Meta:
        abstract = True


class IdempotencyRecord(models.Model):
    """The answer to a create, kept a day. Secrets are not in ``body``: they are shown once."""

    actor = models.TextField()
    key = models.TextField()
    fingerprint = models.CharField(max_length=64)
    status = models.PositiveSmallIntegerField(null=True)
    body = models.JSONField(null=True)
    created_at = models.DateTimeField(auto_now_add=True, db_index=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["actor", "key"], name="idempotency_once")]


def _job_id() -> str:
    return new_id("job")


class BackgroundJob(Leased):
    """One run of a task of the schedule. At most one per kind is queued or running.

    ``outcome``: what came of it, in a few words.
    """

    id = models.CharField(primary_key=True, max_length=40, default=_job_id, editable=False)
    kind = models.CharField(max_length=40)
    queue = models.CharField(max_length=40)
    trigger = models.CharField(max_length=16, choices=JobTrigger.choices, default=JobTrigger.REQUEST)
    outcome = models.TextField(blank=True, default="")

    class Meta:
        db_table = "common_background_job"
        indexes = [models.Index(fields=["kind", "-id"], name="background_job_of_kind")]
        constraints = leases.constraints("background_job")
