"""The decision: candidates of the fairness policy x placement, until nobody can start.

    policy: whose turn --> gates and KV: where may it start --> claims: does it take a place from one ahead --> dispatch

A *decision* is what follows one event. It consists of *passes* over the candidates: an admission that may change
whose turn it is ends the pass, and the next one begins with the new order. It ends with a pass that admits nobody,
and the gate that held the request in turn is written down for ``explain``.
"""

from __future__ import annotations

from router_ext.core.actions import Action
from router_ext.core.admission import Backend, Gates
from router_ext.core.books import Books
from router_ext.core.config import PoolConfig
from router_ext.core.explain import Gate, note_blocked
from router_ext.core.fairness.base import FairnessPolicy, Standing
from router_ext.core.fairness.counters import Counters
from router_ext.core.fleet import Fleet
from router_ext.core.lifecycle import State
from router_ext.core.placement import Claims, Placement
from router_ext.core.preemption import Preemption
from router_ext.core.queues import Tenant
from router_ext.core.request import Request
from router_ext.core.slicing import SliceBudget, shrunk_slice
from router_ext.core.tiers import Tiers
from router_ext.core.waits import Waits

# Looking a member up on its class costs as much as a comparison; these are read several times per decision.
_LATE, _URGENT_PICK = Standing.LATE, Standing.URGENT_PICK
_PICK, _BACKFILL = Standing.PICK, Standing.BACKFILL
_NONE, _KV = Gate.NONE, Gate.KV

_NEVER = -float("inf")


class Decider:
    """Owns placement, gates and the budget for shrunk slices; has ``Books`` book what it decides.

    Attributes:
        placement: which backend.
        preemption: which running work yields, when somebody who should start cannot.
        decided_s: instant of the last decision, minus infinity if one is owed.
        stalled: tenant whose request in turn could not start then; tokens it receives may change whose turn it is.
    """

    __slots__ = (
        "_books",
        "_budget",
        "_clock",
        "_config",
        "_fleet",
        "_gates",
        "_policy",
        "_rate",
        "_room",
        "_throughput",
        "_tiers",
        "decided_s",
        "placement",
        "preemption",
        "stalled",
    )

    def __init__(
        self,
        config: PoolConfig,
        *,
        books: Books,
        counters: Counters,
        fleet: Fleet,
        tiers: Tiers,
        waits: Waits,
    ) -> None:
        self._config = config
        self._policy: FairnessPolicy
        self._books = books
        self._room = books.room
        self._clock = books.clock
        self._fleet = fleet
        self._tiers = tiers
        self._throughput = waits.throughput
        self._gates = Gates(headroom_ratio=config.headroom_ratio, is_on=True)
        self.placement = Placement(self._gates, fleet.backends)
        self.preemption = Preemption(books=books, counters=counters, fleet=fleet, tiers=tiers, gates=self._gates)
        self._budget = SliceBudget()
        self._rate = waits.rate
        self.decided_s = _NEVER
        self.stalled: Tenant | None = None

    def adopt(self, config: PoolConfig, policy: FairnessPolicy) -> None:
        """Decide by another configuration and policy from now on; what was learned stays."""
        if config.cost_model != self._config.cost_model:
            self._rate.restart()
        self._config = config
        self._policy = policy
        self._gates.configure(headroom_ratio=config.headroom_ratio, is_on=policy.is_gated)
        self.preemption.adopt(config, policy)

    def decide(self, now: float, actions: list[Action]) -> None:
        """Admit until nobody can start."""
        self.decided_s = now
        self.stalled = None
        books = self._books
        self._throughput.tick(now, books.num_output, is_busy=books.num_running > 0)
        output = books.take_new_output()
        if output:
            self._budget.refill(output)
            books.waste.refill(output, self._config.waste_ratio, self._throughput.peak_rate)
        room = self._room
        usable = self._fleet.usable
        if not usable and room.num_waiting:
            self._rate.idle()
            self._clock.set(Gate.NO_BACKEND, now)
            return
        # Nobody is in turn among those who are parked, so they alone hold nothing but themselves.
        nobody = Gate.NO_BACKEND if room.parked else _NONE
        if not room.count:
            self._rate.idle()
            self._clock.set(nobody, now)
            return
        self._tiers.refresh(now)
        self._gates.tightest_target_s = self._tiers.tightest_target_s
        self._gates.is_waste_low = books.waste.is_low
        misfits: set[Request] = set()
        gate: Gate | None = None
        while gate is None and room.count:
            gate = self._admit(now, misfits, actions)
        self._clock.set(gate or nobody, now)
        if gate is None:
            self._rate.idle()
        else:
            self._rate.tick(now, books.served, books.num_output, usable)
            self.preemption.consider(gate, now, actions)

    def _admit(self, now: float, misfits: set[Request], actions: list[Action]) -> Gate | None:
        """One pass over the policy's candidates.

        Urgent heads are admitted as they come; the first other admission ends the pass, because it may change whose
        turn it is. ``misfits``: requests that found too little KV earlier in this decision, which only takes KV.

        Returns:
            None after an admission that ended the pass; else the gate that holds the request in turn.
        """
        fleet = self._fleet
        usable = fleet.usable
        room = self._room
        free = fleet.most_free()
        can_shrink = self._budget.is_open
        is_futile = free < room.least_need()
        if is_futile and not can_shrink:
            return _KV
        placement = self.placement
        refused: list[tuple[Request, int, bool]] = []
        claims: Claims | None = None
        held_by = _KV
        candidates = self._policy.candidates(now)
        for request, standing in candidates:
            is_urgent = standing <= _URGENT_PICK
            if request.slice_count >= 0:
                self._books.refresh(request)
            new_tokens = request.slice_busy if room.count > 1 else request.slice_idle
            if standing is _BACKFILL and request.cut_tokens:
                # Who was cut for others comes back when it is its tenant's turn.
                continue
            gate = _KV
            if request not in misfits:
                options: list[tuple[Backend, int]] | None = None
                if request.input_tokens + new_tokens <= free:
                    options, gate = placement.options(request, new_tokens, usable, is_urgent=is_urgent)
                if not options and gate is _KV:
                    if can_shrink and standing <= _PICK:
                        new_tokens, options = self._shrink(request, free, new_tokens, is_urgent=is_urgent)
                    if not options:
                        misfits.add(request)
                if options and refused and not is_urgent:
                    if claims is None:
                        claims = Claims(placement, usable, refused, now)
                    options = self._unclaimed(options, claims, standing)
                    gate = Gate.CLAIM
                if options:
                    if standing <= _LATE:
                        self._start(request, standing, new_tokens, options, now, actions)
                        free = fleet.most_free()
                        if free < room.least_need():
                            break
                        claims = None
                        continue
                    if not isinstance(candidates, tuple):
                        candidates.close()
                    self._start(request, standing, new_tokens, options, now, actions)
                    return None
                note_blocked(request, gate)
            # Only the first in the order may have its slice shrunk.
            can_shrink = False
            if standing is not _BACKFILL:
                if standing > _LATE:
                    self.stalled = request.tenant
                    held_by = gate
                refused.append((request, new_tokens, is_urgent))
            if is_futile:
                break
        else:
            return held_by
        if not isinstance(candidates, tuple):
            candidates.close()
        return held_by

    def slice_ended(self, request: Request, now: float, actions: list[Action]) -> None:
        """A request waits for its next slice: it goes on at once, where the last one ended, if it may.

        TGI keeps the prompt of a slice that has ended in KV that nobody has reserved, which in a full pool is not for
        long: at the request's next turn it would be computed again. So the request goes ahead of whoever is in turn, as
        it would have if its slice had been longer, as far as the policy's bounds leave room
        (``FairnessPolicy.may_go_on``). Where running work is being cut for somebody, that one goes first.
        """
        backend = request.last_backend
        if backend is None or not backend.is_usable or backend.cut or backend.closing:
            return
        if request.state is not State.QUEUED or request.parked_s is not None:
            return
        new_tokens = request.slice_busy if self._room.count > 1 else request.slice_idle
        if not self._policy.may_go_on(request, request.input_tokens + new_tokens, now):
            return
        gates = self._gates
        gates.note_slice_end(new_tokens)
        gates.tightest_target_s = self._tiers.tightest_target_s
        options, _ = self.placement.options(request, new_tokens, [backend], is_urgent=False, is_onward=True)
        if options:
            self._start(request, Standing.ONWARD, new_tokens, options, now, actions)

    def finished(self) -> None:
        """An answer is complete."""
        self._gates.note_slice_end(0)

    def _shrink(
        self, request: Request, free: int, new_tokens: int, *, is_urgent: bool
    ) -> tuple[int, list[tuple[Backend, int]] | None]:
        """A shorter slice that fits now, and where; the slice as it was and None if there is no such slice."""
        shorter = shrunk_slice(request, self._config, free, new_tokens)
        if shorter:
            options, _ = self.placement.options(request, shorter, self._fleet.usable, is_urgent=is_urgent)
            if options:
                return shorter, options
        return new_tokens, None

    def _unclaimed(
        self, options: list[tuple[Backend, int]], claims: Claims, standing: Standing
    ) -> list[tuple[Backend, int]]:
        """Options that take nothing from those ahead who fit nowhere."""
        return claims.unclaimed(options, is_backfill=standing is _BACKFILL)

    def _start(
        self,
        request: Request,
        standing: Standing,
        new_tokens: int,
        options: list[tuple[Backend, int]],
        now: float,
        actions: list[Action],
    ) -> None:
        if new_tokens < request.slice_busy:
            self._budget.spend(request, new_tokens)
        backend, blocks = self.placement.choose(request, options)
        num_options = 0 if standing is Standing.ONWARD else len(options)
        dispatch = self._books.dispatch(request, standing, backend, blocks, new_tokens, now, num_options=num_options)
        actions.append(dispatch)
        if request.queue.ttft_target_s is not None:
            self._gates.note_urgent(blocks * backend.block_size)
