"""Random small pools, the scheduler under test, token-step servers and the oracle, wired together.

Small pools (60 to 400 tokens) reach the bounds; large ones never do. A scenario is a pure function of its seed.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from router_ext.core.actions import Action, Dispatch, Expire, Preempt, Reject, SetTimer
from router_ext.core.config import PoolConfig, build_pool
from router_ext.core.events import (
    Arrived,
    BackendChanged,
    Cancelled,
    Event,
    Failed,
    Finished,
    Preempted,
    Progressed,
    RequestSpec,
    SliceEnded,
    TimerFired,
)
from router_ext.core.fairness import counters as counters_module
from router_ext.core.ids import BackendId, KeyId, RequestId, TenantId, TierName
from router_ext.core.scheduler import Scheduler
from tests.property.cuts import Cuts
from tests.property.oracle import SLACK, Job, LawBroken, Oracle
from tests.property.tgi_steps import StepServer, Stream

STEP_S = 0.05
MIN_SLICE_TOKENS = 8
ALL_LAWS = frozenset(
    {
        "counter_bound",
        "pair_bound",
        "work_conserving",
        "no_skipping",
        "client_fifo",
        "key_order",
        "key_bound",
        "conservation",
        "lift",
        "ledger",
        "server_queue_empty",
        "audit",
        "cuts",
        "waste",
        "progress",
    }
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What one run does. ``arrivals[step]`` lists (tenant, tier, prompt, cap, length, preferred slice)."""

    seed: int
    policy: str
    weights: dict[str, float]
    tiers: list[dict[str, Any]]
    servers: dict[str, dict[str, int]]
    w_prompt: float
    w_output: float
    burst: float
    backfill: float
    arrivals: list[list[tuple[str, str, int, int, int, int]]]
    cancel_rate: float = 0.0
    fail_rate: float = 0.0
    crash_rate: float = 0.0
    prefill_budget: int = 1_000_000
    drop_at_slice_end: bool = False
    outages: tuple[tuple[int, str, bool], ...] = ()
    """(step, server, whether it comes back), beside the random crashes."""
    backend_wait_s: float = 30.0
    max_preemptions: int = 0
    theta: float = 0.025
    waste: float = 0.015
    predicted: int | None = None
    """Output predicted of every request, as by a router that has no predictor; None for something random."""
    num_keys: int = 1
    """Keys of every tenant (of those in ``split_tenants`` if there are any); each request comes with one of them."""
    split_tenants: tuple[str, ...] = ()
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Further knobs of the pool."""

    def config(self, rename: Callable[[str], str] = str) -> PoolConfig:
        config = build_pool(
            pool={
                "name": "p",
                "w_prompt": self.w_prompt,
                "w_output": self.w_output,
                "burst_ratio": self.burst,
                "backfill_ratio": self.backfill,
                "min_slice_tokens": MIN_SLICE_TOKENS,
                "backend_wait_s": self.backend_wait_s,
                "aging_ratio": 0.0,
                "headroom_ratio": 0.0,
                "max_preemptions": self.max_preemptions,
                "theta_ratio": self.theta,
                "waste_ratio": self.waste,
                "stall_ratio": 0.0,
                **self.knobs,
            },
            backends=[
                {
                    "backend": name,
                    "kv_tokens": s["kv_tokens"],
                    "block_size": s["block_size"],
                    "max_input_tokens": s["kv_tokens"],
                    "max_total_tokens": 2 * s["kv_tokens"],
                    "prefill_budget_tokens": self.prefill_budget,
                    "max_concurrent_requests": 1_000,
                    "max_sequences": 1,
                }
                for name, s in self.servers.items()
            ],
            tiers=self.tiers,
            tenants=[{"tenant": rename(name), "weight": weight} for name, weight in self.weights.items()],
        )
        return replace(config, policy=self.policy)


def scenario(
    seed: int,
    *,
    steps: int = 500,
    policy: str = "slo-fair",
    num_servers: int | None = None,
    weighted: bool = True,
    with_targets: bool = True,
    prices: tuple[float, float] | None = None,
    with_faults: bool = False,
    same_mode: str | None = None,
    passes: tuple[float, float] | None = None,
    contrast: bool = False,
    unequal: bool = False,
    preemptive: bool = True,
    num_keys: int = 1,
    wild: bool = False,
    prefill_budget: int = 1_000_000,
) -> Scenario:
    """A random scenario, in which somebody waits most of the time.

    ``passes``: (burst, backfill) ratios. ``contrast``: the first tenant sends requests that fill a server, the others
    small ones. ``unequal``: one server is several times as large as the others, goes away again and again, and every
    tenant sends some requests that only this one can hold. ``wild``: weights from 0.1 to 10 and any ``gamma``; and
    with every fourth seed long requests of one tenant beside a crowd of short ones, under predictions that say nothing.
    """
    rng = random.Random(seed)
    num_tenants = rng.randint(2, 6)
    names = [f"ten_{chr(97 + i)}" for i in range(num_tenants)]
    weights = {name: rng.choice([0.5, 1.0, 1.0, 2.0, 4.0]) if weighted else 1.0 for name in names}
    servers: dict[str, dict[str, int]] = {}
    for i in range(num_servers or rng.randint(1, 3)):
        block_size = rng.choice([1, 1, 4])
        servers[f"bke_{i}"] = {"kv_tokens": rng.randint(60, 400), "block_size": block_size}
    outages: list[tuple[int, str, bool]] = []
    if unequal:
        servers = {f"bke_{i}": {"kv_tokens": rng.randint(50, 90), "block_size": 1} for i in range(rng.randint(1, 2))}
        servers["bke_9"] = {"kv_tokens": rng.randint(200, 400), "block_size": rng.choice([1, 4])}
        step = rng.randint(20, 60)
        while step < steps:
            outages.append((step, "bke_9", False))
            step += rng.choice([3, 40, 120])
            outages.append((step, "bke_9", True))
            step += rng.randint(5, 60)
        if rng.random() < 0.5:
            outages += [(steps // 2, "bke_0", False), (steps // 2 + 30, "bke_0", True)]
    smallest = min(s["kv_tokens"] - 2 * s["block_size"] for s in servers.values())
    largest = max(s["kv_tokens"] - 2 * s["block_size"] for s in servers.values())
    tiers: list[dict[str, Any]] = [{"name": "batch", "rank": 10}]
    if with_targets:
        tiers.append({"name": "chat", "rank": 1, "ttft_target_s": rng.choice([0.2, 1.0, 4.0])})
        if rng.random() < 0.5:
            tiers.append({"name": "express", "rank": 0, "ttft_target_s": 0.1})
    # Long requests of one tenant beside crowds of short ones: while one of the former runs, others receive a lot.
    has_marathons = wild and seed % 4 == 0
    if has_marathons:
        names, same_mode = names[:2], "flood"
    modes = {name: same_mode or rng.choice(["flood", "flood", "on_off", "light", "bursts"]) for name in names}
    favourite = {name: rng.choice([t["name"] for t in tiers]) for name in names}
    largest_prompt = {name: rng.choice([smallest // 2, smallest // 2, 12]) for name in names}
    arrivals: list[list[tuple[str, str, int, int, int, int]]] = []
    for step in range(steps):
        here = []
        for name in names:
            is_crowd = has_marathons and name != names[0]
            for _ in range(2 if is_crowd else _num_arrivals(modes[name], step, rng)):
                prompt = rng.randint(1, max(1, largest_prompt[name]))
                cap = rng.randint(1, max(1, smallest - prompt))
                length = rng.choice([cap, cap, rng.randint(1, cap)])
                if has_marathons:
                    prompt = 4
                    cap = length = rng.randint(5, 20) if is_crowd else smallest // 2
                if contrast:
                    prompt = 4
                    cap = length = smallest - 4 if name == names[0] else rng.randint(10, 30)
                if unequal and rng.random() < 0.2:
                    prompt = rng.randint(smallest, largest - 20)
                    cap = length = rng.randint(1, largest - prompt)
                tier = favourite[name] if rng.random() < 0.8 else rng.choice(tiers)["name"]
                preferred = rng.choice([8, 16, 64, 1024])
                here.append((name, tier, prompt, cap, length, 1_024 if has_marathons else preferred))
        arrivals.append(here)
    if wild and not has_marathons:
        weights = {name: round(10.0 ** rng.uniform(-1.0, 1.0), 3) for name in names}
    elif has_marathons:
        weights = dict.fromkeys(names, 1.0)
        passes = (0.0, 0.05)
    burst, backfill = passes or (rng.choice([0.0, 0.25, 0.25, 1.0]), rng.choice([0.0, 0.05, 0.05, 0.5]))
    w_prompt, w_output = prices or rng.choice([(1.0, 2.0), (1.0, 1.0), (2.0, 1.0), (5.0, 1.0)])
    return Scenario(
        seed=seed,
        policy=policy,
        weights=weights,
        tiers=tiers,
        servers=servers,
        w_prompt=w_prompt,
        w_output=w_output,
        burst=burst,
        backfill=backfill,
        arrivals=arrivals,
        cancel_rate=0.02 if with_faults else 0.0,
        fail_rate=0.01 if with_faults else 0.0,
        crash_rate=0.004 if with_faults else 0.0,
        drop_at_slice_end=with_faults,
        outages=tuple(outages),
        prefill_budget=prefill_budget,
        backend_wait_s=rng.choice([4.0, 30.0]) if unequal else 30.0,
        max_preemptions=rng.choice([1, 1, 3]) if preemptive and not (has_marathons and seed % 8) else 0,
        theta=rng.choice([0.0, 0.025, 0.25]),
        waste=rng.choice([0.015, 0.2, 1.0]),
        num_keys=num_keys,
        knobs={"gamma": 1.0 if has_marathons else rng.choice([0.0, 0.0, 0.5, 1.0])} if wild else {},
        predicted=rng.choice([1_024, 1_024, None]) if has_marathons else None,
    )


def _num_arrivals(mode: str, step: int, rng: random.Random) -> int:
    match mode:
        case "flood":
            return 3 if step == 0 else int(rng.random() < 0.4)
        case "on_off":
            return int(step // 100 % 2 == 0 and rng.random() < 0.5)
        case "light":
            return int(rng.random() < 0.02)
        case _:
            return rng.randint(4, 10) if rng.random() < 0.02 else 0


@dataclass
class Run:
    """One run of a scenario against one scheduler, judged by the laws named."""

    scenario: Scenario
    laws: frozenset[str] = ALL_LAWS
    rename: Callable[[str], str] = str
    oracle_type: type[Oracle] | None = None
    """Who judges; by default nobody but under ``slo-fair``."""
    log: list[tuple[Any, ...]] = field(default_factory=list)
    fields: Callable[[Job], dict[str, Any]] = lambda job: {}
    """Further fields of a job's ``RequestSpec``, or others in place of the usual ones."""

    def __post_init__(self) -> None:
        s = self.scenario
        self.rng = random.Random(s.seed + 1_000_003)
        self.rng_keys = random.Random(s.seed + 2_000_003)
        self.now = 0.0
        self.servers = {name: StepServer(**numbers) for name, numbers in s.servers.items()}
        self.up = set(self.servers)
        pool = sum(server.usable() * server.block_size for server in self.servers.values())
        self.is_judged = s.policy == "slo-fair" or self.oracle_type is not None
        self.oracle = (self.oracle_type or Oracle)(
            weights={self.rename(name): weight for name, weight in s.weights.items()},
            ranks={tier["name"]: tier["rank"] for tier in s.tiers},
            targets={tier["name"] for tier in s.tiers if tier.get("ttft_target_s") is not None},
            w_prompt=s.w_prompt,
            w_output=s.w_output,
            pool_tokens=pool,
            longest_prompt=max(server.usable() * server.block_size for server in self.servers.values()),
            burst=s.burst,
            backfill=s.backfill,
            gamma=float(s.knobs.get("gamma", 0.0)),
            laws=self.laws if self.is_judged else frozenset(),
        )
        self.jobs: dict[str, Job] = {}
        self.streams: dict[str, Job] = {}
        self.largest_slice = 0
        self.cutting: list[tuple[float, Job]] = []
        """Jobs that were told to stop, with the instant at which they have."""
        self.cuts = Cuts(self)
        self.timer: float | None = None
        self.charged: dict[str, float] = defaultdict(float)

    # --- driving ---------------------------------------------------------------------------------------------------

    def go(self) -> Run:
        """Run the scenario, then let it drain, then judge what must hold at the end."""
        with _spied_charges(self.charged):
            self.scheduler = Scheduler(self.scenario.config(self.rename))
            for name in self.servers:
                self.send(BackendChanged(backend=BackendId(name), is_up=True))
            for step, arrivals in enumerate(self.scenario.arrivals):
                for at, name, is_back in self.scenario.outages:
                    if at == step and is_back is not (name in self.up):
                        (self.restore if is_back else self.crash)(name)
                self.step(step, arrivals, with_faults=True)
            step = len(self.scenario.arrivals)
            limit = step + 100_000
            for name in sorted(set(self.servers) - self.up):
                self.restore(name)
            for job in list(self.jobs.values()):
                if job.place in ("queued", "parked") and self.rng.random() < 0.9:
                    self.cancel(job)
            while self.streams or self.oracle.parked or any(self.oracle.queues.values()):
                self.step(step, [], with_faults=False)
                step += 1
                if step > limit:
                    raise LawBroken("ledger: the pool does not drain")
            for _ in range(20):
                self.step(step, [], with_faults=False)
                step += 1
            # KV that came free by time alone is seen at the next event; nobody waits, so none was asked for.
            self.send(TimerFired())
        self.judge_end()
        return self

    def step(self, step: int, arrivals: list[tuple[str, str, int, int, int, int]], *, with_faults: bool) -> None:
        """All servers make one iteration; what they say reaches the scheduler at its end, then everything else."""
        self.now = round((step + 1) * STEP_S, 6)
        events = [event for name in self.servers if name in self.up for event in self.servers[name].step()]
        for name, server in self.servers.items():
            if "server_queue_empty" in self.laws and server.queue:
                raise LawBroken(f"server_queue_empty: {len(server.queue)} requests wait inside {name}")
        for upstream, what in events:
            # A stream that was closed within this step says nothing more.
            if upstream in self.streams:
                self.upstream(upstream, what)
        self.stop_those_due()
        if self.timer is not None and self.timer <= self.now:
            self.timer = None
            self.send(TimerFired())
        for arrival in arrivals:
            self.arrive(*arrival)
        if with_faults:
            self.faults()
        self.cuts.stepped()
        if "ledger" in self.laws:
            self.judge_ledger()
        if "audit" in self.laws and (wrong := self.scheduler.audit()):
            raise LawBroken(f"audit: {wrong[0]}")

    def arrive(self, tenant: str, tier: str, prompt: int, cap: int, length: int, preferred: int) -> None:
        order = len(self.jobs)
        tenant = self.rename(tenant)
        name = f"req_{order}"
        job = self.jobs[name] = Job(name, tenant, tier, order, prompt, cap, length, preferred, prompt)
        job.predicted = self.scenario.predicted or self.rng.randint(1, 2 * cap)
        split = self.scenario.split_tenants
        if not split or tenant in split:
            job.key = f"key_{self.rng_keys.randrange(self.scenario.num_keys)}"
        usual: dict[str, Any] = {
            "tenant": TenantId(tenant),
            "key": KeyId(job.key),
            "slice_tokens": preferred,
            "predicted_output_tokens": job.predicted,
        }
        spec = RequestSpec(
            request_id=RequestId(name),
            tier=TierName(tier),
            prompt_tokens=prompt,
            max_new_tokens=cap,
            **{**usual, **self.fields(job)},
        )
        was_idle = not self.oracle.queues[tenant] and not self.is_stuck(job)
        before = self.counters() if was_idle else {}
        floor = self.oracle.floor()
        self.wait(job)
        self.send(Arrived(request=spec))
        if "lift" in self.laws and was_idle:
            after = self.counters()[tenant]
            if after < before[tenant] - SLACK:
                raise LawBroken(f"lift: the counter of {tenant} fell from {before[tenant]:g} to {after:g}")
            if floor is not None and after < floor - SLACK:
                raise LawBroken(f"lift: {tenant} came back {floor - after:g} below the floor")

    def upstream(self, name: str, what: str) -> None:
        job = self.streams[name]
        request_id = RequestId(job.name)
        if what == "token":
            self.oracle.token(job)
            self.cuts.token()
            self.send(Progressed(request_id=request_id, output_tokens=1), decides=False)
            return
        self.forget(job)
        if what == "end" or job.output >= job.cap:
            job.place = "ended"
            job.outcomes.append("finished")
            self.send(Finished(request_id=request_id))
            return
        dropped = 0
        if self.scenario.drop_at_slice_end and self.rng.random() < 0.5:
            dropped = self.rng.randint(0, min(2, job.output))
        self.back_to_queue(job, dropped)
        job.may_go_on = self.scenario.policy == "slo-fair"
        # Whatever its next slice is: no longer than what is left of it.
        self.largest_slice = max(self.largest_slice, min(job.cap - job.output, 1_024))
        self.send(SliceEnded(request_id=request_id, dropped_tokens=dropped, next_prompt_tokens=job.input_tokens))
        job.may_go_on = False

    def forget(self, job: Job) -> None:
        """Its stream is over, whether it was told to stop or not."""
        del self.streams[job.upstream]
        if any(other is job for _, other in self.cutting):
            self.cuts.spared(job)
        self.cutting = [entry for entry in self.cutting if entry[1] is not job]

    def stop_those_due(self) -> None:
        """Report those that were told to stop, each once: at once, or after more tokens or even the end overtook."""
        while (due := next((job for at, job in self.cutting if at <= self.now), None)) is not None:
            self.cutting = [entry for entry in self.cutting if entry[1] is not due]
            self.forget(due)
            dropped = self.rng.randint(0, min(2, due.output)) if self.scenario.drop_at_slice_end else 0
            self.back_to_queue(due, dropped)
            self.send(
                Preempted(request_id=RequestId(due.name), dropped_tokens=dropped, next_prompt_tokens=due.input_tokens)
            )

    def back_to_queue(self, job: Job, dropped: int) -> None:
        job.output -= dropped
        job.input_tokens = job.prompt + job.output
        job.resumed = True
        self.wait(job)

    def room(self, job: Job) -> int:
        """Most new tokens that a server which is up could give this job if it were empty."""
        servers = [self.servers[name] for name in self.up]
        return max((s.usable() * s.block_size + 1 - job.input_tokens for s in servers), default=1_024)

    def is_stuck(self, job: Job) -> bool:
        """No server that is up could ever hold the smallest slice of this job. Nobody is while all are down."""
        return self.room(job) < min(job.cap - job.output, MIN_SLICE_TOKENS)

    def wait(self, job: Job) -> None:
        if self.is_stuck(job):
            self.oracle.park(job)
        else:
            self.oracle.enqueue(job)

    def recheck(self) -> None:
        """The servers are others now. First those go who are stuck, then those come back who are not."""
        if not self.up:
            return
        for job in self.jobs.values():
            if job.place == "queued" and self.is_stuck(job):
                self.oracle.leave(job)
                self.oracle.park(job)
        for job in self.jobs.values():
            if job.place == "parked" and not self.is_stuck(job):
                self.oracle.leave(job)
                self.oracle.enqueue(job)

    def faults(self) -> None:
        s = self.scenario
        if not (s.cancel_rate or s.fail_rate or s.crash_rate):
            return
        for job in list(self.jobs.values()):
            if job.place in ("queued", "parked", "running"):
                rate = s.cancel_rate if job.place == "running" else s.cancel_rate / 4
                if self.rng.random() < rate:
                    self.cancel(job)
                    continue
            if job.place == "running" and self.rng.random() < s.fail_rate:
                self.fail(job)
        for name in list(self.servers):
            if name in self.up and self.rng.random() < s.crash_rate:
                self.crash(name)
            elif name not in self.up and self.rng.random() < 0.1:
                self.restore(name)

    def cancel(self, job: Job) -> None:
        if job.place == "running":
            self.servers[job.backend].close(job.upstream)
            self.forget(job)
        else:
            self.oracle.leave(job)
            self.cuts.spared(job)
        job.place = "ended"
        job.outcomes.append("cancelled")
        self.send(Cancelled(request_id=RequestId(job.name)))

    def fail(self, job: Job) -> None:
        if job.backend in self.up:
            self.servers[job.backend].close(job.upstream)
        self.forget(job)
        if self.rng.random() < 0.3:
            job.place = "ended"
            job.outcomes.append("failed")
            self.send(Failed(request_id=RequestId(job.name), is_retryable=False))
            return
        dropped = self.rng.randint(0, min(2, job.output))
        self.back_to_queue(job, dropped)
        self.send(
            Failed(
                request_id=RequestId(job.name),
                is_retryable=True,
                dropped_tokens=dropped,
                next_prompt_tokens=job.input_tokens,
            )
        )

    def crash(self, name: str) -> None:
        self.up.discard(name)
        self.servers[name].crash()
        self.recheck()
        self.send(BackendChanged(backend=BackendId(name), is_up=False))
        for job in [job for job in self.jobs.values() if job.place == "running" and job.backend == name]:
            self.fail(job)

    def restore(self, name: str) -> None:
        self.up.add(name)
        self.recheck()
        self.send(BackendChanged(backend=BackendId(name), is_up=True))

    # --- the scheduler ---------------------------------------------------------------------------------------------

    def send(self, event: Event, *, decides: bool = True) -> None:
        actions = self.scheduler.handle(event, self.now)
        for action in actions:
            self.carry_out(action)
        if told := [action for action in actions if isinstance(action, Preempt)]:
            self.cuts.told(told)
        if "work_conserving" in self.laws and decides and self.is_judged:
            self.judge_work_conserving()

    def carry_out(self, action: Action) -> None:
        match action:
            case Dispatch():
                job = self.jobs[action.request_id]
                job.slice_end = job.output + action.slice_tokens
                job.may_go_on = job.may_go_on and action.backend == job.backend
                self.oracle.dispatch(job)
                job.may_go_on = False
                self.largest_slice = max(self.largest_slice, action.slice_tokens)
                self.cuts.resumed(job)
                self.log.append((self.now, job.name, str(action.backend), action.slice_tokens, action.segment))
                job.backend = action.backend
                job.upstream = f"{job.name}/{action.segment}"
                self.streams[job.upstream] = job
                if action.backend not in self.up:
                    raise LawBroken(f"ledger: {job.name} was sent to {action.backend}, which is down")
                self.servers[action.backend].open(
                    Stream(job.upstream, job.input_tokens, action.slice_tokens, job.length - job.output)
                )
            case Reject() | Expire():
                job = self.jobs[action.request_id]
                self.log.append((self.now, job.name, action.code.value))
                self.oracle.leave(job)
                self.cuts.spared(job)
                job.place = "ended"
                job.outcomes.append(action.code.value)
            case Preempt():
                job = self.jobs[action.request_id]
                self.log.append((self.now, job.name, "preempt"))
                self.servers[job.backend].close(job.upstream)
                self.cutting.append((self.now + self.rng.choice([0.0, 0.0, STEP_S]), job))
            case SetTimer():
                self.timer = action.at_s

    def counters(self) -> dict[str, float]:
        return {str(tenant.tenant): tenant.raw_counter for tenant in self.scheduler.stats().tenants}

    # --- judging ---------------------------------------------------------------------------------------------------

    def judge_work_conserving(self) -> None:
        """If somebody waits and the head in turn fits, it has been admitted (unless gate, headroom or claims forbid).

        Some KV is left to those that go on in place: a tenth of what runs there, at slices no longer than any so far.

        Judged where the oracle knows that nothing forbids: the head in turn is urgent (and within its pass, from which
        ``gamma`` may lead it away), or no tier has a target (no headroom, no urgent claims) and no prefill window
        binds.
        """
        oracle = self.oracle
        first = oracle.in_turn()
        if len(first) != 1:
            return
        head = oracle.line(first[0])[0]
        if oracle.is_tied(head):
            return
        if oracle.targets and not (oracle.is_urgent(head) and oracle.may_pass(head.tenant)):
            return
        new = self.next_slice(head)
        for backend in self.scheduler.stats().backends:
            server = self.servers[backend.backend]
            running = sum(1 for job in self.streams.values() if job.backend == backend.backend)
            kept = math.ceil(0.1 * running * self.largest_slice)
            free = (backend.usable_tokens - backend.reserved_tokens - kept) // server.block_size
            if backend.is_up and server.blocks(head.input_tokens, new) <= free:
                raise LawBroken(f"work_conserving: {head.name} is in turn, fits on {backend.backend} and still waits")

    def next_slice(self, job: Job) -> int:
        rest = job.cap - job.output
        new = min(rest, 1024, self.room(job))
        if sum(len(queue) for queue in self.oracle.queues.values()) > 1 and rest >= 2 * job.preferred_slice:
            new = min(new, job.preferred_slice)
        return new

    def judge_ledger(self) -> None:
        for backend in self.scheduler.stats().backends:
            if not 0 <= backend.reserved_tokens <= backend.usable_tokens:
                raise LawBroken(f"ledger: {backend.reserved_tokens} of {backend.usable_tokens} tokens are reserved")

    def judge_end(self) -> None:
        for job in self.jobs.values():
            if len(job.outcomes) != 1:
                raise LawBroken(f"lifecycle: {job.name} has outcomes {job.outcomes}")
            if job.outcomes == ["finished"] and job.output != job.length:
                raise LawBroken(f"lifecycle: {job.name} ended with {job.output} of {job.length} tokens")
        stats = self.scheduler.stats()
        if stats.queued or stats.running:
            raise LawBroken(f"ledger: {stats.queued} queued and {stats.running} running in an empty pool")
        if "ledger" in self.laws and any(backend.reserved_tokens for backend in stats.backends):
            raise LawBroken(f"ledger: an empty pool still holds {[b.reserved_tokens for b in stats.backends]} tokens")
        if "conservation" in self.laws:
            for tenant, delivered in self.oracle.delivered.items():
                if abs(self.charged[tenant] - delivered) > SLACK:
                    raise LawBroken(f"conservation: {tenant} was charged {self.charged[tenant]:g} for {delivered:g}")
            for numbers in stats.tenants:
                s = self.scenario
                priced = s.w_prompt * numbers.prompt_tokens_total + s.w_output * numbers.output_tokens_total
                if abs(priced - self.oracle.delivered[numbers.tenant]) > SLACK:
                    raise LawBroken(f"conservation: the totals of {numbers.tenant} are worth {priced:g}")


@contextmanager
def _spied_charges(charged: dict[str, float]) -> Iterator[None]:
    """Sum every charge by tenant, in service units, whoever makes it."""
    original = counters_module.Counters.charge

    def charge(self: counters_module.Counters, request: Any, service: float) -> None:
        charged[str(request.tenant.tenant_id)] += service
        original(self, request, service)

    counters_module.Counters.charge = charge  # type: ignore[method-assign]
    try:
        yield
    finally:
        counters_module.Counters.charge = original  # type: ignore[method-assign]
