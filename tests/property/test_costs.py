"""Cost models: every token charged once, and the bound of each of them, in small pools where it is tight."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pytest

from router_ext.core import bounds
from router_ext.core.actions import Dispatch, Preempt
from router_ext.core.config import COST_MODELS, PoolConfig, build_pool
from router_ext.core.cost import CostModel, LinearCost, build_cost
from router_ext.core.events import Arrived, BackendChanged, Finished, Preempted, Progressed, RequestSpec, SliceEnded
from router_ext.core.ids import BackendId, KeyId, RequestId, TenantId, TierName
from router_ext.core.scheduler import Scheduler
from tests.property.harness import ALL_LAWS, Run, Scenario, scenario
from tests.property.oracle import SLACK
from tests.property.tgi_steps import StepServer, Stream

# The models' formulas, written down a second time: (prompt, output) -> service.
FORMULAS: dict[str, Callable[[int, int], float]] = {
    "linear": lambda p, q: p + 2.0 * q,
    "uncached": lambda p, q: p + 2.0 * q,
    "profiled": lambda p, q: 1.146 + 0.21 * p + 0.1008 * q + 0.003987 * p * q + 0.003247 * q * q,
    "step-time": lambda p, q: 35.8 + 0.2131 * p + sum(15.3 / 16 + 0.253 + 0.00216 * (p + k) for k in range(1, q + 1)),
    "kv-token-time": lambda p, q: p * q + q * (q + 1) / 2.0,
}


def pool(servers: dict[str, dict[str, int]], weights: dict[str, float], **knobs: Any) -> PoolConfig:
    backends = [
        {"backend": name, "max_input_tokens": 10_000, "max_total_tokens": 20_000, "max_sequences": 1, **numbers}
        for name, numbers in servers.items()
    ]
    return build_pool(
        pool={
            "name": "p",
            "min_slice_tokens": 8,
            "aging_ratio": 0.0,
            "headroom_ratio": 0.0,
            "stall_ratio": 0.0,
            **knobs,
        },
        backends=backends,
        tiers=[{"name": "batch", "rank": 1}, {"name": "chat", "rank": 0, "ttft_target_s": 0.2}],
        tenants=[{"tenant": name, "weight": weight} for name, weight in weights.items()],
    )


# --- what is charged -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Priced(Scenario):
    cost_model: str

    def config(self, rename: Callable[[str], str] = str) -> PoolConfig:
        return replace(super().config(rename), cost_model=self.cost_model, w_prompt=1.0, w_output=2.0)


@pytest.mark.parametrize("model", COST_MODELS)
@pytest.mark.parametrize("seed", range(2))
def test_whatever_becomes_of_a_request_each_of_its_tokens_is_charged_once(model: str, seed: int) -> None:
    """Slices, retries, cancelled and failed requests, servers that die: the sum is that of what was delivered."""
    values = {name: getattr(scenario(seed, with_faults=True), name) for name in Scenario.__dataclass_fields__}
    outcome = Run(Priced(**values, cost_model=model), ALL_LAWS & {"ledger", "audit", "client_fifo"}).go()
    expected: dict[str, float] = defaultdict(float)
    for job in outcome.jobs.values():
        if job.paid_in:
            expected[job.tenant] += FORMULAS[model](job.paid_in, job.paid_out)
    for tenant, service in expected.items():
        assert outcome.charged[tenant] == pytest.approx(service, rel=1e-9, abs=1e-6)
    assert sum(expected.values()) > 0.0


# --- the constant ----------------------------------------------------------------------------------------------------


def fullest(model: CostModel, tokens: int, most: int) -> list[float]:
    """By KV tokens: the largest decode charge of requests that hold no more together. Exhaustive."""
    best = [0.0] * (tokens + 1)
    for held in range(1, tokens + 1):
        best[held] = best[held - 1]
        for size in range(1, min(held, most - 1) + 1):
            for prompt in range(1, size + 1):
                best[held] = max(best[held], model.decode(prompt, size + 1 - prompt) + best[held - size])
    return best


MODELS = [
    LinearCost(prompt=1.0, output=2.0),
    LinearCost(prompt=5.0, output=1.0),
    CostModel(prompt=0.0, output=0.5, cross=1.0, square=0.5),
    CostModel(base=30.0, prompt=0.2, output=1.2, cross=0.02, square=0.01),
    CostModel(base=1.0, prompt=3.0, output=0.1, cross=0.4, square=0.0),
    CostModel(prompt=2.0, output=0.1, cross=0.0, square=0.3),
]


@pytest.mark.parametrize("model", MODELS, ids=range(len(MODELS)))
@pytest.mark.parametrize(("sizes", "sequences", "most"), [((17,), 1, 40), ((30,), 2, 20), ((11, 24), 1, 13)])
def test_no_full_pool_can_still_be_charged_more_than_the_constant(
    model: CostModel, sizes: tuple[int, ...], sequences: int, most: int
) -> None:
    servers = {f"bke_{i}": {"kv_tokens": size + 1} for i, size in enumerate(sizes)}
    config = pool(servers, {})
    limits = {"max_total_tokens": most, "max_input_tokens": most - 1, "max_sequences": sequences}
    config = replace(config, backends={b: replace(stated, **limits) for b, stated in config.backends.items()})
    tables = [fullest(model, size, most) for size in sizes]
    worst = one = 0.0
    for here, (size, table) in enumerate(zip(sizes, tables, strict=True)):
        others = sum(each[-1] for i, each in enumerate(tables) if i != here)
        for n in range(1, sequences + 1):
            for held in range(1, min(size // n, most - 1) + 1):
                for prompt in range(1, held + 1):
                    charge = n * model.service(prompt, held + 1 - prompt)
                    one = max(one, charge)
                    worst = max(worst, charge + table[size - n * held] + others)
    peak = model.peak_service(config)
    assert worst <= peak + SLACK
    assert peak <= worst + len(sizes) * one


def test_a_pool_without_kv_owes_nothing() -> None:
    for model in COST_MODELS:
        assert bounds.peak_service(pool({}, {}, cost_model=model)) == 0.0


# --- the bound -------------------------------------------------------------------------------------------------------


@dataclass
class Drift:
    """Largest gaps of a run in which everybody waits all the time, as shares of the stated bounds."""

    counter: float = 0.0
    pair: float = 0.0


def flood(seed: int, model: str, policy: str, *, steps: int = 250, contrast: bool = False) -> Drift:
    """A small pool of servers, every tenant with a queue that does not end; judged by the formulas above.

    ``contrast``: the first tenant sends requests that fill a server, the others small ones.
    """
    rng = random.Random(seed)
    weights = {f"ten_{i}": rng.choice([0.25, 1.0, 1.0, 4.0]) for i in range(rng.randint(2, 4))}
    numbers = {
        f"bke_{i}": {"kv_tokens": rng.randint(60, 400), "block_size": rng.choice([1, 4])}
        for i in range(1 if contrast else rng.randint(1, 3))
    }
    config = pool(numbers, weights, policy=policy, cost_model=model, **CHEAP)
    price = FORMULAS[model]
    servers = {name: StepServer(**each) for name, each in numbers.items()}
    room = min(server.usable() * server.block_size for server in servers.values()) - 4
    scheduler = Scheduler(config)
    for name in servers:
        scheduler.handle(BackendChanged(backend=BackendId(name), is_up=True), 0.0)
    jobs: dict[str, list[Any]] = {}
    """By request: tenant, prompt, output so far, length, most paid for, whether the prompt was, its stream."""
    waiting: dict[str, int] = dict.fromkeys(weights, 0)
    delivered: dict[str, float] = dict.fromkeys(weights, 0.0)
    lowest: dict[tuple[str, str], float] = {}
    highest: dict[tuple[str, str], float] = {}
    peak = {name: bounds.counter_bound(config, config.tenants[TenantId(name)]) or 0.0 for name in weights}
    worst = Drift()
    now = 0.0

    def send(event: Any) -> None:
        cut = []
        for action in scheduler.handle(event, now):
            if isinstance(action, Preempt):
                servers[action.backend].close(jobs[action.request_id][6])
                cut.append(action.request_id)
            elif isinstance(action, Dispatch):
                job = jobs[action.request_id]
                waiting[job[0]] -= 1
                assert waiting[job[0]] or not now, "a tenant ran out of work: it would be lifted"
                if not job[5]:
                    job[5] = True
                    charge(job[0], price(job[1], 0))
                job[6] = f"{action.request_id}/{action.segment}"
                servers[action.backend].open(Stream(job[6], job[1] + job[2], action.slice_tokens, job[3] - job[2]))
        for name in cut:
            go_on(name, Preempted)

    def go_on(name: str, event: type[SliceEnded] | type[Preempted]) -> None:
        job = jobs[name]
        waiting[job[0]] += 1
        send(event(request_id=RequestId(name), dropped_tokens=0, next_prompt_tokens=job[1] + job[2]))

    def charge(tenant: str, service: float) -> None:
        delivered[tenant] += service / weights[tenant]
        if now:
            floor = min(delivered.values())
            worst.counter = max(worst.counter, (delivered[tenant] - floor) / peak[tenant])
            for pair in combinations(weights, 2):
                gap = delivered[pair[0]] - delivered[pair[1]]
                lowest[pair] = min(lowest.get(pair, gap), gap)
                highest[pair] = max(highest.get(pair, gap), gap)
                drift = highest[pair] - lowest[pair]
                worst.pair = max(worst.pair, drift / (peak[pair[0]] + peak[pair[1]]))

    def arrive(tenant: str) -> None:
        prompt = rng.choice([1, rng.randint(1, max(1, room // 2))])
        cap = rng.choice([room - prompt, rng.randint(1, room - prompt)])
        if contrast:
            prompt, cap = 1, room - 1 if tenant == "ten_0" else rng.randint(1, 8)
        name = f"req_{len(jobs)}"
        jobs[name] = [tenant, prompt, 0, cap if contrast else rng.choice([cap, rng.randint(1, cap)]), 0, False, ""]
        waiting[tenant] += 1
        slice_tokens = 1024 if contrast else rng.choice([8, 64, 1024])
        spec = RequestSpec(
            request_id=RequestId(name),
            tenant=TenantId(tenant),
            key=KeyId("key_1"),
            tier=TierName(rng.choice(["batch", "chat"])),
            prompt_tokens=prompt,
            max_new_tokens=cap,
            slice_tokens=slice_tokens,
        )
        send(Arrived(request=spec))

    for tenant in weights:
        while waiting[tenant] < 120:
            arrive(tenant)
    # Who came first was served alone; the others were lifted.
    delivered.update({str(each.tenant): each.raw_counter for each in scheduler.stats().tenants})
    for step in range(1, steps):
        now = step * 0.05
        for stream, what in [event for server in servers.values() for event in server.step()]:
            name = stream.partition("/")[0]
            job = jobs[name]
            if stream != job[6]:
                continue
            if what == "token":
                job[2] += 1
                if job[2] > job[4]:
                    job[4] = job[2]
                    charge(job[0], price(job[1], job[2]) - price(job[1], job[2] - 1))
                send(Progressed(request_id=RequestId(name), output_tokens=1))
            elif what == "end":
                send(Finished(request_id=RequestId(name)))
            else:
                go_on(name, SliceEnded)
        for tenant in weights:
            while waiting[tenant] < 100:
                arrive(tenant)
    return worst


CHEAP = {"burst_ratio": 0.25, "backfill_ratio": 0.05}


@pytest.mark.parametrize("model", COST_MODELS)
@pytest.mark.parametrize("policy", ["slo-fair", "vtc"])
@pytest.mark.parametrize("seed", range(4))
def test_nobody_gets_further_ahead_than_the_bound_of_the_model(model: str, policy: str, seed: int) -> None:
    drift = flood(seed, model, policy)
    assert drift.counter <= 1.0 + SLACK
    assert drift.pair <= 1.0 + SLACK


@pytest.mark.parametrize(("model", "tight"), [("linear", 0.9), ("profiled", 0.9), ("kv-token-time", 0.9)])
def test_the_bound_is_no_larger_than_it_needs_to_be(model: str, tight: float) -> None:
    drifts = [flood(seed, model, "vtc", contrast=True) for seed in range(4)]
    assert max(max(drift.counter, drift.pair) for drift in drifts) > tight


@pytest.mark.parametrize("model", ["profiled", "kv-token-time"])
def test_the_constant_of_linear_prices_would_not_hold_a_convex_model(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CostModel, "peak_service", LinearCost.peak_service)
    assert any(flood(seed, model, "slo-fair").pair > 1.0 for seed in range(6))


def test_the_models_are_those_that_a_pool_may_name() -> None:
    for name in COST_MODELS:
        config = pool({"bke_0": {"kv_tokens": 100}}, {}, cost_model=name)
        assert build_cost(config).service(70, 30) == pytest.approx(FORMULAS[name](70, 30))
