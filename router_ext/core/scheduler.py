"""The scheduler of one pool: events in, actions out.

    event --> book it (queues, counters, ledger) --> decide: candidates x placement, until nobody can start --> actions

``handle`` is synchronous and deterministic: the same events at the same instants give the same actions. Instants are
seconds of one monotonic clock and never decrease. The caller must

- carry actions out in order, and report what became of every ``Dispatch`` by ``Finished``, ``SliceEnded``, ``Failed``
  or ``Cancelled``, exactly once;
- send ``TimerFired`` at the instant of the newest ``SetTimer`` (early or spurious ones do no harm).

Events about requests the scheduler no longer knows are ignored: a client may leave while its last token is on the way.
An event that contradicts the state of its request raises ``IllegalTransition`` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from router_ext.core import snapshot as pictures
from router_ext.core.actions import Action, SetTimer
from router_ext.core.admission import Backend, Gates
from router_ext.core.books import Books
from router_ext.core.bounds import bound_service
from router_ext.core.config import PoolConfig
from router_ext.core.cost import LinearCost
from router_ext.core.events import (
    Arrived,
    BackendChanged,
    Cancelled,
    Event,
    Failed,
    Finished,
    Progressed,
    PromptMeasured,
    Reconfigured,
    SliceEnded,
    TimerFired,
)
from router_ext.core.explain import Gate, note_blocked
from router_ext.core.fairness.base import FairnessPolicy, Standing
from router_ext.core.fairness.counters import Counters
from router_ext.core.fairness.switch import build_policy
from router_ext.core.fleet import Fleet
from router_ext.core.ids import RequestId, TenantId
from router_ext.core.lifecycle import IllegalTransition, Trigger, advance
from router_ext.core.limits import Limits
from router_ext.core.placement import Claims, Placement
from router_ext.core.queues import Tenant, WaitingRoom
from router_ext.core.request import Request
from router_ext.core.slicing import SliceBudget, shrunk_slice
from router_ext.core.tenants import Tenants
from router_ext.core.tiers import Tiers

_REDECIDE_S = 0.01
"""Tokens of the tenant in turn may change whose turn it is; looked at no more often than this, to keep tokens cheap."""

_FOREVER = float("inf")

# Looking a member up on its class costs as much as a comparison; these are read several times per decision.
_LATE, _URGENT_PICK = Standing.LATE, Standing.URGENT_PICK
_PICK, _BACKFILL = Standing.PICK, Standing.BACKFILL
_NONE, _KV = Gate.NONE, Gate.KV


class Scheduler:
    """Orchestrates queues, fairness, KV ledger, admission and placement; no arithmetic of its own."""

    def __init__(self, config: PoolConfig) -> None:
        self._now = 0.0
        self._counters = Counters()
        self._tiers = Tiers(config.tiers)
        self._tenants = Tenants(config, self._counters)
        self._fleet = Fleet()
        self._cost = LinearCost(w_prompt=config.w_prompt, w_output=config.w_output)
        self._room = WaitingRoom()
        self._books = Books(
            cost=self._cost, room=self._room, tenants=self._tenants, tiers=self._tiers, fleet=self._fleet
        )
        self._requests = self._books.requests
        self._clock = self._books.clock
        self._limits = Limits(
            config,
            books=self._books,
            counters=self._counters,
            tenants=self._tenants,
            tiers=self._tiers,
            fleet=self._fleet,
        )
        self._gates = Gates(headroom_ratio=config.headroom_ratio, is_on=True)
        self._placement = Placement(self._gates)
        self._budget = SliceBudget()
        self._timer_at = _FOREVER
        self._decided_s = -_FOREVER
        self._stalled: Tenant | None = None
        self._config: PoolConfig
        self._policy: FairnessPolicy
        self._apply(config)
        self._handlers: dict[type, Callable[[Any, float, list[Action]], None]] = {
            Arrived: self._on_arrived,
            PromptMeasured: self._on_prompt_measured,
            Progressed: self._on_progressed,
            SliceEnded: self._on_slice_ended,
            Finished: self._on_finished,
            Failed: self._on_failed,
            Cancelled: self._on_cancelled,
            BackendChanged: self._on_backend_changed,
            Reconfigured: self._on_reconfigured,
            TimerFired: self._on_timer_fired,
        }

    # --- the one entrance ------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event at instant ``now`` (seconds, never decreasing) and return what to do, in order.

        Raises:
            IllegalTransition: the event contradicts the state of its request; nothing has changed.
        """
        if now < self._now:
            now = self._now
        self._now = now
        actions: list[Action] = []
        lags = self._fleet.lags
        has_freed = bool(lags) and lags[0][0] <= now
        if has_freed:
            self._fleet.end_lags(now)
            self._decided_s = -_FOREVER
        self._handlers[type(event)](event, now, actions)
        if has_freed and self._decided_s < now:
            self._decide(now, actions)
        due = self._limits.next_due_s()
        if due < self._timer_at:
            self._timer_at = due
            actions.append(SetTimer(at_s=due))
        return actions

    # --- events about requests -------------------------------------------------------------------------------------

    def _on_arrived(self, event: Arrived, now: float, actions: list[Action]) -> None:
        spec = event.request
        if spec.request_id in self._requests:
            raise IllegalTransition(f"request {spec.request_id} has arrived already")
        tier = self._tiers.get(spec.tier)
        tenant = self._tenants.get(spec.tenant)
        request = self._books.open(spec, tenant, tenant.queue(tier), now)
        self._fleet.start_outage(now)
        refusal = self._limits.refusal(request, now)
        if refusal is not None:
            request.state = advance(request.state, Trigger.REJECT)
            actions.append(refusal)
            self._tenants.drop_idle(tenant)
            return
        self._tiers.touch(tier, now)
        self._books.enqueue(request, Trigger.QUEUE, now)
        self._limits.watch(request)
        self._decide(now, actions)

    def _on_prompt_measured(self, event: PromptMeasured, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None or event.prompt_tokens == request.input_tokens:
            return
        self._books.measure(request, event.prompt_tokens)
        backend = request.backend
        if backend is None:
            self._limits.replan(request, now, actions)
            self._decide(now, actions)
            return
        had = request.blocks
        backend.correct(request, backend.blocks(request, request.slice_tokens))
        if request.blocks < had:
            self._decide(now, actions)

    def _on_progressed(self, event: Progressed, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None or event.output_tokens <= 0:
            return
        is_first = self._books.deliver(request, event.output_tokens, now)
        if is_first or (request.tenant is self._stalled and now - self._decided_s >= _REDECIDE_S):
            self._decide(now, actions)

    def _on_slice_ended(self, event: SliceEnded, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            return
        advance(request.state, Trigger.SLICE_END)
        self._leave(request, now).free(request.ticket)
        self._resume(request, event, Trigger.SLICE_END, now, actions)
        self._decide(now, actions)

    def _on_finished(self, event: Finished, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            return
        state = advance(request.state, Trigger.FINISH)
        self._leave(request, now).free(request.ticket)
        self._books.end(request, state)
        self._decide(now, actions)

    def _on_failed(self, event: Failed, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            return
        trigger = Trigger.RETRY if event.is_retryable else Trigger.FAIL
        state = advance(request.state, trigger)
        lag_s = request.backend.release_lag_s(request) if request.backend is not None else 0.0
        backend = self._leave(request, now)
        if backend.is_up:
            self._close(backend, request.ticket, now + lag_s)
        else:
            backend.free(request.ticket)
        if event.is_retryable:
            request.avoid = backend
            self._resume(request, event, trigger, now, actions)
        else:
            self._books.end(request, state)
        self._decide(now, actions)

    def _on_cancelled(self, event: Cancelled, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            return
        state = advance(request.state, Trigger.CANCEL)
        if request.backend is None:
            self._books.dequeue(request, now)
        else:
            lag_s = request.backend.release_lag_s(request)
            self._close(self._leave(request, now), request.ticket, now + lag_s)
        self._books.end(request, state)
        self._decide(now, actions)

    def _leave(self, request: Request, now: float) -> Backend:
        """The running slice is over; its KV is the caller's to free."""
        backend = self._books.leave(request, now)
        if backend.is_retired and backend.num_running == 0:
            self._placement.forget(backend)
        return backend

    def _close(self, backend: Backend, ticket: int, at_s: float) -> None:
        """The stream was closed; TGI frees its KV at ``at_s``."""
        self._fleet.close(backend, ticket, at_s)

    def _resume(
        self, request: Request, event: SliceEnded | Failed, trigger: Trigger, now: float, actions: list[Action]
    ) -> None:
        if not self._books.resume(request, trigger, event.dropped_tokens, event.next_prompt_tokens, now):
            self._limits.expire_too_large(request, now, actions)
        elif request.output_tokens == 0:
            self._limits.watch(request)

    # --- events about the pool -------------------------------------------------------------------------------------

    def _on_backend_changed(self, event: BackendChanged, now: float, actions: list[Action]) -> None:
        backend = self._fleet.backends.get(event.backend)
        if backend is None or backend.is_retired or backend.is_up == event.is_up:
            return
        backend.is_up = event.is_up
        if not event.is_up:
            self._placement.forget(backend)
        self._fleet.refresh(now)
        self._decide(now, actions)

    def _on_reconfigured(self, event: Reconfigured, now: float, actions: list[Action]) -> None:
        self._tiers.replace(event.config.tiers, now)
        self._tenants.rebase_counters()
        self._apply(event.config)
        self._fleet.refresh(now)
        self._limits.apply(event.config, now, actions)
        self._decide(now, actions)

    def _apply(self, config: PoolConfig) -> None:
        """Take over a configuration; everything that waits, runs or was counted stays."""
        self._config = config
        self._cost.configure(w_prompt=config.w_prompt, w_output=config.w_output)
        self._fleet.apply(config.backends, self._requests.values())
        self._tenants.apply(config)
        self._policy = build_policy(
            config,
            counters=self._counters,
            room=self._room,
            tenants=self._tenants.by_id.values(),
            tiers=self._tiers,
            first_token_s=self._fleet.first_token_s,
        )
        self._books.adopt(config, self._policy)
        self._gates.configure(headroom_ratio=config.headroom_ratio, is_on=self._policy.is_gated)

    def _on_timer_fired(self, event: TimerFired, now: float, actions: list[Action]) -> None:
        self._timer_at = _FOREVER
        self._limits.expire_due(now, actions)
        self._decide(now, actions)

    # --- the decision ----------------------------------------------------------------------------------------------

    def _decide(self, now: float, actions: list[Action]) -> None:
        """Admit until nobody can start."""
        self._decided_s = now
        self._stalled = None
        books = self._books
        self._limits.throughput.tick(now, books.num_output, is_busy=books.num_running > 0)
        self._budget.refill(books.take_new_output())
        room = self._room
        if not room.count:
            self._clock.set(_NONE, now)
            return
        if not self._fleet.usable:
            self._clock.set(Gate.NO_BACKEND, now)
            return
        self._tiers.refresh(now)
        self._gates.tightest_target_s = self._tiers.tightest_target_s
        misfits: set[Request] = set()
        gate: Gate | None = None
        while gate is None and room.count:
            gate = self._admit(now, misfits, actions)
        self._clock.set(gate or _NONE, now)

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
        claims = Claims(self._placement, usable, now)
        held_by = _KV
        candidates = self._policy.candidates(now)
        for request, standing in candidates:
            is_urgent = standing <= _URGENT_PICK
            new_tokens = request.slice_busy if room.count > 1 else request.slice_idle
            gate = _KV
            if request not in misfits:
                options: list[tuple[Backend, int]] | None = None
                if request.input_tokens + new_tokens <= free:
                    options, gate = self._placement.options(request, new_tokens, usable, is_urgent=is_urgent)
                if not options and gate is _KV:
                    if can_shrink and standing <= _PICK:
                        new_tokens, options = self._shrink(request, free, new_tokens, is_urgent=is_urgent)
                    if not options:
                        misfits.add(request)
                if options and claims and not is_urgent:
                    options = self._unclaimed(options, claims, standing)
                    gate = Gate.CLAIM
                if options:
                    if standing <= _LATE:
                        self._start(request, standing, new_tokens, options, now, actions)
                        free = fleet.most_free()
                        if free < room.least_need():
                            break
                        claims.outdate()
                        continue
                    candidates.close()
                    self._start(request, standing, new_tokens, options, now, actions)
                    return None
                note_blocked(request, gate)
            # Only the first in the order may have its slice shrunk.
            can_shrink = False
            if standing is not _BACKFILL:
                if standing > _LATE:
                    self._stalled = request.tenant
                    held_by = gate
                claims.add(request, new_tokens, is_urgent=is_urgent)
            if is_futile:
                break
        candidates.close()
        return held_by

    def _shrink(
        self, request: Request, free: int, new_tokens: int, *, is_urgent: bool
    ) -> tuple[int, list[tuple[Backend, int]] | None]:
        """A shorter slice that fits now, and where; the slice as it was and None if there is no such slice."""
        shorter = shrunk_slice(request, self._config, free, new_tokens)
        if shorter:
            options, _ = self._placement.options(request, shorter, self._fleet.usable, is_urgent=is_urgent)
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
        backend, blocks = self._placement.choose(request, options)
        actions.append(self._books.dispatch(request, standing, backend, blocks, new_tokens, now))
        if request.queue.ttft_target_s is not None:
            self._gates.note_urgent(blocks * backend.block_size)
        self._placement.remember(request, backend)

    # --- reading ---------------------------------------------------------------------------------------------------

    @property
    def config(self) -> PoolConfig:
        """The configuration in force."""
        return self._config

    def drain_estimate(self, tenant: TenantId | None = None) -> float:
        """Seconds until what waits now has been produced, at the measured rate; of one tenant at its share of it.

        Unjittered and unbounded; 1 if nothing has been measured yet.
        """
        return self._limits.drain_s(tenant)

    def explain(self, request_id: RequestId) -> list[str]:
        """Why a request waited, in sentences; readable for a while after its end. Empty if it is unknown."""
        return self._books.explain(request_id, self._now)

    def stats(self) -> pictures.PoolStats:
        """Numbers for heartbeats and metrics. Cost: O(tenants + backends)."""
        return pictures.pool_stats(
            config=self._config,
            room=self._room,
            tenants=self._tenants.by_id,
            backends=self._fleet.backends,
            counters=self._counters,
            num_running=self._books.num_running,
            held_by=self._clock.held,
            output_tokens_per_s=self._limits.throughput.rate,
            drain_s=self.drain_estimate(),
            bound=bound_service(self._config),
        )

    def snapshot(self) -> dict[str, Any]:
        """A complete, JSON-safe picture of the state, for debugging. Cost: O(everything)."""
        return pictures.full_picture(self.stats(), self._requests, self._fleet.backends, now=self._now)

    def audit(self) -> list[str]:
        """Laws that do not hold at present (``core.invariants``); empty in a correct scheduler. Cost: O(everything)."""
        from router_ext.core import invariants

        return invariants.violations(
            requests=self._requests,
            room=self._room,
            tenants=self._tenants.by_id,
            backends=self._fleet.backends,
            counters=self._counters,
            num_running=self._books.num_running,
            closing=self._fleet.closing(),
        )
