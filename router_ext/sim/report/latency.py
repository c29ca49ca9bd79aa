"""How long tenants waited for their first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router_ext.sim.metrics import percentile, ttfts
from router_ext.sim.recording import Recording
from router_ext.sim.report.figures import Figure, Table
from router_ext.sim.report.panels import Area, Key, Line, Mark, Panel, Rule
from router_ext.sim.report.scales import Scale, duration, logarithmic, nines
from router_ext.sim.report.study import REST, Study, shortened
from router_ext.sim.report.tables import named

_HEIGHTS = 56
_MARKED = (0.5, 0.95, 0.99)
_LEVELS = sorted({*(1.0 - 10.0 ** (-2.31 * step / _HEIGHTS) for step in range(_HEIGHTS + 1)), *_MARKED})
"""Shares of requests at which a curve is taken: evenly spaced on the axis, and those that are marked."""

_FASTEST_S = 1e-3
_LONGEST_NAME = 12
"""A percentile has to fit behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waits:
    """TTFT of one tenant, or of the grey ones together, under one policy: (level, least, mean, most over seeds)."""

    name: str
    label: str
    style: str
    tenant: int
    num_started: int
    num_arrived: int
    levels: Sequence[tuple[float, float, float, float]]

    def at(self, level: float) -> float | None:
        """Mean over the seeds at one level."""
        return next((mean for each, _, mean, _ in self.levels if each == level), None)


def ttft(study: Study) -> Figure:
    """Distribution of TTFT by tenant: the mean over seeds of every percentile, and their spread."""
    waits = {policy: _all_waits(study, runs) for policy, runs in study.recordings.items()}
    known = [
        value for rows in waits.values() for row in rows for _, low, _, high in row.levels for value in (low, high)
    ]
    targets = _targets(study)
    known += list(targets)
    low = max(_FASTEST_S, min(known, default=0.1))
    x = logarithmic(low, max(known, default=1.0), "time to first token")
    y = nines()
    rows = [
        [policy, row.name, f"{row.num_started:,} of {row.num_arrived:,}", *(_text(row.at(level)) for level in _MARKED)]
        for policy, each in waits.items()
        for row in each
    ]
    return Figure(
        name="ttft",
        title="Time to first token",
        axis="share of the requests that got it within so long",
        caption=f"{_seeds(study)}: a curve is the mean of the seeds' percentiles, the band around it the least and the "
        "most of them. Dots: p50, p95 and p99; at the right the p99. The upper half of the axis is the slowest tenth. "
        "Vertical lines: the tenants' targets.",
        drawings=[_panel(policy, each, targets, x, y) for policy, each in waits.items()],
        table=Table(header=["policy", "tenant", "started", "p50", "p95", "p99"], rows=rows),
    )


def _all_waits(study: Study, runs: Sequence[Recording]) -> list[_Waits]:
    result = []
    for name, members in named(study):
        by_seed = [sorted(value for member in members for value in ttfts(run, member.index)) for run in runs]
        indices = {member.index for member in members}
        is_rest = members[0].style == REST
        result.append(
            _Waits(
                name=name,
                label=shortened(name, _LONGEST_NAME),
                style=members[0].style,
                tenant=-1 if is_rest else members[0].index,
                num_started=sum(map(len, by_seed)),
                num_arrived=sum(owner in indices for run in runs for owner in run.requests.tenant),
                levels=_levels([values for values in by_seed if values]),
            )
        )
    return result


def _levels(by_seed: Sequence[Sequence[float]]) -> list[tuple[float, float, float, float]]:
    """Percentiles by level. No level is taken that fewer than one request of a run is beyond, but for those marked."""
    if not by_seed:
        return []
    finest = 1.0 - 1.0 / min(map(len, by_seed))
    result = []
    for level in _LEVELS:
        if level <= finest or level in _MARKED:
            values = [percentile(values, level) or 0.0 for values in by_seed]
            result.append((level, min(values), sum(values) / len(values), max(values)))
    return result


def _targets(study: Study) -> dict[float, str]:
    """Targets by value: whose they are."""
    owners: dict[float, list[str]] = {}
    for info in study.shown[study.policies[0]].tenants:
        if info.ttft_target_s is not None:
            owners.setdefault(info.ttft_target_s, []).append(info.name)
    return {target: ", ".join(names) for target, names in owners.items()}


def _panel(policy: str, waits: Sequence[_Waits], targets: dict[float, str], x: Scale, y: Scale) -> Panel:
    started = [row for row in waits if row.levels]
    lines, areas, marks = [], [], []
    for row in reversed(started):
        spread = [(max(x.low, low), max(x.low, high), level) for level, low, _, high in row.levels]
        areas.append(Area(points=spread, style=row.style, tenant=row.tenant, has_x_spread=True))
        curve = [(max(x.low, mean), level) for level, _, mean, _ in row.levels]
        lines.append(Line(points=curve, style=row.style, name=row.name, tenant=row.tenant))
        for level in _MARKED:
            value = row.at(level)
            if value is not None:
                text = f"{row.name}: p{level * 100:.0f} {duration(value)}"
                at = max(x.low, value)
                marks.append(Mark(x=at, y=level, style=row.style, text=text, tenant=row.tenant))
    missing = sum(row.num_arrived - row.num_started for row in waits)
    note = (
        f"{missing:,} of {sum(row.num_arrived for row in waits):,} requests not started" if missing else "all started"
    )
    numbers = "; ".join(
        f"{row.name} " + ", ".join(f"p{level * 100:.0f} {_text(row.at(level))}" for level in _MARKED) for row in started
    )
    return Panel(
        name=policy,
        note=note,
        about=f"{note}. {numbers}",
        x=x,
        y=y,
        lines=lines,
        areas=areas,
        marks=marks,
        rules=[Rule(x=target, text=f"target {duration(target)}", style="target") for target in targets],
        keys=[
            Key(text="p99", style="head"),
            *(Key(text=f"{row.label} {_text(row.at(0.99))}", style=row.style, tenant=row.tenant) for row in waits),
        ],
        empty=None if started else "no request has shown a token",
    )


def _seeds(study: Study) -> str:
    if len(study.seeds) == 1:
        return f"Seed {study.seeds[0]}"
    return f"Seeds {', '.join(map(str, study.seeds))}"


def _text(value: float | None) -> str:
    return "-" if value is None else duration(value)
