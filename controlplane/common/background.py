"""Work of the schedule: every run of a task is a row with a state, a lease and a heartbeat.

    beat's message, or a person's request --> row (queued) --> take_lease --> body, while a keeper holds the lease
                                                  ^                            --> succeeded | failed
             the waker, every 15 s, for what is queued or lapsed

At most one row of a kind is queued or running, so a message that comes while another worker is at it does nothing, and
one that comes after a worker was killed takes its job over once the lease has lapsed. Only beat's message makes a row
where none waits: a wake-up call may come twice, and its job is no other's. A body may therefore be run
again from its beginning: each does what is left to do, in transactions of its own. Finished rows are kept by number,
failures apart, so that what runs every minute does not push out why the night's run failed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
from celery import current_app, shared_task
from celery.exceptions import SoftTimeLimitExceeded
from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from kombu.exceptions import OperationalError

from controlplane.common.clock import utc_now
from controlplane.common.keeper import Keeper, Report
from controlplane.common.leases import (
    ACTIVE,
    MAX_ATTEMPTS,
    JobState,
    JobTrigger,
    LeaseLost,
    NotPossible,
    free,
    lease_columns,
    take_lease,
)
from controlplane.common.models import BackgroundJob

logger = structlog.get_logger(__name__)

LIMIT_S = 3_600
"""No body takes this long; one that does hangs, and is ended."""
KEPT, KEPT_FAILED = 50, 50
"""Finished rows of a kind."""
WAKE_EXPIRES_S = 30
"""Twice as long as beat waits between two calls of the waker."""

Body = Callable[[Report], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One task of the schedule. ``what``: for people; ``reports``: its body says how far it is, and can be stopped."""

    name: str
    what: str
    task: str
    body: Body
    reports: bool
    queue: str = "default"


_kinds: dict[str, Kind] = {}


def background(name: str, *, reports: bool = False) -> Callable[[Body], Any]:
    """Make a task of a body, whose runs are rows of the kind ``name``; its docstring says what it is for.

    The body gets what it may report its progress with, and returns what came of it in a few words.
    """

    def decorate(body: Body) -> Any:
        @functools.wraps(body)
        def run_kind(is_wake_up: bool = False) -> None:
            run(_kinds[name], is_wake_up=is_wake_up)

        task = shared_task(soft_time_limit=LIMIT_S, time_limit=LIMIT_S + 60)(run_kind)
        what = " ".join((body.__doc__ or "").split())
        _kinds[name] = Kind(name=name, what=what, task=f"{body.__module__}.{body.__name__}", body=body, reports=reports)
        return task

    return decorate


def kinds() -> dict[str, Kind]:
    """All kinds by name, those of apps whose tasks nobody imported yet as well."""
    current_app.loader.import_default_modules()
    return dict(sorted(_kinds.items()))


def run(kind: Kind, *, is_wake_up: bool = False) -> bool:
    """Run the job of this kind that waits, or else, unless it ``is_wake_up``, a new one; returns whether it succeeded.

    Mistakes are written down as its error and raised as well. Where another worker is at it, nothing happens.
    """
    job = _taken(kind, is_wake_up=is_wake_up)
    if job is None:
        logger.info("job.none_waits" if is_wake_up else "job.under_way", kind=kind.name)
        return False
    rows = BackgroundJob.objects.all()
    try:
        with Keeper(rows, job.id, job.lease) as keeper:
            outcome = kind.body(keeper.report)
    except LeaseLost:
        logger.warning("job.lease_lost", job=job.id, kind=kind.name)
        return False
    except NotPossible as problem:
        _end(job, JobState.FAILED, error=str(problem))
        return False
    except SoftTimeLimitExceeded:
        _end(job, JobState.FAILED, error=f"not done within {LIMIT_S:,} s; it was ended")
        return False
    except Exception as error:
        _end(job, JobState.FAILED, error=f"{type(error).__name__}: {error}"[:2_000])
        raise
    return _end(job, JobState.SUCCEEDED, outcome=outcome or "", progress=1.0)


def _taken(kind: Kind, *, is_wake_up: bool = False) -> BackgroundJob | None:
    """The job of this kind, leased to the caller; None if another worker has it, or has had it."""
    rows = BackgroundJob.objects.filter(kind=kind.name)
    waiting = rows.filter(free(utc_now())).first()
    if waiting is not None and waiting.attempts >= MAX_ATTEMPTS:
        _give_up(waiting)
        waiting = None
    if waiting is not None:
        lease = take_lease(rows, waiting.id)
        return rows.filter(pk=waiting.id, lease=lease).first() if lease else None
    if is_wake_up:
        return None
    try:
        with transaction.atomic():
            return BackgroundJob.objects.create(
                kind=kind.name,
                queue=kind.queue,
                trigger=JobTrigger.SCHEDULE,
                requested_by="schedule",
                attempts=1,
                **lease_columns(utc_now()),
            )
    except IntegrityError:
        return None  # one is queued or running: what the index is for


def _end(job: BackgroundJob, state: str, **columns: Any) -> bool:
    """Close a job that is still the caller's; returns whether it was."""
    now = utc_now()
    is_held = BackgroundJob.objects.filter(pk=job.id, state=JobState.RUNNING, lease=job.lease).update(
        state=state, lease="", lease_until=None, heartbeat_at=now, finished_at=now, **columns
    )
    if is_held:
        logger.info("job.ended", job=job.id, kind=job.kind, state=str(state))
        _forget_old(job.kind)
    else:
        logger.warning("job.lease_lost", job=job.id, kind=job.kind)
    return bool(is_held)


def _give_up(job: BackgroundJob) -> None:
    _end(job, JobState.FAILED, error=f"its worker fell silent {job.attempts} times")


def _forget_old(kind: str) -> None:
    finished = BackgroundJob.objects.filter(kind=kind).exclude(state__in=ACTIVE)
    failed = finished.filter(state=JobState.FAILED)
    for rows, kept in ((finished.exclude(state=JobState.FAILED), KEPT), (failed, KEPT_FAILED)):
        oldest = rows.order_by("-id").values_list("id", flat=True)[kept - 1 : kept].first()
        if oldest is not None:
            rows.filter(id__lt=oldest).delete()


def wake(kind: Kind) -> None:
    """Send the wake-up call. The row is the truth: if the broker is away, the waker calls again within seconds."""
    try:
        current_app.send_task(
            kind.task, kwargs={"is_wake_up": True}, queue=kind.queue, retry=False, expires=WAKE_EXPIRES_S
        )
    except OperationalError:
        logger.warning("job.wake_up_failed", kind=kind.name)


def wake_lapsed() -> list[str]:
    """Call for every job that is queued or whose worker fell silent; give up one that was tried too often."""
    woken = []
    known = kinds()
    for job in BackgroundJob.objects.filter(free(utc_now())).order_by("id"):
        kind = known.get(job.kind)
        if kind is None:
            _retire(BackgroundJob.objects.filter(pk=job.id))
        elif job.attempts >= MAX_ATTEMPTS:
            _give_up(job)
        else:
            wake(kind)
            woken.append(job.id)
    return woken


def _retire(rows: QuerySet[BackgroundJob]) -> None:
    """Close what an older version left queued or running and nobody knows how to run."""
    rows.filter(free(utc_now())).update(
        state=JobState.FAILED, lease="", lease_until=None, finished_at=utc_now(), error="no job of this kind any more"
    )
