from __future__ import annotations

from django.contrib.sessions.models import Session

from controlplane.common.background import background
from controlplane.common.clock import utc_now
from controlplane.common.keeper import Report


@background("accounts-forget-sessions")
def forget_sessions(report: Report) -> str:
    """Delete sessions that have expired: they open nothing, and Django leaves them in their table."""
    n_deleted, _ = Session.objects.filter(expire_date__lt=utc_now()).delete()
    return f"{n_deleted:,} sessions"
