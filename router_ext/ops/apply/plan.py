"""What has to be done so that the control plane is as a file says. Nothing is done here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from router_ext.ops.apply.document import Document, Place
from router_ext.ops.apply.kinds import KINDS, Kind

DEFAULT_LABEL = "fairlane-apply"


class Deed(StrEnum):
    CREATE = "created"
    UPDATE = "updated"
    DELETE = "deleted"
    KEEP = "unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One object. ``found``: it as REST shows it, None where there is none yet.

    ``change``: the fields to send. ``place``: where the file names it; () where it does not.
    """

    deed: Deed
    kind: Kind
    key: str
    place: Place = ()
    change: Mapping[str, Any]
    found: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        return f"{self.kind.path}/{self.key}"


def label_of(document: Document) -> str:
    """Whose objects the file is the truth of."""
    return str(document.content.get("managed_by", DEFAULT_LABEL))


def make_plan(document: Document, found: Mapping[str, Sequence[Mapping[str, Any]]], *, adopts: bool) -> list[Step]:
    """The steps in their order. A kind that the file does not name is left alone, with all its objects.

    Only objects that carry the file's label are changed or deleted; another one of the same name is noted as a
    problem. Of an object only the fields that the file states are compared.

    Args:
        document: checked. found: what there is, by kind. adopts: take over objects that nobody manages.
    """
    label = label_of(document)
    kinds = [kind for kind in KINDS if kind.path in document.content]
    steps = []
    for kind in kinds:
        there = {row[kind.key]: row for row in found[kind.path]}
        for position, wanted in enumerate(document.content[kind.path]):
            place: Place = (kind.path, position)
            row = there.get(wanted[kind.key])
            if row is None:
                steps.append(_creation(document, kind, place, wanted, label))
            elif row["managed_by"] == label or (adopts and not row["managed_by"]):
                change = difference(kind, wanted, row) | ({} if row["managed_by"] == label else {"managed_by": label})
                deed = Deed.UPDATE if change else Deed.KEEP
                steps.append(Step(deed=deed, kind=kind, key=wanted[kind.key], place=place, change=change, found=row))
            else:
                whose = f"managed by {row['managed_by']!r}" if row["managed_by"] else "there, and nobody manages it"
                advice = "" if row["managed_by"] else " (--adopt takes it over)"
                document.add((*place, kind.key), f"{wanted[kind.key]!r} is {whose}{advice}")
    for kind in reversed(kinds):
        named = {wanted[kind.key] for wanted in document.content[kind.path]}
        steps += [
            Step(deed=Deed.DELETE, kind=kind, key=row[kind.key], change={}, found=row)
            for row in found[kind.path]
            if row["managed_by"] == label and row[kind.key] not in named
        ]
    return steps


def _creation(document: Document, kind: Kind, place: Place, wanted: Mapping[str, Any], label: str) -> Step:
    for name in kind.required:
        if name not in wanted:
            document.add((*place, name), "is missing, and there is no such object yet")
    change = {**wanted, "managed_by": label}
    return Step(deed=Deed.CREATE, kind=kind, key=str(wanted[kind.key]), place=place, change=change, found=None)


def difference(kind: Kind, wanted: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The stated fields whose values are other than those of the row, as REST takes them."""
    change = {}
    for name, value in wanted.items():
        now = row[name]
        if name in kind.merged:
            changed = {inner: each for inner, each in value.items() if now.get(inner) != each}
            if changed:
                change[name] = changed
        elif name in kind.unordered:
            if sorted(value) != sorted(now):
                change[name] = value
        elif isinstance(value, dict):
            if {k: v for k, v in value.items() if v is not None} != {k: v for k, v in now.items() if v is not None}:
                change[name] = value
        elif (value.strip() if isinstance(value, str) else value) != now:
            change[name] = value
    return change
