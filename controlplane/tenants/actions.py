"""Use cases of tenants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from typing_extensions import Unpack

from controlplane.audit.actions import record, save_change
from controlplane.common.actor import Actor
from controlplane.common.errors import Conflict
from controlplane.common.use_case import mark_config_changed, use_case
from controlplane.common.validation import Checks, lock_version
from controlplane.tenants.models import Tenant, TenantState, TenantTier
from controlplane.tenants.queries import tier_names
from controlplane.tiers.models import Tier
from controlplane.tiers.queries import find_tiers


class TenantChanges(TypedDict, total=False):
    name: str
    slug: str
    weight: float
    state: str
    tiers: Sequence[str]
    default_tier: str
    max_queued: int


def tenant_fields(tenant: Tenant) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "slug": tenant.slug,
        "weight": tenant.weight,
        "state": tenant.state,
        "tiers": tier_names(tenant),
        "default_tier": tenant.default_tier.name,
        "max_queued": tenant.max_queued,
    }


def _resolve(checks: Checks, names: Sequence[str], default: str) -> tuple[list[Tier], Tier | None]:
    """The tiers of these names and the default among them; what is wrong goes into ``checks``."""
    tiers, unknown = find_tiers(names)
    if unknown:
        checks.add("tiers", f"unknown: {', '.join(unknown)}")
    if not names:
        checks.add("tiers", "name at least one tier")
    chosen = next((t for t in tiers if t.name == default), None)
    if chosen is None:
        checks.add("default_tier", f"{default!r} is not one of the tenant's tiers")
    return tiers, chosen


def _check(checks: Checks, tenant: Tenant) -> None:
    tenant.name = checks.text("name", tenant.name, 200)
    checks.slug("slug", tenant.slug)
    checks.number("weight", tenant.weight, 0.001, 10_000)
    checks.number("max_queued", tenant.max_queued, 1, 1_000_000)
    if tenant.state not in TenantState.values:
        checks.add("state", f"{tenant.state!r} is not one of {', '.join(TenantState.values)}")


def _refuse_taken_slug(tenant: Tenant) -> None:
    if Tenant.objects.filter(slug=tenant.slug).exclude(pk=tenant.pk).exists():
        raise Conflict(f"a tenant {tenant.slug!r} exists")


@use_case()
def create_tenant(
    *,
    actor: Actor,
    name: str,
    slug: str,
    tiers: Sequence[str],
    default_tier: str,
    weight: float = 1.0,
    max_queued: int = 2_000,
) -> Tenant:
    """A tenant; routers know it within two seconds.

    Args:
        tiers: names of the tiers it may use. default_tier: one of them.
        weight: its share, relative to the other tenants'.
    """
    checks = Checks()
    tenant = Tenant(name=name, slug=slug, weight=weight, max_queued=max_queued)
    _check(checks, tenant)
    rows, chosen = _resolve(checks, tiers, default_tier)
    checks.done()
    assert chosen is not None
    _refuse_taken_slug(tenant)
    tenant.default_tier = chosen
    tenant.save(force_insert=True)
    TenantTier.objects.bulk_create(TenantTier(tenant=tenant, tier=t) for t in rows)
    record(
        actor=actor,
        action="tenant.created",
        object_type="tenant",
        object_id=tenant.id,
        tenant=tenant.id,
        after=tenant_fields(tenant),
    )
    mark_config_changed(f"tenant {tenant.slug} created")
    return tenant


@use_case()
def update_tenant(
    *, actor: Actor, tenant_id: str, expected_version: int | None = None, **changes: Unpack[TenantChanges]
) -> Tenant:
    """Change some fields of a tenant; what is left out stays."""
    tenant = lock_version(Tenant.objects.all(), "tenant", tenant_id, expected_version)
    before = tenant_fields(tenant)
    checks = Checks()
    rows, chosen = _resolve(
        checks, changes.pop("tiers", before["tiers"]), changes.pop("default_tier", before["default_tier"])
    )
    for field, value in changes.items():
        setattr(tenant, field, value)
    _check(checks, tenant)
    checks.done()
    assert chosen is not None
    _refuse_taken_slug(tenant)
    tenant.default_tier = chosen
    TenantTier.objects.filter(tenant=tenant).exclude(tier__in=rows).delete()
    TenantTier.objects.bulk_create((TenantTier(tenant=tenant, tier=t) for t in rows), ignore_conflicts=True)
    save_change(
        tenant,
        actor=actor,
        action="tenant.updated",
        tenant=tenant.id,
        before=before,
        after=tenant_fields(tenant),
        publish=f"tenant {tenant.slug} updated",
    )
    return tenant
