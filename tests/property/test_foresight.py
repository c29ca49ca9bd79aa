"""Whatever distributions are predicted, every law holds: predictions buy latency, never safety or fairness."""

from __future__ import annotations

import random
from typing import Any

import pytest

from router_ext.core import books
from router_ext.core.request import Request
from router_ext.core.slicing import plan
from tests.property.harness import ALL_LAWS, Run, scenario
from tests.property.oracle import Job, LawBroken


def predicted(job: Job) -> dict[str, Any]:
    """Mostly about right, sometimes a lie, for one request in six nothing; a function of the job alone."""
    rng = random.Random(f"{job.name} {job.length}")
    kind = rng.randrange(6)
    if kind == 0:
        return {}
    if kind == 1:
        return {"quantiles": (1,) * 7}
    if kind == 2:
        return {"quantiles": (10_000_000,) * 7}
    if kind == 3:
        return {"quantiles": tuple(sorted(rng.choice((1, 3, 40, 1_000_000)) for _ in range(7)))}
    return {"quantiles": tuple(sorted(max(1, int(job.length * rng.uniform(0.5, 1.5))) for _ in range(7)))}


BLIND = ALL_LAWS - {"work_conserving", "cuts"}
"""The oracle knows stated slices and predictions only, and these two laws ask for them."""

BOUNDS = BLIND - {"no_skipping", "client_fifo", "key_order", "key_bound"}
"""With ``gamma`` whose turn it is depends on the prediction; how far anybody gets ahead does not."""


@pytest.mark.parametrize("seed", range(12))
def test_every_law_holds_under_slo_fair(seed: int) -> None:
    is_wild = seed % 4 == 2
    made = scenario(seed, steps=250, with_faults=seed % 3 == 0, unequal=seed % 4 == 1, wild=is_wild, num_keys=2)
    assert Run(made, BOUNDS if is_wild else BLIND, fields=predicted).go().log


def test_a_mutant_that_believes_predictions_breaks_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for what was predicted, whether a backend could hold it or not."""

    def believing(request: Request, *given: Any, **named: Any) -> bool:
        fits = plan(request, *given, **named)
        request.slice_busy = request.slice_idle = request.preferred_slice_tokens
        return fits

    monkeypatch.setattr(books, "plan", believing)
    runs = [Run(scenario(seed, steps=250), BLIND, fields=predicted) for seed in range(4)]
    with pytest.raises((LawBroken, AssertionError)):
        _ = [run.go() for run in runs]


@pytest.mark.parametrize("policy", ["vtc-predict", "equinox", "fairserve", "justitia", "fifo"])
def test_requests_are_served_under_every_policy_that_uses_lengths(policy: str) -> None:
    for seed in (1, 2):
        run = Run(scenario(seed, steps=200, policy=policy, with_faults=True), fields=predicted).go()
        assert run.log


@pytest.mark.parametrize("seed", range(2))
def test_the_same_predictions_give_the_same_decisions(seed: int) -> None:
    first, second = (Run(scenario(seed, steps=150), BLIND, fields=predicted).go().log for _ in range(2))
    assert first == second
    assert Run(scenario(seed, steps=150)).go().log != first
