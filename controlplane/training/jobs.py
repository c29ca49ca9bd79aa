"""Runs a job of whatever kind, in a process that may be given up for it."""

from __future__ import annotations

import contextlib
import os
import resource

from django.conf import settings

from controlplane.training import baseline_job, mixture_job
from controlplane.training.models import Job, JobKind

_NICE = 10
"""Routers and model servers on the same machine come first."""


def run(job_id: str) -> bool:
    """Run the job if nobody else has it; returns whether an artifact was stored."""
    kind = Job.objects.filter(pk=job_id).values_list("kind", flat=True).first()
    return mixture_job.run(job_id) if kind == JobKind.MIXTURE else baseline_job.run(job_id)


def confine_process() -> None:
    """Bound what this process may take, for good: its memory, and its place in the queue for the processor.

    Memory that it cannot get fails the job with a MemoryError instead of taking the machine down with it.
    """
    limit = settings.ENVIRONMENT.training_memory_mb << 20
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    with contextlib.suppress(PermissionError):
        os.nice(max(0, _NICE - os.nice(0)))
