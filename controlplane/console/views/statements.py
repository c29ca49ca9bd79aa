"""Monthly statements."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_safe

from controlplane.common.validation import get_or_not_found, without_nul
from controlplane.console.frame import actor_of, of_tenants
from controlplane.console.sorting import Column, asked_page
from controlplane.usage.statements import SORTED_BY, statements
from controlplane.usage.statements_api import statement_response

COLUMNS = (
    Column(name="month", label="Month", key=SORTED_BY["month"]),
    Column(name="tenant", label="Tenant", key=SORTED_BY["tenant"]),
    Column(name="timezone", label="Time zone", key=SORTED_BY["timezone"]),
    Column(name="amount", label="Amount", is_number=True),
    Column(name="closed", label="Closed", key=SORTED_BY["closed"]),
)


def money(micro: int | None) -> str:
    """An amount with its six decimals; "" without one."""
    if micro is None:
        return ""
    whole, rest = divmod(abs(int(micro)), 10**6)
    return f"{'-' if micro < 0 else ''}{whole:,}.{rest:06d}"


@require_safe
@of_tenants
def index(request: HttpRequest) -> HttpResponseBase:
    """Newest first unless asked otherwise; ``tenant``: an id, or a part of a name."""
    wanted = without_nul(request.GET.get("tenant", "")).strip()
    rows = statements(actor=actor_of(request), search=wanted).prefetch_related(None)
    page, problem = asked_page(rows, COLUMNS, asked=request.GET.dict(), kept=["tenant"], sort="-month")
    shown = [{"row": row, "amount": money(row.amount_micro)} for row in page.rows]  # type: ignore[arg-type] # whole
    context = {"statements": shown, "page": page, "problem": problem, "wanted": wanted}
    return render(request, "console/statements.html", context, status=422 if problem else 200)


@require_safe
@of_tenants
def detail(request: HttpRequest, statement_id: str) -> HttpResponseBase:
    row = get_or_not_found(statements(actor=actor_of(request)), "statement", statement_id)
    lines = sorted(row.lines.all(), key=lambda line: line.number)
    context = {
        "statement": row,
        "amount": money(row.amount_micro),  # type: ignore[arg-type] # a whole number
        "lines": [
            {
                "line": line,
                "amount": money(line.amount_micro),  # type: ignore[arg-type] # a whole number
                "prices": [money(line.prompt_micro), money(line.output_micro)],
            }
            for line in lines
        ],
    }
    return render(request, "console/statement.html", context)


@require_safe
@of_tenants
def export(request: HttpRequest, statement_id: str) -> HttpResponseBase:
    return statement_response(get_or_not_found(statements(actor=actor_of(request)), "statement", statement_id))
