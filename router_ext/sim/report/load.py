"""What is on the servers, and what waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router_ext.sim.metrics import kv_occupancy, mean_running
from router_ext.sim.recording import Recording
from router_ext.sim.report.figures import Figure, Table
from router_ext.sim.report.panels import Line, Panel
from router_ext.sim.report.scales import Scale, clock, counts, linear, percent
from router_ext.sim.report.study import Study
from router_ext.sim.report.tables import INSTANTS, at_instants, instants

_AIR = 1.04


def kv(study: Study) -> Figure:
    """Reserved share of every backend's KV over time."""

    def course(run: Recording, backend: int) -> list[float]:
        usable = run.usable_tokens[backend] or 1
        return [tokens / usable for tokens in run.samples.kv_tokens[backend]]

    return Figure(
        name="kv",
        title="KV reserved",
        axis="share of each backend's usable KV",
        caption=f"{study.sampling}.",
        drawings=[
            _backend_panel(study, run, course, linear(1.0, written=percent), f"mean {percent(kv_occupancy(run))}")
            for run in study.shown.values()
        ],
        table=_backend_table(study, lambda run, backend, index: percent(course(run, backend)[index])),
    )


def running(study: Study) -> Figure:
    """Requests on every backend over time."""

    def course(run: Recording, backend: int) -> list[float]:
        return [float(count) for count in run.samples.running[backend]]

    runs = study.shown
    y = linear(_AIR * max((max(row, default=0) for run in runs.values() for row in run.samples.running), default=0))
    return Figure(
        name="running",
        title="Running requests",
        axis="requests that hold KV, by backend",
        caption=f"{study.sampling}.",
        drawings=[
            _backend_panel(study, run, course, y, f"mean {mean_running(run):.1f} over all backends")
            for run in runs.values()
        ],
        table=_backend_table(study, lambda run, backend, index: f"{course(run, backend)[index]:.0f}"),
    )


def queues(study: Study) -> Figure:
    """Waiting requests of every tenant over time."""
    runs = study.shown
    y = counts(max((max(row, default=0) for run in runs.values() for row in run.samples.queued), default=0) * 1.1)
    return Figure(
        name="queues",
        title="Queues",
        axis="waiting requests per tenant; logarithmic above 1",
        caption=f"{study.sampling}: in the router and in the servers' own queues.",
        drawings=[_queue_panel(study, run, y) for run in runs.values()],
        table=at_instants(study, lambda run, member, index: float(run.samples.queued[member.index][index])),
    )


def _queue_panel(study: Study, run: Recording, y: Scale) -> Panel:
    at_s = run.samples.at_s
    queued = run.samples.queued
    most = {member.name: max(queued[member.index], default=0) for member in study.members}
    total = max((sum(row[index] for row in queued) for index in range(len(at_s))), default=0)
    note = f"{total:,} at most, {sum(row[-1] for row in queued):,} at the end"
    return Panel(
        name=run.policy,
        note=note,
        about=f"{note}. Most: " + ", ".join(f"{member.name} {most[member.name]:,}" for member in study.coloured),
        x=clock(study.end_s),
        y=y,
        lines=[
            Line(
                points=[(t, float(n)) for t, n in zip(at_s, queued[member.index], strict=True)],
                style=member.style,
                name=f"{member.name}: at most {most[member.name]:,}",
                tenant=member.index,
                label=study.label(member),
            )
            for member in reversed(study.drawn)
        ],
    )


def _backend_panel(
    study: Study, run: Recording, course: Callable[[Recording, int], Sequence[float]], y: Scale, note: str
) -> Panel:
    at_s = run.samples.at_s
    num = len(run.usable_tokens)
    return Panel(
        name=run.policy,
        note=note,
        about=note,
        x=clock(study.end_s),
        y=y,
        lines=[
            Line(
                points=list(zip(at_s, course(run, backend), strict=True)),
                style=f"b{backend % 4}",
                name=f"server{backend}",
                label=f"server{backend}" if num <= 8 else None,
            )
            for backend in range(num)
        ],
    )


def _backend_table(study: Study, written: Callable[[Recording, int, int], str]) -> Table:
    return Table(
        header=["policy", "backend", *INSTANTS],
        rows=[
            [policy, f"server{backend}", *(written(run, backend, index) for index in instants(run))]
            for policy, run in study.shown.items()
            for backend in range(len(run.usable_tokens))
        ],
    )
