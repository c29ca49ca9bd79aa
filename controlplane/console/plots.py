"""Plots with two axes, drawn on the server as SVG: lines over time, bars against an expectation, a calibration plot.

All are one template, ``charts/plot.html``: axes with their marks, lines, bars and dots, a legend, and the numbers as a
table, which is the text alternative. Colours are the classes ``s0`` to ``s7`` (areas) and ``l0`` to ``l7`` (lines, told
apart by their dashes as well).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.template.loader import render_to_string

from controlplane.console.charts import N_COLOURS, Plotted

Shown = Callable[[float], str]
_STAMP = "%d %b %H:%M"


@dataclass(slots=True)
class _Frame:
    """A plot being drawn: where numbers lie, and what was drawn so far."""

    width: int
    height: int
    top: float
    left: int = 52
    right: int = 14
    bottom: int = 30
    above: int = 12
    marks: list[dict[str, str]] = field(default_factory=list)
    labels: list[dict[str, str]] = field(default_factory=list)
    rules: list[dict[str, str]] = field(default_factory=list)
    lines: list[dict[str, str]] = field(default_factory=list)
    bars: list[dict[str, str]] = field(default_factory=list)
    dots: list[dict[str, str]] = field(default_factory=list)
    legend: list[dict[str, str]] = field(default_factory=list)

    def x(self, share: float) -> float:
        """Of a place from 0 (left) to 1."""
        return self.left + share * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        floor = self.height - self.bottom
        return floor - min(1.0, max(0.0, value / self.top)) * (floor - self.above)

    def scale(self, values: Sequence[float], shown: Shown) -> None:
        """Marks of the upright axis."""
        for value in values:
            self.marks.append({"y": f"{self.y(value):.1f}", "text": shown(value)})

    def rule(self, value: float, text: str) -> None:
        """A line across, such as what is expected."""
        y = self.y(value)
        self.rules.append({"y": f"{y:.1f}", "text_y": f"{y - 4:.1f}", "text": text})

    def drawn(
        self,
        *,
        title: str,
        summary: str,
        head: Sequence[str],
        rows: Sequence[Sequence[str]],
        key: str = "",
        data: str = "",
    ) -> str:
        context: dict[str, Any] = {
            "title": title,
            "summary": summary,
            "frame": self,
            "axis_y": self.height - self.bottom,
            "end_x": self.width - self.right,
            "label_y": self.height - 10,
            "mark_x": self.left - 7,
            "head": head,
            "rows": rows,
            "key": key,
            "data": data,
        }
        return render_to_string("console/charts/plot.html", context)


def over_time(
    *,
    title: str,
    times: Sequence[datetime],
    series: Sequence[tuple[str, Sequence[float | None]]],
    shown: Shown,
    rules: Sequence[tuple[float, str]] = (),
    top: float | None = None,
    stamp: str = "",
    plotted: Plotted | None = None,
) -> str:
    """Lines over time; a gap where there is no value.

    Args:
        series: name and values, one per time. shown: a value as text. rules: values to draw across, with a word.
        top: upper end of the axis; a round number above all values if None.
        stamp: how instants are written, as ``strftime`` takes it; day and minute if empty.
        plotted: of a chart that can be read off.
    """
    known = [v for _, values in series for v in values if v is not None]
    frame = _Frame(width=640, height=240, top=top or round_up(max(known, default=1.0) or 1.0))
    frame.scale([frame.top * i / 4 for i in range(5)], shown)
    for value, text in rules:
        frame.rule(value, text)
    places = _places(times)
    for index, (name, values) in enumerate(series):
        colour = index % N_COLOURS
        frame.legend.append({"colour": f"s{colour}", "line": f"l{colour}", "name": name})
        for run in _runs(values):
            points = [(frame.x(places[i]), frame.y(v)) for i in run if (v := values[i]) is not None]
            if len(points) > 1:
                frame.lines.append({"points": " ".join(f"{x:.1f},{y:.1f}" for x, y in points), "colour": f"l{colour}"})
        for i, said in enumerate(values):
            if said is not None:
                frame.dots.append(
                    {
                        "x": f"{frame.x(places[i]):.1f}",
                        "y": f"{frame.y(said):.1f}",
                        "colour": f"s{colour}",
                        "title": f"{times[i]:{stamp or _STAMP}}, {name}: {shown(said)}",
                    }
                )
    every = max(1, -(-len(times) // 5))
    end = -math.inf  # of the label before
    for i, instant in enumerate(times):
        x = frame.x(places[i])
        # A text is some 76 pixels wide: around a place at the end it would stick out of the picture.
        anchor, right = ("end", x) if x + 38 > frame.width else ("middle", x + 38)
        if i % every == 0 and right - 80 > end:
            end = right
            frame.labels.append({"x": f"{x:.1f}", "text": f"{instant:{stamp or _STAMP}}", "anchor": anchor})
    last = [f"{name} {shown(found)}" for name, values in series if (found := _last(values)) is not None]
    rows = [
        [f"{instant:{stamp or '%Y-%m-%d %H:%M'}}", *("–" if v[i] is None else shown(v[i] or 0.0) for _, v in series)]
        for i, instant in enumerate(times)
    ]
    return frame.drawn(
        title=title,
        summary=f"latest: {', '.join(last)}",
        head=["Time", *(name for name, _ in series)],
        rows=rows,
        key=plotted.key if plotted else "",
        data=plotted.data("lines", times, series, rules) if plotted else "",
    )


def calibration(*, title: str, points: Sequence[tuple[float, float]]) -> str:
    """Observed share of answers up to a quantile against its nominal level; on the diagonal is perfect."""
    frame = _Frame(width=320, height=300, top=1.0)
    frame.scale([0.0, 0.25, 0.5, 0.75, 1.0], _percent)
    frame.lines.append(
        {"points": f"{frame.x(0):.1f},{frame.y(0):.1f} {frame.x(1):.1f},{frame.y(1):.1f}", "colour": "ideal"}
    )
    path = [(frame.x(level), frame.y(share)) for level, share in ((0.0, 0.0), *points, (1.0, 1.0))]
    frame.lines.append({"points": " ".join(f"{x:.1f},{y:.1f}" for x, y in path), "colour": "l0"})
    for level, share in points:
        frame.dots.append(
            {
                "x": f"{frame.x(level):.1f}",
                "y": f"{frame.y(share):.1f}",
                "colour": "s0",
                "title": f"{share:.1%} of answers were up to the quantile of {level:.0%}",
            }
        )
    for level in (0.05, 0.25, 0.5, 0.75, 0.95):
        frame.labels.append({"x": f"{frame.x(level):.1f}", "text": _percent(level)})
    rows = [[_percent(level), f"{share:.1%}"] for level, share in points]
    said = ", ".join(f"{share:.0%} at {level:.0%}" for level, share in points)
    return frame.drawn(title=title, summary=f"observed {said}", head=["Nominal level", "Observed"], rows=rows)


def against_expected(
    *, title: str, labels: Sequence[str], edges: Sequence[str], shares: Sequence[float], expected: Sequence[float]
) -> str:
    """Bars of observed over expected shares, where 1 is perfect.

    Args:
        labels: of the bars, in words. edges: what lies between two bars, one fewer.
    """
    ratios = [share / wanted for share, wanted in zip(shares, expected, strict=True)]
    frame = _Frame(width=320, height=300, top=round_up(max(2.0, *ratios)))
    frame.scale([frame.top * i / 4 for i in range(5)], lambda value: f"{value:.3g}x")
    wide = 1.0 / len(labels)
    for i, (label, share, wanted, ratio) in enumerate(zip(labels, shares, expected, ratios, strict=True)):
        y = frame.y(ratio)
        frame.bars.append(
            {
                "x": f"{frame.x(i * wide) + 2:.1f}",
                "y": f"{y:.1f}",
                "width": f"{frame.x(wide) - frame.x(0) - 4:.1f}",
                "height": f"{frame.height - frame.bottom - y:.1f}",
                "colour": "s0",
                "title": f"{label}: {share:.1%} of answers, {wanted:.0%} expected",
            }
        )
    for i, edge in enumerate(edges, 1):
        frame.labels.append({"x": f"{frame.x(i * wide):.1f}", "text": edge})
    frame.rule(1.0, "expected")
    worst = max(range(len(ratios)), key=lambda i: abs(math.log(max(ratios[i], 1e-3))))
    rows = [[label, f"{s:.1%}", f"{w:.0%}"] for label, s, w in zip(labels, shares, expected, strict=True)]
    summary = f"furthest from expected: {labels[worst]} {shares[worst]:.1%} instead of {expected[worst]:.0%}"
    return frame.drawn(title=title, summary=summary, head=["Answer lies", "Observed", "Expected"], rows=rows)


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _places(times: Sequence[datetime]) -> list[float]:
    """From 0 to 1 by time; one alone is in the middle."""
    if len(times) < 2:
        return [0.5] * len(times)
    span = (times[-1] - times[0]).total_seconds()
    return [(instant - times[0]).total_seconds() / span for instant in times]


def _runs(values: Sequence[float | None]) -> list[list[int]]:
    """Indices of values without a gap between them."""
    runs: list[list[int]] = [[]]
    for i, value in enumerate(values):
        if value is not None:
            runs[-1].append(i)
        elif runs[-1]:
            runs.append([])
    return runs


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def round_up(value: float) -> float:
    """1, 2, 4, 5 or 8 times a power of ten, not below the value."""
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in (1, 2, 4, 5, 8) if step * power >= value), 10 * power)
