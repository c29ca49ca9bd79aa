"""CSV that is safe to open in a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def safe_text(text: str) -> str:
    """Text that no spreadsheet takes for a formula: a leading apostrophe before what could begin one."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def csv_lines(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Lines of a CSV, header first; texts are made safe, None is empty."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    writer.writerow(columns)
    yield buffer.getvalue()
    for row in rows:
        buffer.seek(0)
        buffer.truncate()
        writer.writerow(["" if c is None else safe_text(c) if isinstance(c, str) else c for c in row])
        yield buffer.getvalue()
