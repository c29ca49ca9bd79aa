"""The audit log: one writer, no update, no delete (triggers refuse both, and TRUNCATE, for everybody)."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class AuditEntry(models.Model):
    """One mutation. ``before`` and ``after`` hold what changed (all fields on create); never a secret."""

    id = models.BigAutoField(primary_key=True)
    at = models.DateTimeField(db_default=Now(), db_index=True)
    actor_kind = models.TextField()
    actor_id = models.TextField()
    actor_label = models.TextField()
    action = models.TextField()
    object_type = models.TextField()
    object_id = models.TextField()
    tenant = models.TextField(blank=True, default="")
    before = models.JSONField(null=True)
    after = models.JSONField(null=True)
    request_id = models.TextField(blank=True, default="")

    class Meta:
        indexes = [
            models.Index(fields=["object_type", "object_id", "-id"], name="audit_by_object"),
            models.Index(fields=["tenant", "-id"], name="audit_by_tenant"),
        ]
        verbose_name_plural = "audit entries"
