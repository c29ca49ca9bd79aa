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
from dataclasses import replace
from hashlib import blake2b

from router_ext.core.actions import Action, Dispatch, Expire, Preempt, Reject, SetTimer
from router_ext.core.bounds import bound_service, pair_bound
from router_ext.core.config import PoolConfig, build_pool, policy_names
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
from router_ext.core.fairness import TEST_POLICIES
from router_ext.core.ids import BackendId, KeyId, RequestId, TenantId, TierName
from router_ext.core.prefix import PREFIX_BLOCK_TOKENS
from router_ext.core.scheduler import Scheduler
from router_ext.errors import SimulationError
from router_ext.sim.gaps import Gaps
from router_ext.sim.jobs import Agent, Job
from router_ext.sim.prediction import Prediction, Predictor
from router_ext.sim.raw import RAW, RawRouter
from router_ext.sim.recording import Recording, Requests, Samples, TenantInfo
from router_ext.sim.server import Batch, Outcome, Server, Stream
from router_ext.sim.suites import Suite
from router_ext.sim.workloads import Client, Streams

LINK_S = 0.001
"""One way between router and server."""

_NO_LIMIT = 10_000_000

_SAMPLES = 4_000
_INTERVALS_S = (1.0, 2.0, 5.0, 10.0, 15.0, 30.0)
"""A run is sampled every second, a long one less often. Divisors of 30 and 60 s, where windows begin and end."""

_STEP, _AT_ROUTER, _AT_SERVER, _CLOSE, _ARRIVAL, _CALL, _TIMER = range(7)

_FOREVER = float("inf")


def pool_config(suite: Suite, policy: str) -> PoolConfig:
    """The pool of a suite: its servers as an operator would state them, no limit on queues."""
    model = suite.model
    targets = sorted({c.ttft_target_s for c in suite.clients if c.ttft_target_s is not None})
    config = build_pool(
        pool={
            "name": suite.name,
            "policy": policy if policy in policy_names() else "fifo",
            "max_queued": _NO_LIMIT,
            **suite.pool,
        },
        backends=[
            {
                "backend": f"server{index}",
                "kv_tokens": model.kv_tokens,
                "prefill_budget_tokens": model.prefill_budget_tokens,
                "is_chunked": model.is_chunked,
                "max_input_tokens": model.longest_input_tokens,
                "max_total_tokens": 2 * model.kv_tokens,
                "max_concurrent_requests": 1_000_000,
            }
            for index in range(suite.num_backends)
        ],
        tiers=[
            *({"name": _tier(target), "rank": 1, "ttft_target_s": target} for target in targets),
            {"name": _tier(None), "rank": 10},
        ],
        tenants=[{"tenant": client.name, "weight": client.weight, "max_queued": 1_000_000} for client in suite.clients],
    )
    return replace(config, policy=policy) if policy in TEST_POLICIES else config


def _interval_s(suite: Suite) -> float:
    if suite.is_until_batch_ends:
        return _INTERVALS_S[0]
    return next((i for i in _INTERVALS_S if suite.duration_s <= i * _SAMPLES), _INTERVALS_S[-1])


def _tier(target_s: float | None) -> str:
    return "batch" if target_s is None else f"within_{target_s:g}s"


class Run:
    """One suite under one policy, with one seed. Use once."""

    def __init__(
        self,
        suite: Suite,
        policy: str,
        seed: int,
        *,
        predictor: Predictor = Predictor.NOISY,
        is_slice_oracle: bool = False,
    ) -> None:
        self._suite = suite
        self._policy = policy
        self._seed = seed
        self._config = config = pool_config(suite, policy)
        self._tenants = [TenantId(client.name) for client in suite.clients]
        self._tiers = [TierName(_tier(client.ttft_target_s)) for client in suite.clients]
        self._backends = {backend: index for index, backend in enumerate(config.backends)}
        self._servers = [Server(suite.model) for _ in config.backends]
        self._is_busy = [False] * len(self._servers)
        self._seen = [(0, 0)] * len(self._servers)
        """(tick, iteration) of the newest outcome the router has, by server."""
        self._cut: list[list[Stream]] = [[] for _ in self._servers]
        """Streams the router has closed and may still hear of, by server."""
        self._scheduler: Scheduler | RawRouter
        self._prediction = Prediction(predictor, is_slice_oracle=is_slice_oracle)
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
        self._gaps = Gaps(len(suite.clients))
        self._per_prompt = [config.w_prompt / client.weight for client in suite.clients]
        self._per_output = [config.w_output / client.weight for client in suite.clients]
        self._prompt_tokens = [0] * len(suite.clients)
        self._output_tokens = [0] * len(suite.clients)
        self._interval_s = _interval_s(suite)
        self._samples = Samples(
            interval_s=self._interval_s,
            prompt_tokens=[[] for _ in suite.clients],
            output_tokens=[[] for _ in suite.clients],
            counters=[[] for _ in suite.clients],
            queued=[[] for _ in suite.clients],
            kv_tokens=[[] for _ in self._servers],
            running=[[] for _ in self._servers],
        )
        self._digest = blake2b(digest_size=16)
        self._num_dispatched = 0
        self._num_preempted = 0
        self._num_blocks = 0
        self._end_s = _FOREVER if suite.is_until_batch_ends else suite.duration_s
        self._at_end: tuple[float, float, float] | None = None

    # --- the clock -------------------------------------------------------------------------------------------------

    def run(self) -> Recording:
        """Play it to its end."""
        began = time.process_time()
        self._open()
        over_s = self._play()
        recording = self._record(over_s)
        recording.cpu_s = time.process_time() - began
        return recording

    def _open(self) -> None:
        suite, config = self._suite, self._config
        if self._policy == RAW:
            self._scheduler = RawRouter(config)
        else:
            self._scheduler = Scheduler(config)
            for backend in config.backends:
                self._handle(BackendChanged(backend=backend, is_up=True), 0.0)
        for index, client in enumerate(suite.clients):
            end_s = _FOREVER if client.is_open_ended else suite.duration_s
            streams = Streams(f"{suite.same_as or suite.name}:{self._seed}:{client.name}", index, end_s)
            self._sources.append(client.source(streams))
            self._next_arrival(index)

    def _play(self) -> float:
        heap = self._heap
        next_sample = 0.0
        suite = self._suite
        now = 0.0
        while heap:
            at_s = heap[0][0]
            while at_s > next_sample and next_sample <= self._end_s:
                self._sample(next_sample)
                next_sample += self._interval_s
            if at_s > self._end_s and self._at_end is None:
                self._close_books(self._end_s)
                if not suite.is_drained and not self._num_open_batch:
                    return self._end_s
            now, _, kind, payload = heapq.heappop(heap)
            if kind == _STEP:
                self._on_step(payload, now)  # type: ignore[arg-type]
            elif kind == _AT_ROUTER:
                self._on_outcome(payload, now)  # type: ignore[arg-type]
            elif kind == _AT_SERVER:
                self._on_opened(payload, now)  # type: ignore[arg-type]
            elif kind == _ARRIVAL:
                self._on_arrival(payload, now)  # type: ignore[arg-type]
            elif kind == _TIMER:
                if payload == self._timer:
                    self._handle(TimerFired(), now)
            elif kind == _CALL:
                self._arrive(payload, now)  # type: ignore[arg-type]
            else:
                self._on_closed(payload, now)  # type: ignore[arg-type]
            if self._is_batch_done:
                if self._end_s == _FOREVER:
                    if now == 0.0:
                        raise SimulationError(f"suite {suite.name}: these servers take nothing of the batch")
                    self._end_s = now
                    self._close_books(now)
                    return now
                if self._at_end is not None and not suite.is_drained:
                    return now
            if self._at_end is not None and suite.is_drained and not self._num_open:
                return now
        if self._at_end is None:
            # Everything is over before the end of arrivals.
            now = max(now, self._end_s) if self._end_s < _FOREVER else now
            self._end_s = min(self._end_s, now)
            while next_sample <= self._end_s:
                self._sample(next_sample)
                next_sample += self._interval_s
            self._close_books(self._end_s)
        return now

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
        suite = self._suite
        model = suite.model
        if job.input_tokens > model.longest_input_tokens or (
            suite.longest_tokens and job.input_tokens + suite.longest_tokens > model.kv_tokens
        ):
            job.is_refused = True
            self._close_job(job, now)
            return
        agent = job.agent
        cost: float | None = None
        if agent is not None:
            if agent.cost is None:
                self._agents.append(agent)
            cost = self._prediction.agent_cost(agent)
        tenant = job.tenant
        spec = RequestSpec(
            request_id=job.request_id,
            tenant=self._tenants[tenant],
            key=job.key or KeyId(self._tenants[tenant]),
            tier=self._tiers[tenant],
            prompt_tokens=job.input_tokens,
            max_new_tokens=job.max_new_tokens,
            predicted_output_tokens=self._prediction.output_tokens(job),
            slice_tokens=self._prediction.slice_tokens(job),
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
        self._prediction.lengths.finished(job)
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
        cut: list[Job] = []
        for action in actions:
            match action:
                case Dispatch():
                    job = self._by_id[action.request_id]
                    self._note(now, "dispatch", action.request_id, action.backend, action.slice_tokens)
                    self._gaps.unqueued(job.tenant)
                    self._dispatch(job, self._backends[action.backend], action.slice_tokens, now)
                case Preempt():
                    job = self._by_id[action.request_id]
                    self._note(now, "preempt", action.request_id, action.backend, 0)
                    cut.append(job)
                case Reject() | Expire():
                    job = self._by_id[action.request_id]
                    self._note(now, action.code, action.request_id, BackendId(""), 0)
                    self._gaps.unqueued(job.tenant)
                    job.is_refused = True
                    self._close_job(job, now)
                case SetTimer():
                    self._timer += 1
                    self._push(max(now, action.at_s), _TIMER, self._timer)
        for job in cut:
            self._preempt(job, now)

    def _note(self, now: float, what: str, request_id: RequestId, backend: BackendId, tokens: int) -> None:
        self._digest.update(f"{now!r} {what} {request_id} {backend} {tokens}\n".encode())

    def _dispatch(self, job: Job, server: int, slice_tokens: int, now: float) -> None:
        self._num_dispatched += 1
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
        self._num_preempted += 1
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
        service, per_output, output_tokens = self._gaps.service, self._per_output, self._output_tokens
        for tenant, count in batch.tally:
            output_tokens[tenant] += count
            service[tenant] += per_output[tenant] * count
        stepped = batch.stepped
        if started:
            for stream in started:
                job = stream.job
                tenant = job.tenant
                output_tokens[tenant] += 1
                service[tenant] += per_output[tenant]
                if job.first_s is None:
                    job.first_s = now
                    self._prompt_tokens[tenant] += job.input_tokens
                    service[tenant] += self._per_prompt[tenant] * job.input_tokens
            stepped = Stepped(tokens=(*stepped.tokens, *[stream.token for stream in started]))
        elif not stepped.tokens:
            return
        if now <= self._end_s:
            self._gaps.moment()
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

    def _on_closed(self, message: tuple[int, Stream], now: float) -> None:
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

    # --- keeping ---------------------------------------------------------------------------------------------------

    def _sample(self, at_s: float) -> None:
        samples = self._samples
        samples.at_s.append(at_s)
        queued = list(self._gaps.waiting())
        for index, server in enumerate(self._servers):
            samples.kv_tokens[index].append(server.reserved)
            samples.running[index].append(server.num_running)
            for stream in server.queue:
                if not stream.is_closed:
                    queued[stream.job.tenant] += 1
        for tenant, waiting in enumerate(queued):
            samples.prompt_tokens[tenant].append(self._prompt_tokens[tenant])
            samples.output_tokens[tenant].append(self._output_tokens[tenant])
            samples.queued[tenant].append(waiting)
        if isinstance(self._scheduler, Scheduler):
            counters = {stats.tenant: stats.raw_counter for stats in self._scheduler.stats().tenants}
            for tenant, name in enumerate(self._tenants):
                samples.counters[tenant].append(counters.get(name, 0.0))

    def _close_books(self, now: float) -> None:
        """The end of arrivals: what is averaged over time is averaged up to here."""
        for server in self._servers:
            server.settle(now)
        if not self._samples.at_s or self._samples.at_s[-1] < now:
            self._sample(now)
        self._at_end = (
            now,
            sum(server.kv_seconds for server in self._servers),
            sum(server.running_seconds for server in self._servers),
        )

    def _record(self, over_s: float) -> Recording:
        suite, config = self._suite, self._config
        servers = self._servers
        for server in servers:
            server.settle(over_s)
        assert self._at_end is not None
        end_s, kv_seconds, running_seconds = self._at_end
        requests = Requests()
        numbers = {id(agent): index for index, agent in enumerate(self._agents)}
        for job in self._jobs:
            requests.tenant.append(job.tenant)
            requests.arrival_s.append(job.arrival_s)
            requests.first_s.append(job.first_s)
            requests.finish_s.append(job.finish_s)
            requests.input_tokens.append(job.input_tokens)
            requests.output_tokens.append(self._delivered(job))
            requests.wanted_tokens.append(job.output_tokens)
            requests.agent.append(-1 if job.agent is None else numbers[id(job.agent)])
            requests.is_refused.append(job.is_refused)
            requests.num_preempted.append(job.num_preempted)
        bound = counter = gap = None
        if isinstance(self._scheduler, Scheduler):
            tenants = list(config.tenants.values())
            bounds = [pair_bound(config, first, second) for i, first in enumerate(tenants) for second in tenants[:i]]
            bound = max((b for b in bounds if b is not None), default=None)
            counter = bound_service(config)
            gap = self._scheduler.stats().largest_gap_service
        return Recording(
            suite=suite.name,
            policy=self._policy,
            seed=self._seed,
            tenants=[_info(client) for client in suite.clients],
            end_s=end_s,
            over_s=over_s,
            w_prompt=config.w_prompt,
            w_output=config.w_output,
            usable_tokens=[server.usable for server in servers],
            kv_seconds=kv_seconds,
            kv_seconds_over=sum(server.kv_seconds for server in servers),
            running_seconds=running_seconds,
            requests=requests,
            agents=[(agent.arrival_s, agent.finish_s) for agent in self._agents],
            samples=self._samples,
            accumulated_difference=self._gaps.accumulated,
            accumulated_while_waiting=self._gaps.while_waiting,
            bound=bound,
            counter_bound=counter,
            largest_gap=gap,
            num_recomputed=sum(server.num_recomputed for server in servers),
            num_continued=sum(server.num_continued for server in servers),
            num_prefilled=sum(server.num_prefilled for server in servers),
            num_output=sum(self._output_tokens),
            num_dispatched=self._num_dispatched,
            num_preempted=self._num_preempted,
            digest=self._digest.hexdigest(),
            cpu_s=0.0,
        )

    def _delivered(self, job: Job) -> int:
        """Output tokens its client has seen."""
        return job.kept if job.stream is None else job.kept + job.stream.shown(*self._seen[job.backend])


def _info(client: Client) -> TenantInfo:
    return TenantInfo(
        name=client.name,
        weight=client.weight,
        ttft_target_s=client.ttft_target_s,
        completion_target_s=client.completion_target_s,
        is_batch=client.is_batch,
    )
