"""The hash chain of the audit log: what each entry's hash is made of, and whether a chain of entries is whole.

``hash`` = SHA-256 over the hash of the entry before (64 zeros for the first), a line feed, and the canonical JSON of
the entry's other columns. Whoever changes, removes or inserts an entry must also rewrite every hash behind it; whoever
does that, or cuts the tail, ends with another head than the one that was logged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

FIRST = "0" * 64
"""What stands before the first entry."""

COLUMNS = (
    "id", "at", "actor_kind", "actor_id", "actor_label", "action", "object_type", "object_id", "bulk", "tenant",
    "before", "after", "request_id",
)  # fmt: skip
"""What is hashed, by name. A column that is added later must be left out where it is empty, or all hashes change."""


def canonical_json(value: Any) -> str:
    """JSON that depends on the value alone: names in order of code points, no white space, no escapes beyond need.

    Numbers are plain decimals without exponent and trailing zeros, as PostgreSQL may write 1e2 as 100.
    """
    match value:
        case Mapping():
            members = (f"{json.dumps(k, ensure_ascii=False)}:{canonical_json(value[k])}" for k in sorted(value))
            return "{" + ",".join(members) + "}"
        case list() | tuple():
            return "[" + ",".join(map(canonical_json, value)) + "]"
        case float():
            text = format(Decimal(repr(value)), "f")
            text = text.rstrip("0").rstrip(".") if "." in text else text
            return "0" if text == "-0" else text
        case datetime():
            return json.dumps(value.astimezone(UTC).isoformat(timespec="microseconds"))
        case _:
            return json.dumps(value, ensure_ascii=False)


def next_hash(previous: str, values: Sequence[Any]) -> str:
    """Hash of the entry with these values of ``COLUMNS`` behind the entry of hash ``previous``."""
    text = canonical_json(dict(zip(COLUMNS, values, strict=True)))
    return hashlib.sha256(f"{previous}\n{text}".encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a walk along the chain found.

    Attributes:
        entries: entries that were read. head: hash of the last one.
        broken: id of the first entry whose hash does not follow from it and from the entry before; None: whole.
        missing: known heads that no entry has: the tail was cut, or everything was rewritten.
    """

    entries: int
    head: str
    broken: int | None
    missing: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        return self.broken is None and not self.missing


def walk(rows: Iterable[tuple[Any, ...]], known_heads: Iterable[str] = ()) -> Verdict:
    """Check rows of ``COLUMNS`` and ``hash``, in the order of their ids; about 20 us an entry."""
    missing = dict.fromkeys(known_heads)
    missing.pop(FIRST, None)
    head, n_read, broken = FIRST, 0, None
    for *values, stated in rows:
        n_read += 1
        if broken is None and next_hash(head, values) != stated:
            broken = int(values[0])
        head = stated
        missing.pop(stated, None)
    return Verdict(entries=n_read, head=head, broken=broken, missing=tuple(missing))
