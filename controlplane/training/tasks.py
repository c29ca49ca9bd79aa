from __future__ import annotations

import contextlib

from celery import shared_task
from django.conf import settings

from controlplane.common.actor import system_actor
from controlplane.common.errors import Conflict
from controlplane.training import actions, drift, jobs, retention
from controlplane.training.models import JobKind, JobTrigger

_LIMIT_S = settings.ENVIRONMENT.training_limit_s


@shared_task(soft_time_limit=_LIMIT_S, time_limit=_LIMIT_S + 60)
def run_job(job_id: str) -> None:
    """In a worker of its own, whose processes end with their task (``celery worker --max-tasks-per-child 1``)."""
    jobs.confine_process()
    jobs.run(job_id)


@shared_task
def wake_jobs() -> None:
    actions.wake_lapsed_jobs()


@shared_task
def schedule_baseline() -> None:
    """The regular rebuild; one that is still under way makes it superfluous."""
    with contextlib.suppress(Conflict):
        actions.start_job(actor=system_actor("schedule"), trigger=JobTrigger.SCHEDULE)


@shared_task
def schedule_mixture() -> None:
    """The nightly training, once there are enough samples."""
    if actions.is_trainable():
        with contextlib.suppress(Conflict):
            actions.start_job(actor=system_actor("schedule"), kind=JobKind.MIXTURE, trigger=JobTrigger.SCHEDULE)


@shared_task
def watch_drift() -> None:
    drift.retrain_if_drifting()


@shared_task
def trim_artifacts() -> None:
    retention.trim_artifacts()
