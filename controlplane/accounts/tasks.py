from __future__ import annotations

from celery import shared_task
from django.contrib.sessions.models import Session

from controlplane.common.clock import utc_now


@shared_task
def forget_sessions() -> None:
    """Expired sessions open nothing; Django leaves them in their table."""
    Session.objects.filter(expire_date__lt=utc_now()).delete()
