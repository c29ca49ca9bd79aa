"""Requests under which backends fell: told by routers' heartbeats, kept 90 days, seen to by operators."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import structlog
from django.db.models import QuerySet

from controlplane.audit.actions import save_change
from controlplane.common.access import visible
from controlplane.common.actor import Actor
from controlplane.common.clock import from_us, utc_now
from controlplane.common.use_case import use_case
from controlplane.common.validation import checked_reason, lock_version, without_nul
from controlplane.fleet.models import Backend, Hazard
from router_ext.wire.controlplane import Heartbeat

logger = structlog.get_logger(__name__)

KEPT = timedelta(days=90)
FILTERS = ("tenant", "key", "kind", "pool", "backend", "request", "digest")


def take_hazards(heartbeat: Heartbeat) -> int:
    """Write down the hazards of a heartbeat that are not known yet; returns how many.

    Routers tell each in many heartbeats, as long as they run: what is older than ``KEPT`` stays forgotten.

    Cost: no query without hazards, one where all are known.

    Raises:
        OverflowError, DataError: a value that no row can hold.
    """
    oldest = utc_now() - KEPT
    told = {each.hazard: each for each in heartbeat.hazards if from_us(each.at_us) > oldest}
    if not told:
        return 0
    known = set(Hazard.objects.filter(pk__in=told).values_list("pk", flat=True))
    fresh = [each for hazard, each in told.items() if hazard not in known]
    if not fresh:
        return 0
    pools = dict(Backend.objects.filter(pk__in={each.backend for each in fresh}).values_list("id", "pool_id"))
    rows = [
        Hazard(
            id=each.hazard,
            at=from_us(each.at_us),
            kind=each.kind,
            router=heartbeat.router,
            pool=pools.get(each.backend, ""),
            backend=each.backend,
            tenant=each.tenant,
            key=each.key,
            request=each.request,
            digest=each.digest,
            refused_until=from_us(each.refused_until_us),
        )
        for each in fresh
    ]
    # Two heartbeats may tell of the same one at once.
    Hazard.objects.bulk_create(rows, ignore_conflicts=True)
    for row in rows:
        logger.warning("hazard.told", hazard=row.id, kind=row.kind, tenant=row.tenant, key=row.key, pool=row.pool)
    return len(rows)


def hazards(*, actor: Actor, is_open: bool | None = None, **given: str) -> QuerySet[Hazard]:
    """Hazards, newest first, narrowed by ``FILTERS``. ``is_open``: only those that nobody, or somebody, has seen to."""
    rows = visible(Hazard.objects.order_by("-id"), actor=actor)
    if is_open is not None:
        rows = rows.filter(resolved_at__isnull=is_open)
    return rows.filter(**{name: without_nul(value) for name, value in given.items() if without_nul(value)})


def n_open() -> int:
    """How many nobody has seen to; pages show it as an alarm."""
    return Hazard.objects.filter(resolved_at__isnull=True).count()


def hazard_fields(hazard: Hazard) -> dict[str, Any]:
    return {"resolved_at": hazard.resolved_at, "resolved_by": hazard.resolved_by, "note": hazard.note}


@use_case()
def resolve_hazard(*, actor: Actor, hazard_id: str, note: str, expected_version: int | None = None) -> Hazard:
    """Say that somebody has seen to it, and how. Routers go on refusing the request until its time is over."""
    said = checked_reason(note, "note")
    hazard = lock_version(Hazard.objects.all(), "hazard", hazard_id, expected_version)
    if hazard.resolved_at is not None:
        return hazard
    before = hazard_fields(hazard)
    hazard.resolved_at, hazard.resolved_by, hazard.note = utc_now(), actor.label, said
    save_change(
        hazard,
        actor=actor,
        action="hazard.resolved",
        tenant=hazard.tenant,
        before=before,
        after=hazard_fields(hazard),
    )
    return hazard


def forget_old_hazards(*, now: datetime | None = None) -> int:
    """Delete what is older than ``KEPT``, seen to or not; the audit log stays. Returns how many."""
    n_deleted, _ = Hazard.objects.filter(at__lt=(now or utc_now()) - KEPT).delete()
    return n_deleted
