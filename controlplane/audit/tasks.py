from __future__ import annotations

from celery import shared_task

from controlplane.audit import actions


@shared_task
def log_head() -> None:
    actions.log_head()
