"""REST of training jobs."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.response import Response

from controlplane.common.rest import IDEMPOTENCY_KEY, PROBLEMS, StrictSerializer, UseCaseViewSet
from controlplane.training import actions, queries
from controlplane.training.models import Artifact, Dataset, Job


class NewJobSerializer(StrictSerializer):
    kind = serializers.ChoiceField(choices=["baseline"], required=False, default="baseline")


class DatasetSerializer(serializers.ModelSerializer[Dataset]):
    class Meta:
        model = Dataset
        fields = ["id", "from_at", "to_at", "n_rows", "digest"]


class ArtifactSerializer(serializers.ModelSerializer[Artifact]):
    metrics = serializers.DictField()

    class Meta:
        model = Artifact
        fields = ["id", "kind", "digest", "n_bytes", "metrics", "created_at"]


class JobSerializer(serializers.ModelSerializer[Job]):
    dataset = DatasetSerializer(allow_null=True)
    artifact = ArtifactSerializer(allow_null=True)

    class Meta:
        model = Job
        fields = [
            "id", "kind", "state", "attempts", "progress", "log", "error", "requested_by", "dataset", "artifact",
            "heartbeat_at", "created_at", "started_at", "finished_at",
        ]  # fmt: skip


@extend_schema_view(
    list=extend_schema(responses={200: JobSerializer(many=True), **PROBLEMS}),
    retrieve=extend_schema(responses={200: JobSerializer, **PROBLEMS}),
    create=extend_schema(
        request=NewJobSerializer, responses={201: JobSerializer, **PROBLEMS}, parameters=[IDEMPOTENCY_KEY]
    ),
)
class JobViewSet(UseCaseViewSet):
    what = "job"
    queryset = Job.objects.none()
    serializer_class = JobSerializer

    def get_queryset(self) -> Any:
        return queries.jobs(actor=self.actor)

    def list(self, request: Any) -> Response:
        return self.listed(self.get_queryset())

    def retrieve(self, request: Any, pk: str) -> Response:
        return self.shown(self.found(pk))

    def create(self, request: Any) -> Response:
        body = self.checked(NewJobSerializer)
        return self.created(lambda: (actions.start_job(actor=self.actor, **body), {}))

    @extend_schema(request=None, responses={200: JobSerializer, **PROBLEMS})
    @action(detail=True, methods=["post"])
    def cancel(self, request: Any, pk: str) -> Response:
        """Cancel a queued or running job."""
        actions.cancel_job(actor=self.actor, job_id=pk)
        return self.shown(self.found(pk))
