"""Reports as CSV and JSON, streamed: stable columns, safe to open in a spreadsheet, flat in memory."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from django.http import StreamingHttpResponse

from controlplane.common.spreadsheet import safe_text
from controlplane.usage.prices import decimal_text
from controlplane.usage.report import Question, Row, stream_rows

COLUMNS = (
    "day", "tenant", "tenant_name", "requests", "prompt_tokens", "output_tokens", "ttft_p50_ms", "ttft_p95_ms", "start",
    "key", "key_name", "pool", "pool_name", "model", "tier", "completed", "recomputed_tokens", "resumed_tokens",
    "kv_token_ms", "currency", "cost", "unpriced_requests",
)  # fmt: skip
"""New columns are only ever added at the end. What is not grouped by is empty; ``day`` and ``start`` of a report over
the whole span are those of its begin."""

_TEXTS = ("tenant", "tenant_name", "key", "key_name", "pool", "pool_name", "model", "tier")
_LINES = 500
"""Rows written at once: fewer, larger pieces are far quicker to send."""


def row_fields(row: Row) -> dict[str, Any]:
    """A row by ``COLUMNS``."""
    return {
        "day": row.start.date().isoformat(),
        "start": row.start.isoformat(),
        **{name: row.group.get(name, "") for name in ("tenant", "key", "pool", "model", "tier")},
        **{f"{name}_name": row.names.get(name, "") for name in ("tenant", "key", "pool")},
        **row.sums,
        "ttft_p50_ms": row.ttft_p50_ms,
        "ttft_p95_ms": row.ttft_p95_ms,
        "currency": row.currency,
        "cost": None if row.cost_pico is None else decimal_text(row.cost_pico),
        "unpriced_requests": row.unpriced,
    }


def report_csv(rows: Iterable[Row]) -> Iterator[str]:
    """The CSV in pieces, header first."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    writer.writerow(COLUMNS)
    for batch in _batched(rows):
        for row in batch:
            fields = row_fields(row)
            fields |= {name: safe_text(fields[name]) for name in _TEXTS}
            writer.writerow(["" if fields[name] is None else fields[name] for name in COLUMNS])
        yield _taken(buffer)
    if rest := _taken(buffer):
        yield rest


def _batched(rows: Iterable[Row]) -> Iterator[list[Row]]:
    source = iter(rows)
    while batch := list(itertools.islice(source, _LINES)):
        yield batch


def _taken(buffer: io.StringIO) -> str:
    text = buffer.getvalue()
    buffer.seek(0)
    buffer.truncate()
    return text


def report_json(rows: Iterable[Row]) -> Iterator[bytes]:
    """``{"rows": [...]}`` in pieces."""
    before = b'{"rows":['
    for batch in _batched(rows):
        yield before + b",".join(
            msgspec.json.encode({name: fields[name] for name in COLUMNS}) for fields in map(row_fields, batch)
        )
        before = b","
    yield before + b"]}" if before != b"," else b"]}"


def export_response(question: Question, kind: str) -> StreamingHttpResponse:
    """All rows as a download named by its days; console and REST answer with it.

    Args:
        kind: csv or json.
    """
    rows = stream_rows(question)
    name = f"usage_{question.from_day}_{question.to_day}.{kind}"
    response = (
        StreamingHttpResponse(report_csv(rows), content_type="text/csv; charset=utf-8")
        if kind == "csv"
        else StreamingHttpResponse(report_json(rows), content_type="application/json")
    )
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response
