"""REST of the usage report, of quotas and of the quarantine."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any, ClassVar

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, inline_serializer
from rest_framework import serializers
from rest_framework.renderers import JSONRenderer
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.common.actor import Actor, Scope
from controlplane.common.clock import utc_now
from controlplane.common.errors import Invalid, NotFound
from controlplane.common.rest import PROBLEMS, UseCaseViewSet
from controlplane.common.validation import get_or_not_found
from controlplane.common.zones import find_zone
from controlplane.fleet import brakes
from controlplane.fleet.brakes_api import UnderWaySerializer
from controlplane.keys.queries import keys
from controlplane.tenants.queries import tenant_names, tenants
from controlplane.usage import queries
from controlplane.usage.models import QuarantinedEvent
from controlplane.usage.prices import decimal_text, rounded_micro
from controlplane.usage.quotas import quota_use
from controlplane.usage.report import MAX_PAGE, Question, Report, first_day, usage_question, usage_report
from controlplane.usage.report_export import export_response, row_fields
from controlplane.usage.rollup import DIMENSIONS
from controlplane.usage.shares import shares

DEFAULT_DAYS = 31


class ReportRowSerializer(serializers.Serializer[Any]):
    """Sums of one step and group. What is not grouped by is empty."""

    day = serializers.DateField(help_text="In the time zone of the report")
    start = serializers.DateTimeField(help_text="Where its day or hour begins, with the offset of the time zone")
    tenant = serializers.CharField(allow_blank=True)
    tenant_name = serializers.CharField(allow_blank=True)
    key = serializers.CharField(allow_blank=True)
    key_name = serializers.CharField(allow_blank=True)
    pool = serializers.CharField(allow_blank=True)
    pool_name = serializers.CharField(allow_blank=True)
    model = serializers.CharField(allow_blank=True)
    tier = serializers.CharField(allow_blank=True)
    requests = serializers.IntegerField()
    completed = serializers.IntegerField()
    prompt_tokens = serializers.IntegerField()
    output_tokens = serializers.IntegerField()
    recomputed_tokens = serializers.IntegerField()
    resumed_tokens = serializers.IntegerField()
    kv_token_ms = serializers.IntegerField(help_text="KV token-seconds, in thousandths")
    ttft_p50_ms = serializers.FloatField(allow_null=True)
    ttft_p95_ms = serializers.FloatField(allow_null=True)
    currency = serializers.CharField(allow_blank=True, help_text="`mixed`: of several; empty: nothing has a price")
    cost = serializers.CharField(allow_null=True, help_text="In the currency, exact: such texts add up")
    unpriced_requests = serializers.IntegerField(help_text="Requests without a price; their tokens cost nothing here")


class CostSerializer(serializers.Serializer[Any]):
    currency = serializers.CharField()
    cost = serializers.CharField(help_text="Exact")
    cost_micro = serializers.IntegerField(help_text="The same, rounded half to even to micro-currency")


class ReportSerializer(serializers.Serializer[Any]):
    """One page of rows; the sums are those of all pages."""

    from_day = serializers.DateField()
    to_day = serializers.DateField()
    timezone = serializers.CharField()
    group_by = serializers.ListField(child=serializers.CharField())
    requests = serializers.IntegerField()
    completed = serializers.IntegerField()
    prompt_tokens = serializers.IntegerField()
    output_tokens = serializers.IntegerField()
    recomputed_tokens = serializers.IntegerField()
    resumed_tokens = serializers.IntegerField()
    kv_token_ms = serializers.IntegerField()
    costs = CostSerializer(many=True)
    unpriced_requests = serializers.IntegerField()
    is_coarse = serializers.BooleanField(
        help_text="Some hours were kept as a whole only, and count in the day or hour in which they begin"
    )
    rows = ReportRowSerializer(many=True)
    next = serializers.CharField(allow_null=True, help_text="Value of `cursor` for the page after this one")


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


_REPORT_PARAMETERS = [
    OpenApiParameter("from", OpenApiTypes.DATE, description="First day; default 30 days before `to`"),
    OpenApiParameter("to", OpenApiTypes.DATE, description="Last day, included; default today"),
    OpenApiParameter("tz", str, description="IANA name of the time zone of days and hours; default UTC"),
    OpenApiParameter(
        "group_by", str, description="Comma list of `day` or `hour` or neither, and any of `tenant`, `key`, `pool`, "
        "`model`, `tier`; default `day,tenant`"
    ),
    *(OpenApiParameter(name, str, description=f"Only of this {name}") for name in DIMENSIONS),
    OpenApiParameter("format", str, enum=["json", "csv"], description="Or `Accept: text/csv`"),
]  # fmt: skip


class UsageReportView(APIView):
    """Usage by any grouping, by hour or day (of arrival) of any time zone."""

    scopes: ClassVar[dict[str, Scope]] = {"get": Scope.TENANT_READ}
    renderer_classes = (JSONRenderer, CsvRenderer)

    @extend_schema(
        operation_id="usage_report",
        parameters=[
            *_REPORT_PARAMETERS,
            OpenApiParameter("limit", int, description=f"Rows of a page, 1 to {MAX_PAGE:,}; default {MAX_PAGE:,}"),
            OpenApiParameter("cursor", str, description="`next` of the page before"),
        ],
        responses={
            (200, "application/json"): ReportSerializer,
            (200, "text/csv"): OpenApiTypes.STR,
            **PROBLEMS,
        },
    )
    def get(self, request: Any) -> Any:
        """A page of the report as JSON, or all of it as CSV."""
        question = asked(request)
        if wants_csv(request):
            return export_response(question, "csv")
        limit, cursor = page_of(request)
        return Response(report_fields(usage_report(question, limit=limit, cursor=cursor)))


class UsageExportView(APIView):
    """All rows of a report, streamed."""

    scopes: ClassVar[dict[str, Scope]] = {"get": Scope.TENANT_READ}
    renderer_classes = (JSONRenderer, CsvRenderer)

    @extend_schema(
        operation_id="usage_export",
        parameters=_REPORT_PARAMETERS,
        responses={
            (200, "application/json"): inline_serializer("Export", {"rows": ReportRowSerializer(many=True)}),
            (200, "text/csv"): OpenApiTypes.STR,
            **PROBLEMS,
        },
    )
    def get(self, request: Any) -> Any:
        """All rows of the report at once, as CSV or JSON; the connection stays open while they come."""
        return export_response(asked(request), "csv" if wants_csv(request) else "json")


class ShareSerializer(serializers.Serializer[Any]):
    pool = serializers.CharField()
    pool_name = serializers.CharField()
    tenant = serializers.CharField()
    tenant_name = serializers.CharField()
    service = serializers.IntegerField(help_text="Prompt tokens and twice the output tokens")
    delivered = serializers.FloatField(help_text="Share of the pool's service it got, 0 to 1")
    entitled = serializers.FloatField(help_text="Share it was entitled to by weights, among those with traffic")


class SharesSerializer(serializers.Serializer[Any]):
    from_day = serializers.DateField()
    to_day = serializers.DateField()
    timezone = serializers.CharField()
    shares = ShareSerializer(many=True)


class SharesView(APIView):
    """Entitled against delivered share."""

    scopes: ClassVar[dict[str, Scope]] = {"get": Scope.TENANT_READ}

    @extend_schema(
        operation_id="usage_shares",
        parameters=[p for p in _REPORT_PARAMETERS if p.name in ("from", "to", "tz", "tenant", "pool")],
        responses={200: SharesSerializer, **PROBLEMS},
    )
    def get(self, request: Any) -> Response:
        """By pool and tenant over the span, at most 1,000 rows; up to 93 days."""
        question = asked(request)
        told = {"from_day": question.from_day, "to_day": question.to_day, "timezone": question.zone.key}
        return Response(SharesSerializer({**told, "shares": shares(question)}).data)


def report_fields(report: Report) -> dict[str, Any]:
    """A page of a report as REST shows it."""
    question = report.question
    return {
        "from_day": question.from_day,
        "to_day": question.to_day,
        "timezone": question.zone.key,
        "group_by": [name for name in (question.step, *question.by) if name],
        **report.totals,
        "costs": [
            {"currency": currency, "cost": decimal_text(pico), "cost_micro": rounded_micro(pico)}
            for currency, pico in sorted(report.costs.items())
        ],
        "unpriced_requests": report.unpriced,
        "is_coarse": report.is_coarse,
        "rows": [row_fields(row) for row in report.rows],
        "next": report.next_cursor,
    }


def asked(request: Any) -> Question:
    """What the parameters of a request ask for."""
    given = request.query_params
    timezone = given.get("tz", "UTC")
    today = utc_now().astimezone(find_zone(timezone)).date()
    to_day = _day(request, "to", today)
    group_by = given.get("group_by", "day,tenant")
    return usage_question(
        actor=request.actor,
        from_day=_day(request, "from", first_day(to_day, n_days=DEFAULT_DAYS)),
        to_day=to_day,
        timezone=timezone,
        group_by=[name.strip() for name in group_by.split(",") if name.strip()],
        filters={name: given.get(name, "") for name in DIMENSIONS},
    )


def page_of(request: Any) -> tuple[int, str]:
    """``limit`` and ``cursor``."""
    text = request.query_params.get("limit", str(MAX_PAGE))
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_PAGE):
        raise Invalid({"limit": f"a whole number from 1 to {MAX_PAGE}, not {text[:20]!r}"})
    return int(text), request.query_params.get("cursor", "")


def _day(request: Any, name: str, default: date) -> date:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise Invalid({name: f"a day such as 2026-01-31, not {text[:40]!r}"}) from None


def wants_csv(request: Any) -> bool:
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
    live = UnderWaySerializer(many=True, help_text="Those that wait or run, by heartbeats; reasons follow at their end")


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

        Clients may choose the first, so it need not be unique. `live` has those that have not ended, as far as they
        are among the 20 oldest of their pool and router; why they wait is told here once they have ended, and before
        by their router: to the tenant at `/v1/requests/{id}`, to an operator on its admin port."""
        actor: Actor = request.actor
        found = queries.explained_requests(actor=actor, request_id=request_id)
        booked = {each.event.event for each in found}
        under_way = brakes.under_way(actor=actor)
        live = [each for each in under_way if each.is_called(request_id) and each.live.event not in booked]
        if not found and not live:
            raise NotFound(f"no request {request_id!r} has been booked, nor is it among the oldest that wait or run")
        names = tenant_names() if found else {}
        shown = [_shown(each, names) for each in found]
        return Response(FoundRequestsSerializer({"requests": shown, "live": live}).data)


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
