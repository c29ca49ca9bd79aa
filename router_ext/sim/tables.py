"""The result of a simulation as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from router_ext.sim.loads import values_by_policy
from router_ext.sim.results import labels

_Entry: TypeAlias = Mapping[str, Any]
_Column: TypeAlias = tuple[str, Callable[[_Entry], float | None], str]
"""Title, value, format."""

_GAIN_NAMES = {"throughput_tokens_per_s": "tokens/s", "ttft_p99_s": "TTFT p99"}

_MOST_TENANTS = 12
"""Rows of the last table per policy; a trace may have a thousand tenants."""


def _metric(title: str, name: str, form: str) -> _Column:
    return title, lambda entry: entry["metrics"][name], form


_TABLES: tuple[tuple[str, tuple[_Column, ...]], ...] = (
    (
        "how much",
        (
            _metric("tokens/s", "throughput_tokens_per_s", ",.0f"),
            _metric("KV", "kv_occupancy", ".1%"),
            _metric("running", "mean_running", ".1f"),
            _metric("recomputed", "recomputed_ratio", ".2%"),
            _metric("resumed", "resumed_prefill_ratio", ".2%"),
            _metric("unstarted", "unstarted", ",.0f"),
            _metric("refused", "refused", ",.0f"),
            _metric("x real time", "sim_speed", ",.0f"),
        ),
    ),
    (
        "how fairly (service per weight)",
        (
            _metric("difference", "accumulated_difference", ",.0f"),
            _metric("while all wait", "accumulated_while_waiting", ",.0f"),
            _metric("bound", "bound", ",.0f"),
            _metric("window mean", "window_difference_mean", ",.1f"),
            _metric("window max", "window_difference_max", ",.1f"),
            _metric("share error", "share_error_60s_points", ".1f"),
        ),
    ),
    (
        "how soon",
        (
            _metric("TTFT p99", "ttft_p99_s", ",.3g"),
            _metric("completion s", "completion_mean_s", ",.1f"),
            _metric("missed", "violations_ratio", ".2%"),
            _metric("capacity req/s", "capacity_rps", ".2f"),
            _metric("batch over s", "makespan_s", ",.0f"),
            _metric("Jain", "jain", ".3f"),
        ),
    ),
)

_TENANT: tuple[_Column, ...] = (
    ("weight", lambda tenant: tenant["weight"], "g"),
    ("requests", lambda tenant: tenant["requests"], ",.0f"),
    ("p50", lambda tenant: tenant["ttft_s"]["p50"], ".3g"),
    ("p95", lambda tenant: tenant["ttft_s"]["p95"], ".3g"),
    ("p99", lambda tenant: tenant["ttft_s"]["p99"], ".3g"),
    ("x alone", lambda tenant: tenant.get("ttft_alone_ratio_p99"), ".1f"),
    ("k tokens", lambda tenant: tenant["tokens"] / 1_000.0, ",.0f"),
    ("share", lambda tenant: tenant["share"], ".1%"),
)


def print_tables(result: Mapping[str, Any]) -> None:
    """Three tables with a row per policy, one with a row per policy and tenant. Empty columns are left out."""
    console = Console()
    entries: Sequence[_Entry] = result["results"]
    seeds = ", ".join(map(str, result["seeds"]))
    console.print(f"[bold]{result['suite']}[/bold], mean of seeds {seeds}", highlight=False)
    names = labels(entries)
    for title, columns in _TABLES:
        shown = _telling(columns, entries)
        if shown:
            table = _table(title, ("policy",), shown)
            for label, entry in zip(names, entries, strict=True):
                table.add_row(label, *_cells(shown, entry))
            console.print(table)
    if result.get("gains"):
        console.print(_gains(result["gains"]))
    rows = [(entry["policy"], name, tenant) for entry in entries for name, tenant in entry["tenants"].items()]
    shown = _telling(_TENANT, [tenant for _, _, tenant in rows])
    if all(tenant["weight"] == 1.0 for _, _, tenant in rows):
        shown = [column for column in shown if column[0] != "weight"]
    table = _table(
        "seconds to the first token, thousands of tokens and share of service delivered", ("policy", "tenant"), shown
    )
    for label, entry in zip(names, entries, strict=True):
        _add_tenants(table, label, entry, shown)
    console.print(table)


def print_load(result: Mapping[str, Any], metric: str, title: str, text: Callable[[float | None], str]) -> None:
    """One metric by policy and rate."""
    console = Console()
    seeds = ", ".join(map(str, result["seeds"]))
    console.print(f"[bold]{result['suite']}[/bold], mean of seeds {seeds}", highlight=False)
    table = _table(title, ("policy",), ())
    for load in result["rates"]:
        table.add_column(f"{load['rate']:g}", justify="right")
    for policy, values in values_by_policy(result, metric).items():
        table.add_row(policy, *map(text, values))
    console.print(table)


def _gains(gains: Sequence[_Entry]) -> Table:
    """What true lengths gain over no prediction, and what of it the others recover."""
    predictors = list(gains[0]["recovered"])
    table = _table("what true lengths gain over no prediction, and the share of it others recover", ("policy",), ())
    for heading in ("metric", "gain", *predictors):
        table.add_column(heading, justify="right")
    for gain in gains:
        shares = [gain["recovered"][predictor] for predictor in predictors]
        cells = ["-" if share is None else f"{share:.0%}" for share in shares]
        table.add_row(gain["policy"], _GAIN_NAMES[gain["metric"]], f"{gain['oracle_gain']:+.1%}", *cells)
    return table


def _add_tenants(table: Table, label: str, entry: _Entry, columns: Sequence[_Column]) -> None:
    tenants = list(entry["tenants"].items())
    hidden = len(tenants) - _MOST_TENANTS
    if hidden > 0:
        tenants = sorted(tenants, key=lambda item: -(item[1]["share"] or 0.0))[:_MOST_TENANTS]
    for name, tenant in tenants:
        table.add_row(label, name, *_cells(columns, tenant))
    if hidden > 0:
        table.add_row(label, f"{hidden} smaller")
    table.add_section()


def _telling(columns: Sequence[_Column], entries: Sequence[_Entry]) -> list[_Column]:
    return [column for column in columns if any(column[1](entry) not in (None, 0.0) for entry in entries)]


def _table(title: str, names: Sequence[str], columns: Sequence[_Column]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=True)
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    return table


def _cells(columns: Sequence[_Column], entry: _Entry) -> list[str]:
    return ["-" if (number := value(entry)) is None else format(number, form) for _, value, form in columns]
