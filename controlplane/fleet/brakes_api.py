"""REST of what goes wrong and what stops it: hazards, cancelled requests, what runs on a backend."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_field, extend_schema_view
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.common.actor import Scope
from controlplane.common.errors import Invalid
from controlplane.common.rest import (
    IDEMPOTENCY_KEY,
    IF_MATCH,
    PROBLEMS,
    BrakeSerializer,
    ReadViewSet,
    StrictSerializer,
    UseCaseViewSet,
    example,
)
from controlplane.common.validation import MAX_REASON
from controlplane.fleet import brakes, hazards
from controlplane.fleet.models import Cancellation, Hazard

STATES = {"open": True, "resolved": False}


class ResolutionSerializer(StrictSerializer):
    note = serializers.CharField(max_length=MAX_REASON, help_text="What was found and done")


class HazardSerializer(serializers.ModelSerializer[Hazard]):
    state = serializers.SerializerMethodField(help_text="`open` or `resolved`")
    first_seen_at = serializers.DateTimeField(source="created_at")

    class Meta:
        model = Hazard
        fields = [
            "id", "state", "at", "first_seen_at", "kind", "pool", "backend", "tenant", "key", "request", "digest",
            "refused_until", "router", "resolved_at", "resolved_by", "note", "version",
        ]  # fmt: skip
        extra_kwargs = {
            "at": {"help_text": "When the request was refused, by its router"},
            "kind": {"help_text": "`death`, `freeze` or `batch`: what happened to the last backend"},
            "key": {"help_text": "Public id"},
            "digest": {"help_text": "Of prompt and parameters: what is refused, whoever sends it"},
        }

    def get_state(self, hazard: Hazard) -> str:
        return "open" if hazard.resolved_at is None else "resolved"


@extend_schema_view(
    list=extend_schema(
        responses={200: HazardSerializer(many=True), **PROBLEMS},
        parameters=[
            OpenApiParameter("state", str, enum=list(STATES)),
            *(OpenApiParameter(name, str) for name in hazards.FILTERS),
        ],
    ),
    retrieve=extend_schema(responses={200: HazardSerializer, **PROBLEMS}),
)
class HazardViewSet(ReadViewSet):
    """Requests that were refused because backends fell under them. Kept 90 days."""

    what = "hazard"
    queryset = Hazard.objects.none()
    serializer_class = HazardSerializer

    def get_queryset(self) -> Any:
        return hazards.hazards(actor=self.actor)

    def list(self, request: Any) -> Response:
        state = request.query_params.get("state")
        if state not in (None, *STATES):
            raise Invalid({"state": f"{' or '.join(STATES)}, not {state[:40]!r}"})
        given = {name: request.query_params.get(name, "") for name in hazards.FILTERS}
        is_open = STATES[state] if state is not None else None
        return self.listed(hazards.hazards(actor=self.actor, is_open=is_open, **given))

    @extend_schema(request=ResolutionSerializer, responses={200: HazardSerializer, **PROBLEMS}, parameters=[IF_MATCH])
    @action(detail=True, methods=["post"])
    def resolve(self, request: Any, pk: str) -> Response:
        """Say that somebody has seen to it. Routers go on refusing the request until `refused_until`."""
        body = self.checked(ResolutionSerializer)
        hazards.resolve_hazard(actor=self.actor, hazard_id=pk, expected_version=self.expected_version(), **body)
        return self.shown(self.found(pk))


class RunningThereSerializer(serializers.Serializer[Any]):
    router = serializers.CharField()
    state = serializers.CharField(help_text="`up`, `down`, `warming` or `cordoned`")
    running = serializers.IntegerField()
    reserved_tokens = serializers.IntegerField()


class OccupancySerializer(serializers.Serializer[Any]):
    backend = serializers.CharField(source="backend.id")
    is_drained = serializers.BooleanField(source="backend.is_drained")
    running = serializers.IntegerField()
    is_empty = serializers.BooleanField(
        allow_null=True, help_text="Nothing runs there and nothing will be started; null: no router reports"
    )
    routers = RunningThereSerializer(many=True)


class UnderWaySerializer(serializers.Serializer[Any]):
    request = serializers.CharField(source="live.request", help_text="The id its client got as `x-request-id`")
    event = serializers.CharField(source="live.event")
    tenant = serializers.CharField(source="live.tenant")
    key = serializers.CharField(source="live.key", help_text="Its id")
    tier = serializers.CharField(source="live.tier")
    arrived_at = serializers.DateTimeField()
    state = serializers.ChoiceField(choices=["queued", "running"])
    output_tokens = serializers.IntegerField(source="live.output_tokens")
    backend = serializers.CharField(source="live.backend", allow_null=True, help_text="Where it runs; null: it waits")
    pool = serializers.CharField()
    router = serializers.CharField()


class UnderWayListSerializer(serializers.Serializer[Any]):
    results = UnderWaySerializer(many=True)
    next = serializers.CharField(allow_null=True, help_text="Always null")


class UnderWayView(APIView):
    """Requests that wait or run, the oldest first; 20 of each pool and router."""

    scopes: ClassVar[dict[str, Scope]] = {"get": Scope.TENANT_READ}

    @extend_schema(operation_id="requests_list", responses={200: UnderWayListSerializer, **PROBLEMS})
    def get(self, request: Any) -> Response:
        found = brakes.under_way(actor=request.actor)
        return Response(UnderWayListSerializer({"results": found, "next": None}).data)


class CancellationSerializer(serializers.ModelSerializer[Cancellation]):
    until = serializers.SerializerMethodField(help_text="Until then routers end what has this id")

    class Meta:
        model = Cancellation
        fields = ["id", "request", "reason", "cancelled_by", "created_at", "until"]

    @extend_schema_field(serializers.DateTimeField())
    def get_until(self, row: Cancellation) -> str | None:
        return serializers.DateTimeField().to_representation(row.created_at + brakes.CANCELLED_FOR)


class RequestBrakeViewSet(UseCaseViewSet):
    """A running request, by the id its client got as `x-request-id`, or that of its event."""

    scopes: ClassVar[dict[str, Scope]] = {"cancel": Scope.TENANT_WRITE}
    what = "cancellation"
    queryset = Cancellation.objects.none()
    serializer_class = CancellationSerializer

    def get_queryset(self) -> Any:
        return brakes.cancellations(actor=self.actor)

    @extend_schema(
        operation_id="request_cancel",
        request=BrakeSerializer,
        responses={201: CancellationSerializer, **PROBLEMS},
        parameters=[IDEMPOTENCY_KEY],
        examples=[example("One that never ends", reason="it repeats itself")],
    )
    def cancel(self, request: Any, request_id: str) -> Response:
        """End every request of this id, waiting or running, on whichever router it is. Kept in force ten minutes.

        A tenant's admin ends those of the own tenant only."""
        body = self.checked(BrakeSerializer)
        return self.created(lambda: (brakes.cancel_request(actor=self.actor, request_id=request_id, **body), {}))
