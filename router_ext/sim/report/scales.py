"""Axes: where values stand, and which of them are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_CLOCK_STEPS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1_200, 1_800, 3_600, 7_200, 14_400, 21_600, 43_200, 86_400)


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from ``low`` to ``high``. ``forward`` is ascending and finite between them.

    Vertical ones need no label: what they show is the same for all panels of a figure, and said in its heading.
    """

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    forward: Callable[[float], float]

    def ratios(self, values: Iterable[float]) -> list[float]:
        """Where values stand: 0 at the low end, 1 at the high end, beyond them outside."""
        forward = self.forward
        start = forward(self.low)
        span = forward(self.high) - start
        return [(forward(value) - start) / span for value in values]

    def ratio(self, value: float) -> float:
        """``ratios`` of one value."""
        return self.ratios((value,))[0]


def short(value: float) -> str:
    """Three digits and a unit: 42k, 1.25M."""
    for factor, unit in _UNITS:
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Three digits, in the unit that suits."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def percent(ratio: float) -> str:
    """0.995 as 99.5%: three digits."""
    return f"{ratio * 100:.3g}%"


def linear(high: float, label: str = "", *, written: Callable[[float], str] = short) -> Scale:
    """From 0 to ``high`` (to 1 if that is 0)."""
    high = high if high > 0.0 else 1.0
    step = _step(high / 4.5)
    ticks = tuple((index * step, written(index * step)) for index in range(int(high / step * (1 + 1e-9)) + 1))
    return Scale(label, 0.0, high, ticks, float)


def around_zero(extent: float) -> Scale:
    """From ``-extent`` to ``extent`` (1 if that is 0)."""
    half = linear(extent)
    below = tuple((-value, f"-{text}") for value, text in reversed(half.ticks[1:]))
    return Scale("", -half.high, half.high, (*below, *half.ticks), float)


def clock(end_s: float) -> Scale:
    """Time from 0 on, in seconds, minutes or hours."""
    end_s = end_s if end_s > 0.0 else 1.0
    step = next((step for step in _CLOCK_STEPS_S if end_s / step <= 7.0), _CLOCK_STEPS_S[-1] * math.ceil(end_s / 6e5))
    unit_s, unit = (1, "s") if end_s <= 150 else (60, "min") if end_s <= 10_800 else (3_600, "h")
    ticks = tuple((instant, f"{instant / unit_s:.3g}") for instant in range(0, int(end_s) + 1, step))
    return Scale(f"time, {unit}", 0.0, end_s, ticks, float)


def logarithmic(low: float, high: float, label: str, *, written: Callable[[float], str] = duration) -> Scale:
    """Powers of ten around ``low`` and ``high``, both above 0; at least one decade."""
    first = math.floor(math.log10(low) + 1e-9)
    last = max(first + 1, math.ceil(math.log10(high) - 1e-9))
    every = max(1, math.ceil((last - first) / 6))
    ticks = tuple((10.0**power, written(10.0**power)) for power in range(first, last + 1, every))
    least = 10.0**first

    def forward(value: float) -> float:
        return math.log10(value) if value > least else float(first)

    return Scale(label, least, 10.0**last, ticks, forward)


def counts(high: float) -> Scale:
    """Counts from 0 on, logarithmic above 1."""
    high = max(high, 10.0)
    powers = math.floor(math.log10(high) + 1e-9)
    every = max(1, math.ceil(powers / 5))
    ticks = ((0.0, "0"), *((10.0**power, short(10.0**power)) for power in range(0, powers + 1, every)))
    return Scale("", 0.0, high, ticks, math.log1p)


def nines() -> Scale:
    """Shares up to 99.5%, spread so that 90% to 99% is as long as 0 to 90%: tails are what matters."""
    ticks = tuple((ratio, percent(ratio)) for ratio in (0.0, 0.5, 0.9, 0.95, 0.99))
    return Scale("", 0.0, 0.995, ticks, lambda ratio: -math.log10(max(1e-9, 1.0 - ratio)))


def _step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least so large."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((factor * power for factor in (1.0, 2.0, 2.5, 5.0) if factor * power >= least * (1 - 1e-9)), 10 * power)
