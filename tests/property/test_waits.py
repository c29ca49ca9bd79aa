"""The least wait estimated at arrival is not above what the request then waits."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from router_ext.core.actions import Dispatch, Preempt
from router_ext.core.config import build_pool
from router_ext.core.estimates import PredictionBias
from router_ext.core.events import Arrived, BackendChanged, Finished, Preempted, Progressed, RequestSpec, SliceEnded
from router_ext.core.ids import BackendId, KeyId, RequestId, TenantId, TierName
from router_ext.core.limits import Limits
from router_ext.core.queues import Tenant
from router_ext.core.request import Request
from router_ext.core.scheduler import Scheduler
from router_ext.core.waits import CERTAIN
from tests.property.tgi_steps import StepServer, Stream

STEP_S = 0.05


@dataclass
class Case:
    """One request: what was estimated when it came, and what it waited."""

    estimate_s: float
    arrived_s: float
    waited_s: float | None = None


@dataclass
class World:
    """An overloaded pool of step servers, driven for a while; nobody is refused for the estimate."""

    seed: int
    policy: str
    cases: dict[str, Case]
    steps: int = 3_000
    predicted: tuple[float, float] = (0.3, 3.0)
    """Predictions are true lengths times a factor in this range."""

    def run(self) -> World:
        rng = random.Random(self.seed)
        weights = {f"ten_{i}": rng.choice([1.0, 1.0, 4.0]) for i in range(rng.randint(2, 5))}
        rates = {name: rng.choice([0.0, 0.005, 0.02, 0.05]) for name in weights}
        rates["ten_0"] = 0.15
        numbers = {f"bke_{i}": {"kv_tokens": rng.randint(400, 1_500)} for i in range(rng.randint(1, 3))}
        config = build_pool(
            pool={"name": "p", "policy": self.policy},
            backends=[{"backend": name, "max_input_tokens": 9_000, **each} for name, each in numbers.items()],
            tiers=[
                {"name": "chat", "rank": 0, "ttft_target_s": 0.5, "max_queue_wait_s": 1.0},
                {"name": "batch", "rank": 5, "max_queue_wait_s": 5.0},
                {"name": "night", "rank": 9, "max_queue_wait_s": 60.0},
            ],
            tenants=[{"tenant": name, "weight": weight} for name, weight in weights.items()],
        )
        servers = {name: StepServer(**each) for name, each in numbers.items()}
        self.scheduler = scheduler = Scheduler(config)
        jobs: dict[str, list[Any]] = {}
        """By request: prompt, output so far, length, its stream."""
        now = 0.0

        def send(event: Any) -> None:
            cut = []
            for action in scheduler.handle(event, now):
                if isinstance(action, Preempt):
                    servers[action.backend].close(jobs[action.request_id][3])
                    cut.append(action.request_id)
                elif isinstance(action, Dispatch):
                    name, job = action.request_id, jobs[action.request_id]
                    job[3] = f"{name}/{action.segment}"
                    servers[action.backend].open(Stream(job[3], job[0] + job[1], action.slice_tokens, job[2] - job[1]))
                    case = self.cases.get(name)
                    if case is not None and case.waited_s is None:
                        case.waited_s = now - case.arrived_s
            for name in cut:
                send(ended(Preempted, name))

        def ended(event: Any, name: str) -> Any:
            job = jobs[name]
            return event(request_id=RequestId(name), dropped_tokens=0, next_prompt_tokens=job[0] + job[1])

        for name in servers:
            send(BackendChanged(backend=BackendId(name), is_up=True))
        for step in range(1, self.steps):
            now = step * STEP_S
            for stream, what in [event for server in servers.values() for event in server.step()]:
                name = stream.partition("/")[0]
                job = jobs[name]
                if stream != job[3]:
                    continue
                if what == "token":
                    job[1] += 1
                    send(Progressed(request_id=RequestId(name), output_tokens=1))
                else:
                    send(Finished(request_id=RequestId(name)) if what == "end" else ended(SliceEnded, name))
            for tenant, rate in rates.items():
                while rng.random() < rate:
                    name = f"req_{len(jobs)}"
                    length = rng.randint(5, 120)
                    jobs[name] = [rng.randint(5, 100), 0, length, ""]
                    spec = RequestSpec(
                        request_id=RequestId(name),
                        tenant=TenantId(tenant),
                        key=KeyId(rng.choice("xyz")),
                        tier=TierName(rng.choice(["chat", "batch", "batch", "night"])),
                        prompt_tokens=jobs[name][0],
                        max_new_tokens=200,
                        predicted_output_tokens=max(1, int(length * rng.uniform(*self.predicted))),
                    )
                    send(Arrived(request=spec))
        return self


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Case]:
    """Estimates by request, in place of refusals by them; nobody expires either."""
    seen: dict[str, Case] = {}

    def in_vain(self: Limits, request: Request, now: float) -> None:
        estimate_s = self.waits.least_s(request, now)
        if estimate_s is not None:
            seen[request.request_id] = Case(estimate_s, now)

    monkeypatch.setattr(Limits, "_in_vain", in_vain)
    monkeypatch.setattr(Limits, "watch", lambda self, request: None)
    return seen


def wrong(world: World) -> tuple[int, int]:
    """Estimates by which somebody would have been refused who did not wait so long, and all that say something."""
    bad = telling = 0
    for case in world.cases.values():
        telling += case.estimate_s > 1.0
        if case.waited_s is not None and case.estimate_s > CERTAIN * case.waited_s + 1.0:
            bad += 1
    return bad, telling


@pytest.mark.parametrize("policy", ["slo-fair", "vtc", "drr", "fifo"])
@pytest.mark.parametrize("seed", range(3))
def test_hardly_anybody_would_be_refused_who_could_have_been_served(
    policy: str, seed: int, watched: dict[str, Case]
) -> None:
    bad, telling = wrong(World(seed, policy, watched).run())
    assert telling > 150
    assert bad <= telling / 50


def test_in_one_line_the_estimate_is_close(watched: dict[str, Case]) -> None:
    World(0, "fifo", watched).run()
    waits = [case for case in watched.values() if case.waited_s is not None and case.estimate_s > 2.0]
    ratios = sorted((case.waited_s or 0.0) / case.estimate_s for case in waits)
    assert len(ratios) > 100
    assert ratios[len(ratios) // 20] > 0.75
    assert ratios[-len(ratios) // 20] < 1.33


@pytest.mark.parametrize("factor", [(0.05, 0.1), (10.0, 20.0)])
def test_predictions_that_are_all_wrong_are_seen_through(factor: tuple[float, float], watched: dict[str, Case]) -> None:
    world = World(0, "fifo", watched, predicted=factor).run()
    bad, telling = wrong(world)
    assert telling > 150
    assert bad <= telling / 50


def everything_is_ahead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tenant, "tokens_ahead", lambda self, request, aging_ratio: self.queued_tokens)


def predictions_are_true(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PredictionBias, "finished", lambda self, predicted, output: setattr(self, "ratio", 1.0))


@pytest.mark.parametrize(
    ("mutant", "policy", "predicted"),
    [(everything_is_ahead, "slo-fair", (0.3, 3.0)), (predictions_are_true, "fifo", (10.0, 20.0))],
)
def test_a_careless_estimate_is_caught(
    mutant: Any, policy: str, predicted: tuple[float, float], watched: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    bad, telling = wrong(World(0, policy, watched, predicted=predicted).run())
    assert bad > telling / 10
