"""The usage report, as page and as exports of the same rows."""

from __future__ import annotations

from collections import defaultdict
from datetime import date
from typing import Any

from django import forms
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.utils.http import urlencode
from django.views.decorators.http import require_safe

from controlplane.common.clock import utc_now
from controlplane.common.errors import Invalid
from controlplane.common.zones import find_zone
from controlplane.console import charts
from controlplane.console.frame import actor_of, of_tenants, signed_in
from controlplane.usage import queries
from controlplane.usage.prices import decimal_text
from controlplane.usage.reconciliation import reconciliations
from controlplane.usage.report import (
    STEPS,
    Question,
    Report,
    Row,
    first_day,
    largest_tenants,
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
SHOWN_SHARES = 20
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
    tenant = forms.CharField(label="Only tenant", required=False)
    key = forms.CharField(label="Only key", required=False)
    pool = forms.CharField(label="Only pool", required=False)
    model = forms.CharField(label="Only model", required=False)
    tier = forms.CharField(label="Only tier", required=False)


def _asked(request: HttpRequest) -> tuple[ReportForm, Question | None]:
    """The form with what was asked for, what was left out filled in, and the question; None if it was refused."""
    given = request.GET
    timezone = given.get("tz") or "UTC"
    today = utc_now().astimezone(find_zone(timezone)).date()
    to_day = given.get("to_day") or today
    form = ReportForm(
        {
            "from_day": given.get("from_day") or first_day(_as_day(to_day) or today, n_days=DEFAULT_DAYS),
            "to_day": to_day,
            "tz": timezone,
            "group_by": given.getlist("group_by") or list(DEFAULT_GROUP),
            **{name: given.get(name, "") for name in DIMENSIONS},
        }
    )
    if form.is_valid():
        values = form.cleaned_data
        try:
            return form, usage_question(
                actor=actor_of(request),
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
    series = largest_tenants(question, charts.N_COLOURS - 1)
    if not series or not question.step:
        return ""
    pattern = "%d %b" if question.step == "day" else "%d %b %H:%M"
    return charts.stacked_bars(
        title=f"Output tokens by {question.step} and tenant",
        days=[at.astimezone(question.zone).strftime(pattern) for at in question.starts[:-1]],
        series=[(f"{s.n_others} others" if s.n_others else s.name, s.values) for s in series],
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
        pattern = "%Y-%m-%d" if question.step == "day" else "%Y-%m-%d %H:%M %z"
        cells.append({"text": row.start.strftime(pattern), "query": ""})
    for name in question.by:
        value = row.group[name]
        cells.append({"text": row.names.get(name) or value or "–", "query": _query(question, **{name: value})})
    return cells


def _cost(row: Row) -> str:
    return row.currency if row.cost_pico is None else f"{decimal_text(row.cost_pico)} {row.currency}"


@require_safe
@of_tenants
def report(request: HttpRequest) -> HttpResponseBase:
    form, question = _asked(request)
    context: dict[str, Any] = {"form": form}
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
    return {
        "report": found,
        "heads": heads + [LABELS[name] for name in question.by],
        "rows": [{"row": row, "cells": _cells(question, row), "cost": _cost(row)} for row in found.rows],
        "costs": [{"currency": c, "text": decimal_text(pico)} for c, pico in sorted(found.costs.items())],
        "chart": _chart(question),
        "filters": dict(question.filters),
        "query": _query(question),
        "next_query": _query(question, cursor=found.next_cursor) if found.next_cursor else "",
        "timezone": question.zone.key,
    }


@require_safe
@of_tenants
def shares_page(request: HttpRequest) -> HttpResponseBase:
    """Entitled against delivered share, of each pool the tenants with most service."""
    form, question = _asked(request)
    pools: dict[str, list[Share]] = defaultdict(list)
    if question is not None:
        try:
            for share in shares(question):
                pools[share.pool_name].append(share)
        except Invalid as problem:
            form.add_error(None, problem.message)
    for name in ("group_by", "key", "model", "tier"):
        del form.fields[name]
    context = {
        "form": form,
        "pools": [
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
        ],
    }
    return render(request, "console/shares.html", context)


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
