"""The numbers of a recording, each with its definition. Pure functions of ``recording.Recording``.

Unless said, everything is taken from 0 to ``end_s``, the end of arrivals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router_ext.sim.recording import Recording

WINDOW_S = 60.0
WARM_UP_S = 30.0
_NUM_WINDOWS = 20

PERCENTILES = (0.5, 0.95, 0.99)


def percentile(values: Sequence[float], level: float) -> float | None:
    """Linear interpolation between closest ranks; None where there is nothing."""
    if not values:
        return None
    ordered = sorted(values)
    rank = level * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


# --- throughput and latency ----------------------------------------------------------------------------------------


def throughput(recording: Recording) -> float:
    """Input tokens of requests that have shown a first token plus all output tokens, per second."""
    samples = recording.samples
    tokens = sum(series[-1] for series in samples.prompt_tokens) + sum(series[-1] for series in samples.output_tokens)
    return tokens / recording.end_s


def ttfts(recording: Recording, tenant: int) -> list[float]:
    """Arrival to first token of the tenant's requests that were started by the end of arrivals."""
    requests = recording.requests
    return [
        first - arrival
        for owner, arrival, first in zip(requests.tenant, requests.arrival_s, requests.first_s, strict=True)
        if owner == tenant and first is not None and first <= recording.end_s
    ]


def waits(recording: Recording) -> list[float]:
    """Arrival to first token of every request that was not refused; of one that has shown nothing when the run is
    over, how long it has waited by then.
    """
    requests = recording.requests
    return [
        (recording.over_s if first is None else first) - arrival
        for arrival, first, is_refused in zip(requests.arrival_s, requests.first_s, requests.is_refused, strict=True)
        if not is_refused
    ]


def completions(recording: Recording, tenant: int | None = None) -> list[float]:
    """Arrival to last token of the requests that were completed within the run."""
    requests = recording.requests
    return [
        finish - arrival
        for owner, arrival, finish in zip(requests.tenant, requests.arrival_s, requests.finish_s, strict=True)
        if finish is not None and (tenant is None or owner == tenant)
    ]


def agent_completions(recording: Recording) -> list[float]:
    """Arrival to last call of the agents that were completed within the run."""
    return [finish - arrival for arrival, finish in recording.agents if finish is not None]


def num_unstarted(recording: Recording) -> int:
    """Requests that arrived, were not refused, and had shown nothing by the end of arrivals."""
    requests = recording.requests
    end = recording.end_s
    return sum(
        1
        for arrival, first, is_refused in zip(requests.arrival_s, requests.first_s, requests.is_refused, strict=True)
        if arrival <= end and (first is None or first > end) and not is_refused
    )


def makespan(recording: Recording) -> float | None:
    """Last completion of the batch tenant; None without one, or if something of it never completed."""
    requests = recording.requests
    finishes = [
        finish
        for owner, finish in zip(requests.tenant, requests.finish_s, strict=True)
        if recording.tenants[owner].is_batch
    ]
    known = [finish for finish in finishes if finish is not None]
    return max(known) if known and len(known) == len(finishes) else None


def violations(recording: Recording) -> dict[int, tuple[int, int]]:
    """By tenant with a target: requests that missed it, and requests whose target has passed.

    A request misses its TTFT target, or else its completion target, by being late, by having shown nothing when the
    target passed, or by being refused.
    """
    requests = recording.requests
    result: dict[int, tuple[int, int]] = {}
    for tenant, info in enumerate(recording.tenants):
        target = info.ttft_target_s if info.ttft_target_s is not None else info.completion_target_s
        if target is None:
            continue
        reached = requests.first_s if info.ttft_target_s is not None else requests.finish_s
        missed = total = 0
        for owner, arrival, instant in zip(requests.tenant, requests.arrival_s, reached, strict=True):
            if owner == tenant:
                if instant is not None and instant - arrival <= target:
                    total += 1
                elif arrival + target <= recording.over_s or instant is not None:
                    total += 1
                    missed += 1
        result[tenant] = (missed, total)
    return result


def violations_ratio(recording: Recording) -> float | None:
    """Share of requests that missed their target, in the tenant where it is largest."""
    ratios = [missed / total for missed, total in violations(recording).values() if total]
    return max(ratios, default=None)


# --- fairness ------------------------------------------------------------------------------------------------------


def window_differences(recording: Recording) -> list[float]:
    """The VTC paper's service difference, in 20 windows of 60 s evenly from 30 s to ``end_s`` - 60 s.

    Each answer's service, input + 2 x output, is spread evenly over first token to last (to the end, if it was not
    complete). In a window every tenant has received ``s`` and demanded what arrived, both per weight and second; the
    difference is ``sum of min(max s - s_i, abs(demand_i - s_i))``.
    """
    last = recording.end_s - WINDOW_S
    if last < WARM_UP_S:
        return []
    starts = [WARM_UP_S + index * (last - WARM_UP_S) / (_NUM_WINDOWS - 1) for index in range(_NUM_WINDOWS)]
    num_tenants = len(recording.tenants)
    received = [[0.0] * num_tenants for _ in starts]
    demanded = [[0.0] * num_tenants for _ in starts]
    requests = recording.requests
    rows = zip(
        requests.tenant,
        requests.arrival_s,
        requests.first_s,
        requests.finish_s,
        requests.input_tokens,
        requests.output_tokens,
        requests.wanted_tokens,
        strict=True,
    )
    w_prompt, w_output = recording.w_prompt, recording.w_output
    for tenant, arrival, first, finish, inputs, outputs, wanted in rows:
        demand = w_prompt * inputs + w_output * wanted
        service = w_prompt * inputs + w_output * outputs
        until = recording.over_s if finish is None else finish
        for index, start in enumerate(starts):
            end = start + WINDOW_S
            if start <= arrival <= end:
                demanded[index][tenant] += demand
            if first is None:
                continue
            if until <= first:
                if start <= first < end:
                    received[index][tenant] += service
                continue
            overlap = min(end, until) - max(start, first)
            if overlap > 0.0:
                received[index][tenant] += service * overlap / (until - first)
    scale = [1.0 / (info.weight * WINDOW_S) for info in recording.tenants]
    differences = []
    for got, wanted_by in zip(received, demanded, strict=True):
        shares = [value * scale[tenant] for tenant, value in enumerate(got)]
        most = max(shares)
        differences.append(
            sum(
                min(most - share, abs(wanted_by[tenant] * scale[tenant] - share)) for tenant, share in enumerate(shares)
            )
        )
    return differences


def share_error(recording: Recording) -> float | None:
    """Worst distance, in percentage points, of a tenant's share of service from its weight's share, over consecutive
    windows of 60 s from 30 s on. Means something where everybody is backlogged.
    """
    samples = recording.samples
    total_weight = sum(info.weight for info in recording.tenants)
    worst: float | None = None
    length = round(WINDOW_S / samples.interval_s)
    start = round(WARM_UP_S / samples.interval_s)
    while start + length < len(samples.at_s):
        end = start + length
        if samples.at_s[end] - samples.at_s[start] < WINDOW_S:
            # The last sample is that of the end, whenever it comes.
            break
        got = [
            recording.service(tenant, end) - recording.service(tenant, start)
            for tenant in range(len(recording.tenants))
        ]
        total = sum(got)
        if total > 0.0:
            for info, service in zip(recording.tenants, got, strict=True):
                error = 100.0 * abs(service / total - info.weight / total_weight)
                worst = error if worst is None or error > worst else worst
        start = end
    return worst


def jain(recording: Recording) -> float | None:
    """Jain's index of ``min(1, received / min(demand, fair share))``; fair share: by weight, of all delivered."""
    requests = recording.requests
    demand = [0.0] * len(recording.tenants)
    for tenant, arrival, inputs, wanted in zip(
        requests.tenant, requests.arrival_s, requests.input_tokens, requests.wanted_tokens, strict=True
    ):
        if arrival <= recording.end_s:
            demand[tenant] += recording.w_prompt * inputs + recording.w_output * wanted
    received = services(recording)
    total = sum(received)
    total_weight = sum(info.weight for info in recording.tenants)
    values = []
    for info, got, asked in zip(recording.tenants, received, demand, strict=True):
        owed = min(asked, total * info.weight / total_weight)
        if owed > 0.0:
            values.append(min(1.0, got / owed))
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares > 0.0 else None


def services(recording: Recording) -> list[float]:
    """Service delivered by the end of arrivals, by tenant."""
    return [recording.service(tenant, -1) for tenant in range(len(recording.tenants))]


# --- waste and occupancy -------------------------------------------------------------------------------------------


def recomputed_ratio(recording: Recording) -> float:
    """Tokens prefilled again because of a preemption, prompt included, per output token, over the whole run."""
    return recording.num_recomputed / recording.num_output if recording.num_output else 0.0


def resumed_prefill_ratio(recording: Recording) -> float:
    """Tokens prefilled again at slice continuations per output token, over the whole run."""
    return recording.num_continued / recording.num_output if recording.num_output else 0.0


def kv_occupancy(recording: Recording) -> float:
    """Reserved share of the KV, mean over time; over the whole run if that is drained by design (agents)."""
    usable = sum(recording.usable_tokens)
    if recording.agents:
        return recording.kv_seconds_over / (usable * recording.over_s)
    return recording.kv_seconds / (usable * recording.end_s)


def mean_running(recording: Recording) -> float:
    """Requests that run on the servers, mean over time."""
    return recording.running_seconds / recording.end_s


# --- all together --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of one recording, by the names of the JSON result."""

    metrics: dict[str, float | None]
    tenants: dict[str, dict[str, float | dict[str, float | None] | None]]


def summarize(recording: Recording) -> Summary:
    """All numbers of a recording."""
    windows = window_differences(recording)
    done = agent_completions(recording) if recording.agents else completions(recording)
    requests = recording.requests
    metrics: dict[str, float | None] = {
        "throughput_tokens_per_s": throughput(recording),
        "accumulated_difference": recording.accumulated_difference,
        "accumulated_while_waiting": recording.accumulated_while_waiting,
        "bound": recording.bound,
        "window_difference_mean": sum(windows) / len(windows) if windows else None,
        "window_difference_max": max(windows, default=None),
        "share_error_60s_points": share_error(recording),
        "jain": jain(recording),
        "recomputed_ratio": recomputed_ratio(recording),
        "resumed_prefill_ratio": resumed_prefill_ratio(recording),
        "kv_occupancy": kv_occupancy(recording),
        "mean_running": mean_running(recording),
        "ttft_p99_s": percentile(waits(recording), 0.99),
        "completion_mean_s": sum(done) / len(done) if done else None,
        "violations_ratio": violations_ratio(recording),
        "capacity_rps": None,
        "makespan_s": makespan(recording),
        "unstarted": float(num_unstarted(recording)),
        "refused": float(sum(requests.is_refused)),
        "sim_speed": recording.over_s / recording.cpu_s if recording.cpu_s else None,
    }
    received = services(recording)
    total = sum(received)
    tenants: dict[str, dict[str, float | dict[str, float | None] | None]] = {}
    for tenant, info in enumerate(recording.tenants):
        tenants[info.name] = {
            "weight": info.weight,
            "requests": float(requests.tenant.count(tenant)),
            "ttft_s": _percentiles(ttfts(recording, tenant)),
            "completion_s": _percentiles(completions(recording, tenant)),
            "tokens": float(recording.samples.prompt_tokens[tenant][-1] + recording.samples.output_tokens[tenant][-1]),
            "share": received[tenant] / total if total else None,
        }
    return Summary(metrics, tenants)


def _percentiles(values: list[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    return {f"p{round(level * 100)}": percentile(ordered, level) for level in PERCENTILES}


def mean(values: Sequence[float | None]) -> float | None:
    """Mean over seeds of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
