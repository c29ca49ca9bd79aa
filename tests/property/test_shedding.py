"""A full queue under every policy: who is displaced for whom, judged apart from the product's own index."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from router_ext.core.actions import Dispatch, Expire, Preempt, Reject, RejectCode
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
    Reconfigured,
    RequestSpec,
)
from router_ext.core.fairness import POLICIES
from router_ext.core.ids import BackendId, KeyId, RequestId, TenantId, TierName
from router_ext.core.scheduler import Scheduler
from router_ext.core.shedding import Crowd, Shedding
from tests.property.oracle import LawBroken

RANKS = {"gold": 0, "chat": 1, "batch": 5}
WEIGHTS = {"ten_a": 1.0, "ten_b": 0.5, "ten_c": 3.0, "ten_d": 1.0}
GROUPED = {"ten_c": "grp", "ten_d": "grp"}
GROUP_WEIGHT = 2.0


class Crowded:
    """One pool whose queue is nearly always full, and everything that waits in it."""

    def __init__(self, seed: int, policy: str) -> None:
        self.rng = rng = random.Random(seed)
        self.policy = policy
        self.limits = self.draw_limits()
        self.scheduler = Scheduler(self.config())
        self.now = 0.0
        self.specs: dict[str, RequestSpec] = {}
        self.waiting: list[str] = []
        self.running: dict[str, int] = {}
        self.shown: set[str] = set()
        self.displaced = self.refused = 0
        self.send(BackendChanged(backend=BackendId("bke"), is_up=True))
        self.is_grouped = rng.random() < 0.5

    def draw_limits(self) -> tuple[int, int, int, int]:
        """Requests and bytes: of the pool, of a tenant."""
        rng = self.rng
        return rng.choice([6, 10]), rng.choice([3, 5, 9]), rng.choice([3_000, 50_000]), rng.choice([1_500, 50_000])

    def config(self, *, is_grouped: bool = False) -> PoolConfig:
        pool_num, tenant_num, pool_bytes, tenant_bytes = self.limits
        return build_pool(
            pool={
                "name": "p",
                "policy": self.policy,
                "max_queued": pool_num,
                "max_queued_bytes": pool_bytes,
                "tenant_queued_bytes": tenant_bytes,
                "rpm_limit": 1_000_000,
            },
            backends=[{"backend": "bke", "kv_tokens": 60, "max_input_tokens": 40, "max_total_tokens": 60}],
            tiers=[{"name": name, "rank": rank} for name, rank in RANKS.items()],
            tenants=[
                {"tenant": t, "weight": w, "max_queued": tenant_num, "group": GROUPED.get(t) if is_grouped else None}
                for t, w in WEIGHTS.items()
            ],
            groups=[{"group": "grp", "weight": GROUP_WEIGHT}] if is_grouped else [],
        )

    def rank(self, name: str) -> int:
        return RANKS[self.specs[name].tier]

    def size(self, names: list[str]) -> int:
        return sum(self.specs[name].prompt_bytes for name in names)

    def go(self) -> Crowded:
        for step in range(160):
            self.now += self.rng.choice([0.0, 0.01, 0.5])
            if step == 80 and self.is_grouped:
                self.send(Reconfigured(config=self.config(is_grouped=True)))
            elif self.rng.random() < 0.65:
                self.arrive()
            else:
                self.happen()
        return self

    def arrive(self) -> None:
        rng = self.rng
        name = f"req_{len(self.specs)}"
        self.specs[name] = RequestSpec(
            request_id=RequestId(name),
            tenant=TenantId(rng.choice(list(WEIGHTS))),
            key=KeyId(rng.choice(["k1", "k2"])),
            tier=TierName(rng.choice(["gold", "chat", "batch", "batch", "batch"])),
            prompt_tokens=rng.randint(1, 20),
            max_new_tokens=rng.randint(1, 20),
            prompt_bytes=rng.choice([100, 400, 1_400]),
            agent_id=rng.choice([None, "agent"]),
        )
        self.send(Arrived(request=self.specs[name]))

    def happen(self) -> None:
        rng = self.rng
        names = [*self.running, *rng.sample(self.waiting, min(1, len(self.waiting)))]
        if not names:
            return
        name = rng.choice(names)
        request_id = RequestId(name)
        if name in self.waiting:
            self.waiting.remove(name)
            self.send(Cancelled(request_id=request_id))
            return
        what = rng.choice(["token", "finish", "fail"])
        if what == "token":
            self.running[name] += 1
            if self.running[name] <= self.specs[name].max_new_tokens:
                self.shown.add(name)
                self.send(Progressed(request_id=request_id, output_tokens=1))
        elif what == "finish" or self.running[name] >= self.specs[name].max_new_tokens:
            del self.running[name]
            self.send(Finished(request_id=request_id))
        else:
            tokens = self.running.pop(name)
            self.waiting.append(name)
            prompt = self.specs[name].prompt_tokens + tokens
            self.send(Failed(request_id=request_id, is_retryable=True, next_prompt_tokens=prompt))

    def send(self, event: Event) -> None:
        arrival = str(event.request.request_id) if isinstance(event, Arrived) else None
        if arrival is not None:
            self.waiting.append(arrival)
        before = len(self.waiting), self.size(self.waiting)
        actions = self.scheduler.handle(event, self.now)
        for action in actions:
            match action:
                case Reject(code=RejectCode.QUEUE_FULL):
                    self.waiting.remove(action.request_id)
                    self.judge_refusal(action.request_id)
                case Reject():
                    self.waiting.remove(action.request_id)
                case Expire(code=RejectCode.QUEUE_FULL):
                    if arrival is None:
                        raise LawBroken(f"{action.request_id} was displaced for nobody")
                    self.judge_victim(action.request_id, arrival)
                    self.waiting.remove(action.request_id)
                case Expire():
                    self.waiting.remove(action.request_id)
                case Dispatch():
                    self.waiting.remove(action.request_id)
                    self.running[action.request_id] = self.running.get(action.request_id, 0)
                case Preempt():
                    tokens = self.running.pop(action.request_id)
                    self.waiting.append(action.request_id)
                    prompt = self.specs[action.request_id].prompt_tokens + tokens
                    self.send(Preempted(request_id=action.request_id, dropped_tokens=0, next_prompt_tokens=prompt))
        if arrival in self.waiting:
            self.judge_limits(before)
        if wrong := self.scheduler.audit():
            raise LawBroken(wrong[0])

    def below(self, arrival: str, tenant: str | None = None) -> list[str]:
        """What the arrival may displace."""
        return [
            name
            for name in self.waiting
            if self.rank(name) > self.rank(arrival)
            and name not in self.shown
            and tenant in (None, self.specs[name].tenant)
        ]

    def judge_victim(self, victim: str, arrival: str) -> None:
        self.displaced += 1
        if victim not in self.below(arrival):
            raise LawBroken(f"{victim} of rank {self.rank(victim)} was displaced for rank {self.rank(arrival)}")
        tenant = self.specs[victim].tenant
        # For the tenant's own limit somebody of the tenant goes, else whoever is due in the whole pool.
        own = self.due(self.below(arrival, self.specs[arrival].tenant))
        everybody = self.due(self.below(arrival))
        if victim not in own | everybody:
            raise LawBroken(f"{victim} of {tenant} was displaced, due were {sorted(own | everybody)}")

    def due(self, names: list[str]) -> set[str]:
        """The newest of the tenants most over their share, of the lowest tier."""
        lowest = max((self.rank(name) for name in names), default=0)
        names = [name for name in names if self.rank(name) == lowest]
        config = self.scheduler.config
        units: dict[str, list[str]] = {}
        for name in names:
            share = config.tenants[self.specs[name].tenant]
            units.setdefault(share.group or share.tenant, []).append(name)

        def load(members: list[str], weight: float) -> float:
            by_num = len(members) / config.max_queued
            return max(by_num, self.size(members) / config.max_queued_bytes) / weight

        weights = {
            **{t: c.weight for t, c in config.tenants.items()},
            **{g: c.weight for g, c in config.groups.items()},
        }
        found: set[str] = set()
        most = max((load(inside, weights[unit]) for unit, inside in units.items()), default=0.0)
        for unit, inside in units.items():
            if load(inside, weights[unit]) < most - 1e-9:
                continue
            by_tenant: dict[str, list[str]] = {}
            for name in inside:
                by_tenant.setdefault(self.specs[name].tenant, []).append(name)
            top = max(load(each, weights[t]) for t, each in by_tenant.items())
            found |= {
                max(each, key=lambda name: int(name[4:]))
                for t, each in by_tenant.items()
                if load(each, weights[t]) >= top - 1e-9
            }
        return found

    def judge_refusal(self, arrival: str) -> None:
        """Too little of lower tiers waited, in its tenant or in the pool."""
        self.refused += 1
        spec, (pool_num, tenant_num, pool_bytes, tenant_bytes) = self.specs[arrival], self.limits
        own = [name for name in self.waiting if self.specs[name].tenant == spec.tenant]
        for waiting, below, most, most_bytes in (
            (own, self.below(arrival, spec.tenant), tenant_num, tenant_bytes),
            (self.waiting, self.below(arrival), pool_num, pool_bytes),
        ):
            num = int(len(waiting) >= most)
            num_bytes = min(spec.prompt_bytes, max(0, self.size(waiting) + spec.prompt_bytes - most_bytes))
            if waiting and (num > len(below) or num_bytes > self.size(below)):
                return
        raise LawBroken(f"{arrival} was refused, though enough waited that it may displace")

    def judge_limits(self, before: tuple[int, int]) -> None:
        """What is displaced is enough: no arrival makes a full queue longer. (Retries may: they were in already.)"""
        pool_num, _, pool_bytes, _ = self.limits
        if len(self.waiting) > max(pool_num, before[0] - 1):
            raise LawBroken(f"{len(self.waiting)} wait, {pool_num} may")
        if self.size(self.waiting) > max(pool_bytes, before[1]) and len(self.waiting) > 1:
            raise LawBroken(f"{self.size(self.waiting)} bytes wait, {pool_bytes} may")


@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_lowest_goes_first_and_nobody_for_an_equal(policy: str) -> None:
    runs = [Crowded(seed, policy).go() for seed in range(4)]
    assert sum(run.displaced for run in runs) > 20
    assert sum(run.refused for run in runs) > 20


def for_an_equal(patch: pytest.MonkeyPatch) -> None:
    def below(self: Shedding, request: object, of: object) -> list[Crowd]:
        return [self._ranks[rank] for rank in sorted(self._ranks, reverse=True) if of is None]

    patch.setattr(Shedding, "_below", below)


def the_oldest(patch: pytest.MonkeyPatch) -> None:
    def newest(self: Crowd) -> object:
        return max((r for _, r in self._newest if r.crowd is self), key=lambda request: -request.seq)

    patch.setattr(Crowd, "newest", newest)


def whoever_came_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Crowd, "largest", lambda self: next(iter(self.inside.values())))


def heaps_that_forget(patch: pytest.MonkeyPatch) -> None:
    """Loads that rise are not told."""
    grew = Crowd.grew
    patch.setattr(Crowd, "grew", lambda self, part: grew(self, part) if part.num == 1 else None)


def the_highest(patch: pytest.MonkeyPatch) -> None:
    below = Shedding._below
    patch.setattr(Shedding, "_below", lambda self, request, of: list(below(self, request, of))[::-1])


def nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shedding, "next", lambda self, request, of=None: None)


@pytest.mark.parametrize(
    "mutant", [for_an_equal, the_oldest, whoever_came_first, heaps_that_forget, the_highest, nobody]
)
def test_a_mutant_breaks_the_law(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(LawBroken):
        [Crowded(seed, "slo-fair").go() for seed in range(12)]
