"""The one writer of a pool's scheduler.

Everything that happens (arrivals, tokens, ends, failures, configuration, time) becomes an event here, and every action
of the scheduler is carried out here. All of it runs on the event loop's thread: ``post`` appends to an inbox and drains
it, unless that happens further up the stack; so the scheduler is never entered twice and sees events in order.

    Call, Generation --report--> inbox --> Scheduler.handle --> Dispatch --> Generation.dispatch --> backend stream
    BackendPool ----------------^                          '--> Reject, Expire --> Generation.refused, .expired
    timer ----------------------^                          '--> SetTimer

Tokens are counted per loop turn: one ``Progressed`` per request and turn, and always before its request's next event.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

from router_ext.backends.base import Backend, Headers
from router_ext.backends.pool import BackendPool, State
from router_ext.backends.pool import Member as PoolMember
from router_ext.backends.probe import tokenize
from router_ext.core.actions import Action, Dispatch, Expire, Reject, RejectCode, SetTimer
from router_ext.core.config import PoolConfig
from router_ext.core.events import (
    Arrived,
    BackendChanged,
    Cancelled,
    Event,
    Progressed,
    Reconfigured,
    RequestSpec,
    TimerFired,
)
from router_ext.core.ids import RequestId
from router_ext.core.scheduler import Scheduler
from router_ext.core.snapshot import PoolStats
from router_ext.errors import FairlaneError, NoBackend, QueueRefused, RequestRefused, UpstreamFailed
from router_ext.gateway.call import MAX_EXPLANATION, Call
from router_ext.gateway.configure import pool_config
from router_ext.gateway.cuts import CutDecision, CutJob, TextTokenizer, choose_cut, cut_unchecked, search_cut
from router_ext.gateway.encoders import AnswerContext
from router_ext.gateway.generation import ModelLimits
from router_ext.gateway.knowledge import ModelKnowledge, probe_model
from router_ext.gateway.slices import Step, TextGeneration
from router_ext.obs.logs import get_logger
from router_ext.obs.metrics import Metrics, TierMetrics
from router_ext.predict.baseline import Baseline
from router_ext.settings import RouterSettings
from router_ext.sync.ledger import Ledger, now_us
from router_ext.wire.controlplane import BackendRecord, ConfigSnapshot, PoolRecord

_log = get_logger(__name__)

Member = PoolMember[ModelKnowledge]

T = TypeVar("T")


ATTEMPTS = 3
"""Backends asked before a short call fails."""

EXPLAINED_S = 1.0
"""A wait from here on is explained in the books."""

WARM_UP_S = 5.0
"""How long after the start of the process requests wait for backends nobody has asked yet."""

PROBE_TEXT = "Zażółć gęślą jaźń — 12 345 tokens, \t tabs,\n\nnew lines and 😀."
"""What a pool's tokenizer file must split as its backends do before it is believed."""


class Scheduled(Protocol):
    """What the engine needs of a generation."""

    call: Call
    request_id: RequestId
    spec: RequestSpec
    step: Step

    def dispatch(self, action: Dispatch, member: Member) -> None: ...
    def undispatched(self) -> None: ...
    def expired(self, error: FairlaneError) -> None: ...
    def refused(self, error: FairlaneError) -> None: ...
    def end_with(self, error: FairlaneError) -> None: ...
    def cancel(self) -> None: ...


class PoolEngine:
    """Scheduler, backends and running requests of one pool.

    Attributes:
        name: the pool's public name. record: its configuration.
        eos_ids: end-of-text ids known of the model; grows as answers show them.
        tokenizer: the pool's own tokenizer, None if it has no file or the file disagrees with the backends.
    """

    def __init__(
        self,
        *,
        record: PoolRecord,
        snapshot: ConfigSnapshot,
        settings: RouterSettings,
        ledger: Ledger,
        metrics: Metrics,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        executor: Executor,
        make_client: Callable[[BackendRecord], Backend],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._started_s = self.loop.time()
        self.record = record
        self.name = record.name
        self.settings = settings
        self.metrics = metrics
        self.eos_ids: set[int] = set()
        self.tokenizer: TextTokenizer | None = None
        self.predictor = Baseline()
        self.predictor_digest: str | None = None
        self.compute_type = "cpu"
        self.backends: BackendPool[ModelKnowledge] = BackendPool(
            listener=self,
            make_client=make_client,
            probe=probe_model,
            interval_s=settings.health_interval_s,
            timeout_s=settings.health_timeout_s,
            max_failures=settings.health_failures,
        )
        self.calls: set[Call] = set()
        self.tenant_tokens: dict[str, list[int]] = {}
        """Prompt and output tokens since start, by tenant."""
        self._snapshot = snapshot
        self._ledger = ledger
        self._spawn = spawn
        self.executor = executor
        self.large_texts = asyncio.Semaphore(1)
        self._generations: dict[RequestId, Scheduled] = {}
        self._cuts: dict[RequestId, asyncio.Task[None]] = {}
        self._inbox: deque[Event] = deque()
        self._is_draining_inbox = False
        self._progress: dict[Scheduled, int] = {}
        self._is_flush_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._limits: ModelLimits | None = None
        self._observers: dict[str, TierMetrics] = {}
        self._up = asyncio.Event()
        self._path_changed = asyncio.Event()
        self._random = random.Random()
        self.config: PoolConfig = pool_config(record, snapshot, {})
        self.backends.apply(record.backends)
        self.config = pool_config(record, snapshot, self.backends.members)
        self.scheduler = Scheduler(self.config)

    async def run(self) -> None:
        """Watch the backends and the limits of time until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.backends.run())
            tasks.create_task(self._follow_tokenizer())
            tasks.create_task(self._watch_limits())

    async def _watch_limits(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.end_overdue()

    async def _follow_tokenizer(self) -> None:
        """Load the pool's tokenizer file whenever it is another one, and believe it only if it splits as a backend."""
        while True:
            path = self.record.tokenizer_path
            self._path_changed.clear()
            self.tokenizer = None
            if path is not None:
                await self._load_tokenizer(path)
            await self._path_changed.wait()

    async def _load_tokenizer(self, path: str) -> None:
        try:
            loaded = await self.loop.run_in_executor(self.executor, TextTokenizer.load, path)
        except (OSError, ValueError) as error:
            _log.error("tokenizer.refused", pool=self.name, path=path, reason=str(error))
            return
        while True:
            await self._up.wait()
            try:
                theirs = [token.id for token in await tokenize(self.backends.up[0].client, PROBE_TEXT)]
                break
            except (UpstreamFailed, IndexError):
                await asyncio.sleep(0.5)
        if loaded.encode(PROBE_TEXT) != theirs:
            _log.error("tokenizer.refused", pool=self.name, path=path, reason="it splits text otherwise than a backend")
        elif self.record.tokenizer_path == path:
            self.tokenizer = loaded
            self.eos_ids |= loaded.eos_ids

    # --- configuration ----------------------------------------------------------------------------------------------

    def apply(self, record: PoolRecord, snapshot: ConfigSnapshot) -> None:
        """Follow a snapshot that has been validated. Queues, ledger and counters survive."""
        if record.tokenizer_path != self.record.tokenizer_path:
            self._path_changed.set()
        self.record, self.name, self._snapshot = record, record.name, snapshot
        self.backends.apply(record.backends)
        self._reconfigure()

    def _reconfigure(self) -> None:
        self._limits = None
        config = pool_config(self.record, self._snapshot, self.backends.members)
        if config != self.config:
            self.config = config
            self.post(Reconfigured(config=config))
            # A backend that takes part for the first time is down until its state is told (again, for the others).
            for member in self.backends.members.values():
                self.post(BackendChanged(backend=member.backend, is_up=member.state is State.UP))

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
        """Listener of the backends: one came up or went down."""
        self._limits = None
        is_up = member.state is State.UP
        self.post(BackendChanged(backend=member.backend, is_up=is_up))
        if self.backends.up:
            self._up.set()
        else:
            self._up.clear()

    async def wait_up(self) -> None:
        """Return once a backend is up.

        Raises:
            NoBackend: none came within the pool's limit.
        """
        try:
            async with asyncio.timeout(self.config.backend_wait_s):
                await self._up.wait()
        except TimeoutError:
            raise self.no_backend() from None

    def no_backend(self) -> NoBackend:
        return NoBackend("No backend is available for this model.", retry_after_s=self.retry_after(5.0))

    def limits(self) -> ModelLimits:
        """Limits of the largest live backend; of the largest known one while none is up.

        Raises:
            NoBackend: no backend has ever told its limits.
        """
        if self._limits is None:
            members = self.backends.up or list(self.backends.members.values())
            infos = [member.info for member in members if member.info is not None]
            if not infos:
                raise self.no_backend()
            self._limits = ModelLimits.from_info(
                max(infos, key=lambda info: (info.max_total_tokens, info.max_input_tokens))
            )
        return self._limits

    async def known_limits(self) -> ModelLimits:
        """``limits``; right after the start of the process, once the first backend has told them.

        Raises:
            NoBackend: nobody has, though there was time.
        """
        if self._limits is None and not any(member.info for member in self.backends.members.values()):
            grace_s = min(WARM_UP_S, self.config.backend_wait_s) - (self.loop.time() - self._started_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(grace_s, 0.0)):
                    await self._up.wait()
        return self.limits()

    @property
    def model_id(self) -> str:
        """What the backends call their model; the pool's name until one has told."""
        return next((m.info.model_id for m in self.backends.members.values() if m.info is not None), self.name)

    @property
    def is_resumable(self) -> bool:
        """No backend is known to be unable to continue a text."""
        return all(m.knowledge is None or m.knowledge.is_resumable for m in self.backends.members.values())

    # --- events in --------------------------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Hand an event to the scheduler, after those that came before it."""
        self._inbox.append(event)
        if self._is_draining_inbox:
            return
        self._is_draining_inbox = True
        try:
            inbox = self._inbox
            while inbox:
                event = inbox.popleft()
                for action in self._decide(event):
                    self._perform(action)
        finally:
            self._is_draining_inbox = False

    def _decide(self, event: Event) -> list[Action]:
        try:
            return self.scheduler.handle(event, self.loop.time())
        except Exception:  # a defect stays with the request that met it; the pool goes on
            _log.exception("scheduler.failed", pool=self.name, trigger=type(event).__name__)
            request_id = getattr(event, "request_id", None)
            if request_id is None and isinstance(event, Arrived):
                request_id = event.request.request_id
            generation = self._generations.pop(request_id, None) if request_id is not None else None
            if generation is not None:
                generation.step = Step.ENDED
                generation.call.fail(FairlaneError("The router failed to schedule this request."))
            return []

    def submit(self, call: Call, generations: Sequence[Scheduled]) -> None:
        """Queue the generations of a call."""
        self.calls.add(call)
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
        if not self._is_flush_due:
            self._is_flush_due = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        progress, self._progress = self._progress, {}
        for generation, tokens in progress.items():
            self.post(Progressed(request_id=generation.request_id, output_tokens=tokens))

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
        task = self._cuts.get(generation.request_id)
        if task is not None and task is not asyncio.current_task(self.loop):
            task.cancel()

    def upstream_failed(self, member: Member, error: FairlaneError) -> None:
        """A stream of this backend broke."""
        self.metrics.retries.labels(member.backend, error.code).inc()
        _log.warning("upstream.failed", pool=self.name, backend=member.backend, code=error.code, detail=error.message)
        if isinstance(error, UpstreamFailed):
            self.backends.stream_failed(member.backend, error)

    def stats(self) -> PoolStats:
        """The scheduler's numbers at this instant; a tick first, for what time alone has given back since."""
        self.post(TimerFired())
        return self.scheduler.stats()

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
        if isinstance(action, Dispatch):
            member = self.backends.members.get(action.backend)
            if member is None:
                generation.undispatched()
                return
            generation.dispatch(action, member)
        elif isinstance(action, Reject):
            self.forget(generation)
            generation.refused(self._error_of(action))
        else:
            self.forget(generation)
            generation.expired(self._error_of(action))

    def _fire(self) -> None:
        self._timer = None
        self.post(TimerFired())

    def _error_of(self, action: Reject | Expire) -> FairlaneError:
        hint = None if action.retry_after_s is None else self.retry_after(action.retry_after_s)
        match action.code:
            case RejectCode.TOO_LARGE:
                return RequestRefused(action.detail, code=action.code)
            case RejectCode.NO_BACKEND:
                return NoBackend(action.detail, retry_after_s=hint)
            case _:
                return QueueRefused(action.detail, code=action.code, retry_after_s=hint)

    def retry_after(self, estimate_s: float) -> float:
        """A hint between 1 and 120 s, spread so that the refused do not come back together."""
        return min(max(estimate_s, 1.0) * self._random.uniform(1.0, 1.25), 120.0)

    # --- cuts -------------------------------------------------------------------------------------------------------

    def spawn_cut(self, generation: TextGeneration, *, failure: FairlaneError | None) -> None:
        """Choose where the slice ends, off the loop; the generation goes on when that is known."""
        generation.step = Step.CUTTING
        task = self._spawn(self._cut(generation, failure))
        self._cuts[generation.request_id] = task
        task.add_done_callback(lambda _: self._cuts.pop(generation.request_id, None))

    async def _cut(self, generation: TextGeneration, failure: FairlaneError | None) -> None:
        flow = generation.flow
        job = flow.cut_job()
        decision: CutDecision | None = None
        try:
            if self.tokenizer is not None:
                decision = await self.loop.run_in_executor(self.executor, choose_cut, self.tokenizer, job)
            else:
                decision = await self._cut_by_backend(job)
        except (UpstreamFailed, NoBackend):
            decision = cut_unchecked(job)
        except Exception:  # whatever a tokenizer may raise: this request goes on with an unchecked cut
            _log.exception("cut.failed", pool=self.name)
            decision = cut_unchecked(job)
        if generation.step is not Step.CUTTING:
            return
        try:
            generation.cut_made(flow.resume(decision), failure)
        except Exception:  # contained to its request
            _log.exception("resume.failed", pool=self.name)
            generation.end_with(FairlaneError("The router failed to resume this request."))

    async def _cut_by_backend(self, job: CutJob) -> CutDecision:
        """Search with one ``/tokenize`` call per place tried; usually the first one fits."""
        search = search_cut(job, await self._ids(job.base_text))
        try:
            text = next(search)
            while True:
                text = search.send(await self._ids(job.base_text + text))
        except StopIteration as stop:
            decision: CutDecision = stop.value
            return decision

    async def _ids(self, text: str) -> list[int]:
        _, tokens = await self.ask(lambda client: tokenize(client, text))
        return [token.id for token in tokens]

    async def ask(self, question: Callable[[Backend], Awaitable[T]]) -> tuple[Member, T]:
        """A short call to any live backend; another one is asked if it breaks.

        Raises:
            NoBackend: none is up, and none came within the pool's limit. UpstreamFailed: the last one asked broke.
        """
        for attempt in range(ATTEMPTS):
            member = await self.some_member()
            try:
                return member, await question(member.client)
            except UpstreamFailed as error:
                self.upstream_failed(member, error)
                if attempt + 1 == ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    async def some_member(self) -> Member:
        """A live backend for a short call; waits for one if there is none.

        Raises:
            NoBackend: none came within the pool's limit.
        """
        up = self.backends.up
        if not up:
            await self.wait_up()
            up = self.backends.up
        return up[self._random.randrange(len(up))] if len(up) > 1 else up[0]

    # --- answers and books ------------------------------------------------------------------------------------------

    def answer_context(self, call: Call, headers: Headers) -> AnswerContext:
        """What an answer says of the backend that serves it."""
        compute_type = self.compute_type
        for name, value in headers:
            if name == b"x-compute-type":
                compute_type = self.compute_type = value.decode("latin-1")
        info = next((m.info for m in self.backends.members.values() if m.info is not None), None)
        return AnswerContext(
            model_id=info.model_id if info else self.name,
            system_fingerprint=info.system_fingerprint if info else "",
            created=int(time.time()),
            compute_type=compute_type,
            compute_characters=call.characters,
        )

    def answer_headers(self, call: Call) -> list[tuple[bytes, bytes]]:
        """Headers of our own on every answer of a call."""
        headers = [(b"x-request-id", call.request_id.encode("latin-1", "replace"))]
        if call.dispatched_s is not None:
            waited = max(0, int((call.dispatched_s - call.validated_s) * 1_000))
            headers.append((b"x-fairlane-queue-time", b"%d" % waited))
            headers.append((b"x-fairlane-tier", call.tier.encode("latin-1", "replace")))
        return headers

    def call_refused(self, call: Call, error: FairlaneError) -> None:
        """A request that was never queued: nothing is booked."""
        self.calls.discard(call)
        self._ledger.discard(call.slot)
        self.metrics.rejected.labels(error.code).inc()
        self.metrics.requests.labels(self.name, call.tier, "refused", error.code).inc()

    def call_ended(self, call: Call, *, outcome: str, code: str | None) -> None:
        """Write the one usage event of a call, and its metrics."""
        self.calls.discard(call)
        now = self.loop.time()
        self._ledger.finish(
            call.slot,
            outcome=outcome,
            ended_at_us=now_us(),
            finish_reason=call.finish_reason,
            resume_class=call.resume_class,
            backends=call.backends,
            error_code=code,
            explanation=self._explain(call, outcome, now),
        )
        sums = self.tenant_tokens.setdefault(call.identity.tenant, [0, 0])
        sums[0] += call.prompt_tokens if call.first_token_s is not None else 0
        sums[1] += call.output_tokens
        self._observe(call, outcome, code, now)

    def _explain(self, call: Call, outcome: str, now: float) -> list[str]:
        """Why a request waited or ended badly; nothing for the many that did neither, to keep the books narrow."""
        waited_s = (now if call.dispatched_s is None else call.dispatched_s) - call.validated_s
        if outcome == "completed" and waited_s < EXPLAINED_S and len(call.backends) < 2:
            return []
        waits = self.scheduler.explain(RequestId(call.slot.start.event))
        return [*waits, *call.explanation][:MAX_EXPLANATION]

    def _observe(self, call: Call, outcome: str, code: str | None, now: float) -> None:
        seen = self._observers.get(call.tier)
        if seen is None or seen.model != self.name:
            seen = self._observers[call.tier] = self.metrics.for_tier(self.name, call.tier)
        seen.ended(outcome, code or "")
        if outcome == "expired" and code is not None:
            self.metrics.rejected.labels(code).inc()
        seen.duration.observe(now - call.arrived_s)
        if call.dispatched_s is not None:
            seen.queue_wait.observe(call.dispatched_s - call.validated_s)
        if call.first_token_s is not None:
            seen.ttft.observe(call.first_token_s - call.arrived_s)
            seen.overhead.observe(call.validated_s - call.arrived_s)
            seen.prompt_tokens.inc(call.prompt_tokens)
            seen.output_tokens.inc(call.output_tokens)
            last = call.last_token_s if call.last_token_s is not None else now
            if call.output_tokens > 1:
                seen.tpot.observe((last - call.first_token_s) / (call.output_tokens - 1))
        if call.recomputed_tokens:
            self.metrics.recomputed.labels(self.name).inc(call.recomputed_tokens)
        if call.resumed_prompt_tokens:
            self.metrics.resumed_prefill.labels(self.name).inc(call.resumed_prompt_tokens)
        if outcome == "completed" and call.predicted_tokens and call.output_tokens:
            seen.predicted.observe(call.predicted_tokens / call.output_tokens)

    # --- limits of time ---------------------------------------------------------------------------------------------

    def end_overdue(self) -> None:
        """End requests that have lived beyond the limit."""
        limit = self.loop.time() - self.settings.request_limit_s
        for call in [call for call in self.calls if call.arrived_s < limit]:
            call.fail(UpstreamTimeout("The request took too long."))

    def end_all(self, error: FairlaneError) -> None:
        """End everything that still runs or waits."""
        for call in list(self.calls):
            call.fail(error)

    def close(self) -> None:
        """Stop what would outlive the engine; running requests have been ended."""
        for task in self._cuts.values():
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class UpstreamTimeout(UpstreamFailed):
    """The whole request took longer than the router allows."""

    code = "timeout"
    status_openai = status_native = 504
