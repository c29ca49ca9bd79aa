"""What is done to many tenants at once: one transaction, one audit entry with the list, one revision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from typing_extensions import Unpack

from controlplane.audit.actions import record
from controlplane.common.actor import Actor
from controlplane.common.clock import utc_now
from controlplane.common.errors import Invalid
from controlplane.common.use_case import mark_config_changed, use_case
from controlplane.common.validation import Checks, checked_reason
from controlplane.tenants.models import Tenant, TenantState, TenantTier
from controlplane.tenants.queries import live_tenants, tier_names
from controlplane.tiers.queries import find_tiers

MAX_BULK = 1_000


class BulkChange(TypedDict, total=False):
    """What is done to many tenants at once: the fields that are given."""

    state: str
    weight: float
    default_tier: str


@use_case()
def change_tenants(
    *, actor: Actor, tenant_ids: Sequence[str], reason: str = "", **change: Unpack[BulkChange]
) -> list[Tenant]:
    """Change the state, weight or default tier of many tenants: all of them or none, one audit entry, one revision.

    Args:
        tenant_ids: 1 to ``MAX_BULK``, each once. default_tier: becomes one of their tiers where it is not.

    Returns:
        Those that were not so already.
    """
    said = checked_reason(reason) if reason else ""
    if not 1 <= len(tenant_ids) <= MAX_BULK:
        raise Invalid({"tenants": f"1 to {MAX_BULK:,} ids, not {len(tenant_ids):,}"})
    if not change:
        raise Invalid({"": "say what to change: state, weight or default_tier"})
    wanted = set(tenant_ids)
    rows = live_tenants().select_related("default_tier", "group").prefetch_related("tiers")
    # In the order of ids, so that two such actions cannot wait for each other.
    tenants = list(
        rows.filter(pk__in=[i for i in wanted if "\0" not in i]).select_for_update(of=("self",)).order_by("id")
    )
    if unknown := sorted(wanted - {t.id for t in tenants}):
        raise Invalid({"tenants": f"no tenant {', '.join(map(repr, unknown[:10]))}"})
    checks = Checks()
    tier = None
    if "default_tier" in change:
        found, _ = find_tiers([change["default_tier"]])
        tier = found[0] if found else None
        if tier is None:
            checks.add("default_tier", f"unknown: {change['default_tier']!r}")
    checks.number("weight", change.get("weight"), 0.001, 10_000)
    if change.get("state", TenantState.ACTIVE) not in TenantState.values:
        checks.add("state", f"{change['state']!r} is not one of {', '.join(TenantState.values)}")
    checks.done()
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    changed = []
    for tenant in tenants:
        names = tier_names(tenant)
        old: dict[str, Any] = {
            "state": tenant.state, "weight": tenant.weight, "default_tier": tenant.default_tier_name, "tiers": names
        }  # fmt: skip
        new = {**old, **change, "tiers": names if tier is None or tier.name in names else [*names, tier.name]}
        if new == old:
            continue
        before[tenant.id] = {name: value for name, value in old.items() if value != new[name]}
        after[tenant.id] = {name: value for name, value in new.items() if value != old[name]}
        tenant.state = change.get("state", tenant.state)
        tenant.weight = change.get("weight", tenant.weight)
        tenant.default_tier = tier or tenant.default_tier
        tenant.version += 1
        tenant.updated_at = utc_now()
        changed.append(tenant)
    if not changed:
        return []
    if tier is not None:
        TenantTier.objects.bulk_create((TenantTier(tenant=t, tier=tier) for t in changed), ignore_conflicts=True)
    Tenant.objects.bulk_update(changed, ["state", "weight", "default_tier", "version", "updated_at"], batch_size=500)
    record(
        actor=actor,
        action="tenant.changed_together",
        object_type="tenant",
        object_id="",
        bulk=list(after),
        before=before,
        after={**after, **({"reason": said} if said else {})},
    )
    mark_config_changed(f"{len(changed)} tenants changed together")
    return changed
