"""Weighted token counters and queues kept a second time, the slow and obvious way, to judge the scheduler by.

Everything is a plain scan. The constants (U', passes) are computed here from the numbers of the scenario, not taken
from the product. Laws are those of the published algorithm, as read for bounded urgency; each has a name, so that a
test can watch a single one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations

from tests.property.level import Level

SLACK = 1e-6


class LawBroken(AssertionError):
    """A law does not hold; the message starts with its name."""


@dataclass(slots=True)
class Job:
    """One request as the oracle sees it."""

    name: str
    tenant: str
    tier: str
    order: int
    prompt: int
    cap: int
    length: int
    preferred_slice: int
    input_tokens: int
    predicted: int = 1
    slice_start: int = 0
    slice_end: int = 0
    output: int = 0
    cuts: int = 0
    owed: int = 0
    paid_in: int = 0
    paid_out: int = 0
    resumed: bool = False
    key: str = "key"
    place: str = "new"
    backend: str = ""
    may_go_on: bool = False
    """Its slice has just ended: it may start the next one in the same place before whoever is in turn."""
    upstream: str = ""
    outcomes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Oracle:
    """See the module. ``targets``: tiers that have a TTFT target. ``ranks``: tier -> rank."""

    weights: dict[str, float]
    ranks: dict[str, int]
    targets: set[str]
    w_prompt: float
    w_output: float
    pool_tokens: int
    longest_prompt: int
    burst: float
    backfill: float
    laws: frozenset[str]
    gamma: float = 0.0
    counter: dict[str, float] = field(default_factory=dict)
    delivered: dict[str, float] = field(default_factory=dict)
    queues: dict[str, list[Job]] = field(default_factory=dict)
    parked: list[Job] = field(default_factory=list)
    last_left: str | None = None
    pairs: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    levels: dict[tuple[str, str], Level] = field(default_factory=dict)
    running: dict[str, Job] = field(default_factory=dict)
    """Jobs that were started; those that run no longer are forgotten when it is read."""
    worst_counter: float = 0.0
    worst_pair: float = 0.0
    peak: float = field(init=False)
    """Most service that one tenant can have in the pool at a time."""
    _limits: dict[tuple[str, str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        above = max(0.0, self.w_prompt - self.w_output) * self.longest_prompt
        self.peak = self.w_output * (self.pool_tokens + 1) + above
        for tenant in self.weights:
            self.counter[tenant] = self.delivered[tenant] = 0.0
            self.queues[tenant] = []

    # --- constants -------------------------------------------------------------------------------------------------

    def urgency_pass(self, tenant: str) -> float:
        return self.burst * self.peak / self.weights[tenant] if self.targets else 0.0

    def backfill_pass(self, tenant: str) -> float:
        return self.backfill * self.peak / self.weights[tenant]

    def counter_bound(self, tenant: str) -> float:
        largest = max(self.urgency_pass(tenant), self.backfill_pass(tenant))
        return max(self.peak / self.weights[tenant], self.gamma * self.peak / min(self.weights.values())) + largest

    def ahead_bound(self, tenant: str, other: str) -> float:
        """The same of the pair: largest ``c_tenant - c_other``."""
        if not self.gamma:
            return self.counter_bound(tenant)
        largest = max(self.urgency_pass(tenant), self.backfill_pass(tenant))
        return max(self.peak / self.weights[tenant], self.gamma * self.peak / self.weights[other]) + largest

    def _limit(self, tenant: str, other: str = "") -> float:
        """``counter_bound`` of a tenant, or ``ahead_bound`` of two: asked at every token, worked out once."""
        limit = self._limits.get((tenant, other))
        if limit is None:
            limit = self.ahead_bound(tenant, other) if other else self.counter_bound(tenant)
            self._limits[tenant, other] = limit
        return limit

    # --- what is read ----------------------------------------------------------------------------------------------

    def backlogged(self) -> list[str]:
        return [tenant for tenant, queue in self.queues.items() if queue]

    def floor(self) -> float | None:
        return min((self.counter[tenant] for tenant in self.backlogged()), default=None)

    def in_turn(self) -> list[str]:
        """Backlogged tenants that may be the one in turn; several if the oracle cannot tell."""
        keys = {tenant: self.key(tenant) for tenant in self.backlogged()}
        least = min(keys.values(), default=0.0)
        return [tenant for tenant, key in keys.items() if key <= least + SLACK]

    def key(self, tenant: str) -> float:
        """What decides whose turn it is: the counter, and a share of what is expected of the slices in flight."""
        if not self.gamma:
            return self.counter[tenant]
        self.running = {name: job for name, job in self.running.items() if job.place == "running"}
        expected = sum(
            max(0, min(job.predicted, job.slice_end) - job.output)
            for job in self.running.values()
            if job.tenant == tenant
        )
        return self.counter[tenant] + self.gamma * self.w_output * expected / self.weights[tenant]

    def line(self, tenant: str, tier: str | None = None) -> list[Job]:
        """Waiting jobs in order: rank, the key with the least service, ran before, arrival."""
        jobs = [job for job in self.queues[tenant] if tier is None or job.tier == tier]
        return sorted(
            jobs,
            key=lambda job: (
                self.ranks[job.tier],
                job.tier,
                self.level(job).counter[job.key],
                job.key,
                not job.resumed,
                job.order,
            ),
        )

    def level(self, job: Job) -> Level:
        """The keys of its tenant and tier."""
        where = (job.tenant, job.tier)
        if where not in self.levels:
            self.levels[where] = Level(self.peak)
        return self.levels[where]

    def is_tied(self, job: Job) -> bool:
        """Whether another key of its tenant and tier has received as little: then either may go first."""
        level = self.level(job)
        return any(k != job.key and level.counter[k] <= level.counter[job.key] + SLACK for k in level.waiting)

    def is_urgent(self, job: Job) -> bool:
        return job.tier in self.targets and job.output == 0

    def may_pass(self, tenant: str) -> bool:
        """Whether urgent heads of the tenant may go ahead of others."""
        floor = self.floor()
        return floor is not None and self.counter[tenant] - floor <= self.urgency_pass(tenant) + SLACK

    # --- what happens ----------------------------------------------------------------------------------------------

    def enqueue(self, job: Job) -> None:
        tenant = job.tenant
        if not self.queues[tenant]:
            self.lift(tenant)
            self.queues[tenant].append(job)
            for other in self.backlogged():
                if other != tenant:
                    pair = (min(tenant, other), max(tenant, other))
                    gap = self._gap(pair)
                    self.pairs[pair] = (gap, gap)
            self._watch_counter(tenant)
        else:
            self.queues[tenant].append(job)
        self.level(job).enter(job.key)
        job.place = "queued"

    def lift(self, tenant: str) -> None:
        """The tenant becomes backlogged: idling earns nothing."""
        floor = self.floor()
        if floor is None and self.last_left is not None:
            floor = self.counter[self.last_left]
        if floor is not None:
            self.counter[tenant] = max(self.counter[tenant], floor)

    def park(self, job: Job) -> None:
        """The job waits, but not in its queue: no server that is up could hold it."""
        self.parked.append(job)
        job.place = "parked"

    def leave(self, job: Job) -> None:
        if job.place == "parked":
            self.parked.remove(job)
            return
        tenant = job.tenant
        self.queues[tenant] = [other for other in self.queues[tenant] if other is not job]
        if not any((other.tier, other.key) == (job.tier, job.key) for other in self.queues[tenant]):
            self.level(job).leave(job.key)
        if not self.queues[tenant]:
            self.last_left = tenant
            self.pairs = {pair: span for pair, span in self.pairs.items() if tenant not in pair}

    def dispatch(self, job: Job) -> None:
        """Judge and book an admission."""
        if job.place != "queued":
            raise LawBroken(f"lifecycle: {job.name} was dispatched while {job.place}")
        tenant = job.tenant
        if "no_skipping" in self.laws:
            self.judge_turn(job)
        if "client_fifo" in self.laws and not job.may_go_on:
            first = next(other for other in self.line(tenant, job.tier) if other.key == job.key)
            if first is not job:
                raise LawBroken(f"client_fifo: {job.name} went before {first.name} of the same tenant, tier and key")
        if "key_order" in self.laws and not job.may_go_on:
            level = self.level(job)
            ahead = level.counter[job.key] - min(level.counter[key] for key in level.waiting)
            if ahead > SLACK:
                raise LawBroken(f"key_order: {job.name} of key {job.key} went first, which is {ahead:g} ahead")
        self.leave(job)
        job.place = "running"
        job.slice_start = job.output
        self.running[job.name] = job
        unpaid = max(0, job.prompt - job.paid_in)
        job.paid_in = max(job.paid_in, job.prompt)
        self._charge(job, self.w_prompt * unpaid)

    def judge_turn(self, job: Job) -> None:
        """Who starts is in turn, or its tenant is within its pass; who goes on in place may be as far ahead as what its
        tenant then runs leaves of the bound."""
        tenant = job.tenant
        floor = self.floor()
        assert floor is not None
        ahead = self.counter[tenant] - floor
        allowed = self.backfill_pass(tenant)
        if self.is_urgent(job):
            allowed = max(allowed, self.urgency_pass(tenant))
        if job.may_go_on:
            running = [other for other in self.running.values() if other.place == "running" and other.tenant == tenant]
            held = sum(other.input_tokens + other.slice_end - other.slice_start - 1 for other in running)
            held += job.input_tokens + job.slice_end - job.output - 1
            allowed += self.peak * (1.0 - held / self.pool_tokens) / self.weights[tenant]
        if ahead > allowed + SLACK and not (self.gamma and tenant in self.in_turn()):
            raise LawBroken(f"no_skipping: {job.name} of {tenant} is {ahead:g} ahead of the floor, pass {allowed:g}")

    def token(self, job: Job) -> None:
        job.output += 1
        if job.output > job.paid_out:
            job.paid_out = job.output
            self._charge(job, self.w_output)

    def _charge(self, job: Job, service: float) -> None:
        if not service:
            return
        tenant = job.tenant
        ratio = self.level(job).charge(job.key, service)
        if "key_bound" in self.laws and ratio > 1.0 + SLACK:
            raise LawBroken(f"key_bound: keys of {tenant} are {ratio:.3f} of their bound apart")
        self.counter[tenant] += service / self.weights[tenant]
        self.delivered[tenant] += service
        if not self.queues[tenant]:
            return
        self._watch_counter(tenant)
        for other in self.backlogged():
            if other != tenant:
                self._watch_pair((min(tenant, other), max(tenant, other)))

    def _watch_counter(self, tenant: str) -> None:
        others = self.backlogged() if self.gamma else []
        floor = self.floor()
        assert floor is not None
        ratio = (self.counter[tenant] - floor) / self._limit(tenant)
        for other in others:
            ahead = self.counter[tenant] - self.counter[other]
            ratio = max(ratio, ahead / self._limit(tenant, other))
        self.worst_counter = max(self.worst_counter, ratio)
        if "counter_bound" in self.laws and ratio > 1.0 + SLACK:
            raise LawBroken(f"counter_bound: {tenant} is {ratio:.3f} of its bound above the floor")

    def _gap(self, pair: tuple[str, str]) -> float:
        return sum(
            sign * self.delivered[tenant] / self.weights[tenant] for sign, tenant in zip((1, -1), pair, strict=True)
        )

    def _watch_pair(self, pair: tuple[str, str]) -> None:
        gap = self._gap(pair)
        low, high = self.pairs[pair]
        one, other = pair
        bound = self._limit(one, other) + self._limit(other, one)
        ratio = max(gap - low, high - gap) / bound
        self.worst_pair = max(self.worst_pair, ratio)
        self.pairs[pair] = (min(low, gap), max(high, gap))
        if "pair_bound" in self.laws and ratio > 1.0 + SLACK:
            raise LawBroken(f"pair_bound: {pair} drifted {ratio:.3f} of their bound apart while both had work waiting")

    def total_delivered(self) -> float:
        return sum(self.delivered.values())


def gaps(values: Iterable[float]) -> float:
    """Largest difference between any two values."""
    return max((abs(a - b) for a, b in combinations(values, 2)), default=0.0)
