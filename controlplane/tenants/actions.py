"""Use cases of tenants and of fairness groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from django.db.models import ProtectedError
from typing_extensions import Unpack

from controlplane.audit.actions import delete_change, record, save_change
from controlplane.common.actor import Actor
from controlplane.common.clock import utc_now
from controlplane.common.errors import Conflict
from controlplane.common.limits import limit_fields, set_limits
from controlplane.common.use_case import mark_config_changed, use_case
from controlplane.common.validation import Checks, checked_reason, lock_version
from controlplane.common.zones import check_zone
from controlplane.tenants.models import Group, Tenant, TenantState, TenantTier
from controlplane.tenants.queries import find_group, live_tenants, tier_names
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
    timezone: str
    group: str | None
    limits: Mapping[str, int | None]
    managed_by: str


class GroupChanges(TypedDict, total=False):
    weight: float
    managed_by: str


_releasers: list[Callable[[Actor, Tenant], Mapping[str, Any]]] = []


def on_tenant_deleted(releaser: Callable[[Actor, Tenant], Mapping[str, Any]]) -> None:
    """Register what lets go of a tenant's belongings when it is deleted, inside that transaction.

    It returns what it did, for the audit entry of the deletion.
    """
    if releaser not in _releasers:
        _releasers.append(releaser)


def tenant_fields(tenant: Tenant) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "slug": tenant.slug,
        "weight": tenant.weight,
        "state": tenant.state,
        "tiers": tier_names(tenant),
        "default_tier": tenant.default_tier_name,
        "max_queued": tenant.max_queued,
        "timezone": tenant.timezone,
        "group": None if tenant.group is None else tenant.group.name,
        "limits": limit_fields(tenant),
        "managed_by": tenant.managed_by,
    }


def group_fields(group: Group) -> dict[str, Any]:
    return {"name": group.name, "weight": group.weight, "managed_by": group.managed_by}


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


def _find_group(checks: Checks, name: str | None) -> Group | None:
    """The group of this name, None for none; what is wrong goes into ``checks``."""
    group = find_group(name) if name else None
    if name and group is None:
        checks.add("group", f"there is no fairness group {name!r}")
    return group


def _check(checks: Checks, tenant: Tenant) -> None:
    tenant.name = checks.text("name", tenant.name, 200)
    checks.slug("slug", tenant.slug)
    checks.number("weight", tenant.weight, 0.001, 10_000)
    checks.number("max_queued", tenant.max_queued, 1, 1_000_000)
    check_zone(checks, "timezone", tenant.timezone)
    checks.manager(tenant.managed_by)
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
    timezone: str = "UTC",
    group: str | None = None,
    limits: Mapping[str, int | None] | None = None,
    state: str = TenantState.ACTIVE,
    managed_by: str = "",
) -> Tenant:
    """A tenant; routers know it within two seconds.

    Args:
        tiers: names of the tiers it may use. default_tier: one of them.
        weight: its share, relative to the other tenants'; in a group, to its other members'.
        timezone: whose months its statements cover.
        group: name of its fairness group, None for none.
        limits: by the names of ``LimitsRecord``; what is left out has no limit. managed_by: as of ``Managed``.
    """
    checks = Checks()
    tenant = Tenant(
        name=name,
        slug=slug,
        weight=weight,
        max_queued=max_queued,
        timezone=timezone,
        group=_find_group(checks, group),
        state=state,
        managed_by=managed_by,
    )
    _check(checks, tenant)
    set_limits(checks, tenant, limits or {})
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
    """Change some fields of a tenant; what is left out stays, of its limits as well."""
    tenant = lock_version(live_tenants(), "tenant", tenant_id, expected_version)
    before = tenant_fields(tenant)
    checks = Checks()
    rows, chosen = _resolve(
        checks, changes.pop("tiers", before["tiers"]), changes.pop("default_tier", before["default_tier"])
    )
    if "group" in changes:
        tenant.group = _find_group(checks, changes.pop("group"))
    set_limits(checks, tenant, changes.pop("limits", {}))
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


@use_case()
def stop_tenant(*, actor: Actor, tenant_id: str, reason: str, expected_version: int | None = None) -> Tenant:
    """End everything a tenant runs or has waiting, and take nothing new; stopping again changes nothing."""
    return _brake(actor, tenant_id, expected_version, TenantState.STOPPED, "stopped", checked_reason(reason))


@use_case()
def suspend_tenant(
    *,
    actor: Actor,
    tenant_id: str,
    reason: str = "",
    is_cut: bool = False,
    expected_version: int | None = None,
) -> Tenant:
    """Refuse a tenant's new requests and end those that wait; what runs finishes.

    Args:
        is_cut: what runs ends as well: the tenant is stopped.
    """
    said = checked_reason(reason) if reason else ""
    if is_cut:
        return _brake(actor, tenant_id, expected_version, TenantState.STOPPED, "stopped", said)
    return _brake(actor, tenant_id, expected_version, TenantState.SUSPENDED, "suspended", said)


@use_case()
def resume_tenant(*, actor: Actor, tenant_id: str, reason: str = "", expected_version: int | None = None) -> Tenant:
    """Let a stopped or suspended tenant go on."""
    said = checked_reason(reason) if reason else ""
    return _brake(actor, tenant_id, expected_version, TenantState.ACTIVE, "resumed", said)


def _brake(
    actor: Actor, tenant_id: str, expected_version: int | None, state: TenantState, how: str, reason: str
) -> Tenant:
    tenant = lock_version(live_tenants(), "tenant", tenant_id, expected_version)
    if tenant.state == state:
        return tenant
    before = tenant_fields(tenant)
    tenant.state = state
    save_change(
        tenant,
        actor=actor,
        action=f"tenant.{how}",
        tenant=tenant.id,
        before=before,
        after={**tenant_fields(tenant), "reason": reason},
        publish=f"tenant {tenant.slug} {how}",
    )
    return tenant


@use_case()
def delete_tenant(*, actor: Actor, tenant_id: str, expected_version: int | None = None) -> None:
    """Delete a tenant that is suspended or stopped: its keys are revoked for good, its people's accounts
    closed, its short name is free again.

    What it used stays in the books, under its name with "(deleted)" behind it.

    Raises:
        Conflict: it is active.
    """
    tenant = lock_version(live_tenants(), "tenant", tenant_id, expected_version)
    if tenant.state == TenantState.ACTIVE:
        raise Conflict(f"tenant {tenant.slug!r} is active: suspend it first")
    before, slug = tenant_fields(tenant), tenant.slug
    released: dict[str, Any] = {}
    for release in _releasers:
        released |= release(actor, tenant)
    tenant.deleted_at = utc_now()
    tenant.name = f"{tenant.name[:189]} (deleted)"
    tenant.slug = f"deleted-{tenant.id.lower().replace('_', '-')}"[:63]
    tenant.group, tenant.default_tier, tenant.managed_by = None, None, ""
    TenantTier.objects.filter(tenant=tenant).delete()
    tenant.version += 1
    tenant.save()
    record(
        actor=actor,
        action="tenant.deleted",
        object_type="tenant",
        object_id=tenant.id,
        tenant=tenant.id,
        before=before,
        after={"name": tenant.name, "deleted_at": tenant.deleted_at, **released},
    )
    mark_config_changed(f"tenant {slug} deleted")


def _check_group(group: Group) -> None:
    checks = Checks()
    checks.slug("name", group.name)
    checks.number("weight", group.weight, 0.001, 10_000)
    checks.manager(group.managed_by)
    checks.done()


@use_case()
def create_group(*, actor: Actor, name: str, weight: float = 1.0, managed_by: str = "") -> Group:
    """A fairness group; tenants join it by its name, which stays for good.

    Args:
        weight: its share in every pool, relative to other groups and to tenants without one.
        managed_by: as of ``Managed``.
    """
    group = Group(name=name, weight=weight, managed_by=managed_by)
    _check_group(group)
    if Group.objects.filter(name=name).exists():
        raise Conflict(f"a fairness group {name!r} exists")
    group.save(force_insert=True)
    record(actor=actor, action="group.created", object_type="group", object_id=group.id, after=group_fields(group))
    mark_config_changed(f"fairness group {name} created")
    return group


@use_case()
def update_group(
    *, actor: Actor, group_id: str, expected_version: int | None = None, **changes: Unpack[GroupChanges]
) -> Group:
    group = lock_version(Group.objects.all(), "group", group_id, expected_version)
    before = group_fields(group)
    for field, value in changes.items():
        setattr(group, field, value)
    _check_group(group)
    save_change(
        group,
        actor=actor,
        action="group.updated",
        before=before,
        after=group_fields(group),
        publish=f"fairness group {group.name} updated",
    )
    return group


@use_case()
def delete_group(*, actor: Actor, group_id: str, expected_version: int | None = None) -> None:
    """Delete a fairness group that no tenant is in."""
    group = lock_version(Group.objects.all(), "group", group_id, expected_version)
    before = group_fields(group)
    publish = f"fairness group {group.name} deleted"
    try:
        delete_change(group, actor=actor, action="group.deleted", before=before, publish=publish)
    except ProtectedError as error:
        number = len(error.protected_objects)
        raise Conflict(f"fairness group {group.name!r} has {number} tenant{'' if number == 1 else 's'}") from error
