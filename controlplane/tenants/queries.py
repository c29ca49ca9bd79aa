"""Reads of tenants. One function per kind of object gives access; nothing else queries by bare id."""

from __future__ import annotations

from django.db.models import QuerySet

from controlplane.common.actor import Actor, Scope
from controlplane.tenants.models import Tenant
from router_ext.wire.controlplane import TenantRecord


def tenants(*, actor: Actor) -> QuerySet[Tenant]:
    """All tenants with their tiers."""
    actor.require(Scope.READ)
    return Tenant.objects.select_related("default_tier").prefetch_related("tiers").order_by("slug")


def tier_names(tenant: Tenant) -> list[str]:
    """Names of the allowed tiers, by rank."""
    return [t.name for t in sorted(tenant.tiers.all(), key=lambda t: (t.rank, t.name))]


def tenant_names() -> dict[str, str]:
    """Name by id, for pages and reports that show what the books recorded."""
    return dict(Tenant.objects.values_list("id", "name"))


def tenant_records() -> list[TenantRecord]:
    """The tenants of a snapshot."""
    rows = Tenant.objects.select_related("default_tier").prefetch_related("tiers").order_by("id")
    return [
        TenantRecord(
            tenant=t.id,
            name=t.name,
            weight=t.weight,
            state=t.state,
            tiers=tier_names(t),
            default_tier=t.default_tier.name,
            max_queued=t.max_queued,
        )
        for t in rows
    ]
