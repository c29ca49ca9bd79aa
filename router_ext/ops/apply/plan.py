"""What has to be done so that the control plane is as a file says. Nothing is done here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from router_ext.ops.apply.document import Document, Place
from router_ext.ops.apply.kinds import KINDS, Key, Kind

DEFAULT_LABEL = "fairlane-apply"
Row = Mapping[str, Any]


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
    key: Key
    place: Place = ()
    change: Mapping[str, Any]
    found: Row | None

    @property
    def name(self) -> str:
        return "/".join((self.kind.name, *self.key))


def label_of(document: Document) -> str:
    """Whose objects the file is the truth of."""
    return str(document.content.get("managed_by", DEFAULT_LABEL))


def make_plan(document: Document, found: Mapping[str, Sequence[Row]], *, adopts: bool) -> list[Step]:
    """The steps in their order. A kind that the file does not name is left alone, with all its objects.

    Only objects that carry the file's label are changed or deleted; another one of the same name is noted as a
    problem. Of an object only the fields that the file states are compared.

    Args:
        document: checked. found: what there is, by kind. adopts: take over objects that nobody manages.
    """
    label = label_of(document)
    kinds = [kind for kind in KINDS if kind.name in document.content]
    steps = []
    for kind in kinds:
        there: dict[Key, list[Row]] = {}
        for row in found[kind.name]:
            there.setdefault(kind.key_of(kind.stated(row)), []).append(row)
        for position, wanted in enumerate(document.content[kind.name]):
            place: Place = (kind.name, position)
            rows = there.get(kind.key_of(wanted), [])
            # Only names of keys are given more than once; the one that is ours counts.
            rows = [row for row in rows if row["managed_by"] == label] or rows
            if not rows:
                steps.append(_creation(document, kind, place, wanted, label))
            elif len(rows) > 1:
                document.add((*place, kind.key[-1]), f"there are {len(rows)} of {'/'.join(kind.key_of(wanted))!r}")
            elif rows[0]["managed_by"] == label or (adopts and not rows[0]["managed_by"]):
                steps.append(_change(document, kind, place, wanted, rows[0], label))
            else:
                who = rows[0]["managed_by"]
                whose = f"managed by {who!r}" if who else "there, and nobody manages it (--adopt takes it over)"
                document.add((*place, kind.key[-1]), f"{'/'.join(kind.key_of(wanted))!r} is {whose}")
    for kind in reversed(kinds):
        named = {kind.key_of(wanted) for wanted in document.content[kind.name]}
        for row in found[kind.name]:
            key = kind.key_of(kind.stated(row))
            if row["managed_by"] == label and key not in named:
                steps.append(Step(deed=Deed.DELETE, kind=kind, key=key, change={}, found=row))
    return steps


def _creation(document: Document, kind: Kind, place: Place, wanted: Row, label: str) -> Step:
    for name in kind.required:
        if name not in wanted:
            document.add((*place, name), "is missing, and there is no such object yet")
    change = {**wanted, "managed_by": label}
    return Step(deed=Deed.CREATE, kind=kind, key=kind.key_of(wanted), place=place, change=change, found=None)


def _change(document: Document, kind: Kind, place: Place, wanted: Row, row: Row, label: str) -> Step:
    change = difference(kind, wanted, kind.stated(row))
    for name in kind.fixed:
        if name in change:
            document.add((*place, name), f"{change[name]!r} is not {row[name]!r}, and it never changes")
    if row["managed_by"] != label:
        change["managed_by"] = label
    deed = Deed.UPDATE if change else Deed.KEEP
    return Step(deed=deed, kind=kind, key=kind.key_of(wanted), place=place, change=change, found=row)


def difference(kind: Kind, wanted: Row, present: Row) -> dict[str, Any]:
    """The stated fields whose values are other than those that the object has, as REST takes them."""
    change = {}
    for name, value in wanted.items():
        if name in kind.key or name not in present:
            continue
        now = present[name]
        if name in kind.merged:
            changed = {inner: each for inner, each in value.items() if now.get(inner) != each}
            if changed:
                change[name] = changed
        elif not kind.same(name, value, now):
            change[name] = value
    return change
