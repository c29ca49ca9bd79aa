"""What the REST viewsets share: the actor, versions by ``ETag`` and ``If-Match``, creates that may be sent twice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from django.db.models import Model
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiExample, OpenApiParameter, OpenApiResponse
from rest_framework import serializers
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from controlplane.common.actor import Actor
from controlplane.common.errors import Invalid
from controlplane.common.idempotency import create_once, etag_of
from controlplane.common.limits import LIMITS, MAX_LIMIT, TEXTS
from controlplane.common.validation import MAX_REASON, get_or_not_found


class ProblemSerializer(serializers.Serializer[Any]):
    """problem+json (RFC 9457)."""

    type = serializers.CharField()
    title = serializers.CharField()
    status = serializers.IntegerField()
    code = serializers.CharField()
    detail = serializers.CharField()
    errors: Any = serializers.DictField(
        child=serializers.ListField(child=serializers.CharField()), required=False, help_text="Messages by field"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: tuple[tuple[type[Any], Callable[[Any], bool], str], ...] = (
    (serializers.IntegerField, lambda value: _is_number(value) and value == value // 1, "a whole number"),
    (serializers.FloatField, _is_number, "a number"),
    (serializers.BooleanField, lambda value: isinstance(value, bool), "true or false"),
    (serializers.CharField, lambda value: isinstance(value, str), "a text"),
    (serializers.ChoiceField, lambda value: isinstance(value, str), "a text"),
)


def _wrong_type(field: serializers.Field[Any, Any, Any, Any], value: Any) -> Any:
    """What is wrong with the JSON type of a value, as DRF's details say it; None: nothing, or the field sees to it."""
    if value is None or value is serializers.empty:
        return None
    if isinstance(field, serializers.ListField) and isinstance(value, list):
        found = [_wrong_type(field.child, each) for each in value]
        return {n: wrong for n, wrong in enumerate(found) if wrong} or None
    for kind, is_right, words in _TYPES:
        if isinstance(field, kind):
            return None if is_right(value) else [f"{words} is needed, not {json.dumps(value)[:40]}"]
    return None


class StrictSerializer(serializers.Serializer[Any]):
    """Refuses what the document does not say, where DRF would guess.

    A field it does not know: a misspelt one must not be dropped silently. A value of another JSON type: ``true`` is no
    weight of 1, nor is ``"no"`` false.
    """

    def to_internal_value(self, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return super().to_internal_value(data)
        if unknown := sorted(set(data) - set(self.fields)):
            raise serializers.ValidationError({str(name): ["unknown field"] for name in unknown})
        wrong = {n: w for n, value in data.items() if (w := _wrong_type(self.fields[n], value))}
        try:
            values = super().to_internal_value(data)
        except serializers.ValidationError as error:
            raise serializers.ValidationError({**error.detail, **wrong}) from error  # type: ignore[dict-item] # a dict
        if wrong:
            raise serializers.ValidationError(wrong)
        return values


class LimitsSerializer(StrictSerializer):
    """null: no limit; 0: nothing. In a change, what is left out stays."""

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        return {
            name: serializers.IntegerField(
                required=False, allow_null=True, min_value=0, max_value=MAX_LIMIT, help_text=TEXTS[name].help
            )
            for name in LIMITS
        }


def managed_by_field() -> serializers.CharField:
    """The label of ``Managed``, for serializers of new rows and of changes."""
    return serializers.CharField(
        max_length=63,
        required=False,
        allow_blank=True,
        help_text="Program that keeps it as a file says, such as `fairlane-apply`; empty: none",
    )


class BrakeSerializer(StrictSerializer):
    reason = serializers.CharField(max_length=MAX_REASON, help_text="Why; kept in the audit log")


class ReleaseSerializer(StrictSerializer):
    reason = serializers.CharField(
        max_length=MAX_REASON, required=False, allow_blank=True, default="", help_text="Why; kept in the audit log"
    )


PROBLEMS: dict[tuple[int, str], OpenApiResponse] = {
    (status, "application/problem+json"): OpenApiResponse(ProblemSerializer, description=text)
    for status, text in (
        (400, "Not JSON"),
        (401, "No valid session or token"),
        (403, "The scope is missing"),
        (404, "Nothing of that id"),
        (405, "Not by this method"),
        (406, "Only JSON is spoken here"),
        (409, "The state forbids it"),
        (412, "Somebody changed it first"),
        (413, "The body is too large"),
        (415, "Only JSON is read here"),
        (422, "Invalid fields, by name"),
        (429, "Too many attempts"),
        (503, "The database is not reachable"),
    )
}
IF_MATCH = OpenApiParameter(
    "If-Match",
    OpenApiTypes.STR,
    OpenApiParameter.HEADER,
    description='The `version` last read, quoted: `"3"`; left out or `*`: whatever it is',
)
IDEMPOTENCY_KEY = OpenApiParameter(
    "Idempotency-Key",
    OpenApiTypes.STR,
    OpenApiParameter.HEADER,
    description="Sent again with the same key and body, the create answers what it answered first",
)


def example(title: str, /, **body: Any) -> OpenApiExample:
    """A body of a request, for the document."""
    return OpenApiExample(title, body, request_only=True)


# A proxy that compresses answers makes their tags weak; a version names one state of the row all the same.
_ETAG = re.compile(r'(?:W/)?"([0-9]{1,9})"\Z')


class UseCaseViewSet(GenericViewSet[Any]):
    """Base of all viewsets. Serializers check shapes and show rows; use cases decide and write."""

    lookup_value_regex = "[^/]+"
    what: ClassVar[str] = "object"

    @property
    def actor(self) -> Actor:
        # The authentication layer above this app knows how; it sets the attribute on every request.
        actor = getattr(self.request, "actor", None)
        if not isinstance(actor, Actor):
            raise TypeError("the request was not authenticated")
        return actor

    def checked(self, serializer: type[serializers.Serializer[Any]], *, is_partial: bool = False) -> dict[str, Any]:
        """The validated body."""
        bound = serializer(data=self.request.data, partial=is_partial)
        bound.is_valid(raise_exception=True)
        return dict(bound.validated_data)

    def expected_version(self) -> int | None:
        """The version named by ``If-Match``, None without the header or with ``*``."""
        header = self.request.headers.get("if-match")
        if header is None or header.strip() == "*":
            return None
        match = _ETAG.match(header.strip())
        if match is None:
            raise Invalid({"If-Match": f'a quoted version such as "3", not {header[:40]!r}'})
        return int(match[1])

    def found(self, public_id: str) -> Any:
        """The row of this id among those the actor may read."""
        return get_or_not_found(self.get_queryset(), self.what, public_id)

    def shown(self, row: Any, *, status: int = 200, **extra: Any) -> Response:
        """A row as its serializer shows it, with its version as ``ETag``."""
        data = {**self.get_serializer(row).data, **extra}
        return Response(data, status=status, headers=etag_of(data))

    def listed(self, rows: Any) -> Response:
        page = self.paginate_queryset(rows)
        return self.get_paginated_response(self.get_serializer(page, many=True).data)

    def created(
        self, create: Callable[[], tuple[Model, dict[str, Any]]], secret_fields: Collection[str] = ()
    ) -> Response:
        """201 with the row and its secrets, once per ``Idempotency-Key``."""

        def run() -> Response:
            row, extra = create()
            return self.shown(self.found(str(row.pk)), status=201, **extra)

        return create_once(self.request, actor=self.actor, create=run, secret_fields=secret_fields)


class ReadViewSet(UseCaseViewSet):
    """A kind of objects that is listed, and read one by one."""

    def list(self, request: Any) -> Response:
        """All of them, by pages."""
        return self.listed(self.get_queryset())

    def retrieve(self, request: Any, pk: str) -> Response:
        """One of them."""
        return self.shown(self.found(pk))
