"""Courses over time as tables of a few instants."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from router_ext.sim.recording import Recording
from router_ext.sim.report.figures import Table
from router_ext.sim.report.study import Member, Study

INSTANTS = ("after a quarter", "after half", "after three quarters", "at the end")
"""Of a run; runs of different policies may end at different times."""

_NUM_INSTANTS = len(INSTANTS)


def at_instants(study: Study, value: Callable[[Recording, Member, int], float]) -> Table:
    """A value of every tenant at ``INSTANTS`` of the run; the grey ones as the largest among them."""

    def rows() -> Iterator[list[str]]:
        for policy, run in study.shown.items():
            for name, members in named(study):
                largest = [max(value(run, member, index) for member in members) for index in instants(run)]
                yield [policy, name, *(f"{each:,.0f}" for each in largest)]

    return Table(header=["policy", "tenant", *INSTANTS], rows=list(rows()))


def within_quarters(study: Study, values: Callable[[Recording, Member], list[float | None]]) -> Table:
    """The largest value of every tenant within each quarter of the run; "-" where there is none."""

    def rows() -> Iterator[list[str]]:
        for policy, run in study.shown.items():
            for name, members in named(study):
                courses = [values(run, member) for member in members]
                largest = [
                    max((peak for course in courses if (peak := _peak(course, quarter)) is not None), default=None)
                    for quarter in range(_NUM_INSTANTS)
                ]
                yield [policy, name, *("-" if each is None else f"{each:,.0f}" for each in largest)]

    header = ["policy", "tenant", *(f"largest, quarter {quarter}" for quarter in range(1, _NUM_INSTANTS + 1))]
    return Table(header=header, rows=list(rows()))


def named(study: Study) -> list[tuple[str, list[Member]]]:
    """Rows of a table by tenant: each coloured tenant, then the others together."""
    rows = [(member.name, [member]) for member in study.coloured]
    return [*rows, (study.rest_label, study.rest)] if study.rest else rows


def instants(run: Recording) -> list[int]:
    """Indices of the samples at ``INSTANTS``."""
    last = len(run.samples.at_s) - 1
    return [last * (part + 1) // _NUM_INSTANTS for part in range(_NUM_INSTANTS)]


def _peak(course: list[float | None], quarter: int) -> float | None:
    part = course[len(course) * quarter // _NUM_INSTANTS : len(course) * (quarter + 1) // _NUM_INSTANTS]
    return max((value for value in part if value is not None), default=None)
