"""The audit log: who changed what, and when."""

from __future__ import annotations

import json
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_safe

from controlplane.audit import queries
from controlplane.audit.export import download
from controlplane.common.errors import Invalid
from controlplane.console.frame import actor_of, signed_in
from controlplane.console.objects import objects_of

PAGE = 100
LABELS = {
    "actor": "Who",
    "action": "What",
    "object_type": "Kind",
    "object_id": "Object",
    "tenant": "Tenant",
    "from": "From (UTC)",
    "to": "To",
}


@require_safe
@signed_in
def index(request: HttpRequest) -> HttpResponseBase:
    """Newest first, a page at a time; ``before`` is the id of the last entry of the page before."""
    actor, before = actor_of(request), request.GET.get("before", "")
    given, narrowed, problem = _filter(request)
    rows = queries.entries(actor=actor, narrowed=narrowed)
    if before.isdecimal() and len(before) < 18:
        rows = rows.filter(id__lt=int(before))
    entries = list(rows[: PAGE + 1])
    objects = objects_of(entries[:PAGE], actor=actor)
    _, head = queries.head(actor=actor)
    context = {
        "entries": [
            {"entry": entry, "objects": each, "changes": _changes(entry.before, entry.after)}
            for entry, each in zip(entries[:PAGE], objects, strict=True)
        ],
        "fields": [(name, LABELS[name], given[name]) for name in queries.FILTERS],
        "query": urlencode({name: value for name, value in given.items() if value}),
        "problem": problem,
        "next": entries[PAGE - 1].id if len(entries) > PAGE else None,
        "head": head,
        "logged": queries.heads(actor=actor).first(),
    }
    return render(request, "console/audit.html", context, status=422 if problem else 200)


@require_safe
@signed_in
def export(request: HttpRequest, form: str) -> HttpResponseBase:
    """All entries that the filter lets through."""
    narrowed = queries.read_filter(request.GET.dict())
    return download(queries.all_of(queries.entries(actor=actor_of(request), narrowed=narrowed)), form)


def _filter(request: HttpRequest) -> tuple[dict[str, str], queries.Filter, str]:
    """What was asked for, the filter it makes, and what is wrong with it; nothing is filtered then."""
    given = {name: request.GET.get(name, "").strip() for name in queries.FILTERS}
    try:
        return given, queries.read_filter(given), ""
    except Invalid as problem:
        return given, queries.Filter(), problem.message


def _changes(before: dict[str, object] | None, after: dict[str, object] | None) -> list[tuple[str, str, str]]:
    """(field, old value, new value) of every field the entry names."""
    old, new = before or {}, after or {}
    return [(f, _text(old.get(f)), _text(new.get(f))) for f in sorted(old.keys() | new.keys())]


def _text(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
