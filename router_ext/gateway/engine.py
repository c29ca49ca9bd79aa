"""The one writer of a pool's scheduler.

Everything that happens (arrivals, tokens, ends, failures, configuration, time) becomes an event here, and every action
of the scheduler is carried out here. All of it runs on the event loop's thread: ``post`` appends to an inbox and drains
it, unless that happens further up the stack; so the scheduler is never entered twice and sees events in order.

    Call, Generation --report--> inbox --> Scheduler.handle --> Dispatch --> Generation.dispatch --> backend stream
    BackendPool ----------------^                          |--> Preempt --> Generation.preempt
    timer ----------------------^                          |--> Reject, Expire --> Generation.refused, .expired
                                                           '--> SetTimer

Tokens are counted per loop turn: one ``Progressed`` per request and turn, and always before its request's next event.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol

from router_ext.backends.base import Backend, BackendRefused
from router_ext.backends.pool import BackendPool, State
from router_ext.core.actions import Action, Dispatch, Expire, Preempt, Reject, RejectCode, SetTimer
from router_ext.core.config import PoolConfig
from router_ext.core.events import (
    Arrived,
    BackendChanged,
    Cancelled,
    Event,
    Heir,
    Progressed,
    Reconfigured,
    RequestSpec,
    TimerFired,
)
from router_ext.core.ids import BackendId, RequestId, TenantId, TierName
from router_ext.core.inheritance import Closing
from router_ext.core.scheduler import Scheduler
from router_ext.core.slicing import room_tokens
from router_ext.core.snapshot import PoolStats
from router_ext.errors import FairlaneError, LimitExceeded, NoBackend, QueueRefused, RequestRefused, UpstreamFailed
from router_ext.gateway.books import Books
from router_ext.gateway.brakes import stopped
from router_ext.gateway.call import Call
from router_ext.gateway.configure import Roster, grammar_limits, pool_config
from router_ext.gateway.foresight import PoolForesight, Predictions
from router_ext.gateway.knowledge import ModelKnowledge, probe_model
from router_ext.gateway.model import Member, PoolModel
from router_ext.gateway.own_view import refused_view
from router_ext.gateway.retries import RetryBudget
from router_ext.gateway.slices import TextGeneration
from router_ext.gateway.suspects import FREEZE_S, QUIET_CHECKS, BackendFrozen, Suspects
from router_ext.gateway.upstream import Step
from router_ext.obs.logs import get_logger
from router_ext.obs.metrics import Metrics
from router_ext.predict.baseline import Baseline
from router_ext.settings import RouterSettings
from router_ext.sync.ledger import Ledger
from router_ext.wire.controlplane import BackendRecord, ConfigSnapshot, LiveRequest, PoolRecord

_log = get_logger(__name__)

RECONCILE_S = 1.0
"""How long after a defect of the scheduler its picture is compared with what is so; also the least time between two."""


class Scheduled(Protocol):
    """What the engine needs of a generation. ``give_up``: end its call after a defect."""

    request_id: RequestId
    spec: RequestSpec
    step: Step
    member: Member | None
    started_s: float
    heard_s: float

    @property
    def has_spoken(self) -> bool: ...
    def frozen(self, error: BackendFrozen | BackendRefused) -> None: ...
    def dispatch(self, action: Dispatch, member: Member) -> None: ...
    def preempt(self) -> None: ...
    def move(self) -> None: ...
    def undispatched(self) -> None: ...
    def expired(self, error: FairlaneError) -> None: ...
    def refused(self, error: FairlaneError) -> None: ...
    def end_with(self, error: FairlaneError) -> None: ...
    def give_up(self, error: FairlaneError) -> None: ...
    def cancel(self) -> None: ...


class Remote(Scheduled, Protocol):
    """A generation that another process carries out (``gateway.succession``)."""

    def relay(self, action: Dispatch | Preempt | Reject | Expire) -> None: ...


class PoolEngine:
    """Scheduler, backends and running requests of one pool.

    Attributes:
        name: the pool's public name. record: its configuration.
        predictor: empirical quantiles, the fallback. foresight: the trained model, as the worker process has it.
        suspects: who may have felled a backend. grammar_limits: seconds a new grammar may stall one, by tier.
        retries: how many requests may be sent again.
        model: limits, tokenizer, short questions. books: where ended calls are written. calls: those that have not.
    """

    def __init__(
        self,
        *,
        record: PoolRecord,
        snapshot: ConfigSnapshot,
        roster: Roster,
        settings: RouterSettings,
        ledger: Ledger,
        metrics: Metrics,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        executor: Executor,
        make_client: Callable[[BackendRecord], Backend],
        predictions: Predictions,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.record = record
        self.name = record.name
        self.settings = settings
        self.metrics = metrics
        self.predictor = Baseline()
        self.predictor_digest: str | None = None
        self.foresight = PoolForesight()
        self.backends: BackendPool[ModelKnowledge] = BackendPool(
            listener=self,
            make_client=make_client,
            probe=probe_model,
            interval_s=settings.health_interval_s,
            timeout_s=settings.health_timeout_s,
            max_failures=settings.health_failures,
            max_wait_s=settings.breaker_max_wait_s,
        )
        self.config: PoolConfig = pool_config(record, snapshot, {}, roster.shares)
        self.model = PoolModel(
            name=record.name,
            config=self.config,
            backends=self.backends,
            executor=executor,
            tokenizer_path=record.tokenizer_path,
            on_failure=self.upstream_failed,
        )
        self.suspects = Suspects(record.name)
        self.retries = RetryBudget(ratio=settings.retry_ratio, floor=settings.retry_floor)
        self.grammar_limits = grammar_limits(snapshot)
        self.calls: set[Call] = set()
        self._snapshot, self._roster = snapshot, roster
        self._spawn = spawn
        self._generations: dict[RequestId, Scheduled] = {}
        self._cuts: dict[RequestId, asyncio.Task[None]] = {}
        self._inbox: deque[Event] = deque()
        self._is_draining_inbox = False
        self._progress: dict[Scheduled, int] = {}
        self._is_flush_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._reconciling: asyncio.TimerHandle | None = None
        self._remote: dict[RequestId, Remote] = {}
        self._forward: Callable[[Event], None] | None = None
        self.backends.apply(record.backends)
        self.config = self.model.config = pool_config(record, snapshot, self.backends.members, roster.shares)
        self.scheduler = Scheduler(self.config)
        self.books = Books(
            name=record.name, ledger=ledger, metrics=metrics, scheduler=self.scheduler, predictions=predictions
        )

    async def run(self) -> None:
        """Watch the backends and the limits of time until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.backends.run())
            tasks.create_task(self.model.follow_tokenizer())
            tasks.create_task(self._watch_limits())

    async def _watch_limits(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.end_overdue()
            self.look_for_frozen()

    # --- configuration ----------------------------------------------------------------------------------------------

    def prepare(self, record: PoolRecord, snapshot: ConfigSnapshot, roster: Roster) -> Mapping[BackendId, Backend]:
        """Everything of ``apply`` that may fail; changes nothing.

        Raises:
            SnapshotRefused: the record does not fit what its backends say of themselves.
            OSError, ValueError, SettingsError: a backend's client cannot be made.
        """
        pool_config(record, snapshot, self.backends.staying(record.backends), roster.shares)
        return self.backends.prepare(record.backends)

    def apply(
        self, record: PoolRecord, snapshot: ConfigSnapshot, roster: Roster, clients: Mapping[BackendId, Backend]
    ) -> None:
        """Follow a snapshot that has been prepared in the same turn. Queues, ledger and counters survive."""
        self.record, self._snapshot, self._roster = record, snapshot, roster
        self.grammar_limits = grammar_limits(snapshot)
        self.name = self.model.name = self.books.name = record.name
        self.model.use_tokenizer(record.tokenizer_path)
        self.backends.apply(record.backends, clients)
        self.books.keep(roster.shares.tenants, {call.identity.tenant for call in self.calls})
        self._reconfigure()
        self._brake()

    def _brake(self) -> None:
        """End what the operator has stopped; take what can go on elsewhere from backends that are drained."""
        for call, error in stopped(list(self.calls), self.record, self._snapshot, self._roster):
            self.end_call(call, error)
        drained = {b.backend for b in self.record.backends if b.is_drained}
        if not drained:
            return
        for generation in list(self._generations.values()):
            member = generation.member
            if member is not None and member.backend in drained and generation.step is Step.RUNNING:
                generation.move()

    def _reconfigure(self) -> None:
        self.model.backends_changed()
        config = pool_config(self.record, self._snapshot, self.backends.members, self._roster.shares)
        if config != self.config:
            self.config = self.model.config = config
            self.post(Reconfigured(config=config))
            # A backend that takes part for the first time is down until its state is told (again, for the others).
            for member in self.backends.members.values():
                self._tell(member)

    def _tell(self, member: Member) -> None:
        is_up = member.state is State.UP
        self.post(BackendChanged(backend=member.backend, is_up=is_up, is_on_trial=is_up and member.is_on_trial))

    def backend_learned(self, member: Member) -> None:
        """Listener of the backends: limits are known, or have changed."""
        self._reconfigure()
        knowledge = member.knowledge
        if knowledge is not None:
            _log.info(
                "backend.learned",
                pool=self.name,
                backend=member.backend,
                bos=None if knowledge.bos is None else knowledge.bos.kind,
                is_resumable=knowledge.is_resumable,
            )

    def backend_changed(self, member: Member) -> None:
        """Listener of the backends: one came up or went down, or has shown that it serves."""
        self.model.backends_changed()
        self._tell(member)

    # --- events in --------------------------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Hand an event to the scheduler, after those that came before it."""
        if self._forward is not None:
            self._forward(event)
            return
        self._inbox.append(event)
        if self._is_draining_inbox:
            return
        self._is_draining_inbox = True
        try:
            inbox = self._inbox
            while inbox:
                event = inbox.popleft()
                for action in self._decide(event):
                    self._carry_out(action)
        finally:
            self._is_draining_inbox = False

    def _decide(self, event: Event) -> list[Action]:
        try:
            return self.scheduler.handle(event, self.loop.time())
        except Exception:  # a defect stays with the request that met it; the pool goes on
            _log.exception("scheduler.failed", pool=self.name, trigger=type(event).__name__)
            self._reconcile_soon()
            request_id = getattr(event, "request_id", None)
            if request_id is None and isinstance(event, Arrived):
                request_id = event.request.request_id
            generation = self._generations.get(request_id) if request_id is not None else None
            if generation is not None:
                self.abandon(generation, FairlaneError("The router failed to schedule this request."))
            elif request_id is not None and not isinstance(event, Cancelled):
                # Its end was being reported: what it held is given back the plain way.
                self._inbox.append(Cancelled(request_id=request_id))
            return []

    def _carry_out(self, action: Action) -> None:
        try:
            self._perform(action)
        except Exception:  # likewise, and the actions that follow are those of others
            _log.exception("action.failed", pool=self.name, action=type(action).__name__)
            if isinstance(action, SetTimer):
                self._reconcile_soon()
                return
            generation = self._generations.get(action.request_id)
            if generation is None:
                # A refusal or an expiry has forgotten it already; its client still waits.
                for call in list(self.calls):
                    if any(each.request_id == action.request_id for each in call.generations):
                        self.end_call(call, FairlaneError("The router failed to serve this request."))
            else:
                self.abandon(generation, FairlaneError("The router failed to serve this request."))

    def abandon(self, generation: Scheduled, error: FairlaneError) -> None:
        """End the call of a request that met a defect: upstream closed, reservation given back, client answered."""
        generation.give_up(error)
        if self._generations.get(generation.request_id) is generation:
            generation.step = Step.ENDED
            self.cancelled(generation)

    def _reconcile_soon(self) -> None:
        """A decision was lost in a defect: compare what the scheduler believes with what is so, in a while."""
        if self._reconciling is None:
            self._reconciling = self.loop.call_later(RECONCILE_S, self._reconcile)

    def _reconcile(self) -> None:
        self._reconciling = None
        if self._forward is not None:
            return
        believed = {entry["request"]: entry["state"] for entry in self.scheduler.snapshot()["requests"]}
        for request_id, generation in list(self._generations.items()):
            state = believed.get(request_id)
            if state is None:
                self.abandon(generation, FairlaneError("The router failed to schedule this request."))
            elif state != "queued" and generation.step is Step.QUEUED:
                # Dispatched, in an action that was never carried out.
                generation.undispatched()
            elif state == "preempting" and generation.step is Step.RUNNING:
                generation.preempt()
        for request_id in believed.keys() - self._generations.keys():
            self.post(Cancelled(request_id=RequestId(request_id)))
        self.post(TimerFired())

    # --- hand-over --------------------------------------------------------------------------------------------------

    def leave(self, forward: Callable[[Event], None]) -> tuple[dict[str, Any], list[Heir], list[Closing]]:
        """Decide nothing from here on: every event goes to ``forward`` instead of the scheduler.

        Returns:
            its counters, the requests that are carried out here as they stand, KV that is closing.
        """
        self._flush()
        now = self.loop.time()
        standings, closing = self.scheduler.leave(now)
        heirs = [
            Heir(request=generation.spec, standing=standing)
            for standing in standings
            if standing.request_id not in self._remote
            and (generation := self._generations.get(standing.request_id)) is not None
        ]
        self._forward = forward
        return self.scheduler.save(), heirs, closing

    def decide_again(self, events: Iterable[Event]) -> None:
        """Nobody has taken over: go on, with what happened meanwhile."""
        self._forward = None
        for event in events:
            self.post(event)

    def carry_out(self, action: Action) -> None:
        """Do what another scheduler has decided. What it knows of the request may be out of date."""
        if isinstance(action, SetTimer):
            return
        generation = self._generations.get(action.request_id)
        if generation is not None and (not isinstance(action, Dispatch) or generation.step is Step.QUEUED):
            self._carry_out(action)

    def end_request(self, request_id: RequestId, error: FairlaneError) -> None:
        """End one request from outside."""
        generation = self._generations.get(request_id)
        if generation is not None:
            generation.give_up(error)

    def adopt(self, generation: Remote) -> None:
        """Schedule a request that another process carries out; its events come by ``report`` and ``post``."""
        self._generations[generation.request_id] = self._remote[generation.request_id] = generation

    @property
    def num_remote(self) -> int:
        """Requests that are carried out elsewhere."""
        return len(self._remote)

    # --- requests ---------------------------------------------------------------------------------------------------

    def takes(self, tenant: str) -> bool:
        """Whether requests of this tenant may be queued now; it may have been suspended since its key was looked at."""
        return tenant not in self._roster.suspended and tenant not in self._roster.stopped

    def submit(self, call: Call, generations: Sequence[Scheduled]) -> None:
        """Queue the generations of a call."""
        self.calls.add(call)
        self.books.explanations.began(call)
        for generation in generations:
            self._generations[generation.request_id] = generation
        for generation in generations:
            if generation.step is not Step.ENDED:
                self.post(Arrived(request=generation.spec))

    def progressed(self, generation: Scheduled, tokens: int) -> None:
        """``tokens`` arrived for a running request; told to the scheduler once per loop turn."""
        if not tokens:
            return
        progress = self._progress
        progress[generation] = progress.get(generation, 0) + tokens
        member = generation.member
        if member is not None and (member.stream_failures or member.is_on_trial):
            # Later in this turn: what is being read must not be cut by what follows from it.
            self.loop.call_soon(self.backends.spoke, member.backend)
        if not self._is_flush_due:
            self._is_flush_due = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        progress, self._progress = self._progress, {}
        events = [
            Progressed(request_id=generation.request_id, output_tokens=tokens)
            for generation, tokens in progress.items()
        ]
        if self._forward is not None or not events:
            for event in events:
                self.post(event)
            return
        # Together, so that what follows from the first of them comes behind the tokens of all.
        last = events.pop()
        self._inbox.extend(events)
        self.post(last)

    def report(self, generation: Scheduled, event: Event) -> None:
        """An event of one request, after the tokens it has had so far."""
        tokens = self._progress.pop(generation, 0)
        if tokens:
            self.post(Progressed(request_id=generation.request_id, output_tokens=tokens))
        self.post(event)

    def cancelled(self, generation: Scheduled) -> None:
        """A request was stopped from outside; its upstream is closed."""
        self.report(generation, Cancelled(request_id=generation.request_id))
        self.forget(generation)

    def forget(self, generation: Scheduled) -> None:
        """A request has ended."""
        self._generations.pop(generation.request_id, None)
        self._remote.pop(generation.request_id, None)
        task = self._cuts.get(generation.request_id)
        if task is not None and task is not asyncio.current_task(self.loop):
            task.cancel()

    def upstream_failed(self, member: Member, error: FairlaneError, call: Call | None = None) -> None:
        """A stream of this backend broke, that of ``call`` if it was one of a request."""
        self.metrics.retries.labels(member.backend, error.code).inc()
        named = {} if call is None else {"request": call.request_id, "trace": call.trace and call.trace.trace_id}
        detail = error.message
        _log.warning("upstream.failed", pool=self.name, backend=member.backend, code=error.code, detail=detail, **named)
        if isinstance(error, UpstreamFailed):
            self.backends.stream_failed(member.backend, error)

    def look_for_frozen(self) -> None:
        """Give up backends that have work, and from which nothing has come for too long: no token, no health answer.

        While one compiles a grammar that is its right, for three times as long as was predicted.
        """
        at_work: dict[BackendId, list[Scheduled]] = {}
        for generation in self._generations.values():
            if generation.member is not None and generation.step is Step.RUNNING:
                at_work.setdefault(generation.member.backend, []).append(generation)
        now = self.loop.time()
        for backend, generations in at_work.items():
            member = self.backends.members.get(backend)
            if member is None:
                continue
            # What is sent there says nothing of it: the silence lasts since its last word, or since the first of them.
            word_s = max(member.answered_s, *(g.heard_s for g in generations))
            since = max(word_s, min(g.started_s for g in generations))
            stall_s = max(g.spec.stall_s for g in generations)
            if now - since < max(FREEZE_S, 3.0 * stall_s):
                continue
            frozen = BackendFrozen("The backend stopped answering")
            late = BackendRefused("The backend had stopped answering before")
            quiet_s = QUIET_CHECKS * self.settings.health_interval_s
            self.backends.stream_failed(backend, frozen)
            # Those who have tokens are innocent, and first to go on elsewhere; so are those who came too late.
            for generation in sorted(generations, key=lambda g: not g.has_spoken):
                generation.frozen(late if generation.started_s > word_s + quiet_s else frozen)

    def fitting_new_tokens(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """``max_new_tokens`` as far as the KV of the largest backend reaches: there the answer ends by ``length``.

        A prompt that leaves no room for one slice is left to the scheduler, which refuses it with the numbers.
        """
        room = max((room_tokens(backend) for backend in self.config.backends.values()), default=0) - prompt_tokens
        return min(max_new_tokens, room) if room >= self.config.min_slice_tokens else max_new_tokens

    def requests(self, limit: int) -> list[dict[str, Any]]:
        """Live requests and the newest that have ended, for an operator."""
        return [{"pool": self.name, **line} for line in self.books.explanations.newest(limit, self.loop.time())]

    def oldest(self, limit: int) -> list[LiveRequest]:
        """Live requests that arrived first."""
        return self.books.explanations.oldest(self.calls, limit)

    def explain(self, wanted: str) -> list[dict[str, Any]]:
        """Why the requests of this id waited and what became of them, as of now."""
        self.post(TimerFired())
        found = self.books.explanations.find(wanted, self.loop.time())
        return [{"pool": self.name, **each} for each in found]

    def explain_own(self, wanted: str, tenant: TenantId) -> list[dict[str, Any]]:
        """The same as the tenant itself may read it; empty if it has no such request."""
        explanations = self.books.explanations
        found = [refused_view(each) for each in explanations.refusals.find(wanted, tenant)]
        if explanations.knows(wanted):
            self.post(TimerFired())
            found += explanations.find_own(wanted, tenant, self.loop.time())
        return [{"model": self.name, **each} for each in found]

    def stats(self) -> PoolStats:
        """The scheduler's numbers at this instant; a tick first, for what time alone has given back since."""
        self.post(TimerFired())
        return self.scheduler.stats(only_seen=True)

    # --- actions out ------------------------------------------------------------------------------------------------

    def _perform(self, action: Action) -> None:
        if isinstance(action, SetTimer):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_at(action.at_s, self._fire)
            return
        generation = self._generations.get(action.request_id)
        if generation is None:
            # It ended in this very drain, and the event that says so is waiting in the inbox.
            return
        if self._remote and (remote := self._remote.get(action.request_id)) is not None:
            if isinstance(action, Reject | Expire):
                self.forget(remote)
            remote.relay(action)
            return
        if isinstance(action, Dispatch):
            member = self.backends.members.get(action.backend)
            if member is None:
                generation.undispatched()
                return
            generation.dispatch(action, member)
        elif isinstance(action, Preempt):
            generation.preempt()
        elif isinstance(action, Reject):
            self.forget(generation)
            generation.refused(self._error_of(action))
        elif isinstance(action, Expire):
            self.forget(generation)
            if action.code is RejectCode.QUEUE_FULL:
                self.metrics.displaced_one(self.name, generation.spec.tier)
            generation.expired(self._error_of(action))

    def _fire(self) -> None:
        self._timer = None
        self.post(TimerFired())

    def _error_of(self, action: Reject | Expire) -> FairlaneError:
        hint = None if action.retry_after_s is None else self.model.retry_after(action.retry_after_s)
        match action.code:
            case RejectCode.TOO_LARGE:
                return RequestRefused(action.detail, code=action.code)
            case RejectCode.NO_BACKEND:
                return NoBackend(action.detail, retry_after_s=hint)
            case RejectCode.RATE_LIMITED:
                return LimitExceeded(action.detail, code=action.code, retry_after_s=hint)
            case _:
                return QueueRefused(action.detail, code=action.code, retry_after_s=hint)

    # --- cuts -------------------------------------------------------------------------------------------------------

    def spawn_cut(self, generation: TextGeneration, *, failure: FairlaneError | None) -> None:
        """Choose where the slice ends, off the loop; the generation goes on when that is known."""
        generation.step = Step.CUTTING
        task = self._spawn(self._cut(generation, failure))
        self._cuts[generation.request_id] = task
        task.add_done_callback(lambda _: self._cuts.pop(generation.request_id, None))

    async def _cut(self, generation: TextGeneration, failure: FairlaneError | None) -> None:
        flow = generation.flow
        try:
            decision = await self.model.choose_cut(flow.cut_job())
            if generation.step is Step.CUTTING:
                generation.cut_made(flow.resume(decision), failure)
        except Exception:  # contained to its request
            _log.exception("resume.failed", pool=self.name)
            self.abandon(generation, FairlaneError("The router failed to resume this request."))

    # --- answers ------------------------------------------------------------------------------------------

    def answer_headers(self, call: Call) -> list[tuple[bytes, bytes]]:
        """Headers of our own on every answer of a call."""
        headers = [
            (b"x-request-id", call.request_id.encode("latin-1", "replace")),
            (b"x-fairlane-tier", call.tier.encode("latin-1", "replace")),
        ]
        if call.dispatched_s is not None:
            waited = max(0, int((call.dispatched_s - call.validated_s) * 1_000))
            headers.append((b"x-fairlane-queue-time", b"%d" % waited))
            headers.append((b"x-fairlane-overhead", b"%.3f" % (call.overhead_s * 1_000)))
            headers.append((b"x-fairlane-attempts", b"%d" % call.attempts))
        headers += call.limit_headers()
        return headers

    def first_token(self, tier: str, ttft_s: float, now_us: int) -> None:
        """A call's first token is about to be handed to its client."""
        promised = self.config.tiers.get(TierName(tier))
        self.books.recent.first_token(tier, ttft_s, None if promised is None else promised.ttft_target_s, now_us)

    def call_refused(self, call: Call, error: FairlaneError) -> None:
        """A request that was never queued."""
        self.calls.discard(call)
        self.books.refused(call, error)

    def call_ended(self, call: Call, *, outcome: str, code: str | None) -> None:
        """A request has ended, in whatever way."""
        self.calls.discard(call)
        self.books.ended(call, outcome=outcome, code=code)

    # --- limits of time ---------------------------------------------------------------------------------------------

    def end_overdue(self) -> None:
        """End requests that have lived beyond the limit."""
        limit = self.loop.time() - self.settings.request_limit_s
        for call in [call for call in self.calls if call.arrived_s < limit]:
            self.end_call(call, UpstreamTimeout("The request took too long."))

    def end_all(self, error: FairlaneError) -> None:
        """End everything that still runs or waits."""
        for call in list(self.calls):
            self.end_call(call, error)

    def end_call(self, call: Call, error: FairlaneError) -> None:
        """Fail a call from outside of it. A defect it meets is its own: the clock and the other calls go on."""
        try:
            call.fail(error)
        except Exception:
            _log.exception("call.failed_to_end", pool=self.name, request=call.request_id)
        self.calls.discard(call)
        self.books.explanations.dropped(call)
        if not call.client.done.done():
            # It counts as ended, and nobody has told its client.
            call.client.cut()

    def close(self) -> None:
        """Stop what would outlive the engine; running requests have been ended."""
        for task in self._cuts.values():
            task.cancel()
        for timer in (self._timer, self._reconciling):
            if timer is not None:
                timer.cancel()
        self._timer = self._reconciling = None


class UpstreamTimeout(UpstreamFailed):
    """The whole request took longer than the router allows."""

    code = "timeout"
    status_openai = status_native = 504
