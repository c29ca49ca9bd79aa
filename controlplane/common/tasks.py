from __future__ import annotations

from datetime import timedelta

from celery import shared_task

from controlplane.common.clock import utc_now
from controlplane.common.models import IdempotencyRecord

KEEP = timedelta(days=1)


@shared_task
def forget_idempotency() -> None:
    """A repeated create is recognised for a day, as clients of such keys expect."""
    IdempotencyRecord.objects.filter(created_at__lt=utc_now() - KEEP).delete()
