"""Two-level fairness: keys share their tenant's turns, and nothing outside the tenant depends on how many there are."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from router_ext.core import siblings as siblings_module
from router_ext.core.events import Arrived
from router_ext.core.fairness.counters import Counters
from router_ext.core.ids import KeyId, TenantId
from router_ext.core.queues import TierQueue
from router_ext.core.scheduler import Scheduler
from router_ext.core.siblings import Siblings
from tests.property.family import VtcOracle
from tests.property.harness import ALL_LAWS, Run, Scenario, scenario
from tests.property.mutants import unlimited_going_on
from tests.property.oracle import LawBroken

Mutant = Callable[[pytest.MonkeyPatch], None]

plain = {"weighted": False, "with_targets": False, "num_keys": 3}
flooded = {**plain, "same_mode": "flood", "num_servers": 1}
tight = {**flooded, "num_keys": 2, "contrast": True, "passes": (0.0, 0.0), "prices": (1.0, 2.0)}


def run(case: Scenario, *laws: str) -> Run:
    return Run(case, frozenset(laws) if laws else ALL_LAWS).go()


def run_many(cases: list[Scenario], law: str) -> None:
    for case in cases:
        run(case, law)


@pytest.mark.parametrize("seed", range(500, 512))
def test_all_laws_hold_with_several_keys(seed: int) -> None:
    options = {"with_faults": seed % 3 == 0, "unequal": seed % 4 == 3, "with_targets": seed % 2 == 0}
    outcome = run(scenario(seed, steps=400, num_keys=2 + seed % 4, **options))  # type: ignore[arg-type]
    assert any(len(level.delivered) > 1 for level in outcome.oracle.levels.values())


OTHERS = ["vtc", "vtc-predict", "drr", "equinox", "dlpm"]
"""Policies beside ``slo-fair`` that pick a tenant and leave the order of its keys to its queues."""


@pytest.mark.parametrize("policy", OTHERS)
@pytest.mark.parametrize("seed", range(520, 524))
def test_keys_share_under_every_policy_that_goes_by_counters(policy: str, seed: int) -> None:
    case = scenario(seed, steps=300, policy=policy, num_keys=3, with_faults=seed % 2 == 0, unequal=seed % 4 == 3)
    laws = frozenset({"key_order", "key_bound", "audit", "ledger"})
    outcome = Run(case, laws, oracle_type=VtcOracle).go()
    assert any(len(level.delivered) > 1 for level in outcome.oracle.levels.values())


def test_the_random_pools_come_close_to_the_bound_between_keys() -> None:
    """A law that is never nearly broken would prove nothing."""
    outcomes = [run(scenario(seed, steps=250, **tight)) for seed in range(4, 8)]  # type: ignore[arg-type]
    assert max(level.worst for outcome in outcomes for level in outcome.oracle.levels.values()) > 0.9


# --- row 23: splitting a tenant into keys ----------------------------------------------------------------------------


def share_of_first(case: Scenario) -> float:
    """Share of all service that the first tenant has at the end of the arrivals; everybody floods throughout."""
    outcome = Run(case, frozenset())
    shares: list[float] = []
    step = outcome.step

    def watched(number: int, arrivals: list[Any], *, with_faults: bool) -> None:
        step(number, arrivals, with_faults=with_faults)
        if number == len(case.arrivals) - 1:
            delivered = outcome.oracle.delivered
            shares.append(delivered["ten_a"] / sum(delivered.values()))

    outcome.step = watched  # type: ignore[method-assign]
    outcome.go()
    return shares[0]


def split(seed: int, num_keys: int, policy: str = "slo-fair") -> Scenario:
    """Three tenants of one weight that always wait; requests of the first come with ``num_keys`` keys at random."""
    rng = random.Random(seed)
    names = ("ten_a", "ten_b", "ten_c")
    case = scenario(seed, steps=0, weighted=False, with_targets=seed % 2 == 0, num_servers=1, prices=(1.0, 2.0))
    arrivals = []
    for step in range(1_200):
        sizes = [(rng.randint(4, 20), rng.randint(4, 20)) for _ in names]
        arrivals.append(
            [(name, "batch", p, d, d, 64) for name, (p, d) in zip(names, sizes, strict=True) if step % 2 == 0]
        )
    servers = {"bke_0": {"kv_tokens": 121, "block_size": 1}}
    weights = dict.fromkeys(names, 1.0)
    return replace(
        case, weights=weights, servers=servers, arrivals=arrivals, num_keys=num_keys, split_tenants=("ten_a",),
        policy=policy,
    )  # fmt: skip


def flat_over_keys(patch: pytest.MonkeyPatch) -> None:
    """Every key is a tenant of its own, as in plain VTC over API keys."""

    def arrived(self: Scheduler, event: Arrived, now: float, actions: Any) -> None:
        spec = event.request
        weight = self._tenants.get(spec.tenant).weight
        alone = TenantId(f"{spec.tenant}/{spec.key}")
        self._tenants.get(alone).weight = weight
        original(self, Arrived(request=replace(spec, tenant=alone)), now, actions)

    original = Scheduler._on_arrived
    patch.setattr(Scheduler, "_on_arrived", arrived)


@pytest.mark.parametrize("num_keys", [1, 2, 5])
@pytest.mark.parametrize("seed", range(2))
def test_splitting_a_tenant_into_keys_does_not_change_its_share(seed: int, num_keys: int) -> None:
    assert share_of_first(split(seed, num_keys)) == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize("policy", ["vtc", "vtc-predict", "drr"])
def test_nor_under_the_other_counter_policies(policy: str) -> None:
    assert share_of_first(split(1, 5, policy)) == pytest.approx(1 / 3, abs=0.02)


@pytest.mark.parametrize("seed", range(2))
def test_fairness_over_keys_alone_would_pay_for_splitting(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test above: five of seven keys would get five shares of seven."""
    flat_over_keys(monkeypatch)
    assert share_of_first(split(seed, 5)) == pytest.approx(5 / 7, abs=0.05)


# --- mutants of the level of keys ------------------------------------------------------------------------------------


def no_lift_of_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(siblings_module, "lift", lambda counter, virtual_time: counter)


def one_lane_for_all(patch: pytest.MonkeyPatch) -> None:
    original = TierQueue.lane
    patch.setattr(TierQueue, "lane", lambda self, key: original(self, KeyId("all")))


def never_reordered(patch: pytest.MonkeyPatch) -> None:
    """Whose turn it is among keys is decided when the last head leaves, not when it is used."""
    patch.setattr(Siblings, "reorder", lambda self: False)


def keys_not_charged(patch: pytest.MonkeyPatch) -> None:
    def charge(self: Counters, request: Any, service: float) -> None:
        counter = request.lane.counter
        original(self, request, service)
        request.lane.counter = counter

    original = Counters.charge
    patch.setattr(Counters, "charge", charge)


def resumed_before_all_keys(patch: pytest.MonkeyPatch) -> None:
    """Requests that ran before go ahead of those of other keys too."""

    def see_head(self: Any) -> None:
        original(self)
        resumed = [request for request in self.requests() if request.is_resumed]
        if resumed:
            self.head = min(resumed, key=lambda request: request.seq)

    def add(self: Any, request: Any) -> None:
        original_add(self, request)
        self._see_head()

    original, original_add = TierQueue._see_head, TierQueue.add
    patch.setattr(TierQueue, "_see_head", see_head)
    patch.setattr(TierQueue, "add", add)


MUTANTS: list[tuple[str, Mutant, dict[str, Any]]] = [
    ("key_bound", no_lift_of_keys, plain),
    ("key_bound", one_lane_for_all, plain),
    ("key_bound", resumed_before_all_keys, flooded),
    ("key_bound", unlimited_going_on, tight),
    ("key_order", no_lift_of_keys, plain),
    ("key_order", one_lane_for_all, plain),
    ("key_order", never_reordered, plain),
    ("key_order", keys_not_charged, plain),
]


@pytest.mark.parametrize(
    ("law", "mutant", "options"),
    [pytest.param(law, mutant, options, id=f"{law}-{mutant.__name__}") for law, mutant, options in MUTANTS],
)
def test_a_mutant_breaks_its_law(
    law: str, mutant: Mutant, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(LawBroken, match=rf"^{law}"):
        run_many([scenario(seed, steps=400, **options) for seed in range(30)], law)
