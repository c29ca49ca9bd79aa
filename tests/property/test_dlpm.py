"""DLPM: deficit round robin without prefixes, more cache hits with them, and the same bound."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from router_ext.core.admission import Backend
from router_ext.core.fairness import dlpm as dlpm_module
from router_ext.core.fairness.dlpm import Dlpm
from router_ext.core.prefix import PREFIX_BLOCK_TOKENS
from router_ext.core.request import Request
from tests.property.family import DrrOracle
from tests.property.harness import ALL_LAWS, Run, Scenario, scenario
from tests.property.oracle import Job, LawBroken

SEEDS = range(10)
BOUNDS = ALL_LAWS - {"client_fifo"}


class DlpmOracle(DrrOracle):
    quantum_ratio = 1 / 4


def case(seed: int, policy: str = "dlpm", **options: Any) -> Scenario:
    return replace(
        scenario(seed, policy=policy, **{"steps": 300, "with_faults": seed % 2 == 0, **options}),
        knobs={"quantum_ratio": 0.25, "dlpm_quantum_ratio": 0.25},
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_without_prefixes_the_admitted_order_is_that_of_deficit_round_robin(seed: int) -> None:
    logs = [Run(case(seed, policy), frozenset()).go().log for policy in ("dlpm", "drr")]
    assert logs[0] == logs[1]


class Families(Run):
    """Every job's prompt begins as those of one of a few families of its tenant, for one to three blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.family_rng = random.Random(self.scenario.seed)
        self.passed: dict[str, int] = {}

    def family(self, job: Job) -> dict[str, Any]:
        rng = self.family_rng
        family = rng.randrange(6)
        return {"prefix": tuple(hash((job.order // 400, ord(job.tenant[-1]), family, i)) for i in range(3))}


def run(seed: int, policy: str = "dlpm", laws: frozenset[str] = BOUNDS, **options: Any) -> Families:
    outcome = Families(case(seed, policy, **options), laws, oracle_type=DlpmOracle)
    outcome.fields = outcome.family
    outcome.go()
    return outcome


@pytest.mark.parametrize("seed", SEEDS)
def test_the_bound_of_deficit_round_robin_holds_with_prefixes(seed: int) -> None:
    assert run(seed).log


def whatever_the_round(patch: pytest.MonkeyPatch) -> None:
    """The longest prefix of all goes first, whoever's turn it is."""

    def candidates(self: Any, now: float) -> Any:
        requests = list(self._room.in_line.values())
        if requests:
            yield max(requests, key=lambda r: (self._held_blocks(r.prefix), -r.seq)), dlpm_module._HEAD

    def init(self: Any, around: Any) -> None:
        original(self, around)
        self._room = around.room

    original = Dlpm.__init__
    patch.setattr(Dlpm, "__init__", init)
    patch.setattr(Dlpm, "candidates", candidates)


@pytest.mark.parametrize(("mutant", "law"), [(whatever_the_round, "no_skipping"), (whatever_the_round, "pair_bound")])
def test_longest_prefix_without_deficits_is_noticed(
    mutant: Callable[[pytest.MonkeyPatch], None], law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(LawBroken, match=f"^{law}"):
        run_many(frozenset({law}))


def run_many(laws: frozenset[str]) -> None:
    for seed in range(24):
        run(seed, laws=laws, same_mode="flood", weighted=False)


def found(policy: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """Share of the prompts' blocks that their backend held, over a few pools; small blocks for small pools."""
    hits = total = 0
    original = Backend.start

    def start(self: Any, request: Request, blocks: int, now: float) -> None:
        nonlocal hits, total
        hits += self.prefixes.match(request.prefix)
        total += len(request.prefix)
        original(self, request, blocks, now)

    with monkeypatch.context() as patch:
        patch.setattr(Backend, "start", start)
        patch.setattr("router_ext.core.prefix.PREFIX_BLOCK_TOKENS", 8)
        for seed in SEEDS:
            run(seed, policy, frozenset(), same_mode="flood", with_faults=False)
    return hits / total


def test_more_is_found_in_the_caches_than_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    in_turn, best = found("drr", monkeypatch), found("dlpm", monkeypatch)
    assert PREFIX_BLOCK_TOKENS == 64
    assert best > 1.1 * in_turn, (in_turn, best)
