from __future__ import annotations

from celery import shared_task

from controlplane.fleet import brakes, hazards


@shared_task
def forget_cancelled() -> None:
    brakes.forget_cancelled()


@shared_task
def forget_old_hazards() -> None:
    hazards.forget_old_hazards()
