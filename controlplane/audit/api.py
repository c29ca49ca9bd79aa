"""REST of the audit log: read only."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.response import Response

from controlplane.audit import queries
from controlplane.audit.export import FORMATS, download
from controlplane.audit.models import AuditEntry, AuditHead
from controlplane.common.errors import Invalid
from controlplane.common.rest import PROBLEMS, UseCaseViewSet

_PARAMETERS = [
    OpenApiParameter("actor", str, description="Id of who acted, or a part of the name"),
    OpenApiParameter("action", str, description="Such as `tenant.updated`, or `tenant` for all of them"),
    OpenApiParameter("object_type", str),
    OpenApiParameter("object_id", str, description="Found in actions on many as well"),
    OpenApiParameter("tenant", str, description="Id; found in actions on many as well"),
    OpenApiParameter("from", str, description="Day or instant, UTC where it names no offset"),
    OpenApiParameter("to", str, description="Likewise; a day is inside, an instant is not"),
    OpenApiParameter(
        "format", str, enum=list(FORMATS), description="All of them as a streamed file, whatever `limit` and `cursor`"
    ),
]


class AuditEntrySerializer(serializers.ModelSerializer[AuditEntry]):
    before = serializers.DictField(allow_null=True)
    after = serializers.DictField(allow_null=True)

    class Meta:
        model = AuditEntry
        fields = [
            "id", "at", "actor_kind", "actor_id", "actor_label", "action", "object_type", "object_id", "bulk", "tenant",
            "before", "after", "request_id", "hash",
        ]  # fmt: skip
        extra_kwargs = {
            "bulk": {"help_text": "Ids of all objects of an action on many; `before` and `after` are by id then"},
            "hash": {"help_text": "SHA-256 over the hash of the entry before, a line feed, and this entry"},
        }


class AuditHeadSerializer(serializers.ModelSerializer[AuditHead]):
    class Meta:
        model = AuditHead
        fields = ["at", "entry", "hash"]


class HeadSerializer(serializers.Serializer[Any]):
    entry = serializers.IntegerField(allow_null=True, help_text="Id of the newest entry; null: there is none")
    hash = serializers.CharField(help_text="Keep it elsewhere: `verify` tells later whether it is still in the log")
    logged = AuditHeadSerializer(many=True, help_text="As it was logged, a day each; the newest 100")


class VerdictSerializer(serializers.Serializer[Any]):
    is_whole = serializers.BooleanField()
    entries = serializers.IntegerField()
    head = serializers.CharField(help_text="Hash of the newest entry")
    broken = serializers.IntegerField(
        allow_null=True, help_text="First entry that is not what was written, or follows one that was taken away"
    )
    missing = serializers.ListField(
        child=serializers.CharField(), help_text="Heads that were logged, or asked for, and are of no entry"
    )


@extend_schema_view(
    list=extend_schema(
        responses={
            200: AuditEntrySerializer(many=True),
            (200, "text/csv"): OpenApiTypes.STR,
            **PROBLEMS,
        },
        parameters=_PARAMETERS,
    ),
)
class AuditViewSet(UseCaseViewSet):
    what = "audit entry"
    queryset = AuditEntry.objects.none()
    serializer_class = AuditEntrySerializer

    def get_queryset(self) -> Any:
        return queries.entries(actor=self.actor, narrowed=queries.read_filter(self.request.query_params))

    def list(self, request: Any) -> HttpResponseBase:
        form = request.query_params.get("format")
        if form not in (None, *FORMATS):
            raise Invalid({"format": f"one of {', '.join(FORMATS)}, not {form[:40]!r}"})
        if form is not None:
            return download(queries.all_of(self.get_queryset()), form)
        return self.listed(self.get_queryset())

    @extend_schema(responses={200: HeadSerializer, **PROBLEMS}, filters=False)
    @action(detail=False, pagination_class=None, url_path="head")  # a method "head" would answer HEAD
    def newest(self, request: Any) -> Response:
        """The hash of the newest entry, and what it was on the days before."""
        entry, head = queries.head(actor=self.actor)
        logged = queries.heads(actor=self.actor)[:100]
        return Response(HeadSerializer({"entry": entry, "hash": head, "logged": logged}).data)

    @extend_schema(
        responses={200: VerdictSerializer, **PROBLEMS},
        parameters=[OpenApiParameter("head", str, many=True, description="A hash kept elsewhere; may be repeated")],
        filters=False,
    )
    @action(detail=False, pagination_class=None)
    def verify(self, request: Any) -> Response:
        """Read all entries, and check that each is what was written and that the heads of before are among them."""
        verdict = queries.verify(actor=self.actor, heads=request.query_params.getlist("head"))
        return Response(VerdictSerializer(verdict).data)
