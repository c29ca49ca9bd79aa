"""What runs in the background: the schedule, every run with its progress, and the nightly reconciliation."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from controlplane.common.actor import Scope
from controlplane.common.errors import Invalid
from controlplane.common.validation import without_nul
from controlplane.console.frame import act, actor_of, signed_in
from controlplane.jobs import actions, queries

PAGE = 50


@require_safe
@signed_in
def index(request: HttpRequest) -> HttpResponseBase:
    """Newest first, a page at a time; ``before`` is the id of the last job of the page before."""
    context = _shown(request)
    context |= {
        "kinds": sorted(queries.all_kinds()),
        "states": queries.STATES,
        "reconciled": queries.newest_reconciliation(actor=actor_of(request)),
    }
    return render(request, "console/jobs.html", context, status=422 if context["problem"] else 200)


@require_safe
@signed_in
def fragment(request: HttpRequest) -> HttpResponseBase:
    """The part of the page that changes by itself."""
    return render(request, "console/fragments/jobs.html", _shown(request))


def _shown(request: HttpRequest) -> dict[str, Any]:
    actor = actor_of(request)
    given = {name: without_nul(request.GET.get(name, "")).strip() for name in ("kind", "state")}
    before = without_nul(request.GET.get("before", "")).strip() or None
    problem = ""
    try:
        lines = queries.jobs(actor=actor, **given, before=before, limit=PAGE + 1)
    except Invalid as refused:
        lines, problem = [], refused.message
    planned = queries.plan(actor=actor)
    query = {name: value for name, value in given.items() if value}
    return {
        **given,
        "jobs": lines[:PAGE],
        "next": lines[PAGE - 1].row.id if len(lines) > PAGE else None,
        "before": before,
        "problem": problem,
        "planned": planned,
        "counts": queries.counts(actor=actor, planned=planned),
        "query": urlencode(query),
        "live_query": urlencode({**query, **({"before": before} if before else {})}),
        "may_change": actor.holds(Scope.WRITE),
    }


@require_safe
@signed_in
def detail(request: HttpRequest, job_id: str) -> HttpResponseBase:
    """One job with its log; asked for by htmx, only the part that changes by itself."""
    actor = actor_of(request)
    context = {"job": queries.job(actor=actor, job_id=job_id), "may_change": actor.holds(Scope.WRITE)}
    is_fragment = bool(request.htmx)  # type: ignore[attr-defined]  # django_htmx sets it
    return render(request, "console/fragments/job.html" if is_fragment else "console/job.html", context)


@require_POST
@signed_in
def start(request: HttpRequest) -> HttpResponseBase:
    """Queue a job of a kind beside its schedule."""
    kind = request.POST.get("kind", "")

    def change() -> str:
        return f"Job {actions.start_job(actor=actor_of(request), kind=kind).id} is queued."

    return act(request, change, reverse("console:jobs"))


@require_POST
@signed_in
def cancel(request: HttpRequest, job_id: str) -> HttpResponseBase:
    def change() -> str:
        actions.cancel_job(actor=actor_of(request), job_id=job_id)
        return "Job cancelled. What it has done already stays."

    return act(request, change, reverse("console:job", args=[job_id]))


@require_POST
@signed_in
def retry(request: HttpRequest, job_id: str) -> HttpResponseBase:
    """Queue another one, and go to its page."""
    made: list[str] = []

    def change() -> str:
        made.append(actions.retry_job(actor=actor_of(request), job_id=job_id).id)
        return "Queued again, as a job of its own."

    answer = act(request, change, reverse("console:job", args=[job_id]))
    return redirect("console:job", made[0]) if made else answer
