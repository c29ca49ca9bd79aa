"""Reads of jobs, of both tables as one list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q

from controlplane.common.access import visible
from controlplane.common.actor import Actor
from controlplane.common.background import Kind, kinds
from controlplane.common.clock import utc_now
from controlplane.common.errors import Invalid, NotFound
from controlplane.common.leases import ACTIVE, LAPSED, JobState, lapsed
from controlplane.common.models import BackgroundJob
from controlplane.common.validation import without_nul
from controlplane.jobs.schedule import next_run, timings
from controlplane.training.models import Job, JobKind
from controlplane.usage.reconciliation import reconciliations

TRAINING = "training"
"""The queue of training runs, whose kinds are those of ``training.JobKind``."""
STATES = (*JobState.values, LAPSED)
TRAINING_KINDS: dict[str, str] = {
    JobKind.BASELINE.value: "Rebuild the empirical quantiles of output lengths, the fallback of every pool.",
    JobKind.MIXTURE.value: "Train a model of output lengths, and let it serve where it predicts better than what does.",
}


_TABLES: tuple[Any, ...] = (BackgroundJob, Job)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    """A job of either table. ``state``: as stored, or ``lapsed``; ``outcome``: what came of it, in a few words."""

    row: BackgroundJob | Job
    kind: str
    queue: str
    outcome: str
    state: str
    reports: bool

    @property
    def is_active(self) -> bool:
        return self.row.state in ACTIVE

    @property
    def took(self) -> timedelta | None:
        """From its start to its end, or till now."""
        if self.row.started_at is None:
            return None
        return (self.row.finished_at or utc_now()) - self.row.started_at

    @property
    def can_be_cancelled(self) -> bool:
        """A running one only if its work asks now and then whether it is still wanted, or nobody does it."""
        return self.state in (JobState.QUEUED, LAPSED) or (self.is_active and self.reports)

    @property
    def can_be_retried(self) -> bool:
        return self.row.state in (JobState.FAILED, JobState.CANCELLED)


def all_kinds() -> dict[str, str]:
    """What each kind of job is for, by name."""
    return {**TRAINING_KINDS, **{name: kind.what for name, kind in kinds().items()}}


def jobs(
    *, actor: Actor, kind: str = "", state: str = "", before: str | None = None, limit: int = 100
) -> list[JobLine]:
    """Newest first, ``limit`` at most; ``before``: those older than the job of this id.

    Raises:
        Invalid: no such kind or state.
    """
    known = kinds()
    if kind and kind not in all_kinds():
        raise Invalid({"kind": f"one of {', '.join(all_kinds())}, not {kind[:40]!r}"})
    if state and state not in STATES:
        raise Invalid({"state": f"one of {', '.join(STATES)}, not {state[:40]!r}"})
    now = utc_now()
    found: list[JobLine] = []
    for model in _TABLES:
        rows = visible(model.objects.order_by("-id"), actor=actor).defer("log")
        if state == LAPSED:
            rows = rows.filter(lapsed(now))
        elif state == JobState.RUNNING:
            rows = rows.filter(state=state).exclude(lapsed(now))
        elif state:
            rows = rows.filter(state=state)
        if kind:
            rows = rows.filter(kind=kind)
        if before is not None:
            rows = rows.filter(id__lt=before)
        found += [_line(row, known, now) for row in rows[:limit]]
    return sorted(found, key=lambda line: line.row.id, reverse=True)[:limit]


def job(*, actor: Actor, job_id: str) -> JobLine:
    """One job with its log.

    Raises:
        NotFound: there is none of this id, or it is no longer kept.
    """
    for model in _TABLES:
        row = visible(model.objects.all(), actor=actor).filter(pk=without_nul(job_id)).first()
        if row is not None:
            return _line(row, kinds(), utc_now())
    raise NotFound(f"no job {job_id[:40]!r}")


def _line(row: Any, known: dict[str, Kind], now: datetime) -> JobLine:
    is_lapsed = row.state == JobState.RUNNING and row.lease_until < now
    state = LAPSED if is_lapsed else str(row.state)
    if isinstance(row, Job):
        outcome = "" if row.artifact_id is None else f"model {row.artifact_id}"
        return JobLine(row=row, kind=row.kind, queue=TRAINING, outcome=outcome, state=state, reports=True)
    kind = known.get(row.kind)
    return JobLine(
        row=row,
        kind=row.kind,
        queue=row.queue,
        outcome=row.outcome,
        state=state,
        reports=kind is not None and kind.reports,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A kind of job that the schedule calls for, when it comes next, and its newest run."""

    kind: str
    what: str
    queue: str
    schedule: str
    next_at: datetime | None
    last: JobLine | None


def plan(*, actor: Actor) -> Sequence[Planned]:
    """All kinds of the schedule, by name."""
    newest = BackgroundJob.objects.order_by("kind", "-id").distinct("kind").defer("log")
    known, now = kinds(), utc_now()
    last = {row.kind: _line(row, known, now) for row in visible(newest, actor=actor)}
    timing = timings()
    return [
        Planned(
            kind=name,
            what=kind.what,
            queue=kind.queue,
            schedule=timing[kind.task].text if kind.task in timing else "on request",
            next_at=next_run(kind.task, last[name].row.created_at if name in last else None, now=now),
            last=last.get(name),
        )
        for name, kind in known.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many jobs are in which state; ``failed``: whose kind has not succeeded since."""

    running: int
    queued: int
    lapsed: int
    failed: Sequence[str]


def counts(*, actor: Actor, planned: Sequence[Planned]) -> Counts:
    """What needs eyes, of both tables."""
    now = utc_now()
    active = [
        row
        for model in _TABLES
        for row in visible(model.objects.filter(Q(state__in=ACTIVE)), actor=actor).values("state", "lease_until")
    ]
    n_lapsed = sum(row["state"] == JobState.RUNNING and row["lease_until"] < now for row in active)
    return Counts(
        running=sum(row["state"] == JobState.RUNNING for row in active) - n_lapsed,
        queued=sum(row["state"] == JobState.QUEUED for row in active),
        lapsed=n_lapsed,
        failed=[each.kind for each in planned if each.last is not None and each.last.row.state == JobState.FAILED],
    )


def newest_reconciliation(*, actor: Actor) -> Any:
    """The last comparison of rollups and events; None before the first."""
    return reconciliations(actor=actor).first()
