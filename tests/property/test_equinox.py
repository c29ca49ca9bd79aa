"""Equinox: what must hold whatever the paper's constants are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from router_ext.core.fairness import POLICIES
from router_ext.core.fairness.equinox import Equinox
from router_ext.core.fairness.vtc_predict import VtcPredict
from router_ext.core.queues import Tenant
from router_ext.core.request import Request
from tests.property.harness import Run, scenario
from tests.property.oracle import Job, LawBroken

LAWS = frozenset({"ledger", "server_queue_empty", "audit", "conservation"})
SERVICE_ALONE = {"equinox_alpha": 1.0, "equinox_delta": 0.0, "equinox_w_output": 4.0}
SEEDS = range(10)


class AsPublished(VtcPredict):
    """Algorithm 3 of the paper: one lift, of the counter charged in advance."""

    def backlogged(self, tenant: Tenant) -> None:
        first = self._keys.top() or self._counters.last_left
        if first is not None:
            tenant.counter += max(0.0, self.key(first) - self.key(tenant))
        self._counters.enter(tenant)
        self._keys.add(tenant)


def true_length(job: Job) -> dict[str, Any]:
    return {"predicted_output_tokens": job.length}


def log(seed: int, policy: str, weight_of_all: float = 1.0, **options: Any) -> list[tuple[Any, ...]]:
    fields = options.pop("fields", lambda job: {})
    knobs = options.pop("knobs", {})
    case = scenario(seed, steps=300, policy=policy, prices=(1.0, 4.0), **options)
    weights = {name: weight * weight_of_all for name, weight in case.weights.items()}
    return Run(replace(case, weights=weights, knobs=knobs), LAWS, fields=fields).go().log


@pytest.mark.parametrize("seed", SEEDS)
def test_service_alone_with_true_lengths_is_weighted_predicted_vtc(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "vtc-predict", AsPublished)
    options = {"knobs": SERVICE_ALONE, "fields": true_length}
    assert log(seed, "equinox", **options) == log(seed, "vtc-predict", **options)


def charged_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """What runs costs nothing until it is over."""

    def started(self: Any, request: Request, now: float) -> None:
        original(self, request, now)
        run = self._runs[request]
        request.tenant.account.user -= run.user / request.tenant.weight
        run.user = 0.0
        if request.tenant.since:
            self._keys.lowered(request.tenant)

    original = Equinox.started
    patch.setattr(Equinox, "started", started)


def wrong_weight(patch: pytest.MonkeyPatch) -> None:
    original = Equinox.key
    patch.setattr(Equinox, "key", lambda self, tenant: original(self, tenant) * tenant.weight)


@pytest.mark.parametrize("mutant", [charged_at_the_end, wrong_weight])
def test_another_order_is_noticed(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: Any) -> None:
    monkeypatch.setitem(POLICIES, "vtc-predict", AsPublished)
    mutant(monkeypatch)
    options = {"knobs": SERVICE_ALONE, "fields": true_length}
    assert any(log(seed, "equinox", **options) != log(seed, "vtc-predict", **options) for seed in SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_scaling_the_counters_of_all_changes_no_decision(seed: int) -> None:
    """Twice the weight for everybody is half of every counter."""
    assert log(seed, "equinox", with_faults=True) == log(seed, "equinox", 2.0, with_faults=True)


def test_an_absolute_exchange_rate_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Equinox.key

    def key(self: Any, tenant: Tenant) -> float:
        return original(self, tenant) + 50.0 * tenant.account.resource * tenant.weight

    monkeypatch.setattr(Equinox, "key", key)
    assert any(log(seed, "equinox") != log(seed, "equinox", 2.0) for seed in SEEDS)


class CounterRun(Run):
    """Watches how far the user counters of those who wait are apart."""

    worst = 0.0

    def send(self, event: Any, *, decides: bool = True) -> None:
        super().send(event, decides=decides)
        policy = self.scheduler._policy
        assert isinstance(policy, Equinox)
        # The largest charge of a full pool: every token of KV an output token. As much is refunded to another at most.
        peak = 4.0 * (self.oracle.pool_tokens + 1) / min(self.oracle.weights.values())
        waiting = [tenant for tenant in self.scheduler._tenants.by_id.values() if tenant.is_backlogged]
        for tenant in waiting:
            ahead = tenant.account.user - min(other.account.user for other in waiting)
            self.worst = max(self.worst, ahead / peak)
        if self.worst > 1.0:
            raise LawBroken(f"spread: a user counter is {self.worst:.2f} of a full pool above the smallest")


def spread(seed: int, **options: Any) -> float:
    case = scenario(seed, steps=300, policy="equinox", same_mode="flood", **options)
    return CounterRun(replace(case, knobs=SERVICE_ALONE), LAWS, fields=true_length).go().worst


@pytest.mark.parametrize("seed", SEEDS)
def test_user_counters_of_those_who_wait_stay_within_a_full_pool(seed: int) -> None:
    assert 0.0 < spread(seed, with_faults=seed % 2 == 0) <= 1.0


def test_no_lift_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Equinox, "backlogged", enter_as_it_is)
    with pytest.raises(LawBroken, match=r"^spread"):
        spread_of_many()


def enter_as_it_is(policy: Any, tenant: Tenant) -> None:
    if tenant.account is None:
        Equinox.adopt(policy, tenant)
    policy._counters.enter(tenant)
    policy._keys.add(tenant)


def spread_of_many() -> None:
    for seed in range(24):
        case = scenario(seed, steps=400, policy="equinox")
        CounterRun(replace(case, knobs=SERVICE_ALONE), LAWS, fields=true_length).go()
