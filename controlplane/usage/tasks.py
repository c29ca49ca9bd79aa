from __future__ import annotations

from celery import shared_task

from controlplane.usage.coarsening import coarsen
from controlplane.usage.partitions import ensure_ahead
from controlplane.usage.reconciliation import reconcile
from controlplane.usage.rollup import roll_up_finished, roll_up_running
from controlplane.usage.samples import count_recent_samples, forget_old
from controlplane.usage.statements import close_months
from controlplane.usage.totals import fold, forget_old_totals


@shared_task
def roll_up() -> None:
    roll_up_finished()
    # Where no router asks for totals.
    fold()


@shared_task
def roll_up_minutes() -> None:
    """What the Predictor page shows of the running hour."""
    roll_up_running()
    count_recent_samples()


@shared_task
def make_partitions() -> None:
    ensure_ahead()


@shared_task
def coarsen_old() -> None:
    coarsen()


@shared_task
def close_statements() -> None:
    close_months()


@shared_task
def reconcile_books() -> None:
    reconcile()


@shared_task
def forget_old_samples() -> None:
    forget_old()
    forget_old_totals()
