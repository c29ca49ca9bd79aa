"""REST of tenant keys."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.response import Response

from controlplane.common.actor import Scope
from controlplane.common.rest import (
    IDEMPOTENCY_KEY,
    IF_MATCH,
    PROBLEMS,
    LimitsSerializer,
    ReadViewSet,
    StrictSerializer,
    example,
    managed_by_field,
)
from controlplane.keys import actions, queries
from controlplane.keys.models import ApiKey


class KeyChangesSerializer(StrictSerializer):
    name = serializers.CharField(max_length=200, required=False)
    default_pool = serializers.CharField(max_length=200, required=False, help_text="Id, name or alias")
    tiers = serializers.ListField(child=serializers.CharField(max_length=40), max_length=100, required=False)
    default_tier = serializers.CharField(max_length=40, required=False, allow_null=True)
    may_choose_tier = serializers.BooleanField(required=False)
    expires_at = serializers.DateTimeField(required=False, allow_null=True)
    limits = LimitsSerializer(required=False)
    managed_by = managed_by_field()


class NewKeySerializer(KeyChangesSerializer):
    name = serializers.CharField(max_length=200)
    tenant = serializers.CharField(max_length=63, help_text="Id or short name")


class KeySerializer(serializers.ModelSerializer[ApiKey]):
    tenant = serializers.CharField(source="tenant_id")
    tenant_slug = serializers.CharField(source="tenant.slug")
    default_pool = serializers.CharField(
        source="default_pool.name", allow_null=True, default=None, help_text="null: revoked, and the pool is gone"
    )
    tiers = serializers.SerializerMethodField()
    default_tier = serializers.CharField(source="default_tier.name", allow_null=True, default=None)
    limits = LimitsSerializer(source="*", read_only=True)

    class Meta:
        model = ApiKey
        fields = [
            "id", "tenant", "tenant_slug", "name", "public_id", "default_pool", "tiers", "default_tier",
            "may_choose_tier", "expires_at", "revoked_at", "last_used_at", "limits", "pepper_version",
            "managed_by", "version", "created_at", "updated_at",
        ]  # fmt: skip

    def get_tiers(self, key: ApiKey) -> list[str]:
        return queries.tier_names(key)


class IssuedKeySerializer(KeySerializer):
    """A key with its text. A repeated create shows null there."""

    key = serializers.CharField(allow_null=True, help_text="Shown this once and kept nowhere")

    class Meta(KeySerializer.Meta):
        fields = [*KeySerializer.Meta.fields, "key"]


@extend_schema_view(
    list=extend_schema(
        responses={200: KeySerializer(many=True), **PROBLEMS},
        parameters=[
            OpenApiParameter("tenant", str),
            OpenApiParameter("old_pepper", bool, description="true: live keys under an older pepper than new ones"),
        ],
    ),
    retrieve=extend_schema(responses={200: KeySerializer, **PROBLEMS}),
    create=extend_schema(
        request=NewKeySerializer,
        responses={201: IssuedKeySerializer, **PROBLEMS},
        parameters=[IDEMPOTENCY_KEY],
        examples=[example("For one program", tenant="chatbot", name="production", default_pool="org/model")],
    ),
    partial_update=extend_schema(
        request=KeyChangesSerializer, responses={200: KeySerializer, **PROBLEMS}, parameters=[IF_MATCH]
    ),
)
class KeyViewSet(ReadViewSet):
    what = "key"
    scopes: ClassVar[dict[str, Scope]] = {
        "list": Scope.TENANT_READ,
        "retrieve": Scope.TENANT_READ,
        "create": Scope.TENANT_WRITE,
        "partial_update": Scope.TENANT_WRITE,
        "revoke": Scope.TENANT_WRITE,
    }
    queryset = ApiKey.objects.none()
    serializer_class = KeySerializer

    def get_queryset(self) -> Any:
        rows = queries.keys(actor=self.actor, tenant=self.request.query_params.get("tenant", ""))
        return queries.under_old_pepper(rows) if self.request.query_params.get("old_pepper") == "true" else rows

    def create(self, request: Any) -> Response:
        body = self.checked(NewKeySerializer)
        tenant = body.pop("tenant")

        def issue() -> tuple[ApiKey, dict[str, Any]]:
            key, text = actions.issue_key(actor=self.actor, tenant_id=tenant, **body)
            return key, {"key": text}

        return self.created(issue, secret_fields=("key",))

    def partial_update(self, request: Any, pk: str) -> Response:
        changes: Any = self.checked(KeyChangesSerializer, is_partial=True)
        actions.update_key(actor=self.actor, key_id=pk, expected_version=self.expected_version(), **changes)
        return self.shown(self.found(pk))

    @extend_schema(request=None, responses={200: KeySerializer, **PROBLEMS}, parameters=[IF_MATCH])
    @action(detail=True, methods=["post"])
    def revoke(self, request: Any, pk: str) -> Response:
        """Revoke for good. Routers refuse the key within two seconds."""
        actions.revoke_key(actor=self.actor, key_id=pk, expected_version=self.expected_version())
        return self.shown(self.found(pk))
