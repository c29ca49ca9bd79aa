"""Tenant keys. Only a digest is kept; the key itself is shown once, when it is issued."""

from __future__ import annotations

from django.db import models

from controlplane.common.ids import new_id
from controlplane.common.limits import Limited
from controlplane.common.models import Credential, Managed, Record


def _key_id() -> str:
    return new_id("key")


class ApiKey(Limited, Managed, Credential, Record):
    """A key of a tenant. ``public_id`` is its middle part and identifies it in pages, logs and audit.

    ``default_pool``: None where the key is revoked and the pool has been deleted since.
    """

    id = models.CharField(primary_key=True, max_length=40, default=_key_id, editable=False)
    tenant = models.ForeignKey("tenants.Tenant", on_delete=models.PROTECT, related_name="keys")
    name = models.CharField(max_length=200)
    public_id = models.CharField(max_length=12, unique=True)
    digest = models.CharField(max_length=64, unique=True)
    default_pool = models.ForeignKey("fleet.Pool", on_delete=models.PROTECT, related_name="+", null=True, blank=True)
    tiers = models.ManyToManyField("tiers.Tier", related_name="+", blank=True)
    default_tier = models.ForeignKey("tiers.Tier", on_delete=models.PROTECT, related_name="+", null=True, blank=True)
    may_choose_tier = models.BooleanField(default=False)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name = "key"
        constraints = [
            *Limited.Meta.constraints,
            models.CheckConstraint(condition=~models.Q(name=""), name="key_name_given"),
            models.CheckConstraint(
                condition=models.Q(default_pool__isnull=False) | models.Q(revoked_at__isnull=False),
                name="key_pool_until_revoked",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.public_id})"
