"""Training jobs: start, watch, cancel."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from controlplane.console.frame import act, actor_of, signed_in
from controlplane.fleet import queries as fleet_queries
from controlplane.training import actions, queries


def _context(request: HttpRequest) -> dict[str, object]:
    actor = actor_of(request)
    return {
        "jobs": queries.jobs(actor=actor)[:20],
        "pools": fleet_queries.pools(actor=actor),
        "loaded": [
            (instance, pool.pool, pool.predictor_digest)
            for instance, beat in sorted(fleet_queries.live_heartbeats().items())
            for pool in beat.pools
        ],
    }


@require_safe
@signed_in
def index(request: HttpRequest) -> HttpResponseBase:
    return render(request, "console/jobs.html", _context(request))


@require_safe
@signed_in
def fragment(request: HttpRequest) -> HttpResponseBase:
    return render(request, "console/fragments/jobs.html", _context(request))


@require_POST
@signed_in
def start(request: HttpRequest) -> HttpResponseBase:
    def change() -> str:
        return f"Job {actions.start_job(actor=actor_of(request)).id} queued."

    return act(request, change, reverse("console:jobs"))


@require_POST
@signed_in
def cancel(request: HttpRequest, job_id: str) -> HttpResponseBase:
    def change() -> str:
        return f"Job {actions.cancel_job(actor=actor_of(request), job_id=job_id).id} cancelled."

    return act(request, change, reverse("console:jobs"))
