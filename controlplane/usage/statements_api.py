"""REST of statements and of reconciliations."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any, ClassVar

from django.http import StreamingHttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.renderers import JSONRenderer
from rest_framework.response import Response

from controlplane.common.actor import Scope
from controlplane.common.rest import PROBLEMS, UseCaseViewSet
from controlplane.common.spreadsheet import safe_text
from controlplane.usage.api import CsvRenderer, wants_csv
from controlplane.usage.models import Reconciliation, Statement, StatementLine
from controlplane.usage.reconciliation import reconciliations
from controlplane.usage.statements import SORTED_BY, statements

COLUMNS = (
    "statement", "tenant", "tenant_name", "statement_month", "number", "kind", "month", "model", "valid_from",
    "prompt_micro", "output_micro", "requests", "prompt_tokens", "output_tokens", "currency", "amount_micro",
)  # fmt: skip
"""New columns are only ever added at the end."""


class StatementLineSerializer(serializers.ModelSerializer[StatementLine]):
    amount_micro = serializers.IntegerField(allow_null=True, help_text="null: without a price")

    class Meta:
        model = StatementLine
        fields = [
            "number", "kind", "month", "model", "valid_from", "prompt_micro", "output_micro", "requests",
            "prompt_tokens", "output_tokens", "amount_micro",
        ]  # fmt: skip


class StatementSerializer(serializers.ModelSerializer[Statement]):
    amount_micro = serializers.IntegerField(help_text="Sum of its lines, in 10^-6 of the currency")
    lines = StatementLineSerializer(many=True)

    class Meta:
        model = Statement
        fields = [
            "id", "tenant", "tenant_name", "month", "timezone", "from_at", "to_at", "currency", "amount_micro",
            "closed_at", "lines",
        ]  # fmt: skip


class StatementViewSet(UseCaseViewSet):
    what = "statement"
    queryset = Statement.objects.none()
    serializer_class = StatementSerializer
    sorted_by = SORTED_BY
    renderer_classes = (JSONRenderer, CsvRenderer)
    scopes: ClassVar[dict[str, Scope]] = {"list": Scope.TENANT_READ, "retrieve": Scope.TENANT_READ}

    def get_queryset(self) -> Any:
        given = self.request.query_params
        return statements(actor=self.actor, tenant=given.get("tenant", ""), search=given.get("q", "").strip())

    @extend_schema(
        parameters=[
            OpenApiParameter("tenant", str, description="Id of one tenant"),
            OpenApiParameter("q", str, description="A tenant's id, or a part of its name then"),
        ],
        responses={200: StatementSerializer(many=True), **PROBLEMS},
    )
    def list(self, request: Any) -> Response:
        """Closed months, newest first."""
        return self.listed(self.get_queryset())

    @extend_schema(
        parameters=[OpenApiParameter("format", str, enum=["json", "csv"], description="Or `Accept: text/csv`")],
        responses={
            (200, "application/json"): StatementSerializer,
            (200, "text/csv"): OpenApiTypes.STR,
            **PROBLEMS,
        },
    )
    def retrieve(self, request: Any, pk: str) -> Any:
        """One statement with its lines."""
        row = self.found(pk)
        return statement_response(row) if wants_csv(request) else self.shown(row)


def statement_response(statement: Statement) -> StreamingHttpResponse:
    """A statement's lines as a download; console and REST answer with it."""
    response = StreamingHttpResponse(_csv(statement), content_type="text/csv; charset=utf-8")
    name = f"statement_{statement.month:%Y-%m}_{statement.tenant}.csv"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


def _csv(statement: Statement) -> Iterator[str]:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    writer.writerow(COLUMNS)
    for line in sorted(statement.lines.all(), key=lambda line: line.number):
        cells = (
            statement.id, safe_text(statement.tenant), safe_text(statement.tenant_name), f"{statement.month:%Y-%m}",
            line.number, line.kind, f"{line.month:%Y-%m}", safe_text(line.model), line.valid_from, line.prompt_micro,
            line.output_micro, line.requests, line.prompt_tokens, line.output_tokens, statement.currency,
            line.amount_micro,
        )  # fmt: skip
        writer.writerow(cells)
    yield buffer.getvalue()


class ReconciliationSerializer(serializers.ModelSerializer[Reconciliation]):
    differences = serializers.ListField(child=serializers.DictField(), help_text="The first hundred")

    class Meta:
        model = Reconciliation
        fields = ["id", "ran_at", "from_day", "to_day", "n_events", "n_different", "differences"]


class ReconciliationViewSet(UseCaseViewSet):
    what = "reconciliation"
    queryset = Reconciliation.objects.none()
    serializer_class = ReconciliationSerializer

    def get_queryset(self) -> Any:
        return reconciliations(actor=self.actor)

    @extend_schema(responses={200: ReconciliationSerializer(many=True), **PROBLEMS})
    def list(self, request: Any) -> Response:
        """Nightly comparisons of rollups with events, newest first."""
        return self.listed(self.get_queryset())
