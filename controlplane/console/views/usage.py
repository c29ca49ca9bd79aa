"""The usage report, as page and as CSV of the same rows."""

from __future__ import annotations

from collections import defaultdict
from datetime import date, timedelta

from django import forms
from django.http import HttpRequest, HttpResponseBase, StreamingHttpResponse
from django.shortcuts import render
from django.utils.http import urlencode
from django.views.decorators.http import require_safe

from controlplane.common.clock import utc_now
from controlplane.common.errors import Invalid
from controlplane.console import charts
from controlplane.console.frame import actor_of, signed_in
from controlplane.tenants.queries import tenant_names
from controlplane.usage import queries
from controlplane.usage.report_csv import report_csv

DEFAULT_DAYS = 7


class SpanForm(forms.Form):
    from_day = forms.DateField(label="From", required=False, widget=forms.DateInput(attrs={"type": "date"}))
    to_day = forms.DateField(label="To", required=False, widget=forms.DateInput(attrs={"type": "date"}))
    tenant = forms.CharField(required=False, widget=forms.HiddenInput)


def _report(request: HttpRequest) -> tuple[SpanForm, queries.Report]:
    today = utc_now().date()
    form = SpanForm(request.GET)
    values = form.cleaned_data if form.is_valid() else {}
    to_day: date = values.get("to_day") or today
    from_day: date = values.get("from_day") or to_day - timedelta(days=DEFAULT_DAYS - 1)
    try:
        report = queries.usage_report(
            actor=actor_of(request), from_day=from_day, to_day=to_day, tenant=values.get("tenant") or ""
        )
    except Invalid as problem:
        form.add_error(None, problem.message)
        report = queries.Report(from_day=from_day, to_day=to_day, rows=[], requests=0, prompt_tokens=0, output_tokens=0)
    bound = SpanForm({"from_day": from_day, "to_day": to_day, "tenant": values.get("tenant") or ""})
    bound.is_valid()
    for error in form.non_field_errors():
        bound.add_error(None, str(error))
    return bound, report


def _chart(report: queries.Report, names: dict[str, str]) -> str:
    days = [report.from_day + timedelta(days=i) for i in range((report.to_day - report.from_day).days + 1)]
    by_tenant: dict[str, dict[date, float]] = defaultdict(dict)
    for row in report.rows:
        by_tenant[row.tenant][row.day] = row.output_tokens
    largest = sorted(by_tenant, key=lambda t: (-sum(by_tenant[t].values()), t))
    shown, rest = largest[: charts.N_COLOURS - 1], largest[charts.N_COLOURS - 1 :]
    series = {names.get(t, t): [by_tenant[t].get(d, 0.0) for d in days] for t in shown}
    if rest:
        series[f"{len(rest)} others"] = [sum(by_tenant[t].get(d, 0.0) for t in rest) for d in days]
    return charts.stacked_bars(
        title="Output tokens by day and tenant", days=[d.strftime("%d %b") for d in days], series=series
    )


@require_safe
@signed_in
def report(request: HttpRequest) -> HttpResponseBase:
    form, rows = _report(request)
    names = tenant_names()
    tenant = form.cleaned_data.get("tenant", "")
    context = {
        "form": form,
        "report": rows,
        "rows": [{"row": r, "name": names.get(r.tenant, r.tenant)} for r in rows.rows],
        "chart": _chart(rows, names) if rows.rows else "",
        "tenant": tenant,
        "tenant_name": names.get(tenant, tenant),
        "csv_query": urlencode({"from_day": rows.from_day, "to_day": rows.to_day, "tenant": tenant}),
        "n_quarantined": queries.n_quarantined(),
    }
    return render(request, "console/usage.html", context)


@require_safe
@signed_in
def report_as_csv(request: HttpRequest) -> HttpResponseBase:
    _, rows = _report(request)
    response = StreamingHttpResponse(report_csv(rows, tenant_names()), content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="usage-{rows.from_day}-{rows.to_day}.csv"'
    return response


@require_safe
@signed_in
def quarantine(request: HttpRequest) -> HttpResponseBase:
    """Events that could not be booked, for an operator's eyes."""
    rows = queries.quarantined(actor=actor_of(request))[:200]
    return render(request, "console/quarantine.html", {"rows": rows, "n": queries.n_quarantined()})
