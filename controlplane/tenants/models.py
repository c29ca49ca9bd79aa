"""Tenants: who shares the platform, by which weight, in which tiers, and groups that compete as one."""

from __future__ import annotations

from django.db import models

from controlplane.common.ids import new_id
from controlplane.common.limits import Limited
from controlplane.common.models import Managed, Record


def _tenant_id() -> str:
    return new_id("ten")


def _group_id() -> str:
    return new_id("grp")


class Group(Managed, Record):
    """A fairness group: its tenants compete in every pool as one of this weight, and share it by their own weights.

    Its name is its public reference and never changes: routers keep its service counters by it.
    """

    id = models.CharField(primary_key=True, max_length=40, default=_group_id, editable=False)
    name = models.SlugField(max_length=63, unique=True)
    weight = models.FloatField(default=1.0)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=models.Q(weight__gte=0.001, weight__lte=10_000), name="group_weight_range")
        ]

    def __str__(self) -> str:
        return self.name


class TenantState(models.TextChoices):
    """``suspended``: nothing new is taken, what waits ends; ``stopped``: what runs ends as well."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    STOPPED = "stopped"


class Tenant(Limited, Managed, Record):
    """A tenant. A database constraint holds ``default_tier`` to one of the allowed ``tiers``.

    ``timezone``: whose months its statements cover; an IANA name. ``deleted_at``: only its name is left, for the
    books; until then it has a default tier.
    """

    id = models.CharField(primary_key=True, max_length=40, default=_tenant_id, editable=False)
    slug = models.SlugField(max_length=63, unique=True)
    name = models.CharField(max_length=200)
    weight = models.FloatField(default=1.0)
    state = models.CharField(max_length=16, choices=TenantState.choices, default=TenantState.ACTIVE)
    tiers = models.ManyToManyField("tiers.Tier", through="TenantTier", related_name="tenants")
    default_tier = models.ForeignKey("tiers.Tier", on_delete=models.PROTECT, related_name="+", null=True)
    max_queued = models.PositiveIntegerField(default=2_000)
    timezone = models.CharField(max_length=64, default="UTC")
    group = models.ForeignKey(Group, null=True, blank=True, on_delete=models.PROTECT, related_name="tenants")
    deleted_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            *Limited.Meta.constraints,
            models.CheckConstraint(
                condition=models.Q(weight__gte=0.001, weight__lte=10_000), name="tenant_weight_range"
            ),
            models.CheckConstraint(
                condition=models.Q(max_queued__gte=1, max_queued__lte=1_000_000), name="tenant_max_queued_range"
            ),
            models.CheckConstraint(condition=models.Q(state__in=TenantState.values), name="tenant_state_known"),
            models.CheckConstraint(condition=~models.Q(name=""), name="tenant_name_given"),
            models.CheckConstraint(
                condition=models.Q(default_tier__isnull=False) | models.Q(deleted_at__isnull=False),
                name="tenant_default_tier_given",
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def default_tier_name(self) -> str:
        """Empty once it is deleted."""
        return "" if self.default_tier is None else self.default_tier.name


class TenantTier(models.Model):
    """Permission of a tenant to use a tier."""

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    tier = models.ForeignKey("tiers.Tier", on_delete=models.PROTECT)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "tier"], name="tenant_tier_once")]
