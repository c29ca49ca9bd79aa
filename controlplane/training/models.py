"""Predictor artifacts and the jobs that build them. A job's row is the truth, the queue message a wake-up call."""

from __future__ import annotations

from django.db import models

from controlplane.common.ids import new_id


def _dataset_id() -> str:
    return new_id("ds")


def _artifact_id() -> str:
    return new_id("art")


def _job_id() -> str:
    return new_id("job")


class JobState(models.TextChoices):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Dataset(models.Model):
    """Which events a job learnt from: half-open span of arrival times, rows, and a digest over their ids."""

    id = models.CharField(primary_key=True, max_length=40, default=_dataset_id, editable=False)
    from_at = models.DateTimeField()
    to_at = models.DateTimeField()
    n_rows = models.BigIntegerField()
    digest = models.CharField(max_length=64)
    created_at = models.DateTimeField(auto_now_add=True)


class Artifact(models.Model):
    """A predictor, addressed by the digest of its bytes. In the database, so that every process can serve it."""

    id = models.CharField(primary_key=True, max_length=40, default=_artifact_id, editable=False)
    kind = models.CharField(max_length=40)
    digest = models.CharField(max_length=64, unique=True)
    body = models.BinaryField()
    n_bytes = models.PositiveIntegerField()
    metrics = models.JSONField(default=dict)
    created_at = models.DateTimeField(auto_now_add=True)


class Job(models.Model):
    """One training run. At most one per kind is queued or running.

    ``lease``: token of the worker that holds the job; ``lease_until``: when others may take it.
    """

    id = models.CharField(primary_key=True, max_length=40, default=_job_id, editable=False)
    kind = models.CharField(max_length=40, default="baseline")
    state = models.CharField(max_length=16, choices=JobState.choices, default=JobState.QUEUED)
    attempts = models.PositiveIntegerField(default=0)
    lease = models.CharField(max_length=40, blank=True, default="")
    lease_until = models.DateTimeField(null=True)
    heartbeat_at = models.DateTimeField(null=True)
    progress = models.FloatField(default=0.0)
    log = models.TextField(blank=True, default="")
    error = models.TextField(blank=True, default="")
    requested_by = models.TextField()
    dataset = models.ForeignKey(Dataset, on_delete=models.PROTECT, null=True)
    artifact = models.ForeignKey(Artifact, on_delete=models.PROTECT, null=True)
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["kind"],
                condition=models.Q(state__in=[JobState.QUEUED, JobState.RUNNING]),
                name="job_one_active",
            ),
            models.CheckConstraint(condition=models.Q(state__in=JobState.values), name="job_state_known"),
            models.CheckConstraint(condition=models.Q(progress__gte=0, progress__lte=1), name="job_progress_range"),
            models.CheckConstraint(
                condition=~models.Q(state=JobState.RUNNING)
                | (models.Q(lease_until__isnull=False) & ~models.Q(lease="")),
                name="job_running_has_lease",
            ),
        ]
