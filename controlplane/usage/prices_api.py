"""REST of price lists and of who pays by them."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import OpenApiExample, OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import serializers
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.common.rest import (
    IDEMPOTENCY_KEY,
    IF_MATCH,
    PROBLEMS,
    ReadViewSet,
    StrictSerializer,
    example,
    managed_by_field,
)
from controlplane.usage import assignments, prices
from controlplane.usage.models import MAX_PRICE, PriceAssignment, PriceList

_PER = "Micro-currency (10^-6) for 1,000,000 tokens"


class PriceSerializer(StrictSerializer):
    model = serializers.CharField(
        max_length=200, required=False, allow_blank=True, default="", help_text="Empty: all without one"
    )  # fmt: skip
    valid_from = serializers.DateField(help_text="From the begin of this day, in the list's time zone")
    prompt_micro = serializers.IntegerField(min_value=0, max_value=MAX_PRICE, help_text=_PER)
    output_micro = serializers.IntegerField(min_value=0, max_value=MAX_PRICE, help_text=_PER)


class PriceListChangesSerializer(StrictSerializer):
    name = serializers.CharField(max_length=63, required=False)
    prices = PriceSerializer(many=True, required=False, help_text="All of them: what is left out is gone")
    managed_by = managed_by_field()


class NewPriceListSerializer(StrictSerializer):
    name = serializers.CharField(max_length=63)
    currency = serializers.CharField(max_length=3, help_text="ISO 4217, such as EUR")
    timezone = serializers.CharField(required=False, default="UTC", max_length=64, help_text="IANA name")
    prices = PriceSerializer(many=True, required=False, default=list)
    managed_by = managed_by_field()


class PriceListSerializer(serializers.ModelSerializer[PriceList]):
    prices = PriceSerializer(many=True)

    class Meta:
        model = PriceList
        fields = ["id", "name", "currency", "timezone", "prices", "managed_by", "version", "created_at", "updated_at"]


_EXAMPLE = OpenApiExample(
    "0.15 for a million prompt tokens, 0.60 for a million output tokens",
    {
        "name": "list-2026",
        "currency": "EUR",
        "prices": [{"model": "", "valid_from": "2026-01-01", "prompt_micro": 150_000, "output_micro": 600_000}],
    },
    request_only=True,
)


@extend_schema_view(
    list=extend_schema(responses={200: PriceListSerializer(many=True), **PROBLEMS}),
    retrieve=extend_schema(responses={200: PriceListSerializer, **PROBLEMS}),
    create=extend_schema(
        request=NewPriceListSerializer,
        responses={201: PriceListSerializer, **PROBLEMS},
        parameters=[IDEMPOTENCY_KEY],
        examples=[_EXAMPLE],
    ),
    partial_update=extend_schema(
        request=PriceListChangesSerializer, responses={200: PriceListSerializer, **PROBLEMS}, parameters=[IF_MATCH]
    ),
    destroy=extend_schema(responses={204: None, **PROBLEMS}, parameters=[IF_MATCH]),
)
class PriceListViewSet(ReadViewSet):
    what = "price list"
    queryset = PriceList.objects.none()
    serializer_class = PriceListSerializer

    def get_queryset(self) -> Any:
        return prices.price_lists(actor=self.actor)

    def create(self, request: Any) -> Response:
        body = self.checked(NewPriceListSerializer)
        return self.created(lambda: (prices.create_price_list(actor=self.actor, **body), {}))

    def partial_update(self, request: Any, pk: str) -> Response:
        changes: Any = self.checked(PriceListChangesSerializer, is_partial=True)
        prices.update_price_list(
            actor=self.actor, price_list_id=pk, expected_version=self.expected_version(), **changes
        )  # fmt: skip
        return self.shown(self.found(pk))

    def destroy(self, request: Any, pk: str) -> Response:
        prices.delete_price_list(actor=self.actor, price_list_id=pk, expected_version=self.expected_version())
        return Response(status=204)


class AssignedSerializer(StrictSerializer):
    price_list = serializers.CharField(max_length=63, allow_null=True, help_text="Id or name; null: none")
    valid_from = serializers.DateField(
        required=False,
        allow_null=True,
        default=None,
        help_text="From this day of the tenant's time zone on; left out: the only list, for everything",
    )


class TenantPricesView(APIView):
    """By which list a tenant pays at present, for all that is in no closed statement."""

    @extend_schema(operation_id="tenants_price_list", responses={200: AssignedSerializer, **PROBLEMS})
    def get(self, request: Any, tenant_id: str) -> Response:
        found = assignments.assignment_of(actor=request.actor, tenant_id=tenant_id)
        return Response(
            {
                "price_list": None if found is None else found.price_list_id,
                "valid_from": None if found is None else found.valid_from,
            }
        )

    @extend_schema(
        operation_id="tenants_price_list_assign",
        request=AssignedSerializer,
        responses={200: AssignedSerializer, **PROBLEMS},
    )
    def put(self, request: Any, tenant_id: str) -> Response:
        body = AssignedSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        assignments.assign_price_list(actor=request.actor, tenant_id=tenant_id, **body.validated_data)
        return self.get(request, tenant_id)


class AssignmentChangesSerializer(StrictSerializer):
    price_list = serializers.CharField(
        max_length=63, required=False, allow_null=True, help_text="Id or name; null: none from that day on"
    )
    managed_by = managed_by_field()


class NewAssignmentSerializer(AssignmentChangesSerializer):
    tenant = serializers.CharField(max_length=63, help_text="Id or short name")
    price_list = serializers.CharField(
        max_length=63, allow_null=True, help_text="Id or name; null: none from that day on"
    )
    valid_from = serializers.DateField(
        required=False,
        default=assignments.ALWAYS,
        help_text="From this day of the tenant's time zone on; another currency begins with a month",
    )


class AssignmentSerializer(serializers.ModelSerializer[PriceAssignment]):
    tenant = serializers.CharField(source="tenant_id")
    tenant_slug = serializers.CharField(source="tenant.slug")
    price_list = serializers.CharField(source="price_list.name", allow_null=True, default=None)

    class Meta:
        model = PriceAssignment
        fields = [
            "id", "tenant", "tenant_slug", "price_list", "valid_from", "managed_by", "version", "created_at",
            "updated_at",
        ]  # fmt: skip


@extend_schema_view(
    list=extend_schema(
        responses={200: AssignmentSerializer(many=True), **PROBLEMS},
        parameters=[
            OpenApiParameter("tenant", str, description="Id or short name"),
            OpenApiParameter("price_list", str, description="Id or name"),
        ],
    ),
    retrieve=extend_schema(responses={200: AssignmentSerializer, **PROBLEMS}),
    create=extend_schema(
        request=NewAssignmentSerializer,
        responses={201: AssignmentSerializer, **PROBLEMS},
        parameters=[IDEMPOTENCY_KEY],
        examples=[example("From March on", tenant="chatbot", price_list="list-2026", valid_from="2026-03-01")],
    ),
    partial_update=extend_schema(
        request=AssignmentChangesSerializer, responses={200: AssignmentSerializer, **PROBLEMS}, parameters=[IF_MATCH]
    ),
    destroy=extend_schema(responses={204: None, **PROBLEMS}, parameters=[IF_MATCH]),
)
class AssignmentViewSet(ReadViewSet):
    what = "price assignment"
    queryset = PriceAssignment.objects.none()
    serializer_class = AssignmentSerializer

    def get_queryset(self) -> Any:
        named = {name: self.request.query_params.get(name, "") for name in ("tenant", "price_list")}
        return assignments.assignments(actor=self.actor, **named)

    def create(self, request: Any) -> Response:
        body = self.checked(NewAssignmentSerializer)
        return self.created(lambda: (assignments.create_assignment(actor=self.actor, **body), {}))

    def partial_update(self, request: Any, pk: str) -> Response:
        changes: Any = self.checked(AssignmentChangesSerializer, is_partial=True)
        assignments.update_assignment(
            actor=self.actor, assignment_id=pk, expected_version=self.expected_version(), **changes
        )  # fmt: skip
        return self.shown(self.found(pk))

    def destroy(self, request: Any, pk: str) -> Response:
        """Take it away: the assignment before it holds on."""
        assignments.remove_assignment(actor=self.actor, assignment_id=pk, expected_version=self.expected_version())
        return Response(status=204)
