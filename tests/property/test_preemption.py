"""Laws of preemption over random small pools, each with the mutant that must break it; and the choice of victims.

Guards, enough is freed, the waste budget, and progress: something new is delivered all the time. The latter needs
little: a tenant is cut only after it was charged for something new, so two tenants cannot cut each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_ext.core import preemption as preemption_module
from router_ext.core.config import TenantConfig, TierConfig
from router_ext.core.events import RequestSpec
from router_ext.core.ids import KeyId, RequestId, TenantId, TierName
from router_ext.core.lifecycle import IllegalTransition, State
from router_ext.core.preemption import Preemption, choose_victims, lost_tokens
from router_ext.core.queues import Tenant, TierQueue
from router_ext.core.request import Request
from router_ext.core.waste import WasteBudget
from tests.property.harness import ALL_LAWS, Run, Scenario, scenario
from tests.property.oracle import LawBroken


def eager(seed: int, *, steps: int = 300, **options: Any) -> Scenario:
    """A pool in which somebody is cut whenever a tenant is ahead at all, as far as guards and budget allow."""
    case = scenario(seed, steps=steps, **options)
    return replace(case, theta=0.0, max_preemptions=1, waste=0.2, drop_at_slice_end=True)


@pytest.mark.parametrize("seed", range(12))
def test_all_laws_hold_where_work_is_cut_as_often_as_is_allowed(seed: int) -> None:
    outcome = Run(eager(seed, with_faults=seed % 2 == 0)).go()
    assert outcome.log


@pytest.mark.parametrize("seed", range(20, 28))
def test_long_prompts_are_not_cut(seed: int) -> None:
    """With a prefill budget that binds, the prefill gate may hold back who fits; all else is as ever."""
    Run(eager(seed, prefill_budget=40), ALL_LAWS - {"work_conserving"}).go()


def test_work_is_cut_in_the_random_pools() -> None:
    """The laws above would prove nothing else."""
    cut = again = 0
    for seed in range(12):
        outcome = Run(eager(seed), frozenset()).go()
        cut += sum(job.cuts for job in outcome.jobs.values())
        again += outcome.scheduler.stats().recomputed_tokens_total
    assert cut > 30
    assert again > 500


# --- mutants ---------------------------------------------------------------------------------------------------------

GUARDS: dict[str, Callable[[Request, Any, int], bool]] = {
    "shows tokens": lambda request, backend, limit: request.state is not State.DECODING,
    "no target": lambda request, backend, limit: request.queue.ttft_target_s is not None,
    "so often": lambda request, backend, limit: request.num_preempted >= limit,
    "late run": lambda request, backend, limit: request.output_tokens > 0.8 * request.predicted_output_tokens,
    "prefill budget": lambda request, backend, limit: lost_tokens(request) > backend.config.prefill_budget_tokens,
}


def without(guard: str) -> Callable[[pytest.MonkeyPatch], None]:
    def mutant(patch: pytest.MonkeyPatch) -> None:
        others = [holds for name, holds in GUARDS.items() if name != guard]
        patch.setattr(preemption_module, "is_protected", lambda *args: any(holds(*args) for holds in others))

    return mutant


def too_little(patch: pytest.MonkeyPatch) -> None:
    """Whoever may be cut is, even if that is not enough."""

    def choose(eligible: Any, missing_blocks: int) -> list[Request]:
        return original(eligible, missing_blocks) or list(eligible)

    original = preemption_module.choose_victims
    patch.setattr(preemption_module, "choose_victims", choose)


def no_budget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WasteBudget, "level_tokens", property(lambda self: 1e9))


def not_settled(patch: pytest.MonkeyPatch) -> None:
    """The estimate is given back at the resume, and what is really sent again is forgotten."""
    patch.setattr(WasteBudget, "resumed", WasteBudget.spared)


def cut_on_mere_order(patch: pytest.MonkeyPatch) -> None:
    """Whoever runs may be cut for the one in turn, ahead or not, at any time."""
    original = Preemption.adopt

    def adopt(self: Any, *args: Any) -> None:
        original(self, *args)
        self._theta = -1e9

    no_budget(patch)
    patch.setattr(Preemption, "adopt", adopt)
    patch.setattr(preemption_module, "is_protected", lambda request, *rest: request.state is not State.DECODING)


CASES: list[tuple[str, str, Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = [
    ("cuts", "no target", without("no target"), {}),
    ("cuts", "so often", without("so often"), {}),
    ("cuts", "late run", without("late run"), {}),
    ("cuts", "prefill budget", without("prefill budget"), {"prefill_budget": 40}),
    ("cuts", "too little", too_little, {}),
    ("waste", "no budget", no_budget, {}),
    ("waste", "not settled", not_settled, {}),
    ("progress", "on mere order", cut_on_mere_order, {"same_mode": "flood", "with_targets": False}),
]


def hunt(law: str, options: dict[str, Any]) -> None:
    for seed in range(60):
        Run(eager(seed, **options), frozenset({law})).go()


@pytest.mark.parametrize(("law", "name", "mutant", "options"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_a_mutant_breaks_its_law(
    law: str,
    name: str,
    mutant: Callable[[pytest.MonkeyPatch], None],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant(monkeypatch)
    with pytest.raises(LawBroken, match=f"^{law}"):
        hunt(law, options)


def test_the_table_of_states_forbids_to_cut_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    without("shows tokens")(monkeypatch)
    with pytest.raises(IllegalTransition):
        hunt("cuts", {})


# --- the choice of victims -------------------------------------------------------------------------------------------

TIER = TierConfig(name=TierName("batch"), rank=10)


def running(ticket: int, prompt: int, output: int, blocks: int) -> Request:
    tenant = Tenant(TenantConfig(tenant=TenantId("a")))
    spec = RequestSpec(
        request_id=RequestId(f"req_{ticket}"),
        tenant=tenant.tenant_id,
        key=KeyId("key"),
        tier=TIER.name,
        prompt_tokens=prompt,
        max_new_tokens=1_000,
    )
    request = Request(spec, tenant=tenant, queue=TierQueue(tenant, TIER), seq=ticket, arrival_s=0.0)
    request.ticket, request.slice_output, request.blocks = ticket, output, blocks
    return request


SIZES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 60)), max_size=7)


@given(sizes=SIZES, missing=st.integers(1, 400))
def test_victims_free_enough_or_are_none_and_none_of_them_is_superfluous(
    sizes: list[tuple[int, int, int]], missing: int
) -> None:
    eligible = [
        running(ticket, prompt, output, prompt + output + rest) for ticket, (prompt, output, rest) in enumerate(sizes)
    ]
    chosen = choose_victims(eligible, missing)
    freed = sum(request.blocks for request in chosen)
    if sum(request.blocks for request in eligible) < missing:
        assert chosen == []
        return
    assert freed >= missing
    assert all(freed - request.blocks < missing for request in chosen)
    order = sorted(eligible, key=lambda request: (lost_tokens(request) / request.blocks, -request.ticket))
    prefix = next(order[:n] for n in range(len(order) + 1) if sum(r.blocks for r in order[:n]) >= missing)
    assert set(chosen) <= set(prefix)
