"""A changed configuration costs what has changed, and leaves everybody where a scheduler built for it would."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from router_ext.core import scheduler as scheduler_module
from router_ext.core import tenants as tenants_module
from router_ext.core.actions import Preempt
from router_ext.core.config import GroupConfig, PoolConfig, policy_names
from router_ext.core.events import Cancelled, Reconfigured
from router_ext.core.fairness.base import FairnessPolicy
from router_ext.core.fairness.slo_fair import SloFair
from router_ext.core.fairness.vtc import Keyed
from router_ext.core.ids import RequestId, TenantId
from router_ext.core.queues import TierQueue
from router_ext.core.scheduler import Scheduler
from router_ext.core.shedding import Shedding
from router_ext.core.tenants import Tenants
from tests.unit.core.builders import Action, Dispatch, arrival, pool, started, tokens

NAMES = "abcdefgh"
TIERS = [{"name": "chat", "rank": 1, "ttft_target_s": 2.0}, {"name": "batch", "rank": 10}]


def reweighed(config: PoolConfig, weights: dict[str, float]) -> PoolConfig:
    """Other weights; the shares of all others are the same objects, as when a revision is followed."""
    shares = dict(config.tenants)
    for name, weight in weights.items():
        shares[TenantId(name)] = replace(shares[TenantId(name)], weight=weight)
    return replace(config, tenants=shares)


def rebuilt(config: PoolConfig) -> PoolConfig:
    """An equal configuration in which no share is the same object."""
    return replace(config, tenants={name: replace(share) for name, share in config.tenants.items()})


def run(policy: str, seed: int, *, is_shared: bool, gamma: float = 0.0) -> tuple[list[Action], list[str]]:
    """A load with changes of weights in between: what was decided, and which laws were broken."""
    rng = random.Random(seed)
    config = pool(kv=900, policy=policy, tenants=dict.fromkeys(NAMES, 1.0), tiers=TIERS, gamma=gamma)
    scheduler = started(config)
    log: list[Action] = []
    broken: list[str] = []
    live: list[str] = []
    started_ones: set[str] = set()
    now = 1.0
    for step in range(160):
        now += 0.05
        kind = rng.random()
        if kind < 0.55:
            tier = rng.choice(["chat", "batch"])
            name = f"r{step}"
            event = arrival(
                name, tenant=rng.choice(NAMES), prompt=rng.randint(10, 90), cap=rng.randint(5, 60), tier=tier
            )
            live.append(name)
            actions = scheduler.handle(event, now)
        elif kind < 0.75 and (running := [name for name in live if name in started_ones]):
            actions = scheduler.handle(tokens(rng.choice(running), rng.randint(1, 4)), now)
        elif kind < 0.9 and live:
            gone = live.pop(rng.randrange(len(live)))
            actions = scheduler.handle(Cancelled(request_id=RequestId(gone)), now)
        else:
            config = reweighed(config, {rng.choice(NAMES): rng.choice([0.25, 1.0, 3.0, 8.0])})
            actions = scheduler.handle(Reconfigured(config=config if is_shared else rebuilt(config)), now)
            broken += scheduler.audit()
        log += actions
        started_ones.update(action.request_id for action in actions if isinstance(action, Dispatch))
        started_ones.difference_update(action.request_id for action in actions if isinstance(action, Preempt))
    return log, broken


def dispatches(log: list[Action]) -> list[tuple[str, str]]:
    return [(action.request_id, action.backend) for action in log if isinstance(action, Dispatch)]


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_left_alone_decides_as_what_is_built_anew(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed, broken = run(policy, seed, is_shared=True)
    assert broken == []
    monkeypatch.setattr(scheduler_module.Scheduler, "_kept_policy", lambda self, before, config: None)
    anew, _ = run(policy, seed, is_shared=False)
    assert dispatches(followed) == dispatches(anew)
    assert len(dispatches(followed)) > 15


@pytest.mark.parametrize(("policy", "owner", "gamma"), [("vtc-predict", Keyed, 0.0), ("slo-fair", SloFair, 1.0)])
def test_a_policy_that_does_not_hear_of_weights_is_noticed(
    policy: str, owner: type[FairnessPolicy], gamma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(seed: int) -> bool:
        followed, _ = run(policy, seed, is_shared=True, gamma=gamma)
        with monkeypatch.context() as patch:
            patch.setattr(scheduler_module.Scheduler, "_kept_policy", lambda self, before, config: None)
            anew, _ = run(policy, seed, is_shared=False, gamma=gamma)
        return dispatches(followed) != dispatches(anew)

    seeds = range(10, 40)
    assert not any(map(differs, seeds))
    monkeypatch.setattr(owner, "reweighed", lambda self, tenant: None)
    assert any(map(differs, seeds))


def differs_where_counters_are_rebased(seed: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether small counters, shifted down with every change, make another order than rebuilt indexes do."""
    with monkeypatch.context() as patch:
        patch.setattr(tenants_module, "_REBASE_AT", 1.0)
        followed, broken = run("slo-fair", seed, is_shared=True, gamma=1.0)
        patch.setattr(scheduler_module.Scheduler, "_kept_policy", lambda self, before, config: None)
        anew, _ = run("slo-fair", seed, is_shared=False, gamma=1.0)
    assert broken == []
    return dispatches(followed) != dispatches(anew)


def test_indexes_follow_counters_that_begin_at_another_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = range(10, 20)
    assert not any(differs_where_counters_are_rebased(seed, monkeypatch) for seed in seeds)
    plain = Tenants.rebase_counters

    def unsaid(self: Tenants) -> bool:
        plain(self)
        return False

    monkeypatch.setattr(Tenants, "rebase_counters", unsaid)
    assert any(differs_where_counters_are_rebased(seed, monkeypatch) for seed in seeds)


def test_a_head_that_was_late_is_late_in_the_next_policy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In run 21 an estimate that falls again would let a rebuilt index call a late head on time."""
    monkeypatch.setattr(scheduler_module.Scheduler, "_kept_policy", lambda self, before, config: None)
    kept, _ = run("slo-fair", 21, is_shared=False)
    plain = SloFair.head_changed

    def forgetful(self: SloFair, queue: TierQueue) -> None:
        if queue.indexed is None:
            queue.late = None
        plain(self, queue)

    monkeypatch.setattr(SloFair, "head_changed", forgetful)
    forgotten, _ = run("slo-fair", 21, is_shared=False)
    assert dispatches(kept) != dispatches(forgotten)


def test_a_tenant_is_made_when_it_first_has_something_here() -> None:
    scheduler = started(pool(kv=900, tenants=dict.fromkeys(NAMES, 2.0)))
    assert [t.tenant for t in scheduler.stats(only_seen=True).tenants] == []
    scheduler.handle(arrival("c0", tenant="c", prompt=10, cap=10), 1.0)
    (seen,) = scheduler.stats(only_seen=True).tenants
    assert (seen.tenant, seen.weight, seen.running) == ("c", 2.0, 1)
    assert [t.tenant for t in scheduler.stats().tenants] == list(NAMES)


def grouped() -> tuple[PoolConfig, Scheduler]:
    config = pool(kv=201, tenants={"a": 1.0, "b": 1.0}, tiers=TIERS)
    shares = {name: replace(share, group="g") for name, share in config.tenants.items()}
    config = replace(config, tenants=shares, groups={"g": GroupConfig(group="g", weight=1.0)})
    scheduler = started(config)
    for number in range(4):
        scheduler.handle(arrival(f"a{number}", prompt=100, cap=100, tier="chat"), 1.0)
    return config, scheduler


def test_members_of_a_group_follow_their_tiers_and_keep_their_place() -> None:
    config, scheduler = grouped()
    tiers = {name: replace(tier, rank=tier.rank + 7) for name, tier in config.tiers.items()}
    scheduler.handle(Reconfigured(config=replace(config, tiers=tiers)), 2.0)
    group = scheduler._tenants.groups["g"]
    (queue,) = group.by_rank
    assert (queue.member.tenant_id, queue.rank) == ("a", 8)
    policy = scheduler._decider._policy
    floor = scheduler._counters.floor()
    assert floor is not None
    assert policy.first_urgent(2.0, floor) is queue.head


def victim_after_reweighing() -> str:
    """Whom a chat displaces once the tenant with most of the queue has got eight times its weight."""
    config = pool(kv=301, tenants=dict.fromkeys("abc", 1.0), tiers=TIERS)
    scheduler = started(config)
    for name, tenant, count in (("full", "c", 3), ("a", "a", 5), ("b", "b", 4)):
        for number in range(count):
            scheduler.handle(arrival(f"{name}{number}", tenant=tenant, prompt=90, cap=60, tier="batch"), 1.0)
    scheduler.handle(arrival("urgent", tenant="c", prompt=90, cap=60, tier="chat"), 1.0)
    asking = scheduler._requests[RequestId("urgent")]
    shedding = scheduler._room.shedding
    before = shedding.next(asking)
    assert before is not None
    assert before.member.tenant_id == "a"
    scheduler.handle(Reconfigured(config=reweighed(config, {"a": 8.0})), 1.0)
    assert scheduler.audit() == []
    victim = shedding.next(asking)
    assert victim is not None
    return victim.request_id


def test_who_is_displaced_follows_a_new_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    assert victim_after_reweighing() == "b3"
    monkeypatch.setattr(Shedding, "reweighed", lambda self, tenant: None)
    assert victim_after_reweighing() == "a4"
