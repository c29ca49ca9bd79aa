"""The last minutes of a pool, for the live page: first tokens, refusals, and who was served beside what was due.

A ring of slots of ``SLOT_S`` seconds each, aligned to the wall clock so that those of several routers add up. First
tokens and refusals are counted as they happen, O(1) each; tokens are read off the scheduler's totals whenever somebody
looks (a heartbeat, ``fairlane top``), which costs nothing per token.

What a tenant is entitled to: each time, what the pool delivered since the last look is parted by weight among those
that wait, run or were served (``obs.shares``). Over the window that is summed, so that a span counts by its service.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from router_ext.core.snapshot import PoolStats, TenantStats
from router_ext.obs.shares import Claim, shares
from router_ext.wire.controlplane import SLOT_S, SlotState, TierState
from router_ext.wire.log_histogram import bucket

WINDOW_SLOTS = 30
"""Five minutes, the slot that runs included."""

TOLD_SLOTS = 3
"""Ended slots that a heartbeat repeats: thirty seconds of lost heartbeats lose nothing."""


@dataclass(slots=True)
class FirstTokens:
    """Of one tier: how many, by bucket of their TTFT; ``in_time``: within the target, where there was one."""

    counts: Counter[int] = field(default_factory=Counter)
    in_time: int = 0

    def add(self, other: FirstTokens) -> None:
        self.counts.update(other.counts)
        self.in_time += other.in_time

    def state(self, tier: str, target_s: float | None) -> TierState:
        buckets = sorted(self.counts)
        return TierState(
            tier=tier,
            ttft_target_s=target_s,
            buckets=buckets,
            counts=[self.counts[b] for b in buckets],
            in_time=self.in_time,
        )


@dataclass(slots=True)
class Received:
    """Service that a tenant got, and what it was entitled to. ``slots``: of the ring, how many it is in."""

    service: int = 0
    entitled: float = 0.0
    slots: int = 0


NOTHING = Received()

_NONE = (0, 0)


@dataclass(slots=True)
class _Slot:
    """``served``, ``due``: service by tenant, of those that waited, ran or were served. Plain numbers, of which the
    garbage collector keeps no account: ten thousand tenants in thirty slots.
    """

    number: int
    tiers: dict[str, FirstTokens] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    preempted: Counter[str] = field(default_factory=Counter)
    served: dict[str, int] = field(default_factory=dict)
    due: dict[str, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class Window:
    """Sums over the ring. ``seconds``: how far back they reach."""

    seconds: int
    tiers: dict[str, FirstTokens]
    refused: Counter[str]
    preempted: Counter[str]
    output_tokens: int


class Recent:
    """The ring of one pool. Instants are microseconds since 1970; a clock that steps back stays in its slot.

    Memory: a few counters per slot and tier, an entry per slot and tenant that was served in it.
    """

    def __init__(self, now_us: int) -> None:
        self._slots = deque([_Slot(_number(now_us))])
        self._begun_us = now_us
        self._totals: dict[str, tuple[int, int]] = {}
        self._has_looked = False
        self._preempted: Mapping[str, int] = {}
        self._received: dict[str, Received] = {}

    # --- what happens -------------------------------------------------------------------------------------------------

    def first_token(self, tier: str, ttft_s: float, target_s: float | None, now_us: int) -> None:
        """A request's first token goes to its client."""
        tiers = self._slot(now_us).tiers
        seen = tiers.get(tier)
        if seen is None:
            seen = tiers[tier] = FirstTokens()
        seen.counts[bucket(int(ttft_s * 1e6))] += 1
        if target_s is not None and ttft_s <= target_s:
            seen.in_time += 1

    def refused(self, code: str, now_us: int) -> None:
        """A request was turned away, or expired while it waited."""
        self._slot(now_us).refused[code] += 1

    def look(self, stats: PoolStats, now_us: int) -> None:
        """Take in what was delivered since the last look. The first one only notes where the totals stand.

        Cost: O(tenants with state in the pool), as ``stats`` itself.
        """
        slot = self._slot(now_us)
        totals = self._totals
        served: dict[str, int] = {}
        for tenant in stats.tenants:
            name, now = tenant.tenant, (tenant.prompt_tokens_total, tenant.output_tokens_total)
            then = totals.get(name, _NONE)
            if now == then:
                continue
            totals[name] = now
            if self._has_looked:
                # Less than before: the scheduler has forgotten the tenant meanwhile, and it began anew.
                prompt, output = max(0, now[0] - then[0]), max(0, now[1] - then[1])
                slot.prompt_tokens += prompt
                slot.output_tokens += output
                served[name] = prompt + 2 * output
        if len(totals) > 2 * len(stats.tenants) + 64:
            self._totals = {t.tenant: totals[t.tenant] for t in stats.tenants if t.tenant in totals}
        if self._has_looked:
            for trigger, count in stats.preempted_total.items():
                if more := count - self._preempted.get(trigger, 0):
                    slot.preempted[trigger] += more
        self._preempted, self._has_looked = stats.preempted_total, True
        if served:
            self._part(slot, served, stats)

    def _part(self, slot: _Slot, served: Mapping[str, int], stats: PoolStats) -> None:
        weights = {group.group: group.weight for group in stats.groups}
        whole = sum(served.values())
        claims = [_claim(t, weights) for t in stats.tenants if t.queued or t.running or t.tenant in served]
        for name, share in shares(claims).items():
            total = self._received.get(name)
            if total is None:
                total = self._received[name] = Received()
            if name not in slot.due:
                total.slots += 1
            entitled = whole * share.entitled
            total.entitled += entitled
            slot.due[name] = slot.due.get(name, 0.0) + entitled
            if service := served.get(name, 0):
                total.service += service
                slot.served[name] = slot.served.get(name, 0) + service

    # --- what is told -------------------------------------------------------------------------------------------------

    def window(self, now_us: int) -> Window:
        """The last five minutes, or since the pool began."""
        newest = self._slot(now_us).number
        oldest_us = max((newest - WINDOW_SLOTS + 1) * SLOT_S * 1_000_000, self._begun_us)
        window = Window(max(0, now_us - oldest_us) // 1_000_000, {}, Counter(), Counter(), 0)
        for slot in self._slots:
            for tier, seen in slot.tiers.items():
                window.tiers.setdefault(tier, FirstTokens()).add(seen)
            window.refused += slot.refused
            window.preempted += slot.preempted
            window.output_tokens += slot.output_tokens
        return window

    def received(self, tenant: str) -> Received:
        """Of the window of the last look."""
        return self._received.get(tenant, NOTHING)

    def ended(self, targets: Mapping[str, float | None], now_us: int) -> list[SlotState]:
        """The newest slots that are over, oldest first; one in which nothing happened is told as such."""
        newest = self._slot(now_us).number
        first = max(newest - TOLD_SLOTS, _number(self._begun_us))
        known = {slot.number: slot for slot in self._slots}
        return [
            SlotState(
                slot=number,
                prompt_tokens=slot.prompt_tokens,
                output_tokens=slot.output_tokens,
                tiers=[seen.state(tier, targets.get(tier)) for tier, seen in sorted(slot.tiers.items())],
            )
            for number in range(first, newest)
            for slot in [known.get(number) or _Slot(number)]
        ]

    def _slot(self, now_us: int) -> _Slot:
        """The one of now; those beyond the window leave."""
        number = _number(now_us)
        newest = self._slots[-1]
        if number <= newest.number:
            return newest
        newest = _Slot(number)
        self._slots.append(newest)
        while self._slots[0].number <= number - WINDOW_SLOTS:
            self._forget(self._slots.popleft())
        return newest

    def _forget(self, slot: _Slot) -> None:
        for tenant, entitled in slot.due.items():
            total = self._received[tenant]
            total.slots -= 1
            if not total.slots:
                del self._received[tenant]
                continue
            total.service -= slot.served.get(tenant, 0)
            total.entitled = max(0.0, total.entitled - entitled)


def _claim(tenant: TenantStats, group_weights: Mapping[str, float]) -> Claim:
    group_weight = 0.0 if tenant.group is None else group_weights.get(tenant.group, 0.0)
    return Claim(tenant.tenant, tenant.weight, tenant.group, group_weight, 0, True)


def _number(now_us: int) -> int:
    return now_us // (SLOT_S * 1_000_000)
