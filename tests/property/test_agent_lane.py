"""Agents inside a tenant under ``slo-fair``: a lasting order among themselves, one share among the tenant's keys."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from router_ext.core.actions import Action, Dispatch
from router_ext.core.books import Books
from router_ext.core.calls import TagOrder
from tests.property.harness import ALL_LAWS, Run, scenario
from tests.property.oracle import Job, LawBroken

AGENTS = "(agents)"
LAWS = (ALL_LAWS | {"tag_order"}) - {"client_fifo", "work_conserving", "cuts"}
"""Inside the lane of agents the oracle knows no order, so it does not know the head either."""

Mutant = Callable[[pytest.MonkeyPatch], None]


class AgentLaneRun(Run):
    """Two thirds of the jobs belong to a few agents; for the oracle those of a tenant and tier have one key."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.agent_of: dict[str, str] = {}
        self.before: set[tuple[str, str]] = set()
        self.agent_rng = random.Random(self.scenario.seed)
        self.fields = self.agent_fields

    def agent_fields(self, job: Job) -> dict[str, Any]:
        rng = self.agent_rng
        if rng.random() < 1 / 3:
            return {}
        name = f"agent-{job.order // 25}-{rng.randrange(3)}"
        self.agent_of[job.name] = f"{job.tenant}/{name}"
        job.key = AGENTS
        return {"agent_id": name, "agent_cost": rng.choice([None, 50.0 * rng.randint(1, 400)])}

    def carry_out(self, action: Action) -> None:
        if "tag_order" in self.laws and isinstance(action, Dispatch) and not action.reason.startswith("behind"):
            first = self.agent_of.get(action.request_id)
            started = self.jobs[action.request_id]
            for name, other in self.agent_of.items():
                job = self.jobs[name]
                is_rival = job.place == "queued" and (job.tenant, job.tier) == (started.tenant, started.tier)
                if first is None or not is_rival or other == first:
                    continue
                if (other, first) in self.before:
                    raise LawBroken(f"tag_order: {first} goes before {other}, which went before it until then")
                self.before.add((first, other))
        super().carry_out(action)


def run(seed: int, laws: frozenset[str] = LAWS, **options: Any) -> AgentLaneRun:
    outcome = AgentLaneRun(scenario(seed, steps=300, num_keys=2, **options), laws)
    outcome.go()
    return outcome


@pytest.mark.parametrize("seed", range(600, 612))
def test_agents_keep_their_order_and_share_as_one_key(seed: int) -> None:
    outcome = run(seed, with_faults=seed % 2 == 0, unequal=seed % 4 == 3, with_targets=seed % 3 != 0)
    assert len(outcome.before) > 20
    assert any({AGENTS, "key_0"} <= set(level.delivered) for level in outcome.oracle.levels.values())


def keys_before_tags(patch: pytest.MonkeyPatch) -> None:
    """Agents of different keys take turns like the keys."""
    patch.setattr(Books, "order_agents", lambda self, is_on: None)


def most_calls_first(patch: pytest.MonkeyPatch) -> None:
    """Who is first depends on what waits at present."""

    def first(self: Any) -> Any:
        agent = max(self._calls, key=lambda agent: (len(self._calls[agent]), agent.seq), default=None)
        return None if agent is None else self._calls[agent][-1][2]

    patch.setattr(TagOrder, "first", first)


def agents_not_charged(patch: pytest.MonkeyPatch) -> None:
    def charge(self: Any, request: Any, service: float) -> None:
        counter = request.lane.counter
        original(self, request, service)
        if request.lane.key is None:
            request.lane.counter = counter

    original = Books._charge
    patch.setattr(Books, "_charge", charge)


@pytest.mark.parametrize(
    ("law", "mutant"),
    [
        ("tag_order", keys_before_tags),
        ("tag_order", most_calls_first),
        ("key_order", keys_before_tags),
        ("key_order", agents_not_charged),
        ("key_bound", agents_not_charged),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_mutant_breaks_its_law(law: str, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(LawBroken, match=rf"^{law}"):
        run_many(law)


def run_many(law: str) -> None:
    for seed in range(20):
        run(seed, frozenset({law}), same_mode="flood", num_servers=1, with_targets=False)
