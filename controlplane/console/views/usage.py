"""The usage report, as page and as exports of the same rows."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

from django import forms
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.utils.http import urlencode
from django.views.decorators.http import require_safe

from controlplane.common.actor import Actor
from controlplane.common.clock import utc_now
from controlplane.common.errors import Invalid
from controlplane.common.zones import find_zone
from controlplane.console import charts
from controlplane.console.frame import actor_of, of_tenants, signed_in
from controlplane.console.pickers import TenantField
from controlplane.fleet.queries import pool_names
from controlplane.tenants.queries import find_tenant
from controlplane.usage import queries
from controlplane.usage.prices import PICO, decimal_text
from controlplane.usage.reconciliation import reconciliations
from controlplane.usage.report import (
    STEPS,
    Question,
    Report,
    Row,
    first_day,
    output_by,
    usage_question,
    usage_report,
)
from controlplane.usage.report_export import export_response
from controlplane.usage.rollup import DIMENSIONS
from controlplane.usage.shares import Share, shares

DEFAULT_DAYS = 7
DEFAULT_GROUP = ("day", "tenant")
SHOWN_ROWS = 200
"""Rows on a page; the sums and the exports hold all of them."""
SHOWN_SHARES = 12
SHARE_DAYS = 2
"""Days of shares unless others are asked for: each quarter of an hour is looked at for itself."""
STAMPS = {"day": "%Y-%m-%d", "hour": "%Y-%m-%d %H:%M %z"}
LABELS = {"tenant": "Tenant", "key": "Key", "pool": "Pool", "model": "Model", "tier": "Tier"}


class ReportForm(forms.Form):
    from_day = forms.DateField(label="From", required=False, widget=forms.DateInput(attrs={"type": "date"}))
    to_day = forms.DateField(label="To", required=False, widget=forms.DateInput(attrs={"type": "date"}))
    tz = forms.CharField(label="Time zone", required=False, max_length=64)
    group_by = forms.MultipleChoiceField(
        label="Grouped by",
        required=False,
        choices=[(name, name) for name in (*STEPS, *DIMENSIONS)],
        widget=forms.CheckboxSelectMultiple,
    )
    tenant = TenantField(required=False, help_text="")
    key = forms.CharField(required=False)
    pool = forms.CharField(required=False)
    model = forms.CharField(required=False)
    tier = forms.CharField(required=False)

    def __init__(self, data: dict[str, Any], *, actor: Actor) -> None:
        super().__init__(data)
        names = pool_names(actor=actor).items()
        self.fields["pool"].widget = forms.Select(choices=[("", "all pools"), *names])
        if actor.tenant is not None:
            self.fields["tenant"].widget = forms.HiddenInput()

    def span_fields(self) -> list[forms.BoundField]:
        return [self[name] for name in ("from_day", "to_day", "tz")]

    def filter_fields(self) -> list[forms.BoundField]:
        """What narrows the report."""
        return [self[name] for name in DIMENSIONS if name in self.fields and not self[name].is_hidden]

    @property
    def is_narrowed(self) -> bool:
        return any(field.value() or field.errors for field in self.filter_fields())


def _asked(request: HttpRequest, n_days: int = DEFAULT_DAYS) -> tuple[ReportForm, Question | None]:
    """The form with what was asked for, what was left out filled in, and the question; None if it was refused."""
    given = request.GET
    timezone = given.get("tz") or "UTC"
    actor = actor_of(request)
    today = utc_now().astimezone(find_zone(timezone)).date()
    tenant = given.get("tenant", "")
    if tenant and not tenant.startswith("ten_") and (found := find_tenant(tenant, actor=actor)):
        tenant = found.id
    # As the page's own form names them, or as REST does.
    from_day = given.get("from_day") or given.get("from")
    to_day = given.get("to_day") or given.get("to") or today
    form = ReportForm(
        {
            "from_day": from_day or first_day(_as_day(to_day) or today, n_days=n_days),
            "to_day": to_day,
            "tz": timezone,
            "group_by": given.getlist("group_by") or list(DEFAULT_GROUP),
            **{name: given.get(name, "") for name in DIMENSIONS},
            "tenant": tenant,
        },
        actor=actor,
    )
    if form.is_valid():
        values = form.cleaned_data
        try:
            return form, usage_question(
                actor=actor,
                from_day=values["from_day"],
                to_day=values["to_day"],
                timezone=values["tz"],
                group_by=values["group_by"],
                filters={name: values[name] for name in DIMENSIONS},
            )
        except Invalid as problem:
            for name, texts in problem.fields.items():
                form.add_error({"from": "from_day", "to": "to_day"}.get(name, name), texts)
    return form, None


def _as_day(value: date | str) -> date | None:
    try:
        return value if isinstance(value, date) else date.fromisoformat(value)
    except ValueError:
        return None


def _chart(question: Question) -> str:
    if not question.step:
        return ""
    dimension = next((name for name in question.by if name in ("pool", "model", "tier")), "pool")
    series = output_by(question, dimension, charts.N_COLOURS - 1)
    if not series:
        return ""
    pattern = "%d %b" if question.step == "day" else "%d %b %H:%M"
    times = [at.astimezone(question.zone) for at in question.starts[:-1]]
    return charts.stacked_bars(
        title=f"Output tokens by {question.step} and {dimension}",
        days=[at.strftime(pattern) for at in times],
        series=[(f"{s.n_others} others" if s.n_others else s.name, s.values) for s in series],
        bars=charts.Bars(
            plotted=charts.Plotted(key="usage", zone=question.zone.key),
            times=times,
            stamps=[at.strftime(STAMPS[question.step]) for at in times],
            n_begun=bisect_right(times, utc_now()),
        ),
    )


def _query(question: Question, **more: str) -> str:
    """The parameters of this report, for links to other forms of it."""
    given: dict[str, Any] = {
        "from_day": str(question.from_day),
        "to_day": str(question.to_day),
        "tz": question.zone.key,
        "group_by": [name for name in (question.step, *question.by) if name],
    }
    return urlencode(given | dict(question.filters) | more, doseq=True)


def _cells(question: Question, row: Row) -> list[dict[str, str]]:
    """What a row is about: text and, where it can be narrowed to, the parameters that do so."""
    cells = []
    if question.step:
        cells.append({"text": row.start.strftime(STAMPS[question.step]), "query": ""})
    for name in question.by:
        value = row.group[name]
        cells.append({"text": row.names.get(name) or value or "–", "query": _query(question, **{name: value})})
    return cells


def _cost(row: Row) -> dict[str, str]:
    if row.cost_pico is None:
        return {"text": row.currency, "exact": ""}
    return {k: f"{text} {row.currency}" for k, text in _amount(row.cost_pico).items()}


def _amount(pico: int) -> dict[str, str]:
    """An amount to be read, and to the last decimal."""
    is_tiny = 0 < pico < PICO // 100
    return {"text": "< 0.01" if is_tiny else f"{round(Decimal(pico) / PICO, 2):,}", "exact": decimal_text(pico)}


@require_safe
@of_tenants
def report(request: HttpRequest) -> HttpResponseBase:
    form, question = _asked(request)
    context: dict[str, Any] = {"form": form, "spans": [] if question is None else _spans(question)}
    actor = actor_of(request)
    if actor.tenant is None:
        context |= {"n_quarantined": queries.n_quarantined(), "reconciled": reconciliations(actor=actor).first()}
    if question is not None:
        try:
            found = usage_report(question, limit=SHOWN_ROWS, cursor=request.GET.get("cursor", ""))
        except Invalid as problem:
            form.add_error(None, problem.message)
        else:
            context |= _shown(question, found)
    return render(request, "console/usage.html", context)


def _shown(question: Question, found: Report) -> dict[str, Any]:
    heads = [question.step.capitalize()] if question.step else []
    heads += [LABELS[name] for name in question.by]
    return {
        "report": found,
        "heads": heads,
        "n_columns": len(heads) + 5 + bool(found.costs),
        "rows": [{"row": row, "cells": _cells(question, row), "cost": _cost(row)} for row in found.rows],
        "costs": [{"currency": currency, **_amount(pico)} for currency, pico in sorted(found.costs.items())],
        "chart": _chart(question),
        "filters": dict(question.filters),
        "query": _query(question),
        "next_query": _query(question, cursor=found.next_cursor) if found.next_cursor else "",
        "timezone": question.zone.key,
        "share_query": _share_query(question),
    }


def _share_query(question: Question) -> str:
    """The parameters of the shares of the last of these days."""
    first = max(question.from_day, first_day(question.to_day, n_days=SHARE_DAYS))
    asked = {"from_day": str(first), "to_day": str(question.to_day), "tz": question.zone.key}
    return urlencode(asked | {name: question.filters[name] for name in ("tenant", "pool") if name in question.filters})


def _spans(question: Question) -> list[dict[str, Any]]:
    """Spans that are often asked for, as links that keep the rest of the question."""
    today = utc_now().astimezone(question.zone).date()
    month = today.replace(day=1)
    spans = (
        ("Today", today, today),
        ("7 days", first_day(today, n_days=7), today),
        ("30 days", first_day(today, n_days=30), today),
        ("This month", month, today),
        ("Last month", (month - timedelta(days=1)).replace(day=1), month - timedelta(days=1)),
    )
    return [
        {
            "label": label,
            "query": _query(question, from_day=str(first), to_day=str(last)),
            "is_shown": (first, last) == (question.from_day, question.to_day),
        }
        for label, first, last in spans
    ]


@require_safe
@of_tenants
def shares_page(request: HttpRequest) -> HttpResponseBase:
    """Entitled against delivered share, of each pool the tenants with most service."""
    form, pools = _shares(request)
    return render(request, "console/shares.html", {"form": form, "pools": pools})


@require_safe
@of_tenants
def shares_fragment(request: HttpRequest) -> HttpResponseBase:
    """The pictures alone, which the report's page fetches."""
    form, pools = _shares(request)
    return render(request, "console/fragments/shares.html", {"form": form, "pools": pools})


def _shares(request: HttpRequest) -> tuple[ReportForm, list[dict[str, Any]]]:
    """Of each pool its shares, largest first, with a picture."""
    form, question = _asked(request, n_days=SHARE_DAYS)
    pools: dict[str, list[Share]] = defaultdict(list)
    if question is not None:
        try:
            for share in shares(question):
                pools[share.pool_name].append(share)
        except Invalid as problem:
            form.add_error(None, problem.message)
    for name in ("group_by", "key", "model", "tier"):
        del form.fields[name]
    return form, [
        {
            "name": name,
            "rows": rows,
            "chart": charts.share_bars(
                title=f"Shares of {name}",
                shares=[
                    charts.Share(label=s.tenant_name, delivered=s.delivered, entitled=s.entitled)
                    for s in rows[:SHOWN_SHARES]
                ],
            ),
        }
        for name, rows in pools.items()
    ]


@require_safe
@of_tenants
def export(request: HttpRequest, kind: str) -> HttpResponseBase:
    form, question = _asked(request)
    if question is None:
        raise Invalid({field: [str(text) for text in texts] for field, texts in form.errors.items()})
    return export_response(question, kind)


@require_safe
@signed_in
def quarantine(request: HttpRequest) -> HttpResponseBase:
    """Events that could not be booked, for an operator's eyes."""
    rows = queries.quarantined(actor=actor_of(request))[:200]
    return render(request, "console/quarantine.html", {"rows": rows, "n": queries.n_quarantined()})
