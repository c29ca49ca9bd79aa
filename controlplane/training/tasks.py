from __future__ import annotations

import contextlib

from celery import shared_task

from controlplane.common.actor import system_actor
from controlplane.common.errors import Conflict
from controlplane.training import actions, baseline_job


@shared_task
def run_job(job_id: str) -> None:
    baseline_job.run(job_id)


@shared_task
def wake_jobs() -> None:
    actions.wake_lapsed_jobs()


@shared_task
def schedule_baseline() -> None:
    """The regular rebuild; one that is still under way makes it superfluous."""
    with contextlib.suppress(Conflict):
        actions.start_job(actor=system_actor("schedule"))
