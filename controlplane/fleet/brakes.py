"""What is stopped at once: a backend, one request, a pool's grammars. (A tenant: ``tenants.actions``.)

Each is configuration, so routers have it in force with the next revision, keep it over a restart, and it is audited
with its reason. All but a cancelled request can be taken back; doing again what is done already changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from controlplane.audit.actions import record, save_change
from controlplane.common.access import visible, visible_tenant
from controlplane.common.actor import Actor, Scope, system_actor
from controlplane.common.clock import from_us, utc_now
from controlplane.common.errors import Conflict, Invalid
from controlplane.common.use_case import mark_config_changed, use_case
from controlplane.common.validation import checked_reason, get_or_not_found, lock_version
from controlplane.fleet.actions import backend_fields, pool_fields
from controlplane.fleet.models import Backend, Cancellation, Pool
from controlplane.fleet.queries import backends, live_heartbeats
from router_ext.wire.controlplane import LiveRequest, OwnCancellation

CANCELLED_FOR = timedelta(minutes=10)
"""How long a cancellation stays in the snapshot: routers that were cut off for a while learn of it as well."""

MAX_CANCELLATIONS = 1_000
"""In force at once, of operators and of all tenants each. More than that is a tenant to stop; every router reads all of
them with each revision."""

MAX_OF_TENANT = 20
"""Of one tenant's own: each gives a revision."""

MAX_ID = 128
"""Characters of a request id, as routers take it from clients."""


@use_case()
def drain_backend(*, actor: Actor, backend_id: str, reason: str, expected_version: int | None = None) -> Backend:
    """Start nothing new on a backend, and let what runs there go on elsewhere; what cannot be resumed finishes."""
    return _set_drain(actor, backend_id, expected_version, is_on=True, reason=checked_reason(reason))


@use_case()
def uncordon_backend(
    *, actor: Actor, backend_id: str, reason: str = "", expected_version: int | None = None
) -> Backend:
    """Give a cordoned or drained backend work again."""
    said = checked_reason(reason) if reason else ""
    return _set_drain(actor, backend_id, expected_version, is_on=False, reason=said)


def _set_drain(actor: Actor, backend_id: str, expected_version: int | None, *, is_on: bool, reason: str) -> Backend:
    backend = lock_version(Backend.objects.all(), "backend", backend_id, expected_version)
    if (backend.is_cordoned, backend.is_drained) == (is_on, is_on):
        return backend
    before = backend_fields(backend)
    backend.is_cordoned = backend.is_drained = is_on
    how = "drained" if is_on else "uncordoned"
    save_change(
        backend,
        actor=actor,
        action=f"backend.{how}",
        before=before,
        after={**backend_fields(backend), "reason": reason},
        publish=f"backend {backend.name} {how}",
    )
    return backend


@use_case()
def stop_grammars(*, actor: Actor, pool_id: str, reason: str, expected_version: int | None = None) -> Pool:
    """End all requests of a pool that have a grammar, a response format or tools, and refuse more of them."""
    return _set_grammars(actor, pool_id, expected_version, is_on=False, reason=checked_reason(reason))


@use_case()
def allow_grammars(*, actor: Actor, pool_id: str, reason: str = "", expected_version: int | None = None) -> Pool:
    """Let a pool take grammars again."""
    said = checked_reason(reason) if reason else ""
    return _set_grammars(actor, pool_id, expected_version, is_on=True, reason=said)


def _set_grammars(actor: Actor, pool_id: str, expected_version: int | None, *, is_on: bool, reason: str) -> Pool:
    pool = lock_version(Pool.objects.all(), "pool", pool_id, expected_version)
    if pool.takes_grammars is is_on:
        return pool
    before = pool_fields(pool)
    pool.takes_grammars = is_on
    how = "allowed" if is_on else "stopped"
    save_change(
        pool,
        actor=actor,
        action=f"pool.grammars_{how}",
        before=before,
        after={**pool_fields(pool), "reason": reason},
        publish=f"grammars of pool {pool.name} {how}",
    )
    return pool


@use_case(scope=Scope.TENANT_WRITE)
def cancel_request(*, actor: Actor, request_id: str, reason: str) -> Cancellation:
    """End a request on whichever router it is, waiting or running. What has ended, or never was, is not told apart.

    An operator ends whosoever's; a tenant's admin ends those of the own tenant, and no other of the same id: routers
    compare the tenant.

    Args:
        request_id: what its client got as ``x-request-id``, or the id of its event. All requests of that id end.

    Raises:
        Invalid: no id that a request could have. Conflict: ``MAX_CANCELLATIONS``, or ``MAX_OF_TENANT``, are in force.
    """
    if not 1 <= len(request_id) <= MAX_ID or not request_id.isascii() or not request_id.isprintable():
        raise Invalid({"request": f"1 to {MAX_ID} printable ASCII characters, not {request_id[:40]!r}"})
    said = checked_reason(reason)
    tenant = actor.tenant or ""
    if tenant:
        if _in_force().filter(tenant=tenant).count() >= MAX_OF_TENANT:
            raise Conflict(f"{MAX_OF_TENANT} requests of this tenant were cancelled within ten minutes; wait a little")
        in_force = _in_force().exclude(tenant="")
    else:
        in_force = _in_force().filter(tenant="")
    if in_force.count() >= MAX_CANCELLATIONS:
        raise Conflict(f"{MAX_CANCELLATIONS:,} requests were cancelled within ten minutes; stop their tenants instead")
    row = Cancellation.objects.create(request=request_id, tenant=tenant, reason=said, cancelled_by=actor.label)
    record(
        actor=actor,
        action="request.cancelled",
        object_type="request",
        object_id=request_id,
        tenant=tenant,
        after={"request": request_id, "reason": said},
    )
    mark_config_changed(f"request {request_id} cancelled")
    return row


def _in_force(*, now: datetime | None = None) -> Any:
    return Cancellation.objects.filter(created_at__gt=(now or utc_now()) - CANCELLED_FOR).order_by("id")


def cancellations(*, actor: Actor) -> Any:
    """Those in force, newest first; for people of a tenant its own."""
    return visible(_in_force(), actor=actor).order_by("-id")


def cancelled_ids() -> list[str]:
    """For the snapshot: an id stands there as often as it was cancelled, so that every time gives a revision."""
    return list(_in_force().filter(tenant="").values_list("request", flat=True))


def own_cancelled() -> list[OwnCancellation]:
    """As ``cancelled_ids``, what tenants said of their own."""
    rows = _in_force().exclude(tenant="").values_list("tenant", "request")
    return [OwnCancellation(tenant=tenant, request=request) for tenant, request in rows]


def forget_cancelled(*, now: datetime | None = None) -> int:
    """Take cancellations that are no longer in force out of the table and the snapshot; returns how many."""
    old = Cancellation.objects.filter(created_at__lte=(now or utc_now()) - CANCELLED_FOR)
    return _forget(actor=system_actor("schedule"), rows=old) if old.exists() else 0


@use_case()
def _forget(*, actor: Actor, rows: Any) -> int:
    n_deleted, _ = rows.delete()
    mark_config_changed("cancellations of ten minutes ago forgotten")
    return int(n_deleted)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """A request that waits or runs on a router."""

    router: str
    pool: str
    live: LiveRequest
    arrived_at: datetime

    @property
    def state(self) -> str:
        return "queued" if self.live.backend is None else "running"

    def is_called(self, request_id: str) -> bool:
        """Whether this is what its client got as ``x-request-id``, or the id of its event."""
        return request_id in (self.live.request, self.live.event)


def under_way(*, actor: Actor) -> list[UnderWay]:
    """Requests the actor may see that wait or run longest, of 20 of each pool and router, by the last heartbeats."""
    tenant = visible_tenant("", actor=actor)
    found = [
        UnderWay(router=instance, pool=pool.pool, live=live, arrived_at=from_us(live.arrived_at_us))
        for instance, beat in live_heartbeats().items()
        for pool in beat.pools
        for live in pool.oldest
        if tenant in ("", live.tenant)
    ]
    return sorted(found, key=lambda each: each.live.arrived_at_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningThere:
    """What one router says of a backend. ``state``: as of ``BackendState``."""

    router: str
    state: str
    running: int
    reserved_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """What runs on a backend. ``is_empty``: nothing does, and no router would start anything; None: none reports."""

    backend: Backend
    running: int
    is_empty: bool | None
    routers: list[RunningThere]


def occupancy(*, actor: Actor, backend_id: str) -> Occupancy:
    """What still runs on a backend, by the heartbeats of the last 15 seconds."""
    backend = get_or_not_found(backends(actor=actor), "backend", backend_id)
    told = [
        RunningThere(router=instance, state=b.state, running=b.running, reserved_tokens=b.reserved_tokens)
        for instance, beat in sorted(live_heartbeats().items())
        for pool in beat.pools
        for b in pool.backends
        if b.backend == backend.id
    ]
    running = sum(each.running for each in told)
    # A router that says "up" has not applied the drain yet: it may start something.
    is_idle = running == 0 and all(each.state != "up" for each in told)
    return Occupancy(
        backend=backend,
        running=running,
        is_empty=(backend.is_cordoned and is_idle) if told else None,
        routers=told,
    )
