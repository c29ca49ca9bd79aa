"""REST of the audit log: read only."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.response import Response

from controlplane.audit import queries
from controlplane.audit.models import AuditEntry, AuditHead
from controlplane.common.rest import PROBLEMS, UseCaseViewSet

_FILTERS = ("object_type", "object_id", "tenant")


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
        responses={200: AuditEntrySerializer(many=True), **PROBLEMS},
        parameters=[OpenApiParameter(name, str) for name in _FILTERS],
    ),
)
class AuditViewSet(UseCaseViewSet):
    what = "audit entry"
    queryset = AuditEntry.objects.none()
    serializer_class = AuditEntrySerializer

    def get_queryset(self) -> Any:
        given = {name: self.request.query_params.get(name, "") for name in _FILTERS}
        return queries.entries(actor=self.actor, **given)

    def list(self, request: Any) -> Response:
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
