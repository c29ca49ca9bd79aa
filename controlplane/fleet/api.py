"""REST of pools, backends and routers."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_field, extend_schema_view
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.common.actor import Actor, Scope
from controlplane.common.errors import Invalid
from controlplane.common.rest import (
    IDEMPOTENCY_KEY,
    IF_MATCH,
    PROBLEMS,
    BrakeSerializer,
    ReadViewSet,
    ReleaseSerializer,
    StrictSerializer,
    example,
    managed_by_field,
)
from controlplane.fleet import actions, brakes, queries, routers
from controlplane.fleet.brakes_api import OccupancySerializer
from controlplane.fleet.fairness import pool_fairness
from controlplane.fleet.live_api import PoolLiveSerializer, pool_live
from controlplane.fleet.models import Backend, Pool, Router, RouterStatus
from router_ext.core.config import KNOBS, Knob


def _field(knob: Knob) -> serializers.Field[Any, Any, Any, Any]:
    """A knob as the property of a schema. The use case checks the range itself; here it is said."""
    text = f"{knob.help} Default {knob.default}; {knob.range_text}."
    limits: dict[str, Any] = {"required": False, "allow_null": True, "help_text": text}
    match knob.kind:
        case "boolean":
            return serializers.BooleanField(**limits)
        case "choice":
            return serializers.ChoiceField(choices=list(knob.choices), **limits)
        case "integer":
            return serializers.IntegerField(min_value=int(knob.low), max_value=int(knob.high), **limits)
        case _:
            return serializers.FloatField(min_value=knob.low, max_value=knob.high, **limits)


class SchedulingSerializer(StrictSerializer):
    """The knobs that are set; the others have their defaults. A whole object replaces the one before."""

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        return {name: _field(knob) for name, knob in KNOBS.items()}

    def to_representation(self, instance: Any) -> dict[str, Any]:
        return dict(instance)


class TermSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    service = serializers.FloatField()
    gpu_s = serializers.FloatField(allow_null=True)
    text = serializers.CharField()


class RouterFairnessSerializer(serializers.Serializer[Any]):
    router = serializers.CharField()
    service_per_gpu_s = serializers.FloatField(allow_null=True)
    bound_service = serializers.FloatField(allow_null=True)
    bound_gpu_s = serializers.FloatField(allow_null=True)
    largest_gap_service = serializers.FloatField(allow_null=True)
    largest_gap_gpu_s = serializers.FloatField(allow_null=True)


class TenantBoundSerializer(serializers.Serializer[Any]):
    tenant = serializers.CharField()
    name = serializers.CharField()
    group = serializers.CharField(allow_null=True, help_text="Its fairness group, among whose tenants the bound is")
    weight = serializers.FloatField()
    counter_bound = serializers.FloatField(help_text="Service per weight above the least served tenant that waits")
    bound_service = serializers.FloatField(help_text="The same in service")
    bound_gpu_s = serializers.FloatField(allow_null=True)


class PairBoundSerializer(serializers.Serializer[Any]):
    first = serializers.CharField()
    second = serializers.CharField()
    pair_bound = serializers.FloatField(help_text="Service per weight, over any time in which both wait")


class FairnessSerializer(serializers.Serializer[Any]):
    """Service in units of the cost model, and as seconds of one busy backend (null: not measured yet)."""

    pool = serializers.CharField()
    policy = serializers.CharField()
    cost_model = serializers.CharField()
    is_bounded = serializers.BooleanField()
    source: Any = serializers.ChoiceField(choices=["router", "configuration"], help_text="Where the terms come from")
    unstated: Any = serializers.ListField(
        child=serializers.CharField(), help_text="Backends whose KV tokens are not stated"
    )
    service_per_gpu_s = serializers.FloatField(allow_null=True)
    bound_service = serializers.FloatField(allow_null=True)
    bound_gpu_s = serializers.FloatField(allow_null=True)
    terms = TermSerializer(many=True)
    routers = RouterFairnessSerializer(many=True)
    tenants = TenantBoundSerializer(many=True)
    pair = PairBoundSerializer(allow_null=True)


class PoolChangesSerializer(StrictSerializer):
    name = serializers.CharField(max_length=200, required=False)
    aliases = serializers.ListField(child=serializers.CharField(max_length=200), max_length=100, required=False)
    policy = serializers.ChoiceField(choices=list(queries.policy_pages()), required=False, help_text="See `policies`")
    scheduling = SchedulingSerializer(required=False)
    tokenizer_path = serializers.CharField(max_length=1_000, required=False, allow_blank=True)
    is_guarded = serializers.BooleanField(
        required=False, help_text="Grammars are proven harmless before a backend sees them"
    )
    vocabulary = serializers.IntegerField(
        required=False,
        min_value=1,
        max_value=10_000_000,
        help_text="Tokens of the model, for what a grammar costs; used where there is no tokenizer file",
    )
    takes_grammars = serializers.BooleanField(
        required=False, help_text="False ends what has a grammar, a response format or tools, and refuses more"
    )
    managed_by = managed_by_field()


class NewPoolSerializer(PoolChangesSerializer):
    name = serializers.CharField(max_length=200)


_ARTIFACT_SCHEMA = {
    "type": ["object", "null"],
    "properties": {n: {"type": "string"} for n in ("artifact", "digest", "kind")},
}


class PoolSerializer(serializers.ModelSerializer[Pool]):
    aliases = serializers.SerializerMethodField()
    scheduling = SchedulingSerializer()
    predictor = serializers.SerializerMethodField()
    length_model = serializers.SerializerMethodField()

    class Meta:
        model = Pool
        fields = [
            "id", "name", "aliases", "policy", "scheduling", "tokenizer_path", "is_guarded", "vocabulary",
            "takes_grammars", "predictor", "length_model", "managed_by", "version", "created_at", "updated_at",
        ]  # fmt: skip

    def get_aliases(self, pool: Pool) -> list[str]:
        return queries.aliases(pool)

    @extend_schema_field(_ARTIFACT_SCHEMA)
    def get_predictor(self, pool: Pool) -> dict[str, str] | None:
        if not pool.predictor_artifact:
            return None
        return {"artifact": pool.predictor_artifact, "digest": pool.predictor_digest, "kind": pool.predictor_kind}

    @extend_schema_field(_ARTIFACT_SCHEMA)
    def get_length_model(self, pool: Pool) -> dict[str, str] | None:
        if not pool.length_model_artifact:
            return None
        names = ("artifact", "digest", "kind")
        return {name: getattr(pool, f"length_model_{name}") for name in names}


@extend_schema_view(
    list=extend_schema(responses={200: PoolSerializer(many=True), **PROBLEMS}),
    retrieve=extend_schema(responses={200: PoolSerializer, **PROBLEMS}),
    create=extend_schema(
        request=NewPoolSerializer,
        responses={201: PoolSerializer, **PROBLEMS},
        parameters=[IDEMPOTENCY_KEY],
        examples=[example("By shares and targets", name="org/model", aliases=["model"], policy="slo-fair")],
    ),
    partial_update=extend_schema(
        request=PoolChangesSerializer, responses={200: PoolSerializer, **PROBLEMS}, parameters=[IF_MATCH]
    ),
    destroy=extend_schema(responses={204: None, **PROBLEMS}, parameters=[IF_MATCH]),
)
class PoolViewSet(ReadViewSet):
    what = "pool"
    queryset = Pool.objects.none()
    serializer_class = PoolSerializer

    def get_queryset(self) -> Any:
        return queries.pools(actor=self.actor)

    def create(self, request: Any) -> Response:
        body = self.checked(NewPoolSerializer)
        return self.created(lambda: (actions.create_pool(actor=self.actor, **body), {}))

    def partial_update(self, request: Any, pk: str) -> Response:
        changes: Any = self.checked(PoolChangesSerializer, is_partial=True)
        actions.update_pool(actor=self.actor, pool_id=pk, expected_version=self.expected_version(), **changes)
        return self.shown(self.found(pk))

    def destroy(self, request: Any, pk: str) -> Response:
        actions.delete_pool(actor=self.actor, pool_id=pk, expected_version=self.expected_version())
        return Response(status=204)

    @extend_schema(request=BrakeSerializer, responses={200: PoolSerializer, **PROBLEMS}, parameters=[IF_MATCH])
    @action(detail=True, methods=["post"], url_path="stop-grammars")
    def stop_grammars(self, request: Any, pk: str) -> Response:
        """End all its requests with a grammar, a response format or tools, and refuse more."""
        body = self.checked(BrakeSerializer)
        brakes.stop_grammars(actor=self.actor, pool_id=pk, expected_version=self.expected_version(), **body)
        return self.shown(self.found(pk))

    @extend_schema(request=ReleaseSerializer, responses={200: PoolSerializer, **PROBLEMS}, parameters=[IF_MATCH])
    @action(detail=True, methods=["post"], url_path="allow-grammars")
    def allow_grammars(self, request: Any, pk: str) -> Response:
        """Take grammars again."""
        body = self.checked(ReleaseSerializer)
        brakes.allow_grammars(actor=self.actor, pool_id=pk, expected_version=self.expected_version(), **body)
        return self.shown(self.found(pk))

    @extend_schema(
        responses={200: FairnessSerializer, **PROBLEMS},
        parameters=[
            OpenApiParameter("first", str, description="Id of a tenant; with `second`, the bound of this pair"),
            OpenApiParameter("second", str, description="Id of another tenant"),
        ],
    )
    @action(detail=True, methods=["get"])
    def fairness(self, request: Any, pk: str) -> Response:
        """The fairness bound by its terms, by tenant and for two tenants, next to the largest gap seen."""
        first, second = request.query_params.get("first", ""), request.query_params.get("second", "")
        if bool(first) is not bool(second):
            raise Invalid({"second" if first else "first": "the bound of a pair needs both tenants"})
        pair = (first, second) if first else None
        shown = pool_fairness(actor=self.actor, pool_id=pk, pair=pair)
        return Response(FairnessSerializer(shown).data)

    @extend_schema(responses={200: PoolLiveSerializer, **PROBLEMS})
    @action(detail=True, methods=["get"])
    def live(self, request: Any, pk: str) -> Response:
        """What it does now, of all routers together: queues, first tokens, shares, backends, refusals."""
        return Response(PoolLiveSerializer(pool_live(actor=self.actor, pool_id=pk)).data)


class KnobSerializer(serializers.Serializer[Knob]):
    """Numbers carry ``low`` and ``high``, words ``choices``. ``policies``: those that read it, empty for all."""

    name = serializers.CharField()
    kind = serializers.ChoiceField(choices=["number", "integer", "boolean", "choice"])
    default = serializers.JSONField()
    low = serializers.SerializerMethodField()
    high = serializers.SerializerMethodField()
    choices: Any = serializers.ListField(child=serializers.CharField())
    range = serializers.CharField(source="range_text")
    section = serializers.CharField()
    label: Any = serializers.CharField()
    help = serializers.CharField()
    policies = serializers.ListField(child=serializers.CharField())

    def get_low(self, knob: Knob) -> float | None:
        return knob.low if knob.kind in ("number", "integer") else None

    def get_high(self, knob: Knob) -> float | None:
        return knob.high if knob.kind in ("number", "integer") else None


class PolicySerializer(serializers.Serializer[Any]):
    """``document``: the policy's page in the repository."""

    name = serializers.CharField()
    summary = serializers.CharField()
    text = serializers.CharField()
    is_bounded = serializers.BooleanField(help_text="Whether the fairness bound holds under it")
    document = serializers.CharField()


class PoliciesSerializer(serializers.Serializer[Any]):
    policies = PolicySerializer(many=True)
    knobs = KnobSerializer(many=True)


class PoliciesView(APIView):
    """The policies a pool may choose, and the knobs of ``scheduling``."""

    @extend_schema(operation_id="policies", responses={200: PoliciesSerializer, **PROBLEMS})
    def get(self, request: Any) -> Response:
        actor: Actor = request.actor
        actor.require(Scope.READ)
        body = {"policies": list(queries.policy_pages().values()), "knobs": list(KNOBS.values())}
        return Response(PoliciesSerializer(body).data)


class BackendChangesSerializer(StrictSerializer):
    name = serializers.CharField(max_length=63, required=False)
    url = serializers.CharField(max_length=500, required=False)
    kv_tokens = serializers.IntegerField(required=False, allow_null=True, min_value=2, max_value=1_000_000_000)
    block_size = serializers.IntegerField(required=False, min_value=1, max_value=1_024)
    prefill_budget_tokens = serializers.IntegerField(required=False, min_value=1, max_value=10_000_000)
    is_chunked = serializers.BooleanField(required=False)
    speculate = serializers.IntegerField(required=False, min_value=0, max_value=64)
    is_cordoned = serializers.BooleanField(
        required=False, help_text="Runs finish, nothing new is sent there; false ends a drain as well"
    )
    takes_grammars = serializers.BooleanField(
        required=False, help_text="It is given requests whose answer has a form forced on it"
    )
    api_key_name = serializers.CharField(
        max_length=100, required=False, allow_blank=True, help_text="Name of a secret of the router's own"
    )
    managed_by = managed_by_field()


class NewBackendSerializer(BackendChangesSerializer):
    pool = serializers.CharField(max_length=200, help_text="Id, name or alias")
    name = serializers.CharField(max_length=63)
    url = serializers.CharField(max_length=500)


class BackendSerializer(serializers.ModelSerializer[Backend]):
    pool = serializers.CharField(source="pool_id")
    pool_name = serializers.CharField(source="pool.name")

    class Meta:
        model = Backend
        fields = [
            "id", "pool", "pool_name", "name", "url", "kv_tokens", "block_size", "prefill_budget_tokens", "is_chunked",
            "speculate", "is_cordoned", "is_drained", "takes_grammars", "api_key_name", "managed_by", "version",
            "created_at", "updated_at",
        ]  # fmt: skip


@extend_schema_view(
    list=extend_schema(responses={200: BackendSerializer(many=True), **PROBLEMS}),
    retrieve=extend_schema(responses={200: BackendSerializer, **PROBLEMS}),
    create=extend_schema(
        request=NewBackendSerializer,
        responses={201: BackendSerializer, **PROBLEMS},
        parameters=[IDEMPOTENCY_KEY],
        examples=[example("A TGI server", pool="org/model", name="one", url="http://10.0.0.1:3000", kv_tokens=400_000)],
    ),
    partial_update=extend_schema(
        request=BackendChangesSerializer, responses={200: BackendSerializer, **PROBLEMS}, parameters=[IF_MATCH]
    ),
    destroy=extend_schema(responses={204: None, **PROBLEMS}, parameters=[IF_MATCH]),
)
class BackendViewSet(ReadViewSet):
    what = "backend"
    queryset = Backend.objects.none()
    serializer_class = BackendSerializer

    def get_queryset(self) -> Any:
        return queries.backends(actor=self.actor)

    def create(self, request: Any) -> Response:
        body = self.checked(NewBackendSerializer)
        return self.created(lambda: (actions.create_backend(actor=self.actor, **body), {}))

    def partial_update(self, request: Any, pk: str) -> Response:
        changes: Any = self.checked(BackendChangesSerializer, is_partial=True)
        actions.update_backend(actor=self.actor, backend_id=pk, expected_version=self.expected_version(), **changes)
        return self.shown(self.found(pk))

    def destroy(self, request: Any, pk: str) -> Response:
        actions.delete_backend(actor=self.actor, backend_id=pk, expected_version=self.expected_version())
        return Response(status=204)

    @extend_schema(request=BrakeSerializer, responses={200: BackendSerializer, **PROBLEMS}, parameters=[IF_MATCH])
    @action(detail=True, methods=["post"])
    def drain(self, request: Any, pk: str) -> Response:
        """Start nothing new there, and let what runs there go on elsewhere; what cannot be resumed finishes."""
        body = self.checked(BrakeSerializer)
        brakes.drain_backend(actor=self.actor, backend_id=pk, expected_version=self.expected_version(), **body)
        return self.shown(self.found(pk))

    @extend_schema(request=ReleaseSerializer, responses={200: BackendSerializer, **PROBLEMS}, parameters=[IF_MATCH])
    @action(detail=True, methods=["post"])
    def uncordon(self, request: Any, pk: str) -> Response:
        """Give it work again."""
        body = self.checked(ReleaseSerializer)
        brakes.uncordon_backend(actor=self.actor, backend_id=pk, expected_version=self.expected_version(), **body)
        return self.shown(self.found(pk))

    @extend_schema(responses={200: OccupancySerializer, **PROBLEMS})
    @action(detail=True, methods=["get"])
    def running(self, request: Any, pk: str) -> Response:
        """What still runs there, by the routers' last heartbeats."""
        return Response(OccupancySerializer(brakes.occupancy(actor=self.actor, backend_id=pk)).data)


class NewRouterSerializer(StrictSerializer):
    name = serializers.CharField(max_length=100)


class RouterInstanceSerializer(serializers.ModelSerializer[RouterStatus]):
    class Meta:
        model = RouterStatus
        fields = [
            "instance", "program_version", "address", "applied_revision", "applied_at", "refused_revision",
            "refused_reason", "spool_events", "spool_bytes", "is_draining", "seen_at",
        ]  # fmt: skip


class RouterSerializer(serializers.ModelSerializer[Router]):
    instances = RouterInstanceSerializer(many=True, read_only=True)
    is_live = serializers.SerializerMethodField(help_text="An instance was heard of within the last 30 seconds")
    applied_revision = serializers.SerializerMethodField(help_text="The oldest in force among live instances")

    class Meta:
        model = Router
        fields = [
            "id", "name", "revoked_at", "is_live", "applied_revision", "instances", "version", "created_at",
            "updated_at",
        ]  # fmt: skip

    def get_is_live(self, router: Router) -> bool:
        return bool(queries.live_instances(router))

    def get_applied_revision(self, router: Router) -> int | None:
        return min((i.applied_revision for i in queries.live_instances(router)), default=None)


class IssuedRouterSerializer(RouterSerializer):
    """A router with its token. A repeated create shows null there."""

    token = serializers.CharField(allow_null=True, help_text="Shown this once and kept nowhere")

    class Meta(RouterSerializer.Meta):
        fields = [*RouterSerializer.Meta.fields, "token"]


@extend_schema_view(
    list=extend_schema(responses={200: RouterSerializer(many=True), **PROBLEMS}),
    retrieve=extend_schema(responses={200: RouterSerializer, **PROBLEMS}),
    create=extend_schema(
        request=NewRouterSerializer,
        responses={201: IssuedRouterSerializer, **PROBLEMS},
        parameters=[IDEMPOTENCY_KEY],
        examples=[example("A router", name="edge-1")],
    ),
)
class RouterViewSet(ReadViewSet):
    what = "router"
    queryset = Router.objects.none()
    serializer_class = RouterSerializer

    def get_queryset(self) -> Any:
        return queries.routers(actor=self.actor)

    def create(self, request: Any) -> Response:
        body = self.checked(NewRouterSerializer)

        def issue() -> tuple[Router, dict[str, Any]]:
            router, token = routers.create_router(actor=self.actor, **body)
            return router, {"token": token}

        return self.created(issue, secret_fields=("token",))

    @extend_schema(request=None, responses={200: RouterSerializer, **PROBLEMS}, parameters=[IF_MATCH])
    @action(detail=True, methods=["post"])
    def revoke(self, request: Any, pk: str) -> Response:
        """Refuse this router's calls from now on."""
        routers.revoke_router(actor=self.actor, router_id=pk, expected_version=self.expected_version())
        return self.shown(self.found(pk))

    @extend_schema(request=None, responses={200: IssuedRouterSerializer, **PROBLEMS}, parameters=[IF_MATCH])
    @action(detail=True, methods=["post"], url_path="renew-token")
    def renew_token(self, request: Any, pk: str) -> Response:
        """A new token; the present one ends at once."""
        _, token = routers.renew_router_token(actor=self.actor, router_id=pk, expected_version=self.expected_version())
        return self.shown(self.found(pk), token=token)
