"""Runs a job of whatever kind, in a process that may be given up for it."""

from __future__ import annotations

import contextlib
import os
import resource
from datetime import datetime
from functools import partial

import structlog
from celery.exceptions import SoftTimeLimitExceeded
from django.conf import settings

from controlplane.common.actor import system_actor
from controlplane.common.clock import utc_now
from controlplane.common.keeper import Keeper
from controlplane.common.leases import LeaseLost, NotPossible
from controlplane.training import baseline_job, mixture_job
from controlplane.training.actions import complete_job, fail_job
from controlplane.training.lease import take_lease
from controlplane.training.models import Job, JobKind

logger = structlog.get_logger(__name__)

_NICE = 10
"""Routers and model servers on the same machine come first."""


def run(job_id: str, *, now: datetime | None = None) -> bool:
    """Run the job if its lease can be taken; returns whether an artifact was stored.

        take_lease -> build, while a keeper holds the lease -> complete_job -> revision -> routers

    What ends it otherwise is written down as its error; mistakes are raised as well.
    """
    lease = take_lease(job_id)
    if lease is None:
        logger.info("job.not_taken", job=job_id)
        return False
    actor = system_actor("training")
    limits = settings.ENVIRONMENT
    fail = partial(fail_job, actor=actor, job_id=job_id, lease=lease)
    try:
        job = Job.objects.get(pk=job_id)
        with Keeper(Job.objects.all(), job_id, lease) as keeper:
            instant = now or utc_now()
            if job.kind == JobKind.MIXTURE:
                built = mixture_job.build(job, keeper, now=instant)
            else:
                built = baseline_job.build(keeper, now=instant)
        complete_job(actor=actor, job_id=job_id, lease=lease, built=built)
    except LeaseLost:
        logger.warning("job.lease_lost", job=job_id)
        return False
    except NotPossible as problem:
        fail(error=str(problem))
        return False
    except SoftTimeLimitExceeded:
        fail(error=f"not done within {limits.training_limit_s:,} s; it was ended")
        return False
    except MemoryError:
        fail(error=f"needed more memory than the {limits.training_memory_mb:,} MB it may have")
        raise
    except Exception as error:
        fail(error=f"{type(error).__name__}: {error}"[:2_000])
        raise
    logger.info("job.succeeded", job=job_id, rows=built.dataset.n_rows)
    return True


def confine_process() -> None:
    """Bound what this process may take, for good: its memory, and its place in the queue for the processor.

    Memory that it cannot get fails the job with a MemoryError instead of taking the machine down with it.
    """
    limit = settings.ENVIRONMENT.training_memory_mb << 20
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    with contextlib.suppress(PermissionError):
        os.nice(max(0, _NICE - os.nice(0)))
