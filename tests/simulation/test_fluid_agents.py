"""Agents on the simulated pool against a fluid one that shares the same rate among all of them."""

from __future__ import annotations

from collections import defaultdict

import pytest

from router_ext.core.agents import SPEED
from router_ext.sim.prediction import Predictor
from router_ext.sim.recording import Recording
from router_ext.sim.runs import Task, perform
from router_ext.sim.suites import SuiteChoice

LONGEST_CALL_S = 15.0
"""500 output tokens, the most of the suite, at the 30 ms of a full batch's step."""


def fluid_ends(arrivals: list[float], costs: list[float], rate: float) -> list[float]:
    """When each agent would end if the rate were shared equally by those that are there. Every step is taken."""
    left: dict[int, float] = {}
    ends = [0.0] * len(costs)
    now = 0.0
    for name in [*sorted(range(len(costs)), key=lambda i: arrivals[i]), None]:
        until = float("inf") if name is None else arrivals[name]
        while left:
            first = min(left, key=lambda i: left[i])
            over = now + left[first] * len(left) / rate
            if over > until:
                break
            done = left.pop(first)
            left = {i: work - done for i, work in left.items()}
            ends[first] = now = over
        if name is not None:
            left = {i: work - (until - now) * rate / len(left) for i, work in left.items()}
            left[name] = costs[name]
            now = until
    return ends


def lateness(recording: Recording) -> list[float]:
    """Seconds by which each agent ends after its end in a fluid pool ``SPEED`` times as fast as this one was."""
    costs: dict[int, float] = defaultdict(float)
    requests = recording.requests
    for agent, prompt, output in zip(requests.agent, requests.input_tokens, requests.output_tokens, strict=True):
        costs[agent] += prompt * output + output * (output + 1) / 2
    rate = SPEED * sum(costs.values()) / recording.over_s
    arrivals = [arrival for arrival, _ in recording.agents]
    ends = fluid_ends(arrivals, [costs[agent] for agent in range(len(arrivals))], rate)
    return sorted(real - fluid for (_, real), fluid in zip(recording.agents, ends, strict=True) if real is not None)


def run(policy: str, seed: int) -> Recording:
    return perform(Task(choice=SuiteChoice(name="agents"), policy=policy, seed=seed, predictor=Predictor.ORACLE))


@pytest.mark.parametrize("seed", [1, 11])
def test_with_true_costs_agents_end_no_later_than_in_the_fluid_pool_by_more_than_a_call(seed: int) -> None:
    recording = run("justitia", seed)
    late = lateness(recording)
    assert len(late) == len(recording.agents) > 250
    assert sum(1 for seconds in late if seconds <= 0.0) > 0.9 * len(late)
    assert late[-1] < LONGEST_CALL_S


def test_agents_served_in_equal_parts_end_much_later() -> None:
    late = lateness(run("vtc", 1))
    assert sum(1 for seconds in late if seconds <= 0.0) < 0.5 * len(late)
    assert late[-1] > 10.0 * LONGEST_CALL_S
