"""REST of tiers."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import serializers
from rest_framework.response import Response

from controlplane.common.rest import (
    IDEMPOTENCY_KEY,
    IF_MATCH,
    PROBLEMS,
    ReadViewSet,
    StrictSerializer,
    example,
    managed_by_field,
)
from controlplane.tiers import actions, queries
from controlplane.tiers.models import Tier


class TierChangesSerializer(StrictSerializer):
    rank = serializers.IntegerField(help_text="Smaller goes first inside a tenant", min_value=0, max_value=10_000)
    ttft_target_s = serializers.FloatField(required=False, allow_null=True, help_text="Time to first token, seconds")
    max_queue_wait_s = serializers.FloatField(required=False, allow_null=True)
    grammar_stall_s = serializers.FloatField(
        required=False,
        allow_null=True,
        min_value=0,
        max_value=60,
        help_text="Seconds a new grammar may stall a backend; null: 2, 0: no grammars",
    )
    managed_by = managed_by_field()


class NewTierSerializer(TierChangesSerializer):
    name = serializers.CharField(max_length=40)


class TierSerializer(serializers.ModelSerializer[Tier]):
    class Meta:
        model = Tier
        fields = [
            "id", "name", "rank", "ttft_target_s", "max_queue_wait_s", "grammar_stall_s", "managed_by", "version",
            "created_at", "updated_at",
        ]  # fmt: skip


@extend_schema_view(
    list=extend_schema(responses={200: TierSerializer(many=True), **PROBLEMS}),
    retrieve=extend_schema(responses={200: TierSerializer, **PROBLEMS}),
    create=extend_schema(
        request=NewTierSerializer,
        responses={201: TierSerializer, **PROBLEMS},
        parameters=[IDEMPOTENCY_KEY],
        examples=[example("First token within two seconds", name="interactive", rank=0, ttft_target_s=2)],
    ),
    partial_update=extend_schema(
        request=TierChangesSerializer, responses={200: TierSerializer, **PROBLEMS}, parameters=[IF_MATCH]
    ),
    destroy=extend_schema(responses={204: None, **PROBLEMS}, parameters=[IF_MATCH]),
)
class TierViewSet(ReadViewSet):
    what = "tier"
    queryset = Tier.objects.none()
    serializer_class = TierSerializer

    def get_queryset(self) -> Any:
        return queries.tiers(actor=self.actor)

    def create(self, request: Any) -> Response:
        body = self.checked(NewTierSerializer)
        return self.created(lambda: (actions.create_tier(actor=self.actor, **body), {}))

    def partial_update(self, request: Any, pk: str) -> Response:
        changes: Any = self.checked(TierChangesSerializer, is_partial=True)
        actions.update_tier(actor=self.actor, tier_id=pk, expected_version=self.expected_version(), **changes)
        return self.shown(self.found(pk))

    def destroy(self, request: Any, pk: str) -> Response:
        actions.delete_tier(actor=self.actor, tier_id=pk, expected_version=self.expected_version())
        return Response(status=204)
