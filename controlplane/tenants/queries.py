"""Reads of tenants. One function per kind of object gives access; nothing else queries by bare id."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from django.db.models import (
    Case,
    Count,
    Max,
    Min,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    TextField,
    Value,
    When,
)
from django.db.models.expressions import Combinable
from django.db.models.functions import Cast, Coalesce, Lower

from controlplane.common.access import visible
from controlplane.common.actor import Actor
from controlplane.common.errors import Invalid
from controlplane.common.limits import LIMITS, limits_record
from controlplane.common.sorting import SortKey
from controlplane.common.validation import without_nul
from controlplane.tenants.models import Group, Tenant, TenantState, TenantTier
from router_ext.wire.controlplane import GroupRecord, TenantRecord


def _n_limits() -> Combinable:
    """How many limits a tenant has."""
    parts: list[Combinable] = [
        Case(When(**{f"{name}__isnull": False}, then=Value(1)), default=Value(0)) for name in LIMITS
    ]
    return functools.reduce(lambda left, right: left + right, parts)


_N_TIERS = Subquery(
    TenantTier.objects.filter(tenant=OuterRef("pk")).values("tenant").annotate(n=Count("*")).values("n")
)
SORTED_BY = {
    "name": SortKey(by=Lower("name")),
    "state": SortKey(by="state"),
    "weight": SortKey(by="weight", is_text=False),
    "group": SortKey(by=Coalesce("group__name", Value(""))),
    "tiers": SortKey(by=Coalesce(_N_TIERS, 0), is_text=False),
    "default_tier": SortKey(by=Coalesce("default_tier__name", Value(""))),
    "waiting": SortKey(by="max_queued", is_text=False),
    "limits": SortKey(by=_n_limits(), is_text=False),
    "created": SortKey(by=Cast("created_at", TextField())),
}
"""What ``tenants`` may be sorted by."""


def tenants(*, actor: Actor, search: str = "", state: str = "") -> QuerySet[Tenant]:
    """Tenants with their tiers.

    Args:
        search: an id, or a part of the name or short name; "" for all. state: "" for any.

    Raises:
        Invalid: no such state.
    """
    if state and state not in TenantState.values:
        raise Invalid({"state": f"one of {', '.join(TenantState.values)}, not {state[:40]!r}"})
    rows = visible(live_tenants(), actor=actor).select_related("default_tier", "group").prefetch_related("tiers")
    if search:
        rows = rows.filter(Q(name__icontains=search) | Q(slug__icontains=search) | Q(pk=search))
    return (rows.filter(state=state) if state else rows).order_by("slug")


def live_tenants() -> QuerySet[Tenant]:
    """Those that are not deleted. For use cases."""
    return Tenant.objects.filter(deleted_at=None)


def find_tenant(reference: str, *, actor: Actor) -> Tenant | None:
    """The tenant of this id or short name that the actor may see. For use cases."""
    named = Q(pk=without_nul(reference)) | Q(slug=without_nul(reference))
    return visible(live_tenants(), actor=actor).filter(named).first()


def booked_tenant(word: str, *, actor: Actor) -> str | None:
    """Id of the tenant of this id, short name or, if no other has it, name; of those in the books deleted ones too."""
    word = without_nul(word)
    rows = visible(Tenant.objects.all(), actor=actor).filter(Q(pk=word) | Q(slug=word) | Q(name__iexact=word))
    found = list(rows.values_list("pk", "slug")[:10])
    exact = [pk for pk, slug in found if word in (pk, slug)] or [pk for pk, _ in found]
    return exact[0] if len(exact) == 1 else None


def groups(*, actor: Actor) -> QuerySet[Group]:
    """All fairness groups."""
    return visible(Group.objects.order_by("name"), actor=actor)


def find_group(name: str) -> Group | None:
    """The group of this name. For use cases."""
    return None if "\0" in name else Group.objects.filter(name=name).first()


def tier_names(tenant: Tenant) -> list[str]:
    """Names of the allowed tiers, by rank."""
    return [t.name for t in sorted(tenant.tiers.all(), key=lambda t: (t.rank, t.name))]


def tenant_names() -> dict[str, str]:
    """Name by id, of deleted ones as well, for pages and reports that show what the books recorded."""
    return dict(Tenant.objects.values_list("id", "name"))


def names_of(tenants: Collection[str]) -> dict[str, str]:
    """The same of these alone, for pages that show some of many."""
    return dict(Tenant.objects.filter(id__in=tenants).values_list("id", "name")) if tenants else {}


def tenant_zones() -> dict[str, list[str]]:
    """Ids of tenants by time zone, of zones other than UTC."""
    zones: dict[str, list[str]] = defaultdict(list)
    for tenant, zone in Tenant.objects.exclude(timezone="UTC").values_list("id", "timezone"):
        zones[zone].append(tenant)
    return zones


class Weight(NamedTuple):
    """A tenant as it competes: its weight among all, or in its fairness group."""

    tenant: str
    name: str
    slug: str
    weight: float
    group: str | None


def weights(tenants: Iterable[str] | None = None, *, after: str = "", limit: int | None = None) -> list[Weight]:
    """Those of these ids, by short name; None: of all, ``limit`` of them after the short name ``after``."""
    rows = live_tenants().order_by("slug")
    rows = rows.filter(slug__gt=after) if tenants is None else rows.filter(id__in=list(tenants))
    return list(map(Weight._make, rows.values_list("id", "name", "slug", "weight", "group__name")[:limit]))


def extreme_weights() -> list[tuple[str | None, float]]:
    """By fairness group, None for tenants without one: the least weight and the greatest."""
    rows = live_tenants().values_list("group__name").annotate(least=Min("weight"), greatest=Max("weight")).order_by()
    return [(group, weight) for group, *both in rows for weight in both]


def group_records() -> list[GroupRecord]:
    """The fairness groups of a snapshot."""
    rows = Group.objects.order_by("name").values_list("name", "weight")
    return [GroupRecord(group=name, weight=weight) for name, weight in rows]


def tenant_records() -> list[TenantRecord]:
    """The tenants of a snapshot, from plain columns: a change must reach routers whatever the number of tenants."""
    allowed: dict[str, list[str]] = defaultdict(list)
    links = TenantTier.objects.order_by("tier__rank", "tier__name")
    for tenant, tier in links.values_list("tenant_id", "tier__name"):
        allowed[tenant].append(tier)
    rows = live_tenants().order_by("id")
    return [
        TenantRecord(
            tenant=tenant,
            name=name,
            weight=weight,
            state=state,
            tiers=allowed.get(tenant, []),
            default_tier=default_tier,
            max_queued=max_queued,
            group=group,
            limits=limits_record(limits),
        )
        for tenant, name, weight, state, default_tier, max_queued, group, *limits in rows.values_list(
            "id", "name", "weight", "state", "default_tier__name", "max_queued", "group__name", *LIMITS
        )
    ]
