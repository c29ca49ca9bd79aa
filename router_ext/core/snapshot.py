"""Pictures of a scheduler's state: numbers for heartbeats and metrics, and everything for debugging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from router_ext.core.bounds import Terms, gpu_seconds
from router_ext.core.config import PoolConfig
from router_ext.core.explain import Gate
from router_ext.core.ids import BackendId, RequestId, TenantId, TierName
from router_ext.core.queues import Group, Tenant, WaitingRoom
from router_ext.core.request import Request
from router_ext.core.sizing import KvPrice
from router_ext.core.waste import WasteBudget

if TYPE_CHECKING:
    from router_ext.core.admission import Backend
    from router_ext.core.fairness.counters import Counters


@dataclass(slots=True, kw_only=True)
class TenantStats:
    """One tenant in this pool. Not frozen: ten thousand of them, each two seconds, would cost three times as much.

    ``counter``: service per weight above the floor of those it competes with (negative: below), fit to be shown and
    compared: the pool's, or among the members of its ``group``.
    ``stall_service_total``: charged for tokens that others missed while its new grammars were compiled.
    ``raw_counter``: the counter itself, lifts included; only its changes mean something.
    """

    tenant: TenantId
    group: str | None
    weight: float
    queued: int
    running: int
    counter: float
    raw_counter: float
    prompt_tokens_total: int
    output_tokens_total: int
    dispatched_total: int
    stall_service_total: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """Tenants that compete in this pool as one. ``queued``, ``running``: sums over its members. Else as a tenant."""

    group: str
    weight: float
    tenants: int
    queued: int
    running: int
    counter: float
    raw_counter: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStats:
    """One backend. Tokens are whole blocks times block size; ``usable_tokens`` is what requests can hold together.

    ``compiled_grammars``: that it has, as far as is known. ``stall_ratio``: what compiling one takes here over what was
    predicted. ``is_exposed``: a new grammar or a suspect is alone in its prefill. ``reservations``: slices that
    hold KV, those included whose backend has still to give it back.
    """

    backend: BackendId
    is_up: bool
    is_cordoned: bool
    is_retired: bool
    running: int
    reserved_tokens: int
    usable_tokens: int
    kv_tokens: int
    prefill_tokens: int
    prefill_tokens_per_s: float | None
    step_s: float
    compiled_grammars: int = 0
    stall_ratio: float = 1.0
    is_exposed: bool = False
    reservations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """One pool. ``bound_service`` and ``largest_gap_service``: see ``core.bounds``, in service units.

    ``bound_terms``: what the bound is made of, None if the policy promises nothing.
    ``service_per_gpu_s``: service that one busy backend delivers per second while somebody waits; None before it was
    measured, and so are ``bound_gpu_s`` and ``largest_gap_gpu_s``, the same two numbers in seconds of one backend.
    ``held_by``: the gate that stopped the last decision, in lower case; ``none`` if nobody waits.
    ``queued_bytes``: of the bodies of those queued.
    ``parked``: of those queued, how many wait for a backend that could hold them.
    ``slice_level``: which quantile of what is left of a predicted answer slices were lately, on average; 1 before the
    first. ``resent_token_s``, ``held_token_s``: seconds of one backend that a token processed again costs, and a KV
    token held for a step (``core.sizing``); None before they were observed.
    ``preempted_total``: requests told to stop for others, by trigger. ``recomputed_tokens_total``: prompt and output
    that they sent again. ``waste_tokens``: what may be computed again at present (negative: overdrawn).
    """

    pool: str
    policy: str
    queued: int
    queued_bytes: int
    parked: int
    queued_by_tier: dict[TierName, int]
    running: int
    held_by: str
    drain_s: float
    output_tokens_per_s: float | None
    bound_service: float | None
    largest_gap_service: float
    bound_terms: Terms | None
    service_per_gpu_s: float | None
    bound_gpu_s: float | None
    largest_gap_gpu_s: float | None
    preempted_total: dict[str, int]
    recomputed_tokens_total: int
    waste_tokens: float
    slice_level: float
    resent_token_s: float | None
    held_token_s: float | None
    tenants: list[TenantStats]
    groups: list[GroupStats]
    backends: list[BackendStats]


def pool_stats(
    *,
    config: PoolConfig,
    room: WaitingRoom,
    tenants: Mapping[TenantId, Tenant],
    groups: Mapping[str, Group],
    backends: Mapping[BackendId, Backend],
    counters: Counters,
    num_running: int,
    held_by: Gate,
    output_tokens_per_s: float | None,
    drain_s: float,
    terms: Terms | None,
    service_per_gpu_s: float | None,
    preempted: Mapping[str, int],
    waste: WasteBudget,
    kv_price: KvPrice,
) -> PoolStats:
    """Collect the numbers. Order: tenants and backends by id."""
    by_tier: dict[TierName, int] = dict.fromkeys(config.tiers, 0)
    for tenant in tenants.values():
        for queue in tenant.by_rank:
            by_tier[queue.name] = by_tier.get(queue.name, 0) + len(queue)
    for request in (*room.parked.values(), *room.held.values()):
        by_tier[request.queue.name] = by_tier.get(request.queue.name, 0) + 1
    floor = counters.floor_or_last()
    gap = counters.largest_gap_service
    bound = None if terms is None else terms.bound_service
    return PoolStats(
        pool=config.name,
        policy=config.policy,
        queued=room.num_waiting,
        queued_bytes=room.queued_bytes,
        parked=len(room.parked),
        queued_by_tier=by_tier,
        running=num_running,
        held_by=held_by.name.lower(),
        drain_s=drain_s,
        output_tokens_per_s=output_tokens_per_s,
        bound_service=bound,
        largest_gap_service=gap,
        bound_terms=terms,
        service_per_gpu_s=service_per_gpu_s,
        bound_gpu_s=gpu_seconds(bound, service_per_gpu_s),
        largest_gap_gpu_s=gpu_seconds(gap, service_per_gpu_s),
        preempted_total=dict(preempted),
        recomputed_tokens_total=waste.recomputed_tokens,
        waste_tokens=waste.level_tokens,
        slice_level=kv_price.level,
        resent_token_s=kv_price.resent_s,
        held_token_s=kv_price.held_s,
        tenants=[
            TenantStats(
                tenant=tenant.tenant_id,
                group=None if tenant.unit is tenant else tenant.unit.tenant_id,
                weight=tenant.weight,
                queued=tenant.num_queued,
                running=tenant.num_running,
                counter=tenant.counter - (tenant.unit.members.base() if isinstance(tenant.unit, Group) else floor),
                raw_counter=tenant.counter,
                prompt_tokens_total=tenant.prompt_tokens,
                output_tokens_total=tenant.output_tokens,
                dispatched_total=tenant.num_dispatched,
                stall_service_total=tenant.stall_service,
            )
            for _, tenant in sorted(tenants.items())
        ],
        groups=[
            GroupStats(
                group=name,
                weight=group.weight,
                tenants=len(group.tenants),
                queued=sum(tenant.num_queued for tenant in group.tenants.values()),
                running=group.num_running,
                counter=group.counter - floor,
                raw_counter=group.counter,
            )
            for name, group in sorted(groups.items())
        ],
        backends=[
            BackendStats(
                backend=backend.backend_id,
                is_up=backend.is_up,
                is_cordoned=backend.is_cordoned,
                is_retired=backend.is_retired,
                running=backend.num_running,
                reserved_tokens=backend.ledger.reserved_blocks * backend.block_size,
                usable_tokens=backend.ledger.usable_blocks * backend.block_size,
                kv_tokens=backend.config.kv_tokens,
                prefill_tokens=backend.prefill_tokens,
                prefill_tokens_per_s=backend.prefill_rate(),
                step_s=backend.step_s(),
                compiled_grammars=backend.exposure.num_compiled,
                stall_ratio=backend.exposure.speed.value,
                is_exposed=backend.exposure.ticket != 0,
                reservations=len(backend.ledger.holdings),
            )
            for _, backend in sorted(backends.items())
        ],
    )


def full_picture(
    stats: PoolStats, requests: Mapping[RequestId, Request], backends: Mapping[BackendId, Backend], *, now: float
) -> dict[str, Any]:
    """``stats`` plus every request and every ledger entry, as builtins."""
    picture: dict[str, Any] = asdict(stats)
    picture["now_s"] = now
    picture["requests"] = [
        {
            "request": request.request_id,
            "tenant": request.member.tenant_id,
            "tier": request.queue.name,
            "state": request.state.name.lower(),
            "is_parked": request.parked_s is not None,
            "is_held": request.held_s is not None,
            "age_s": now - request.arrival_s,
            "prompt_tokens": request.prompt_tokens,
            "input_tokens": request.input_tokens,
            "output_tokens": request.output_tokens,
            "max_new_tokens": request.max_new_tokens,
            "predicted_output_tokens": request.predicted_output_tokens,
            "slice_tokens": request.slice_tokens,
            "segment": request.segment,
            "num_preempted": request.num_preempted,
            "cut_tokens": request.cut_tokens,
            "backend": None if request.backend is None else request.backend.backend_id,
            "blocks": request.blocks,
            "paid_in": request.paid_in,
            "paid_out": request.paid_out,
        }
        for _, request in sorted(requests.items())
    ]
    picture["holdings"] = {
        backend.backend_id: {str(ticket): blocks for ticket, blocks in sorted(backend.ledger.holdings.items())}
        for _, backend in sorted(backends.items())
    }
    return picture
