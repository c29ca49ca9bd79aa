"""Every number of a result in plain words: what it is called, how it is written, which way is better."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router_ext.sim.report.scales import duration, percent


class Better(enum.Enum):
    """Which way a number is better; ``NEITHER`` if that depends, or if it says something about the machine."""

    HIGHER = 1
    LOWER = -1
    NEITHER = 0


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _fraction(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{digits}f}"


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of a result."""

    label: str
    better: Better
    written: Callable[[float], str]
    meaning: str

    def text(self, value: float | None) -> str:
        """As it is shown; a dash where there is none."""
        return "-" if value is None else self.written(value)

    def extremes(self, values: Mapping[str, float | None]) -> tuple[set[str], set[str]]:
        """Whose value is the best and whose the worst, as they are written; nobody's if no difference can be seen."""
        known = {name: value for name, value in values.items() if value is not None}
        if self.better is Better.NEITHER or len({self.written(value) for value in known.values()}) < 2:
            return set(), set()
        low, high = (
            {name for name, value in known.items() if self.written(value) == self.written(edge)}
            for edge in (min(known.values()), max(known.values()))
        )
        return (high, low) if self.better is Better.HIGHER else (low, high)


MEASURES: Mapping[str, Measure] = {
    "throughput_tokens_per_s": Measure(
        "tokens/s",
        Better.HIGHER,
        _whole,
        "Input tokens of requests that have shown a first token plus all output tokens, from 0 to the end of arrivals, "
        "over that time.",
    ),
    "accumulated_difference": Measure(
        "accumulated difference",
        Better.LOWER,
        _whole,
        "The furthest any two tenants were apart in delivered service per weight, counted from the start.",
    ),
    "accumulated_while_waiting": Measure(
        "difference while all wait",
        Better.LOWER,
        _whole,
        "Within one spell in which all tenants wait: the largest change, between two moments, of the difference of any "
        "two in service per weight. This is what the bound limits. Empty if they never all wait.",
    ),
    "bound": Measure(
        "bound on it",
        Better.NEITHER,
        _whole,
        "What the policy guarantees for the difference while both of two tenants wait: the largest over all pairs, "
        "from the pool's KV capacity, longest prompt, weights and bursts. Empty if the policy promises none.",
    ),
    "window_difference_mean": Measure(
        "window difference, mean",
        Better.LOWER,
        _fraction(2),
        "In 20 windows of 60 s, service per weight and second: what tenants lack to the one served most, or to what "
        "they asked for if that is less, summed over tenants; mean over the windows. Service of an answer is spread "
        "evenly from its first token to its last.",
    ),
    "window_difference_max": Measure(
        "window difference, largest", Better.LOWER, _fraction(2), "The same in the worst window."
    ),
    "share_error_60s_points": Measure(
        "share error, points",
        Better.LOWER,
        _fraction(2),
        "Percentage points by which a tenant's share of service missed its share of the weights, in the worst of "
        "consecutive windows of 60 s. Says something where everybody always waits.",
    ),
    "jain": Measure(
        "Jain's index",
        Better.HIGHER,
        _fraction(4),
        "1 if everybody got what is due to them: Jain's index of received service over the smaller of demand and fair "
        "share, at most 1 each.",
    ),
    "recomputed_ratio": Measure(
        "recomputed",
        Better.LOWER,
        percent,
        "Tokens prefilled again because of a preemption, prompt included, per output token delivered in the whole run.",
    ),
    "resumed_prefill_ratio": Measure(
        "prefilled again at slices",
        Better.LOWER,
        percent,
        "Tokens prefilled again where a sliced answer goes on, per output token delivered in the whole run.",
    ),
    "kv_occupancy": Measure("KV reserved", Better.HIGHER, percent, "Reserved share of the KV, mean over time."),
    "mean_running": Measure(
        "running", Better.HIGHER, _fraction(1), "Requests that run on the servers at once, mean over time."
    ),
    "ttft_p99_s": Measure(
        "TTFT p99, all",
        Better.LOWER,
        duration,
        "Arrival to first token over all requests of all tenants; one that has shown nothing when the run is over "
        "counts with what it has waited by then.",
    ),
    "completion_mean_s": Measure(
        "completion, mean",
        Better.LOWER,
        duration,
        "Arrival to last token of completed requests; where there are agents, arrival to the last token of the "
        "agent's last call.",
    ),
    "violations_ratio": Measure(
        "targets missed",
        Better.LOWER,
        percent,
        "Share of requests that missed their latency target or were refused, for the tenant where it is largest.",
    ),
    "capacity_rps": Measure(
        "capacity, req/s",
        Better.HIGHER,
        _fraction(2),
        "The highest arrival rate at which no tenant misses more than 1% of its targets.",
    ),
    "makespan_s": Measure("batch done after", Better.LOWER, duration, "Last completion of the batch tenant."),
    "unstarted": Measure(
        "not started",
        Better.LOWER,
        _whole,
        "Requests that had shown no token by the end of arrivals. Their waiting is in no percentile.",
    ),
    "refused": Measure("refused", Better.LOWER, _whole, "Requests turned away, on arrival or while they waited."),
    "sim_speed": Measure(
        "simulated s per CPU s", Better.NEITHER, _whole, "Speed of the simulation itself, which depends on the machine."
    ),
}
"""By their name in the JSON result, in the order in which they are shown."""

WORDS: Mapping[str, str] = {
    "service": "What a tenant has received: price of a prompt token x prompt tokens + price of an output token x "
    "output tokens. The prompt counts when the first token is seen, every output token once.",
    "due": "What a tenant would have if all service, at the pace at which it was delivered, had been dealt out by "
    "weight among those who wanted it at the time: nobody gets more than its requests ask for, nobody is owed anything "
    "for time in which it asked for nothing.",
    "fair line": "What is due per weight to a tenant that always wants more. Who asks for less stays below it, and "
    "rightly so.",
    "counter": "The scheduler's own account of a tenant: service over weight, raised to the smallest among those who "
    "wait when the tenant starts to wait, so that idling earns nothing.",
    "TTFT": "Time to first token: from arrival to the first token the client sees, queueing included. Of requests "
    "that were started by the end of arrivals.",
    "p50, p95, p99": "Half, 95% or 99% of the requests were at least so fast. Taken in each run, then averaged over "
    "the seeds.",
    "x alone": "TTFT p99 over the same tenant's p99 with nobody else on the same servers.",
    "waits": "A tenant waits if at least one of its requests stands in the router's queue or a server's own.",
    "share": "Of all service delivered by the end of arrivals.",
}
"""What else the report says, in plain words."""
