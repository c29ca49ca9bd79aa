"""One panel: axes, curves, bands and marks of one policy, drawn as SVG.

A panel is stated in the units of its data; only drawing knows of pixels. Curves are cut at the edges of the plot. They
are named at their end, so that nobody has to match colours with a legend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from router_ext.sim.report.scales import Scale
from router_ext.sim.report.svg import Element, element, path
from router_ext.sim.report.thinning import Point, extremes, straighten

WIDTH, HEIGHT = 480, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 130, 46, 38
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
_LABEL_GAP = 12.5
_TOLERANCE = 0.3
"""Pixels by which a curve may be off: nobody sees a third of one."""

Curve: TypeAlias = Sequence[tuple[float, float | None]]
"""(x, y) with x ascending; None where there is no value and the curve is broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve.

    Attributes:
        style: its class in the sheet: a colour.
        name: what it shows, for a pointer that rests on it and for its label.
        tenant: index of the tenant it belongs to, -1 for none.
        label: what is written at its end; None writes nothing.
        strong: parts of it that are drawn thick.
    """

    points: Curve
    style: str
    name: str
    tenant: int = -1
    label: str | None = None
    strong: Curve = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """Between two curves: (x, low, high)."""

    points: Sequence[tuple[float, float, float]]
    style: str
    tenant: int = -1
    has_x_spread: bool = False
    """The points are (low x, high x, y) instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A straight line across the plot, at a value of the x axis or of the y axis."""

    text: str
    x: float | None = None
    y: float | None = None
    style: str = "bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """A stretch of the y axis, measured at ``x``."""

    x: float
    low: float
    high: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A dot with a text for a pointer that rests on it."""

    x: float
    y: float
    style: str
    text: str
    tenant: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A label at the right that belongs to no place in the plot; they are listed from the top."""

    text: str
    style: str
    tenant: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """See the module.

    Attributes:
        name: the policy. note: one line under it. about: the picture for those who cannot see it.
        empty: why there is nothing to draw; axes and curves are left out then.
    """

    size: ClassVar[tuple[int, int]] = (WIDTH, HEIGHT)

    name: str
    note: str
    about: str
    x: Scale
    y: Scale
    lines: Sequence[Line] = ()
    areas: Sequence[Area] = ()
    rules: Sequence[Rule] = ()
    brackets: Sequence[Bracket] = ()
    marks: Sequence[Mark] = ()
    keys: Sequence[Key] = ()
    empty: str | None = None

    def draw(self, *, limit: int) -> list[Element]:
        """The contents of an SVG of ``size``, with at most ``limit`` points per curve."""
        heading = [
            element("text", class_="policy", x=_LEFT, y=16, text=self.name),
            element("text", class_="note", x=_LEFT, y=33, text=self.note),
        ]
        if self.empty is not None:
            place = {"x": _LEFT + PLOT_WIDTH / 2, "y": _TOP + PLOT_HEIGHT / 2}
            return [*heading, element("text", class_="note middle", text=self.empty, **place)]
        plot = element("svg", x=_LEFT, y=_TOP, width=PLOT_WIDTH, height=PLOT_HEIGHT)
        plot.extend(_plot(self, limit))
        return [*heading, *_axes(self), plot, *_labels(self)]


# --- around the plot -----------------------------------------------------------------------------------------------


def _axes(panel: Panel) -> Iterator[Element]:
    bottom = _TOP + PLOT_HEIGHT
    grid = [
        [(float(_LEFT), y), (_LEFT + PLOT_WIDTH * 1.0, y)] for y in (bottom - PLOT_HEIGHT * r for r in _places(panel.y))
    ]
    grid += [[(x, float(bottom)), (x, bottom + 4.0)] for x in (_LEFT + PLOT_WIDTH * r for r in _places(panel.x))]
    yield element("path", class_="grid", d=path(grid))
    for ratio, (_, text) in zip(_places(panel.y), panel.y.ticks, strict=True):
        yield element("text", class_="tick end", x=_LEFT - 5, y=bottom - PLOT_HEIGHT * ratio + 3.5, text=text)
    for ratio, (_, text) in zip(_places(panel.x), panel.x.ticks, strict=True):
        yield element("text", class_="tick middle", x=_LEFT + PLOT_WIDTH * ratio, y=bottom + 16, text=text)
    yield element("text", class_="tick middle", x=_LEFT + PLOT_WIDTH / 2, y=bottom + 31, text=panel.x.label)


def _places(scale: Scale) -> list[float]:
    return scale.ratios(value for value, _ in scale.ticks)


def _labels(panel: Panel) -> Iterator[Element]:
    """Names of the curves at their ends, moved apart where they would cover each other."""
    left = _LEFT + PLOT_WIDTH
    ends: list[tuple[float, float, str, Line]] = []
    for line in panel.lines:
        last = next((point for point in reversed(line.points) if point[1] is not None), None)
        if line.label is None or last is None or last[1] is None:
            continue
        ratio = panel.y.ratio(last[1])
        text = line.label if 0.0 <= ratio <= 1.0 else f"{line.label} {'↑' if ratio > 1.0 else '↓'}"
        y = _TOP + PLOT_HEIGHT * (1.0 - min(1.0, max(0.0, ratio)))
        ends.append((y, _LEFT + PLOT_WIDTH * panel.x.ratio(last[0]), text, line))
    ends.sort(key=lambda end: end[0])
    for (wanted, x, text, line), y in zip(ends, _apart([end[0] for end in ends]), strict=True):
        leader = path([[(x + 1, wanted), (left + 1, wanted), (left + 7, y)]])
        far = " far" if x < left - 1 else ""
        yield element("path", class_=f"leader{far} {line.style}", d=leader, data_tenant=_data(line.tenant))
        yield _label(left + 9, y + 3.5, text, line.style, line.tenant)
    for index, key in enumerate(panel.keys):
        yield _label(left + 9, _TOP + 9 + _LABEL_GAP * index, key.text, key.style, key.tenant)


def _label(x: float, y: float, text: str, style: str, tenant: int) -> Element:
    return element("text", class_=f"label {style}", x=x, y=y, text=text, data_tenant=_data(tenant))


def _apart(wanted: Sequence[float]) -> list[float]:
    """Ascending places at least a label apart, near the ascending ones wanted, above the lower edge if they can be."""
    places: list[float] = []
    for y in wanted:
        places.append(max(y, places[-1] + _LABEL_GAP) if places else y)
    limit = float(_TOP + PLOT_HEIGHT)
    for index in reversed(range(len(places))):
        places[index] = min(places[index], limit)
        limit = places[index] - _LABEL_GAP
    return places


def _data(tenant: int) -> str | None:
    return None if tenant < 0 else str(tenant)


# --- inside it -----------------------------------------------------------------------------------------------------


def _plot(panel: Panel, limit: int) -> Iterator[Element]:
    for area in panel.areas:
        yield element(
            "path", class_=f"area {area.style}", d=_outline(panel, area, limit), data_tenant=_data(area.tenant)
        )
    rules = [_rule(panel, rule) for rule in panel.rules]
    yield from (line for line, _ in rules)
    for line in panel.lines:
        name = element("title", text=line.name)
        is_weak = "weak " if line.strong else ""
        data = _path(panel, line.points, limit)
        yield element("path", name, class_=f"line {is_weak}{line.style}", d=data, data_tenant=_data(line.tenant))
        if line.strong:
            data = _path(panel, line.strong, limit)
            yield element("path", class_=f"line strong {line.style}", d=data, data_tenant=_data(line.tenant))
    for bracket in panel.brackets:
        yield from _bracket(panel, bracket)
    for mark in panel.marks:
        title = element("title", text=mark.text)
        x, y = _point(panel, mark.x, mark.y)
        yield element("circle", title, class_=f"mark {mark.style}", cx=x, cy=y, r=3, data_tenant=_data(mark.tenant))
    yield from (text for _, text in rules)


def _point(panel: Panel, x: float, y: float) -> Point:
    return PLOT_WIDTH * panel.x.ratio(x), PLOT_HEIGHT * (1.0 - panel.y.ratio(y))


def _path(panel: Panel, curve: Curve, limit: int) -> str:
    """Path data of a curve, one run per unbroken part; short parts get their share of the points."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in curve:
        if y is None:
            if runs[-1]:
                runs.append([])
        else:
            runs[-1].append((x, y))
    total = sum(map(len, runs))
    return path(_thinned(panel, run, max(4, limit * len(run) // total)) for run in runs if run)


def _thinned(panel: Panel, points: Sequence[tuple[float, float]], limit: int) -> Sequence[Point]:
    return straighten(_pixels(panel, extremes(points, limit)), _TOLERANCE)


def _pixels(panel: Panel, points: Sequence[tuple[float, float]]) -> list[Point]:
    xs = panel.x.ratios(x for x, _ in points)
    ys = panel.y.ratios(y for _, y in points)
    # Curves that leave the plot end a plot's height outside it: far coordinates would cost bytes and show nothing.
    return [(PLOT_WIDTH * x, PLOT_HEIGHT * (1.0 - min(2.0, max(-1.0, y)))) for x, y in zip(xs, ys, strict=True)]


def _outline(panel: Panel, area: Area, limit: int) -> str:
    if area.has_x_spread:
        near = _pixels(panel, [(low, y) for low, _, y in area.points])
        far = _pixels(panel, [(high, y) for _, high, y in area.points])
    else:
        near = list(_thinned(panel, [(x, low) for x, low, _ in area.points], limit))
        far = list(_thinned(panel, [(x, high) for x, _, high in area.points], limit))
    return path([[*near, *reversed(far)]], is_closed=True)


def _rule(panel: Panel, rule: Rule) -> tuple[Element, Element]:
    """The line, and its text, which belongs above all curves."""
    if rule.x is not None:
        x = PLOT_WIDTH * panel.x.ratio(rule.x)
        side, gap = (" end", -4) if x > PLOT_WIDTH / 2 else ("", 4)
        run = [(x, 0.0), (x, float(PLOT_HEIGHT))]
        text = element("text", class_=f"tick halo{side}", x=x + gap, y=10, text=rule.text)
    else:
        y = PLOT_HEIGHT * (1.0 - panel.y.ratio(rule.y or 0.0))
        run = [(0.0, y), (float(PLOT_WIDTH), y)]
        text = element("text", class_="tick halo", x=4, y=y + (13 if y < 14 else -4), text=rule.text)
    return element("path", class_=f"rule {rule.style}", d=path([run])), text


def _bracket(panel: Panel, bracket: Bracket) -> Iterator[Element]:
    x, top = _point(panel, bracket.x, bracket.high)
    _, bottom = _point(panel, bracket.x, bracket.low)
    ends = [[(x, max(-9.0, top)), (x, bottom)], [(x - 3, bottom), (x + 3, bottom)], [(x - 3, top), (x + 3, top)]]
    yield element("path", class_="rule measure", d=path(ends))
    yield element("text", class_="tick halo", x=x + 6, y=min(PLOT_HEIGHT - 3.0, bottom + 9), text=bracket.text)
