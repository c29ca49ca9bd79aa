"""Reads of the audit log."""

from __future__ import annotations

from django.db.models import QuerySet

from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor, Scope


def entries(*, actor: Actor, object_type: str = "", object_id: str = "", tenant: str = "") -> QuerySet[AuditEntry]:
    """Entries, newest first, narrowed by whatever is given."""
    actor.require(Scope.READ)
    rows = AuditEntry.objects.order_by("-id")
    if object_type:
        rows = rows.filter(object_type=object_type)
    if object_id:
        rows = rows.filter(object_id=object_id)
    if tenant:
        rows = rows.filter(tenant=tenant)
    return rows
