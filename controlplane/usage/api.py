"""REST of the usage report, of quotas and of the quarantine."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any, ClassVar

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.renderers import JSONRenderer
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.common.actor import Actor, Scope
from controlplane.common.clock import utc_now
from controlplane.common.errors import Invalid, NotFound
from controlplane.common.rest import PROBLEMS, UseCaseViewSet
from controlplane.common.validation import get_or_not_found
from controlplane.keys.queries import keys
from controlplane.tenants.queries import tenant_names, tenants
from controlplane.usage import queries
from controlplane.usage.models import QuarantinedEvent
from controlplane.usage.quotas import quota_use
from controlplane.usage.report_csv import csv_response

DEFAULT_DAYS = 31


class ReportRowSerializer(serializers.Serializer[Any]):
    day = serializers.DateField()
    tenant = serializers.CharField()
    tenant_name = serializers.CharField(allow_blank=True)
    requests = serializers.IntegerField()
    prompt_tokens = serializers.IntegerField()
    output_tokens = serializers.IntegerField()
    ttft_p50_ms = serializers.FloatField(allow_null=True)
    ttft_p95_ms = serializers.FloatField(allow_null=True)


class ReportSerializer(serializers.Serializer[Any]):
    from_day = serializers.DateField()
    to_day = serializers.DateField()
    requests = serializers.IntegerField()
    prompt_tokens = serializers.IntegerField()
    output_tokens = serializers.IntegerField()
    rows = ReportRowSerializer(many=True)


class QuotaUseSerializer(serializers.Serializer[Any]):
    """Tokens of one UTC day or month against its quotas; null: no quota."""

    used_tokens = serializers.IntegerField(help_text="Prompt and output tokens of requests that ended, by arrival")
    soft_tokens = serializers.IntegerField(allow_null=True, help_text="From here on requests go to the lowest tier")
    hard_tokens = serializers.IntegerField(allow_null=True, help_text="From here on requests are refused")
    state = serializers.ChoiceField(choices=["free", "soft", "used_up"])
    resets_at = serializers.DateTimeField()


class QuotasSerializer(serializers.Serializer[Any]):
    day = QuotaUseSerializer()
    month = QuotaUseSerializer()


class QuotaView(APIView):
    """What of its quotas was used, in the UTC day and month that run. Requests that still run are not counted."""

    scopes: ClassVar[dict[str, Scope]] = {"get": Scope.TENANT_READ}

    def shown(self, actor: Actor, row: Any) -> Response:
        spans = {use.span: use for use in quota_use(actor=actor, row=row)}
        return Response(QuotasSerializer(spans).data)


class TenantQuotaView(QuotaView):
    @extend_schema(operation_id="tenants_quota", responses={200: QuotasSerializer, **PROBLEMS})
    def get(self, request: Any, tenant_id: str) -> Response:
        """What a tenant has used of its quotas."""
        actor: Actor = request.actor
        return self.shown(actor, get_or_not_found(tenants(actor=actor), "tenant", tenant_id))


class KeyQuotaView(QuotaView):
    @extend_schema(operation_id="keys_quota", responses={200: QuotasSerializer, **PROBLEMS})
    def get(self, request: Any, key_id: str) -> Response:
        """What a key has used of its quotas."""
        actor: Actor = request.actor
        return self.shown(actor, get_or_not_found(keys(actor=actor), "key", key_id))


class CsvRenderer(JSONRenderer):
    """Lets ``Accept: text/csv`` through; the report streams its lines itself, refusals stay problem+json."""

    media_type = "text/csv"
    format = "csv"


class UsageReportView(APIView):
    """Usage by tenant and UTC day (of arrival)."""

    scopes: ClassVar[dict[str, Scope]] = {"get": Scope.TENANT_READ}
    renderer_classes = (JSONRenderer, CsvRenderer)

    @extend_schema(
        operation_id="usage_report",
        parameters=[
            OpenApiParameter("from", OpenApiTypes.DATE, description="First day; default 30 days before `to`"),
            OpenApiParameter("to", OpenApiTypes.DATE, description="Last day, included; default today (UTC)"),
            OpenApiParameter("tenant", str, description="Id of one tenant"),
            OpenApiParameter("format", str, enum=["json", "csv"], description="Or `Accept: text/csv`"),
        ],
        responses={
            (200, "application/json"): ReportSerializer,
            (200, "text/csv"): OpenApiTypes.STR,
            **PROBLEMS,
        },
    )
    def get(self, request: Any) -> Any:
        actor: Actor = request.actor
        to_day = _day(request, "to", utc_now().date())
        from_day = _day(request, "from", queries.first_day(to_day, n_days=DEFAULT_DAYS))
        report = queries.usage_report(
            actor=actor, from_day=from_day, to_day=to_day, tenant=request.query_params.get("tenant", "")
        )
        names = tenant_names()
        if _wants_csv(request):
            return csv_response(report, names)
        return Response(
            {
                "from_day": report.from_day,
                "to_day": report.to_day,
                "requests": report.requests,
                "prompt_tokens": report.prompt_tokens,
                "output_tokens": report.output_tokens,
                "rows": [
                    {
                        "day": r.day,
                        "tenant": r.tenant,
                        "tenant_name": names.get(r.tenant, ""),
                        "requests": r.requests,
                        "prompt_tokens": r.prompt_tokens,
                        "output_tokens": r.output_tokens,
                        "ttft_p50_ms": r.ttft_p50_ms,
                        "ttft_p95_ms": r.ttft_p95_ms,
                    }
                    for r in report.rows
                ],
            }
        )


def _day(request: Any, name: str, default: date) -> date:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise Invalid({name: f"a day such as 2026-01-31, not {text[:40]!r}"}) from None


def _wants_csv(request: Any) -> bool:
    wanted = request.query_params.get("format")
    if wanted not in (None, "json", "csv"):
        raise Invalid({"format": f"json or csv, not {wanted[:40]!r}"})
    return bool(wanted == "csv" or (wanted is None and request.headers.get("accept", "").startswith("text/csv")))


class ReasonSerializer(serializers.Serializer[Any]):
    cause = serializers.CharField(help_text="A gate such as `kv` or `share`, `wait` (the sum), `preempted`, ...")
    text = serializers.CharField()
    seconds = serializers.FloatField(allow_null=True)
    counts: Any = serializers.DictField(child=serializers.IntegerField())


class MomentSerializer(serializers.Serializer[Any]):
    at_s = serializers.FloatField(help_text="Seconds since it arrived")
    step = serializers.CharField(help_text="`queued`, `dispatched`, `first_token`, `preempted`, ...")
    text = serializers.CharField()
    backend = serializers.CharField(allow_null=True)
    tokens = serializers.IntegerField(help_text="Of the slice at a dispatch, else the output so far")


class ExplainedRequestSerializer(serializers.Serializer[Any]):
    """One booked request. ``is_explained`` is false where nothing was kept: it waited less than a second, ran in one
    piece on one backend and completed."""

    request = serializers.CharField()
    event = serializers.CharField()
    router = serializers.CharField()
    tenant = serializers.CharField()
    tenant_name = serializers.CharField(allow_blank=True)
    key = serializers.CharField()
    pool = serializers.CharField()
    model = serializers.CharField()
    tier = serializers.CharField()
    outcome = serializers.CharField()
    error_code = serializers.CharField(allow_null=True)
    finish_reason = serializers.CharField(allow_null=True)
    arrived_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField()
    waited_s = serializers.FloatField(help_text="Until its first dispatch, or its end without one")
    ttft_s = serializers.FloatField(allow_null=True)
    prompt_tokens = serializers.IntegerField()
    output_tokens = serializers.IntegerField()
    predicted_tokens = serializers.IntegerField(allow_null=True)
    segments = serializers.IntegerField()
    preemptions = serializers.IntegerField()
    recomputed_tokens = serializers.IntegerField()
    backends = serializers.ListField(child=serializers.CharField())
    is_explained = serializers.BooleanField()
    explanation = serializers.ListField(child=serializers.CharField())
    reasons = ReasonSerializer(many=True)
    timeline = MomentSerializer(many=True)


class FoundRequestsSerializer(serializers.Serializer[Any]):
    requests = ExplainedRequestSerializer(many=True)


_SHOWN = (
    "request", "event", "router", "tenant", "key", "pool", "model", "tier", "outcome", "error_code", "finish_reason",
    "arrived_at", "ended_at", "prompt_tokens", "output_tokens", "predicted_tokens", "segments", "preemptions",
    "recomputed_tokens", "backends",
)  # fmt: skip


class RequestView(APIView):
    """Why a request waited, and what became of it."""

    scopes: ClassVar[dict[str, Scope]] = {"get": Scope.TENANT_READ}

    @extend_schema(operation_id="request_explained", responses={200: FoundRequestsSerializer, **PROBLEMS})
    def get(self, request: Any, request_id: str) -> Response:
        """The requests of this id, newest first: what a client got as `x-request-id`, or the `event` of the books.

        Clients may choose the first, so it need not be unique. A request is found once it has ended; until then its
        router tells: its tenant at `/v1/requests/{id}`, an operator on its admin port."""
        actor: Actor = request.actor
        found = queries.explained_requests(actor=actor, request_id=request_id)
        if not found:
            raise NotFound(f"no request {request_id!r} has been booked")
        names = tenant_names()
        return Response(FoundRequestsSerializer({"requests": [_shown(each, names) for each in found]}).data)


def _shown(found: queries.ExplainedRequest, names: Mapping[str, str]) -> dict[str, Any]:
    kept = found.explanation
    return {
        **{name: getattr(found.event, name) for name in _SHOWN},
        "tenant_name": names.get(found.event.tenant, ""),
        "waited_s": found.waited_s,
        "ttft_s": found.ttft_s,
        "is_explained": kept is not None,
        "explanation": [] if kept is None else kept.lines,
        "reasons": [] if kept is None else kept.reasons,
        "timeline": [] if kept is None else kept.timeline,
    }


class QuarantinedEventSerializer(serializers.ModelSerializer[QuarantinedEvent]):
    body = serializers.SerializerMethodField()

    class Meta:
        model = QuarantinedEvent
        fields = ["digest", "router", "event", "tenant", "reason", "received_at", "body"]

    def get_body(self, event: QuarantinedEvent) -> str:
        return bytes(event.body).decode(errors="replace")


class QuarantineViewSet(UseCaseViewSet):
    what = "quarantined event"
    queryset = QuarantinedEvent.objects.none()
    serializer_class = QuarantinedEventSerializer

    def get_queryset(self) -> Any:
        return queries.quarantined(actor=self.actor)

    @extend_schema(responses={200: QuarantinedEventSerializer(many=True), **PROBLEMS})
    def list(self, request: Any) -> Response:
        """Events that could not be booked, by digest."""
        return self.listed(self.get_queryset())
