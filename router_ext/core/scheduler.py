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

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from router_ext.core import snapshot as pictures
from router_ext.core.actions import Action, Dispatch, Expire, Reject, RejectCode, SetTimer
from router_ext.core.admission import Backend, Gates
from router_ext.core.bounds import bound_service, peak_service, urgency_ratio
from router_ext.core.config import PoolConfig, TenantConfig
from router_ext.core.cost import LinearCost
from router_ext.core.estimates import Throughput
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
from router_ext.core.explain import Gate, WaitClock, note_blocked, waiting_reasons
from router_ext.core.fairness.base import FairnessPolicy, Standing
from router_ext.core.fairness.counters import Counters
from router_ext.core.fairness.fifo import Fifo
from router_ext.core.fairness.slo_fair import SloFair
from router_ext.core.ids import BackendId, RequestId, TenantId
from router_ext.core.lifecycle import IllegalTransition, State, Trigger, advance
from router_ext.core.placement import Claim, Placement
from router_ext.core.queues import Tenant, WaitingRoom
from router_ext.core.request import Request
from router_ext.core.slicing import SliceBudget, plan, room_tokens, shrunk_slice
from router_ext.core.tiers import Tiers

_REDECIDE_S = 0.01
"""Tokens of the tenant in turn may change whose turn it is; looked at no more often than this, to keep tokens cheap."""

_REMEMBERED = 1_024
"""Ended requests whose explanation can still be read."""

_REBASE_AT = 2.0**40
"""Counters are shifted down at the next change of configuration once the floor exceeds this. Doubles resolve a
thousandth of a token there, so it may take years longer without harm."""

_FOREVER = float("inf")

# Looking a member up on its class costs as much as a comparison; these are read several times per decision.
_LATE, _URGENT_PICK = Standing.LATE, Standing.URGENT_PICK
_PICK, _BACKFILL = Standing.PICK, Standing.BACKFILL
_NONE, _KV = Gate.NONE, Gate.KV


class Scheduler:
    """Orchestrates queues, fairness, KV ledger, admission and placement; no arithmetic of its own."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._now = 0.0
        self._requests: dict[RequestId, Request] = {}
        self._ended: OrderedDict[RequestId, Request] = OrderedDict()
        self._room = WaitingRoom()
        self._tenants: dict[TenantId, Tenant] = {}
        self._tiers = Tiers(config.tiers)
        self._counters = Counters()
        self._cost = LinearCost(w_prompt=config.w_prompt, w_output=config.w_output)
        self._backends: dict[BackendId, Backend] = {}
        self._usable: list[Backend] = []
        self._gates = Gates(headroom_ratio=config.headroom_ratio, is_on=True)
        self._placement = Placement(self._gates)
        self._budget = SliceBudget()
        self._throughput = Throughput()
        self._clock = WaitClock()
        self._next_seq = 1
        self._next_ticket = 1
        self._num_running = 0
        self._num_output = 0
        self._num_refilled = 0
        self._lags: list[tuple[float, int, Backend, bool]] = []
        """(instant, ticket, backend, whether KV is freed): closed streams, and prefills assumed to be over."""
        self._down_since: float | None = None
        self._timer_at = _FOREVER
        self._decided_s = -_FOREVER
        self._stalled: Tenant | None = None
        self._fastest: Backend | None = None
        self._policy: FairnessPolicy = self._apply(config)
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
        has_freed = bool(self._lags) and self._lags[0][0] <= now
        if has_freed:
            self._end_lags(now)
            self._decided_s = -_FOREVER
        self._handlers[type(event)](event, now, actions)
        if has_freed and self._decided_s < now:
            self._decide(now, actions)
        due = self._next_due()
        if due < self._timer_at:
            self._timer_at = due
            actions.append(SetTimer(at_s=due))
        return actions

    # --- events ----------------------------------------------------------------------------------------------------

    def _on_arrived(self, event: Arrived, now: float, actions: list[Action]) -> None:
        spec = event.request
        if spec.request_id in self._requests:
            raise IllegalTransition(f"request {spec.request_id} has arrived already")
        tier = self._tiers.get(spec.tier)
        tenant = self._tenant(spec.tenant)
        request = Request(spec, tenant=tenant, queue=tenant.queue(tier), seq=self._next_seq, arrival_s=now)
        self._next_seq += 1
        self._start_outage_clock(now)
        refusal = self._refusal(request, now)
        if refusal is not None:
            request.state = advance(request.state, Trigger.REJECT)
            actions.append(refusal)
            self._drop_idle(tenant)
            return
        self._tiers.touch(tier, now)
        self._requests[spec.request_id] = request
        self._enqueue(request, now, Trigger.QUEUE)
        if tier.max_queue_wait_s is not None:
            self._room.limit(request, now + tier.max_queue_wait_s)
        self._decide(now, actions)

    def _refusal(self, request: Request, now: float) -> Reject | None:
        """Why this request may not even wait, or None. Plans its first slice on the way."""
        if not plan(request, self._config, is_sliced=self._policy.is_gated):
            return Reject(request_id=request.request_id, code=RejectCode.TOO_LARGE, detail=self._too_large(request))
        if not self._usable and self._down_since is not None:
            waited = now - self._down_since
            if waited >= self._config.backend_wait_s:
                return Reject(
                    request_id=request.request_id,
                    code=RejectCode.NO_BACKEND,
                    detail=f"no backend has been usable for {waited:.0f} s",
                    retry_after_s=max(1.0, self._config.backend_wait_s / 2.0),
                )
        tenant = request.tenant
        if tenant.num_queued >= tenant.max_queued:
            return Reject(
                request_id=request.request_id,
                code=RejectCode.QUEUE_FULL,
                detail=f"{tenant.num_queued} requests of this tenant are waiting, its limit is {tenant.max_queued}",
                retry_after_s=self.drain_estimate(tenant.tenant_id),
            )
        if self._room.count >= self._config.max_queued:
            return Reject(
                request_id=request.request_id,
                code=RejectCode.QUEUE_FULL,
                detail=f"{self._room.count} requests are waiting, the pool's limit is {self._config.max_queued}",
                retry_after_s=self.drain_estimate(),
            )
        return None

    def _on_prompt_measured(self, event: PromptMeasured, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None or event.prompt_tokens == request.input_tokens:
            return
        if request.input_tokens == request.prompt_tokens:
            # The segment sends the client's own prompt, nothing generated: what was charged rests on the estimate.
            request.prompt_tokens = event.prompt_tokens
            if request.paid_in:
                tokens = self._cost.correct_prompt(request)
                request.tenant.prompt_tokens += tokens
                self._policy.charge(request.tenant, self._cost.w_prompt * tokens)
        request.input_tokens = event.prompt_tokens
        if request.state is State.QUEUED:
            if not plan(request, self._config, is_sliced=self._policy.is_gated):
                self._expire(request, RejectCode.TOO_LARGE, self._too_large(request), now, actions)
            else:
                self._room.note_need(request)
            self._decide(now, actions)
            return
        backend = request.backend
        assert backend is not None
        had = request.blocks
        backend.correct(request, backend.blocks(request, request.slice_tokens))
        if request.blocks < had:
            self._decide(now, actions)

    def _on_progressed(self, event: Progressed, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            return
        tokens = event.output_tokens
        if tokens <= 0:
            return
        state = request.state
        is_first = state is not State.DECODING
        if is_first:
            request.state = advance(state, Trigger.FIRST_TOKEN)
            self._first_token(request, now)
        tenant = request.tenant
        request.output_tokens += tokens
        request.slice_output += tokens
        self._num_output += tokens
        unpaid = self._cost.output(request)
        if unpaid:
            tenant.output_tokens += unpaid
            if self._config.gamma:
                self._update_expected(request)
            self._policy.charge(tenant, self._cost.w_output * unpaid)
        if request.slice_output - request.sampled_output >= 16:
            self._sample_step(request, now)
        if is_first or (tenant is self._stalled and now - self._decided_s >= _REDECIDE_S):
            self._decide(now, actions)

    def _on_slice_ended(self, event: SliceEnded, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            return
        advance(request.state, Trigger.SLICE_END)
        backend = self._leave_backend(request, now)
        backend.free(request.ticket)
        self._continue(request, Trigger.SLICE_END, event.dropped_tokens, event.next_prompt_tokens, now, actions)
        self._decide(now, actions)

    def _on_finished(self, event: Finished, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            return
        state = advance(request.state, Trigger.FINISH)
        backend = self._leave_backend(request, now)
        backend.free(request.ticket)
        self._end(request, state)
        self._decide(now, actions)

    def _on_failed(self, event: Failed, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            return
        trigger = Trigger.RETRY if event.is_retryable else Trigger.FAIL
        state = advance(request.state, trigger)
        lag = request.backend.release_lag_s(request) if request.backend is not None else 0.0
        backend = self._leave_backend(request, now)
        if backend.is_up:
            self._close(backend, request.ticket, now + lag)
        else:
            backend.free(request.ticket)
        if event.is_retryable:
            request.avoid = backend
            self._continue(request, trigger, event.dropped_tokens, event.next_prompt_tokens, now, actions)
        else:
            self._end(request, state)
        self._decide(now, actions)

    def _on_cancelled(self, event: Cancelled, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            return
        state = advance(request.state, Trigger.CANCEL)
        if request.state is State.QUEUED:
            self._dequeue(request, now)
        else:
            assert request.backend is not None
            lag = request.backend.release_lag_s(request)
            backend = self._leave_backend(request, now)
            self._close(backend, request.ticket, now + lag)
        self._end(request, state)
        self._decide(now, actions)

    def _on_backend_changed(self, event: BackendChanged, now: float, actions: list[Action]) -> None:
        backend = self._backends.get(event.backend)
        if backend is None or backend.is_retired or backend.is_up == event.is_up:
            return
        backend.is_up = event.is_up
        if not event.is_up:
            self._placement.forget(backend)
        self._refresh_usable(now)
        self._decide(now, actions)

    def _on_reconfigured(self, event: Reconfigured, now: float, actions: list[Action]) -> None:
        self._tiers.replace(event.config.tiers, now)
        if self._counters.floor_or_last() > _REBASE_AT:
            self._counters.rebase(list(self._tenants.values()))
        self._policy = self._apply(event.config)
        self._refresh_usable(now)
        self._room.forget_limits()
        for request in list(self._room.everyone.values()):
            if not plan(request, self._config, is_sliced=self._policy.is_gated):
                self._expire(request, RejectCode.TOO_LARGE, self._too_large(request), now, actions)
                continue
            tier = self._tiers.get(request.queue.name)
            if tier.max_queue_wait_s is not None:
                self._room.limit(request, request.arrival_s + tier.max_queue_wait_s)
        self._room.measure_needs()
        self._expire_due(now, actions)
        self._decide(now, actions)

    def _on_timer_fired(self, event: TimerFired, now: float, actions: list[Action]) -> None:
        self._timer_at = _FOREVER
        self._expire_due(now, actions)
        self._decide(now, actions)

    # --- queueing and ending ---------------------------------------------------------------------------------------

    def _enqueue(self, request: Request, now: float, trigger: Trigger) -> None:
        request.state = advance(request.state, trigger)
        tenant = request.tenant
        was_backlogged = tenant.num_queued > 0
        self._room.add(request, at_front=trigger is Trigger.RETRY)
        request.mark = self._clock.mark(now, tenant.num_dispatched)
        if not was_backlogged:
            self._policy.backlogged(tenant)
        if request.queue.head is request:
            self._policy.head_changed(request.queue)

    def _dequeue(self, request: Request, now: float) -> None:
        tenant = request.tenant
        was_head = request.queue.head is request
        self._room.remove(request)
        if request.mark is not None:
            request.waited.append((request.mark, self._clock.mark(now, tenant.num_dispatched)))
            request.mark = None
        if tenant.num_queued == 0:
            self._policy.idle(tenant)
        if was_head:
            self._policy.head_changed(request.queue)

    def _continue(
        self, request: Request, trigger: Trigger, dropped: int, next_prompt: int, now: float, actions: list[Action]
    ) -> None:
        """Put a request that ran back into its queue, keeping what it has."""
        request.output_tokens = max(0, request.output_tokens - dropped)
        request.recomputed_tokens += dropped
        if next_prompt > 0:
            request.input_tokens = next_prompt
        request.is_resumed = True
        can_fit = plan(request, self._config, is_sliced=self._policy.is_gated)
        self._enqueue(request, now, trigger)
        if not can_fit:
            self._expire(request, RejectCode.TOO_LARGE, self._too_large(request), now, actions)
            return
        wait = self._tiers.get(request.queue.name).max_queue_wait_s
        if wait is not None and request.output_tokens == 0:
            self._room.limit(request, request.arrival_s + wait)

    def _end(self, request: Request, state: State) -> None:
        request.state = state
        del self._requests[request.request_id]
        self._ended[request.request_id] = request
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        self._drop_idle(request.tenant)

    def _expire(self, request: Request, code: RejectCode, detail: str, now: float, actions: list[Action]) -> None:
        state = advance(request.state, Trigger.EXPIRE)
        self._dequeue(request, now)
        self._end(request, state)
        retry_after = None
        if code is RejectCode.QUEUE_TIMEOUT:
            retry_after = self.drain_estimate(request.tenant.tenant_id)
        elif code is RejectCode.NO_BACKEND:
            retry_after = max(1.0, self._config.backend_wait_s / 2.0)
        actions.append(Expire(request_id=request.request_id, code=code, detail=detail, retry_after_s=retry_after))

    def _expire_due(self, now: float, actions: list[Action]) -> None:
        for request in self._room.overdue(now):
            if request.state is State.QUEUED:
                waited = now - request.arrival_s
                detail = (
                    f"waited {waited:.1f} s, the tier allows {self._tiers.get(request.queue.name).max_queue_wait_s:g} s"
                )
                self._expire(request, RejectCode.QUEUE_TIMEOUT, detail, now, actions)
        if self._down_since is not None and now >= self._down_since + self._config.backend_wait_s:
            detail = f"no backend has been usable for {now - self._down_since:.0f} s"
            for request in list(self._room.everyone.values()):
                self._expire(request, RejectCode.NO_BACKEND, detail, now, actions)

    # --- running requests ------------------------------------------------------------------------------------------

    def _first_token(self, request: Request, now: float) -> None:
        backend = request.backend
        assert backend is not None
        backend.first_token(request, now)
        self._fastest = None
        request.first_token_s = request.sampled_s = now
        request.sampled_output = 1
        self._tiers.touch(self._tiers.get(request.queue.name), now)

    def _sample_step(self, request: Request, now: float) -> None:
        backend = request.backend
        assert backend is not None
        tokens = request.slice_output - request.sampled_output
        if tokens > 0 and now > request.sampled_s:
            backend.step_fit.observe(backend.num_running, (now - request.sampled_s) / tokens)
        request.sampled_s = now
        request.sampled_output = request.slice_output

    def _update_expected(self, request: Request) -> None:
        """Keep the tenant's predicted tokens in flight, which the decision key may use."""
        expected = 0
        if request.state.is_running:
            expected = max(
                0,
                min(
                    request.predicted_output_tokens - request.output_tokens, request.slice_tokens - request.slice_output
                ),
            )
        request.tenant.expected_rest += expected - request.expected_rest
        request.expected_rest = expected

    def _leave_backend(self, request: Request, now: float) -> Backend:
        """The running slice is over; seats go at once, the KV by the caller."""
        backend = request.backend
        assert backend is not None
        if request.slice_output > request.sampled_output:
            self._sample_step(request, now)
        backend.stop(request)
        request.backend = None
        request.last_backend = backend
        request.tenant.num_running -= 1
        self._num_running -= 1
        if request.expected_rest:
            request.tenant.expected_rest -= request.expected_rest
            request.expected_rest = 0
            self._policy.charge(request.tenant, 0.0)
        if backend.is_retired and backend.num_running == 0:
            self._placement.forget(backend)
        return backend

    def _close(self, backend: Backend, ticket: int, at_s: float) -> None:
        """The stream was closed; TGI frees its KV at ``at_s``."""
        heapq.heappush(self._lags, (at_s, ticket, backend, True))

    def _end_lags(self, now: float) -> None:
        lags = self._lags
        while lags and lags[0][0] <= now:
            _, ticket, backend, is_freed = heapq.heappop(lags)
            if is_freed:
                backend.free(ticket)
            else:
                backend.prefill_over(ticket)

    # --- the decision ----------------------------------------------------------------------------------------------

    def _decide(self, now: float, actions: list[Action]) -> None:
        """Admit until nobody can start."""
        self._decided_s = now
        self._stalled = None
        self._throughput.tick(now, self._num_output, is_busy=self._num_running > 0)
        self._budget.refill(self._num_output - self._num_refilled)
        self._num_refilled = self._num_output
        room = self._room
        if not room.count:
            self._clock.set(Gate.NONE, now)
            return
        if not self._usable:
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
        usable = self._usable
        room = self._room
        free = self._most_free()
        can_shrink = self._budget.is_open
        is_futile = free < room.least_need()
        if is_futile and not can_shrink:
            return _KV
        refused: list[tuple[Request, int, bool]] = []
        claims: list[Claim | None] = []
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
                if options and refused and not is_urgent:
                    options = self._unclaimed(options, refused, claims, now, standing)
                    gate = Gate.CLAIM
                if options:
                    if standing <= _LATE:
                        self._start(request, standing, new_tokens, options, now, actions)
                        free = self._most_free()
                        if free < room.least_need():
                            break
                        claims.clear()
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
                refused.append((request, new_tokens, is_urgent))
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
            options, _ = self._placement.options(request, shorter, self._usable, is_urgent=is_urgent)
            if options:
                return shorter, options
        return new_tokens, None

    def _most_free(self) -> int:
        """Tokens (input plus new) that fit on the backend with the most free KV."""
        most = 0
        for backend in self._usable:
            free = backend.ledger.free_blocks * backend.block_size + backend.spare_tokens
            if free > most:
                most = free
        return most

    def _unclaimed(
        self,
        options: list[tuple[Backend, int]],
        refused: list[tuple[Request, int, bool]],
        claims: list[Claim | None],
        now: float,
        standing: Standing,
    ) -> list[tuple[Backend, int]]:
        """Options that take nothing from those ahead who fit nowhere. Claims are computed here, on first need."""
        usable = self._usable
        for request, new_tokens, is_urgent in refused[len(claims) :]:
            claims.append(self._placement.claim(request, new_tokens, usable, now, is_urgent=is_urgent))
        left = []
        for option in options:
            backend, blocks = option
            for claim, (_, _, is_urgent) in zip(claims, refused, strict=True):
                if claim is None or claim.backend is not backend:
                    continue
                if is_urgent or standing is not _BACKFILL or not claim.is_kv or blocks > claim.spare_blocks:
                    break
            else:
                left.append(option)
        return left

    def _start(
        self,
        request: Request,
        standing: Standing,
        new_tokens: int,
        options: list[tuple[Backend, int]],
        now: float,
        actions: list[Action],
    ) -> None:
        """Dispatch: charge, reserve, say so."""
        if new_tokens < request.slice_busy:
            self._budget.spend(request, new_tokens)
        backend, blocks = self._placement.choose(request, options)
        tenant = request.tenant
        tenant.note_admission(request, self._config.aging_ratio)
        self._dequeue(request, now)
        request.state = advance(request.state, Trigger.DISPATCH)
        request.standing = standing
        request.backend = backend
        request.blocks = blocks
        request.ticket = self._next_ticket
        self._next_ticket += 1
        request.dispatched_s = now
        request.slice_tokens = new_tokens
        request.slice_output = 0
        request.sampled_output = 0
        backend.start(request, blocks, now)
        if not request.is_sliceable:
            # Its first token may stay unseen until the whole answer comes; do not let that close the gate.
            over = now + 2.0 * backend.first_token_s(request.prefill_ahead_tokens)
            heapq.heappush(self._lags, (over, request.ticket, backend, False))
        segment = request.segment
        request.segment = segment + 1
        tenant.num_running += 1
        tenant.num_dispatched += 1
        self._num_running += 1
        self._clock.num_dispatched += 1
        unpaid = self._cost.admit(request)
        if unpaid:
            tenant.prompt_tokens += unpaid
        if self._config.gamma:
            self._update_expected(request)
        if unpaid:
            self._policy.charge(tenant, self._cost.w_prompt * unpaid)
        if request.queue.ttft_target_s is not None:
            self._gates.note_urgent(blocks * backend.block_size)
        self._placement.remember(request, backend)
        actions.append(
            Dispatch(
                request_id=request.request_id,
                backend=backend.backend_id,
                slice_tokens=new_tokens if request.is_sliceable else request.remaining_tokens(),
                segment=segment,
                reason=_REASONS[standing],
            )
        )

    # --- configuration and backends --------------------------------------------------------------------------------

    def _apply(self, config: PoolConfig) -> FairnessPolicy:
        """Take over a configuration; everything that waits, runs or was counted stays."""
        self._config = config
        self._cost = LinearCost(w_prompt=config.w_prompt, w_output=config.w_output)
        for backend in self._backends.values():
            backend.is_retired = backend.backend_id not in config.backends
            backend.is_up = backend.is_up and not backend.is_retired
        for backend_id, stated in config.backends.items():
            known = self._backends.get(backend_id)
            if known is None:
                self._backends[backend_id] = Backend(stated)
            else:
                rule = (known.block_size, known.config.speculate)
                known.apply(stated)
                if rule != (stated.block_size, stated.speculate):
                    for request in self._requests.values():
                        if request.backend is known:
                            known.correct(request, known.blocks(request, request.slice_tokens))
        for backend_id in [b.backend_id for b in self._backends.values() if b.is_retired and not b.ledger.holdings]:
            del self._backends[backend_id]
        for index, backend_id in enumerate(sorted(self._backends)):
            self._backends[backend_id].index = index
        for tenant in self._tenants.values():
            tenant.is_configured = tenant.tenant_id in config.tenants
        for tenant_id, share in config.tenants.items():
            tenant = self._tenants.get(tenant_id) or self._add_tenant(share)
            tenant.max_queued = share.max_queued
            if tenant.weight != share.weight:
                self._counters.reweigh(tenant, share.weight)
        peak = peak_service(config)
        for tenant in list(self._tenants.values()):
            tenant.urgency_pass = urgency_ratio(config) * peak / tenant.weight
            tenant.backfill_pass = config.backfill_ratio * peak / tenant.weight
            self._drop_idle(tenant)
        policy = self._build_policy(config)
        self._gates.configure(headroom_ratio=config.headroom_ratio, is_on=policy.is_gated)
        self._reindex(policy)
        return policy

    def _build_policy(self, config: PoolConfig) -> FairnessPolicy:
        if config.policy == "fifo":
            return Fifo(self._counters, self._room)
        return SloFair(self._counters, config, self._fastest_first_token_s)

    def _reindex(self, policy: FairnessPolicy) -> None:
        """Show a policy that takes over who waits. Counters and periods of backlog stay as they are."""
        for tenant in self._tenants.values():
            for queue in tenant.queues.values():
                tier = self._tiers.get(queue.name)
                if queue.ttft_target_s != tier.ttft_target_s:
                    queue.ttft_target_s = tier.ttft_target_s
                    for request in queue.requests():
                        target = tier.ttft_target_s
                        request.deadline_s = None if target is None else request.arrival_s + target
                queue.rank = tier.rank
                queue.urgency = 0
                queue.indexed = None
                queue.version += 1
            tenant.sort_tiers()
            if isinstance(policy, SloFair) and tenant.is_backlogged:
                policy.adopt(tenant)
            for queue in tenant.by_rank:
                policy.head_changed(queue)

    def _add_tenant(self, config: TenantConfig, *, is_configured: bool = True) -> Tenant:
        tenant = self._tenants[config.tenant] = Tenant(config, is_configured=is_configured)
        peak = peak_service(self._config)
        tenant.urgency_pass = urgency_ratio(self._config) * peak / tenant.weight
        tenant.backfill_pass = self._config.backfill_ratio * peak / tenant.weight
        return tenant

    def _tenant(self, tenant_id: TenantId) -> Tenant:
        """The tenant by id. One that is not configured (any more) is served with weight 1 until it is gone."""
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            tenant = self._add_tenant(TenantConfig(tenant=tenant_id), is_configured=False)
        return tenant

    def _drop_idle(self, tenant: Tenant) -> None:
        """Forget a tenant that is not configured, has nothing here and owes no service."""
        if tenant.is_configured or tenant.num_queued or tenant.num_running:
            return
        if tenant.counter <= self._counters.floor_or_last():
            self._tenants.pop(tenant.tenant_id, None)

    def _refresh_usable(self, now: float) -> None:
        self._fastest = None
        self._usable = sorted((b for b in self._backends.values() if b.is_usable), key=lambda backend: backend.index)
        if self._usable:
            self._down_since = None
        else:
            self._start_outage_clock(now)

    def _start_outage_clock(self, now: float) -> None:
        if not self._usable and self._down_since is None:
            self._down_since = now

    def _fastest_first_token_s(self, prompt_tokens: int) -> float:
        """Seconds to the first token on the backend that is fastest for prompts of the size seen last.

        Asked for every head whose deadline is looked at, so the fastest is looked for only when speeds change.
        """
        fastest = self._fastest
        if fastest is None:
            if not self._usable:
                return 0.0
            fastest = self._fastest = min(self._usable, key=lambda backend: backend.first_token_s(prompt_tokens))
        return fastest.first_token_s(prompt_tokens)

    def _too_large(self, request: Request) -> str:
        limit = max((room_tokens(b) for b in self._config.backends.values()), default=0)
        longest = max((b.max_input_tokens for b in self._config.backends.values()), default=0)
        return (
            f"{request.input_tokens} input tokens and {request.remaining_tokens()} new tokens do not fit: no backend "
            f"holds more than {limit} tokens of one request or takes more than {longest} input tokens"
        )

    def _next_due(self) -> float:
        """The next instant at which time alone changes something."""
        due = self._lags[0][0] if self._lags and self._room.count else _FOREVER
        limit = self._room.next_limit_s()
        if limit is not None and limit < due:
            due = limit
        if self._down_since is not None and self._room.count:
            due = min(due, self._down_since + self._config.backend_wait_s)
        return due

    # --- reading ---------------------------------------------------------------------------------------------------

    def drain_estimate(self, tenant: TenantId | None = None) -> float:
        """Seconds until what waits now has been produced, at the measured rate; of one tenant at its share of it.

        Unjittered and unbounded; 1 if nothing has been measured yet.
        """
        rate = self._throughput.rate
        if not rate:
            return 1.0
        if tenant is None:
            return self._room.queued_tokens / rate
        known = self._tenants.get(tenant)
        if known is None:
            return 0.0
        share = 1.0
        if known.is_backlogged and self._counters.waiting_weight > 0.0:
            share = known.weight / self._counters.waiting_weight
        return known.queued_tokens / (rate * share)

    def explain(self, request_id: RequestId) -> list[str]:
        """Why a request waited, in sentences; readable for a while after its end. Empty if it is unknown."""
        request = self._requests.get(request_id)
        if request is None:
            request = self._ended.get(request_id)
            return [] if request is None else waiting_reasons(request, None)
        now_mark = self._clock.mark(self._now, request.tenant.num_dispatched) if request.mark is not None else None
        return waiting_reasons(request, now_mark)

    @property
    def config(self) -> PoolConfig:
        """The configuration in force."""
        return self._config

    def stats(self) -> pictures.PoolStats:
        """Numbers for heartbeats and metrics. Cost: O(tenants + backends)."""
        return pictures.pool_stats(
            config=self._config,
            room=self._room,
            tenants=self._tenants,
            backends=self._backends,
            counters=self._counters,
            num_running=self._num_running,
            held_by=self._clock.held,
            output_tokens_per_s=self._throughput.rate,
            drain_s=self.drain_estimate(),
            bound=bound_service(self._config),
        )

    def snapshot(self) -> dict[str, Any]:
        """A complete, JSON-safe picture of the state, for debugging. Cost: O(everything)."""
        return pictures.full_picture(self.stats(), self._requests, self._backends, now=self._now)

    def audit(self) -> list[str]:
        """Laws that do not hold at present (``core.invariants``); empty in a correct scheduler. Cost: O(everything)."""
        from router_ext.core import invariants

        return invariants.violations(
            requests=self._requests,
            room=self._room,
            tenants=self._tenants,
            backends=self._backends,
            counters=self._counters,
            num_running=self._num_running,
            closing={(backend.backend_id, ticket) for _, ticket, backend, is_freed in self._lags if is_freed},
        )


_REASONS = {
    Standing.URGENT: "urgent: its tenant is within its share and the deadline can be met",
    Standing.LATE: "urgent: its tenant is within its share, the deadline has passed or cannot be met",
    Standing.URGENT_PICK: "in turn and urgent: its tenant has received the least service for its weight",
    Standing.PICK: "in turn: its tenant has received the least service for its weight",
    Standing.BACKFILL: "behind the request in turn, which waits: takes only what that one leaves",
    Standing.HEAD: "in turn: first in the queue",
}
