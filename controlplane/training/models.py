"""Predictor artifacts, the jobs that build them, how they were judged and where they serve.

A job's row is the truth, the queue message a wake-up call. What serves is said by ``fleet.Pool``; the newest
``Promotion`` of a pool says since when, by whom and why.
"""

from __future__ import annotations

from django.db import models

from controlplane.common import leases
from controlplane.common.ids import new_id
from controlplane.common.leases import JobTrigger, Leased


def _dataset_id() -> str:
    return new_id("ds")


def _artifact_id() -> str:
    return new_id("art")


def _job_id() -> str:
    return new_id("job")


def _evaluation_id() -> str:
    return new_id("evl")


def _promotion_id() -> str:
    return new_id("prm")


class JobKind(models.TextChoices):
    """``baseline``: empirical quantiles, the fallback. ``mixture``: the trained model of output lengths."""

    BASELINE = "baseline"
    MIXTURE = "mixture"


class Dataset(models.Model):
    """Which events a job learnt from: half-open span of arrival times, rows, and a digest over their ids.

    ``filters``: pools and feature version the rows had to have. ``counts``: how rows came to be left out or held out,
    and how many there are by tenant and pool (``training.dataset``).
    """

    id = models.CharField(primary_key=True, max_length=40, default=_dataset_id, editable=False)
    from_at = models.DateTimeField()
    to_at = models.DateTimeField()
    n_rows = models.BigIntegerField()
    digest = models.CharField(max_length=64)
    filters = models.JSONField(default=dict)
    counts = models.JSONField(default=dict)
    heldout_from = models.DateTimeField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)


class Artifact(models.Model):
    """A predictor, addressed by the digest of its bytes. In the database, so that every process can serve it.

    ``body`` is null once the artifact is old and serves nowhere (``training.retention``); its line stays.
    """

    id = models.CharField(primary_key=True, max_length=40, default=_artifact_id, editable=False)
    kind = models.CharField(max_length=40)
    digest = models.CharField(max_length=64, unique=True)
    body = models.BinaryField(null=True)
    n_bytes = models.PositiveIntegerField()
    metrics = models.JSONField(default=dict)
    created_at = models.DateTimeField(auto_now_add=True)


class Job(Leased):
    """One training run. At most one per kind is queued or running.

    ``pools``: ids of those whose rows it reads, empty for all. ``from_at``, ``to_at``: the span that was asked for,
    null for the default (the last 28 days).
    """

    id = models.CharField(primary_key=True, max_length=40, default=_job_id, editable=False)
    kind = models.CharField(max_length=40, choices=JobKind.choices, default=JobKind.BASELINE)
    trigger = models.CharField(max_length=16, choices=JobTrigger.choices, default=JobTrigger.REQUEST)
    pools = models.JSONField(default=list)
    from_at = models.DateTimeField(null=True)
    to_at = models.DateTimeField(null=True)
    dataset = models.ForeignKey(Dataset, on_delete=models.PROTECT, null=True)
    artifact = models.ForeignKey(Artifact, on_delete=models.PROTECT, null=True)

    class Meta:
        constraints = leases.constraints("job")


class Evaluation(models.Model):
    """The gate's verdict on one artifact for one pool, on rows held out from its training.

    ``contenders``: figures (``training.outcome.Score``) by name: candidate, active, fallback, tenant_mean5,
    pool_median; empty where it was not judged, for want of rows that neither the candidate nor the active model has
    seen.
    """

    id = models.CharField(primary_key=True, max_length=40, default=_evaluation_id, editable=False)
    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="evaluations")
    artifact = models.ForeignKey(Artifact, on_delete=models.PROTECT, related_name="evaluations")
    pool = models.CharField(max_length=40)
    n_rows = models.PositiveIntegerField()
    contenders = models.JSONField()
    is_passed = models.BooleanField()
    reason = models.TextField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["job", "pool"], name="evaluation_once")]
        indexes = [models.Index(fields=["artifact", "pool"], name="evaluation_by_artifact")]

    @property
    def is_judged(self) -> bool:
        return bool(self.contenders)


class PromotionAction(models.TextChoices):
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    DEMOTED = "demoted"


class Promotion(models.Model):
    """A change of the trained model that serves one pool. Appended, never changed; ``artifact`` null: none serves.

    ``restores``: what a rollback of this one brings back. ``pinball``: the model's loss on held-out rows at that time,
    which the drift monitor compares with. ``is_forced``: it was promoted although it did not pass the gate.
    """

    id = models.CharField(primary_key=True, max_length=40, default=_promotion_id, editable=False)
    pool = models.CharField(max_length=40)
    action = models.CharField(max_length=16, choices=PromotionAction.choices)
    artifact = models.ForeignKey(Artifact, on_delete=models.PROTECT, null=True, related_name="promotions")
    restores = models.ForeignKey("self", on_delete=models.PROTECT, null=True, related_name="+")
    promoted_by = models.TextField()
    reason = models.TextField()
    is_forced = models.BooleanField(default=False)
    metrics = models.JSONField(default=dict)
    pinball = models.FloatField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        indexes = [models.Index(fields=["pool", "-id"], name="promotion_of_pool")]
        constraints = [
            models.CheckConstraint(
                condition=models.Q(action__in=PromotionAction.values), name="promotion_action_known"
            ),
            models.CheckConstraint(
                condition=~models.Q(action=PromotionAction.PROMOTED) | models.Q(artifact__isnull=False),
                name="promotion_of_something",
            ),
        ]


class Drift(models.TextChoices):
    """How the answers of a pool are told by its trained model, compared with when it was promoted."""

    NO_MODEL = "no_model"
    TOO_FEW = "too_few"
    OK = "ok"
    WATCHING = "watching"
    DRIFTING = "drifting"


class DriftState(models.Model):
    """The newest look of the drift monitor at one pool; ``since``: when it came into this state.

    ``ratio``: rolling loss over the loss at promotion (``reference``). ``miscalibration``: largest distance of an
    observed share from its nominal level. ``n`` answers were looked at.
    """

    pool = models.CharField(primary_key=True, max_length=40)
    state = models.CharField(max_length=16, choices=Drift.choices)
    since = models.DateTimeField()
    looked_at = models.DateTimeField()
    length_model = models.CharField(max_length=64, blank=True, default="")
    n = models.PositiveIntegerField(default=0)
    loss = models.FloatField(null=True)
    reference = models.FloatField(null=True)
    ratio = models.FloatField(null=True)
    miscalibration = models.FloatField(null=True)
    reason = models.TextField()
