"""All policies in one row each: a dot per number, and the seeds' spread as a line through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any, cast

from router_ext.sim.metrics import Summary
from router_ext.sim.report.figures import Figure, Table
from router_ext.sim.report.glossary import MEASURES, Better, Measure
from router_ext.sim.report.scales import duration
from router_ext.sim.report.study import Member, Study
from router_ext.sim.report.svg import Element, element, path

_WIDTH, _LEFT, _PLOT = 360, 96, 168
_ROW, _TOP = 20, 34
_LOGARITHMIC_FROM = 20.0
"""Largest over smallest value above which a strip is logarithmic: the small ones would all sit at its left end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One policy's number: mean over the seeds, and the least and the most of them; None where there is none."""

    policy: str
    mean: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """One number of all policies."""

    name: str
    measure: Measure
    readings: Sequence[Reading]

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return _WIDTH, _TOP + _ROW * len(self.readings) + 8

    @property
    def about(self) -> str:
        """The numbers."""
        return ", ".join(f"{row.policy} {self.measure.text(row.mean)}" for row in self.readings)

    def draw(self, *, limit: int) -> list[Element]:
        """The contents of the SVG; there are no curves to limit."""
        return [*self._head(), *(child for index in range(len(self.readings)) for child in self._row(index))]

    def _is_logarithmic(self) -> bool:
        lows = [row.low for row in self.readings if row.low is not None]
        highs = [row.high for row in self.readings if row.high is not None]
        return min(lows) > 0.0 and max(highs) / min(lows) >= _LOGARITHMIC_FROM

    def _head(self) -> Iterator[Element]:
        yield element("text", class_="policy", x=6, y=16, text=self.name)
        better = {Better.HIGHER: "more is better", Better.LOWER: "less is better", Better.NEITHER: ""}
        notes = [better[self.measure.better], "log" if self._is_logarithmic() else ""]
        text = ", ".join(note for note in notes if note)
        yield element("text", class_="note end", x=_WIDTH - 6, y=16, text=text)

    def _row(self, index: int) -> Iterator[Element]:
        row = self.readings[index]
        y = _TOP + _ROW * (index + 0.5)
        best, worst = self.measure.extremes({each.policy: each.mean for each in self.readings})
        rank = "best" if row.policy in best else "worst" if row.policy in worst else ""
        yield element("text", class_=f"row end {rank}", x=_LEFT - 8, y=y + 4, text=row.policy)
        yield element("path", class_="grid", d=path([[(_LEFT, y), (_LEFT + _PLOT, y)]]))
        if row.mean is not None and row.low is not None and row.high is not None:
            start, middle, end = (_LEFT + _PLOT * self._place(value) for value in (row.low, row.mean, row.high))
            yield element("path", class_=f"spread {rank}", d=path([[(start, y), (end, y)]]))
            title = element(
                "title",
                text=f"{row.policy}: {self.measure.text(row.mean)}, "
                f"seeds {self.measure.text(row.low)} to {self.measure.text(row.high)}",
            )
            yield element("circle", title, class_=f"dot {rank}", cx=middle, cy=y, r=4)
        text = self.measure.text(row.mean)
        yield element("text", class_=f"value {rank}", x=_LEFT + _PLOT + 10, y=y + 4, text=text)

    def _place(self, value: float) -> float:
        high = max(row.high for row in self.readings if row.high is not None)
        if not self._is_logarithmic():
            return value / high if high > 0.0 else 0.0
        low = min(row.low for row in self.readings if row.low is not None)
        return log(value / low) / log(high / low)


def overview(study: Study) -> Figure:
    """The numbers in which the policies differ."""
    strips = [strip for strip in _strips(study) if any(strip.measure.extremes(_means(strip)))]
    return Figure(
        name="overview",
        title="Policies side by side",
        axis="mean over the seeds and their spread",
        caption="The numbers in which the policies differ, if one way is better. A dot is the mean over the "
        "seeds, the line through it reaches from the least to the most of them.",
        drawings=strips,
        table=Table(
            header=["number", *study.policies],
            rows=[[strip.name, *(strip.measure.text(row.mean) for row in strip.readings)] for strip in strips],
        ),
    )


def _readings(
    study: Study, value: Callable[[Summary], float | None], means: Mapping[str, float | None]
) -> list[Reading]:
    """One number of all policies, in their order."""
    result = []
    for policy, summaries in study.summaries.items():
        known = [each for each in map(value, summaries) if each is not None]
        mean = means[policy]
        # A number that is not of single runs, as a capacity found by many, has no spread.
        result.append(Reading(policy=policy, mean=mean, low=min(known, default=mean), high=max(known, default=mean)))
    return result


def _strips(study: Study) -> Iterator[Strip]:
    for name, measure in MEASURES.items():
        yield Strip(name=measure.label, measure=measure, readings=metric_readings(study, name))
    for member in study.coloured:
        yield Strip(
            name=f"TTFT p99, {member.label}", measure=TTFT, readings=tenant_readings(study, member, "ttft_s", "p99")
        )


def metric_readings(study: Study, name: str) -> list[Reading]:
    """A metric of all policies, by its name in the result."""
    means = {policy: study.metrics[policy].get(name) for policy in study.policies}
    return _readings(study, lambda summary: summary.metrics.get(name), means)


def tenant_readings(study: Study, member: Member, *path: str) -> list[Reading]:
    """A tenant's number in all policies, by its place in the tenant's part of the result."""

    def value(tenant: Any) -> float | None:
        for name in path:
            tenant = tenant[name]
        return cast("float | None", tenant)

    means = {policy: value(study.tenants[policy][member.name]) for policy in study.policies}
    return _readings(study, lambda summary: value(summary.tenants[member.name]), means)


TTFT = Measure("TTFT p99", Better.LOWER, duration, "Time to first token of the slowest hundredth.")


def _means(strip: Strip) -> dict[str, float | None]:
    return {row.policy: row.mean for row in strip.readings}
