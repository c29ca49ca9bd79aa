"""Reads of tenants. One function per kind of object gives access; nothing else queries by bare id."""

from __future__ import annotations

from collections import defaultdict

from django.db.models import QuerySet

from controlplane.common.actor import Actor, Scope
from controlplane.tenants.models import Tenant, TenantTier
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


def tenant_weights() -> dict[str, tuple[str, float]]:
    """Name and weight by id, for the live page."""
    return {tenant: (name, weight) for tenant, name, weight in Tenant.objects.values_list("id", "name", "weight")}


def tenant_records() -> list[TenantRecord]:
    """The tenants of a snapshot, from plain columns: a change must reach routers whatever the number of tenants."""
    allowed: dict[str, list[str]] = defaultdict(list)
    links = TenantTier.objects.order_by("tier__rank", "tier__name")
    for tenant, tier in links.values_list("tenant_id", "tier__name"):
        allowed[tenant].append(tier)
    rows = Tenant.objects.order_by("id")
    return [
        TenantRecord(
            tenant=tenant,
            name=name,
            weight=weight,
            state=state,
            tiers=allowed.get(tenant, []),
            default_tier=default_tier,
            max_queued=max_queued,
        )
        for tenant, name, weight, state, default_tier, max_queued in rows.values_list(
            "id", "name", "weight", "state", "default_tier__name", "max_queued"
        )
    ]
