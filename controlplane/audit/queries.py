"""Reads of the audit log."""

from __future__ import annotations

from django.db.models import QuerySet

from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor, Scope
from controlplane.common.validation import without_nul


def entries(*, actor: Actor, object_type: str = "", object_id: str = "", tenant: str = "") -> QuerySet[AuditEntry]:
    """Entries, newest first, narrowed by whatever is given."""
    actor.require(Scope.READ)
    rows = AuditEntry.objects.order_by("-id")
    given = {"object_type": object_type, "object_id": object_id, "tenant": tenant}
    return rows.filter(**{name: without_nul(value) for name, value in given.items() if without_nul(value)})
