"""Traces: recorded arrivals from a ``.csv`` or ``.csv.gz``, and lengths that come with the product.

A trace has a header and the columns ``t_s``, ``input_tokens``, ``output_tokens`` and, if it has several clients,
``client``; other columns are ignored. Times count from the first arrival; rows need not be sorted.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from router_ext.errors import SimulationError

MAX_TOKENS = 1_000_000
MAX_SPAN_S = 31 * 86_400
MAX_CLIENTS = 1_000
_MAX_NAME = 64
_REQUIRED = ("t_s", "input_tokens", "output_tokens")
_ONE_CLIENT = "client0"


class Row(NamedTuple):
    """One arrival, ``at_s`` after the first one of its trace."""

    at_s: float
    client: str
    input_tokens: int
    output_tokens: int


def read_trace(path: Path) -> list[Row]:
    """The rows of a trace in order of time; those at one instant as in the file.

    Raises:
        SimulationError: naming file, row (as an editor counts lines), column, value and what is accepted.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SimulationError(f"{path}: {error.strerror or error}") from error
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise SimulationError(f"{path}: not a gzip file ({error})") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SimulationError(f"{path}: byte {error.start} is not UTF-8") from error
    rows = sorted(_rows(csv.reader(io.StringIO(text, newline=""), strict=True), path), key=lambda row: row.at_s)
    if not rows:
        raise SimulationError(f"{path}: no rows below the header")
    first_s, span_s = rows[0].at_s, rows[-1].at_s - rows[0].at_s
    if not 0.0 < span_s <= MAX_SPAN_S:
        raise SimulationError(
            f"{path}: first and last arrival are {span_s:g} s apart (above 0 to {MAX_SPAN_S:,} s); "
            "column t_s is in seconds"
        )
    clients = len({row.client for row in rows})
    if clients > MAX_CLIENTS:
        raise SimulationError(f"{path}: {clients:,} clients, at most {MAX_CLIENTS:,} are accepted")
    return [row._replace(at_s=row.at_s - first_s) for row in rows]


def _rows(lines: Iterator[list[str]], path: Path) -> Iterator[Row]:
    header = [name.strip() for name in next(lines, [])]
    missing = [name for name in _REQUIRED if name not in header]
    if missing:
        raise SimulationError(
            f"{path}: the first row lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)} "
            f"(it has: {', '.join(header)[:200] or 'nothing'})"
        )
    at, inputs, outputs = (header.index(name) for name in _REQUIRED)
    client = header.index("client") if "client" in header else None
    number = 1
    try:
        for number, cells in enumerate(lines, 2):
            if not cells:
                continue
            if len(cells) != len(header):
                raise SimulationError(f"{path} row {number}: {len(cells)} cells, the header has {len(header)}")
            where = f"{path} row {number}"
            yield Row(
                _seconds(cells[at], where),
                _ONE_CLIENT if client is None else _name(cells[client], where),
                _tokens(cells[inputs], where, "input_tokens"),
                _tokens(cells[outputs], where, "output_tokens"),
            )
    except csv.Error as error:
        raise SimulationError(f"{path} row {number + 1}: {error}") from error


def _seconds(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > 1e12:
        raise SimulationError(f"{where}, column t_s: {text[:40]!r} is not a number of seconds")
    return value


def _tokens(text: str, where: str, column: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= MAX_TOKENS:
        raise SimulationError(f"{where}, column {column}: {text[:40]!r} is not a whole number from 1 to {MAX_TOKENS:,}")
    return value


def _name(text: str, where: str) -> str:
    name = text.strip()
    if not name or len(name) > _MAX_NAME or not name.isprintable():
        raise SimulationError(
            f"{where}, column client: {text[:40]!r} is not a name of 1 to {_MAX_NAME} printable characters"
        )
    return name


def played(rows: Sequence[Row], *, speed: float, span_s: float | None) -> list[Row]:
    """The rows as they are sent ``speed`` times as fast, up to ``span_s`` after the first.

    Raises:
        SimulationError: fewer than two are left.
    """
    faster = [row._replace(at_s=row.at_s / speed) for row in rows]
    kept = faster if span_s is None else [row for row in faster if row.at_s <= span_s]
    if len(kept) < 2 or kept[-1].at_s <= 0.0:
        raise SimulationError(f"a span of {span_s:g} s is shorter than the gap between the first two arrivals")
    return kept


def clients(rows: Iterable[Row]) -> list[str]:
    """The clients of a trace, in the order of their names."""
    return sorted({row.client for row in rows})


@cache
def conversation_lengths() -> tuple[tuple[int, int], ...]:
    """(input, output) tokens of real conversations below 9,000 tokens in all. See ``data/README.md``."""
    data = files("router_ext.sim").joinpath("data", "azure2023_conv_lengths.csv.gz").read_bytes()
    rows = csv.reader(io.StringIO(gzip.decompress(data).decode()))
    next(rows)
    return tuple((int(inputs), int(outputs)) for inputs, outputs in rows)
