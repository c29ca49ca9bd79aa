"""The audit log: who changed what, and when."""

from __future__ import annotations

import json

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_safe

from controlplane.audit import queries
from controlplane.console.frame import actor_of, signed_in

PAGE = 100


@require_safe
@signed_in
def index(request: HttpRequest) -> HttpResponseBase:
    """Newest first, a page at a time; ``before`` is the id of the last entry of the page before."""
    tenant, before = request.GET.get("tenant", ""), request.GET.get("before", "")
    rows = queries.entries(actor=actor_of(request), tenant=tenant)
    if before.isdecimal() and len(before) < 18:
        rows = rows.filter(id__lt=int(before))
    entries = list(rows[: PAGE + 1])
    context = {
        "entries": [{"entry": e, "changes": _changes(e.before, e.after)} for e in entries[:PAGE]],
        "tenant": tenant,
        "next": entries[PAGE - 1].id if len(entries) > PAGE else None,
    }
    return render(request, "console/audit.html", context)


def _changes(before: dict[str, object] | None, after: dict[str, object] | None) -> list[tuple[str, str, str]]:
    """(field, old value, new value) of every field the entry names."""
    old, new = before or {}, after or {}
    return [(f, _text(old.get(f)), _text(new.get(f))) for f in sorted(old.keys() | new.keys())]


def _text(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)
