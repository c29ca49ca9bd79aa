"""REST of revisions: read only, since every change publishes one."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import serializers

from controlplane.common.rest import PROBLEMS, ReadViewSet
from controlplane.rollout import queries
from controlplane.rollout.models import Revision


class RevisionSerializer(serializers.ModelSerializer[Revision]):
    class Meta:
        model = Revision
        fields = ["number", "digest", "n_bytes", "published_at", "actor", "reason"]


@extend_schema_view(
    list=extend_schema(responses={200: RevisionSerializer(many=True), **PROBLEMS}),
    retrieve=extend_schema(responses={200: RevisionSerializer, **PROBLEMS}),
)
class RevisionViewSet(ReadViewSet):
    what = "revision"
    queryset = Revision.objects.none()
    serializer_class = RevisionSerializer
    lookup_value_regex = r"[0-9]{1,18}"

    def get_queryset(self) -> Any:
        return queries.revisions(actor=self.actor)
