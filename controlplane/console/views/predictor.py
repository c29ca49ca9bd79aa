"""How well output lengths are predicted, what predicts them, and the jobs that train it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, cast

from django import forms
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.urls import reverse
from django.utils.http import urlencode
from django.views.decorators.http import require_POST, require_safe

from controlplane.common.actor import Actor
from controlplane.common.clock import utc_now
from controlplane.common.leases import ACTIVE
from controlplane.common.validation import without_nul
from controlplane.console import plots
from controlplane.console.frame import act, actor_of, signed_in
from controlplane.fleet import queries as fleet_queries
from controlplane.fleet.models import Pool
from controlplane.tenants.queries import names_of
from controlplane.training import actions, promotion, queries
from controlplane.training.models import Artifact, Evaluation, JobKind
from controlplane.training.outcome import NAMES
from controlplane.usage.accuracy import WIDTHS, Accuracy, accuracy, judged_tenants
from router_ext.predict.baseline import LEVELS

SHOWN_JOBS = 8
SHOWN_VERSIONS = 10
SHOWN_PROMOTIONS = 20
DAYS = ((1, "1 day"), (7, "7 days"), (28, "28 days"))
DEFAULT_DAYS = 7
SERIES = (
    ("served", "what was served"),
    ("fallback", "empirical quantiles"),
    ("tenant_mean5", "tenant's mean of five"),
    ("pool_median", "pool's median"),
)
_EDGES = [f"{level:.0%}" for level in LEVELS]
_BINS = [f"up to {_EDGES[0]}", *(f"{a} to {b}" for a, b in pairwise(_EDGES)), f"above {_EDGES[-1]}"]


class ChoiceForm(forms.Form):
    """Which pool and tenant, and how far back. What is no choice falls back to the first one."""

    pool = forms.ChoiceField(required=False)
    tenant = forms.ChoiceField(required=False)
    days = forms.TypedChoiceField(coerce=int, choices=DAYS, required=False, label="Last")

    def __init__(self, *, pools: Sequence[Pool], tenants: Sequence[tuple[str, str]], **chosen: Any) -> None:
        super().__init__(chosen)
        cast(forms.ChoiceField, self.fields["pool"]).choices = [(p.id, p.name) for p in pools]
        cast(forms.ChoiceField, self.fields["tenant"]).choices = [("", "all tenants"), *tenants]


@require_safe
@signed_in
def index(request: HttpRequest) -> HttpResponseBase:
    """Accuracy, calibration and drift of one pool, versions and promotions, and what runs at the moment."""
    actor = actor_of(request)
    pools = list(fleet_queries.pools(actor=actor).prefetch_related(None))
    pool = next((p for p in pools if p.id == request.GET.get("pool")), pools[0] if pools else None)
    if pool is None:
        return render(request, "console/predictor.html", {"pool": None})
    days = next((n for n, _ in DAYS if str(n) == request.GET.get("days")), DEFAULT_DAYS)
    now = utc_now()
    from_at = now - timedelta(days=days)
    tenant = request.GET.get("tenant", "")
    judged = judged_tenants(actor=actor, pool=pool.id, from_at=from_at)
    if tenant and tenant not in judged:
        known = names_of([without_nul(tenant)])
        judged, tenant = judged | known, "".join(known)
    tenants = sorted(judged.items(), key=lambda pair: (pair[1], pair[0]))
    found = accuracy(actor=actor, pool=pool.id, tenant=tenant, from_at=from_at, to_at=now)
    states = {state.pool: state for state in queries.drift_states(actor=actor)}
    promotions = list(queries.promotions(actor=actor, pool=pool.id)[:SHOWN_PROMOTIONS])
    newest = promotions[0] if promotions else None
    context = {
        "form": ChoiceForm(pools=pools, tenants=tenants, pool=pool.id, tenant=tenant, days=days),
        "pool": pool,
        "as_of": found.as_of,
        "served": found.total["served"],
        "others": [(label, found.total[name]) for name, label in SERIES],
        "plots": _plots(found),
        "drift": states.get(pool.id),
        "drifts": [(each, states.get(each.id)) for each in pools],
        "versions": _versions(actor, pool),
        "promotions": promotions,
        "can_roll_back": newest is not None and not (newest.restores is None and newest.artifact is None),
    }
    return render(request, "console/predictor.html", context)


@require_safe
@signed_in
def fragment(request: HttpRequest) -> HttpResponseBase:
    """Jobs, routers and samples, at once and every two seconds."""
    context = _running(actor_of(request), request.GET.get("pool", ""))
    return render(request, "console/fragments/predictor.html", context)


def _running(actor: Actor, pool_id: str) -> dict[str, Any]:
    names = fleet_queries.pool_names(actor=actor)
    jobs = list(queries.jobs(actor=actor)[:SHOWN_JOBS])
    return {
        "pool_id": pool_id,
        "jobs": [
            {
                "job": job,
                "verdicts": [(names.get(e.pool, e.pool), e) for e in job.evaluations.all()],
                "pools": [names.get(p, p) for p in job.pools],
                "is_active": job.state in ACTIVE,
            }
            for job in jobs
        ],
        "routers": [
            {"instance": instance, "pool": names.get(state.pool, state.pool), "state": state}
            for instance, beat in sorted(fleet_queries.live_heartbeats().items())
            for state in beat.pools
        ],
        **_samples(actor, names),
    }


def _samples(actor: Actor, names: Mapping[str, str]) -> dict[str, Any]:
    counts = queries.sample_counts(actor=actor)
    usable, needed = sum(c.usable for c in counts), actions.min_samples()
    return {
        "samples_as_of": queries.samples_as_of(),
        "samples": [(names.get(c.pool, c.pool), c) for c in counts],
        "usable": usable,
        "needed": needed,
        "collected": min(1.0, usable / needed),
    }


def _plots(found: Accuracy) -> dict[str, str]:
    """The pictures by name; none while no answer was judged."""
    served = found.total["served"]
    if not served.n:
        return {}
    times = [begin for begin, _ in found.steps]

    def series(figure: str, names: Sequence[tuple[str, str]]) -> list[tuple[str, list[float | None]]]:
        return [(label, [getattr(step[name], figure) for _, step in found.steps]) for name, label in names]

    coverage = [(label, [getattr(step["served"], name) for _, step in found.steps])
                for name, label in (("coverage_80", "80% interval"), ("coverage_90", "90% interval"))]  # fmt: skip
    return {
        "calibration": plots.calibration(
            title="Calibration: share of answers up to each quantile", points=served.calibration
        ),
        "pit": plots.against_expected(
            title="Where answers fall among the quantiles (PIT)",
            labels=_BINS,
            edges=_EDGES,
            shares=[share / served.n for share in served.pit],
            expected=WIDTHS,
        ),
        "error": plots.over_time(
            title="Mean absolute error in tokens",
            times=times,
            series=series("mae", SERIES),
            shown=lambda value: f"{value:,.0f}",
        ),
        "relative": plots.over_time(
            title="Median relative error",
            times=times,
            series=series("median_relative_error", SERIES),
            shown=lambda value: f"{value:.0%}",
        ),
        "pinball": plots.over_time(
            title="Pinball loss (log tokens)",
            times=times,
            series=series("pinball", SERIES),
            shown=lambda value: f"{value:.3f}",
        ),
        "coverage": plots.over_time(
            title="Share of answers inside the intervals",
            times=times,
            series=coverage,
            shown=lambda value: f"{value:.0%}",
            rules=[(0.8, "80%"), (0.9, "90%")],
            top=1.0,
        ),
    }


def _versions(actor: Actor, pool: Pool) -> list[dict[str, Any]]:
    """The newest trained models and the one that serves, with what the pool's page needs to say of each."""
    rows = queries.artifacts(actor=actor, kind=JobKind.MIXTURE)
    shown = list(rows[:SHOWN_VERSIONS])
    if pool.length_model_artifact and all(a.id != pool.length_model_artifact for a in shown):
        shown += list(rows.filter(pk=pool.length_model_artifact))
    return [_version(artifact, pool) for artifact in shown]


def _version(artifact: Artifact, pool: Pool) -> dict[str, Any]:
    jobs = list(artifact.job_set.all())
    verdicts: list[Evaluation] = [e for e in artifact.evaluations.all() if e.pool == pool.id]
    verdict = verdicts[-1] if verdicts else None
    contenders = verdict.contenders if verdict is not None else {}
    return {
        "artifact": artifact,
        "job": jobs[0] if jobs else None,
        "dataset": jobs[0].dataset if jobs else None,
        "verdict": verdict,
        "contenders": [(NAMES.get(name, name), figures) for name, figures in contenders.items()],
        "metrics": _flat(artifact.metrics),
        "serves": artifact.id == pool.length_model_artifact,
        "is_kept": getattr(artifact, "is_kept", False),
    }


def _flat(metrics: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Figures by name, those inside of others after a colon."""
    found: list[tuple[str, Any]] = []
    for name, value in sorted(metrics.items()):
        words = name.replace("_", " ")
        if isinstance(value, Mapping):
            found += [(f"{words}: {inner}", each) for inner, each in _flat(value)]
        else:
            found.append((words, value))
    return found


def _back(request: HttpRequest) -> str:
    pool = request.POST.get("pool", "")
    return reverse("console:predictor") + (f"?{urlencode({'pool': pool})}" if pool else "")


@require_POST
@signed_in
def start(request: HttpRequest) -> HttpResponseBase:
    """Train now: a mixture on all pools or on one, or the baseline."""

    def change() -> str:
        only = request.POST.get("only", "")
        kind = request.POST.get("kind", JobKind.MIXTURE)
        job = actions.start_job(actor=actor_of(request), kind=kind, pools=[only] if only else [])
        return f"Job {job.id} queued."

    return act(request, change, _back(request))


@require_POST
@signed_in
def cancel(request: HttpRequest, job_id: str) -> HttpResponseBase:
    def change() -> str:
        return f"Job {actions.cancel_job(actor=actor_of(request), job_id=job_id).id} cancelled."

    return act(request, change, _back(request))


@require_POST
@signed_in
def promote(request: HttpRequest) -> HttpResponseBase:
    """Let a version serve the pool; one that did not pass the gate needs the box that says so."""

    def change() -> str:
        promotion.promote(
            actor=actor_of(request),
            pool_id=request.POST.get("pool", ""),
            artifact_id=request.POST.get("artifact", ""),
            reason=request.POST.get("reason", ""),
            despite_gate=request.POST.get("despite_gate") == "on",
        )
        return "Promoted. Routers load it within two seconds."

    return act(request, change, _back(request))


@require_POST
@signed_in
def roll_back(request: HttpRequest) -> HttpResponseBase:
    def change() -> str:
        back = promotion.roll_back(actor=actor_of(request), pool_id=request.POST.get("pool", ""))
        now = f"{back.artifact.id} serves again" if back.artifact is not None else "no trained model serves now"
        return f"Rolled back: {now}."

    return act(request, change, _back(request))


@require_POST
@signed_in
def demote(request: HttpRequest) -> HttpResponseBase:
    def change() -> str:
        pool = request.POST.get("pool", "")
        promotion.demote(actor=actor_of(request), pool_id=pool, reason="taken out on the console")
        return "Taken out: routers predict with the empirical quantiles."

    return act(request, change, _back(request))
