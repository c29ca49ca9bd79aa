"""Groups of tenants: in the pool a group is one tenant; inside it the members share, by the same two laws.

The oracle of the pool knows groups only (its ``Job.tenant`` is what competes); members are a level of their own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from router_ext.core import siblings as siblings_module
from router_ext.core.bounds import counter_bound, pair_bound
from router_ext.core.config import GroupConfig, PoolConfig, TenantConfig
from router_ext.core.fairness.counters import Counters
from router_ext.core.ids import TenantId
from router_ext.core.queues import Group
from router_ext.core.siblings import Siblings
from tests.property.family import VtcOracle
from tests.property.harness import ALL_LAWS, Run, Scenario, scenario
from tests.property.level import Level
from tests.property.oracle import SLACK, Job, LawBroken, Oracle

LAWS = (ALL_LAWS | {"member_order", "member_bound"}) - {
    "client_fifo",
    "key_order",
    "key_bound",
    "work_conserving",
    "cuts",
    "conservation",
}
"""Without those that would have to know the order of members, which the oracle of the pool does not."""

Mutant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, kw_only=True)
class Grouped(Scenario):
    """``members``: by group, tenants and their weights. What is no group is a tenant alone."""

    members: dict[str, dict[str, float]] = field(default_factory=dict)

    def config(self, rename: Callable[[str], str] = str) -> PoolConfig:
        config = super().config(rename)
        tenants: dict[TenantId, TenantConfig] = {}
        groups: dict[str, GroupConfig] = {}
        for name, share in config.tenants.items():
            if name not in self.members:
                tenants[name] = share
                continue
            groups[name] = GroupConfig(group=name, weight=share.weight)
            for member, weight in self.members[name].items():
                tenants[TenantId(member)] = TenantConfig(tenant=TenantId(member), weight=weight, group=name)
        return replace(config, tenants=tenants, groups=groups)


def grouped(seed: int, **options: Any) -> Grouped:
    case = scenario(seed, **options)
    rng = random.Random(seed + 3_000_003)
    names = sorted(case.weights)
    members = {
        name: {f"{name}.{number}": rng.choice([0.5, 1.0, 1.0, 3.0]) for number in range(rng.randint(1, 4))}
        for name in names
        if name == names[0] or rng.random() < 0.6
    }
    fields = {name: getattr(case, name) for name in Scenario.__dataclass_fields__}
    return Grouped(**fields, members=members)


class GroupOracle(Oracle):
    """Beside the pool's laws, those of members."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.inside: dict[str, Level] = {}
        self.member_of: dict[str, str] = {}
        self.weights_inside: dict[str, float] = {}

    def inside_of(self, job: Job) -> Level:
        largest = self.counter_bound(job.tenant) * self.weights[job.tenant]
        return self.inside.setdefault(job.tenant, Level(largest, self.weights_inside))

    def enqueue(self, job: Job) -> None:
        super().enqueue(job)
        self.inside_of(job).enter(self.member_of[job.name])

    def leave(self, job: Job) -> None:
        was_queued = job.place == "queued"
        super().leave(job)
        member = self.member_of[job.name]
        if was_queued and not any(self.member_of[other.name] == member for other in self.queues[job.tenant]):
            self.inside_of(job).leave(member)

    def dispatch(self, job: Job) -> None:
        if "member_order" in self.laws:
            member, level = self.member_of[job.name], self.inside_of(job)
            allowed = self.burst * self.peak / level.weight(member) if self.is_urgent(job) else 0.0
            if level.ahead(member) > allowed + SLACK and not job.may_go_on:
                ahead = level.ahead(member)
                raise LawBroken(f"member_order: {job.name} of {member} is {ahead:g} ahead of another, pass {allowed:g}")
        super().dispatch(job)

    def _charge(self, job: Job, service: float) -> None:
        super()._charge(job, service)
        if service:
            ratio = self.inside_of(job).charge(self.member_of[job.name], service)
            if "member_bound" in self.laws and ratio > 1.0 + SLACK:
                raise LawBroken(f"member_bound: members of {job.tenant} are {ratio:.3f} of their bound apart")


class GroupRun(Run):
    """Jobs of a group come from one of its members each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.scenario, Grouped)
        assert isinstance(self.oracle, GroupOracle)
        self.members = self.scenario.members
        self.judge = self.oracle
        for weights in self.members.values():
            self.judge.weights_inside.update(weights)
        self.member_rng = random.Random(self.scenario.seed)
        self.fields = self.member_fields

    def member_fields(self, job: Job) -> dict[str, Any]:
        names = list(self.members.get(job.tenant, {job.tenant: 1.0}))
        member = self.judge.member_of[job.name] = self.member_rng.choice(names)
        return {"tenant": TenantId(member)}

    def counters(self) -> dict[str, float]:
        stats = self.scheduler.stats()
        return {
            **{str(tenant.tenant): tenant.raw_counter for tenant in stats.tenants},
            **{group.group: group.raw_counter for group in stats.groups},
        }


class PlainGroupOracle(VtcOracle, GroupOracle):
    """Policies without urgency and passes."""


def run(case: Grouped, *laws: str) -> GroupRun:
    kind = GroupOracle if case.policy == "slo-fair" else PlainGroupOracle
    outcome = GroupRun(case, frozenset(laws) if laws else LAWS, oracle_type=kind)
    outcome.go()
    return outcome


@pytest.mark.parametrize("seed", range(700, 716))
def test_groups_share_the_pool_and_members_share_their_group(seed: int) -> None:
    outcome = run(grouped(seed, steps=400, with_faults=seed % 3 == 0, unequal=seed % 4 == 3))
    assert any(len(level.delivered) > 1 for level in outcome.judge.inside.values())


@pytest.mark.parametrize("policy", ["vtc", "vtc-predict", "drr", "equinox", "dlpm"])
@pytest.mark.parametrize("seed", range(720, 723))
def test_members_share_under_every_policy_that_goes_by_counters(policy: str, seed: int) -> None:
    laws = ("member_order", "member_bound", "audit", "ledger")
    outcome = run(grouped(seed, steps=300, policy=policy, with_faults=seed % 2 == 0), *laws)
    assert any(len(level.delivered) > 1 for level in outcome.judge.inside.values())


def test_the_random_pools_come_close_to_the_bound_between_members() -> None:
    """A law that is never nearly broken would prove nothing."""
    worst = 0.0
    for seed in range(6):
        case = grouped(
            seed, steps=250, weighted=False, with_targets=False, same_mode="flood", contrast=True, passes=(0.0, 0.0),
            num_servers=1, prices=(1.0, 2.0),
        )  # fmt: skip
        # Cuts for those who are behind would keep the gaps small.
        case = replace(case, max_preemptions=0)
        worst = max(worst, *(level.worst for level in run(case).judge.inside.values()))
    assert worst > 0.8


def test_the_product_states_the_bounds_the_oracle_judges_by() -> None:
    outcome = run(grouped(3, steps=20))
    config, judge = outcome.scenario.config(), outcome.judge
    first, group = next((name, name) for name in judge.weights if len(outcome.members.get(name, {})) > 1)
    one, other = [config.tenants[TenantId(member)] for member in outcome.members[group]][:2]
    largest = judge.counter_bound(first) * judge.weights[first]
    assert counter_bound(config, config.groups[group]) == pytest.approx(judge.counter_bound(first))
    assert counter_bound(config, one) == pytest.approx(largest / one.weight)
    assert pair_bound(config, one, other) == pytest.approx(largest / one.weight + largest / other.weight)
    alone = next(share for share in config.tenants.values() if share.group != group)
    rival = alone.tenant if alone.group is None else alone.group
    assert pair_bound(config, one, alone) == pytest.approx(judge.counter_bound(first) + judge.counter_bound(rival))


# --- mutants ---------------------------------------------------------------------------------------------------------


def no_lift_inside(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(siblings_module, "lift", lambda counter, virtual_time: counter)


def never_reordered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Siblings, "reorder", lambda self: False)


def urgent_regardless_of_members(patch: pytest.MonkeyPatch) -> None:
    """The pass of the group is enough: one member's floods of a tier with a target starve the others."""
    patch.setattr(Group, "held_inside", lambda self, member, allowed: 0.0)


def members_unweighted(patch: pytest.MonkeyPatch) -> None:
    def charge(self: Counters, request: Any, service: float) -> None:
        before = request.member.counter
        original(self, request, service)
        if request.member is not request.tenant:
            request.member.counter = before + service

    original = Counters.charge
    patch.setattr(Counters, "charge", charge)


def flat_over_members(patch: pytest.MonkeyPatch) -> None:
    """Groups are ignored: every member competes for the pool itself."""
    original = Grouped.config

    def config(self: Grouped, rename: Callable[[str], str] = str) -> PoolConfig:
        grouped = original(self, rename)
        alone = {name: replace(share, group=None) for name, share in grouped.tenants.items()}
        return replace(grouped, tenants=alone, groups={})

    patch.setattr(Grouped, "config", config)


@pytest.mark.parametrize(
    ("law", "mutant", "options"),
    [
        ("member_order", no_lift_inside, {}),
        ("member_order", never_reordered, {}),
        ("member_order", urgent_regardless_of_members, {}),
        ("member_bound", urgent_regardless_of_members, {"same_mode": "flood"}),
        ("member_order", members_unweighted, {}),
        ("no_skipping", flat_over_members, {}),
        ("pair_bound", flat_over_members, {"same_mode": "flood", "num_servers": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_a_mutant_breaks_its_law(
    law: str, mutant: Mutant, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(LawBroken, match=rf"^{law}"):
        run_many(law, options)


def run_many(law: str, options: dict[str, Any]) -> None:
    for seed in range(24):
        run(grouped(seed, steps=400, **options), law)
