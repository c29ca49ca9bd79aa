"""Who got how much, and how far ahead anybody got of the others."""

from __future__ import annotations

from collections.abc import Sequence

from router_ext.sim.recording import Recording
from router_ext.sim.report.figures import Figure
from router_ext.sim.report.panels import Area, Bracket, Line, Panel, Rule
from router_ext.sim.report.scales import Scale, around_zero, clock, linear
from router_ext.sim.report.study import Member, Study
from router_ext.sim.report.tables import at_instants, within_quarters

_AIR = 1.04
"""What an axis goes on for beyond the largest value on it."""


def service(study: Study) -> Figure:
    """Service per weight of every tenant over time, and the bound as a band around the fair line."""
    runs = study.shown
    most = max(_per_weight(run, member, -1) for run in runs.values() for member in study.members)
    bands = [study.due[run.policy].level[-1] + run.bound / 2 for run in runs.values() if run.bound is not None]
    # A band far above everything would press the curves to the ground; it is cut by the edge of the plot then.
    y = linear(_AIR * max([most, *(min(top, 1.3 * most) for top in bands)]))
    return Figure(
        name="service",
        title="Service per tenant",
        axis="delivered service per weight, service units",
        caption=f"{study.sampling}. A curve is thick while its tenant waits. Dashed: the fair line, what is due "
        "per weight to a tenant that always wants more. Two tenants that keep waiting may move apart by at most the "
        "height of the band, the policy's bound; where there is no band, the policy promises none.",
        drawings=[_service_panel(study, run, y) for run in runs.values()],
        table=at_instants(study, _per_weight),
    )


def _service_panel(study: Study, run: Recording, y: Scale) -> Panel:
    at_s = run.samples.at_s
    fair = study.due[run.policy].level
    lines = [Line(points=list(zip(at_s, fair, strict=True)), style="fair", name="fair line")]
    for member in reversed(study.drawn):
        values = [_per_weight(run, member, index) for index in range(len(at_s))]
        lines.append(_waiting_line(study, run, member, values, f"{member.name}: {values[-1]:,.0f}"))
    areas, brackets = [], []
    if run.bound is not None:
        half = run.bound / 2
        areas = [Area(points=[(t, f - half, f + half) for t, f in zip(at_s, fair, strict=True)], style="band")]
        index = len(at_s) * 2 // 5
        text = f"bound {run.bound:,.0f}"
        brackets = [Bracket(x=at_s[index], low=fair[index] - half, high=fair[index] + half, text=text)]
    return Panel(
        name=run.policy,
        note=_apart_note(run),
        about=f"{_apart_note(run)}. At the end: "
        + ", ".join(f"{m.name} {_per_weight(run, m, -1):,.0f}" for m in study.coloured),
        x=clock(study.end_s),
        y=y,
        lines=lines,
        areas=areas,
        brackets=brackets,
    )


def _apart_note(run: Recording) -> str:
    parts = [f"apart by up to {run.accumulated_difference:,.0f}"]
    if run.accumulated_while_waiting is not None:
        parts.append(f"{run.accumulated_while_waiting:,.0f} while all wait")
    parts.append("no bound promised" if run.bound is None else f"bound {run.bound:,.0f}")
    return "; ".join(parts)


def _per_weight(run: Recording, member: Member, sample: int) -> float:
    return run.service(member.index, sample) / member.weight


# --- against what is due -------------------------------------------------------------------------------------------


def lead(study: Study) -> Figure:
    """How much more, or less, per weight every tenant has received than was due to it."""
    runs = study.shown
    leads = {policy: _leads_of_due(study, run) for policy, run in runs.items()}
    extents = {policy: max((abs(v) for course in rows for v in course), default=0.0) for policy, rows in leads.items()}
    # Policies that promise nothing may leave the plot; the others are what the scale is for.
    promised = [extents[policy] for policy, run in runs.items() if run.bound is not None]
    y = around_zero(_AIR * max(promised or extents.values()))
    return Figure(
        name="lead",
        title="Ahead of what is due",
        axis="(delivered service - service due) per weight, service units",
        caption=f"{study.sampling}. Due: what the same policy delivered meanwhile, dealt out by weight among those who "
        "want it. Below 0 a tenant is still owed something, if only what its running requests are about to bring. A "
        "curve is thick while its tenant waits; an arrow says that it leaves the plot.",
        drawings=[_lead_panel(study, run, leads[policy], y) for policy, run in runs.items()],
        table=at_instants(study, lambda run, member, index: leads[run.policy][member.index][index]),
    )


def _leads_of_due(study: Study, run: Recording) -> list[list[float]]:
    """By tenant and sample."""
    return [
        [
            (run.service(tenant, index) - owed) / info.weight
            for index, owed in enumerate(study.due[run.policy].by_tenant[tenant])
        ]
        for tenant, info in enumerate(run.tenants)
    ]


def _lead_panel(study: Study, run: Recording, leads: list[list[float]], y: Scale) -> Panel:
    farthest = {m.name: max(leads[m.index], key=abs, default=0.0) for m in study.coloured}
    name, value = max(farthest.items(), key=lambda item: abs(item[1]))
    note = f"farthest: {name} {value:+,.0f}"
    return Panel(
        name=run.policy,
        note=note,
        about="Farthest: " + ", ".join(f"{name} {value:+,.0f}" for name, value in farthest.items()),
        x=clock(study.end_s),
        y=y,
        lines=[
            _waiting_line(
                study,
                run,
                member,
                leads[member.index],
                f"{member.name}: farthest {farthest.get(member.name, 0.0):+,.0f}",
            )
            for member in reversed(study.drawn)
        ],
    )


def _waiting_line(study: Study, run: Recording, member: Member, values: Sequence[float], name: str) -> Line:
    """A curve that is thick where its tenant waits."""
    at_s = run.samples.at_s
    queued = run.samples.queued[member.index]
    return Line(
        points=list(zip(at_s, values, strict=True)),
        strong=[(t, value if num else None) for t, value, num in zip(at_s, values, queued, strict=True)],
        style=member.style,
        name=name,
        tenant=member.index,
        label=study.label(member),
    )


# --- counters ------------------------------------------------------------------------------------------------------


def counters(study: Study) -> Figure:
    """How far every waiting tenant's counter is above the smallest, times its weight, and the bound of that."""
    runs = study.shown
    leads = {policy: _leads(run) for policy, run in runs.items()}
    most = max((value for lead in leads.values() for row in lead for value in row if value is not None), default=0.0)
    bounds = [run.counter_bound for run in runs.values() if run.counter_bound is not None]
    # Policies without a bound may leave the plot; the others are what the scale is for.
    y = linear(_AIR * max(bounds) if bounds else _AIR * most)
    return Figure(
        name="counters",
        title="Counters above the floor",
        axis="(counter - smallest counter of those who wait) x weight, service units",
        caption=f"{study.sampling}, while a tenant waits. No waiting tenant may be above the line, "
        "the policy's bound; an arrow says that a curve leaves the plot.",
        drawings=[_counter_panel(study, run, leads[policy], y) for policy, run in runs.items()],
        table=within_quarters(study, lambda run, member: leads[run.policy][member.index]),
    )


def _leads(run: Recording) -> list[list[float | None]]:
    """By tenant and sample: counter above the floor in service units; None while it does not wait."""
    samples = run.samples
    if not any(samples.counters):
        return [[] for _ in run.tenants]
    result: list[list[float | None]] = [[] for _ in run.tenants]
    for index in range(len(samples.at_s)):
        waiting = [tenant for tenant, queued in enumerate(samples.queued) if queued[index]]
        floor = min((samples.counters[tenant][index] for tenant in waiting), default=0.0)
        for tenant, info in enumerate(run.tenants):
            is_waiting = samples.queued[tenant][index] > 0
            lead = (samples.counters[tenant][index] - floor) * info.weight
            result[tenant].append(lead if is_waiting else None)
    return result


def _counter_panel(study: Study, run: Recording, leads: list[list[float | None]], y: Scale) -> Panel:
    lines = [
        Line(
            points=list(zip(run.samples.at_s, leads[member.index], strict=True)),
            style=member.style,
            name=member.name,
            tenant=member.index,
            label=study.label(member),
        )
        for member in reversed(study.drawn)
        if any(value is not None for value in leads[member.index])
    ]
    empty = None
    if not any(run.samples.counters):
        empty = "no router, so no counters"
    elif not lines:
        empty = "nobody waits at any of these instants"
    rules = []
    note = "no bound promised"
    if run.counter_bound is not None:
        rules = [Rule(y=run.counter_bound, text=f"bound {run.counter_bound:,.0f}")]
        note = f"bound {run.counter_bound:,.0f}"
        if run.largest_gap is not None:
            ratio = run.largest_gap / run.counter_bound if run.counter_bound else 0.0
            note = f"at most {run.largest_gap:,.0f} ever, {ratio:.0%} of the bound"
    about = ", ".join(f"{member.name} at most {_optional(_largest(leads[member.index]))}" for member in study.coloured)
    return Panel(
        name=run.policy,
        note="" if empty else note,
        about=empty or f"{note}. At these instants: {about}",
        x=clock(study.end_s),
        y=y,
        lines=lines,
        rules=rules,
        empty=empty,
    )


def _largest(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _optional(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
