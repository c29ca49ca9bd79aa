"""Reads of keys."""

from __future__ import annotations

from django.db.models import QuerySet

from controlplane.common.actor import Actor, Scope
from controlplane.common.clock import to_us
from controlplane.common.validation import without_nul
from controlplane.keys.models import ApiKey
from router_ext.wire.controlplane import KeyRecord


def keys(*, actor: Actor, tenant: str = "") -> QuerySet[ApiKey]:
    """Keys, revoked ones included, of one tenant if given."""
    actor.require(Scope.READ)
    rows = ApiKey.objects.select_related("tenant", "default_pool", "default_tier").prefetch_related("tiers")
    if tenant := without_nul(tenant):
        rows = rows.filter(tenant_id=tenant)
    return rows.order_by("-id")


def tier_names(key: ApiKey) -> list[str]:
    """Names of the tiers the key is narrowed to, by rank; empty means the tenant's."""
    return [t.name for t in sorted(key.tiers.all(), key=lambda t: (t.rank, t.name))]


def key_records() -> list[KeyRecord]:
    """The keys of a snapshot. Revoked ones are left out; expired ones stay, so that the router can say so."""
    rows = ApiKey.objects.select_related("default_pool", "default_tier").prefetch_related("tiers")
    return [
        KeyRecord(
            key=k.id,
            public_id=k.public_id,
            digest=k.digest,
            pepper_version=k.pepper_version,
            tenant=k.tenant_id,
            default_pool=k.default_pool.name,
            tiers=tier_names(k),
            default_tier=k.default_tier.name if k.default_tier is not None else None,
            may_choose_tier=k.may_choose_tier,
            expires_at_us=to_us(k.expires_at) if k.expires_at is not None else None,
        )
        for k in rows.filter(revoked_at__isnull=True).order_by("id")
    ]
