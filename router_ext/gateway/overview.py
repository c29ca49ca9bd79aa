"""The router at one instant, as ``fairlane top`` shows it: pools, tenants, queues and backends, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from router_ext import __version__, compiled
from router_ext.core.snapshot import PoolStats
from router_ext.gateway.engine import PoolEngine
from router_ext.gateway.lifespan import Router
from router_ext.gateway.pool_states import state_word, tier_states
from router_ext.obs.shares import Claim, shares
from router_ext.sync.ledger import now_us

MAX_TENANTS = 500
"""Tenants of one pool, those with the most work first."""


def overview(router: Router) -> dict[str, Any]:
    """JSON of everything. Cost: O(tenants + backends) of each pool, as one scrape of the metrics."""
    now = now_us()
    return {
        "router": router.settings.id,
        "version": __version__,
        "core": compiled.running(),
        "at_us": now,
        "is_ready": router.is_ready,
        "is_draining": router.is_draining,
        "reason": None if router.is_ready else router.why_not_ready(),
        "applied_revision": router.directory.revision if router.directory else 0,
        "ledger": {
            "pending_events": router.ledger.pending_events,
            "overflow_events": router.ledger.overflow_events,
            "lag_s": router.ledger.lag_s(now),
        },
        "pools": [_pool(router, engine) for engine in router.engines.values()],
    }


def _pool(router: Router, engine: PoolEngine) -> dict[str, Any]:
    stats, recent, now = engine.stats(), engine.books.recent, now_us()
    recent.look(stats, now)
    window = recent.window(now)
    name_of = str if router.directory is None else router.directory.roster.name_of
    return {
        "model": engine.name,
        "policy": stats.policy,
        "queued": stats.queued,
        "parked": stats.parked,
        "queued_by_tier": stats.queued_by_tier,
        "running": stats.running,
        "held_by": stats.held_by,
        "drain_s": stats.drain_s,
        "output_tokens_per_s": stats.output_tokens_per_s,
        "recent_s": window.seconds,
        "tiers": [msgspec.to_builtins(state) for state in tier_states(engine, window.tiers)],
        "recent_refused": dict(window.refused),
        "preempted_total": stats.preempted_total,
        "recomputed_tokens_total": stats.recomputed_tokens_total,
        "largest_gap_service": stats.largest_gap_service,
        "bound_service": stats.bound_service,
        "tenants": _tenants(engine, stats, name_of),
        "backends": _backends(engine, stats),
    }


def _tenants(engine: PoolEngine, stats: PoolStats, name_of: Callable[[str], str]) -> list[dict[str, Any]]:
    weights = {group.group: group.weight for group in stats.groups}
    tokens = engine.books.tenant_tokens
    claims = [
        Claim(
            t.tenant,
            t.weight,
            t.group,
            weights.get(t.group, 0.0) if t.group is not None else 0.0,
            t.output_tokens_total,
            bool(t.output_tokens_total or t.queued or t.running),
        )
        for t in stats.tenants
    ]
    parts = shares(claims)
    busiest = sorted(stats.tenants, key=lambda t: (-(t.queued + t.running), -t.output_tokens_total, t.tenant))
    return [
        {
            "tenant": t.tenant,
            "name": name_of(t.tenant),
            "group": t.group,
            "weight": t.weight,
            "queued": t.queued,
            "running": t.running,
            "counter": t.counter,
            "prompt_tokens": tokens.get(t.tenant, (0, 0))[0],
            "output_tokens": t.output_tokens_total,
            "delivered": parts[t.tenant].delivered,
            "entitled": parts[t.tenant].entitled,
        }
        for t in busiest[:MAX_TENANTS]
    ]


def _backends(engine: PoolEngine, stats: PoolStats) -> list[dict[str, Any]]:
    found = []
    for b in stats.backends:
        member = engine.backends.members.get(b.backend)
        found.append(
            {
                "backend": b.backend,
                "name": b.backend if member is None else member.record.name,
                "state": "down" if member is None else state_word(member),
                "breaker": None if member is None else member.breaker.phase.value,
                "detail": "" if member is None else member.detail,
                "running": b.running,
                "reserved_tokens": b.reserved_tokens,
                "kv_tokens": b.usable_tokens,
                "queue_size": None if member is None else member.queue_size,
            }
        )
    return found
