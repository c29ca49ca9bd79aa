"""Keeps what a run shows while it goes on: tokens delivered, gaps, samples, decisions. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

from router_ext.core.bounds import bound_service, pair_bound
from router_ext.core.config import PoolConfig
from router_ext.core.ids import RequestId, TenantId
from router_ext.core.scheduler import Scheduler
from router_ext.sim.gaps import Gaps
from router_ext.sim.jobs import Agent, Job
from router_ext.sim.raw import RawRouter
from router_ext.sim.recording import Recording, Requests, Samples, TenantInfo
from router_ext.sim.server import Server
from router_ext.sim.streams import Batch, Stream
from router_ext.sim.suites import Suite

_SAMPLES = 4_000
_INTERVALS_S = (1.0, 2.0, 5.0, 10.0, 15.0, 30.0)
"""A run is sampled every second, a long one less often. Divisors of 30 and 60 s, where windows begin and end."""


class Recorder:
    """See the module.

    Attributes:
        end_s: end of arrivals, infinite while that is open. is_closed: it has passed, and the means up to it are taken.
    """

    def __init__(
        self, suite: Suite, config: PoolConfig, servers: Sequence[Server], scheduler: Scheduler | RawRouter
    ) -> None:
        clients = suite.clients
        self.gaps = Gaps(len(clients))
        self.end_s = float("inf") if suite.is_until_batch_ends else suite.duration_s
        self.num_dispatched = 0
        self.num_preempted = 0
        self._suite = suite
        self._config = config
        self._servers = servers
        self._scheduler = scheduler
        self._tenants = [TenantId(client.name) for client in clients]
        self._per_prompt = [config.w_prompt / client.weight for client in clients]
        self._per_output = [config.w_output / client.weight for client in clients]
        self._prompt_tokens = [0] * len(clients)
        self._output_tokens = [0] * len(clients)
        self._next_sample_s = 0.0
        self._samples = Samples(
            interval_s=_interval_s(suite),
            prompt_tokens=[[] for _ in clients],
            output_tokens=[[] for _ in clients],
            counters=[[] for _ in clients],
            queued=[[] for _ in clients],
            kv_tokens=[[] for _ in servers],
            running=[[] for _ in servers],
        )
        self._digest = blake2b(digest_size=16)
        self._means: tuple[float, float] | None = None

    @property
    def is_closed(self) -> bool:
        return self._means is not None

    # --- while it goes on ------------------------------------------------------------------------------------------

    def decided(self, now: float, what: str, request_id: RequestId, backend: str = "", tokens: int = 0) -> None:
        """The scheduler said so."""
        self._digest.update(f"{now!r} {what} {request_id} {backend} {tokens}\n".encode())

    def delivered(self, batch: Batch, started: Sequence[Stream], now: float) -> None:
        """Clients got a token each of a batch, and first ones of others; a prompt counts with its first token."""
        gaps, output_tokens, per_output = self.gaps, self._output_tokens, self._per_output
        service = gaps.service
        for tenant, count in batch.tally:
            output_tokens[tenant] += count
            service[tenant] += per_output[tenant] * count
        for stream in started:
            job = stream.job
            tenant = job.tenant
            output_tokens[tenant] += 1
            service[tenant] += per_output[tenant]
            if job.first_s is None:
                job.first_s = now
                self._prompt_tokens[tenant] += job.input_tokens
                service[tenant] += self._per_prompt[tenant] * job.input_tokens
        if now <= self.end_s:
            gaps.moment()

    def sample_before(self, now: float) -> None:
        """Take the samples that are due before anything that happens at ``now``."""
        while self._next_sample_s < now and self._next_sample_s <= self.end_s:
            self._sample(self._next_sample_s)
            self._next_sample_s += self._samples.interval_s

    def close(self, end_s: float) -> None:
        """Arrivals are over; what is averaged over time is averaged up to here."""
        self.end_s = end_s
        self.sample_before(end_s)
        for server in self._servers:
            server.settle(end_s)
        if not self._samples.at_s or self._samples.at_s[-1] < end_s:
            self._sample(end_s)
        self._means = (
            sum(server.kv_seconds for server in self._servers),
            sum(server.running_seconds for server in self._servers),
        )

    def _sample(self, at_s: float) -> None:
        samples = self._samples
        samples.at_s.append(at_s)
        queued = list(self.gaps.waiting())
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

    # --- when it is over -------------------------------------------------------------------------------------------

    def recording(
        self,
        *,
        policy: str,
        seed: int,
        over_s: float,
        jobs: Sequence[Job],
        agents: Sequence[Agent],
        shown: Callable[[Job], int],
    ) -> Recording:
        """All of it. ``shown``: output tokens the client of a job has seen."""
        config, servers = self._config, self._servers
        for server in servers:
            server.settle(over_s)
        assert self._means is not None
        kv_seconds, running_seconds = self._means
        bound = counter = gap = None
        if isinstance(self._scheduler, Scheduler):
            tenants = list(config.tenants.values())
            bounds = [pair_bound(config, first, second) for i, first in enumerate(tenants) for second in tenants[:i]]
            bound = max((b for b in bounds if b is not None), default=None)
            counter = bound_service(config)
            gap = self._scheduler.stats().largest_gap_service
        return Recording(
            suite=self._suite.name,
            policy=policy,
            seed=seed,
            tenants=[
                TenantInfo(
                    name=client.name,
                    weight=client.weight,
                    ttft_target_s=client.ttft_target_s,
                    completion_target_s=client.completion_target_s,
                    is_batch=client.is_batch,
                )
                for client in self._suite.clients
            ],
            end_s=self.end_s,
            over_s=over_s,
            w_prompt=config.w_prompt,
            w_output=config.w_output,
            usable_tokens=[server.usable for server in servers],
            kv_seconds=kv_seconds,
            kv_seconds_over=sum(server.kv_seconds for server in servers),
            running_seconds=running_seconds,
            requests=_requests(jobs, agents, shown),
            agents=[(agent.arrival_s, agent.finish_s) for agent in agents],
            samples=self._samples,
            accumulated_difference=self.gaps.accumulated,
            accumulated_while_waiting=self.gaps.while_waiting,
            bound=bound,
            counter_bound=counter,
            largest_gap=gap,
            num_recomputed=sum(server.num_recomputed for server in servers),
            num_continued=sum(server.num_continued for server in servers),
            num_prefilled=sum(server.num_prefilled for server in servers),
            num_output=sum(self._output_tokens),
            num_dispatched=self.num_dispatched,
            num_preempted=self.num_preempted,
            digest=self._digest.hexdigest(),
            cpu_s=0.0,
        )


def _requests(jobs: Sequence[Job], agents: Sequence[Agent], shown: Callable[[Job], int]) -> Requests:
    requests = Requests()
    numbers = {id(agent): index for index, agent in enumerate(agents)}
    for job in jobs:
        requests.tenant.append(job.tenant)
        requests.arrival_s.append(job.arrival_s)
        requests.first_s.append(job.first_s)
        requests.finish_s.append(job.finish_s)
        requests.input_tokens.append(job.input_tokens)
        requests.output_tokens.append(shown(job))
        requests.wanted_tokens.append(job.output_tokens)
        requests.agent.append(-1 if job.agent is None else numbers[id(job.agent)])
        requests.is_refused.append(job.is_refused)
        requests.num_preempted.append(job.num_preempted)
    return requests


def _interval_s(suite: Suite) -> float:
    if suite.is_until_batch_ends:
        return _INTERVALS_S[0]
    return next((i for i in _INTERVALS_S if suite.duration_s <= i * _SAMPLES), _INTERVALS_S[-1])
