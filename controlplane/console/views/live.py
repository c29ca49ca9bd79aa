"""What the routers are doing now: queues, shares, backends; refreshed every two seconds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_safe

from controlplane.common.actor import Actor
from controlplane.common.clock import utc_now
from controlplane.console import charts
from controlplane.console.frame import actor_of, of_tenants
from controlplane.fleet import queries as fleet_queries
from controlplane.fleet.models import Pool
from controlplane.rollout.queries import current_number
from controlplane.tenants import queries as tenant_queries
from controlplane.tenants.queries import Weighted
from controlplane.usage import queries as usage_queries
from controlplane.usage.models import UsageEvent
from router_ext.core.bounds import gpu_seconds
from router_ext.wire.controlplane import GroupState, Heartbeat, PoolState

MAX_TENANTS = 200
STALE_S = 25
"""The row of an instance is renewed every ten seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPicture:
    """One pool as one router sees it."""

    router: str
    name: str
    state: PoolState
    queued: list[tuple[str, int]]
    backends: list[dict[str, object]]
    tenants: list[dict[str, object]]
    groups: list[GroupState]
    shares: str
    bound_gpu_s: float | None
    largest_gap_gpu_s: float | None
    preemptions: int


def entitled_shares(busy: list[Weighted]) -> list[float]:
    """Shares by weight: of what competes for the pool, and inside each group among its tenants."""
    inside: dict[str, float] = defaultdict(float)
    for tenant in busy:
        if tenant.group is not None:
            inside[tenant.group] += tenant.weight
    outside = sum(tenant.weight for tenant in busy if tenant.group is None)
    outside += sum({tenant.group: tenant.group_weight or 1.0 for tenant in busy if tenant.group is not None}.values())
    return [
        tenant.weight / outside
        if tenant.group is None
        else (tenant.group_weight or 1.0) / outside * tenant.weight / inside[tenant.group]
        for tenant in busy
    ]


def _picture(router: str, state: PoolState, tenants: dict[str, Weighted], pool: Pool | None) -> PoolPicture:
    servers = {b.id: b.name for b in pool.backends.all()} if pool is not None else {}
    busy = [t for t in state.tenants if t.queued or t.running or t.output_tokens_total][:MAX_TENANTS]
    known = {t.tenant: tenants.get(t.tenant, Weighted(name=t.tenant)) for t in busy}
    service = {t.tenant: t.prompt_tokens_total + 2 * t.output_tokens_total for t in busy}
    total = sum(service.values())
    shares = [
        charts.Share(
            label=known[t.tenant].name,
            delivered=service[t.tenant] / total if total else 0.0,
            entitled=entitled,
        )
        for t, entitled in zip(busy, entitled_shares(list(known.values())), strict=True)
    ]
    rate = state.service_per_gpu_s
    return PoolPicture(
        bound_gpu_s=gpu_seconds(state.bound_service, rate),
        largest_gap_gpu_s=gpu_seconds(state.largest_gap_service, rate),
        router=router,
        name=pool.name if pool is not None else state.pool,
        state=state,
        queued=sorted(state.queued_by_tier.items()),
        backends=[
            {
                "state": b,
                "name": servers.get(b.backend, b.backend),
                "ratio": b.reserved_tokens / b.kv_tokens if b.kv_tokens else 0.0,
                "meter": charts.meter(
                    title="KV reserved", ratio=b.reserved_tokens / b.kv_tokens if b.kv_tokens else 0.0
                ),
            }
            for b in state.backends
        ],
        tenants=[{"state": t, "name": known[t.tenant].name} for t in busy],
        groups=state.groups,
        shares=charts.share_bars(title="Service delivered since the router started", shares=shares) if shares else "",
        preemptions=sum(state.preempted_total.values()),
    )


def _of_tenant(actor: Actor, tenant: str) -> dict[str, object]:
    """What waits and runs of one tenant, by pool and router, and its latest requests; nothing of anybody else."""
    names = fleet_queries.pool_names(actor=actor)
    own = [
        {"pool": names.get(pool.pool, pool.pool), "state": state}
        for _, beat in sorted(fleet_queries.live_heartbeats().items())
        for pool in beat.pools
        for state in pool.tenants
        if state.tenant == tenant
    ]
    return {"own": own, "events": _latest(actor, {})}


def _context(request: HttpRequest) -> dict[str, object]:
    actor = actor_of(request)
    if actor.tenant is not None:
        return _of_tenant(actor, actor.tenant)
    heartbeats: dict[str, Heartbeat] = fleet_queries.live_heartbeats()
    tenants = tenant_queries.tenant_weights()
    pools = {p.id: p for p in fleet_queries.pools(actor=actor)}
    now = utc_now()
    routers = [
        {
            "status": status,
            "is_live": (now - status.seen_at).total_seconds() < STALE_S,
            "age_s": int((now - status.seen_at).total_seconds()),
        }
        for router in fleet_queries.routers(actor=actor)
        for status in router.instances.all()
    ]
    return {
        "routers": routers,
        "full_disks": [
            (name, beat.overflow_events) for name, beat in sorted(heartbeats.items()) if beat.overflow_events
        ],
        "revision": current_number(),
        "pictures": [
            _picture(instance, state, tenants, pools.get(state.pool))
            for instance, beat in sorted(heartbeats.items())
            for state in beat.pools
        ],
        "events": _latest(actor, tenants),
    }


def _latest(actor: Actor, tenants: dict[str, Weighted]) -> list[dict[str, object]]:
    return [
        {"event": e, "name": tenants.get(e.tenant, Weighted(name=e.tenant)).name, "ttft_ms": _ttft_ms(e)}
        for e in usage_queries.latest_events(actor=actor, limit=12)
    ]


def _ttft_ms(event: UsageEvent) -> int | None:
    if event.first_token_at is None:
        return None
    return round((event.first_token_at - event.arrived_at).total_seconds() * 1_000)


def _template(request: HttpRequest) -> str:
    return f"console/fragments/{'live' if actor_of(request).tenant is None else 'own_live'}.html"


@require_safe
@of_tenants
def page(request: HttpRequest) -> HttpResponseBase:
    return render(request, "console/live.html", {"fragment": _template(request), **_context(request)})


@require_safe
@of_tenants
def fragment(request: HttpRequest) -> HttpResponseBase:
    return render(request, _template(request), _context(request))
