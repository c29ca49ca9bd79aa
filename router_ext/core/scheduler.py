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
from router_ext.core.admission import Backend
from router_ext.core.agents import Agents
from router_ext.core.books import Books
from router_ext.core.bounds import bound_service, pass_service, terms
from router_ext.core.config import PoolConfig, same_but_shares
from router_ext.core.cost import CostModel, build_cost
from router_ext.core.decision import Decider
from router_ext.core.events import (
    Arrived,
    BackendChanged,
    Cancelled,
    Event,
    Failed,
    Finished,
    Heir,
    Inherited,
    Preempted,
    Progressed,
    PromptMeasured,
    Reconfigured,
    SliceEnded,
    Stepped,
    TimerFired,
)
from router_ext.core.explain import Reason
from router_ext.core.fairness import policy_class
from router_ext.core.fairness.base import FairnessPolicy, Surroundings
from router_ext.core.fairness.counters import Counters
from router_ext.core.fairness.switch import build_policy
from router_ext.core.fleet import Fleet
from router_ext.core.ids import RequestId, TenantId
from router_ext.core.in_line import InLine
from router_ext.core.inheritance import Closing, Standing, closing, leave, take_over_marks
from router_ext.core.lifecycle import IllegalTransition, State, Trigger, advance
from router_ext.core.limits import Limits
from router_ext.core.queues import TierQueue, WaitingRoom
from router_ext.core.request import Request
from router_ext.core.saved import SETTLE_S, Restored, save
from router_ext.core.siblings import Siblings
from router_ext.core.tenants import Tenants
from router_ext.core.tiers import Tiers
from router_ext.core.timeline import Moment
from router_ext.core.waits import Waits

_REDECIDE_S = 0.01
"""Tokens of the tenant in turn may change whose turn it is; looked at no more often than this, to keep tokens cheap."""

_TOKENS = (Progressed, Stepped)

_FOREVER = float("inf")


def _oldest_first(heir: Heir) -> float:
    return -heir.standing.age_s


class Scheduler:
    """Orchestrates queues, fairness, KV ledger, admission and placement; no arithmetic of its own."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._now = 0.0
        self._timer_at = _FOREVER
        self._settles_s = _FOREVER
        self._settling: list[Siblings[Any]] = []
        self._counters = Counters()
        self._room = room = WaitingRoom()
        self._tenants = tenants = Tenants(config, self._counters)
        self._tiers = tiers = Tiers(config.tiers)
        self._fleet = fleet = Fleet()
        self._agents = Agents(fleet.kv_rate)
        self._policy: FairnessPolicy | None = None
        self._books = books = Books(
            cost=build_cost(config), room=room, tenants=tenants, tiers=tiers, fleet=fleet, agents=self._agents
        )
        self._requests = books.requests
        self._waits = waits = Waits(books=books, counters=self._counters, fleet=fleet)
        self._limits = Limits(config, books=books, tiers=tiers, fleet=fleet, waits=waits)
        self._decider = Decider(
            config,
            books=books,
            counters=self._counters,
            fleet=fleet,
            tiers=tiers,
            waits=waits,
        )
        self._apply(config)
        room.shedding.apply(config, ())
        self._handlers: dict[type, Callable[[Any, float, list[Action]], None]] = {
            Arrived: self._on_arrived,
            PromptMeasured: self._on_prompt_measured,
            Progressed: self._on_progressed,
            Stepped: self._on_stepped,
            SliceEnded: self._on_slice_ended,
            Preempted: self._on_preempted,
            Finished: self._on_finished,
            Failed: self._on_failed,
            Cancelled: self._on_cancelled,
            BackendChanged: self._on_backend_changed,
            Reconfigured: self._on_reconfigured,
            Inherited: self._on_inherited,
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
            self._decider.decided_s = -_FOREVER
        self._handlers[type(event)](event, now, actions)
        if has_freed and self._decider.decided_s < now:
            self._decider.decide(now, actions)
        if type(event) in _TOKENS and self._decider.decided_s < now:
            # Tokens are most of all events; one that led to no decision brings no instant forward.
            return actions
        due = self._limits.next_due_s()
        look_again = self._decider.preemption.look_again_s
        if now < look_again < due:
            due = look_again
        if due < self._timer_at:
            self._timer_at = due
            actions.append(SetTimer(at_s=due))
        return actions

    @property
    def stall_ratio(self) -> float:
        """What compiling a grammar takes over what was predicted, on the slowest backend; 1 before any was seen."""
        return max((backend.exposure.speed.value for backend in self._fleet.usable), default=1.0)

    # --- events about requests -------------------------------------------------------------------------------------

    def _on_arrived(self, event: Arrived, now: float, actions: list[Action]) -> None:
        spec = event.request
        if spec.request_id in self._requests:
            raise IllegalTransition(f"request {spec.request_id} has arrived already")
        if now >= self._settles_s:
            self._settled()
        tier = self._tiers.get(spec.tier)
        tenant = self._tenants.get(spec.tenant)
        request = self._books.open(spec, tenant, tenant.queue(tier), now)
        self._fleet.start_outage(now)
        refusal = self._limits.refusal(request, now) or self._books.policy.refusal(request, now)
        if refusal is not None:
            request.state = advance(request.state, Trigger.REJECT)
            actions.append(refusal)
            self._tenants.drop_idle(tenant)
            return
        self._tiers.touch(tier, now)
        self._books.policy.arrived(request, now)
        self._books.enqueue(request, Trigger.QUEUE, now)
        self._limits.watch(request)
        self._limits.make_room(request, now, actions)
        self._decider.decide(now, actions)

    def _on_prompt_measured(self, event: PromptMeasured, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None or event.prompt_tokens == request.input_tokens:
            return
        self._books.measure(request, event.prompt_tokens)
        backend = request.backend
        if backend is None:
            self._limits.replan(request, now, actions)
            self._decider.decide(now, actions)
            return
        had = request.blocks
        backend.correct(request, backend.blocks(request, request.slice_tokens))
        if request.blocks < had:
            self._decider.decide(now, actions)

    def _on_progressed(self, event: Progressed, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None or event.output_tokens <= 0:
            return
        is_first = self._books.deliver(request, event.output_tokens, now)
        if is_first or (request.tenant is self._decider.stalled and now - self._decider.decided_s >= _REDECIDE_S):
            self._decider.decide(now, actions)

    def _on_stepped(self, event: Stepped, now: float, actions: list[Action]) -> None:
        requests, deliver = self._requests, self._books.deliver
        stalled = self._decider.stalled
        is_due = False
        for request_id, tokens in event.tokens:
            request = requests.get(request_id)
            if request is not None and tokens > 0 and (deliver(request, tokens, now) or request.tenant is stalled):
                is_due = True
        if is_due:
            self._decider.decide(now, actions)

    def _on_slice_ended(self, event: SliceEnded, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            return
        advance(request.state, Trigger.SLICE_END)
        self._leave(request, now).free(request.ticket)
        self._resume(request, event, Trigger.SLICE_END, now, actions)
        self._decider.slice_ended(request, now, actions)
        self._decider.decide(now, actions)

    def _on_preempted(self, event: Preempted, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None or request.state is not State.PREEMPTING:
            return
        self._leave_early(request, now)
        self._resume(request, event, Trigger.PREEMPTED, now, actions)
        self._decider.decide(now, actions)

    def _on_finished(self, event: Finished, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            return
        state = advance(request.state, Trigger.FINISH)
        if event.is_upstream_over:
            self._leave(request, now).free(request.ticket)
        else:
            self._leave_early(request, now)
        self._books.end(request, state, now)
        self._decider.finished()
        self._decider.decide(now, actions)

    def _on_failed(self, event: Failed, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            return
        trigger = Trigger.RETRY if event.is_retryable else Trigger.FAIL
        state = advance(request.state, trigger)
        backend = self._leave_early(request, now)
        if event.is_retryable:
            request.avoid = backend
            request.is_suspect = event.is_suspect
            self._resume(request, event, trigger, now, actions)
        else:
            self._books.end(request, state, now)
        self._decider.decide(now, actions)

    def _on_cancelled(self, event: Cancelled, now: float, actions: list[Action]) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            return
        state = advance(request.state, Trigger.CANCEL)
        if request.backend is None:
            self._books.dequeue(request, now)
        else:
            self._leave_early(request, now)
        self._books.end(request, state, now)
        self._decider.decide(now, actions)

    def _leave(self, request: Request, now: float) -> Backend:
        """The running slice is over; its KV is the caller's to free."""
        return self._books.leave(request, now)

    def _leave_early(self, request: Request, now: float) -> Backend:
        """The stream was closed before its end: a backend that is up frees the KV when it notices."""
        at_s = now
        if request.state is State.PREEMPTING:
            at_s = max(now, request.release_at_s)
        elif request.backend is not None:
            at_s += request.backend.release_lag_s(request)
        backend = self._leave(request, now)
        if backend.is_up:
            self._close(backend, request.ticket, at_s)
        else:
            backend.free(request.ticket)
        return backend

    def _close(self, backend: Backend, ticket: int, at_s: float) -> None:
        """The stream was closed; TGI frees its KV at ``at_s``."""
        self._fleet.close(backend, ticket, at_s)

    def _resume(
        self,
        request: Request,
        event: SliceEnded | Preempted | Failed,
        trigger: Trigger,
        now: float,
        actions: list[Action],
    ) -> None:
        if not self._books.resume(request, trigger, event.dropped_tokens, event.next_prompt_tokens, now):
            self._limits.expire_too_large(request, now, actions)
        elif request.output_tokens == 0:
            self._limits.watch(request)

    # --- events about the pool -------------------------------------------------------------------------------------

    def _on_backend_changed(self, event: BackendChanged, now: float, actions: list[Action]) -> None:
        backend = self._fleet.backends.get(event.backend)
        if backend is None or backend.is_retired:
            return
        if backend.is_up == event.is_up:
            if backend.is_on_trial != event.is_on_trial:
                backend.is_on_trial = event.is_on_trial
                self._decider.decide(now, actions)
            return
        backend.is_up = event.is_up
        backend.is_on_trial = event.is_on_trial
        if event.is_up:
            backend.exposure.fell_s = None
        else:
            backend.prefixes.clear()
            backend.exposure.went_down(now)
        if self._fleet.refresh(now) and self._fleet.usable:
            self._limits.recheck(now, actions)
        self._books.try_next(now)
        self._decider.decide(now, actions)

    def _on_reconfigured(self, event: Reconfigured, now: float, actions: list[Action]) -> None:
        self._tiers.replace(event.config.tiers, now)
        is_rebased = self._tenants.rebase_counters()
        before = self._config
        if before.cost_model != event.config.cost_model:
            self._counters.level(self._tenants.units())
            self._policy = None
        self._apply(event.config, is_rebased=is_rebased)
        has_new_rules = bound_service(before) != bound_service(event.config) or (
            (before.tenants, before.groups) != (event.config.tenants, event.config.groups)
        )
        if has_new_rules or before.cost_model != event.config.cost_model:
            self._counters.restart_gap(self._tenants.units(), pass_service(event.config))
        self._fleet.refresh(now)
        if self._tenants.has_moved or not same_but_shares(before, event.config):
            self._room.shedding.apply(event.config, self._room.waiting())
        else:
            for tenant in self._tenants.reweighed:
                self._room.shedding.reweighed(tenant)
        self._limits.apply(event.config, now, actions)
        self._decider.decide(now, actions)

    def _apply(self, config: PoolConfig, *, is_rebased: bool = False) -> None:
        """Take over a configuration; everything that waits, runs or was counted stays. ``is_rebased``: the counters
        begin at another zero, which no index of the policy in force knows."""
        before, self._config = self._config, config
        cost = build_cost(config)
        self._fleet.apply(config.backends, self._requests.values())
        moved = self._tenants.apply(config)
        if moved:
            self._books.regroup(set(moved))
        policy = None if moved or is_rebased else self._kept_policy(before, config)
        if policy is None:
            policy = self._build_policy(
                config, cost, has_moved=bool(moved), has_same_tiers=before.tiers == config.tiers
            )
        else:
            for tenant in self._tenants.reweighed:
                if tenant.unit.is_backlogged:
                    policy.reweighed(tenant.unit)
        self._policy = policy
        self._books.adopt(config, policy, cost)
        self._decider.adopt(config, policy)

    def _kept_policy(self, before: PoolConfig, config: PoolConfig) -> FairnessPolicy | None:
        """The policy in force, if it need not be built anew: at most shares of tenants have changed."""
        policy = self._policy
        if policy is None or (policy.is_weighted and before is not config):
            return None
        return policy if same_but_shares(before, config) else None

    def _build_policy(
        self, config: PoolConfig, cost: CostModel, *, has_moved: bool, has_same_tiers: bool
    ) -> FairnessPolicy:
        fleet = self._fleet
        around = Surroundings(
            config=config,
            counters=self._counters,
            room=self._room,
            agents=self._agents,
            peak_service=cost.peak_service(config),
            cost=cost,
            first_token_s=fleet.first_token_s,
            step_s=fleet.step_s,
            free_ratio=fleet.free_ratio,
            most_free=fleet.most_free,
            held_blocks=fleet.held_blocks,
        )
        self._books.order_agents(policy_class(config.policy).orders_agents)
        return build_policy(
            around,
            tenants=self._tenants.units(),
            tiers=self._tiers,
            before=None if has_moved else self._policy,
            has_same_tiers=has_same_tiers,
        )

    def _on_timer_fired(self, event: TimerFired, now: float, actions: list[Action]) -> None:
        self._timer_at = _FOREVER
        self._limits.expire_due(now, actions)
        self._books.try_next(now)
        self._decider.decide(now, actions)

    # --- across restarts -------------------------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """Who is ahead of whom, JSON-safe, for ``restore`` in another process (``core.saved``). O(tenants + keys)."""
        return save(self._tenants.by_id.values(), self._tenants.groups, self._counters.base(), self._config.cost_model)

    def restore(self, saved: object, now: float) -> list[str]:
        """Begin with the counters of a scheduler that is gone, before the first request arrives.

        Returns:
            sentences about what was ignored, because it is not configured or no counter.

        Raises:
            ValueError: requests have arrived already.
        """
        if self._books.num_opened:
            raise ValueError("counters can be restored only before the first request arrives")
        restored = Restored(self._config, self._tenants)
        restored.read(saved)
        self._settling = [*restored.levels, *(group.members for group in self._tenants.groups.values())]
        for level in self._settling:
            level.settle()
        self._settles_s = now + SETTLE_S
        self._counters.settle()
        return restored.reasons

    def leave(self, now: float) -> tuple[list[Standing], list[Closing]]:
        """Where every request stands, and the KV of streams that are closing, for ``Inherited`` in another process."""
        now = max(now, self._now)
        self._fleet.end_lags(now)
        return leave(self._requests.values(), now), closing(self._fleet, now)

    def _on_inherited(self, event: Inherited, now: float, actions: list[Action]) -> None:
        opened: dict[RequestId, tuple[Heir, Request]] = {}
        # Everybody keeps the place in the order of arrival.
        for heir in sorted(event.requests, key=_oldest_first):
            spec = heir.request
            if spec.request_id in self._requests or spec.request_id in opened:
                continue
            tier = self._tiers.get(spec.tier)
            tenant = self._tenants.get(spec.tenant)
            arrival_s = now - heir.standing.age_s
            request = self._books.open(spec, tenant, tenant.queue(tier), arrival_s)
            take_over_marks(request, heir.standing)
            self._tiers.touch(tier, now)
            self._books.policy.arrived(request, now)
            opened[spec.request_id] = heir, request
        self._fleet.start_outage(now)
        queues: dict[TierQueue, None] = {}
        names = [heir.request.request_id for heir in event.requests]
        heirs = [opened.pop(name) for name in names if name in opened]
        # All of them wait before the first is running again: a queue that becomes empty in between would lift whoever
        # comes after it, to what its own tenant is ahead.
        fitting: dict[RequestId, bool] = {}
        for _, request in heirs:
            fitting[request.request_id] = self._books.plan(request)
            self._books.enqueue(request, Trigger.QUEUE, now)
        for heir, request in heirs:
            standing = heir.standing
            if standing.backend is not None:
                self._books.inherit(request, standing, self._fleet.place(standing.backend), now)
            elif not fitting[request.request_id]:
                self._limits.expire_too_large(request, now, actions)
            else:
                queues[request.queue] = None
                if request.output_tokens == 0:
                    self._limits.watch(request)
        for queue in queues:
            queue.sort()
            self._books.policy.head_changed(queue)
        for held in event.closing:
            backend = self._fleet.place(held.backend)
            self._fleet.close(backend, self._books.hold(backend, held.tokens), now + held.rest_s)
        # Everybody is back at once: there is nobody to wait for.
        if now < self._settles_s < _FOREVER:
            self._settled()
        self._decider.decide(now, actions)

    def _settled(self) -> None:
        self._settles_s = _FOREVER
        for level in self._settling:
            level.settled()
        self._settling = []
        self._counters.settled()
        self._counters.restart_gap(self._tenants.units(), pass_service(self._config))

    # --- reading ---------------------------------------------------------------------------------------------------

    @property
    def config(self) -> PoolConfig:
        """The configuration in force."""
        return self._config

    def drain_estimate(self, tenant: TenantId | None = None) -> float:
        """Seconds until what waits now has been produced, at the measured rate; of one tenant at its share of it.

        Unjittered and unbounded; 1 if nothing has been measured yet.
        """
        if tenant is None:
            return self._waits.drain_s(None)
        known = self._tenants.by_id.get(tenant)
        return 0.0 if known is None else self._waits.drain_s(known)

    def timeline(self, request_id: RequestId) -> list[Moment]:
        """What became of a request, step by step; readable for a while after its end. Empty if it is unknown."""
        return self._books.timeline(request_id)

    def explain(self, request_id: RequestId) -> list[Reason]:
        """Why a request waited, the longest cause first; readable for a while after its end. Empty if it is unknown."""
        return self._books.explain(request_id, self._now)

    def in_line(self, request_id: RequestId) -> InLine | None:
        """Where a request stands that waits now, None if it does not. Cost: O(requests of its tenant that wait)."""
        request = self._requests.get(request_id)
        return self._waits.in_line(request) if request is not None and request.state is State.QUEUED else None

    def stats(self, *, only_seen: bool = False) -> pictures.PoolStats:
        """Numbers for heartbeats and metrics. Cost: O(tenants + backends).

        ``only_seen``: without tenants that have never had anything here, of which there may be very many.
        """
        if not only_seen:
            for tenant_id in self._config.tenants:
                self._tenants.get(tenant_id)
        return pictures.pool_stats(
            config=self._config,
            room=self._room,
            tenants=self._tenants.by_id,
            groups=self._tenants.groups,
            backends=self._fleet.backends,
            counters=self._counters,
            num_running=self._books.num_running,
            held_by=self._books.clock.held,
            output_tokens_per_s=self._waits.throughput.rate,
            drain_s=self.drain_estimate(),
            terms=terms(self._config),
            service_per_gpu_s=self._waits.rate.per_backend_s,
            preempted=self._decider.preemption.preempted,
            waste=self._books.waste,
            kv_price=self._books.kv_price,
        )

    def snapshot(self) -> dict[str, Any]:
        """A complete, JSON-safe picture of the state, for debugging. Cost: O(everything)."""
        return pictures.full_picture(self.stats(only_seen=True), self._requests, self._fleet.backends, now=self._now)

    def audit(self) -> list[str]:
        """Laws that do not hold at present (``core.invariants``); empty in a correct scheduler. Cost: O(everything)."""
        from router_ext.core import invariants

        return invariants.violations(
            requests=self._requests,
            room=self._room,
            tenants=self._tenants.by_id,
            groups=self._tenants.groups,
            backends=self._fleet.backends,
            counters=self._counters,
            num_running=self._books.num_running,
            closing=self._fleet.closing(),
            waste=self._books.waste,
        )
