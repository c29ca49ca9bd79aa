"""Use cases of routers: credentials, and the heartbeats that come in under them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import structlog
from django.conf import settings
from django.db import transaction

from controlplane.audit.actions import record, save_change
from controlplane.common import secrets
from controlplane.common.actor import Actor
from controlplane.common.clock import from_us, utc_now
from controlplane.common.errors import Conflict
from controlplane.common.use_case import use_case
from controlplane.common.validation import Checks, lock_version
from controlplane.common.valkey import UNAVAILABLE, valkey
from controlplane.fleet.hazards import take_hazards
from controlplane.fleet.live import HISTORY_S, slot_bodies
from controlplane.fleet.models import AppliedRevision, Router, RouterStatus
from controlplane.fleet.queries import HEARTBEAT_KEY
from router_ext.wire.controlplane import Heartbeat, MovedKey

logger = structlog.get_logger(__name__)

HEARTBEAT_TTL_S = 15
SLOT_TTL_S = HISTORY_S + 60
_STATUS_EVERY = timedelta(seconds=5)
_KEPT_APPLICATIONS = 200


def router_fields(router: Router) -> dict[str, Any]:
    return {"name": router.name, "revoked_at": router.revoked_at}


@use_case()
def create_router(*, actor: Actor, name: str) -> tuple[Router, str]:
    """A router's credential and its token, which is shown once."""
    checks = Checks()
    name = checks.text("name", name, 100)
    checks.done()
    if Router.objects.filter(name=name).exists():
        raise Conflict(f"a router {name!r} exists")
    token, _ = secrets.generate_token("flr")
    version = settings.KEY_PEPPER_VERSION
    router = Router.objects.create(name=name, token_digest=secrets.digest(token), pepper_version=version)
    record(actor=actor, action="router.created", object_type="router", object_id=router.id, after=router_fields(router))
    return router, token


@use_case()
def renew_router_token(*, actor: Actor, router_id: str, expected_version: int | None = None) -> tuple[Router, str]:
    """A new token in place of the present one, which ends at once; also reopens a revoked router."""
    router = lock_version(Router.objects.all(), "router", router_id, expected_version)
    before = router_fields(router)
    token, _ = secrets.generate_token("flr")
    router.token_digest, router.pepper_version = secrets.digest(token), settings.KEY_PEPPER_VERSION
    router.revoked_at = None
    router.version += 1
    router.save()
    record(
        actor=actor,
        action="router.token_renewed",
        object_type="router",
        object_id=router.id,
        before=before,
        after=router_fields(router),
    )
    return router, token


@use_case()
def revoke_router(*, actor: Actor, router_id: str, expected_version: int | None = None) -> Router:
    """Refuse this router's calls from now on; revoking again changes nothing."""
    router = lock_version(Router.objects.all(), "router", router_id, expected_version)
    if router.revoked_at is None:
        before = router_fields(router)
        router.revoked_at = utc_now()
        save_change(router, actor=actor, action="router.revoked", before=before, after=router_fields(router))
    return router


def authenticate_router(header: str) -> Router | None:
    """The router of an ``Authorization`` header, None for anything but a live router token."""
    scheme, _, token = header.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not secrets.is_token(token, "flr"):
        return None
    return secrets.holder(Router.objects.filter(revoked_at__isnull=True), token, "token_digest")


_takers: list[Callable[[Router, Sequence[MovedKey]], object]] = []


def on_moved_keys(taker: Callable[[Router, Sequence[MovedKey]], object]) -> None:
    """Register what takes digests under a newer pepper that a router has told."""
    if taker not in _takers:
        _takers.append(taker)


def take_heartbeat(*, router: Router, heartbeat: Heartbeat) -> None:
    """Keep the live picture and what it tells of the last minutes in Valkey, a summary row that is written on change or
    every five seconds, hazards, and digests under a newer pepper.
    """
    if heartbeat.moved_keys:
        for taker in _takers:
            taker(router, heartbeat.moved_keys)
        # Digests belong in the database alone.
        heartbeat = msgspec.structs.replace(heartbeat, moved_keys=[])
    try:
        with valkey().pipeline(transaction=False) as pipeline:
            pipeline.set(HEARTBEAT_KEY + heartbeat.router, msgspec.json.encode(heartbeat), ex=HEARTBEAT_TTL_S)
            for key, body in slot_bodies(heartbeat).items():
                pipeline.set(key, body, ex=SLOT_TTL_S, nx=True)  # heartbeats repeat what is over
            pipeline.execute()
    except UNAVAILABLE:
        logger.warning("heartbeat.valkey_unavailable")
    take_hazards(heartbeat)
    last = RouterStatus.objects.filter(pk=heartbeat.router).first()
    instant = utc_now()
    is_changed = (
        last is None
        or last.router_id != router.id
        or last.applied_revision != heartbeat.applied_revision
        or last.refused_revision != heartbeat.refused_revision
        or last.is_draining != heartbeat.is_draining
    )
    if not is_changed and last is not None and instant - last.seen_at < _STATUS_EVERY:
        return
    with transaction.atomic():
        status, _ = RouterStatus.objects.update_or_create(
            instance=heartbeat.router,
            defaults={
                "router": router,
                "program_version": heartbeat.version,
                "address": heartbeat.address,
                "applied_revision": heartbeat.applied_revision,
                "applied_at": from_us(heartbeat.applied_at_us),
                "refused_revision": heartbeat.refused_revision,
                "refused_reason": heartbeat.refused_reason or "",
                "spool_events": heartbeat.spool_events,
                "spool_bytes": heartbeat.spool_bytes,
                "is_draining": heartbeat.is_draining,
                "seen_at": instant,
            },
        )
        if not is_changed:
            return
        outcomes = [AppliedRevision(instance=status, revision=heartbeat.applied_revision, at=status.applied_at)]
        if heartbeat.refused_revision is not None:
            outcomes.append(
                AppliedRevision(
                    instance=status,
                    revision=heartbeat.refused_revision,
                    at=instant,
                    refused_reason=heartbeat.refused_reason or "refused",
                )
            )
        AppliedRevision.objects.bulk_create(outcomes, ignore_conflicts=True)
        oldest = AppliedRevision.objects.filter(instance=status).order_by("-revision")[_KEPT_APPLICATIONS:]
        AppliedRevision.objects.filter(pk__in=list(oldest.values_list("pk", flat=True))).delete()
    if heartbeat.refused_revision is not None:
        logger.warning(
            "revision.refused",
            router=heartbeat.router,
            revision=heartbeat.refused_revision,
            reason=heartbeat.refused_reason,
        )
