"""The usage report as CSV: stable columns, safe to open in a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping

from django.http import StreamingHttpResponse

from controlplane.usage.queries import Report

COLUMNS = (
    "day", "tenant", "tenant_name", "requests", "prompt_tokens", "output_tokens", "ttft_p50_ms", "ttft_p95_ms"
)  # fmt: skip
"""New columns are only ever added at the end."""

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def safe_text(text: str) -> str:
    """Text that no spreadsheet takes for a formula: a leading apostrophe before what could begin one."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def report_csv(report: Report, names: Mapping[str, str]) -> Iterator[str]:
    """Lines of the CSV, header first. ``names``: tenant name by id."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")

    def line(*cells: object) -> str:
        buffer.seek(0)
        buffer.truncate()
        writer.writerow(cells)
        return buffer.getvalue()

    yield line(*COLUMNS)
    for row in report.rows:
        yield line(
            row.day.isoformat(),
            safe_text(row.tenant),
            safe_text(names.get(row.tenant, "")),
            row.requests,
            row.prompt_tokens,
            row.output_tokens,
            "" if row.ttft_p50_ms is None else row.ttft_p50_ms,
            "" if row.ttft_p95_ms is None else row.ttft_p95_ms,
        )


def csv_response(report: Report, names: Mapping[str, str]) -> StreamingHttpResponse:
    """The CSV as a download named by its days; console and REST answer with it."""
    response = StreamingHttpResponse(report_csv(report, names), content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="usage_{report.from_day}_{report.to_day}.csv"'
    return response
