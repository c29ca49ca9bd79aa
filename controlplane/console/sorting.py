"""Lists that are sorted by any of their columns and turned page by page, by the database, whatever their length.

A page begins behind the row whose sort key and id the cursor names, so that rows that come or go meanwhile move no
other row from one page to another.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from django.db.models import F, Model, Q, QuerySet
from django.db.models.expressions import Combinable

from controlplane.common.errors import Invalid
from controlplane.common.validation import without_nul

M = TypeVar("M", bound=Model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. ``key``: what it is sorted by, a field or an expression that is never null; None: it is not.

    ``is_text``: what kind of key that is; ``is_number``: its cells are numbers.
    """

    name: str
    label: str
    key: str | Combinable | None = None
    is_text: bool = True
    is_number: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A column as the table's head shows it. ``url``: sorts by it, or the other way round; "" where it cannot be."""

    column: Column
    url: str
    aria_sort: str

    @property
    def mark(self) -> str:
        return {"ascending": "▲", "descending": "▼"}.get(self.aria_sort, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[M]):
    """``next_query``: of the page behind this one, "" for none; ``sort``: as asked for, for a form to keep."""

    rows: Sequence[M]
    heads: Sequence[Head]
    next_query: str
    sort: str


def sorted_page(
    rows: QuerySet[M], columns: Sequence[Column], *, given: Mapping[str, str], kept: Mapping[str, str], size: int
) -> Page[M]:
    """A page of ``rows``.

    Args:
        columns: the first that has a key is sorted by where nothing is said. given: the parameters ``sort`` (a
            column's name, with - before it for the other way round) and ``cursor``. kept: further parameters that
            links repeat.

    Raises:
        Invalid: no such column or cursor.
    """
    keyed = {column.name: column for column in columns if column.key is not None}
    sort = given.get("sort") or next(iter(keyed))
    is_down, name = sort.startswith("-"), sort.removeprefix("-")
    column = keyed.get(name)
    if column is None:
        raise Invalid({"sort": f"one of {', '.join(keyed)}, with - before it or without, not {sort[:40]!r}"})
    assert column.key is not None
    key = F(column.key) if isinstance(column.key, str) else column.key
    keyed_rows: QuerySet[Any] = rows.annotate(_key=key)
    if cursor := given.get("cursor"):
        value, pk = _opened(cursor, is_text=column.is_text)
        side = "lt" if is_down else "gt"
        keyed_rows = keyed_rows.filter(Q(**{f"_key__{side}": value}) | Q(_key=value, **{f"pk__{side}": pk}))
    found = list(keyed_rows.order_by(*(("-_key", "-pk") if is_down else ("_key", "pk")))[: size + 1])
    more = {} if len(found) <= size else {"cursor": _cursor(found[size - 1])}
    stated = {**{k: v for k, v in kept.items() if v}, "sort": sort}
    return Page(
        rows=found[:size],
        heads=[_head(each, sort, kept) for each in columns],
        next_query=urlencode({**stated, **more}) if more else "",
        sort=sort,
    )


def asked_page(
    rows: QuerySet[M], columns: Sequence[Column], *, asked: Mapping[str, str], kept: Sequence[str] = (),
    size: int = 100, sort: str = "",
) -> tuple[Page[M], str]:  # fmt: skip
    """``sorted_page`` of what an address asks for, and what is wrong with it, "" for nothing; no rows are shown then.

    Args:
        asked: its parameters. kept: names of those that links repeat. sort: where it says nothing.
    """
    given = {name: without_nul(asked.get(name, "")).strip() for name in ("sort", "cursor", *kept)}
    try:
        held = {name: given[name] for name in kept}
        return sorted_page(rows, columns, given={**given, "sort": given["sort"] or sort}, kept=held, size=size), ""
    except Invalid as refused:
        return sorted_page(rows.none(), columns, given={}, kept={}, size=size), refused.message


def _head(column: Column, sort: str, kept: Mapping[str, str]) -> Head:
    if column.key is None:
        return Head(column=column, url="", aria_sort="")
    is_here = sort.removeprefix("-") == column.name
    turned = f"-{column.name}" if sort == column.name else column.name
    order = "" if not is_here else "descending" if sort.startswith("-") else "ascending"
    query = urlencode({**{k: v for k, v in kept.items() if v}, "sort": turned})
    return Head(column=column, url=f"?{query}", aria_sort=order)


def _cursor(row: Any) -> str:
    text = json.dumps([row._key, row.pk], default=str)
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _opened(cursor: str, *, is_text: bool) -> tuple[Any, str]:
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
        value, pk = json.loads(text)
        is_key = isinstance(value, str if is_text else int | float)
        if not is_key or not isinstance(pk, str) or "\0" in f"{value}{pk}":
            raise ValueError("no key of a row")
    except (ValueError, binascii.Error, RecursionError) as error:
        raise Invalid({"cursor": "not a cursor of this list"}) from error
    return value, pk
