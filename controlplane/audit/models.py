"""The audit log: one writer, no update, no delete (triggers refuse both, and TRUNCATE, for everybody)."""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import GinIndex
from django.db import models
from django.db.models.functions import Now


class AuditEntry(models.Model):
    """One mutation. ``before`` and ``after`` hold what changed (all fields on create); never a secret.

    ``bulk``: ids of all that one action changed together, where there were several; ``object_id`` is "" then.
    ``hash``: link of the chain (``controlplane.audit.chain``), in the order of ids.
    """

    id = models.BigAutoField(primary_key=True)
    at = models.DateTimeField(db_default=Now(), db_index=True)
    actor_kind = models.TextField()
    actor_id = models.TextField()
    actor_label = models.TextField()
    action = models.TextField()
    object_type = models.TextField()
    object_id = models.TextField()
    bulk = ArrayField(models.TextField(), default=list, blank=True)
    tenant = models.TextField(blank=True, default="")
    before = models.JSONField(null=True)
    after = models.JSONField(null=True)
    request_id = models.TextField(blank=True, default="")
    hash = models.CharField(max_length=64)

    class Meta:
        indexes = [
            models.Index(fields=["object_type", "object_id", "-id"], name="audit_by_object"),
            models.Index(fields=["tenant", "-id"], name="audit_by_tenant"),
            models.Index(fields=["actor_id", "-id"], name="audit_by_actor"),
            GinIndex(fields=["bulk"], name="audit_by_bulk"),
        ]
        verbose_name_plural = "audit entries"


class AuditHead(models.Model):
    """The chain's last hash as it was at some time: what a cut tail is seen by. Append-only as well."""

    at = models.DateTimeField(db_default=Now())
    entry = models.BigIntegerField()
    hash = models.CharField(max_length=64)

    class Meta:
        ordering = ["-id"]
