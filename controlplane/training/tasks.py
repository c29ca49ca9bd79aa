from __future__ import annotations

from celery import shared_task
from django.conf import settings

from controlplane.common.actor import system_actor
from controlplane.common.background import background, wake_lapsed
from controlplane.common.errors import Conflict
from controlplane.common.keeper import Report
from controlplane.common.leases import JobTrigger
from controlplane.training import actions, drift, jobs, retention
from controlplane.training.models import JobKind

_LIMIT_S = settings.ENVIRONMENT.training_limit_s


@shared_task(soft_time_limit=_LIMIT_S, time_limit=_LIMIT_S + 60)
def run_job(job_id: str) -> None:
    """In a worker of its own, whose processes end with their task (``celery worker --max-tasks-per-child 1``)."""
    jobs.confine_process()
    jobs.run(job_id)


@background("wake-jobs")
def wake_jobs(report: Report) -> str:
    """Call for jobs that wait, and for those whose worker fell silent."""
    woken = [*wake_lapsed(), *actions.wake_lapsed_jobs()]
    return f"called for {', '.join(woken)}" if woken else "none waits"


@background("training-schedule-baseline")
def schedule_baseline(report: Report) -> str:
    """Queue the hourly rebuild of the empirical quantiles."""
    return _schedule(JobKind.BASELINE)


@background("training-schedule-mixture")
def schedule_mixture(report: Report) -> str:
    """Queue the nightly training of the length model, once there are enough samples."""
    return _schedule(JobKind.MIXTURE) if actions.is_trainable() else "there are too few samples"


def _schedule(kind: JobKind) -> str:
    """One that is still under way makes another superfluous."""
    try:
        return f"job {actions.start_job(actor=system_actor('schedule'), kind=kind, trigger=JobTrigger.SCHEDULE).id}"
    except Conflict as problem:
        return problem.message


@background("training-watch-drift")
def watch_drift(report: Report) -> str:
    """See how well answers are told of late, and train anew where a pool drifts."""
    job = drift.retrain_if_drifting()
    return "no training is needed" if job is None else f"job {job.id}"


@background("training-trim-artifacts")
def trim_artifacts(report: Report) -> str:
    """Forget the bytes of old models that serve nowhere."""
    return f"{retention.trim_artifacts():,} artifacts"
