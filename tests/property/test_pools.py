"""The fairness bound over several hundred random small pools: mixed tiers, weights from 0.1 to 10, preemption, one to
three servers, any ``gamma``; and the mutants of the rules that hold it together.

The random pools of ``test_laws`` are as random; here are many, each short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from router_ext.core.actions import Dispatch
from router_ext.core.books import Books
from router_ext.core.lifecycle import State
from router_ext.core.placement import Placement
from tests.property.harness import ALL_LAWS, Run, scenario
from tests.property.mutants import free_skipping, unlimited_urgency
from tests.property.oracle import LawBroken
from tests.unit.core.builders import arrival, dispatched, pool, started, tokens

POOLS = 300
BATCH = 25
STEPS = 120
LAWS = ALL_LAWS - {"audit"}
"""What the scheduler says of itself is asked in ``test_laws``, at every step."""

MARATHONS = 4
"""Every fourth pool has long requests beside crowds of short ones, and the largest ``gamma``."""

BOUNDS = frozenset({"counter_bound", "pair_bound"})


@pytest.mark.parametrize("first", range(0, POOLS, BATCH))
def test_no_pool_breaks_the_bound_or_any_other_law(first: int) -> None:
    for seed in range(1_000 + first, 1_000 + first + BATCH):
        Run(scenario(seed, steps=STEPS, wild=True), LAWS).go()


def test_the_pools_are_what_they_are_meant_to_be() -> None:
    """Work is cut by both triggers, counters come near their bound, and every kind of pool is there."""
    cut: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    worst = 0.0
    for seed in range(1_000, 1_060):
        case = scenario(seed, steps=STEPS, wild=True)
        outcome = Run(case, frozenset()).go()
        cut.update(outcome.scheduler.stats().preempted_total)
        worst = max(worst, outcome.oracle.worst_counter)
        kinds[f"{len(case.servers)} servers"] += 1
        kinds[f"{len(case.weights)} tenants"] += 1
        kinds[f"gamma {case.knobs['gamma']}"] += 1
    assert min(cut["deadline"], cut["gap"]) >= 5
    assert worst > 0.7
    assert len(kinds) == 3 + 5 + 3
    weights = [weight for seed in range(1_000, 1_060) for weight in scenario(seed, steps=1, wild=True).weights.values()]
    assert min(weights) < 0.2 < 5.0 < max(weights)


# --- mutants ---------------------------------------------------------------------------------------------------------


def unclipped_gamma(patch: pytest.MonkeyPatch) -> None:
    """All of the predicted output counts as in flight, whatever the slice may still produce."""

    def update(self: Any, request: Any) -> None:
        expected = 0.0
        if self._is_gamma and request.state.is_running:
            expected = self.cost.ahead(request, max(0, request.predicted_output_tokens - request.output_tokens))
        request.tenant.expected_rest += expected - request.expected_rest
        request.expected_rest = expected

    patch.setattr(Books, "_update_expected", update)


def hunt(seeds: range, laws: frozenset[str]) -> None:
    for seed in seeds:
        Run(scenario(seed, steps=300, wild=True), laws).go()


@pytest.mark.parametrize(
    ("mutant", "every"), [(free_skipping, 1), (unlimited_urgency, 1), (unclipped_gamma, MARATHONS)]
)
def test_a_mutant_breaks_the_bound_in_the_random_pools(
    mutant: Callable[[pytest.MonkeyPatch], None], every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(LawBroken, match=r"^(counter|pair)_bound"):
        hunt(range(1_000, 1_000 + POOLS, every), BOUNDS)


# --- claims ----------------------------------------------------------------------------------------------------------


def start_behind_a_former_pick() -> list[str]:
    """Who starts when somebody else is in turn than the one whose claim held the server a moment ago.

    Tenant a's large request is in turn and waits for a's running one to end, which leaves too little over for b's.
    Then a has received so much that it is b's turn.
    """
    scheduler = started(pool(kv=101, tiers=[{"name": "batch", "rank": 10}], max_preemptions=0))
    assert dispatched(scheduler.handle(arrival("running", "a", prompt=10, cap=51), 0.0)) == ["running"]
    scheduler.handle(tokens("running"), 0.1)
    assert dispatched(scheduler.handle(arrival("large", "a", prompt=60, cap=21), 0.2)) == []
    assert dispatched(scheduler.handle(arrival("small", "b", prompt=10, cap=21), 0.3)) == []
    picked = scheduler.handle(tokens("running", 20), 0.4)
    return [str(action.request_id) for action in picked if isinstance(action, Dispatch)]


def sticky_claims(patch: pytest.MonkeyPatch) -> None:
    """A claim belongs to its request until it starts, not to the decision."""
    held: dict[Any, Any] = {}
    claim, options = Placement.claim, Placement.options

    def remember(self: Any, request: Any, *args: Any, **fields: Any) -> Any:
        found = claim(self, request, *args, **fields)
        if found is not None:
            held[request] = found.backend
        return found

    def unheld(self: Any, request: Any, *args: Any, **fields: Any) -> Any:
        found, gate = options(self, request, *args, **fields)
        others = {b for other, b in held.items() if other is not request and other.state is State.QUEUED}
        return [option for option in found if option[0] not in others], gate

    patch.setattr(Placement, "claim", remember)
    patch.setattr(Placement, "options", unheld)


def test_a_claim_ends_with_its_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random pools hardly ever meet this, so the mutant is caught by a constructed case."""
    assert start_behind_a_former_pick() == ["small"]
    sticky_claims(monkeypatch)
    assert start_behind_a_former_pick() == []
