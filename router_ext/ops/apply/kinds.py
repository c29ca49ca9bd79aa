"""What a file may hold: four kinds of objects, their fields, and which values each of them takes.

The control plane has the last word; what can be told from the file alone is told before anything is changed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from router_ext.core.config import KNOBS, ConfigError, policy_names
from router_ext.ops.apply.document import Document, Place
from router_ext.wire.controlplane import LimitsRecord

SLUG = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
SLUG_TEXT = "1 to 63 of a-z, 0-9 and -, beginning and ending with a letter or digit"
MAX_LIMIT = 10**15
Check = Callable[[Document, Place, Any], None]


def _refuse(document: Document, place: Place, value: Any, accepted: str) -> None:
    document.add(place, f"{_shown(value)} is not accepted: {accepted}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def text(limit: int, *, may_be_empty: bool = False) -> Check:
    least = 0 if may_be_empty else 1

    def check(document: Document, place: Place, value: Any) -> None:
        if not isinstance(value, str) or not least <= len(value.strip()) <= limit or not value.isprintable():
            _refuse(document, place, value, f"a text of {least} to {limit:,} printable characters")

    return check


def slug(document: Document, place: Place, value: Any) -> None:
    if not isinstance(value, str) or not SLUG.match(value):
        _refuse(document, place, value, SLUG_TEXT)


def number(low: float, high: float, *, is_whole: bool = False, may_be_null: bool = False, above: bool = False) -> Check:
    """``above``: ``low`` itself is outside."""
    kinds = (int,) if is_whole else (int, float)
    words = f"a {'whole ' if is_whole else ''}number {f'above {low:,} up to' if above else f'from {low:,} to'} {high:,}"
    accepted = f"{words}, or null" if may_be_null else words

    def check(document: Document, place: Place, value: Any) -> None:
        if value is None and may_be_null:
            return
        is_number = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not low <= value <= high or (above and value == low):
            _refuse(document, place, value, accepted)

    return check


def flag(document: Document, place: Place, value: Any) -> None:
    if not isinstance(value, bool):
        _refuse(document, place, value, "true or false")


def one_of(*words: str) -> Check:
    def check(document: Document, place: Place, value: Any) -> None:
        if value not in words:
            _refuse(document, place, value, f"one of {', '.join(words)}")

    return check


def names(limit: int, *, least: int) -> Check:
    def check(document: Document, place: Place, value: Any) -> None:
        if not isinstance(value, list) or len(value) < least:
            _refuse(document, place, value, f"a list of {'names' if not least else f'at least {least} name'}")
            return
        for position, each in enumerate(value):
            text(limit)(document, (*place, position), each)
        if len({str(each) for each in value}) < len(value):
            _refuse(document, place, value, "each name once")

    return check


def or_null(inner: Check) -> Check:
    return lambda document, place, value: None if value is None else inner(document, place, value)


def _limits(document: Document, place: Place, value: Any) -> None:
    if not isinstance(value, dict):
        _refuse(document, place, value, f"a mapping of {', '.join(LimitsRecord.__struct_fields__)}")
        return
    for name, each in value.items():
        if name not in LimitsRecord.__struct_fields__:
            document.add((*place, str(name)), f"unknown; one of {', '.join(LimitsRecord.__struct_fields__)}")
        else:
            number(0, MAX_LIMIT, is_whole=True, may_be_null=True)(document, (*place, name), each)


def _scheduling(document: Document, place: Place, value: Any) -> None:
    if not isinstance(value, dict):
        _refuse(document, place, value, "a mapping of knobs (`fairlane` lists them at /api/v1/policies)")
        return
    for name, each in value.items():
        if name not in KNOBS:
            document.add((*place, str(name)), f"unknown; one of {', '.join(KNOBS)}")
        elif each is not None:
            try:
                KNOBS[name].check(each, "it")
            except ConfigError as error:
                document.add((*place, name), str(error))


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object.

    Attributes:
        path: of its list below ``/api/v1``, and its name in the file. key: field by which it is known; never changes.
        fields: checks by field. required: what a new one needs. later: fields that cannot be given at creation.
        unordered: lists whose order means nothing. merged: mappings of which only what is stated is compared.
    """

    path: str
    key: str
    fields: Mapping[str, Check]
    required: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    unordered: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()


_WEIGHT = number(0.001, 10_000)
TIERS = Kind(
    "tiers",
    "name",
    {
        "name": slug,
        "rank": number(0, 10_000, is_whole=True),
        "ttft_target_s": number(0, 3_600, may_be_null=True, above=True),
        "max_queue_wait_s": number(0, 86_400, may_be_null=True, above=True),
        "grammar_stall_s": number(0, 60, may_be_null=True),
    },
    required=("rank",),
)
GROUPS = Kind("groups", "name", {"name": slug, "weight": _WEIGHT})
POOLS = Kind(
    "pools",
    "name",
    {
        "name": text(200),
        "aliases": names(200, least=0),
        "policy": one_of(*policy_names()),
        "scheduling": _scheduling,
        "tokenizer_path": text(1_000, may_be_empty=True),
        "is_guarded": flag,
        "vocabulary": number(1, 10_000_000, is_whole=True),
        "takes_grammars": flag,
    },
    unordered=("aliases",),
)
TENANTS = Kind(
    "tenants",
    "slug",
    {
        "slug": slug,
        "name": text(200),
        "weight": _WEIGHT,
        "state": one_of("active", "suspended", "stopped"),
        "tiers": names(40, least=1),
        "default_tier": text(40),
        "max_queued": number(1, 1_000_000, is_whole=True),
        "timezone": text(64),
        "group": or_null(text(63)),
        "limits": _limits,
    },
    required=("name", "tiers", "default_tier"),
    later=("state",),
    unordered=("tiers",),
    merged=("limits",),
)
KINDS = (TIERS, GROUPS, POOLS, TENANTS)
"""In the order in which they are made: tenants name tiers and groups. They are deleted in the opposite one."""


def check(document: Document) -> None:
    """Note everything in a file that cannot be, each with its place."""
    content = document.content
    if not isinstance(content, dict):
        document.add((), f"holds no mapping of {', '.join(kind.path for kind in KINDS)}")
        return
    known = {kind.path: kind for kind in KINDS}
    for name, value in content.items():
        if name == "managed_by":
            slug(document, (name,), value)
        elif name not in known:
            document.add((str(name),), f"unknown; one of managed_by, {', '.join(known)}")
        elif not isinstance(value, list):
            _refuse(document, (name,), value, "a list")
        else:
            _check_list(document, known[name], value)


def _check_list(document: Document, kind: Kind, objects: list[Any]) -> None:
    seen: dict[str, int] = {}
    for position, each in enumerate(objects):
        place: Place = (kind.path, position)
        if not isinstance(each, dict):
            _refuse(document, place, each, f"a mapping of {', '.join(kind.fields)}")
            continue
        for name, value in each.items():
            if name in kind.fields:
                kind.fields[name](document, (*place, name), value)
            else:
                document.add((*place, str(name)), f"unknown; one of {', '.join(kind.fields)}")
        if kind.key not in each:
            document.add((*place, kind.key), "is missing")
        elif str(each[kind.key]) in seen:
            first = document.lines.get((kind.path, seen[str(each[kind.key])]))
            document.add((*place, kind.key), f"{_shown(each[kind.key])} stands in line {first} already")
        else:
            seen[str(each[kind.key])] = position
