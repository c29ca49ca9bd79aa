"""One run: clients, router and servers on one clock that nobody reads but this module.

    client --Arrived--> Scheduler --Dispatch, Preempt--> (1 ms) --> server
    client <--tokens--- Scheduler <--Stepped, Finished-- (1 ms) <-- server, at the end of every iteration

The scheduler is the router's own; everything it may know comes to it by events, as in the router. Events at the same
instant happen in the order in which they were caused.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from typing import Any

from router_ext.core.actions import Action, Dispatch, Expire, Preempt, Reject, SetTimer
from router_ext.core.events import (
    Arrived,
    BackendChanged,
    Event,
    Finished,
    Preempted,
    RequestSpec,
    SliceEnded,
    Stepped,
    TimerFired,
)
from router_ext.core.ids import KeyId, RequestId, TenantId
from router_ext.core.prefix import PREFIX_BLOCK_TOKENS
from router_ext.core.scheduler import Scheduler
from router_ext.errors import SimulationError
from router_ext.sim.foresight import Foresight
from router_ext.sim.jobs import Agent, Job
from router_ext.sim.pools import pool_config, tier_name
from router_ext.sim.prediction import Prediction, Predictor
from router_ext.sim.raw import RAW, RawRouter
from router_ext.sim.recorder import Recorder
from router_ext.sim.recording import Recording
from router_ext.sim.server import Server
from router_ext.sim.streams import Batch, Outcome, Stream
from router_ext.sim.suites import Suite
from router_ext.sim.workloads import Streams

LINK_S = 0.001
"""One way between router and server."""

_STEP, _AT_ROUTER, _AT_SERVER, _CLOSE, _ARRIVAL, _CALL, _TIMER = range(7)

_FOREVER = float("inf")


class Run:
    """One suite under one policy, with one seed. Use once."""

    def __init__(
        self,
        suite: Suite,
        policy: str,
        seed: int,
        *,
        predictor: Predictor = Predictor.NOISY,
        foresight: Foresight | None = None,
    ) -> None:
        self._suite = suite
        self._policy = policy
        self._seed = seed
        self._config = config = pool_config(suite, policy)
        self._tenants = [TenantId(client.name) for client in suite.clients]
        self._tiers = [tier_name(client.ttft_target_s) for client in suite.clients]
        self._backends = {backend: index for index, backend in enumerate(config.backends)}
        self._servers = [Server(suite.model) for _ in config.backends]
        self._is_busy = [False] * len(self._servers)
        self._seen = [(0, 0)] * len(self._servers)
        """(tick, iteration) of the newest outcome the router has, by server."""
        self._cut: list[list[Stream]] = [[] for _ in self._servers]
        """Streams the router has closed and may still hear of, by server."""
        self._prediction = Prediction(predictor, foresight)
        self._heap: list[tuple[float, int, int, object]] = []
        self._seq = 0
        self._timer = 0
        self._jobs: list[Job] = []
        self._by_id: dict[RequestId, Job] = {}
        self._agents: list[Agent] = []
        self._sources: list[Iterator[Job]] = []
        self._num_open = 0
        self._num_open_batch = 0
        self._is_batch_done = False
        self._num_blocks = 0
        self._scheduler = RawRouter(config) if policy == RAW else Scheduler(config)
        self._recorder = Recorder(suite, config, self._servers, self._scheduler)
        self._gaps = self._recorder.gaps

    # --- the clock -------------------------------------------------------------------------------------------------

    def run(self) -> Recording:
        """Play it to its end."""
        began = time.process_time()
        self._open()
        over_s = self._play()
        recording = self._recorder.recording(
            policy=self._policy,
            seed=self._seed,
            over_s=over_s,
            jobs=self._jobs,
            agents=self._agents,
            shown=self._shown,
        )
        recording.cpu_s = time.process_time() - began
        return recording

    def _open(self) -> None:
        suite, config = self._suite, self._config
        for backend in config.backends:
            self._handle(BackendChanged(backend=backend, is_up=True), 0.0)
        for index, client in enumerate(suite.clients):
            end_s = _FOREVER if client.is_open_ended else suite.duration_s
            streams = Streams(f"{suite.same_as or suite.name}:{self._seed}:{client.name}", index, end_s)
            self._sources.append(client.source(streams))
            self._next_arrival(index)

    def _play(self) -> float:
        """One thing after another, until the suite says that it is over. The instant at which it is."""
        heap, recorder, suite = self._heap, self._recorder, self._suite
        now = 0.0
        while heap:
            at_s = heap[0][0]
            recorder.sample_before(at_s)
            if at_s > recorder.end_s and not recorder.is_closed:
                recorder.close(recorder.end_s)
                if not suite.is_drained and not self._num_open_batch:
                    return recorder.end_s
            now, _, kind, payload = heapq.heappop(heap)
            self._happen(kind, payload, now)
            if self._is_batch_done:
                if suite.is_until_batch_ends:
                    if now == 0.0:
                        raise SimulationError(f"suite {suite.name}: these servers take nothing of the batch")
                    recorder.close(now)
                    return now
                if recorder.is_closed and not suite.is_drained:
                    return now
            if recorder.is_closed and suite.is_drained and not self._num_open:
                return now
        if not recorder.is_closed:
            # Everything is over before the end of arrivals.
            now = now if suite.is_until_batch_ends else recorder.end_s
            recorder.close(now)
        return now

    def _happen(self, kind: int, payload: Any, now: float) -> None:
        if kind == _STEP:
            self._on_step(payload, now)
        elif kind == _AT_ROUTER:
            self._on_outcome(payload, now)
        elif kind == _AT_SERVER:
            self._on_opened(payload, now)
        elif kind == _ARRIVAL:
            self._on_arrival(payload, now)
        elif kind == _TIMER:
            if payload == self._timer:
                self._handle(TimerFired(), now)
        elif kind == _CALL:
            self._arrive(payload, now)
        else:
            self._on_closed(payload)

    def _push(self, at_s: float, kind: int, payload: object) -> None:
        self._seq += 1
        heapq.heappush(self._heap, (at_s, self._seq, kind, payload))

    # --- clients ---------------------------------------------------------------------------------------------------

    def _next_arrival(self, tenant: int) -> None:
        job = next(self._sources[tenant], None)
        if job is None:
            if self._suite.clients[tenant].is_batch and not self._num_open_batch:
                self._is_batch_done = True
            return
        client = self._suite.clients[tenant]
        if client.is_batch:
            self._num_open_batch += 1
        self._push(job.arrival_s, _ARRIVAL, job)

    def _on_arrival(self, job: Job, now: float) -> None:
        self._num_open += 1
        self._next_arrival(job.tenant)
        self._arrive(job, now)

    def _arrive(self, job: Job, now: float) -> None:
        self._jobs.append(job)
        job.request_id = RequestId(f"req_{len(self._jobs):06d}")
        self._by_id[job.request_id] = job
        agent = job.agent
        cost: float | None = None
        if agent is not None:
            if agent.cost is None:
                self._agents.append(agent)
            cost = self._prediction.agent_cost(agent)
        suite = self._suite
        model = suite.model
        if job.input_tokens > model.longest_input_tokens or (
            suite.longest_tokens and job.input_tokens + suite.longest_tokens > model.kv_tokens
        ):
            job.is_refused = True
            self._close_job(job, now)
            return
        tenant = job.tenant
        guess = self._prediction.guess(job)
        spec = RequestSpec(
            request_id=job.request_id,
            tenant=self._tenants[tenant],
            key=job.key or KeyId(self._tenants[tenant]),
            tier=self._tiers[tenant],
            prompt_tokens=job.input_tokens,
            max_new_tokens=job.max_new_tokens,
            predicted_output_tokens=guess.output_tokens,
            slice_tokens=None,
            quantiles=guess.quantiles,
            agent_id=None if agent is None else agent.name,
            agent_cost=cost,
            prefix=self._prefix(job),
        )
        self._gaps.queued(tenant)
        self._handle(Arrived(request=spec), now)

    def _prefix(self, job: Job) -> tuple[int, ...]:
        """The chain of a prompt nobody else sends."""
        blocks = job.input_tokens // PREFIX_BLOCK_TOKENS
        first = self._num_blocks
        self._num_blocks = first + blocks
        return tuple(range(first, first + blocks))

    def _finish(self, job: Job, now: float) -> None:
        job.finish_s = now
        self._prediction.finished(job)
        self._close_job(job, now)

    def _close_job(self, job: Job, now: float) -> None:
        del self._by_id[job.request_id]
        self._num_open -= 1
        if self._suite.clients[job.tenant].is_batch:
            self._num_open_batch -= 1
            if not self._num_open_batch:
                self._is_batch_done = True
        agent = job.agent
        if agent is not None:
            agent.num_open -= 1
            agent.is_broken |= job.is_refused
            if not agent.num_open and not agent.is_broken:
                if agent.reduce is None:
                    agent.finish_s = now
                else:
                    call, agent.reduce = agent.reduce, None
                    call.arrival_s = now
                    agent.num_open = 1
                    self._num_open += 1
                    self._push(now, _CALL, call)

    # --- the router ------------------------------------------------------------------------------------------------

    def _handle(self, event: Event, now: float) -> None:
        """Give the scheduler an event and do what it says."""
        actions = self._scheduler.handle(event, now)
        if actions:
            self._carry_out(actions, now)

    def _carry_out(self, actions: list[Action], now: float) -> None:
        recorder = self._recorder
        cut: list[Job] = []
        for action in actions:
            match action:
                case Dispatch():
                    job = self._by_id[action.request_id]
                    recorder.decided(now, "dispatch", job.request_id, action.backend, action.slice_tokens)
                    self._gaps.unqueued(job.tenant)
                    self._dispatch(job, self._backends[action.backend], action.slice_tokens, now)
                case Preempt():
                    job = self._by_id[action.request_id]
                    recorder.decided(now, "preempt", job.request_id, action.backend)
                    cut.append(job)
                case Reject() | Expire():
                    job = self._by_id[action.request_id]
                    recorder.decided(now, action.code, job.request_id)
                    self._gaps.unqueued(job.tenant)
                    job.is_refused = True
                    self._close_job(job, now)
                case SetTimer():
                    self._timer += 1
                    self._push(max(now, action.at_s), _TIMER, self._timer)
        for job in cut:
            self._preempt(job, now)

    def _dispatch(self, job: Job, server: int, slice_tokens: int, now: float) -> None:
        self._recorder.num_dispatched += 1
        rest = job.output_tokens - job.kept
        stream = Stream(
            job,
            input_tokens=job.input_tokens + job.kept,
            length=rest,
            new_tokens=slice_tokens,
            was_sliced=job.kept > 0 and not job.was_preempted,
            was_preempted=job.was_preempted,
        )
        job.was_preempted = False
        job.stream = stream
        job.backend = server
        self._push(now + LINK_S, _AT_SERVER, stream)

    def _preempt(self, job: Job, now: float) -> None:
        """Close the stream; what has arrived is kept, what is on its way is lost."""
        stream = job.stream
        server = job.backend
        tick, iteration = self._seen[server]
        if stream is None or 0 < stream.left_iteration <= iteration:
            # Its end came with the tokens that led to the cut, and is about to be reported.
            return
        job.kept += stream.shown(tick, iteration)
        self._recorder.num_preempted += 1
        job.num_preempted += 1
        job.was_preempted = True
        job.stream = None
        stream.is_cut = True
        self._cut[server].append(stream)
        self._push(now + LINK_S, _CLOSE, (server, stream))
        self._gaps.queued(job.tenant)
        self._handle(
            Preempted(request_id=job.request_id, dropped_tokens=0, next_prompt_tokens=job.input_tokens + job.kept),
            now,
        )

    def _on_outcome(self, message: tuple[int, Outcome], now: float) -> None:
        """What a server's streams showed at the end of an iteration has arrived."""
        index, outcome = message
        batch, started, ended = outcome.decoded, outcome.started, outcome.ended
        self._seen[index] = (outcome.tick, outcome.iteration)
        if self._cut[index]:
            # Streams that are closed on this side show nothing any more.
            batch = Batch(tuple([stream for stream in batch.streams if not stream.is_cut]))
            started = [stream for stream in started if not stream.is_cut]
            ended = [stream for stream in ended if not stream.is_cut]
            self._cut[index] = [s for s in self._cut[index] if not 0 < s.left_iteration <= outcome.iteration]
        stepped = batch.stepped
        if started:
            stepped = Stepped(tokens=(*stepped.tokens, *[stream.token for stream in started]))
        elif not stepped.tokens:
            return
        self._recorder.delivered(batch, started, now)
        self._handle(stepped, now)
        for stream in ended:
            self._end_slice(stream, now)

    def _end_slice(self, stream: Stream, now: float) -> None:
        job = stream.job
        job.stream = None
        job.kept += stream.written
        if job.kept >= job.output_tokens or isinstance(self._scheduler, RawRouter):
            # Without a router the server's end is the end, even if it could not go on.
            self._finish(job, now)
            self._handle(Finished(request_id=job.request_id), now)
            return
        self._gaps.queued(job.tenant)
        self._handle(
            SliceEnded(request_id=job.request_id, dropped_tokens=0, next_prompt_tokens=job.input_tokens + job.kept),
            now,
        )

    # --- the servers -----------------------------------------------------------------------------------------------

    def _on_opened(self, stream: Stream, now: float) -> None:
        index = stream.job.backend
        self._servers[index].open(stream)
        if not self._is_busy[index]:
            self._begin(index, now)

    def _on_closed(self, message: tuple[int, Stream]) -> None:
        index, stream = message
        self._servers[index].close(stream)

    def _begin(self, index: int, now: float) -> None:
        end_s = self._servers[index].begin(now)
        self._is_busy[index] = end_s is not None
        if end_s is not None:
            self._push(end_s, _STEP, index)

    def _on_step(self, index: int, now: float) -> None:
        outcome = self._servers[index].finish(now)
        self._push(now + LINK_S, _AT_ROUTER, (index, outcome))
        self._begin(index, now)

    def _shown(self, job: Job) -> int:
        """Output tokens its client has seen."""
        return job.kept if job.stream is None else job.kept + job.stream.shown(*self._seen[job.backend])
