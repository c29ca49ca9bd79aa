from __future__ import annotations

from celery import shared_task

from controlplane.rollout import actions


@shared_task
def trim_revisions() -> None:
    actions.trim_revisions()
