"""The one place that turns an actor into what they may see: a row limits itself to the tenant that ``TENANT_OF`` names.

What is not listed there belongs to the platform; for people of a tenant it does not exist.
"""

from __future__ import annotations

from typing import TypeVar

from django.db.models import Model, QuerySet

from controlplane.common.actor import Actor, Scope
from controlplane.common.errors import NotFound
from controlplane.common.validation import without_nul

M = TypeVar("M", bound=Model)

TENANT_OF = {
    "tenants.Tenant": "id",
    "keys.ApiKey": "tenant_id",
    "accounts.User": "tenant_id",
    "accounts.Invitation": "tenant_id",
    "accounts.OperatorToken": "user__tenant_id",
    "fleet.Cancellation": "tenant",
    "usage.UsageEvent": "tenant",
    "usage.Statement": "tenant",
}
"""By model: the field that holds the id of the tenant its rows belong to."""
_PEOPLE = ("accounts.User", "accounts.Invitation")
"""What who manages members may read for that."""


def visible(rows: QuerySet[M], *, actor: Actor) -> QuerySet[M]:
    """Those of ``rows`` the actor may see.

    Raises:
        NotFound, NotAllowed: none of this kind.
    """
    field = TENANT_OF.get(rows.model._meta.label)
    if field is None:
        actor.require(Scope.READ)
        return rows
    if rows.model._meta.label not in _PEOPLE or not actor.holds(Scope.MEMBERS):
        actor.require(Scope.TENANT_READ)
    return rows if actor.tenant is None else rows.filter(**{field: actor.tenant})


def visible_tenant(wanted: str, *, actor: Actor) -> str:
    """The tenant to narrow a list or a report to: what was asked for, "" for all, else the actor's own.

    Raises:
        NotFound: another one than the actor's. NotAllowed: none at all.
    """
    actor.require(Scope.TENANT_READ)
    wanted = without_nul(wanted)
    if actor.tenant is None:
        return wanted
    if wanted not in ("", actor.tenant):
        raise NotFound(f"no tenant {wanted!r}")
    return actor.tenant
