"""Laws of the counter policies over random small pools, with the exact constants, and the mutants that break them."""

from __future__ import annotations

from typing import Any

import pytest

from router_ext.core import bounds
from tests.property.family import DrrOracle, PredictOracle, VtcOracle
from tests.property.harness import ALL_LAWS, Run, Scenario, scenario
from tests.property.oracle import LawBroken, Oracle

ORACLES: dict[str, type[Oracle]] = {"vtc": VtcOracle, "lcf": VtcOracle, "drr": DrrOracle, "vtc-predict": PredictOracle}
FAMILY = ["vtc", "vtc-predict", "drr"]
MORE_LAWS = frozenset({"advance_bound"})


def run(case: Scenario, *laws: str) -> Run:
    return Run(case, frozenset(laws) if laws else ALL_LAWS | MORE_LAWS, oracle_type=ORACLES[case.policy]).go()


def run_many(cases: list[Scenario], law: str) -> None:
    for case in cases:
        run(case, law)


@pytest.mark.parametrize("policy", FAMILY)
@pytest.mark.parametrize("seed", range(12))
def test_all_laws_hold(policy: str, seed: int) -> None:
    options: dict[str, Any] = {"with_faults": seed % 3 == 0, "unequal": seed % 4 == 3, "weighted": seed % 2 == 0}
    assert run(scenario(seed, policy=policy, **options)).log


@pytest.mark.parametrize("policy", FAMILY)
@pytest.mark.parametrize("seed", range(5))
def test_the_product_states_the_bound_the_oracle_judges_by(policy: str, seed: int) -> None:
    outcome = run(scenario(seed, policy=policy, steps=20))
    config, oracle = outcome.scenario.config(), outcome.oracle
    heaviest = max(config.tenants.values(), key=lambda share: share.weight)
    assert bounds.counter_bound(config, heaviest) == pytest.approx(oracle.counter_bound(heaviest.tenant))
    for share in config.tenants.values():
        stated = bounds.counter_bound(config, share)
        assert stated is not None
        assert stated >= oracle.counter_bound(share.tenant) - 1e-6


def test_least_counter_first_breaks_the_bound() -> None:
    with pytest.raises(LawBroken, match=r"^counter_bound"):
        run_many([scenario(seed, policy="lcf", steps=300) for seed in range(24)], "counter_bound")
