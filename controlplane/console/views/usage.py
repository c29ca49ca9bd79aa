"""The usage report, as page and as CSV of the same rows."""

from __future__ import annotations

from collections import defaultdict
from datetime import date, timedelta

from django import forms
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.utils.http import urlencode
from django.views.decorators.http import require_safe

from controlplane.common.clock import utc_now
from controlplane.common.errors import Invalid
from controlplane.console import charts
from controlplane.console.frame import actor_of, signed_in
from controlplane.tenants.queries import tenant_names
from controlplane.usage import queries
from controlplane.usage.report_csv import csv_response

DEFAULT_DAYS = 7
SHOWN_ROWS = 2_000
"""Rows on the page; the sums and the CSV hold all of them."""


class SpanForm(forms.Form):
    from_day = forms.DateField(label="From", required=False, widget=forms.DateInput(attrs={"type": "date"}))
    to_day = forms.DateField(label="To", required=False, widget=forms.DateInput(attrs={"type": "date"}))
    tenant = forms.CharField(required=False, widget=forms.HiddenInput)


def _report(request: HttpRequest) -> tuple[SpanForm, queries.Report]:
    """The form with what was asked for, days that were left out filled in, and the report; empty if it was refused."""
    today = utc_now().date()
    to_day = request.GET.get("to_day") or today
    from_day = request.GET.get("from_day") or queries.first_day(_as_day(to_day) or today, n_days=DEFAULT_DAYS)
    form = SpanForm({"from_day": from_day, "to_day": to_day, "tenant": request.GET.get("tenant", "")})
    if form.is_valid():
        try:
            return form, queries.usage_report(actor=actor_of(request), **form.cleaned_data)
        except Invalid as problem:
            for name, texts in problem.fields.items():
                form.add_error(f"{name}_day", texts)
    return form, queries.Report(from_day=today, to_day=today, rows=[], requests=0, prompt_tokens=0, output_tokens=0)


def _as_day(value: date | str) -> date | None:
    try:
        return value if isinstance(value, date) else date.fromisoformat(value)
    except ValueError:
        return None


def _chart(report: queries.Report, names: dict[str, str]) -> str:
    days = [report.from_day + timedelta(days=i) for i in range((report.to_day - report.from_day).days + 1)]
    by_tenant: dict[str, dict[date, float]] = defaultdict(dict)
    for row in report.rows:
        by_tenant[row.tenant][row.day] = row.output_tokens
    largest = sorted(by_tenant, key=lambda t: (-sum(by_tenant[t].values()), t))
    shown, rest = largest[: charts.N_COLOURS - 1], largest[charts.N_COLOURS - 1 :]
    series = [(names.get(t, t), [by_tenant[t].get(d, 0.0) for d in days]) for t in shown]
    if rest:
        series.append((f"{len(rest)} others", [sum(by_tenant[t].get(d, 0.0) for t in rest) for d in days]))
    return charts.stacked_bars(
        title="Output tokens by day and tenant", days=[d.strftime("%d %b") for d in days], series=series
    )


@require_safe
@signed_in
def report(request: HttpRequest) -> HttpResponseBase:
    form, rows = _report(request)
    names = tenant_names()
    tenant = str(form.cleaned_data.get("tenant", ""))
    context = {
        "form": form,
        "report": rows,
        "rows": [{"row": r, "name": names.get(r.tenant, r.tenant)} for r in rows.rows[:SHOWN_ROWS]],
        "n_rows": len(rows.rows),
        "chart": _chart(rows, names) if rows.rows else "",
        "tenant": tenant,
        "tenant_name": names.get(tenant, tenant),
        "csv_query": urlencode({"from_day": str(rows.from_day), "to_day": str(rows.to_day), "tenant": tenant}),
        "n_quarantined": queries.n_quarantined(),
    }
    return render(request, "console/usage.html", context)


@require_safe
@signed_in
def report_as_csv(request: HttpRequest) -> HttpResponseBase:
    form, rows = _report(request)
    if form.errors:
        raise Invalid({field: [str(text) for text in texts] for field, texts in form.errors.items()})
    return csv_response(rows, tenant_names())


@require_safe
@signed_in
def quarantine(request: HttpRequest) -> HttpResponseBase:
    """Events that could not be booked, for an operator's eyes."""
    rows = queries.quarantined(actor=actor_of(request))[:200]
    return render(request, "console/quarantine.html", {"rows": rows, "n": queries.n_quarantined()})
