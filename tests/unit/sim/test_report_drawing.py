"""Curves, axes and colours of the report's pictures."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from router_ext.sim.report.figures import sheet
from router_ext.sim.report.scales import (
    Scale,
    around_zero,
    clock,
    counts,
    duration,
    linear,
    logarithmic,
    nines,
    short,
)
from router_ext.sim.report.svg import element, number, path, serialize
from router_ext.sim.report.thinning import Point, extremes, straighten

# --- curves --------------------------------------------------------------------------------------------------------


def curve(kind: str, seed: int, num: int = 2_000) -> list[Point]:
    rng = random.Random(f"{kind}:{seed}")
    y = 0.0
    points = []
    for index in range(num):
        match kind:
            case "rising":
                y += rng.random()
            case "noise":
                y = rng.uniform(0.0, 100.0)
            case "steps":
                y = 50.0 * (index // 97 % 2)
            case "spikes":
                y = 100.0 if rng.random() < 0.002 else 1.0
        points.append((index * 0.15, y))
    return points


def worst_error(points: Sequence[Point], kept: Sequence[Point]) -> float:
    """How far the drawn line is off any point, in y."""
    segments = iter(pairwise(kept))
    (x0, y0), (x1, y1) = next(segments)
    worst = 0.0
    for x, y in points:
        while x > x1:
            (x0, y0), (x1, y1) = next(segments)
        drawn = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        worst = max(worst, abs(drawn - y))
    return worst


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["rising", "noise", "steps", "spikes"])
def test_what_is_left_out_is_near_the_line(kind: str, seed: int) -> None:
    points = curve(kind, seed)
    kept = straighten(points, 0.3)
    assert worst_error(points, kept) <= 0.3 + 1e-9
    assert len(kept) <= len(points)


def test_a_straight_line_is_two_points() -> None:
    assert straighten([(x, 3.0 * x) for x in range(1_000)], 0.3) == [(0, 0.0), (999, 2_997.0)]


def keeps_extremes(method: Callable[[Sequence[Point]], Sequence[Point]], points: Sequence[Point]) -> bool:
    kept = method(points)
    ys, kept_ys = [y for _, y in points], [y for _, y in kept]
    return (
        kept[0] == points[0]
        and kept[-1] == points[-1]
        and max(ys) - max(kept_ys) <= 0.3
        and min(kept_ys) - min(ys) <= 0.3
        and len(kept) <= 120
        and all(first[0] <= second[0] for first, second in pairwise(kept))
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["rising", "noise", "steps", "spikes"])
def test_extremes_stay_within_the_limit(kind: str, seed: int) -> None:
    assert keeps_extremes(lambda points: straighten(extremes(points, 120), 0.3), curve(kind, seed))


def test_every_twentieth_point_would_lose_them() -> None:
    assert not all(
        keeps_extremes(lambda points: [*points[::20], points[-1]], curve("spikes", seed)) for seed in range(10)
    )


def test_a_vertical_step_stays() -> None:
    points = [(0.0, 0.0), (1.0, 0.0), (1.0, 9.0), (2.0, 9.0)]
    assert straighten(points, 0.3) == points


def test_paths_lead_where_they_should() -> None:
    """Relative steps of whole tenths add up to the points they stand for."""
    points = [(index * 0.37, math.sin(index) * 41.3) for index in range(500)]
    text = path([points])
    pairs = re.findall(r"(-?\d*\.?\d+)[ ]?(-?\d*\.?\d+)", text)
    assert len(pairs) == len(points)
    x = y = 0.0
    for (step_x, step_y), (wanted_x, wanted_y) in zip(pairs, points, strict=True):
        x, y = x + float(step_x), y + float(step_y)
        assert (x, y) == pytest.approx((wanted_x, wanted_y), abs=0.051)


def test_broken_curves_have_a_path_of_several_runs() -> None:
    assert path([[(0, 0), (1, 2)], [(5, 5)]]) == "M0 0l1 2M5 5h0"
    assert path([[(0, 0), (10, 0), (10, -5.5)]], is_closed=True) == "M0 0l10 0 0-5.5z"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_is_not_drawn_silently(value: float) -> None:
    with pytest.raises(ValueError, match="not a coordinate"):
        number(value)
    with pytest.raises(ValueError, match="not a point"):
        path([[(0.0, value)]])


def test_text_and_attributes_are_escaped() -> None:
    text = serialize(element("text", class_="a\"b'<", stroke_width=1.25, text="<&>\x0b"))
    assert text == '<text class="a&quot;b\'&lt;" stroke-width="1.2">&lt;&amp;&gt;\ufffd</text>'


# --- axes ----------------------------------------------------------------------------------------------------------

SCALES = [
    *(linear(high) for high in (0.0, 0.013, 1.0, 7.0, 999.0, 42_000.0, 3.3e9)),
    *(around_zero(extent) for extent in (0.0, 12.0, 5e5)),
    *(clock(end_s) for end_s in (0.0, 5.0, 60.0, 360.0, 1_800.0, 7_200.0, 86_400.0, 3e7)),
    *(logarithmic(low, high, "x") for low, high in ((0.001, 2_041.0), (0.1, 0.1), (0.09, 0.11), (1.0, 1e7))),
    *(counts(high) for high in (0.0, 9.0, 4_456.0, 3e6)),
    nines(),
]


@pytest.mark.parametrize("scale", SCALES, ids=lambda scale: f"{scale.label or 'bare'} {scale.low:g} to {scale.high:g}")
def test_axes_have_a_few_ticks_in_place(scale: Scale) -> None:
    places = scale.ratios(value for value, _ in scale.ticks)
    assert 2 <= len(places) <= 13
    assert all(first < second for first, second in pairwise(places))
    assert places[0] >= -1e-9
    assert places[-1] <= 1.0 + 1e-9
    assert len({text for _, text in scale.ticks}) == len(scale.ticks)
    assert scale.ratio(scale.low) == 0.0
    assert scale.ratio(scale.high) == pytest.approx(1.0)


def test_numbers_are_short() -> None:
    assert [short(value) for value in (0, 0.25, 950, 999.9, 1_000, 42_000, 1_250_000, 3e9)] == [
        "0", "0.25", "950", "1k", "1k", "42k", "1.25M", "3G",
    ]  # fmt: skip
    assert [duration(value) for value in (0.163, 0.9999, 1.02, 133.4, 2_041)] == [
        "163 ms", "1 s", "1.02 s", "133 s", "2,041 s",
    ]  # fmt: skip


# --- colours -------------------------------------------------------------------------------------------------------

# What people without red, green or blue cones see: Machado, Oliveira and Fernandes (2009), severity 1.
SIGHTS = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
LEAST_DISTANCE = 0.08
"""In OKLab, where 1 is from black to white; 0.02 can just be told apart side by side."""

Vector = tuple[float, float, float]


def linear_light(colour: str) -> Vector:
    r, g, b = (int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5))
    return tuple(v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (r, g, b))  # type: ignore[return-value]


def times(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> Vector:
    return tuple(sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)  # type: ignore[return-value]


def oklab(light: Vector) -> Vector:
    cones = times(
        (
            (0.41222147, 0.53633254, 0.05144599),
            (0.21190350, 0.68069955, 0.10739696),
            (0.08830246, 0.28171884, 0.62997870),
        ),
        light,
    )
    roots = [max(0.0, value) ** (1 / 3) for value in cones]
    return times(
        (
            (0.21045426, 0.79361779, -0.00407205),
            (1.97799850, -2.42859221, 0.45059371),
            (0.02590404, 0.78277177, -0.80867577),
        ),
        roots,
    )


def closest(colours: Sequence[str], sight: Sequence[Sequence[float]]) -> float:
    seen = [oklab(tuple(min(1.0, max(0.0, v)) for v in times(sight, linear_light(c)))) for c in colours]  # type: ignore[arg-type]
    return min(math.dist(first, second) for index, first in enumerate(seen) for second in seen[:index])


def contrast(first: str, second: str) -> float:
    high, low = sorted(
        (sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear_light(c), strict=True)) for c in (first, second)),
        reverse=True,
    )
    return (high + 0.05) / (low + 0.05)


def palettes() -> dict[str, dict[str, str]]:
    light, dark = re.findall(r":root \{(.*?)\}", sheet(), re.S)
    return {
        name: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", text)) for name, text in (("light", light), ("dark", dark))
    }


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("paper", ["light", "dark"])
def test_colours_of_tenants_can_be_told_apart(paper: str, sight: str) -> None:
    colours = [palettes()[paper][f"s{index}"] for index in range(8)]
    assert closest(colours, SIGHTS[sight]) >= LEAST_DISTANCE


def test_eight_common_colours_cannot() -> None:
    common = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f"]
    assert min(closest(common, sight) for sight in SIGHTS.values()) < LEAST_DISTANCE


@pytest.mark.parametrize("paper", ["light", "dark"])
def test_colours_stand_out_from_the_paper(paper: str) -> None:
    colours = palettes()[paper]
    assert all(contrast(colours[f"s{index}"], colours["panel"]) >= 3.0 for index in range(8))
    assert all(contrast(colours[name], colours["panel"]) >= 4.5 for name in ("text", "muted", "good", "bad"))
