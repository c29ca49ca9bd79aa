"""The books of every request, from its arrival to its end: where it is, what it has received, what was charged.

    enqueue --> dispatch --> deliver ... --> leave --> end            complete, failed, cancelled
                                              `--> resume --> ...     slice end, retry: back into its queue

One method per step of a request's life. Each leaves queues, running counts, service counters, clocks and the policy's
view in agreement; none decides anything. Whether a step is legal is ``lifecycle``'s affair, asked before anything
changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from router_ext.core.actions import Dispatch
from router_ext.core.admission import Backend
from router_ext.core.agents import Agents
from router_ext.core.bounds import stall_service
from router_ext.core.config import PoolConfig
from router_ext.core.cost import CostModel
from router_ext.core.estimates import PredictionBias
from router_ext.core.events import RequestSpec
from router_ext.core.explain import Reason, WaitClock, waiting_reasons
from router_ext.core.fairness.base import FairnessPolicy, Standing
from router_ext.core.fleet import Fleet
from router_ext.core.ids import RequestId
from router_ext.core.inheritance import Standing as Inheritance
from router_ext.core.kv import TGI_NEW_TOKENS_CAP
from router_ext.core.lanes import Lane
from router_ext.core.lengths import LEAST_SLICE, Lengths
from router_ext.core.lifecycle import State, Trigger, advance
from router_ext.core.queues import Tenant, TierQueue, WaitingRoom
from router_ext.core.request import Request
from router_ext.core.sizing import KvPrice, cheapest
from router_ext.core.slicing import plan
from router_ext.core.survival import Survival
from router_ext.core.tenants import Tenants
from router_ext.core.tiers import Tiers
from router_ext.core.timeline import Moment, Step, note, timeline
from router_ext.core.trial import next_on_trial
from router_ext.core.waste import WasteBudget

_REMEMBERED = 1_024
"""Ended requests whose explanation can still be read."""

_SAMPLE_TOKENS = 16
"""A running request's step time is taken over so many tokens: single gaps are noise."""

_REASONS = {
    Standing.URGENT: "urgent: its tenant is within its share and the deadline can be met",
    Standing.LATE: "urgent: its tenant is within its share, the deadline has passed or cannot be met",
    Standing.URGENT_PICK: "in turn and urgent: its tenant has received the least service for its weight",
    Standing.PICK: "in turn: its tenant has received the least service for its weight",
    Standing.BACKFILL: "behind the request in turn, which waits: takes only what that one leaves",
    Standing.HEAD: "in turn: first in the order of the policy",
    Standing.ONWARD: "goes on: its slice ended here, where its prompt is still held",
}

_STEPS = {
    Trigger.QUEUE: Step.QUEUED,
    Trigger.SLICE_END: Step.SLICE_ENDED,
    Trigger.PREEMPTED: Step.PREEMPTED,
    Trigger.RETRY: Step.RETRIED,
}

_ENDS = {
    State.FINISHED: Step.FINISHED,
    State.FAILED: Step.FAILED,
    State.CANCELLED: Step.CANCELLED,
    State.EXPIRED: Step.EXPIRED,
}


class Books:
    """See the module.

    Attributes:
        policy: the fairness policy in force, told of every change it keeps an index of.
        requests: everybody who waits or runs.
        num_running, num_output: requests running now; output tokens kept so far, over all requests.
        served: service charged so far, over all requests.
        bias: how far predictions of finished requests were off.
        kv_price: what KV costs, by which slices of requests with a predicted distribution are sized.
        waste: the system's account of what is computed again because of cuts.
    """

    __slots__ = (
        "_agents",
        "_aging_ratio",
        "_config",
        "_ended",
        "_fleet",
        "_is_gamma",
        "_is_told_ended",
        "_is_told_started",
        "_is_told_stopped",
        "_is_watching",
        "_lengths",
        "_most_stall",
        "_next_seq",
        "_next_ticket",
        "_num_taken",
        "_orders_agents",
        "_tenants",
        "_tiers",
        "_trial",
        "bias",
        "clock",
        "cost",
        "kv_price",
        "num_output",
        "num_running",
        "policy",
        "requests",
        "room",
        "served",
        "waste",
    )

    def __init__(
        self,
        *,
        cost: CostModel,
        room: WaitingRoom,
        tenants: Tenants,
        tiers: Tiers,
        fleet: Fleet,
        agents: Agents,
    ) -> None:
        self.policy: FairnessPolicy
        self.cost = cost
        self.room = room
        self.clock = WaitClock()
        self._trial: Request | None = None
        self.requests: dict[RequestId, Request] = {}
        self.num_running = 0
        self.num_output = 0
        self.served = 0.0
        self.waste = WasteBudget()
        self._config: PoolConfig
        self._tenants = tenants
        self._tiers = tiers
        self._fleet = fleet
        self._agents = agents
        self._lengths = Lengths()
        self.bias = PredictionBias()
        self.kv_price = KvPrice()
        self._ended: OrderedDict[RequestId, Request] = OrderedDict()
        self._is_gamma = False
        self._orders_agents = False
        self._next_seq = 1
        self._next_ticket = 1
        self._num_taken = 0

    def adopt(self, config: PoolConfig, policy: FairnessPolicy, cost: CostModel) -> None:
        """Keep the books by another configuration, policy and prices."""
        self._config = config
        self.cost = cost
        is_gamma = policy.gamma(config) > 0.0
        if is_gamma or self._is_gamma:
            self._is_gamma = is_gamma
            for request in self.requests.values():
                self._update_expected(request)
        self._is_watching = policy.is_watching
        kind, default = type(policy), FairnessPolicy
        self._is_told_started = kind.started is not default.started
        self._is_told_stopped = kind.stopped is not default.stopped
        self._is_told_ended = kind.ended is not default.ended
        self._aging_ratio = config.aging_ratio
        self._most_stall = stall_service(config)
        self.policy = policy

    @property
    def num_opened(self) -> int:
        """Requests that have arrived so far, refused ones included."""
        return self._next_seq - 1

    def open(self, spec: RequestSpec, tenant: Tenant, queue: TierQueue, now: float) -> Request:
        """A record for a request that has arrived; it counts for nothing until it is queued."""
        request = Request(spec, tenant=tenant, queue=queue, seq=self._next_seq, arrival_s=now)
        self._next_seq += 1
        if spec.predicted_output_tokens is None and request.survival is None:
            guess = self._lengths.median(spec.key, spec.tenant)
            request.predicted_output_tokens = min(guess, spec.max_new_tokens)
        return request

    # --- waiting ---------------------------------------------------------------------------------------------------

    def plan(self, request: Request) -> bool:
        """Set the next slice and whether it is stuck; whether any configured backend could ever hold it."""
        survival = request.survival
        is_sliced = self.policy.is_sliced
        if survival is not None:
            if is_sliced and request.is_sliceable:
                self._size(request, survival)
        elif request.slice_count >= 0:
            lengths = self._lengths
            request.slice_count = lengths.count
            request.preferred_slice_tokens = lengths.slice_tokens(
                request.key, request.member.tenant_id, request.output_tokens
            )
        return plan(request, self._config, self._fleet.shapes, is_sliced=is_sliced)

    def _size(self, request: Request, survival: Survival) -> None:
        """Set the cheapest slice. Work that is sent whole has none, nor has any under a policy that does not slice."""
        produced = request.output_tokens
        rest = 1
        if produced < request.max_new_tokens:
            rest = cheapest(
                survival,
                prompt_tokens=request.prompt_tokens,
                produced=produced,
                cap=request.max_new_tokens,
                most=TGI_NEW_TOKENS_CAP,
                price=self.kv_price.ratio,
                kept=self.kv_price.onward,
            )
        request.preferred_slice_tokens = max(LEAST_SLICE, rest)
        request.slice_level = 1.0 - survival.beyond(produced + rest) / survival.beyond(produced)

    def refresh(self, request: Request) -> None:
        """A request that may start now has its slice from what is known by now, not when it began to wait."""
        if 0 <= request.slice_count != self._lengths.count:
            self.plan(request)

    def enqueue(self, request: Request, trigger: Trigger, now: float) -> None:
        """The request waits, its slice planned."""
        request.state = advance(request.state, trigger)
        if trigger is Trigger.QUEUE:
            self.requests[request.request_id] = request
            request.lane = self._lane(request)
            request.lane.num_open += 1
        was_on_trial = request is self._trial
        if was_on_trial:
            self._trial = None
        at_front = trigger is Trigger.RETRY or trigger is Trigger.PREEMPTED
        self.room.take_place(request, at_front=at_front)
        self.room.enter(request)
        request.mark = self.clock.mark(now, request.member.num_dispatched)
        last = request.last_backend
        note(request, _STEPS[trigger], now, None if last is None else last.backend_id, request.output_tokens)
        if request.is_stuck:
            self._park(request, now)
        elif request.is_suspect:
            self._hold(request, now)
        else:
            self._join_line(request, at_front=at_front)
            if request.queue.head is request:
                self.policy.head_changed(request.queue)
        if was_on_trial or request.is_suspect:
            self.try_next(now)

    def _lane(self, request: Request) -> Lane:
        if self._orders_agents and request.agent_id is not None:
            self._agents.join(request, request.arrival_s)
            return request.queue.agents()
        return request.queue.lane(request.key)

    def order_agents(self, is_on: bool) -> None:
        """Whether calls of agents wait in a lane of their own. If that changes everybody takes a place anew: O(n)."""
        if is_on is self._orders_agents:
            return
        self._orders_agents = is_on
        queues: dict[TierQueue, None] = {}
        for request in self.requests.values():
            lane = self._lane(request)
            if lane is request.lane:
                continue
            is_in_line = request.request_id in self.room.in_line
            if is_in_line:
                request.queue.remove(request)
            request.lane.num_open -= 1
            lane.num_open += 1
            if request.backend is not None:
                request.lane.held_tokens -= request.held_tokens
                lane.held_tokens += request.held_tokens
            request.lane = lane
            if is_in_line:
                request.queue.add(request)
                queues[request.queue] = None
        for queue in queues:
            queue.sort()

    def regroup(self, moved: Collection[Tenant]) -> None:
        """These tenants compete in the pool as another unit now; what they have here goes with them."""
        for request in self.requests.values():
            member = request.member
            if member not in moved:
                continue
            request.tenant.expected_rest -= request.expected_rest
            member.unit.expected_rest += request.expected_rest
            if request.backend is not None:
                if request.tenant is not member:
                    request.tenant.num_running -= 1
                    request.tenant.held_tokens -= request.held_tokens
                if member.unit is not member:
                    member.unit.num_running += 1
                    member.unit.held_tokens += request.held_tokens
            request.tenant = member.unit

    def _join_line(self, request: Request, *, at_front: bool = False) -> None:
        self.room.add(request, at_front=at_front)
        if not request.tenant.is_backlogged:
            self.policy.backlogged(request.tenant)
        if self._is_watching:
            self.policy.queued(request)

    def dequeue(self, request: Request, now: float) -> None:
        """The request waits no longer, whatever the reason."""
        self.room.leave(request)
        if request.held_s is not None:
            self.room.release(request, now)
        elif request.parked_s is None:
            self._leave_line(request)
        else:
            self.room.unpark(request, now)
        if request.mark is not None:
            request.waited.append((request.mark, self.clock.mark(now, request.member.num_dispatched)))
            request.mark = None

    def _leave_line(self, request: Request) -> None:
        tenant = request.tenant
        was_head = request.queue.head is request
        self.room.remove(request)
        if self._is_watching:
            self.policy.unqueued(request)
        if not tenant.has_line:
            self.policy.idle(tenant)
        if was_head:
            self.policy.head_changed(request.queue)

    def _park(self, request: Request, now: float) -> None:
        self.room.park(request, now)
        note(request, Step.PARKED, now)

    def _hold(self, request: Request, now: float) -> None:
        self.room.hold(request, now)
        note(request, Step.HELD, now)

    def try_next(self, now: float) -> None:
        """Put the next suspect on trial, if there is one and no other is (``core.trial``)."""
        room = self.room
        while self._trial is None and room.held:
            request = next_on_trial(room.held.values(), is_wounded=self._fleet.is_wounded(now))
            if request is None:
                return
            room.release(request, now)
            if request.is_stuck:
                self._park(request, now)
                continue
            self._trial = request
            note(request, Step.TRIED, now)
            self._come_back([request])

    def _come_back(self, requests: list[Request]) -> None:
        """These join the line where they would stand if they had never left it."""
        queues: dict[TierQueue, None] = {}
        for request in requests:
            self._join_line(request)
            queues[request.queue] = None
        if queues:
            self.room.sort()
        for queue in queues:
            queue.sort()
            self.policy.head_changed(queue)

    def settle(self, requests: list[Request], now: float) -> None:
        """Park those of the waiting requests that have become stuck; the others that are parked come back.

        First all go, then all come, in the order of arrival: who comes back is lifted by those who can be served.
        """
        requests.sort(key=lambda request: request.seq)
        for request in requests:
            if request.is_stuck and request.parked_s is None and request.held_s is None:
                self._leave_line(request)
                self._park(request, now)
                if request is self._trial:
                    self._trial = None
        back = []
        for request in requests:
            if not request.is_stuck and request.parked_s is not None:
                self.room.unpark(request, now)
                note(request, Step.UNPARKED, now)
                if request.is_suspect:
                    self._hold(request, now)
                else:
                    back.append(request)
        self._come_back(back)
        self.try_next(now)

    def resume(self, request: Request, trigger: Trigger, dropped: int, next_prompt: int, now: float) -> bool:
        """Put a request that ran back into its queue, keeping what it has.

        Returns:
            whether any configured backend could ever hold its next slice.
        """
        request.output_tokens = max(0, request.output_tokens - dropped)
        request.recomputed_tokens += dropped
        # What the slice sent is what its backend holds; of what it wrote nothing.
        request.kept_tokens = 0
        if next_prompt > 0:
            if trigger is Trigger.SLICE_END:
                request.kept_tokens = min(request.input_tokens, next_prompt - 1)
            request.input_tokens = next_prompt
        request.is_resumed = True
        if request.cut_tokens and trigger is not Trigger.PREEMPTED:
            self.waste.spared(request)
        if request.survival is not None:
            request.look_ahead()
        can_fit = self.plan(request)
        self.enqueue(request, trigger, now)
        return can_fit

    # --- running ---------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        request: Request,
        standing: Standing,
        backend: Backend,
        blocks: int,
        new_tokens: int,
        now: float,
        *,
        num_options: int,
    ) -> Dispatch:
        """The request starts on a backend, one of ``num_options``: reserve, charge what was not paid, say so."""
        tenant = request.member
        if len(tenant.by_rank) > 1:
            tenant.note_admission(request, self._aging_ratio)
        self.dequeue(request, now)
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
        is_onward = standing is Standing.ONWARD
        if not is_onward:
            request.kept_tokens = 0
        if request.is_resumed:
            self.kv_price.observe_resumed(is_onward=is_onward)
        held = request.held_tokens = blocks * backend.block_size
        tenant.held_tokens += held
        if tenant.unit is not tenant:
            tenant.unit.held_tokens += held
        request.lane.held_tokens += held
        backend.start(request, blocks, now)
        if request.cut_tokens:
            self.waste.resumed(request)
        if not request.is_sliceable:
            self._fleet.assume_first_token(request, backend, now)
        reason = _REASONS[standing]
        level = 0.0
        if (
            request.survival is not None
            and new_tokens == request.preferred_slice_tokens
            and self.policy.is_sliced
            and request.is_sliceable
        ):
            level = request.slice_level
            self.kv_price.observe(
                step_s=backend.step_s(),
                prefill_rate=backend.prefill_rate(),
                kv_tokens=backend.ledger.usable_blocks * backend.block_size,
                level=level,
            )
        placed = (reason, num_options, request.cached_tokens, backend is request.last_backend, level)
        note(request, Step.DISPATCHED, now, backend.backend_id, new_tokens, placed)
        segment = request.segment
        request.segment = segment + 1
        tenant.num_running += 1
        tenant.num_dispatched += 1
        if tenant.unit is not tenant:
            tenant.unit.num_running += 1
        self.num_running += 1
        self.clock.num_dispatched += 1
        paid = request.paid_in
        service = self.cost.admit(request)
        tenant.prompt_tokens += request.paid_in - paid
        if self._is_gamma:
            self._update_expected(request)
        if service:
            self._charge(request, service)
        if request.stall_s and backend.exposure.ticket == request.ticket:
            self._charge_stall(request, backend)
        if self._is_told_started:
            self.policy.started(request, now)
        limit = new_tokens if request.is_sliceable else request.remaining_tokens()
        return Dispatch(request.request_id, backend.backend_id, limit, segment, reason)

    def measure(self, request: Request, prompt_tokens: int) -> None:
        """The true length of what the present segment sends is known; what rests on the estimate is settled."""
        if request.input_tokens == request.prompt_tokens:
            # The segment sends the client's own prompt, nothing generated: what was charged rests on the estimate.
            request.prompt_tokens = prompt_tokens
            if request.is_charged:
                paid = request.paid_in
                service = self.cost.correct_prompt(request)
                request.member.prompt_tokens += request.paid_in - paid
                self._charge(request, service)
        request.input_tokens = prompt_tokens

    def deliver(self, request: Request, tokens: int, now: float) -> bool:
        """``tokens`` more arrived (at least 1): count and charge them. Whether the slice's first one is among them."""
        state = request.state
        is_first = state is State.PREFILLING
        if is_first:
            request.state = advance(state, Trigger.FIRST_TOKEN)
            self._first_token(request, now, tokens)
            if request.output_tokens == 0 and request.backend is not None:
                note(request, Step.FIRST_TOKEN, now, request.backend.backend_id, tokens)
        request.output_tokens += tokens
        request.slice_output += tokens
        self.num_output += tokens
        if request.output_tokens >= request.look_at:
            request.look_ahead()
        paid = request.paid_out
        service = self.cost.output(request)
        if service:
            request.member.output_tokens += request.paid_out - paid
            if self._is_gamma:
                self._update_expected(request)
            self._charge(request, service)
        if request.slice_output - request.sampled_output >= _SAMPLE_TOKENS:
            _sample_step(request, now)
        return is_first

    def _charge(self, request: Request, service: float) -> None:
        """Charge every level; whose turn it is among keys, and among members of a group, follows at once."""
        self.served += service
        self.policy.charge(request, service)
        if request.member is not request.tenant:
            request.tenant.charged(request.member, service)
        queue = request.queue
        keys = queue.keys
        lane = request.lane
        if service < 0.0:
            self.policy.refunded(request)
            if queue.refunded(lane):
                self.policy.head_changed(queue)
        elif lane is keys.front and lane.counter >= keys.rival and queue.reorder():
            self.policy.head_changed(queue)

    def _charge_stall(self, request: Request, backend: Backend) -> None:
        """The tokens that others on this backend miss while it compiles the request's grammar, once per request.

        Nobody is given them, so they are no delivered service: an account of its own, and not in ``served``.
        """
        if request.has_paid_stall:
            return
        request.has_paid_stall = True
        steps = int(backend.exposure.stall_s / backend.step_s())
        missed = 0.0
        for other in backend.running.values():
            tokens = min(steps, other.predicted_rest(), other.slice_tokens - other.slice_output)
            if other is not request and tokens > 0:
                missed += self.cost.ahead(other, tokens)
        service = min(missed, self._most_stall)
        if service > 0.0:
            request.member.stall_service += service
            self.policy.charge(request, service)
            if request.member is not request.tenant:
                request.tenant.charged(request.member, service)

    def take_new_output(self) -> int:
        """Output tokens delivered since this was asked last."""
        tokens = self.num_output - self._num_taken
        self._num_taken = self.num_output
        return tokens

    def preempt(self, request: Request, lost_tokens: int, reason: str) -> None:
        """The running request is told to stop. It runs until it says that it has, and loses so many tokens."""
        request.state = advance(request.state, Trigger.PREEMPT)
        assert request.backend is not None
        request.backend.cut.add(request.ticket)
        request.num_preempted += 1
        if request.cuts is None:
            request.cuts = []
        request.cuts.append(reason)
        self.waste.cut(request, lost_tokens)

    def leave(self, request: Request, now: float) -> Backend:
        """The running slice is over. Seats go at once; the KV is the caller's to free, now or after a lag."""
        backend = request.backend
        assert backend is not None
        if request.slice_output > request.sampled_output:
            _sample_step(request, now)
        if request.agent is not None:
            token_time = self._agents.deliver(request)
            self._fleet.note_held(token_time, request.blocks * backend.block_size, now - request.dispatched_s)
        backend.stop(request)
        request.backend = None
        request.last_backend = backend
        held = request.held_tokens
        request.lane.held_tokens -= held
        request.member.held_tokens -= held
        request.member.num_running -= 1
        tenant = request.tenant
        if tenant is not request.member:
            tenant.num_running -= 1
            tenant.held_tokens -= held
        self.num_running -= 1
        if request.expected_rest:
            # What rounding leaves of a sum must not outlive its last part.
            tenant.expected_rest = tenant.expected_rest - request.expected_rest if tenant.num_running else 0.0
            request.expected_rest = 0.0
        if self._is_told_stopped:
            self.policy.stopped(request, now)
        return backend

    def _update_expected(self, request: Request) -> None:
        """Keep the tenant's predicted service in flight, which the decision key may use: what is yet to be charged."""
        expected = 0.0
        if self._is_gamma and request.state.is_running:
            rest = request.predicted_output_tokens - request.output_tokens
            tokens = min(rest, request.slice_tokens - request.slice_output)
            if tokens > 0:
                expected = self.cost.ahead(request, tokens)
        request.tenant.expected_rest += expected - request.expected_rest
        request.expected_rest = expected

    def _first_token(self, request: Request, now: float, tokens: int) -> None:
        backend = request.backend
        assert backend is not None
        backend.first_token(request, now, tokens)
        self._fleet.speed_changed()
        request.first_token_s = request.sampled_s = now
        request.is_suspect = False
        if request is self._trial:
            self._trial = None
            self.try_next(now)
        request.sampled_output = 1
        self._tiers.touch(self._tiers.get(request.queue.name), now)

    # --- inherited -------------------------------------------------------------------------------------------------

    def inherit(self, request: Request, standing: Inheritance, backend: Backend, now: float) -> None:
        """A request that waits runs already, since before it came here: hold what its slice holds."""
        self.dispatch(
            request,
            Standing.HEAD,
            backend,
            backend.blocks(request, standing.slice_tokens),
            standing.slice_tokens,
            now,
            num_options=1,
        )
        request.segment = standing.segment
        request.dispatched_s = now - standing.running_s
        if standing.has_first_token:
            request.state = advance(request.state, Trigger.FIRST_TOKEN)
            backend.prefill_over(request.ticket)
            request.first_token_s = request.sampled_s = now
            request.slice_output = request.sampled_output = standing.slice_output
        if standing.is_preempting:
            self.preempt(request, max(1, request.input_tokens), "told to stop before the router was replaced")
            # Counted already.
            request.num_preempted -= 1
            if request.cuts:
                request.cuts.pop()

    def hold(self, backend: Backend, tokens: int) -> int:
        """Reserve KV for a stream that is closing; returns its ticket."""
        ticket = self._next_ticket
        self._next_ticket += 1
        backend.ledger.reserve(ticket, -(-tokens // backend.block_size))
        return ticket

    # --- ended -----------------------------------------------------------------------------------------------------

    def end(self, request: Request, state: State, now: float) -> None:
        """The request is in its terminal state and gone but for its explanation."""
        request.state = state
        note(request, _ENDS[state], now, tokens=request.output_tokens)
        if request.cut_tokens:
            self.waste.spared(request)
        if state is State.FINISHED and request.output_tokens and request.num_sequences == 1:
            self._lengths.finished(request.key, request.member.tenant_id, request.output_tokens)
            predicted = request.predicted_output_tokens if request.survival is None else request.expected_tokens
            self.bias.finished(min(predicted, request.max_new_tokens), request.output_tokens)
        request.lane.num_open -= 1
        if self._is_told_ended:
            self.policy.ended(request)
        if request.agent is not None:
            self._agents.leave(request, now, is_finished=state is State.FINISHED)
        del self.requests[request.request_id]
        self._ended[request.request_id] = request
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        if not request.member.is_configured:
            self._tenants.drop_idle(request.member)
        if request is self._trial:
            self._trial = None
            self.try_next(now)

    def timeline(self, request_id: RequestId) -> list[Moment]:
        """What became of a request; empty if it is unknown or forgotten."""
        request = self.requests.get(request_id) or self._ended.get(request_id)
        return [] if request is None else timeline(request)

    def explain(self, request_id: RequestId, now: float) -> list[Reason]:
        """Why a request waited; empty if it is unknown or forgotten."""
        request = self.requests.get(request_id)
        if request is None:
            request = self._ended.get(request_id)
            return [] if request is None else waiting_reasons(request, None)
        now_mark = self.clock.mark(now, request.member.num_dispatched) if request.mark is not None else None
        return waiting_reasons(request, now_mark)


def _sample_step(request: Request, now: float) -> None:
    """Let the backend learn its step time from the tokens since the last sample."""
    backend = request.backend
    assert backend is not None
    tokens = request.slice_output - request.sampled_output
    if tokens > 0 and now > request.sampled_s:
        backend.step_fit.observe(backend.num_running, (now - request.sampled_s) / tokens)
    request.sampled_s = now
    request.sampled_output = request.slice_output
