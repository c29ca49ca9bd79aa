"""What the metrics page and the heartbeat say of preemptions, of those parked and of the bound."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.preempting import ForcedCuts, ModelWorld
from support.scripted import Peer, running

from router_ext.core.request import Request


@pytest.fixture
async def world(tmp_path: Path, tokenizer_path: Path) -> AsyncIterator[ModelWorld]:
    async with running(tmp_path, ModelWorld(tokenizer_path)) as made:
        assert isinstance(made, ModelWorld)
        yield made


def metric(world: ModelWorld, name: str) -> float:
    """The one series of this name and labels on the public page."""
    lines = world.router.metrics.page().decode().splitlines()
    (value,) = [line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == name]
    return float(value)


async def test_a_preemption_is_counted_everywhere(world: ModelWorld) -> None:
    """The trigger here is the test's own wish, so only what it led to is counted."""
    engine = world.router.engines["pol_main"]
    done: set[str] = set()

    def once(request: Request) -> bool:
        is_due = request.output_tokens >= 5 and request.request_id not in done
        done.update([request.request_id] * is_due)
        return is_due

    ForcedCuts(engine, once)
    await Peer(world, "/generate", {"inputs": "a b c", "parameters": {"max_new_tokens": 20}}).wait()
    engine.scheduler._decider.preemption.preempted["gap"] += 2
    (state,) = world.router.heartbeat().pools
    stats = engine.stats()
    assert state.recomputed_tokens_total == stats.recomputed_tokens_total == 3 + 5
    assert (state.preempted_total, state.parked) == ({"deadline": 0, "gap": 2}, 0)
    assert (state.waste_tokens, state.bound_service) == (stats.waste_tokens, stats.bound_service)
    label = '{model="main"}'
    assert metric(world, f"fairlane_recomputed_tokens_total{label}") == 8.0
    assert metric(world, 'fairlane_preemptions_total{model="main",trigger="gap"}') == 2.0
    assert metric(world, 'fairlane_preemptions_total{model="main",trigger="deadline"}') == 0.0
    assert metric(world, f"fairlane_parked_requests{label}") == 0.0
    assert metric(world, f"fairlane_waste_budget_tokens{label}") == stats.waste_tokens
    assert metric(world, f"fairlane_fairness_bound_service{label}") == stats.bound_service
    assert metric(world, f"fairlane_fairness_largest_gap_service{label}") == stats.largest_gap_service


async def test_a_policy_without_a_bound_shows_none(world: ModelWorld) -> None:
    world.setup.scheduling = {"policy": "fifo"}
    await world.router.apply(world.setup.snapshot())
    assert b"fairlane_fairness_bound_service{" not in world.router.metrics.page()
