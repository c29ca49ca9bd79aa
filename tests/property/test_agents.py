"""Row of agents: their order is fixed when they come, whatever comes later and however far they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from router_ext.core.actions import Action, Dispatch
from router_ext.core.agents import Agent, Agents
from router_ext.core.request import Request
from tests.property.harness import Run, scenario
from tests.property.oracle import Job, LawBroken

LAWS = frozenset({"ledger", "server_queue_empty", "audit", "conservation"})


class AgentRun(Run):
    """Jobs belong to a few agents each; who went before whom, while both had a call waiting, is written down."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.agents: dict[str, str] = {}
        self.before: set[tuple[str, str]] = set()
        self.agent_rng = random.Random(self.scenario.seed)

    def agent_fields(self, job: Job) -> dict[str, Any]:
        """A few agents of each tenant at a time; every third job comes without one."""
        rng = self.agent_rng
        if rng.random() < 1 / 3:
            self.agents[job.name] = job.name
            return {}
        name = f"agent-{job.order // 25}-{rng.randrange(3)}"
        self.agents[job.name] = f"{job.tenant}/{name}"
        return {"agent_id": name, "agent_cost": rng.choice([None, 50.0 * rng.randint(1, 400)])}

    def carry_out(self, action: Action) -> None:
        if isinstance(action, Dispatch) and action.reason.startswith("in turn"):
            first = self.agents[action.request_id]
            for job in self.jobs.values():
                other = self.agents[job.name]
                if job.place != "queued" or other == first:
                    continue
                if (other, first) in self.before:
                    raise LawBroken(f"stable_order: {first} goes before {other}, which went before it until then")
                self.before.add((first, other))
        super().carry_out(action)


def run(seed: int) -> AgentRun:
    case = scenario(seed, steps=250, policy="justitia", with_faults=seed % 2 == 0, unequal=seed % 3 == 0)
    outcome = AgentRun(case, LAWS)
    outcome.fields = outcome.agent_fields
    outcome.go()
    return outcome


def run_many() -> None:
    for seed in range(12):
        run(seed)


@pytest.mark.parametrize("seed", range(12))
def test_the_order_of_agents_never_changes(seed: int) -> None:
    assert len(run(seed).before) > 10


def tags_made_at_every_call(patch: pytest.MonkeyPatch) -> None:
    def join(self: Agents, request: Request, now: float) -> Agent:
        agent = original(self, request, now)
        self.clock.advance(now)
        cost = 1_000.0 if request.agent_cost is None else request.agent_cost
        agent.tag = self.clock.virtual_time + cost / request.tenant.weight
        return agent

    original = Agents.join
    patch.setattr(Agents, "join", join)


def tags_lowered_by_progress(patch: pytest.MonkeyPatch) -> None:
    def leave(self: Agents, request: Request, now: float, **how: bool) -> None:
        if request.agent is not None:
            request.agent.tag -= 2_000.0
        original(self, request, now, **how)

    original = Agents.leave
    patch.setattr(Agents, "leave", leave)


@pytest.mark.parametrize("mutant", [tags_made_at_every_call, tags_lowered_by_progress])
def test_recomputed_tags_are_noticed(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: Any) -> None:
    mutant(monkeypatch)
    with pytest.raises(LawBroken, match=r"^stable_order"):
        run_many()
