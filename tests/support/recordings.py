"""Hand-made recordings: everything in them is known, so what a report says of them can be too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router_ext.sim.metrics import mean, summarize
from router_ext.sim.recording import Recording, Requests, Samples, TenantInfo
from router_ext.sim.report import Study
from router_ext.sim.suites import SuiteChoice


def recording(
    names: Sequence[str] = ("alpha", "beta"),
    *,
    policy: str = "slo-fair",
    seed: int = 1,
    end_s: int = 60,
    rates: Sequence[int] = (10, 20),
    num_requests: int = 20,
    ttft_s: Sequence[float | None] = (0.5, 2.0),
    targets_s: Sequence[float | None] = (),
    **fields: Any,
) -> Recording:
    """Tenants that each get ``rates`` output tokens per second and wait all the time.

    Every tenant sends ``num_requests`` requests, evenly over the run, which show their first token after ``ttft_s``
    plus a hundredth of a second per request before them; None: never.
    """
    num = len(names)
    at_s = [float(second) for second in range(end_s + 1)]
    rates = [rates[index % len(rates)] for index in range(num)]
    samples = Samples(
        at_s=at_s,
        prompt_tokens=[[0] * len(at_s) for _ in names],
        output_tokens=[[rate * second for second in range(end_s + 1)] for rate in rates],
        counters=[[100.0 * index + second for second in range(end_s + 1)] for index in range(num)],
        queued=[[5] * len(at_s) for _ in names],
        kv_tokens=[[500] * len(at_s), [250] * len(at_s)],
        running=[[4] * len(at_s), [2] * len(at_s)],
    )
    requests = Requests()
    rows = sorted(
        (end_s * number / num_requests, number, tenant) for number in range(num_requests) for tenant in range(num)
    )
    for arrival, number, tenant in rows:
        wait = ttft_s[tenant % len(ttft_s)]
        first = None if wait is None else arrival + wait + 0.01 * number
        requests.tenant.append(tenant)
        requests.arrival_s.append(arrival)
        requests.first_s.append(first)
        requests.finish_s.append(None if first is None else first + 1.0)
        requests.input_tokens.append(100)
        requests.output_tokens.append(50)
        requests.wanted_tokens.append(50)
        requests.agent.append(-1)
        requests.is_refused.append(False)
        requests.num_preempted.append(0)
    made: dict[str, Any] = {
        "suite": "overload",
        "policy": policy,
        "seed": seed,
        "tenants": [
            TenantInfo(
                name=name,
                weight=1.0,
                ttft_target_s=targets_s[index] if index < len(targets_s) else None,
                completion_target_s=None,
                is_batch=False,
            )
            for index, name in enumerate(names)
        ],
        "end_s": float(end_s),
        "over_s": float(end_s),
        "w_prompt": 1.0,
        "w_output": 2.0,
        "usable_tokens": [1_000, 1_000],
        "kv_seconds": 750.0 * end_s,
        "kv_seconds_over": 750.0 * end_s,
        "running_seconds": 6.0 * end_s,
        "requests": requests,
        "agents": [],
        "samples": samples,
        "accumulated_difference": 1_200.0,
        "accumulated_while_waiting": 1_100.0,
        "bound": 4_321.0,
        "counter_bound": 2_345.0,
        "largest_gap": 469.0,
        "num_recomputed": 0,
        "num_continued": 0,
        "num_prefilled": 0,
        "num_output": 1_800,
        "num_dispatched": 40,
        "num_preempted": 0,
        "digest": "",
        "cpu_s": 1.0,
    }
    return Recording(**{**made, **fields})


def study(*runs: Recording, command: str = "fairlane simulate overload") -> Study:
    """A study of these runs, by policy in the order in which the policies first appear."""
    recordings: dict[str, list[Recording]] = {}
    for run in runs:
        recordings.setdefault(run.policy, []).append(run)
    summaries = {policy: [summarize(run) for run in each] for policy, each in recordings.items()}
    results = [
        {
            "policy": policy,
            "metrics": {name: mean([summary.metrics[name] for summary in each]) for name in each[0].metrics},
            "tenants": {name: _means([summary.tenants[name] for summary in each]) for name in each[0].tenants},
        }
        for policy, each in summaries.items()
    ]
    return Study(
        suite=SuiteChoice(name="overload").build(),
        recordings=recordings,
        result={"suite": "overload", "seeds": [run.seed for run in runs], "results": results},
        settings={"predictor": "noisy"},
        command=command,
    )


def _means(tenants: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        key: {level: mean([each[key][level] for each in tenants]) for level in value}
        if isinstance(value, dict)
        else mean([each[key] for each in tenants])
        for key, value in tenants[0].items()
    }
