"""What a heartbeat says of each pool: who waits and runs, what the last minutes were like, and how its backends are."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from router_ext.backends.pool import State
from router_ext.core.snapshot import PoolStats, TenantStats
from router_ext.gateway.engine import PoolEngine
from router_ext.gateway.model import Member
from router_ext.gateway.recent import FirstTokens, Recent
from router_ext.wire.controlplane import (
    MAX_LIVE_TENANTS,
    BackendState,
    BoundTerms,
    GroupState,
    OtherTenants,
    PoolState,
    TenantState,
    TierState,
)

MAX_OLDEST = 20
"""Live requests of a pool that a heartbeat names."""


def pool_states(engines: Mapping[str, PoolEngine], now_us: int) -> list[PoolState]:
    """All pools, by id. Cost: O(tenants + backends) of each."""
    looks = {pool: engine.stats() for pool, engine in engines.items()}
    busy = {}
    for pool, stats in looks.items():
        engines[pool].books.recent.look(stats, now_us)
        busy[pool] = [t for t in stats.tenants if t.queued or t.running or t.output_tokens_total]
    places = parted(MAX_LIVE_TENANTS, {pool: len(tenants) for pool, tenants in busy.items()})
    return [_pool_state(pool, engines[pool], stats, busy[pool], places[pool], now_us) for pool, stats in looks.items()]


def parted(places: int, wanted: Mapping[str, int]) -> dict[str, int]:
    """Places of each pool: as many as it wants, or an equal part of what those that want less have left over."""
    found = {}
    for left, (pool, number) in zip(
        range(len(wanted), 0, -1), sorted(wanted.items(), key=lambda each: each[1]), strict=True
    ):
        found[pool] = min(number, places // left)
        places -= found[pool]
    return found


def busiest(tenants: Sequence[TenantStats], recent: Recent, limit: int) -> list[TenantStats]:
    """Those with the most requests, then those served most lately. O(tenants * log limit)."""
    return heapq.nsmallest(
        limit,
        tenants,
        key=lambda t: (-(t.queued + t.running), -recent.received(t.tenant).service, -t.output_tokens_total, t.tenant),
    )


def state_word(member: Member) -> str:
    """A backend's state in the words of heartbeat and metrics."""
    return "cordoned" if member.record.is_cordoned and member.state is State.UP else member.state.value


def tier_states(engine: PoolEngine, tiers: Mapping[str, FirstTokens]) -> list[TierState]:
    """The tiers of the configuration by rank, then others that first tokens were counted of."""
    config = sorted(engine.config.tiers.values(), key=lambda tier: (tier.rank, tier.name))
    targets = {str(tier.name): tier.ttft_target_s for tier in config}
    targets |= dict.fromkeys(sorted(set(tiers) - set(targets)))
    nothing = FirstTokens()
    return [tiers.get(name, nothing).state(name, target) for name, target in targets.items()]


def _pool_state(
    pool: str, engine: PoolEngine, stats: PoolStats, busy: list[TenantStats], places: int, now_us: int
) -> PoolState:
    recent = engine.books.recent
    window = recent.window(now_us)
    named = busiest(busy, recent, places) if len(busy) > places else busy
    by_backend = {b.backend: b for b in stats.backends}
    backends = []
    for backend, member in engine.backends.members.items():
        b = by_backend.get(backend)
        backends.append(
            BackendState(
                backend=backend,
                state=state_word(member),
                running=b.running if b else 0,
                reserved_tokens=b.reserved_tokens if b else 0,
                kv_tokens=b.usable_tokens if b else 0,
                detail=member.detail,
            )
        )
    return PoolState(
        pool=pool,
        policy=stats.policy,
        queued_by_tier={str(tier): count for tier, count in stats.queued_by_tier.items()},
        running=stats.running,
        backends=backends,
        tenants=[
            TenantState(
                tenant=t.tenant,
                group=t.group,
                queued=t.queued,
                running=t.running,
                counter=t.counter,
                output_tokens_total=t.output_tokens_total,
                prompt_tokens_total=t.prompt_tokens_total,
                recent_service=recent.received(t.tenant).service,
                entitled_service=recent.received(t.tenant).entitled,
            )
            for t in named
        ],
        other_tenants=_others(busy, named, recent),
        groups=[GroupState(group=g.group, queued=g.queued, running=g.running, counter=g.counter) for g in stats.groups],
        predictor_digest=engine.predictor_digest,
        length_model_digest=engine.foresight.digest,
        length_model_refused=engine.foresight.refused,
        predictions_total=dict(engine.foresight.by_source),
        prediction_fallbacks_total=dict(engine.foresight.fallbacks),
        bound_service=stats.bound_service,
        largest_gap_service=stats.largest_gap_service,
        bound_terms=None if stats.bound_terms is None else BoundTerms(**asdict(stats.bound_terms)),
        service_per_gpu_s=stats.service_per_gpu_s,
        parked=stats.parked,
        oldest=engine.oldest(MAX_OLDEST),
        preempted_total=stats.preempted_total,
        recomputed_tokens_total=stats.recomputed_tokens_total,
        waste_tokens=stats.waste_tokens,
        recent_s=window.seconds,
        tiers=tier_states(engine, window.tiers),
        recent_refused=dict(window.refused),
        recent_preempted=dict(window.preempted),
        recent_output_tokens=window.output_tokens,
        slots=recent.ended({name: tier.ttft_target_s for name, tier in engine.config.tiers.items()}, now_us),
    )


def _others(busy: Sequence[TenantStats], named: Sequence[TenantStats], recent: Recent) -> OtherTenants | None:
    if len(named) == len(busy):
        return None
    known = {t.tenant for t in named}
    others = [t for t in busy if t.tenant not in known]
    received = [recent.received(t.tenant) for t in others]
    return OtherTenants(
        tenants=len(others),
        queued=sum(t.queued for t in others),
        running=sum(t.running for t in others),
        output_tokens_total=sum(t.output_tokens_total for t in others),
        prompt_tokens_total=sum(t.prompt_tokens_total for t in others),
        recent_service=sum(r.service for r in received),
        entitled_service=sum(r.entitled for r in received),
    )
