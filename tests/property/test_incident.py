"""The case the product exists for, in virtual time: a batch tenant floods one server, a chatbot sends short prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from router_ext.core.actions import Action, Dispatch, Preempt, SetTimer
from router_ext.core.config import build_pool
from router_ext.core.events import (
    Arrived,
    BackendChanged,
    Finished,
    Preempted,
    Progressed,
    RequestSpec,
    SliceEnded,
    TimerFired,
)
from router_ext.core.ids import BackendId, KeyId, RequestId, TenantId, TierName
from router_ext.core.scheduler import Scheduler
from tests.property.oracle import Job
from tests.property.tgi_steps import StepServer, Stream

KV_TOKENS = 3_072
PREFILL_PER_STEP = 512
SECONDS = 60.0


def step_s(running: int, prefill_tokens: int) -> float:
    """Time of one iteration of a small model on a CPU."""
    return 0.03 + 0.003 * running + 0.0012 * prefill_tokens


@dataclass
class Incident:
    """One run under one policy. The arrivals are the same under both."""

    policy: str
    now: float = 0.0
    timer: float | None = None
    jobs: dict[str, Job] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)
    ttft: dict[str, list[float]] = field(default_factory=lambda: {"chatbot": [], "batch": []})
    last_token: dict[str, float] = field(default_factory=dict)
    longest_server_queue: int = 0

    def __post_init__(self) -> None:
        config = build_pool(
            pool={"name": "p", "policy": self.policy},
            backends=[
                {
                    "backend": "bke_0",
                    "kv_tokens": KV_TOKENS,
                    "block_size": 16,
                    "prefill_budget_tokens": PREFILL_PER_STEP,
                    "max_input_tokens": 1_024,
                    "max_total_tokens": 2_048,
                }
            ],
            tiers=[{"name": "interactive", "rank": 1, "ttft_target_s": 2.0}, {"name": "batch", "rank": 10}],
            tenants=[{"tenant": "chatbot"}, {"tenant": "batch"}],
        )
        self.scheduler = Scheduler(config)
        self.server = StepServer(KV_TOKENS, 16, 0, PREFILL_PER_STEP)
        self.scheduler.handle(BackendChanged(backend=BackendId("bke_0"), is_up=True), 0.0)

    def arrivals(self) -> list[tuple[float, Job]]:
        rng = random.Random(7)
        found: list[tuple[float, Job]] = []
        for tenant, tier, rate, prompts, lengths, cap in (
            ("chatbot", "interactive", 0.5, (20, 60), (20, 64), 64),
            ("batch", "batch", 1.2, (500, 700), (60, 128), 128),
        ):
            at = rng.expovariate(rate)
            while at < SECONDS:
                prompt = rng.randint(*prompts)
                name = f"{tenant}_{len(found)}"
                found.append(
                    (at, Job(name, tenant, tier, len(found), prompt, cap, rng.randint(*lengths), 1024, prompt))
                )
                at += rng.expovariate(rate)
        return sorted(found, key=lambda arrival: arrival[0])

    def go(self) -> Incident:
        waiting = self.arrivals()
        while waiting or any(job.place != "ended" for job in self.jobs.values()):
            while waiting and waiting[0][0] <= self.now:
                self.arrive(*waiting.pop(0))
            if self.timer is not None and self.timer <= self.now:
                self.timer = None
                self.carry_out(self.scheduler.handle(TimerFired(), self.now))
            prefill = sum(s.prefill_left for s in self.server.queue + self.server.running)
            events = self.server.step()
            self.longest_server_queue = max(self.longest_server_queue, len(self.server.queue))
            self.now += step_s(len(self.server.running), min(prefill, PREFILL_PER_STEP))
            for name, what in events:
                # A stream that was closed within this step says nothing more.
                if self.jobs[name].place != "stopped":
                    self.upstream(self.jobs[name], what)
        return self

    def arrive(self, at: float, job: Job) -> None:
        self.jobs[job.name] = job
        self.arrived[job.name] = at
        spec = RequestSpec(
            request_id=RequestId(job.name),
            tenant=TenantId(job.tenant),
            key=KeyId("key"),
            tier=TierName(job.tier),
            prompt_tokens=job.prompt,
            max_new_tokens=job.cap,
            predicted_output_tokens=100,
        )
        self.carry_out(self.scheduler.handle(Arrived(request=spec), self.now))

    def upstream(self, job: Job, what: str) -> None:
        request_id = RequestId(job.name)
        if what == "token":
            job.output += 1
            self.last_token[job.tenant] = self.now
            if job.output == 1:
                self.ttft[job.tenant].append(self.now - self.arrived[job.name])
            actions = self.scheduler.handle(Progressed(request_id=request_id, output_tokens=1), self.now)
        elif what == "end":
            job.place = "ended"
            actions = self.scheduler.handle(Finished(request_id=request_id), self.now)
        else:
            job.input_tokens = job.prompt + job.output
            event = SliceEnded(request_id=request_id, dropped_tokens=0, next_prompt_tokens=job.input_tokens)
            actions = self.scheduler.handle(event, self.now)
        self.carry_out(actions)

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Dispatch():
                    job = self.jobs[action.request_id]
                    job.place = "running"
                    self.server.open(Stream(job.name, job.input_tokens, action.slice_tokens, job.length - job.output))
                case Preempt():
                    self.stop(self.jobs[action.request_id])
                case SetTimer():
                    self.timer = action.at_s
                case _:
                    raise AssertionError(f"nobody is refused here: {action}")

    def stop(self, job: Job) -> None:
        """Close the stream of a running job; it goes on later."""
        self.server.close(job.name)
        job.place = "stopped"
        job.cuts += 1
        job.input_tokens = job.prompt + job.output
        event = Preempted(request_id=RequestId(job.name), dropped_tokens=0, next_prompt_tokens=job.input_tokens)
        self.carry_out(self.scheduler.handle(event, self.now))

    def p95(self, tenant: str) -> float:
        values = sorted(self.ttft[tenant])
        return values[int(0.95 * (len(values) - 1))]

    def batch_rate(self) -> float:
        return sum(job.output for job in self.jobs.values() if job.tenant == "batch") / self.last_token["batch"]


def test_the_chatbot_keeps_its_target_beside_a_flood_and_the_batch_loses_next_to_nothing() -> None:
    fifo, fair = Incident("fifo").go(), Incident("slo-fair").go()
    assert fair.p95("chatbot") <= 2.0
    assert fair.p95("chatbot") <= fifo.p95("chatbot") / 4
    assert fair.batch_rate() >= 0.95 * fifo.batch_rate()
    assert fifo.longest_server_queue == fair.longest_server_queue == 0
