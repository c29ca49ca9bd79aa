"""The fairness bound of a pool, taken apart: as its rows configure it, and as each live router has it in force."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from controlplane.common.actor import Actor
from controlplane.common.errors import Invalid, NotFound
from controlplane.common.validation import get_or_not_found
from controlplane.fleet.models import Pool
from controlplane.fleet.queries import live_heartbeats, pool_record, pools
from controlplane.tenants.queries import Weight, extreme_weights, group_records, weights
from controlplane.tiers.queries import tier_records
from router_ext.core.bounds import Terms, gpu_seconds, terms
from router_ext.core.config import ConfigError, PoolConfig, build_pool
from router_ext.wire.controlplane import PoolState

_MAX_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One summand of the bound, or what it is computed from."""

    name: str
    service: float
    gpu_s: float | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFairness:
    """A pool's bound in one router, next to the largest gap it has seen."""

    router: str
    service_per_gpu_s: float | None
    bound_service: float | None
    bound_gpu_s: float | None
    largest_gap_service: float | None
    largest_gap_gpu_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantBound:
    """How far one tenant may be above the least served one that waits: per weight as counters are, and in service.

    ``group``: its fairness group, among whose tenants the bound is; None: among all that compete for themselves.
    """

    tenant: str
    name: str
    group: str | None
    weight: float
    counter_bound: float
    bound_service: float
    bound_gpu_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairBound:
    """How far two tenants may drift apart, in service per weight, over any time in which both wait.

    Of tenants with different fairness groups it is their groups that have a bound.
    """

    first: str
    second: str
    pair_bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fairness:
    """Everything shown of one pool.

    Attributes:
        is_bounded: False where the policy promises nothing; then there are no terms and no bounds.
        source: ``router`` if the terms are those in force in a live router, else ``configuration``.
        unstated: backends whose KV tokens the operator has not stated; without a router the bound is unknown then.
        service_per_gpu_s: the slowest live router's measurement, so that seconds err upwards; None: not measured yet.
    """

    pool: str
    policy: str
    cost_model: str
    is_bounded: bool
    source: str
    unstated: list[str]
    service_per_gpu_s: float | None
    bound_service: float | None
    bound_gpu_s: float | None
    terms: list[Term]
    routers: list[RouterFairness]
    tenants: list[TenantBound]
    pair: PairBound | None = None


def pool_fairness(
    *, actor: Actor, pool_id: str, pair: tuple[str, str] | None = None, tenants: Sequence[Weight] | None = None
) -> Fairness:
    """The bound of a pool by its terms, by tenant and, for two tenants named by id, of that pair.

    Args:
        tenants: to tell the bounds of; None: of all there are.

    Raises:
        NotFound: no such pool, or a tenant of the pair does not exist.
    """
    pool = get_or_not_found(pools(actor=actor), "pool", pool_id)
    return fairness_of(pool, pair=pair, tenants=weights() if tenants is None else tenants)


def fairness_of(pool: Pool, *, pair: tuple[str, str] | None = None, tenants: Sequence[Weight] = ()) -> Fairness:
    """As ``pool_fairness``, of a pool that the actor may see.

    Cost: of the terms, what two tenants of every fairness group cost, however many there are.
    """
    states = dict(_live_states(pool))
    config = _configured(pool)
    unstated = [b.name for b in pool.backends.all() if b.kv_tokens is None]
    in_force = [state for state in states.values() if state.policy == pool.policy and state.bound_terms is not None]
    stated = terms(config)
    if in_force:
        # Several routers may be on their way to the newest revision: the largest bound is the safe one to show.
        largest = max(in_force, key=lambda state: state.bound_service or 0.0)
        stated = Terms(**msgspec.structs.asdict(largest.bound_terms))  # type: ignore[arg-type]
    elif unstated:
        stated = None
    rate = min((s.service_per_gpu_s for s in states.values() if s.service_per_gpu_s), default=None)
    return Fairness(
        pool=pool.id,
        policy=pool.policy,
        cost_model=config.cost_model,
        is_bounded=terms(config) is not None,
        source="router" if in_force else "configuration",
        unstated=unstated,
        service_per_gpu_s=rate,
        bound_service=None if stated is None else stated.bound_service,
        bound_gpu_s=None if stated is None else gpu_seconds(stated.bound_service, rate),
        terms=[] if stated is None else list(_explained(stated, rate)),
        routers=[_of_router(instance, state) for instance, state in states.items()],
        tenants=[] if stated is None else _by_tenant(stated, rate, tenants),
        pair=None if stated is None or pair is None else _of_pair(stated, pair),
    )


def bound_if(pool: Pool, *, policy: str, scheduling: Mapping[str, Any]) -> Fairness:
    """The bound that a pool would have with another policy and other knobs, for who is about to save them.

    The backends, tiers and weights are those of now; what routers have in force has no say in it.

    Raises:
        Invalid: routers would refuse the configuration.
    """
    pool.policy, pool.scheduling = policy, dict(scheduling)
    try:
        config = _configured(pool)
    except ConfigError as error:
        raise Invalid({"": str(error)}) from error
    unstated = [b.name for b in pool.backends.all() if b.kv_tokens is None]
    stated = None if unstated else terms(config)
    rate = min((s.service_per_gpu_s for _, s in _live_states(pool) if s.service_per_gpu_s), default=None)
    return Fairness(
        pool=pool.id,
        policy=policy,
        cost_model=config.cost_model,
        is_bounded=terms(config) is not None,
        source="configuration",
        unstated=unstated,
        service_per_gpu_s=rate,
        bound_service=None if stated is None else stated.bound_service,
        bound_gpu_s=None if stated is None else gpu_seconds(stated.bound_service, rate),
        terms=[] if stated is None else list(_explained(stated, rate)),
        routers=[],
        tenants=[],
    )


def _live_states(pool: Pool) -> Iterator[tuple[str, PoolState]]:
    for instance, beat in sorted(live_heartbeats().items()):
        for state in beat.pools:
            if state.pool == pool.id:
                yield instance, state


def _configured(pool: Pool) -> PoolConfig:
    record = pool_record(pool)
    return build_pool(
        pool={**record.scheduling, "name": record.name},
        backends=[
            # Limits that only /info knows: with the largest possible ones the bound is never shown too small.
            {**msgspec.to_builtins(b), "max_input_tokens": _MAX_TOKENS, "max_total_tokens": _MAX_TOKENS}
            for b in record.backends
            if b.kv_tokens is not None
        ],
        tiers=[msgspec.to_builtins(tier) for tier in tier_records()],
        # The terms look at the lightest and the heaviest.
        tenants=[
            {"tenant": f"weight {n}", "weight": weight, "group": group}
            for n, (group, weight) in enumerate(extreme_weights())
        ],
        groups=[msgspec.to_builtins(group) for group in group_records()],
    )


_PASS_TEXT = {
    "urgency": "how far ahead of the least served tenant requests with a first-token target may still go first",
    "backfill": "how far ahead others may be and start while the request in turn waits for room",
    "quantum": "what one round grants the heaviest tenant",
}


def _explained(stated: Terms, rate: float | None) -> Iterator[Term]:
    def term(name: str, service: float, text: str) -> Term:
        return Term(name=name, service=service, gpu_s=gpu_seconds(service, rate), text=text)

    yield term(
        "U'",
        stated.peak_service,
        f"the most service one tenant can still be charged for a full pool: {stated.pool_tokens:,} tokens of KV, "
        f"prompts of one request up to {stated.longest_prompt:,} tokens",
    )
    in_flight = stated.gamma * stated.heaviest_weight / stated.lightest_weight * stated.peak_service
    if in_flight > stated.peak_service:
        yield term(
            "work in flight",
            in_flight,
            f"in place of U': the work in flight of the lightest tenant (weight {stated.lightest_weight:g}) counts "
            f"against the heaviest (weight {stated.heaviest_weight:g})",
        )
    if stated.stall_service:
        yield term(
            "S", stated.stall_service, "most that is charged for what others miss while a new grammar is compiled"
        )
    for name, service in sorted(stated.passes.items(), key=lambda item: -item[1]):
        yield term(f"{name} pass", service, _PASS_TEXT.get(name, "how far ahead somebody may be and still be served"))
    yield term("bound", stated.bound_service, "U', or the work in flight, S, and the largest pass")


def _of_router(instance: str, state: PoolState) -> RouterFairness:
    rate = state.service_per_gpu_s
    return RouterFairness(
        router=instance,
        service_per_gpu_s=rate,
        bound_service=state.bound_service,
        bound_gpu_s=gpu_seconds(state.bound_service, rate),
        largest_gap_service=state.largest_gap_service,
        largest_gap_gpu_s=gpu_seconds(state.largest_gap_service, rate),
    )


def _by_tenant(stated: Terms, rate: float | None, tenants: Sequence[Weight]) -> list[TenantBound]:
    bounds = []
    for record in tenants:
        bound = (stated.counter_bound if record.group is None else stated.inside_bound)(record.weight)
        service = bound * record.weight
        bounds.append(
            TenantBound(
                tenant=record.tenant,
                name=record.name,
                group=record.group,
                weight=record.weight,
                counter_bound=bound,
                bound_service=service,
                bound_gpu_s=gpu_seconds(service, rate),
            )
        )
    return bounds


def _of_pair(stated: Terms, pair: tuple[str, str]) -> PairBound:
    records = {record.tenant: record for record in weights(pair)}
    for tenant in pair:
        if tenant not in records:
            raise NotFound(f"no tenant {tenant!r}")
    first, second = (records[tenant] for tenant in pair)
    if first.group is not None and first.group == second.group:
        bound = stated.inside_bound(first.weight) + stated.inside_bound(second.weight)
    else:
        groups = {record.group: record.weight for record in group_records()}
        both = [r.weight if r.group is None else groups[r.group] for r in (first, second)]
        bound = stated.pair_bound(*both)
    return PairBound(first=first.tenant, second=second.tenant, pair_bound=bound)
