"""Requests under which backends fell: who sent them, and whether somebody has seen to it."""

from __future__ import annotations

from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from controlplane.common.validation import without_nul
from controlplane.console.frame import act, actor_of, signed_in
from controlplane.fleet import hazards
from controlplane.fleet import queries as fleet_queries
from controlplane.tenants.queries import tenant_names

PAGE = 100
STATES = {"open": True, "resolved": False}
WORDS = {
    "death": "the backend closed all its connections",
    "freeze": "the backend stopped answering",
    "batch": "the backend failed a whole batch",
}


@require_safe
@signed_in
def index(request: HttpRequest) -> HttpResponseBase:
    """Newest first, a page at a time; ``before`` is the id of the last one of the page before."""
    actor = actor_of(request)
    tenant, state, before = (without_nul(request.GET.get(name, "")) for name in ("tenant", "state", "before"))
    rows = hazards.hazards(actor=actor, is_open=STATES.get(state), tenant=tenant)
    if before:
        rows = rows.filter(id__lt=before)
    found = list(rows[: PAGE + 1])
    names = tenant_names()
    pools = {pool.id: pool.name for pool in fleet_queries.pools(actor=actor)}
    servers = {backend.id: backend.name for backend in fleet_queries.backends(actor=actor)}
    context = {
        "hazards": [
            {
                "row": row,
                "what": WORDS.get(row.kind, row.kind),
                # A tenant that is gone has no page.
                "tenant": names.get(row.tenant),
                "pool": pools.get(row.pool),
                "backend": servers.get(row.backend),
            }
            for row in found[:PAGE]
        ],
        "tenant": tenant,
        "state": state,
        "next": urlencode({"tenant": tenant, "state": state, "before": found[PAGE - 1].id})
        if len(found) > PAGE
        else None,
    }
    return render(request, "console/hazards.html", context)


@require_POST
@signed_in
def resolve(request: HttpRequest, hazard_id: str) -> HttpResponseBase:
    def change() -> str:
        hazards.resolve_hazard(actor=actor_of(request), hazard_id=hazard_id, note=request.POST.get("note", ""))
        return "Noted. Routers go on refusing the request until its time is over."

    return act(request, change, reverse("console:hazards"))
