"""The pools as all routers together see them, from their heartbeats; the last ten minutes from Valkey.

Every figure is a sum over routers, or is made of one: percentiles come from added histograms, never from percentiles.
A router that does not tell a figure (its version is older) adds nothing to it; where none does, it is None.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import msgspec
import structlog

from controlplane.common.clock import from_us, to_us
from controlplane.common.valkey import UNAVAILABLE, valkey
from router_ext.core.bounds import gpu_seconds
from router_ext.wire.controlplane import (
    SLOT_S,
    BackendState,
    GroupState,
    Heartbeat,
    OtherTenants,
    PoolState,
    SlotState,
    TenantState,
    TierState,
)
from router_ext.wire.log_histogram import quantile_us

logger = structlog.get_logger(__name__)

PERCENTILES = (0.5, 0.95, 0.99)

SLOT_KEY = "fairlane:slot:"
HISTORY_S = 600
POINT_S = 30
"""A point of a chart: some slots, so that a percentile stands on more than a few requests."""

_SETTLED_S = 4
"""A slot is told with the next heartbeat after its end."""


# --- now ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TierNow:
    """One tier: who waits, and the TTFT of the last minutes. Milliseconds; None: no first token, or nobody tells."""

    name: str
    waiting: int = 0
    target_s: float | None = None
    counts: Counter[int] = field(default_factory=Counter)
    in_time: int = 0

    @property
    def requests(self) -> int:
        return self.counts.total()

    @property
    def percentiles_ms(self) -> list[float | None]:
        """Of ``PERCENTILES``."""
        found = [quantile_us(self.counts, level) for level in PERCENTILES]
        return [None if us is None else us / 1_000 for us in found]

    @property
    def in_time_ratio(self) -> float | None:
        """Of those requests, how many met the target that held when their first token came."""
        return None if self.target_s is None or not self.requests else self.in_time / self.requests

    def add(self, told: TierState) -> None:
        self.counts.update(dict(zip(told.buckets, told.counts, strict=False)))
        self.in_time += told.in_time


@dataclass(slots=True)
class BackendNow:
    """One backend. ``states``: routers by the state they see it in. ``kv_tokens``: 0 while no router knows it."""

    backend: str
    states: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    running: int = 0
    reserved_tokens: int = 0
    kv_tokens: int = 0
    details: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        return self.reserved_tokens / self.kv_tokens if self.kv_tokens else None

    def add(self, router: str, told: BackendState) -> None:
        self.states[told.state].append(router)
        self.running += told.running
        self.reserved_tokens += told.reserved_tokens
        self.kv_tokens = max(self.kv_tokens, told.kv_tokens)
        if told.detail and told.detail not in self.details:
            self.details.append(told.detail)


@dataclass(slots=True)
class TenantNow:
    """One tenant, or (``tenant`` is empty) the sum over ``number`` that no heartbeat names. ``service``, ``entitled``:
    of the last minutes; None if no router tells."""

    tenant: str
    group: str | None = None
    number: int = 1
    waiting: int = 0
    running: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    service: float | None = None
    entitled: float | None = None

    def add(self, told: TenantState | OtherTenants) -> None:
        self.waiting += told.queued
        self.running += told.running
        self.prompt_tokens += told.prompt_tokens_total
        self.output_tokens += told.output_tokens_total
        if told.recent_service is not None:
            self.service = (self.service or 0.0) + told.recent_service
        if told.entitled_service is not None:
            self.entitled = (self.entitled or 0.0) + told.entitled_service


@dataclass(slots=True)
class GroupNow:
    """One fairness group. ``counter``: the largest any router has, since counters of different routers do not add."""

    group: str
    waiting: int = 0
    running: int = 0
    counter: float = 0.0

    def add(self, told: GroupState) -> None:
        self.waiting += told.queued
        self.running += told.running
        self.counter = max(self.counter, told.counter)


@dataclass(slots=True)
class PoolNow:
    """One pool. ``policies``: several while routers are on their way to another revision. ``recent_s``: how far back
    the figures of the last minutes reach, the longest of all routers; None: no router tells them. ``bound_service``,
    ``largest_gap_service``: the largest of all routers, since each keeps its own counters."""

    pool: str
    routers: list[str] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)
    running: int = 0
    parked: int = 0
    recent_s: int | None = None
    recent_output_tokens: int = 0
    tiers: dict[str, TierNow] = field(default_factory=dict)
    backends: dict[str, BackendNow] = field(default_factory=dict)
    tenants: dict[str, TenantNow] = field(default_factory=dict)
    others: TenantNow = field(default_factory=lambda: TenantNow(tenant="", number=0))
    groups: dict[str, GroupNow] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    preempted: Counter[str] = field(default_factory=Counter)
    preempted_total: Counter[str] = field(default_factory=Counter)
    recomputed_tokens_total: int = 0
    bound_service: float | None = None
    largest_gap_service: float | None = None
    service_per_gpu_s: float | None = None

    @property
    def waiting(self) -> int:
        return sum(tier.waiting for tier in self.tiers.values())

    @property
    def output_tokens_per_s(self) -> float | None:
        """Over the last minutes; None before the first whole second."""
        return self.recent_output_tokens / self.recent_s if self.recent_s else None

    @property
    def bound_gpu_s(self) -> float | None:
        return gpu_seconds(self.bound_service, self.service_per_gpu_s)

    @property
    def largest_gap_gpu_s(self) -> float | None:
        return gpu_seconds(self.largest_gap_service, self.service_per_gpu_s)

    @property
    def service(self) -> float:
        """Delivered to all tenants in the last minutes."""
        return sum(t.service or 0.0 for t in (*self.tenants.values(), self.others))

    def busiest(self) -> list[TenantNow]:
        """Those with the most requests first, then those served most lately."""
        return sorted(
            self.tenants.values(),
            key=lambda t: (-(t.waiting + t.running), -(t.service or 0), -t.output_tokens, t.tenant),
        )

    def add(self, router: str, told: PoolState) -> None:
        self.routers.append(router)
        if told.policy not in self.policies:
            self.policies.append(told.policy)
        self.running += told.running
        self.parked += told.parked
        if told.recent_s is not None:
            self.recent_s = max(self.recent_s or 0, told.recent_s)
        self.recent_output_tokens += told.recent_output_tokens
        self._add_tiers(told)
        for b in told.backends:
            self.backends.setdefault(b.backend, BackendNow(b.backend)).add(router, b)
        for t in told.tenants:
            if t.queued or t.running or t.output_tokens_total:
                self.tenants.setdefault(t.tenant, TenantNow(t.tenant, t.group)).add(t)
        if told.other_tenants is not None:
            self.others.add(told.other_tenants)
            self.others.number += told.other_tenants.tenants
        for g in told.groups:
            self.groups.setdefault(g.group, GroupNow(g.group)).add(g)
        self.refused.update(told.recent_refused)
        self.preempted.update(told.recent_preempted)
        self.preempted_total.update(told.preempted_total)
        self.recomputed_tokens_total += told.recomputed_tokens_total
        self.bound_service = _larger(self.bound_service, told.bound_service)
        self.largest_gap_service = _larger(self.largest_gap_service, told.largest_gap_service)
        if told.service_per_gpu_s is not None:
            self.service_per_gpu_s = min(self.service_per_gpu_s or told.service_per_gpu_s, told.service_per_gpu_s)

    def _add_tiers(self, told: PoolState) -> None:
        # By rank where the router says which tiers there are; an older one names those of its queues.
        for name in dict.fromkeys([*(t.tier for t in told.tiers), *told.queued_by_tier]):
            self.tiers.setdefault(name, TierNow(name)).waiting += told.queued_by_tier.get(name, 0)
        for tier in told.tiers:
            self.tiers[tier.tier].add(tier)
            self.tiers[tier.tier].target_s = tier.ttft_target_s


def pools_now(beats: Mapping[str, Heartbeat]) -> dict[str, PoolNow]:
    """By id, of all pools that some router reports. What routers see differently is as the newest revision has it.

    Args:
        beats: heartbeat by instance.
    """
    found: dict[str, PoolNow] = {}
    for instance, beat in sorted(beats.items(), key=lambda each: (each[1].applied_revision, each[0])):
        for told in beat.pools:
            found.setdefault(told.pool, PoolNow(told.pool)).add(instance, told)
    return found


def _larger(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else max(one, other)


# --- the last ten minutes ----------------------------------------------------------------------------------------


class _KeptSlot(msgspec.Struct, frozen=True):
    pool: str
    state: SlotState


_slots = msgspec.json.Decoder(list[_KeptSlot])


def slot_bodies(beat: Heartbeat) -> dict[str, bytes]:
    """What is to be kept of a heartbeat's slots, by key."""
    by_slot: dict[int, list[_KeptSlot]] = defaultdict(list)
    for pool in beat.pools:
        for state in pool.slots:
            by_slot[state.slot].append(_KeptSlot(pool.pool, state))
    return {_slot_key(beat.router, slot): msgspec.json.encode(kept) for slot, kept in by_slot.items()}


@dataclass(slots=True)
class Point:
    """Thirty seconds of one pool. ``output_tokens_per_s``: None where no router told anything."""

    output_tokens_per_s: float | None = None
    tiers: dict[str, Counter[int]] = field(default_factory=dict)

    def ttft_s(self, tier: str, level: float) -> float | None:
        found = quantile_us(self.tiers.get(tier, {}), level)
        return None if found is None else found / 1e6


@dataclass(slots=True)
class History:
    """Points of one pool, oldest first, and when each began; ``targets``: in force last, by tier."""

    times: list[datetime]
    points: list[Point]
    targets: dict[str, float | None] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return all(point.output_tokens_per_s is None for point in self.points)


def histories(*, instances: Sequence[str], now: datetime) -> dict[str, History]:
    """The last ten minutes of every pool that these instances told of; empty without Valkey.

    Cost: one look into Valkey for ``HISTORY_S / SLOT_S`` keys of each instance.
    """
    newest = (to_us(now) // 1_000_000 - _SETTLED_S) // POINT_S
    first = newest - HISTORY_S // POINT_S
    slots = range(first * POINT_S // SLOT_S, newest * POINT_S // SLOT_S)
    asked = [(instance, slot) for instance in instances for slot in slots]
    if not asked:
        return {}
    try:
        bodies = valkey().mget([_slot_key(*each) for each in asked])
    except UNAVAILABLE:
        logger.warning("history.valkey_unavailable")
        return {}
    times = [from_us(point * POINT_S * 1_000_000) for point in range(first, newest)]
    found: dict[str, History] = {}
    told: dict[tuple[str, int, str], list[SlotState]] = defaultdict(list)
    for (instance, slot), body in zip(asked, bodies, strict=True):
        for kept in _slots.decode(body) if body is not None else ():
            told[kept.pool, slot * SLOT_S // POINT_S - first, instance].append(kept.state)
    for (pool, index, _), states in sorted(told.items(), key=lambda each: each[0]):
        history = found.setdefault(pool, History(times, [Point() for _ in times]))
        _add(history.points[index], states)
        for state in states:
            history.targets |= {tier.tier: tier.ttft_target_s for tier in state.tiers}
    return found


def _add(point: Point, states: Sequence[SlotState]) -> None:
    """What one router told of a point; slots that were lost are taken to be like the others."""
    rate = sum(state.output_tokens for state in states) / (SLOT_S * len(states))
    point.output_tokens_per_s = (point.output_tokens_per_s or 0.0) + rate
    for state in states:
        for tier in state.tiers:
            counts = dict(zip(tier.buckets, tier.counts, strict=False))
            point.tiers.setdefault(tier.tier, Counter()).update(counts)


def _slot_key(instance: str, slot: int) -> str:
    return f"{SLOT_KEY}{instance}:{slot}"
