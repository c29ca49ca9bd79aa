"""Rows sorted by any key of their kind and turned page by page, by the database, whatever their number.

A page begins behind the row whose sort key and id the cursor names, so that rows that come or go meanwhile move no
other row from one page to another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from django.db.models import F, Model, Q, QuerySet
from django.db.models.expressions import Combinable

from controlplane.common import cursors
from controlplane.common.errors import Invalid

M = TypeVar("M", bound=Model)
MOST = 10**15
"""No number that rows are sorted by is as large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SortKey:
    """What rows are sorted by: a field or an expression that is never null. ``is_text``: what kind of value that is."""

    by: str | Combinable
    is_text: bool = True


def sorted_rows(
    rows: QuerySet[M], keys: Mapping[str, SortKey], *, sort: str, cursor: str, size: int
) -> tuple[list[M], str]:
    """A page of ``rows``, and the cursor of the page behind it, "" for none.

    Args:
        sort: a name of ``keys``, with - before it for the other way round; equals stand by id.

    Raises:
        Invalid: no such key or cursor.
    """
    is_down, key = sort.startswith("-"), keys.get(sort.removeprefix("-"))
    if key is None:
        raise Invalid({"sort": f"one of {', '.join(keys)}, with - before it or without, not {sort[:40]!r}"})
    keyed: QuerySet[Any] = rows.annotate(_key=F(key.by) if isinstance(key.by, str) else key.by)
    if cursor:
        value, pk = _opened(cursor, is_text=key.is_text)
        side = "lt" if is_down else "gt"
        keyed = keyed.filter(Q(**{f"_key__{side}": value}) | Q(_key=value, **{f"pk__{side}": pk}))
    found = list(keyed.order_by(*(("-_key", "-pk") if is_down else ("_key", "pk")))[: size + 1])
    return found[:size], _cursor(found[size - 1]) if len(found) > size else ""


def _cursor(row: Any) -> str:
    text = json.dumps([row._key, row.pk], default=str)
    return cursors.sealed(text.encode())


def _opened(cursor: str, *, is_text: bool) -> tuple[Any, str]:
    try:
        text = cursors.opened(cursor).decode()
        value, pk = json.loads(text)
        is_key = isinstance(value, str) if is_text else type(value) in (int, float) and abs(value) < MOST
        if not is_key or not isinstance(pk, str) or b"\0" in f"{value}{pk}".encode():
            raise ValueError("no key of a row")
    except (ValueError, RecursionError) as error:
        raise Invalid({"cursor": "not a cursor of this list"}) from error
    return value, pk
