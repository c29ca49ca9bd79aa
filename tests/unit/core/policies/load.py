"""Loads that every policy must bear: random small pools with faults and forced cuts, and a flood served by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from router_ext.core.actions import Dispatch, Preempt, Reject
from router_ext.core.config import PoolConfig
from router_ext.core.events import Event, Finished, Reconfigured
from router_ext.core.fairness import POLICIES
from router_ext.core.ids import BackendId, KeyId, RequestId
from router_ext.core.lifecycle import State
from router_ext.core.scheduler import Scheduler
from tests.property.harness import Run
from tests.property.oracle import Job, LawBroken
from tests.unit.core.builders import arrival, pool, started, tokens

ALL = list(POLICIES)
LAWS = frozenset({"conservation", "ledger", "server_queue_empty", "audit", "lift", "cuts"})
"""Those laws of the random pools that hold under any policy."""


def keys_and_agents(job: Job) -> dict[str, Any]:
    """Two keys per tenant; every second group of three requests is an agent, which may declare a cost."""
    group = job.order // 3
    fields: dict[str, Any] = {"key": KeyId(f"{job.tenant}-{job.order % 2}")}
    if group % 2:
        fields["agent_id"] = f"agent-{group}"
        fields["agent_cost"] = 500.0 if group % 4 == 1 else None
    return fields


@dataclass
class Pool(Run):
    """A random pool in which now and then a running request is cut, whatever the policy thinks of it."""

    laws: frozenset[str] = LAWS
    cut_rate: float = 0.01

    def __post_init__(self) -> None:
        self.fields = keys_and_agents
        super().__post_init__()
        self.is_judged = self.is_judged and bool(self.laws)

    def faults(self) -> None:
        super().faults()
        for job in list(self.jobs.values()):
            if job.place == "running" and self.rng.random() < self.cut_rate:
                self.cut(job)

    def cut(self, job: Job) -> None:
        scheduler = self.scheduler
        request = scheduler._requests[RequestId(job.name)]
        if request.state is not State.DECODING or request.backend is None:
            return
        backend = request.backend
        scheduler._books.preempt(request, request.input_tokens, "forced")
        backend.expect_release(request, self.now + backend.cut_lag_s())
        self.carry_out(Preempt(request_id=request.request_id, backend=BackendId(job.backend)))


class Settled(Pool):
    """After every decision the first in the order of the policy can start nowhere."""

    def send(self, event: Event, *, decides: bool = True) -> None:
        super().send(event, decides=decides)
        scheduler = self.scheduler
        decider, room = scheduler._decider, scheduler._room
        usable = scheduler._fleet.usable
        if not decides or decider.decided_s < self.now or not room.count or not usable:
            return
        candidates = decider._policy.candidates(self.now)
        first = next(iter(candidates), None)
        if not isinstance(candidates, tuple):
            candidates.close()
        if first is None:
            raise LawBroken(f"settled: {room.count} wait and nobody is in turn")
        request, standing = first
        new_tokens = request.slice_busy if room.count > 1 else request.slice_idle
        options, _ = decider.placement.options(request, new_tokens, usable, is_urgent=standing <= 3)
        if options:
            raise LawBroken(f"settled: {request.request_id} is in turn, fits and waits")


@dataclass
class Shifted(Pool):
    """Every counter starts that much higher."""

    counter: float = 0.0

    def send(self, event: Event, *, decides: bool = True) -> None:
        if not self.log and not self.jobs:
            for tenant_id in self.scheduler.config.tenants:
                self.scheduler._tenants.get(tenant_id).counter = self.counter
        super().send(event, decides=decides)


class Probed(Pool):
    """Before every event somebody asks who is in turn, and stops asking at once, after one, after two."""

    def send(self, event: Event, *, decides: bool = True) -> None:
        if hasattr(self, "scheduler"):
            policy = self.scheduler._decider._policy
            for count in range(3):
                candidates = policy.candidates(self.now)
                for _, _ in zip(range(count), candidates, strict=False):
                    pass
                if not isinstance(candidates, tuple):
                    candidates.close()
        super().send(event, decides=decides)


@dataclass
class Switching(Pool):
    """Every other step the pool gets the next of ``policies``."""

    policies: list[str] = field(default_factory=list)

    def step(self, step: int, arrivals: list[tuple[str, str, int, int, int, int]], *, with_faults: bool) -> None:
        if step % 2 == 0 and self.policies:
            before = self.counters()
            self.send(Reconfigured(config=replace(self.scheduler.config, policy=self.policies.pop(0))))
            for tenant, counter in self.counters().items():
                if counter < before[tenant] - 1e-6:
                    raise LawBroken(f"switch: the counter of {tenant} fell from {before[tenant]:g} to {counter:g}")
        super().step(step, arrivals, with_faults=with_faults)


def every_switch() -> list[str]:
    """Names of policies in an order in which each follows each other one."""
    names: list[str] = []
    for index, first in enumerate(ALL):
        for second in ALL[:index]:
            names += [first, second, first]
    return names


@dataclass
class Flood:
    """One server; tenant ``a`` keeps twenty requests waiting, and whoever has run longest ends in every round."""

    policy: str
    prompt: int
    cap: int
    ends_after: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = 0.0
        self.running: list[str] = []
        self.waiting: dict[str, tuple[str, int]] = {}
        self.order: list[str] = []
        self.caps: dict[str, int] = {}
        self.scheduler = started(self.config())
        self.sent = 0
        self.refill()

    def config(self) -> PoolConfig:
        return replace(pool(kv=1_001, tiers=[{"name": "batch", "rank": 1}], **self.fields), policy=self.policy)

    def send(self, event: Event) -> None:
        for action in self.scheduler.handle(event, self.now):
            if isinstance(action, Dispatch):
                name = str(action.request_id)
                del self.waiting[name]
                self.running.append(name)
                self.order.append(name)
            elif isinstance(action, Reject):
                del self.waiting[str(action.request_id)]

    def arrive(self, name: str, tenant: str, prompt: int, cap: int) -> None:
        self.waiting[name] = (tenant, cap)
        self.caps[name] = cap
        self.send(arrival(name, tenant, prompt=prompt, cap=cap, slice_tokens=cap))

    def refill(self) -> None:
        """Nobody comes any more once the flood has ended."""
        if self.ends_after is not None and self.sent >= self.ends_after:
            return
        for _ in range(20 - sum(1 for tenant, _ in self.waiting.values() if tenant == "a")):
            self.sent += 1
            self.arrive(f"a{self.sent}", "a", self.prompt, self.cap)

    def rounds(self, count: int) -> Iterator[int]:
        for number in range(count):
            yield number
            self.now += 0.1
            if self.running:
                name = self.running.pop(0)
                self.send(tokens(name, self.caps[name]))
                self.send(Finished(request_id=RequestId(name)))
            self.refill()


def left_in(scheduler: Scheduler) -> dict[str, int]:
    """Sizes of the containers the policy in force keeps."""
    policy = scheduler._decider._policy
    sizes = {}
    for name, value in vars(policy).items():
        for part, container in ((name, value), (f"{name}._heap", getattr(value, "_heap", None))):
            if container is not scheduler._agents and hasattr(container, "__len__"):
                sizes[part] = len(container)
    return sizes
