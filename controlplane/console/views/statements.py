"""Monthly statements."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_safe

from controlplane.common.validation import get_or_not_found
from controlplane.console.frame import actor_of, of_tenants
from controlplane.usage.prices import decimal_text
from controlplane.usage.statements import statements
from controlplane.usage.statements_api import statement_response

SHOWN = 200


def money(micro: int | None) -> str:
    """An amount with its six decimals; "" without one."""
    return "" if micro is None else decimal_text(int(micro) * 10**6)[:-6]


@require_safe
@of_tenants
def index(request: HttpRequest) -> HttpResponseBase:
    rows = statements(actor=actor_of(request), tenant=request.GET.get("tenant", "")).prefetch_related(None)
    shown = [{"row": row, "amount": money(row.amount_micro)} for row in rows[:SHOWN]]  # type: ignore[arg-type] # whole
    return render(request, "console/statements.html", {"statements": shown})


@require_safe
@of_tenants
def detail(request: HttpRequest, statement_id: str) -> HttpResponseBase:
    row = get_or_not_found(statements(actor=actor_of(request)), "statement", statement_id)
    lines = sorted(row.lines.all(), key=lambda line: line.number)
    context = {
        "statement": row,
        "amount": money(row.amount_micro),  # type: ignore[arg-type] # a whole number
        "lines": [{"line": line, "amount": money(line.amount_micro)} for line in lines],  # type: ignore[arg-type] # whole
    }
    return render(request, "console/statement.html", context)


@require_safe
@of_tenants
def export(request: HttpRequest, statement_id: str) -> HttpResponseBase:
    return statement_response(get_or_not_found(statements(actor=actor_of(request)), "statement", statement_id))
