"""One number of every policy over the load: a panel per policy, with all others in grey behind its curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router_ext.sim.report.figures import Figure, Table
from router_ext.sim.report.glossary import Measure
from router_ext.sim.report.panels import Line, Mark, Panel
from router_ext.sim.report.scales import Scale, linear, logarithmic
from router_ext.sim.report.study import REST

_AIR = 1.04
_LOGARITHMIC_FROM = 20.0


def over_load(
    measure: Measure, unit: str, rates: Sequence[float], values: Mapping[str, Sequence[float | None]]
) -> Figure:
    """The figure.

    Args:
        unit: of the rates. values: by policy, one per rate; None where there is none.
    """
    known = [value for row in values.values() for value in row if value is not None]
    x = linear(_AIR * max(rates), f"load, {unit}")
    y = _scale(known, measure)
    return Figure(
        name="load",
        title="Over the load",
        axis=measure.label,
        caption=f"{measure.meaning} Means over the seeds; the other policies in grey.",
        drawings=[_panel(policy, measure, rates, values, x, y) for policy in values],
        table=Table(
            header=["policy", *(f"{rate:g} {unit}" for rate in rates)],
            rows=[[policy, *map(measure.text, row)] for policy, row in values.items()],
        ),
    )


def _scale(known: Sequence[float], measure: Measure) -> Scale:
    low, high = min(known, default=0.0), max(known, default=1.0)
    if low > 0.0 and high / low >= _LOGARITHMIC_FROM:
        return logarithmic(low, high, "", written=measure.written)
    return linear(_AIR * high, written=measure.written)


def _panel(
    policy: str,
    measure: Measure,
    rates: Sequence[float],
    values: Mapping[str, Sequence[float | None]],
    x: Scale,
    y: Scale,
) -> Panel:
    others = [
        Line(points=list(zip(rates, row, strict=True)), style=REST, name=other)
        for other, row in values.items()
        if other != policy
    ]
    own = list(zip(rates, values[policy], strict=True))
    return Panel(
        name=policy,
        note=f"from {measure.text(own[0][1])} to {measure.text(own[-1][1])}",
        about=", ".join(f"at {rate:g}: {measure.text(value)}" for rate, value in own),
        x=x,
        y=y,
        lines=[*others, Line(points=own, style="s0", name=policy, label=measure.text(own[-1][1]))],
        marks=[
            Mark(x=rate, y=value, style="s0", text=f"{rate:g}: {measure.text(value)}")
            for rate, value in own
            if value is not None
        ],
        empty=None if any(value is not None for _, value in own) else "no value",
    )
