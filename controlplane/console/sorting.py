"""Lists whose table is sorted by any of its columns and turned page by page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import urlencode

from django.db.models import Model, QuerySet

from controlplane.common.errors import Invalid
from controlplane.common.sorting import SortKey, sorted_rows
from controlplane.common.validation import without_nul

M = TypeVar("M", bound=Model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. ``key``: what it is sorted by; None: it is not. ``is_number``: its cells are numbers."""

    name: str
    label: str
    key: SortKey | None = None
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
    keys = {column.name: column.key for column in columns if column.key is not None}
    sort = given.get("sort") or next(iter(keys))
    found, cursor = sorted_rows(rows, keys, sort=sort, cursor=given.get("cursor", ""), size=size)
    stated = {**{k: v for k, v in kept.items() if v}, "sort": sort, "cursor": cursor}
    return Page(
        rows=found,
        heads=[_head(each, sort, kept) for each in columns],
        next_query=urlencode(stated) if cursor else "",
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
