"""Cursor pages: ``limit`` up to 1,000, an opaque ``cursor``, ``next`` in the answer; stable under inserts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ValidationError as DjangoValidationError
from django.db.models import QuerySet
from rest_framework.exceptions import ValidationError
from rest_framework.pagination import BasePagination
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.common import cursors
from controlplane.common.sorting import SortKey, sorted_rows

DEFAULT_LIMIT = 100
MAX_LIMIT = 1_000


class CursorPages(BasePagination):
    """Keyset pages by primary key, newest first. Ids begin with their time, so the order is that of creation.

    A view with ``sorted_by`` takes a parameter ``sort`` as well: a name of these, with - before it for descending.
    """

    def __init__(self) -> None:
        self.next_cursor: str | None = None

    def paginate_queryset(self, queryset: Any, request: Request, view: Any = None) -> list[Any]:
        limit = read_limit(request.query_params.get("limit"))
        sort, keys = request.query_params.get("sort"), getattr(view, "sorted_by", None)
        if sort and keys:
            behind = request.query_params.get("cursor", "")
            found, following = sorted_rows(queryset, keys, sort=sort, cursor=behind, size=limit)
            self.next_cursor = following or None
            return found
        rows = queryset.order_by("-pk")
        cursor = request.query_params.get("cursor")
        if cursor:
            rows = rows.filter(pk__lt=_decode(cursor, queryset))
        page = list(rows[: limit + 1])
        if len(page) > limit:
            page = page[:limit]
            self.next_cursor = cursor_of(str(page[-1].pk))
        return page

    def get_paginated_response(self, data: Any) -> Response:
        return Response({"results": data, "next": self.next_cursor})

    def get_paginated_response_schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "object",
            "required": ["results", "next"],
            "properties": {
                "results": schema,
                "next": {"type": ["string", "null"], "description": "Value of `cursor` for the page after this one"},
            },
        }

    def get_schema_operation_parameters(self, view: Any) -> list[dict[str, Any]]:
        return [
            {
                "name": "limit",
                "in": "query",
                "required": False,
                "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
            },
            {"name": "cursor", "in": "query", "required": False, "schema": {"type": "string"}},
            *([_sort_parameter(keys)] if (keys := getattr(view, "sorted_by", None)) else []),
        ]


def _sort_parameter(keys: Mapping[str, SortKey]) -> dict[str, Any]:
    return {
        "name": "sort",
        "in": "query",
        "required": False,
        "description": "With - before it: the other way round; left out: newest first. Goes with its own cursors",
        "schema": {"type": "string", "enum": [f"{sign}{name}" for name in keys for sign in ("", "-")]},
    }


def read_limit(text: str | None) -> int:
    """Rows of a page.

    Raises:
        ValidationError: no number from 1 to ``MAX_LIMIT``.
    """
    if text is None:
        return DEFAULT_LIMIT
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise ValidationError({"limit": [f"a whole number from 1 to {MAX_LIMIT}, not {text[:20]!r}"]})
    return limit


def cursor_of(key: str) -> str:
    """The cursor of the page behind the row of this key."""
    return cursors.sealed(key.encode())


def key_of(cursor: str) -> str:
    """What ``cursor_of`` was given.

    Raises:
        ValidationError: this is no cursor.
    """
    try:
        text = cursors.opened(cursor).decode()
        if not text or "\0" in text:
            raise ValueError("no key of a row")
    except ValueError as error:
        raise _not_a_cursor() from error
    return text


def _not_a_cursor() -> ValidationError:
    return ValidationError({"cursor": ["not a cursor of this list"]})


def _decode(cursor: str, queryset: QuerySet[Any]) -> Any:
    try:
        return queryset.model._meta.pk.to_python(key_of(cursor))
    except DjangoValidationError as error:
        raise _not_a_cursor() from error
