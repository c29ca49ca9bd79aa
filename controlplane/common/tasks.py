from __future__ import annotations

from datetime import timedelta

from controlplane.common.background import background
from controlplane.common.clock import utc_now
from controlplane.common.keeper import Report
from controlplane.common.models import IdempotencyRecord

KEEP = timedelta(days=1)


@background("common-forget-idempotency")
def forget_idempotency(report: Report) -> str:
    """Forget the answers to creates of a day ago: so long a repeated one is recognised."""
    n_deleted, _ = IdempotencyRecord.objects.filter(created_at__lt=utc_now() - KEEP).delete()
    return f"{n_deleted:,} answers"
