"""Reads of jobs, artifacts, promotions, drift and samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import connection
from django.db.models import BooleanField, Case, Prefetch, QuerySet, Value, When

from controlplane.common.actor import Actor, Scope
from controlplane.common.clock import utc_now
from controlplane.fleet.models import Pool
from controlplane.training.actions import SPAN, min_samples
from controlplane.training.models import Artifact, DriftState, Evaluation, Job, JobKind, Promotion
from controlplane.usage.models import RolledUp
from controlplane.usage.partitions import SAMPLES
from router_ext.predict.versions import FEATURE_VERSION


def jobs(*, actor: Actor) -> QuerySet[Job]:
    """Jobs with what they read, what they made and how it was judged, newest first."""
    actor.require(Scope.READ)
    evaluations = Prefetch("evaluations", Evaluation.objects.order_by("pool"))
    return (
        Job.objects.select_related("dataset", "artifact")
        .defer("artifact__body")
        .prefetch_related(evaluations)
        .order_by("-id")
    )


def artifacts(*, actor: Actor, kind: str = "") -> QuerySet[Artifact]:
    """Artifacts without their bytes, newest first; ``is_kept`` says whether the bytes are there.

    The first job that made one, with its dataset, is the first of its ``job_set``.
    """
    actor.require(Scope.READ)
    rows = Artifact.objects.filter(kind=kind) if kind else Artifact.objects.all()
    is_kept = Case(When(body__isnull=False, then=Value(True)), default=Value(False), output_field=BooleanField())
    return (
        rows.defer("body")
        .annotate(is_kept=is_kept)
        .prefetch_related(
            Prefetch("job_set", Job.objects.select_related("dataset").order_by("id")),
            Prefetch("evaluations", Evaluation.objects.order_by("id")),
        )
        .order_by("-id")
    )


def promotions(*, actor: Actor, pool: str = "") -> QuerySet[Promotion]:
    """Changes of the trained models that serve, newest first; of one pool, or of all."""
    actor.require(Scope.READ)
    rows = Promotion.objects.filter(pool=pool) if pool else Promotion.objects.all()
    return rows.select_related("artifact", "restores").defer("artifact__body").order_by("-id")


def drift_states(*, actor: Actor) -> QuerySet[DriftState]:
    """What the drift monitor saw last, by pool."""
    actor.require(Scope.READ)
    return DriftState.objects.order_by("pool")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCount:
    """Samples of one pool that training could read, and what was dropped of late, as counted last.

    ``needed``: over all pools.
    """

    pool: str
    usable: int
    other_version: int
    dropped: int
    needed: int


_SAMPLES_SQL = """
    SELECT pool, coalesce(sum(usable), 0)::bigint, coalesce(sum(other), 0)::bigint, sum(dropped)::bigint FROM (
        SELECT pool, sum(n) FILTER (WHERE feature_version = %(version)s) AS usable,
               sum(n) FILTER (WHERE feature_version <> %(version)s) AS other, 0 AS dropped
        FROM predictor_sample_day WHERE day >= %(from)s GROUP BY pool
        UNION ALL
        SELECT pool, 0, 0, sum(n) FROM predictor_dropped WHERE at >= %(from)s GROUP BY pool
    ) AS parts GROUP BY pool
"""


def sample_counts(*, actor: Actor) -> Sequence[SampleCount]:
    """Samples by pool, for every pool there is: one row a day, pool and version is read."""
    actor.require(Scope.READ)
    with connection.cursor() as cursor:
        cursor.execute(_SAMPLES_SQL, {"version": FEATURE_VERSION, "from": utc_now() - SPAN})
        found = {pool: counts for pool, *counts in cursor.fetchall()}
    needed = min_samples()
    return [
        SampleCount(
            pool=pool,
            usable=found.get(pool, (0, 0, 0))[0],
            other_version=found.get(pool, (0, 0, 0))[1],
            dropped=found.get(pool, (0, 0, 0))[2],
            needed=needed,
        )
        for pool in Pool.objects.order_by("name").values_list("id", flat=True)
    ]


def samples_as_of() -> datetime | None:
    """When samples were counted last."""
    return RolledUp.objects.filter(pk=SAMPLES).values_list("at", flat=True).first()


def artifact_body(digest: str) -> bytes | None:
    """Bytes of the artifact with this digest. For routers."""
    body = Artifact.objects.filter(digest=digest).values_list("body", flat=True).first()
    return None if body is None else bytes(body)


def body_of_dataset(digest: str) -> bytes | None:
    """Bytes of the newest baseline built from exactly these rows."""
    found = Job.objects.filter(dataset__digest=digest, artifact__body__isnull=False, kind=JobKind.BASELINE)
    body = found.order_by("-id").values_list("artifact__body", flat=True).first()
    return None if body is None else bytes(body)
