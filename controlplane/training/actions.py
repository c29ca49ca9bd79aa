"""Use cases of training jobs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import structlog
from celery import current_app
from django.conf import settings
from django.db import transaction
from kombu.exceptions import OperationalError

from controlplane.audit.actions import record
from controlplane.common.actor import Actor, system_actor
from controlplane.common.clock import utc_now
from controlplane.common.errors import Conflict
from controlplane.common.leases import ACTIVE, MAX_ATTEMPTS, JobState, JobTrigger, LeaseLost, free
from controlplane.common.use_case import use_case
from controlplane.common.validation import Checks, get_or_not_found
from controlplane.fleet.actions import set_pool_predictor
from controlplane.fleet.models import Pool
from controlplane.fleet.queries import find_pool
from controlplane.training.dataset import Filters, count_usable
from controlplane.training.models import Artifact, Evaluation, Job, JobKind
from controlplane.training.outcome import Built, Verdict
from controlplane.training.promotion import promote
from router_ext.predict.versions import FEATURE_VERSION

logger = structlog.get_logger(__name__)

SPAN = timedelta(days=28)
"""Long enough for weekly habits, short enough to follow a tenant that changes its use; samples are kept as long."""

WAKE_EXPIRES_S = 30
"""Twice as long as beat waits between two calls."""


@use_case()
def start_job(
    *,
    actor: Actor,
    kind: str = JobKind.BASELINE,
    pools: Sequence[str] = (),
    from_at: datetime | None = None,
    to_at: datetime | None = None,
    trigger: str = JobTrigger.REQUEST,
) -> Job:
    """Queue a training run; refused while one of its kind is queued or running.

    Args:
        pools: those whose samples it learns from, by id, name or alias; none for all. Only a mixture can choose.
        from_at, to_at: half-open span of arrival; from ``SPAN`` ago, till now where nothing is said. Only a
            mixture can choose.
    """
    now = utc_now()
    checks = Checks()
    if kind not in JobKind.values:
        checks.add("kind", f"one of {', '.join(JobKind.values)}, not {kind!r}")
    if kind == JobKind.BASELINE and (pools or from_at or to_at):
        checks.add(
            "kind", "a baseline is built from all pools and the last 28 days; pools, from and to are for a mixture"
        )
    found = {word: find_pool(word) for word in pools}
    for word, pool in found.items():
        if pool is None:
            checks.add("pools", f"no pool {word!r}")
    begin, end = from_at or now - SPAN, to_at or now
    if end <= begin:
        checks.add("to_at", f"must be after from_at ({begin.isoformat()}), not {end.isoformat()}")
    if begin < now - SPAN - timedelta(days=1) or end > now + timedelta(days=1):
        checks.add(
            "from_at", f"samples are kept {SPAN.days} days: from {(now - SPAN).isoformat()}, not {begin.isoformat()}"
        )
    checks.done()
    if Job.objects.filter(kind=kind, state__in=ACTIVE).exists():
        raise Conflict(f"a {kind} job is already queued or running")
    chosen = sorted({pool.id for pool in found.values() if pool is not None})
    job = Job.objects.create(
        kind=kind, trigger=trigger, pools=chosen, from_at=from_at, to_at=to_at, requested_by=actor.label
    )
    record(
        actor=actor,
        action="job.queued",
        object_type="job",
        object_id=job.id,
        after={"kind": kind, "trigger": trigger, "pools": chosen, "from": from_at, "to": to_at},
    )
    transaction.on_commit(lambda: wake(job.id))
    return job


def is_trainable(*, now: datetime | None = None) -> bool:
    """Whether there are enough samples of the present feature version for a mixture."""
    instant = now or utc_now()
    filters = Filters(from_at=instant - SPAN, to_at=instant, pools=(), feature_version=FEATURE_VERSION)
    return count_usable(filters) >= min_samples()


def min_samples() -> int:
    """Samples without which no mixture is trained."""
    return int(settings.ENVIRONMENT.training_min_samples)


def wake(job_id: str) -> None:
    """Send the wake-up call. The row is the truth: if the broker is away, beat calls again within seconds."""
    try:
        # While the worker is busy, calls for a job that waits would pile up; the next one comes soon enough.
        current_app.send_task("controlplane.training.tasks.run_job", [job_id], retry=False, expires=WAKE_EXPIRES_S)
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
def complete_job(*, actor: Actor, job_id: str, lease: str, built: Built) -> Artifact:
    """Store what a run brought, let it serve, and close the job, all or nothing.

    A baseline becomes every pool's fallback. A mixture is stored with the gate's verdicts and promoted where it passed;
    a pool that was deleted meanwhile is left out.

    Raises:
        LeaseLost: the job belongs to somebody else by now; nothing is written.
    """
    job = Job.objects.select_for_update().filter(pk=job_id, state=JobState.RUNNING, lease=lease).first()
    if job is None:
        raise LeaseLost(job_id)
    artifact = _store(job, built)
    if job.kind == JobKind.MIXTURE:
        _promote_where_passed(actor, job, artifact, built.verdicts)
    else:
        for pool_id in Pool.objects.order_by("id").values_list("id", flat=True):
            set_pool_predictor(
                actor=actor, pool_id=pool_id, artifact=artifact.id, digest=artifact.digest, kind=artifact.kind
            )
    now = utc_now()
    job.state, job.finished_at, job.heartbeat_at, job.progress = JobState.SUCCEEDED, now, now, 1.0
    job.lease, job.lease_until = "", None
    job.dataset, job.artifact = built.dataset, artifact
    job.save()
    record(
        actor=actor,
        action="job.succeeded",
        object_type="job",
        object_id=job.id,
        after={"artifact": artifact.id, "digest": artifact.digest, "rows": built.dataset.n_rows},
    )
    return artifact


def _store(job: Job, built: Built) -> Artifact:
    """The artifact of these bytes, which may be there already; the dataset's row is saved with it."""
    built.dataset.save()
    body = built.body
    artifact, is_new = Artifact.objects.get_or_create(
        digest=hashlib.sha256(body).hexdigest(),
        defaults={"kind": job.kind, "body": body, "n_bytes": len(body), "metrics": dict(built.metrics)},
    )
    if artifact.body is None:
        artifact.body = body
        artifact.save(update_fields=["body"])
    words = "new" if is_new else "same bytes as before"
    job.log += f"{utc_now():%H:%M:%S} artifact {artifact.id}, {len(body):,} bytes ({words})\n"
    return artifact


def _promote_where_passed(actor: Actor, job: Job, artifact: Artifact, verdicts: Mapping[str, Verdict]) -> None:
    for pool in Pool.objects.filter(pk__in=list(verdicts)).order_by("id"):
        verdict = verdicts[pool.id]
        Evaluation.objects.create(
            job=job,
            artifact=artifact,
            pool=pool.id,
            n_rows=verdict.n_rows,
            contenders={name: each.as_json() for name, each in verdict.scores.items()},
            is_passed=verdict.is_passed,
            reason=verdict.reason,
        )
        if pool.length_model_artifact == artifact.id:
            outcome = "serves already"
        elif not verdict.is_passed:
            outcome = "not promoted"
        else:
            promote(actor=actor, pool_id=pool.id, artifact_id=artifact.id, reason=verdict.reason)
            outcome = "promoted"
        job.log += f"{utc_now():%H:%M:%S} pool {pool.name}: {outcome}: {verdict.reason}\n"


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
    woken = []
    for job in Job.objects.filter(free(now)).order_by("id"):
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
