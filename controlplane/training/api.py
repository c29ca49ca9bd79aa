"""REST of training: jobs, artifacts, promotions, accuracy, drift and samples."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from django.utils.dateparse import parse_datetime
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_field, extend_schema_view
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.common.actor import Actor, Scope
from controlplane.common.clock import utc_now
from controlplane.common.errors import Invalid, NotFound
from controlplane.common.rest import IDEMPOTENCY_KEY, PROBLEMS, ReadViewSet, StrictSerializer, example
from controlplane.common.validation import MAX_REASON
from controlplane.fleet.models import Pool
from controlplane.fleet.queries import find_pool, live_heartbeats
from controlplane.training import actions, promotion, queries
from controlplane.training.models import Artifact, Dataset, DriftState, Evaluation, Job, JobKind, Promotion
from controlplane.usage.accuracy import PREDICTORS, Figures, accuracy

DEFAULT_SPAN = timedelta(days=7)
POOL = OpenApiParameter("pool", str, description="Id, name or alias of a pool")


class NewJobSerializer(StrictSerializer):
    kind = serializers.ChoiceField(choices=JobKind.choices, required=False, default=JobKind.BASELINE)
    pools: Any = serializers.ListField(
        child=serializers.CharField(max_length=200),
        max_length=1_000,
        required=False,
        default=list,
        help_text="Pools whose samples a mixture learns from, by id, name or alias; all if empty",
    )
    from_at = serializers.DateTimeField(required=False, help_text="Oldest arrival; 28 days ago by default")
    to_at = serializers.DateTimeField(required=False, help_text="Arrivals before this; now by default")


class DatasetSerializer(serializers.ModelSerializer[Dataset]):
    filters = serializers.DictField()
    counts = serializers.DictField()

    class Meta:
        model = Dataset
        fields = ["id", "from_at", "to_at", "n_rows", "digest", "filters", "counts", "heldout_from"]


class ScoreSerializer(serializers.Serializer[Any]):
    """Figures of one contender on the ``n`` answers it was judged by; errors in tokens."""

    n = serializers.IntegerField(required=False)
    pinball = serializers.FloatField(help_text="Mean over the levels, of ln(1 + tokens)")
    rank = serializers.FloatField(help_text="Spearman's rho of the medians")
    mae = serializers.FloatField(required=False)
    median_relative_error = serializers.FloatField(required=False)
    coverage_80 = serializers.FloatField(required=False)
    coverage_90 = serializers.FloatField(required=False)


class EvaluationSerializer(serializers.ModelSerializer[Evaluation]):
    """The gate's verdict for one pool: figures by contender, on rows that nobody had seen; none if not judged."""

    is_judged = serializers.BooleanField()
    contenders = serializers.DictField(child=ScoreSerializer())

    class Meta:
        model = Evaluation
        fields = ["id", "job", "pool", "n_rows", "is_judged", "is_passed", "reason", "contenders", "created_at"]


class ArtifactSerializer(serializers.ModelSerializer[Artifact]):
    metrics = serializers.DictField()

    class Meta:
        model = Artifact
        fields = ["id", "kind", "digest", "n_bytes", "metrics", "created_at"]


class ArtifactDetailSerializer(ArtifactSerializer):
    """A predictor version. ``is_kept``: its bytes are still there; old ones that serve nowhere are forgotten."""

    is_kept = serializers.BooleanField()
    dataset = serializers.SerializerMethodField()
    evaluations = EvaluationSerializer(many=True)

    class Meta(ArtifactSerializer.Meta):
        fields = [*ArtifactSerializer.Meta.fields, "is_kept", "dataset", "evaluations"]

    @extend_schema_field(DatasetSerializer(allow_null=True))
    def get_dataset(self, artifact: Artifact) -> dict[str, Any] | None:
        jobs = artifact.job_set.all()
        dataset = jobs[0].dataset if jobs else None
        return dict(DatasetSerializer(dataset).data) if dataset is not None else None


class JobSerializer(serializers.ModelSerializer[Job]):
    pools: Any = serializers.ListField(child=serializers.CharField())
    dataset = DatasetSerializer(allow_null=True)
    artifact = ArtifactSerializer(allow_null=True)
    evaluations = EvaluationSerializer(many=True)

    class Meta:
        model = Job
        fields = [
            "id", "kind", "trigger", "pools", "from_at", "to_at", "state", "attempts", "progress", "log", "error",
            "requested_by", "dataset", "artifact", "evaluations", "heartbeat_at", "created_at", "started_at",
            "finished_at",
        ]  # fmt: skip


@extend_schema_view(
    list=extend_schema(responses={200: JobSerializer(many=True), **PROBLEMS}),
    retrieve=extend_schema(responses={200: JobSerializer, **PROBLEMS}),
    create=extend_schema(
        request=NewJobSerializer,
        responses={201: JobSerializer, **PROBLEMS},
        parameters=[IDEMPOTENCY_KEY],
        examples=[example("A model of output lengths", kind="mixture", pools=["org/model"])],
    ),
)
class JobViewSet(ReadViewSet):
    what = "job"
    queryset = Job.objects.none()
    serializer_class = JobSerializer

    def get_queryset(self) -> Any:
        return queries.jobs(actor=self.actor)

    def create(self, request: Any) -> Response:
        body = self.checked(NewJobSerializer)
        return self.created(lambda: (actions.start_job(actor=self.actor, **body), {}))

    @extend_schema(request=None, responses={200: JobSerializer, **PROBLEMS})
    @action(detail=True, methods=["post"])
    def cancel(self, request: Any, pk: str) -> Response:
        """Cancel a queued or running job."""
        actions.cancel_job(actor=self.actor, job_id=pk)
        return self.shown(self.found(pk))


@extend_schema_view(
    list=extend_schema(
        responses={200: ArtifactDetailSerializer(many=True), **PROBLEMS},
        parameters=[OpenApiParameter("kind", str, enum=JobKind.values)],
    ),
    retrieve=extend_schema(responses={200: ArtifactDetailSerializer, **PROBLEMS}),
)
class ArtifactViewSet(ReadViewSet):
    """Versions of predictors, with their training data and how they were judged."""

    what = "artifact"
    queryset = Artifact.objects.none()
    serializer_class = ArtifactDetailSerializer

    def get_queryset(self) -> Any:
        kind = self.request.query_params.get("kind", "")
        if kind and kind not in JobKind.values:
            raise Invalid({"kind": f"one of {', '.join(JobKind.values)}, not {kind[:40]!r}"})
        return queries.artifacts(actor=self.actor, kind=kind)


class NewPromotionSerializer(StrictSerializer):
    pool = serializers.CharField(max_length=200, help_text="Id, name or alias")
    artifact = serializers.CharField(max_length=40)
    reason = serializers.CharField(max_length=MAX_REASON)
    despite_gate = serializers.BooleanField(
        required=False, default=False, help_text="Promote it although it did not pass the gate"
    )


class ChangeOfModelSerializer(StrictSerializer):
    pool = serializers.CharField(max_length=200, help_text="Id, name or alias")
    reason = serializers.CharField(max_length=MAX_REASON)


class PromotionSerializer(serializers.ModelSerializer[Promotion]):
    """``artifact`` null: none serves since then. ``restores``: the promotion that a rollback brings back."""

    artifact = serializers.CharField(source="artifact_id", allow_null=True)
    restores = serializers.CharField(source="restores_id", allow_null=True)
    metrics = serializers.DictField()

    class Meta:
        model = Promotion
        fields = [
            "id", "pool", "action", "artifact", "restores", "promoted_by", "reason", "is_forced", "pinball", "metrics",
            "created_at",
        ]  # fmt: skip


@extend_schema_view(
    list=extend_schema(responses={200: PromotionSerializer(many=True), **PROBLEMS}, parameters=[POOL]),
    retrieve=extend_schema(responses={200: PromotionSerializer, **PROBLEMS}),
    create=extend_schema(
        request=NewPromotionSerializer,
        responses={201: PromotionSerializer, **PROBLEMS},
        parameters=[IDEMPOTENCY_KEY],
        examples=[example("A better one", pool="org/model", artifact="art_1", reason="passed its gate")],
    ),
)
class PromotionViewSet(ReadViewSet):
    """Which trained model serves a pool since when, by whom and why. Routers follow within two seconds."""

    what = "promotion"
    queryset = Promotion.objects.none()
    serializer_class = PromotionSerializer

    def get_queryset(self) -> Any:
        word = self.request.query_params.get("pool", "")
        return queries.promotions(actor=self.actor, pool=_pool(word).id if word else "")

    def create(self, request: Any) -> Response:
        """Promote a trained model. 409 if it did not pass the gate and `despite_gate` is not said."""
        body = self.checked(NewPromotionSerializer)
        return self.created(
            lambda: (
                promotion.promote(
                    actor=self.actor,
                    pool_id=_pool(body["pool"]).id,
                    artifact_id=body["artifact"],
                    reason=body["reason"],
                    despite_gate=body["despite_gate"],
                ),
                {},
            )
        )

    @extend_schema(
        request=ChangeOfModelSerializer,
        responses={201: PromotionSerializer, **PROBLEMS},
        parameters=[IDEMPOTENCY_KEY],
        examples=[example("Back", pool="org/model", reason="first tokens came later")],
    )
    @action(detail=False, methods=["post"], url_path="roll-back")
    def roll_back(self, request: Any) -> Response:
        """Bring back what served the pool before its present model."""
        body = self.checked(ChangeOfModelSerializer)
        return self.created(
            lambda: (
                promotion.roll_back(actor=self.actor, pool_id=_pool(body["pool"]).id, reason=body["reason"]),
                {},
            )
        )

    @extend_schema(
        request=ChangeOfModelSerializer,
        responses={201: PromotionSerializer, **PROBLEMS},
        parameters=[IDEMPOTENCY_KEY],
        examples=[example("Back", pool="org/model", reason="first tokens came later")],
    )
    @action(detail=False, methods=["post"])
    def demote(self, request: Any) -> Response:
        """Let no trained model serve the pool."""
        body = self.checked(ChangeOfModelSerializer)
        return self.created(
            lambda: (promotion.demote(actor=self.actor, pool_id=_pool(body["pool"]).id, reason=body["reason"]), {})
        )


def _pool(word: str) -> Pool:
    pool = find_pool(word)
    if pool is None:
        raise NotFound(f"no pool {word[:200]!r}")
    return pool


class CalibrationPointSerializer(serializers.Serializer[Any]):
    level = serializers.FloatField()
    observed = serializers.FloatField()


class FiguresSerializer(serializers.Serializer[Any]):
    """Figures over ``n`` answers that came to their natural end; null without any. Errors in tokens."""

    n = serializers.IntegerField()
    mae = serializers.FloatField(allow_null=True)
    median_relative_error = serializers.FloatField(allow_null=True)
    pinball = serializers.FloatField(allow_null=True, help_text="Mean over the levels, of ln(1 + tokens)")
    coverage_80 = serializers.FloatField(allow_null=True)
    coverage_90 = serializers.FloatField(allow_null=True)


class ServedSerializer(FiguresSerializer):
    n_cut = serializers.IntegerField(help_text="Answers that were cut, not judged")
    n_model = serializers.IntegerField(help_text="Told by the trained model")
    n_memory = serializers.IntegerField(help_text="Told by the memory of answered prompts")
    n_fallen_back = serializers.IntegerField(help_text="Told by the fallback though there was a model")
    calibration = CalibrationPointSerializer(many=True)
    pit: Any = serializers.ListField(child=serializers.FloatField(), help_text="Answers between any two levels, 8 bins")


class ContendersSerializer(serializers.Serializer[Any]):
    served = ServedSerializer()
    fallback = FiguresSerializer()
    tenant_mean5 = FiguresSerializer()
    pool_median = FiguresSerializer()


class StepSerializer(serializers.Serializer[Any]):
    begin = serializers.DateTimeField()
    predictors = ContendersSerializer()


class AccuracySerializer(serializers.Serializer[Any]):
    pool = serializers.CharField()
    tenant = serializers.CharField(allow_blank=True)
    from_at = serializers.DateTimeField()
    to_at = serializers.DateTimeField()
    step_s = serializers.IntegerField()
    as_of = serializers.DateTimeField(
        allow_null=True, help_text="Answers booked until then are counted; computed once a minute"
    )
    total = ContendersSerializer()
    steps = StepSerializer(many=True)
    models = serializers.DictField(
        child=ServedSerializer(), help_text="Of what served, by digest of the length model ('' for none)"
    )


class AccuracyView(APIView):
    """How well output lengths are predicted, beside the trivial predictors on the same answers."""

    @extend_schema(
        operation_id="predictor_accuracy",
        parameters=[
            OpenApiParameter("pool", str, required=True, description="Id, name or alias of a pool"),
            OpenApiParameter("tenant", str, description="Id of one tenant"),
            OpenApiParameter("from", OpenApiTypes.DATETIME, description="Whole hours; default 7 days before `to`"),
            OpenApiParameter("to", OpenApiTypes.DATETIME, description="Default now; at most 92 days after `from`"),
        ],
        responses={200: AccuracySerializer, **PROBLEMS},
    )
    def get(self, request: Any) -> Response:
        actor: Actor = request.actor
        word = request.query_params.get("pool", "")
        if not word:
            raise Invalid({"pool": "id, name or alias of a pool is needed"})
        to_at = _instant(request, "to") or utc_now()
        found = accuracy(
            actor=actor,
            pool=_pool(word).id,
            tenant=request.query_params.get("tenant", ""),
            from_at=_instant(request, "from") or to_at - DEFAULT_SPAN,
            to_at=to_at,
        )
        return Response(
            {
                "pool": found.pool,
                "tenant": found.tenant,
                "from_at": found.from_at,
                "to_at": found.to_at,
                "step_s": int(found.step.total_seconds()),
                "as_of": found.as_of,
                "total": _contenders(found.total),
                "steps": [{"begin": begin, "predictors": _contenders(each)} for begin, each in found.steps],
                "models": {digest: _figures("served", figures) for digest, figures in found.models.items()},
            }
        )


def _instant(request: Any, name: str) -> datetime | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        instant = parse_datetime(text)
    except ValueError:
        instant = None
    if instant is None:
        raise Invalid({name: f"an instant such as 2026-01-31T12:00:00Z, not {text[:40]!r}"})
    if not 2000 <= instant.year <= 9000:
        raise Invalid({name: f"a year from 2000 to 9000, not {instant.year}"})
    return instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)


def _contenders(by_name: Mapping[str, Figures]) -> dict[str, Any]:
    return {name: _figures(name, by_name[name]) for name in PREDICTORS}


def _figures(name: str, figures: Figures) -> dict[str, Any]:
    shown = {
        field: getattr(figures, field)
        for field in ("n", "mae", "median_relative_error", "pinball", "coverage_80", "coverage_90")
    }
    if name == "served":
        shown |= {field: getattr(figures, field) for field in ("n_cut", "n_model", "n_memory", "n_fallen_back", "pit")}
        shown["calibration"] = [{"level": level, "observed": share} for level, share in figures.calibration]
    return shown


class DriftSerializer(serializers.ModelSerializer[DriftState]):
    class Meta:
        model = DriftState
        fields = [
            "pool", "state", "since", "looked_at", "length_model", "n", "loss", "reference", "ratio", "miscalibration",
            "reason",
        ]  # fmt: skip


class DriftListSerializer(serializers.Serializer[Any]):
    pools = DriftSerializer(many=True)


class DriftView(APIView):
    """What the drift monitor saw last, by pool; it looks every five minutes."""

    @extend_schema(operation_id="predictor_drift", responses={200: DriftListSerializer, **PROBLEMS})
    def get(self, request: Any) -> Response:
        return Response(DriftListSerializer({"pools": queries.drift_states(actor=request.actor)}).data)


class SampleCountSerializer(serializers.Serializer[Any]):
    pool = serializers.CharField()
    usable = serializers.IntegerField(help_text="Samples of the last 28 days and the present feature version")
    other_version = serializers.IntegerField(help_text="Of other feature versions, which are not read")
    dropped = serializers.IntegerField(help_text="Damaged, oversize or too old, of the last 28 days")
    needed = serializers.IntegerField(help_text="Without which no mixture is trained, over all pools")


class SampleCountsSerializer(serializers.Serializer[Any]):
    as_of = serializers.DateTimeField(allow_null=True, help_text="When they were counted; once a minute")
    pools = SampleCountSerializer(many=True)


class SamplesView(APIView):
    """How many samples there are to learn from, by pool."""

    @extend_schema(operation_id="predictor_samples", responses={200: SampleCountsSerializer, **PROBLEMS})
    def get(self, request: Any) -> Response:
        counts = queries.sample_counts(actor=request.actor)
        return Response(SampleCountsSerializer({"as_of": queries.samples_as_of(), "pools": counts}).data)


class RunningSerializer(serializers.Serializer[Any]):
    """What one router predicts one pool's lengths with, by its last heartbeat."""

    router = serializers.CharField(help_text="The router's instance")
    pool = serializers.CharField()
    length_model = serializers.CharField(allow_null=True, help_text="Digest of the trained model; null for none")
    refused = serializers.CharField(allow_null=True, help_text="Why it does not run the one it was told to")
    fallback = serializers.CharField(allow_null=True, help_text="Digest of the empirical quantiles")
    predictions_total = serializers.DictField(child=serializers.IntegerField(), help_text="Since its start, by source")
    fallbacks_total = serializers.DictField(child=serializers.IntegerField(), help_text="Since its start, by reason")


class RunningListSerializer(serializers.Serializer[Any]):
    routers = RunningSerializer(many=True)


class RunningView(APIView):
    """Which models the routers run, of those that were heard of within 15 seconds."""

    @extend_schema(operation_id="predictor_routers", responses={200: RunningListSerializer, **PROBLEMS})
    def get(self, request: Any) -> Response:
        request.actor.require(Scope.READ)
        found = [
            {
                "router": instance,
                "pool": state.pool,
                "length_model": state.length_model_digest,
                "refused": state.length_model_refused,
                "fallback": state.predictor_digest,
                "predictions_total": state.predictions_total,
                "fallbacks_total": state.prediction_fallbacks_total,
            }
            for instance, beat in sorted(live_heartbeats().items())
            for state in beat.pools
        ]
        return Response(RunningListSerializer({"routers": found}).data)
