"""From recordings to what ``fairlane simulate --json`` prints: means over the seeds.

{"suite", "seeds", "results": [{"policy", "metrics": {NAME: number or null},
                                "tenants": {NAME: {"weight", "requests", "ttft_s": {"p50", ...}, ...}}}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router_ext.sim.metrics import Summary, agent_completions, mean, percentile, summarize, ttfts
from router_ext.sim.recording import Recording


@dataclass(slots=True, kw_only=True)
class Outcomes:
    """Everything that was run of one suite.

    Attributes:
        by_policy: recordings in the order of the seeds.
        alone: by tenant: recordings of its requests alone, in the order of the seeds.
        capacity_rps: by policy, where it was looked for.
    """

    suite: str
    seeds: Sequence[int]
    by_policy: Mapping[str, Sequence[Recording]]
    alone: Mapping[str, Sequence[Recording]] = field(default_factory=dict)
    capacity_rps: Mapping[str, float] = field(default_factory=dict)


def result(outcomes: Outcomes) -> dict[str, Any]:
    """The JSON object."""
    alone_p99 = {
        name: [percentile(ttfts(recording, 0), 0.99) for recording in recordings]
        for name, recordings in outcomes.alone.items()
    }
    return {
        "suite": outcomes.suite,
        "seeds": list(outcomes.seeds),
        "results": [
            _of_policy(policy, recordings, alone_p99, outcomes.capacity_rps.get(policy))
            for policy, recordings in outcomes.by_policy.items()
        ],
    }


def _of_policy(
    policy: str,
    recordings: Sequence[Recording],
    alone_p99: Mapping[str, Sequence[float | None]],
    capacity_rps: float | None,
) -> dict[str, Any]:
    summaries = [summarize(recording) for recording in recordings]
    metrics: dict[str, Any] = {
        name: mean([summary.metrics[name] for summary in summaries]) for name in summaries[0].metrics
    }
    metrics["capacity_rps"] = capacity_rps
    if recordings[0].agents:
        # A ratio of two policies is then one of sums over the seeds, whatever number of agents each seed has.
        done = [seconds for recording in recordings for seconds in agent_completions(recording)]
        metrics["completion_mean_s"] = mean(done)
    tenants: dict[str, Any] = {}
    for info in recordings[0].tenants:
        tenant = tenants[info.name] = _mean_tenant([summary.tenants[info.name] for summary in summaries])
        if info.name in alone_p99:
            tenant["ttft_alone_ratio_p99"] = _ratio(summaries, info.name, alone_p99[info.name])
    return {"policy": policy, "metrics": metrics, "tenants": tenants}


def _mean_tenant(tenants: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for key, first in tenants[0].items():
        if isinstance(first, dict):
            means[key] = {level: mean([tenant[key][level] for tenant in tenants]) for level in first}
        else:
            means[key] = mean([tenant[key] for tenant in tenants])
    return means


def _ratio(summaries: Sequence[Summary], name: str, alone_p99: Sequence[float | None]) -> float | None:
    """Mean over the seeds of: p99 of the time to first token in company / alone."""
    ratios: list[float | None] = []
    for summary, alone in zip(summaries, alone_p99, strict=True):
        ttft_s: Any = summary.tenants[name]["ttft_s"]
        ratios.append(ttft_s["p99"] / alone if alone and ttft_s["p99"] is not None else None)
    return mean(ratios)
