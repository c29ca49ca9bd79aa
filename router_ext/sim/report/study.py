"""What a report is about: the runs of one suite, and which tenant has which colour in all of its pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from router_ext.sim.metrics import Summary, summarize
from router_ext.sim.recording import Recording
from router_ext.sim.report.due import Due, due
from router_ext.sim.report.scales import duration
from router_ext.sim.suites import Suite

NUM_COLOURS = 8
REST = "rest"
"""Style of all tenants beyond those that have a colour."""

_LONGEST_NAME = 14

_MOST_GREY = 24
"""Curves nobody can follow any more; a trace may have a thousand tenants, and its report shall open quickly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A tenant in the pictures. ``label``: its name, shortened to fit beside a plot."""

    index: int
    name: str
    label: str
    weight: float
    style: str


@dataclass(frozen=True, kw_only=True)
class Study:
    """See the module.

    Attributes:
        recordings: by policy (and predictor, if there are several), in the order of the seeds: at least one of each,
            all with the same tenants; each calls its policy by that name.
        result: what ``fairlane simulate --json`` prints for them, in the same order.
        settings: label and value of everything that was chosen beside suite, policies and seeds.
        command: the command that does all this again.
    """

    suite: Suite
    recordings: Mapping[str, Sequence[Recording]]
    result: Mapping[str, Any]
    settings: Mapping[str, str]
    command: str

    @cached_property
    def policies(self) -> list[str]:
        """In the order in which they are shown."""
        return list(self.recordings)

    @cached_property
    def seeds(self) -> list[int]:
        """Of all runs."""
        return [recording.seed for recording in self.recordings[self.policies[0]]]

    @cached_property
    def summaries(self) -> dict[str, list[Summary]]:
        """By policy: the numbers of every seed."""
        return {policy: [summarize(run) for run in runs] for policy, runs in self.recordings.items()}

    @property
    def sampling(self) -> str:
        """Which run is drawn over time, and how finely."""
        at_s = self.shown[self.policies[0]].samples.at_s
        return (
            f"Seed {self.seeds[0]}, every {duration(at_s[1] - at_s[0])}" if len(at_s) > 1 else f"Seed {self.seeds[0]}"
        )

    @cached_property
    def shown(self) -> dict[str, Recording]:
        """By policy: the run whose course over time is drawn, the first seed's."""
        return {policy: runs[0] for policy, runs in self.recordings.items()}

    @cached_property
    def end_s(self) -> float:
        """Where the time axis ends: the longest run drawn."""
        return max(run.end_s for run in self.shown.values())

    @cached_property
    def due(self) -> dict[str, Due]:
        """By policy: what was due to every tenant in the run drawn."""
        return {policy: due(run) for policy, run in self.shown.items()}

    @cached_property
    def metrics(self) -> dict[str, Mapping[str, float | None]]:
        """By policy: means over the seeds."""
        return {name: entry["metrics"] for name, entry in zip(self.policies, self.result["results"], strict=True)}

    @cached_property
    def tenants(self) -> dict[str, Mapping[str, Mapping[str, Any]]]:
        """By policy and tenant: means over the seeds."""
        return {name: entry["tenants"] for name, entry in zip(self.policies, self.result["results"], strict=True)}

    @cached_property
    def members(self) -> list[Member]:
        """All tenants, those with the most service over all policies first if there are more than colours."""
        infos = self.shown[self.policies[0]].tenants
        order = list(range(len(infos)))
        if len(order) > NUM_COLOURS:
            totals = [sum(run.service(index, -1) for run in self.shown.values()) for index in order]
            order.sort(key=lambda index: -totals[index])
        return [
            Member(
                index=index,
                name=infos[index].name,
                label=shortened(infos[index].name),
                weight=infos[index].weight,
                style=f"s{place}" if place < NUM_COLOURS else REST,
            )
            for place, index in enumerate(order)
        ]

    @property
    def coloured(self) -> list[Member]:
        """Those with a colour of their own."""
        return self.members[:NUM_COLOURS]

    @property
    def rest(self) -> list[Member]:
        """Those drawn in grey."""
        return self.members[NUM_COLOURS:]

    @property
    def drawn(self) -> list[Member]:
        """Those that have a curve in courses over time."""
        return self.members[: NUM_COLOURS + _MOST_GREY]

    @property
    def rest_label(self) -> str:
        """What the grey ones are called together."""
        return f"{len(self.rest)} other{'s' if len(self.rest) > 1 else ''}"

    def label(self, member: Member) -> str | None:
        """What is written at the end of a tenant's curve; one of the grey curves is named for all."""
        if member.style != REST:
            return member.label
        return self.rest_label if member is self.rest[0] else None


def shortened(name: str, longest: int = _LONGEST_NAME) -> str:
    """A name as it fits beside a plot."""
    return name if len(name) <= longest else f"{name[: longest - 1]}…"
