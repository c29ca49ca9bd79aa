"""The audit log as a file: streamed, all of what a filter lets through, newest first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from django.http import StreamingHttpResponse

from controlplane.audit.chain import canonical_json
from controlplane.audit.models import AuditEntry
from controlplane.common.spreadsheet import csv_lines

COLUMNS = (
    "id", "at", "actor_kind", "actor_id", "actor_label", "action", "object_type", "object_id", "bulk", "tenant",
    "before", "after", "request_id", "hash",
)  # fmt: skip
"""New columns are only ever added at the end."""
FORMATS = ("csv", "json")


def _fields(entry: AuditEntry) -> dict[str, Any]:
    return {**{name: getattr(entry, name) for name in COLUMNS}, "at": entry.at.isoformat()}


def _csv(entries: Iterable[AuditEntry]) -> Iterator[str]:
    def cells(entry: AuditEntry) -> list[object]:
        found = _fields(entry)
        for name in ("before", "after"):
            found[name] = None if found[name] is None else canonical_json(found[name])
        found["bulk"] = " ".join(found["bulk"])
        return list(found.values())

    return csv_lines(COLUMNS, map(cells, entries))


def _json(entries: Iterable[AuditEntry]) -> Iterator[str]:
    separator = "["
    for entry in entries:
        yield separator + json.dumps(_fields(entry), ensure_ascii=False)
        separator = ",\n"
    yield "[]\n" if separator == "[" else "]\n"


def download(entries: Iterable[AuditEntry], form: str) -> StreamingHttpResponse:
    """The entries as a download; ``form``: one of ``FORMATS``."""
    lines, kind = (_csv(entries), "text/csv; charset=utf-8") if form == "csv" else (_json(entries), "application/json")
    response = StreamingHttpResponse(lines, content_type=kind)
    response["Content-Disposition"] = f'attachment; filename="audit.{form}"'
    return response
