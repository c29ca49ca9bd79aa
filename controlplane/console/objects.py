"""What ids of the audit log stand for: the name of each object, and its page where it has one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import BooleanField, Case, CharField, F, Model, Q, Value, When
from django.db.models.functions import Cast
from django.urls import reverse

from controlplane.accounts.models import Invitation, OperatorToken, User
from controlplane.audit.models import AuditEntry
from controlplane.common.access import visible
from controlplane.common.actor import Actor
from controlplane.common.models import BackgroundJob
from controlplane.fleet.models import Backend, Pool, Router
from controlplane.keys.models import ApiKey
from controlplane.tenants.models import Group, Tenant
from controlplane.tiers.models import Tier
from controlplane.training.models import Job
from controlplane.usage.models import PriceList

MAX_TOGETHER = 3
"""Objects of an action on many that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """``parent``: field with the id of what its address begins with. ``is_there``: whose page there still is."""

    models: Sequence[type[Model]]
    name: str = "name"
    page: str = ""
    parent: str = ""
    is_there: Q | None = None


_KINDS = {
    "tenant": _Kind(models=[Tenant], page="console:tenant", is_there=Q(deleted_at=None)),
    "key": _Kind(models=[ApiKey], page="console:key", parent="tenant_id", is_there=Q(tenant__deleted_at=None)),
    "group": _Kind(models=[Group], page="console:group"),
    "tier": _Kind(models=[Tier], page="console:tier"),
    "pool": _Kind(models=[Pool], page="console:pool"),
    "backend": _Kind(models=[Backend], page="console:backend", parent="pool_id"),
    "price_list": _Kind(models=[PriceList], page="console:price_list"),
    "user": _Kind(models=[User], name="email", page="console:member"),
    "job": _Kind(models=[BackgroundJob, Job], name="kind", page="console:job"),
    "invitation": _Kind(models=[Invitation], name="email"),
    "token": _Kind(models=[OperatorToken]),
    "router": _Kind(models=[Router]),
}
_NAMES = ("name", "email", "kind", "slug")
"""Fields of an entry that name an object that is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """An object. ``name``: its id where nothing else is known; ``url``: "" without a page."""

    id: str
    name: str
    url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """Of one entry: what was changed, ``n_more`` left out; whose it is, where that says more."""

    shown: Sequence[Named]
    n_more: int
    tenant: Named | None


def objects_of(entries: Sequence[AuditEntry], *, actor: Actor) -> list[Objects]:
    """The objects of each entry, by one query for all of them."""
    wanted: dict[str, set[str]] = defaultdict(set)
    for entry in entries:
        wanted[entry.object_type].update(entry.bulk[:MAX_TOGETHER] or [entry.object_id])
        wanted["tenant"].add(entry.tenant)
    known = _known(wanted, actor)
    return [_objects(entry, known) for entry in entries]


def _known(wanted: dict[str, set[str]], actor: Actor) -> dict[tuple[str, str], Named]:
    queries = [
        visible(model._default_manager.filter(pk__in=ids), actor=actor)
        .order_by()
        .annotate(
            _kind=Value(kind, output_field=CharField()),
            _name=Cast(F(_KINDS[kind].name), CharField()),
            _parent=F(_KINDS[kind].parent) if _KINDS[kind].parent else Value("", output_field=CharField()),
            _is_there=_flag(_KINDS[kind].is_there),
        )
        .values_list("_kind", "pk", "_name", "_parent", "_is_there")
        for kind, ids in wanted.items()
        if kind in _KINDS and ids != {""}
        for model in _KINDS[kind].models
    ]
    found: Iterable[Any] = queries[0].union(*queries[1:], all=True) if queries else []
    known = {}
    for kind, pk, name, parent, is_there in found:
        page = _KINDS[kind].page if is_there else ""
        url = reverse(page, args=[parent, pk] if parent else [pk]) if page else ""
        known[kind, pk] = Named(id=pk, name=name, url=url)
    return known


def _flag(condition: Q | None) -> Any:
    if condition is None:
        return Value(True, output_field=BooleanField())
    return Case(When(condition, then=Value(True)), default=Value(False), output_field=BooleanField())


def _objects(entry: AuditEntry, known: dict[tuple[str, str], Named]) -> Objects:
    ids = entry.bulk[:MAX_TOGETHER] or [entry.object_id]
    said = {**(entry.before or {}), **(entry.after or {})} if not entry.bulk else {}
    told = next((str(said[name]) for name in _NAMES if said.get(name)), "")
    shown = [known.get((entry.object_type, each)) or Named(id=each, name=told or each) for each in ids]
    whose = known.get(("tenant", entry.tenant)) if entry.object_type != "tenant" and entry.tenant else None
    return Objects(shown=shown, n_more=max(0, len(entry.bulk) - MAX_TOGETHER), tenant=whose)
