"""REST of tenants and fairness groups."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import OpenApiExample, OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.response import Response

from controlplane.common.actor import Scope
from controlplane.common.rest import (
    IDEMPOTENCY_KEY,
    IF_MATCH,
    PROBLEMS,
    BrakeSerializer,
    LimitsSerializer,
    ReadViewSet,
    ReleaseSerializer,
    StrictSerializer,
    example,
    managed_by_field,
)
from controlplane.tenants import actions, bulk, queries
from controlplane.tenants.models import Group, Tenant, TenantState

_ZONE_HELP = "IANA name of the time zone whose months its statements cover"
_GROUP_HELP = "Name of its fairness group, null for none; `weight` is its share inside the group then"


class NewTenantSerializer(StrictSerializer):
    name = serializers.CharField(max_length=200)
    slug = serializers.CharField(max_length=63)
    tiers = serializers.ListField(child=serializers.CharField(max_length=40), min_length=1, max_length=100)
    default_tier = serializers.CharField(max_length=40)
    weight = serializers.FloatField(required=False, default=1.0, min_value=0.001, max_value=10_000)
    max_queued = serializers.IntegerField(required=False, default=2_000, min_value=1, max_value=1_000_000)
    timezone = serializers.CharField(required=False, default="UTC", max_length=64, help_text=_ZONE_HELP)
    group = serializers.CharField(required=False, allow_null=True, default=None, max_length=63, help_text=_GROUP_HELP)
    limits = LimitsSerializer(required=False)
    state = serializers.ChoiceField(choices=TenantState.choices, required=False, default=TenantState.ACTIVE)
    managed_by = managed_by_field()


class TenantChangesSerializer(StrictSerializer):
    name = serializers.CharField(max_length=200, required=False)
    slug = serializers.CharField(max_length=63, required=False)
    tiers = serializers.ListField(
        child=serializers.CharField(max_length=40), min_length=1, max_length=100, required=False
    )
    default_tier = serializers.CharField(max_length=40, required=False)
    weight = serializers.FloatField(required=False, min_value=0.001, max_value=10_000)
    max_queued = serializers.IntegerField(required=False, min_value=1, max_value=1_000_000)
    timezone = serializers.CharField(required=False, max_length=64, help_text=_ZONE_HELP)
    state = serializers.ChoiceField(choices=TenantState.choices, required=False)
    group = serializers.CharField(required=False, allow_null=True, max_length=63, help_text=_GROUP_HELP)
    limits = LimitsSerializer(required=False)
    managed_by = managed_by_field()


class SuspensionSerializer(ReleaseSerializer):
    is_cut = serializers.BooleanField(
        required=False, default=False, help_text="What runs ends as well: the tenant is stopped"
    )


class BulkChangeSerializer(ReleaseSerializer):
    tenants = serializers.ListField(
        child=serializers.CharField(max_length=40), min_length=1, max_length=bulk.MAX_BULK, help_text="Ids"
    )
    state = serializers.ChoiceField(choices=TenantState.choices, required=False)
    weight = serializers.FloatField(required=False, min_value=0.001, max_value=10_000)
    default_tier = serializers.CharField(
        max_length=40, required=False, help_text="Becomes one of their tiers where it is not"
    )


class BulkResultSerializer(serializers.Serializer[Any]):
    changed = serializers.ListField(child=serializers.CharField(), help_text="Those that were not so already")


class TenantSerializer(serializers.ModelSerializer[Tenant]):
    tiers = serializers.SerializerMethodField()
    default_tier = serializers.CharField(source="default_tier.name")
    group: serializers.SlugRelatedField[Group] = serializers.SlugRelatedField(
        slug_field="name", read_only=True, allow_null=True, help_text=_GROUP_HELP
    )
    limits = LimitsSerializer(source="*", read_only=True)

    class Meta:
        model = Tenant
        fields = [
            "id", "slug", "name", "weight", "state", "tiers", "default_tier", "max_queued", "timezone", "group",
            "limits", "managed_by", "version", "created_at", "updated_at",
        ]  # fmt: skip

    def get_tiers(self, tenant: Tenant) -> list[str]:
        return queries.tier_names(tenant)


_EXAMPLE = OpenApiExample(
    "A chatbot",
    {"name": "Chatbot", "slug": "chatbot", "tiers": ["interactive"], "default_tier": "interactive", "weight": 2},
    request_only=True,
)


@extend_schema_view(
    list=extend_schema(
        responses={200: TenantSerializer(many=True), **PROBLEMS},
        parameters=[
            OpenApiParameter("q", str, description="An id, or a part of the name or short name"),
            OpenApiParameter("slug", str, description="The short name"),
            OpenApiParameter("state", str, enum=TenantState.values),
        ],
    ),
    retrieve=extend_schema(responses={200: TenantSerializer, **PROBLEMS}),
    create=extend_schema(
        request=NewTenantSerializer,
        responses={201: TenantSerializer, **PROBLEMS},
        parameters=[IDEMPOTENCY_KEY],
        examples=[_EXAMPLE],
    ),
    destroy=extend_schema(responses={204: None, **PROBLEMS}, parameters=[IF_MATCH]),
    partial_update=extend_schema(
        request=TenantChangesSerializer, responses={200: TenantSerializer, **PROBLEMS}, parameters=[IF_MATCH]
    ),
)
class TenantViewSet(ReadViewSet):
    what = "tenant"
    scopes: ClassVar[dict[str, Scope]] = {"list": Scope.TENANT_READ, "retrieve": Scope.TENANT_READ}
    queryset = Tenant.objects.none()
    serializer_class = TenantSerializer
    sorted_by = queries.SORTED_BY

    def get_queryset(self) -> Any:
        given = self.request.query_params
        rows = queries.tenants(actor=self.actor, search=given.get("q", "").strip(), state=given.get("state", ""))
        return rows.filter(slug=given["slug"]) if "slug" in given else rows

    def create(self, request: Any) -> Response:
        body = self.checked(NewTenantSerializer)
        return self.created(lambda: (actions.create_tenant(actor=self.actor, **body), {}))

    def partial_update(self, request: Any, pk: str) -> Response:
        changes: Any = self.checked(TenantChangesSerializer, is_partial=True)
        actions.update_tenant(actor=self.actor, tenant_id=pk, expected_version=self.expected_version(), **changes)
        return self.shown(self.found(pk))

    def destroy(self, request: Any, pk: str) -> Response:
        """Delete a tenant that is suspended or stopped: its keys are revoked, its use stays in the books."""
        actions.delete_tenant(actor=self.actor, tenant_id=pk, expected_version=self.expected_version())
        return Response(status=204)

    @extend_schema(request=BulkChangeSerializer, responses={200: BulkResultSerializer, **PROBLEMS})
    @action(detail=False, methods=["post"], url_path="bulk")
    def change_many(self, request: Any) -> Response:
        """Change the state, weight or default tier of up to 1,000 tenants: all or none, one audit entry."""
        body: Any = self.checked(BulkChangeSerializer)
        changed = bulk.change_tenants(actor=self.actor, tenant_ids=body.pop("tenants"), **body)
        return Response({"changed": [tenant.id for tenant in changed]})

    @extend_schema(request=SuspensionSerializer, responses={200: TenantSerializer, **PROBLEMS}, parameters=[IF_MATCH])
    @action(detail=True, methods=["post"])
    def suspend(self, request: Any, pk: str) -> Response:
        """Refuse its new requests and end those that wait; what runs finishes, unless it is cut."""
        body = self.checked(SuspensionSerializer)
        actions.suspend_tenant(actor=self.actor, tenant_id=pk, expected_version=self.expected_version(), **body)
        return self.shown(self.found(pk))

    @extend_schema(request=BrakeSerializer, responses={200: TenantSerializer, **PROBLEMS}, parameters=[IF_MATCH])
    @action(detail=True, methods=["post"])
    def stop(self, request: Any, pk: str) -> Response:
        """End all its requests at once, and refuse more."""
        body = self.checked(BrakeSerializer)
        actions.stop_tenant(actor=self.actor, tenant_id=pk, expected_version=self.expected_version(), **body)
        return self.shown(self.found(pk))

    @extend_schema(request=ReleaseSerializer, responses={200: TenantSerializer, **PROBLEMS}, parameters=[IF_MATCH])
    @action(detail=True, methods=["post"])
    def resume(self, request: Any, pk: str) -> Response:
        """Let a stopped or suspended tenant go on."""
        body = self.checked(ReleaseSerializer)
        actions.resume_tenant(actor=self.actor, tenant_id=pk, expected_version=self.expected_version(), **body)
        return self.shown(self.found(pk))


class GroupChangesSerializer(StrictSerializer):
    weight = serializers.FloatField(
        required=False,
        min_value=0.001,
        max_value=10_000,
        help_text="Share in every pool, relative to other groups and to tenants without one",
    )
    managed_by = managed_by_field()


class NewGroupSerializer(GroupChangesSerializer):
    name = serializers.CharField(max_length=63, help_text="a-z, 0-9 and -; never changes")


class GroupSerializer(serializers.ModelSerializer[Group]):
    class Meta:
        model = Group
        fields = ["id", "name", "weight", "managed_by", "version", "created_at", "updated_at"]


@extend_schema_view(
    list=extend_schema(responses={200: GroupSerializer(many=True), **PROBLEMS}),
    retrieve=extend_schema(responses={200: GroupSerializer, **PROBLEMS}),
    create=extend_schema(
        request=NewGroupSerializer,
        responses={201: GroupSerializer, **PROBLEMS},
        parameters=[IDEMPOTENCY_KEY],
        examples=[example("Twice the share of others", name="research", weight=2)],
    ),
    partial_update=extend_schema(
        request=GroupChangesSerializer, responses={200: GroupSerializer, **PROBLEMS}, parameters=[IF_MATCH]
    ),
    destroy=extend_schema(responses={204: None, **PROBLEMS}, parameters=[IF_MATCH]),
)
class GroupViewSet(ReadViewSet):
    what = "group"
    queryset = Group.objects.none()
    serializer_class = GroupSerializer

    def get_queryset(self) -> Any:
        return queries.groups(actor=self.actor)

    def create(self, request: Any) -> Response:
        body = self.checked(NewGroupSerializer)
        return self.created(lambda: (actions.create_group(actor=self.actor, **body), {}))

    def partial_update(self, request: Any, pk: str) -> Response:
        changes: Any = self.checked(GroupChangesSerializer, is_partial=True)
        actions.update_group(actor=self.actor, group_id=pk, expected_version=self.expected_version(), **changes)
        return self.shown(self.found(pk))

    def destroy(self, request: Any, pk: str) -> Response:
        actions.delete_group(actor=self.actor, group_id=pk, expected_version=self.expected_version())
        return Response(status=204)
