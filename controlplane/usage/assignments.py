"""By which price list a tenant pays from which day on. Holds for everything that is in no closed statement."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any, TypedDict
from zoneinfo import ZoneInfo

from django.db.models import Q, QuerySet
from typing_extensions import Unpack

from controlplane.audit.actions import record
from controlplane.common.access import visible
from controlplane.common.actor import Actor
from controlplane.common.clock import utc_now
from controlplane.common.errors import Conflict, Invalid
from controlplane.common.use_case import use_case
from controlplane.common.validation import Checks, get_or_not_found, lock_version, without_nul
from controlplane.common.zones import day_start, find_zone
from controlplane.tenants.models import Tenant
from controlplane.tenants.queries import find_tenant, live_tenants, tenants
from controlplane.usage.models import PriceAssignment, PriceList
from controlplane.usage.prices import PRICE_DAYS

ALWAYS = PRICE_DAYS[0]
"""The day from which a list holds for everything: nothing was booked before."""


class AssignmentChanges(TypedDict, total=False):
    price_list: str | None
    managed_by: str


def assignments(*, actor: Actor, tenant: str = "", price_list: str = "") -> QuerySet[PriceAssignment]:
    """Of tenants that are there still; narrowed to a tenant and a list by id or name."""
    rows = PriceAssignment.objects.select_related("tenant", "price_list").filter(tenant__deleted_at=None)
    if tenant := without_nul(tenant):
        rows = rows.filter(Q(tenant_id=tenant) | Q(tenant__slug=tenant))
    if price_list := without_nul(price_list):
        rows = rows.filter(Q(price_list_id=price_list) | Q(price_list__name=price_list))
    return visible(rows, actor=actor).order_by("-id")


def assignment_of(*, actor: Actor, tenant_id: str) -> PriceAssignment | None:
    """What a tenant pays by at present."""
    tenant = get_or_not_found(tenants(actor=actor), "tenant", tenant_id)
    rows = assignments(actor=actor).filter(tenant=tenant, from_at__lte=utc_now())
    return rows.order_by("-from_at").first()


def _find_list(reference: str | None) -> PriceList | None:
    """The list of this id or name, None for none.

    Raises:
        Invalid: there is no such list.
    """
    if reference is None:
        return None
    named = without_nul(reference)
    row = PriceList.objects.filter(Q(pk=named) | Q(name=named)).first()
    if row is None:
        raise Invalid({"price_list": f"no price list {reference!r}"})
    return row


def _told(rows: Sequence[PriceAssignment]) -> dict[str, str | None]:
    return {row.valid_from.isoformat(): row.price_list.name if row.price_list else None for row in rows}


class _Change:
    """One tenant's assignments, locked through the tenant; ``done`` checks the sequence and writes the audit entry."""

    def __init__(self, actor: Actor, tenant: Tenant) -> None:
        self.actor = actor
        self.tenant = Tenant.objects.select_for_update().get(pk=tenant.pk)
        self._before = _told(self.rows())

    def rows(self) -> list[PriceAssignment]:
        rows = PriceAssignment.objects.select_related("price_list").filter(tenant=self.tenant)
        return list(rows.order_by("from_at"))

    def add(self, price_list: PriceList | None, valid_from: date, managed_by: str = "") -> PriceAssignment:
        checks = Checks()
        checks.manager(managed_by)
        if not PRICE_DAYS[0] <= valid_from <= PRICE_DAYS[1]:
            checks.add("valid_from", f"must be from {PRICE_DAYS[0]} to {PRICE_DAYS[1]}, not {valid_from}")
        checks.done()
        zone = find_zone(self.tenant.timezone) or ZoneInfo("UTC")
        return PriceAssignment.objects.create(
            tenant=self.tenant, price_list=price_list, valid_from=valid_from, from_at=day_start(valid_from, zone),
            managed_by=managed_by,
        )  # fmt: skip

    def done(self) -> None:
        """A statement has one currency, so another one begins with a month.

        Raises:
            Invalid
        """
        rows = self.rows()
        currency = ""
        for row in rows:
            if row.price_list is None:
                continue
            if currency and row.price_list.currency != currency and row.valid_from.day != 1:
                raise Invalid(
                    {
                        "valid_from": f"{row.valid_from} is no first of a month, and prices change from {currency} to "
                        f"{row.price_list.currency}: a statement has one currency"
                    }
                )
            currency = row.price_list.currency
        after = _told(rows)
        if after != self._before:
            record(
                actor=self.actor, action="price_list.assigned", object_type="tenant", object_id=self.tenant.id,
                tenant=self.tenant.id, before={"price_lists": self._before}, after={"price_lists": after},
            )  # fmt: skip


@use_case()
def assign_price_list(
    *, actor: Actor, tenant_id: str, price_list: str | None, valid_from: date | None = None
) -> PriceAssignment | None:
    """Let a tenant pay by the list of this id or name from a day of its time zone on; a list of None: by none.

    Without ``valid_from`` it is the only one and holds for everything: all other assignments go.

    Returns:
        The assignment; None where nothing is assigned any more.
    """
    change = _Change(actor, get_or_not_found(tenants(actor=actor), "tenant", tenant_id))
    row = _find_list(price_list)
    there = PriceAssignment.objects.filter(tenant=change.tenant)
    found = there.filter(valid_from=valid_from or ALWAYS).first()
    if valid_from is None:
        there.exclude(pk=found.pk if found and row else None).delete()
        if row is None:
            change.done()
            return None
    if found is None:
        found = change.add(row, valid_from or ALWAYS)
    elif found.price_list_id != (row.pk if row else None):
        found.price_list = row
        found.version += 1
        found.save()
    change.done()
    return found


@use_case()
def create_assignment(
    *, actor: Actor, tenant: str, price_list: str | None, valid_from: date = ALWAYS, managed_by: str = ""
) -> PriceAssignment:
    """A further assignment.

    Args:
        tenant: id or short name. managed_by: as of ``Managed``.

    Raises:
        Conflict: the tenant has one of that day.
    """
    found = find_tenant(tenant, actor=actor)
    if found is None:
        raise Invalid({"tenant": f"no tenant {tenant!r}"})
    change = _Change(actor, found)
    if PriceAssignment.objects.filter(tenant=found, valid_from=valid_from).exists():
        raise Conflict(f"{found.slug} has an assignment from {valid_from} on already")
    row = change.add(_find_list(price_list), valid_from, managed_by)
    change.done()
    return row


def _locked(actor: Actor, assignment_id: str, expected_version: int | None) -> tuple[_Change, PriceAssignment]:
    row = get_or_not_found(assignments(actor=actor), "price assignment", assignment_id)
    change = _Change(actor, row.tenant)
    rows = PriceAssignment.objects.filter(tenant__in=live_tenants())
    return change, lock_version(rows, "price assignment", assignment_id, expected_version)


@use_case()
def update_assignment(
    *, actor: Actor, assignment_id: str, expected_version: int | None = None, **changes: Unpack[AssignmentChanges]
) -> PriceAssignment:
    change, row = _locked(actor, assignment_id, expected_version)
    before: tuple[Any, ...] = (row.price_list_id, row.managed_by)
    if "price_list" in changes:
        row.price_list = _find_list(changes["price_list"])
    row.managed_by = changes.get("managed_by", row.managed_by)
    checks = Checks()
    checks.manager(row.managed_by)
    checks.done()
    if before != (row.price_list_id, row.managed_by):
        row.version += 1
        row.save()
    change.done()
    return row


@use_case()
def remove_assignment(*, actor: Actor, assignment_id: str, expected_version: int | None = None) -> None:
    """Take an assignment away: the one before it holds on."""
    change, row = _locked(actor, assignment_id, expected_version)
    row.delete()
    change.done()
