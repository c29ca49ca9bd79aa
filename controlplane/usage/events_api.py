"""REST of booked requests: searched as the console's page "Requests" does."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.common.actor import Scope
from controlplane.common.clock import utc_now
from controlplane.common.pagination import MAX_LIMIT, cursor_of, key_of, read_limit
from controlplane.common.rest import PROBLEMS
from controlplane.usage import queries
from controlplane.usage.models import UsageEvent

DEFAULT_SPAN = timedelta(days=1)


class EventSerializer(serializers.ModelSerializer[UsageEvent]):
    """One request of the books; why it waited: `requests/{event}`."""

    class Meta:
        model = UsageEvent
        fields = [
            "event", "request", "router", "tenant", "key", "pool", "model", "tier", "outcome", "error_code",
            "finish_reason", "arrived_at", "first_dispatch_at", "first_token_at", "ended_at", "prompt_tokens",
            "output_tokens", "segments", "preemptions",
        ]  # fmt: skip


class EventsSerializer(serializers.Serializer[Any]):
    results = EventSerializer(many=True)
    next = serializers.CharField(allow_null=True, help_text="Value of `cursor` for the page after this one")


class EventsView(APIView):
    """Requests that have ended, newest first."""

    scopes: ClassVar[dict[str, Scope]] = {"get": Scope.TENANT_READ}

    @extend_schema(
        operation_id="usage_events",
        parameters=[
            OpenApiParameter("tenant", str, description="Id of one tenant"),
            OpenApiParameter("key", str, description="Id of one key"),
            OpenApiParameter("outcome", str, enum=list(queries.OUTCOMES)),
            OpenApiParameter("from", OpenApiTypes.DATETIME, description="Arrived from then on; a day before `to`"),
            OpenApiParameter(
                "to",
                OpenApiTypes.DATETIME,
                description="Arrived before; now by default. At most "
                f"{queries.WIDE.days} days after `from`, unless a tenant is named",
            ),
            OpenApiParameter("limit", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": 100}),
            OpenApiParameter("cursor", str, description="`next` of the page before"),
        ],
        responses={200: EventsSerializer, **PROBLEMS},
    )
    def get(self, request: Any) -> Response:
        given = request.query_params
        limit, cursor = read_limit(given.get("limit")), given.get("cursor")
        to_at = _instant(given, "to") or utc_now() + timedelta(minutes=1)
        found = queries.search_events(
            actor=request.actor,
            from_at=_instant(given, "from") or to_at - DEFAULT_SPAN,
            to_at=to_at,
            tenant=given.get("tenant", ""),
            key=given.get("key", ""),
            outcome=given.get("outcome", ""),
            after=key_of(cursor) if cursor else "",
            limit=limit,
        )
        following = cursor_of(found.following) if found.following else None
        return Response(EventsSerializer({"results": found.events, "next": following}).data)


def _instant(given: Any, name: str) -> datetime | None:
    text = given.get(name)
    if text is None:
        return None
    try:
        instant = serializers.DateTimeField(default_timezone=UTC).run_validation(text)
        if not 2000 <= instant.year <= 9000:
            raise serializers.ValidationError(f"a year from 2000 to 9000, not {instant.year}")
    except serializers.ValidationError as error:
        raise serializers.ValidationError({name: error.detail}) from error
    return instant.astimezone(UTC)  # type: ignore[no-any-return]  # a datetime
