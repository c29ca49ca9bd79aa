"""REST of jobs: what runs and ran in the background, when it runs next, and starting, cancelling, trying again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.models import Model
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.response import Response

from controlplane.common.idempotency import create_once
from controlplane.common.leases import JobTrigger
from controlplane.common.models import BackgroundJob
from controlplane.common.pagination import cursor_of, key_of, read_limit
from controlplane.common.rest import IDEMPOTENCY_KEY, PROBLEMS, StrictSerializer, UseCaseViewSet, example
from controlplane.jobs import actions, queries
from controlplane.jobs.queries import JobLine


class StartSerializer(StrictSerializer):
    kind = serializers.CharField(
        max_length=40, help_text="A kind of `jobs/schedule`, or `baseline` or `mixture` for a training run"
    )


class BackgroundJobSerializer(serializers.Serializer[Any]):
    """One run of something in the background."""

    id = serializers.CharField(source="row.id")
    kind = serializers.CharField()
    queue = serializers.CharField()
    trigger = serializers.ChoiceField(source="row.trigger", choices=JobTrigger.choices)
    state = serializers.ChoiceField(
        choices=queries.STATES, help_text="`lapsed`: its worker fell silent; another takes it up"
    )
    attempts = serializers.IntegerField(source="row.attempts", help_text="How many workers have taken it")
    progress = serializers.FloatField(source="row.progress", help_text="0 to 1")
    outcome = serializers.CharField(help_text="What came of it, in a few words")
    error = serializers.CharField(source="row.error")
    requested_by = serializers.CharField(source="row.requested_by")
    lease_until = serializers.DateTimeField(
        source="row.lease_until", allow_null=True, help_text="When others may take it"
    )
    heartbeat_at = serializers.DateTimeField(source="row.heartbeat_at", allow_null=True)
    created_at = serializers.DateTimeField(source="row.created_at")
    started_at = serializers.DateTimeField(source="row.started_at", allow_null=True)
    finished_at = serializers.DateTimeField(source="row.finished_at", allow_null=True)


class BackgroundJobDetailSerializer(BackgroundJobSerializer):
    log = serializers.CharField(source="row.log")


class PlannedSerializer(serializers.Serializer[Any]):
    kind = serializers.CharField()
    what = serializers.CharField()
    queue = serializers.CharField()
    schedule = serializers.CharField()
    next_at = serializers.DateTimeField(allow_null=True, help_text="null: only on request")
    last = BackgroundJobSerializer(allow_null=True, help_text="Its newest run that is kept")


class ScheduleSerializer(serializers.Serializer[Any]):
    results = PlannedSerializer(many=True)
    next = serializers.CharField(allow_null=True, help_text="Always null")


class BackgroundJobViewSet(UseCaseViewSet):
    """Runs of the schedule's tasks and training runs; finished ones are kept by number, 50 of each kind and outcome."""

    what = "job"
    queryset = BackgroundJob.objects.none()
    serializer_class = BackgroundJobSerializer

    def found(self, public_id: str) -> JobLine:
        return queries.job(actor=self.actor, job_id=public_id)

    @extend_schema(
        responses={200: BackgroundJobSerializer(many=True), **PROBLEMS},
        parameters=[
            OpenApiParameter("kind", str, description="As `jobs/schedule` names them, `baseline` or `mixture`"),
            OpenApiParameter("state", str, enum=list(queries.STATES)),
        ],
    )
    def list(self, request: Any) -> Response:
        """Newest first."""
        given = request.query_params
        limit = read_limit(given.get("limit"))
        cursor = given.get("cursor")
        lines = queries.jobs(
            actor=self.actor,
            kind=given.get("kind", ""),
            state=given.get("state", ""),
            before=key_of(cursor) if cursor else None,
            limit=limit + 1,
        )
        following = cursor_of(lines[limit - 1].row.id) if len(lines) > limit else None
        return Response({"results": BackgroundJobSerializer(lines[:limit], many=True).data, "next": following})

    @extend_schema(responses={200: BackgroundJobDetailSerializer, **PROBLEMS})
    def retrieve(self, request: Any, pk: str) -> Response:
        """One with its log."""
        return self._detail(pk)

    def _detail(self, pk: str, status: int = 200) -> Response:
        return Response(BackgroundJobDetailSerializer(self.found(pk)).data, status=status)

    def _queued(self, queue: Callable[[], Model]) -> Response:
        """201 with the job, once per ``Idempotency-Key``."""
        return create_once(self.request, actor=self.actor, create=lambda: self._detail(str(queue().pk), status=201))

    @extend_schema(
        request=StartSerializer,
        responses={201: BackgroundJobDetailSerializer, **PROBLEMS},
        parameters=[IDEMPOTENCY_KEY],
        examples=[example("Compare the books now", kind="usage-reconcile-books")],
    )
    def create(self, request: Any) -> Response:
        """Queue one beside the schedule. 409 while one of its kind is queued or running."""
        body = self.checked(StartSerializer)
        return self._queued(lambda: actions.start_job(actor=self.actor, **body))

    @extend_schema(request=None, responses={200: BackgroundJobDetailSerializer, **PROBLEMS})
    @action(detail=True, methods=["post"])
    def cancel(self, request: Any, pk: str) -> Response:
        """Cancel one that is queued, or runs and can be stopped; 409 otherwise. What it has done already stays."""
        actions.cancel_job(actor=self.actor, job_id=pk)
        return self._detail(pk)

    @extend_schema(
        request=None, responses={201: BackgroundJobDetailSerializer, **PROBLEMS}, parameters=[IDEMPOTENCY_KEY]
    )
    @action(detail=True, methods=["post"])
    def retry(self, request: Any, pk: str) -> Response:
        """Queue another one like one that failed or was cancelled."""
        return self._queued(lambda: actions.retry_job(actor=self.actor, job_id=pk))

    @extend_schema(operation_id="jobs_schedule", responses={200: ScheduleSerializer, **PROBLEMS}, filters=False)
    @action(detail=False, methods=["get"], pagination_class=None)
    def schedule(self, request: Any) -> Response:
        """What runs by itself, when it comes next, and how it went last."""
        return Response(ScheduleSerializer({"results": queries.plan(actor=self.actor), "next": None}).data)
