"""REST of the audit log: read only."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import serializers
from rest_framework.response import Response

from controlplane.audit import queries
from controlplane.audit.models import AuditEntry
from controlplane.common.rest import PROBLEMS, UseCaseViewSet

_FILTERS = ("object_type", "object_id", "tenant")


class AuditEntrySerializer(serializers.ModelSerializer[AuditEntry]):
    before = serializers.DictField(allow_null=True)
    after = serializers.DictField(allow_null=True)

    class Meta:
        model = AuditEntry
        fields = [
            "id", "at", "actor_kind", "actor_id", "actor_label", "action", "object_type", "object_id", "tenant",
            "before", "after", "request_id",
        ]  # fmt: skip


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
