from __future__ import annotations

from celery import shared_task

from controlplane.usage.partitions import ensure_ahead
from controlplane.usage.rollup import roll_up_finished
from controlplane.usage.samples import forget_old


@shared_task
def roll_up() -> None:
    roll_up_finished()


@shared_task
def make_partitions() -> None:
    ensure_ahead()


@shared_task
def forget_old_samples() -> None:
    forget_old()
