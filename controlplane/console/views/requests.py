"""What waits or runs now, and why a request waited: found by the id its client got, with reasons and a timeline."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_safe

from controlplane.console import charts
from controlplane.console.frame import actor_of, of_tenants
from controlplane.fleet import brakes
from controlplane.fleet import queries as fleet_queries
from controlplane.tenants.queries import tenant_names
from controlplane.usage import queries as usage_queries

MAX_CANCELLED = 100


@require_safe
@of_tenants
def index(request: HttpRequest) -> HttpResponseBase:
    wanted = request.GET.get("id", "").strip()[:128]
    actor = actor_of(request)
    found = usage_queries.explained_requests(actor=actor, request_id=wanted) if wanted else []
    under_way = brakes.under_way(actor=actor)
    is_of_platform = actor.tenant is None
    servers: dict[str, str] = {}
    if is_of_platform and (found or under_way):
        servers = {b.id: b.name for b in fleet_queries.backends(actor=actor)}
    names = tenant_names() if found or under_way else {}
    entries = [_entry(each, names.get(each.event.tenant, each.event.tenant), servers) for each in found]
    cancelled = brakes.cancellations(actor=actor)[:MAX_CANCELLED] if is_of_platform else []
    booked = {each.event.event for each in found}
    live = {each.live.event for each in under_way if wanted and each.is_called(wanted)} - booked
    rows: list[dict[str, Any]] = [
        {
            "row": each,
            "tenant": names.get(each.live.tenant, each.live.tenant),
            "where": servers.get(each.live.backend or "", each.live.backend),
        }
        for each in under_way
    ]
    context = {
        "wanted": wanted,
        "found": entries,
        "under_way": rows,
        "live": [each for each in rows if each["row"].live.event in live],
        "cancelled": cancelled,
        "was_cancelled": any(each.request == wanted for each in cancelled),
    }
    return render(request, "console/requests.html", context)


def _entry(found: usage_queries.ExplainedRequest, tenant: str, servers: dict[str, str]) -> dict[str, Any]:
    kept = found.explanation
    moments = [] if kept is None else kept.timeline
    return {
        "found": found,
        "tenant": tenant,
        "reasons": [] if kept is None else [r["text"] for r in kept.reasons] or kept.lines,
        "timeline": [
            {**m, "what": m["step"].replace("_", " "), "where": servers.get(m["backend"], m["backend"] or "")}
            for m in moments
        ],
        "chart": charts.timeline(title="When it waited and where it ran", moments=moments, names=servers),
    }
