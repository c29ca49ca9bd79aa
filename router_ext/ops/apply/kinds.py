"""What a file may hold: the kinds of objects, their fields, which values each takes, and how REST shows them.

The control plane has the last word; what can be told from the file alone is told before anything is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from router_ext.core.config import policy_names
from router_ext.ops.apply.checks import (
    SLUG_TEXT,
    Check,
    check_fields,
    day,
    email,
    flag,
    instant,
    limits,
    mappings,
    names,
    number,
    one_of,
    or_null,
    refuse,
    scheduling,
    shown,
    slug,
    text,
    url,
)
from router_ext.ops.apply.document import Document, Place

__all__ = ["KINDS", "SLUG_TEXT", "Kind", "check"]

MAX_PRICE = 10**12
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of object.

    Attributes:
        name: of its list in the file. path: of its list below ``/api/v1``, and of what creates one.
        key: the fields by which it is known; they never change.
        fields: checks by field, those of the key included. sources: where REST shows a field under another name.
        required: what a new one needs beside the key. fixed: what is given once, beside the key.
        unordered: lists whose order means nothing. merged: mappings of which only what is stated is compared.
        instants: texts that may differ and still mean the same. secret: field of a creation's answer, shown once.
    """

    name: str
    path: str
    key: tuple[str, ...]
    fields: Mapping[str, Check]
    sources: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    unordered: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    instants: tuple[str, ...] = ()
    secret: str | None = None

    def key_of(self, stated: Mapping[str, Any]) -> Key:
        """By what it is known, as the control plane spells it."""
        values = (str(stated[name]).strip() for name in self.key)
        return tuple(value.lower() if name == "email" else value for name, value in zip(self.key, values, strict=True))

    def stated(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row of REST as a file states it: the fields that it has."""
        sources = {name: self.sources.get(name, name) for name in self.fields}
        return {name: row[source] for name, source in sources.items() if source in row}

    def same(self, name: str, wanted: Any, present: Any) -> bool:
        """Whether a field has the value that the file states."""
        if isinstance(wanted, str):
            wanted = wanted.strip()
        if name in self.unordered:
            return sorted(map(_comparable, wanted)) == sorted(map(_comparable, present))
        if name in self.instants and wanted is not None and present is not None:
            return datetime.fromisoformat(wanted) == datetime.fromisoformat(present)
        if isinstance(wanted, dict):
            return _set(wanted) == _set(present)
        return bool(wanted == present)


def _comparable(value: Any) -> Any:
    return sorted({"model": "", **value}.items()) if isinstance(value, dict) else value


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def is_live(row: Mapping[str, Any], now: datetime) -> bool:
    """Whether a row is still there: no revoked key, no invitation that was used, taken back or has lapsed."""
    if row.get("revoked_at") or row.get("accepted_at"):
        return False
    return not is_invitation(row) or datetime.fromisoformat(row["expires_at"]).astimezone(UTC) > now


def is_invitation(row: Mapping[str, Any]) -> bool:
    """Whether a member of the file is only invited so far."""
    return "invited_by" in row


_WEIGHT = number(0.001, 10_000)
_PRICE = number(0, MAX_PRICE, is_whole=True)
TIERS = Kind(
    name="tiers",
    path="tiers",
    key=("name",),
    fields={
        "name": slug,
        "rank": number(0, 10_000, is_whole=True),
        "ttft_target_s": number(0, 3_600, may_be_null=True, above=True),
        "max_queue_wait_s": number(0, 86_400, may_be_null=True, above=True),
        "grammar_stall_s": number(0, 60, may_be_null=True),
    },
    required=("rank",),
)
GROUPS = Kind(name="groups", path="groups", key=("name",), fields={"name": slug, "weight": _WEIGHT})
POOLS = Kind(
    name="pools",
    path="pools",
    key=("name",),
    fields={
        "name": text(200),
        "aliases": names(200, least=0),
        "policy": one_of(*policy_names()),
        "scheduling": scheduling,
        "tokenizer_path": text(1_000, may_be_empty=True),
        "is_guarded": flag,
        "vocabulary": number(1, 10_000_000, is_whole=True),
        "takes_grammars": flag,
    },
    unordered=("aliases",),
)
BACKENDS = Kind(
    name="backends",
    path="backends",
    key=("pool", "name"),
    fields={
        "pool": text(200),
        "name": slug,
        "url": url,
        "kv_tokens": number(2, 1_000_000_000, is_whole=True, may_be_null=True),
        "block_size": number(1, 1_024, is_whole=True),
        "prefill_budget_tokens": number(1, 10_000_000, is_whole=True),
        "is_chunked": flag,
        "speculate": number(0, 64, is_whole=True),
        "is_cordoned": flag,
        "takes_grammars": flag,
        "api_key_name": text(100, may_be_empty=True),
    },
    sources={"pool": "pool_name"},
    required=("url",),
)
PRICE_LISTS = Kind(
    name="price_lists",
    path="price-lists",
    key=("name",),
    fields={
        "name": slug,
        "currency": text(3),
        "timezone": text(64),
        "prices": mappings(
            {"model": text(200, may_be_empty=True), "valid_from": day, "prompt_micro": _PRICE, "output_micro": _PRICE},
            required=("valid_from", "prompt_micro", "output_micro"),
        ),
    },
    required=("currency",),
    fixed=("currency", "timezone"),
    unordered=("prices",),
)
TENANTS = Kind(
    name="tenants",
    path="tenants",
    key=("slug",),
    fields={
        "slug": slug,
        "name": text(200),
        "weight": _WEIGHT,
        "state": one_of("active", "suspended", "stopped"),
        "tiers": names(40, least=1),
        "default_tier": text(40),
        "max_queued": number(1, 1_000_000, is_whole=True),
        "timezone": text(64),
        "group": or_null(text(63)),
        "limits": limits,
    },
    required=("name", "tiers", "default_tier"),
    unordered=("tiers",),
    merged=("limits",),
)
PRICE_ASSIGNMENTS = Kind(
    name="price_assignments",
    path="price-assignments",
    key=("tenant", "valid_from"),
    fields={"tenant": slug, "valid_from": day, "price_list": or_null(text(63))},
    sources={"tenant": "tenant_slug"},
    required=("price_list",),
)
KEYS = Kind(
    name="keys",
    path="keys",
    key=("tenant", "name"),
    fields={
        "tenant": slug,
        "name": text(200),
        "default_pool": text(200),
        "tiers": names(40, least=0),
        "default_tier": or_null(text(40)),
        "may_choose_tier": flag,
        "expires_at": or_null(instant),
        "limits": limits,
    },
    sources={"tenant": "tenant_slug"},
    unordered=("tiers",),
    merged=("limits",),
    instants=("expires_at",),
    secret="key",
)
MEMBERS = Kind(
    name="members",
    path="invitations",
    key=("email",),
    fields={
        "email": email,
        "role": one_of("owner", "operator", "viewer", "tenant_admin", "tenant_member"),
        "tenant": or_null(slug),
        "name": text(200, may_be_empty=True),
        "is_active": flag,
    },
    sources={"tenant": "tenant_slug"},
    required=("role",),
    secret="link",
)
KINDS = (TIERS, GROUPS, POOLS, BACKENDS, PRICE_LISTS, TENANTS, PRICE_ASSIGNMENTS, KEYS, MEMBERS)
"""In the order in which they are made: each names those before it. They are deleted in the opposite one."""
AFTER_INVITATION = ("name", "is_active")
"""Fields of a member that say something only once the account is open."""


def check(document: Document) -> None:
    """Note everything in a file that cannot be, each with its place."""
    content = document.content
    known = {kind.name: kind for kind in KINDS}
    if not isinstance(content, dict):
        document.add((), f"holds no mapping of {', '.join(known)}")
        return
    for name, value in content.items():
        if name == "managed_by":
            slug(document, (name,), value)
        elif name not in known:
            document.add((str(name),), f"unknown; one of managed_by, {', '.join(known)}")
        elif not isinstance(value, list):
            refuse(document, (name,), value, "a list")
        else:
            _check_list(document, known[name], value)


def _check_list(document: Document, kind: Kind, objects: list[Any]) -> None:
    seen: dict[Key, int] = {}
    for position, each in enumerate(objects):
        place: Place = (kind.name, position)
        if not isinstance(each, dict):
            refuse(document, place, each, f"a mapping of {', '.join(kind.fields)}")
            continue
        check_fields(document, place, each, kind.fields)
        missing = [name for name in kind.key if name not in each]
        for name in missing:
            document.add((*place, name), "is missing")
        if missing:
            continue
        key = kind.key_of(each)
        if key in seen:
            first = document.lines.get((kind.name, seen[key]))
            document.add((*place, kind.key[-1]), f"{shown('/'.join(key))} stands in line {first} already")
        else:
            seen[key] = position
