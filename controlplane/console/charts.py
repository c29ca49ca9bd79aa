"""Pictures drawn on the server as SVG: they need no script, print well, and follow the page's colours.

Geometry is computed here, drawn by ``templates/console/charts``. Every chart has a title for screen readers; colours
are the classes ``s0`` to ``s7`` of the sheet, by position. A chart over time with a ``key`` also carries what
``static/console/charts.js`` makes a plot of, with a cursor and zoom, which then stands in the picture's place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from django.template.loader import render_to_string

N_COLOURS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One row of ``share_bars``: ratios from 0 to 1."""

    label: str
    delivered: float
    entitled: float


def colour(index: int) -> str:
    """Class of the ``index``-th series."""
    return f"s{index % N_COLOURS}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plotted:
    """What the script needs besides the numbers: a ``key`` that no other chart of the page has and that stays when it
    is refreshed, the name of the zone in which times are shown, and the unit of values, ``s`` or none."""

    key: str
    zone: str = "UTC"
    unit: str = ""

    def data(
        self,
        kind: str,
        times: Sequence[datetime],
        series: Sequence[tuple[str, Sequence[float | None]]],
        rules: Sequence[tuple[float, str]] = (),
    ) -> str:
        """Of ``lines`` or stacked ``bars``, as JSON. Times are Unix seconds; a value that is not known is null."""
        return json.dumps(
            {
                "kind": kind,
                "zone": self.zone,
                "unit": self.unit,
                "times": [instant.timestamp() for instant in times],
                "series": [{"name": name, "values": values} for name, values in series],
                "rules": rules,
            },
            separators=(",", ":"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """When bars begin, oldest first, and each in full words: for a chart that can be read off.

    ``n_begun``: bars that are not of the future, of which nothing is known.
    """

    plotted: Plotted
    times: Sequence[datetime]
    stamps: Sequence[str]
    n_begun: int


def stacked_bars(
    *, title: str, days: Sequence[str], series: Sequence[tuple[str, Sequence[float]]], bars: Bars | None = None
) -> str:
    """One bar a day, one segment per series.

    Args:
        days: labels of the bars, oldest first. series: name and values, one per day; names may repeat.
        bars: of a chart that can be read off; it has its numbers as a table.
    """
    width, height, bottom, left = 900, 230, 26, 64
    top = max((sum(values[i] for _, values in series) for i in range(len(days))), default=0.0) or 1.0
    step = (width - left) / max(1, len(days))
    bar = max(2.0, min(48.0, step * 0.7))
    segments = []
    for i, day in enumerate(days):
        y = float(height - bottom)
        for j, (name, values) in enumerate(series):
            tall = (height - bottom - 12) * values[i] / top
            y -= tall
            if tall > 0:
                segments.append(
                    {
                        "x": f"{left + i * step + (step - bar) / 2:.1f}",
                        "y": f"{y:.1f}",
                        "width": f"{bar:.1f}",
                        "height": f"{tall:.1f}",
                        "colour": colour(j),
                        "title": f"{day}, {name}: {values[i]:,.0f}",
                    }
                )
    every = max(1, -(-len(days) // 12))
    context = {
        "title": title,
        "width": width,
        "height": height,
        "left": left,
        "axis_y": height - bottom,
        "label_x": left - 6,
        "label_y": height - 8,
        "top": _short(top),
        "segments": segments,
        "labels": [
            {"x": f"{left + (i + 0.5) * step:.1f}", "text": day} for i, day in enumerate(days) if i % every == 0
        ],
        "legend": [{"colour": colour(i), "name": name} for i, (name, _) in enumerate(series)],
    }
    if bars is not None:
        known = [(name, [v if i < bars.n_begun else None for i, v in enumerate(values)]) for name, values in series]
        context |= {
            "key": bars.plotted.key,
            "data": bars.plotted.data("bars", bars.times, known),
            "head": ["Time", *(name for name, _ in series)],
            "rows": [
                [stamp, *("–" if (v := values[i]) is None else f"{v:,.0f}" for _, values in known)]
                for i, stamp in enumerate(bars.stamps)
            ],
        }
    return render_to_string("console/charts/stacked_bars.html", context)


def timeline(*, title: str, moments: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    """When a request waited and where it ran: one row for waiting, one per backend, the first token as a mark.

    Args:
        moments: ``MomentRecord`` as builtins, in order. names: of backends, by id.
    """
    row, left, width = 26, 170, 900
    rows = ["waiting", *dict.fromkeys(m["backend"] for m in moments if m["step"] == "dispatched" and m["backend"])]
    whole = max((m["at_s"] for m in moments), default=0.0) or 1.0
    scale = (width - left - 20) / whole
    spans, marks = [], []
    for moment, after in pairwise(moments):
        where = moment["backend"] if moment["step"] in ("dispatched", "first_token") else "waiting"
        index = rows.index(where) if where in rows else 0
        long = after["at_s"] - moment["at_s"]
        spans.append(
            {
                "x": f"{left + moment['at_s'] * scale:.1f}",
                "y": index * row + 6,
                "width": f"{max(1.0, long * scale):.1f}",
                "colour": colour(index - 1) if index else "track",
                "title": f"{long:.3f} s: {moment['text']}",
            }
        )
        if after["step"] == "first_token":
            marks.append({"x": f"{left + after['at_s'] * scale:.1f}", "title": f"first token at {after['at_s']:.3f} s"})
    context = {
        "title": title,
        "width": width,
        "height": len(rows) * row + 24,
        "label_x": left - 8,
        "mark_height": len(rows) * row,
        "end_x": width - 20,
        "end_y": len(rows) * row + 16,
        "left": left,
        "whole": f"{whole:.3f} s",
        "rows": [{"y": i * row + 19, "text": names.get(name, name)[:24]} for i, name in enumerate(rows)],
        "spans": spans,
        "marks": marks,
    }
    return render_to_string("console/charts/timeline.html", context)


def share_bars(*, title: str, shares: Sequence[Share]) -> str:
    """Delivered share as a bar, entitled share as a mark on it; the largest of them takes the whole width."""
    row, left, width = 26, 170, 640
    span = width - left - 110
    longest = max((max(share.delivered, share.entitled) for share in shares), default=0.0) or 1.0
    rows = [
        {
            "label": share.label[:24],
            "text_y": i * row + 16,
            "bar_y": i * row + 4,
            "mark_y": i * row + 1,
            "delivered": f"{span * max(0.0, share.delivered) / longest:.1f}",
            "entitled": f"{left + span * max(0.0, share.entitled) / longest:.1f}",
            "colour": colour(i),
            "text": f"{share.delivered:.1%} of {share.entitled:.1%}",
        }
        for i, share in enumerate(shares)
    ]
    context = {"title": title, "width": width, "height": max(1, len(shares)) * row + 4, "left": left, "span": span,
               "text_x": width - 100, "rows": rows}  # fmt: skip
    return render_to_string("console/charts/share_bars.html", context)


def meter(*, title: str, ratio: float) -> str:
    """A ratio from 0 to 1 as a bar."""
    context = {"title": f"{title}: {ratio:.0%}", "filled": f"{200 * min(1.0, max(0.0, ratio)):.1f}"}
    return render_to_string("console/charts/meter.html", context)


def _short(value: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"
