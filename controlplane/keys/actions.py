"""Use cases of tenant keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypedDict

from django.conf import settings
from django.db.models import F
from typing_extensions import Unpack

from controlplane.audit.actions import record, save_change
from controlplane.common import secrets
from controlplane.common.access import visible
from controlplane.common.actor import Actor, Scope
from controlplane.common.bound import bound_cursor
from controlplane.common.clock import utc_now
from controlplane.common.errors import Conflict, Invalid
from controlplane.common.limits import limit_fields, set_limits
from controlplane.common.use_case import mark_config_changed, use_case
from controlplane.common.validation import Checks, lock_version
from controlplane.fleet.models import Pool
from controlplane.fleet.queries import find_pool
from controlplane.keys.models import ApiKey
from controlplane.keys.queries import tier_names
from controlplane.tenants import queries as tenant_queries
from controlplane.tenants.models import Tenant
from controlplane.tiers.models import Tier
from controlplane.tiers.queries import find_tiers
from router_ext.wire.controlplane import generate_key

LAST_USED_STEP = timedelta(minutes=1)


class KeyChanges(TypedDict, total=False):
    name: str
    default_pool: str
    tiers: Sequence[str]
    default_tier: str | None
    may_choose_tier: bool
    expires_at: datetime | None
    limits: Mapping[str, int | None]
    managed_by: str


def key_fields(key: ApiKey) -> dict[str, Any]:
    return {
        "tenant": key.tenant_id,
        "name": key.name,
        "public_id": key.public_id,
        "default_pool": None if key.default_pool is None else key.default_pool.name,
        "tiers": tier_names(key),
        "default_tier": key.default_tier.name if key.default_tier is not None else None,
        "may_choose_tier": key.may_choose_tier,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "limits": limit_fields(key),
        "managed_by": key.managed_by,
    }


def _resolve_pool(checks: Checks, reference: str | None) -> Pool | None:
    if reference is None:
        pools = list(Pool.objects.order_by("id")[:2])
        if len(pools) != 1:
            checks.add("default_pool", "name the pool for requests that name no model")
            return None
        return pools[0]
    pool = find_pool(reference)
    if pool is None:
        checks.add("default_pool", f"no pool {reference!r}")
    return pool


def _resolve_tiers(
    checks: Checks, tenant: Tenant, names: Sequence[str], default: str | None
) -> tuple[list[Tier], Tier | None]:
    allowed = tenant_queries.tier_names(tenant)
    outside = [n for n in names if n not in allowed]
    if outside:
        checks.add("tiers", f"not among the tenant's: {', '.join(outside)}")
    if default is not None and default not in (names or allowed):
        checks.add("default_tier", f"{default!r} is not among the key's tiers")
    tiers, _ = find_tiers(names)
    found, _ = find_tiers([default] if default is not None else [])
    return tiers, found[0] if found else None


def _check_within_tenant(checks: Checks, actor: Actor, tenant: Tenant, limits: Mapping[str, int | None]) -> None:
    """A tenant's own people stay below its limits; the platform's may prepare for later."""
    if actor.tenant is None:
        return
    for name, value in limits.items():
        highest = getattr(tenant, name, None)
        if value is not None and highest is not None and value > highest:
            checks.add(f"limits.{name}", f"must be from 0 to the tenant's {highest:,}, not {value:,}")


MAX_OWN_KEYS = 1_000
"""Live keys up to which a tenant's own people may issue more: each is in every router's memory."""


@use_case(scope=Scope.TENANT_WRITE)
def issue_key(
    *,
    actor: Actor,
    tenant_id: str,
    name: str,
    default_pool: str | None = None,
    tiers: Sequence[str] = (),
    default_tier: str | None = None,
    may_choose_tier: bool = False,
    expires_at: datetime | None = None,
    limits: Mapping[str, int | None] | None = None,
    managed_by: str = "",
) -> tuple[ApiKey, str]:
    """A key of the tenant and its text, which is shown this once and kept nowhere.

    Args:
        tenant_id: id or short name. managed_by: as of ``Managed``.
        default_pool: id, name or alias; may be left out where there is one pool only.
        tiers: narrows the tenant's tiers; empty means all of them.
        may_choose_tier: the header ``x-fairlane-tier`` is honoured.
        limits: beside the tenant's; by the names of ``LimitsRecord``, what is left out has no limit.
    """
    tenant = tenant_queries.find_tenant(tenant_id, actor=actor)
    if tenant is None:
        raise Invalid({"tenant": f"no tenant {tenant_id!r}"})
    if actor.tenant is not None and ApiKey.objects.filter(tenant=tenant, revoked_at=None).count() >= MAX_OWN_KEYS:
        raise Conflict(f"the tenant has {MAX_OWN_KEYS:,} live keys; revoke some, or ask an operator")
    checks = Checks()
    name = checks.text("name", name, 200)
    pool = _resolve_pool(checks, default_pool)
    rows, chosen = _resolve_tiers(checks, tenant, tiers, default_tier)
    if expires_at is not None and expires_at <= utc_now():
        checks.add("expires_at", "lies in the past")
    checks.manager(managed_by)
    key = ApiKey(
        tenant=tenant, name=name, default_tier=chosen, may_choose_tier=may_choose_tier, expires_at=expires_at,
        managed_by=managed_by,
    )  # fmt: skip
    set_limits(checks, key, limits or {})
    _check_within_tenant(checks, actor, tenant, limits or {})
    checks.done()
    assert pool is not None
    text, key.public_id = generate_key()
    key.digest, key.pepper_version = secrets.digest(text), settings.KEY_PEPPER_VERSION
    key.default_pool = pool
    key.save(force_insert=True)
    key.tiers.set(rows)
    record(
        actor=actor,
        action="key.issued",
        object_type="key",
        object_id=key.id,
        tenant=tenant.id,
        after=key_fields(key),
    )
    mark_config_changed(f"key {key.public_id} of {tenant.slug} issued")
    return key, text


@use_case(scope=Scope.TENANT_WRITE)
def update_key(
    *, actor: Actor, key_id: str, expected_version: int | None = None, **changes: Unpack[KeyChanges]
) -> ApiKey:
    """Change some fields of a live key; its text stays the same, and so do limits that are left out."""
    rows = visible(ApiKey.objects.select_related("tenant", "default_pool", "default_tier"), actor=actor)
    key = lock_version(rows, "key", key_id, expected_version)
    if key.revoked_at is not None:
        raise Conflict(f"key {key.public_id} is revoked")
    before = key_fields(key)
    checks = Checks()
    key.name = checks.text("name", changes.get("name", key.name), 200)
    pool = _resolve_pool(checks, changes.get("default_pool", before["default_pool"]))
    tiers, chosen = _resolve_tiers(
        checks, key.tenant, changes.get("tiers", before["tiers"]), changes.get("default_tier", before["default_tier"])
    )
    key.may_choose_tier = changes.get("may_choose_tier", key.may_choose_tier)
    key.expires_at = changes.get("expires_at", key.expires_at)
    key.managed_by = changes.get("managed_by", key.managed_by)
    checks.manager(key.managed_by)
    set_limits(checks, key, changes.get("limits", {}))
    _check_within_tenant(checks, actor, key.tenant, changes.get("limits", {}))
    checks.done()
    assert pool is not None
    key.default_pool, key.default_tier = pool, chosen
    key.tiers.set(tiers)
    save_change(
        key,
        actor=actor,
        action="key.updated",
        tenant=key.tenant_id,
        before=before,
        after=key_fields(key),
        publish=f"key {key.public_id} updated",
    )
    return key


@use_case(scope=Scope.TENANT_WRITE)
def revoke_key(*, actor: Actor, key_id: str, expected_version: int | None = None) -> ApiKey:
    """Revoke for good; routers refuse it within two seconds. Revoking again changes nothing."""
    rows = visible(ApiKey.objects.select_related("tenant", "default_pool", "default_tier"), actor=actor)
    key = lock_version(rows, "key", key_id, expected_version)
    if key.revoked_at is None:
        before = key_fields(key)
        key.revoked_at = utc_now()
        save_change(
            key,
            actor=actor,
            action="key.revoked",
            tenant=key.tenant_id,
            before=before,
            after=key_fields(key),
            publish=f"key {key.public_id} revoked",
        )
    return key


def revoke_all(actor: Actor, tenant: Tenant) -> dict[str, Any]:
    """Revoke the live keys of a tenant that is being deleted; returns their public ids for the audit entry."""
    live = ApiKey.objects.filter(tenant=tenant, revoked_at=None).order_by("id")
    public_ids = list(live.values_list("public_id", flat=True))
    # Nothing of it holds on to a tier that may be deleted one day.
    ApiKey.tiers.through.objects.filter(apikey__tenant=tenant).delete()
    ApiKey.objects.filter(tenant=tenant).update(default_tier=None)
    now = utc_now()
    live.update(revoked_at=now, updated_at=now, version=F("version") + 1)
    return {"keys_revoked": public_ids}


def let_go_of_pool(pool: Pool) -> None:
    """A pool that is deleted is no longer the default of keys that are revoked; live ones keep it from that."""
    ApiKey.objects.filter(default_pool=pool, revoked_at__isnull=False).update(default_pool=None)


def let_go_of_tier(tier: Tier) -> None:
    """Likewise."""
    ApiKey.objects.filter(default_tier=tier, revoked_at__isnull=False).update(default_tier=None)


_USED_SQL = """
    WITH due AS (
        SELECT id, wanted.at FROM unnest(%b::text[], %b::timestamptz[]) AS wanted (id, at)
        JOIN keys_apikey AS known USING (id)
        WHERE known.last_used_at IS NULL OR known.last_used_at < wanted.at - %s::interval
        ORDER BY id FOR UPDATE OF known
    )
    UPDATE keys_apikey SET last_used_at = due.at FROM due WHERE keys_apikey.id = due.id
"""


def note_used(last_used: Mapping[str, datetime]) -> None:
    """Note when keys were last used, at most once a minute each; in the order of their ids."""
    if last_used:
        with bound_cursor() as cursor:
            cursor.execute(_USED_SQL, [list(last_used), list(last_used.values()), LAST_USED_STEP])
