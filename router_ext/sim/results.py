"""From recordings to what ``fairlane simulate --json`` prints: means over the seeds.

{"suite", "seeds", "results": [{"policy", "predictor", "metrics": {NAME: number or null},
                                "tenants": {NAME: {"weight", "requests", "ttft_s": {"p50", ...}, ...}}}],
 "gains": [{"policy", "metric", "oracle_gain", "recovered": {PREDICTOR: share of it or null}}]}

``gains`` is there if true lengths were run and nothing predicted as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from router_ext.sim.metrics import Summary, agent_completions, mean, percentile, summarize, ttfts
from router_ext.sim.prediction import Predictor
from router_ext.sim.recording import Recording

LEAST_GAIN = 0.03
"""What true lengths gain less than this is not worth dividing by."""

_GAINS = ("throughput_tokens_per_s", "ttft_p99_s")


class Variant(NamedTuple):
    """What runs of one suite differ in, beside their seeds."""

    policy: str
    predictor: Predictor


@dataclass(slots=True, kw_only=True)
class Outcomes:
    """Everything that was run of one suite.

    Attributes:
        by_variant: recordings in the order of the seeds.
        alone: by tenant: recordings of its requests alone, in the order of the seeds.
        capacity_rps: by variant, where it was looked for.
    """

    suite: str
    seeds: Sequence[int]
    by_variant: Mapping[Variant, Sequence[Recording]]
    alone: Mapping[str, Sequence[Recording]] = field(default_factory=dict)
    capacity_rps: Mapping[Variant, float] = field(default_factory=dict)


def result(outcomes: Outcomes) -> dict[str, Any]:
    """The JSON object."""
    alone_p99 = {
        name: [percentile(ttfts(recording, 0), 0.99) for recording in recordings]
        for name, recordings in outcomes.alone.items()
    }
    results = [
        _of_variant(variant, recordings, alone_p99, outcomes.capacity_rps.get(variant))
        for variant, recordings in outcomes.by_variant.items()
    ]
    printed = {"suite": outcomes.suite, "seeds": list(outcomes.seeds), "results": results}
    if {Predictor.NONE, Predictor.ORACLE} <= {variant.predictor for variant in outcomes.by_variant}:
        printed["gains"] = _gains(results)
    return printed


def labels(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells these results apart: the policy, and the predictor where there are several."""
    if len({entry["predictor"] for entry in results}) < 2:
        return [entry["policy"] for entry in results]
    return [f"{entry['policy']}, {entry['predictor']}" for entry in results]


def _gains(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By policy and metric: what true lengths gain over no prediction, as a share of its value, and which share of
    that gain every other predictor recovers (None: there is nothing to recover).
    """
    gains: list[dict[str, Any]] = []
    for policy in dict.fromkeys(entry["policy"] for entry in results):
        of_policy = {entry["predictor"]: entry["metrics"] for entry in results if entry["policy"] == policy}
        for metric in _GAINS:
            values = {predictor: metrics[metric] for predictor, metrics in of_policy.items()}
            none, oracle = values.pop(Predictor.NONE), values.pop(Predictor.ORACLE)
            if not none or oracle is None:
                continue
            gain = abs(oracle - none) / none
            is_better = (oracle > none) is (metric == _GAINS[0])
            is_told = is_better and gain >= LEAST_GAIN
            gains.append(
                {
                    "policy": policy,
                    "metric": metric,
                    "oracle_gain": gain if is_better else -gain,
                    "recovered": {
                        predictor: (value - none) / (oracle - none) if is_told and value is not None else None
                        for predictor, value in values.items()
                    },
                }
            )
    return gains


def _of_variant(
    variant: Variant,
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
    return {"policy": variant.policy, "predictor": str(variant.predictor), "metrics": metrics, "tenants": tenants}


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
