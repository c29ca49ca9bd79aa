"""TGI's Prometheus page: the same names, labels, buckets and spelling; a metric appears with its first write."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

_HELP = {
    "tgi_request_count": "Total number of requests",
    "tgi_request_success": "Number of successful requests",
    "tgi_batch_inference_count": "Inference calls per method (prefill or decode)",
    "tgi_batch_inference_success": "Number of successful inference calls per method (prefill or decode)",
    "tgi_batch_current_max_tokens": "Maximum tokens for the current batch",
    "tgi_batch_current_size": "Current batch size",
    "tgi_queue_size": "Current queue size",
    "tgi_request_max_new_tokens": "Maximum new tokens per request",
    "tgi_request_skipped_tokens": "Speculated tokens per request",
    "tgi_request_validation_duration": "Request validation duration",
    "tgi_batch_forward_duration": "Batch forward duration per method (prefill or decode)",
    "tgi_request_inference_duration": "Request inference duration",
    "tgi_batch_next_size": "Batch size of the next batch",
    "tgi_request_queue_duration": "Request queue duration",
    "tgi_batch_decode_duration": "Time spent decoding a batch per method (prefill or decode)",
    "tgi_batch_inference_duration": "Batch inference duration",
    "tgi_request_mean_time_per_token_duration": "Mean time per token per request",
    "tgi_request_input_length": "Input token length per request",
    "tgi_batch_filter_duration": (
        "Time spent filtering batches and sending generated tokens per method (prefill or decode)"
    ),
    "tgi_request_duration": "Request duration",
    "tgi_request_generated_tokens": "Generated tokens per request",
}
_QUANTILES = ("0", "0.5", "0.9", "0.95", "0.99", "0.999", "1")


def _durations() -> list[float]:
    """35 steps of factor 1.5 from 0.15 ms, multiplied up one by one as TGI does (the rounding shows in the labels)."""
    bounds, value = [], 0.0001
    for _ in range(35):
        value *= 1.5
        bounds.append(value)
    return bounds


def _linear(limit: int) -> list[float]:
    return [limit / 100 * (n + 1) for n in range(100)]


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


class Metrics:
    """Counters, gauges and histograms keyed by name and one optional label pair."""

    def __init__(self, *, max_input_tokens: int, max_total_tokens: int) -> None:
        durations = _durations()
        tokens = _linear(max_total_tokens)
        self._bounds: dict[str, Sequence[float]] = {
            "tgi_request_input_length": _linear(max_input_tokens),
            "tgi_request_max_new_tokens": tokens,
            "tgi_request_generated_tokens": tokens,
            "tgi_batch_next_size": [float(n) for n in range(1, 1025)],
        }
        self._durations = durations
        self._counters: dict[tuple[str, str], int] = {}
        self._gauges: dict[str, float] = {}
        self._histograms: dict[tuple[str, str], tuple[list[int], list[float]]] = {}
        self._skipped = 0

    def count(self, name: str, label: str = "", by: int = 1) -> None:
        """Add to a counter. ``label`` is written out, for example ``err="dropped"``."""
        key = (name, label)
        self._counters[key] = self._counters.get(key, 0) + by

    def gauge(self, name: str, value: float) -> None:
        self._gauges[name] = value

    def gauge_value(self, name: str) -> float:
        return self._gauges.get(name, 0)

    def observe(self, name: str, value: float, label: str = "") -> None:
        key = (name, label)
        bounds = self._bounds.get(name, self._durations)
        found = self._histograms.get(key)
        if found is None:
            found = self._histograms[key] = ([0] * (len(bounds) + 1), [0.0])
        found[0][bisect.bisect_left(bounds, value)] += 1
        found[1][0] += value

    def skipped(self, steps: int) -> None:
        """Decode steps without speculation: a summary of zeros."""
        self._skipped += steps

    def render(self) -> str:
        lines: list[str] = []
        for name in dict.fromkeys(name for name, _ in self._counters):
            _head(lines, name, "counter")
            for (other, label), value in self._counters.items():
                if other == name:
                    lines.append(f"{name}{{{label}}} {value}" if label else f"{name} {value}")
            lines.append("")
        for name, level in self._gauges.items():
            _head(lines, name, "gauge")
            lines += [f"{name} {_number(level)}", ""]
        if self._skipped:
            name = "tgi_request_skipped_tokens"
            _head(lines, name, "summary")
            lines += [f'{name}{{quantile="{q}"}} 0' for q in _QUANTILES]
            lines += [f"{name}_sum 0", f"{name}_count {self._skipped}", ""]
        for name in dict.fromkeys(name for name, _ in self._histograms):
            _head(lines, name, "histogram")
            for (other, label), (counts, total) in self._histograms.items():
                if other == name:
                    self._histogram(lines, name, label, counts, total[0])
            lines.append("")
        return "\n".join(lines) + "\n" if lines else ""

    def _histogram(self, lines: list[str], name: str, label: str, counts: list[int], total: float) -> None:
        prefix = f"{label}," if label else ""
        running = 0
        for bound, count in zip(self._bounds.get(name, self._durations), counts, strict=False):
            running += count
            lines.append(f'{name}_bucket{{{prefix}le="{_number(bound)}"}} {running}')
        running += counts[-1]
        lines.append(f'{name}_bucket{{{prefix}le="+Inf"}} {running}')
        suffix = f"{{{label}}}" if label else ""
        lines += [f"{name}_sum{suffix} {_number(total)}", f"{name}_count{suffix} {running}"]


def _head(lines: list[str], name: str, kind: str) -> None:
    if name in _HELP:
        lines.append(f"# HELP {name} {_HELP[name]}")
    lines.append(f"# TYPE {name} {kind}")
