"""``fairlane bench grammars``: what the guard makes of common grammars and of hazards, and how long it takes.

Every grammar goes through the guard a router runs: *first* is the time of the first sight, process fork included,
*again* that of every later one. Verdicts rest on states and CPU time; the times depend on the machine.

With files it judges those instead: a JSON schema each, or with ``--regex`` patterns from the command line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from router_ext.errors import FairlaneError, GrammarRefused
from router_ext.guard.examples import COMMON, HAZARDS, TOOLS
from router_ext.guard.grammar import Grammar
from router_ext.guard.service import Guard
from router_ext.guard.verdict import DEFAULT_LIMIT_S, Backend, check, predicted_stall_s

_AGAIN = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("file", nargs="*", type=Path, help="JSON schemas to judge instead of the examples")
    parser.add_argument("--regex", action="append", default=[], metavar="TEXT", help="a regex to judge, repeatable")
    parser.add_argument("--vocabulary", type=_positive, default=49_152, metavar="N", help="tokens of the model")
    parser.add_argument("--limit", type=float, default=DEFAULT_LIMIT_S, metavar="S", help="seconds of stall allowed")
    parser.add_argument("--json", action="store_true", help="print one JSON object, progress goes to stderr")


def run(args: argparse.Namespace) -> int:
    """Judge, then print."""
    chosen = list(_chosen(args))
    rows = asyncio.run(_judge(chosen, Backend(args.vocabulary), args.limit))
    if args.json:
        print(json.dumps({"vocabulary": args.vocabulary, "limit_s": args.limit, "grammars": rows}))
    else:
        _print_table(rows, args)
    return 0


def _chosen(args: argparse.Namespace) -> Iterator[tuple[str, str, Grammar]]:
    """(kind, name, grammar) of everything to judge."""
    for path in args.file:
        try:
            schema = orjson.loads(path.read_bytes())
        except (OSError, orjson.JSONDecodeError) as error:
            raise FairlaneError(f"{path}: {error}") from None
        if not isinstance(schema, dict):
            raise FairlaneError(f"{path}: a schema is a JSON object")
        yield "given", path.name, Grammar.schema(schema)
    for text in args.regex:
        yield "given", text, Grammar.regex(text)
    if args.file or args.regex:
        return
    for kind, fields in (("common", COMMON), ("hazard", HAZARDS)):
        for name, field in fields.items():
            grammar = Grammar.of_field(field)
            if grammar is not None:
                yield kind, name, grammar
        if kind == "common":
            for name, tools in TOOLS.items():
                grammar = Grammar.of_tools(tools, "auto", None)
                if grammar is not None:
                    yield "tools", name, grammar


async def _judge(chosen: list[tuple[str, str, Grammar]], backend: Backend, limit_s: float) -> list[dict[str, Any]]:
    guard = Guard(wait_s=300.0)  # what a busy machine does to the time is no verdict
    task = asyncio.create_task(guard.run())
    rows = []
    try:
        await guard.prove(Grammar.regex("the nursery is up"), "bench", limit_s)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            for kind, name, grammar in progress.track(chosen, description="judging"):
                begun = time.perf_counter()
                proof = await guard.prove(grammar, "bench", limit_s)
                first_s = time.perf_counter() - begun
                begun = time.perf_counter()
                for _ in range(_AGAIN):
                    await guard.prove(grammar, "bench", limit_s)
                again_s = (time.perf_counter() - begun) / _AGAIN
                code, message = "proven", ""
                try:
                    check(proof, backend, limit_s, param="grammar")
                except GrammarRefused as error:
                    code, message = error.code, error.message.removeprefix("Input validation error: ")
                rows.append(
                    {
                        "kind": kind,
                        "name": name,
                        "states": proof.states,
                        "regex_bytes": proof.regex_bytes,
                        "cpu_s": round(proof.cpu_s, 4),
                        "stall_s": round(predicted_stall_s(proof, backend), 3) if proof.states else None,
                        "first_s": round(first_s, 4),
                        "again_us": round(again_s * 1e6, 1),
                        "verdict": code,
                        "message": message,
                    }
                )
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return rows


def _print_table(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    table = Table(title=f"grammars; vocabulary {args.vocabulary:,}, limit {args.limit:g} s of stall")
    for column in ("grammar", "states", "CPU s", "stall s", "first s", "again us", "verdict"):
        table.add_column(column, justify="left" if column in ("grammar", "verdict") else "right")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['states']:,}" if row["states"] else "",
            f"{row['cpu_s']:.3f}",
            "" if row["stall_s"] is None else f"{row['stall_s']:.2f}",
            f"{row['first_s']:.3f}",
            f"{row['again_us']:.1f}",
            row["verdict"] if not row["message"] else f"{row['verdict']}: {row['message']}",
        )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    common = sorted(row["first_s"] for row in rows if row["kind"] in ("common", "tools"))
    if common:
        proven = sum(row["verdict"] == "proven" for row in rows if row["kind"] in ("common", "tools"))
        console.print(
            f"common grammars: {proven} of {len(common)} proven; first sight at most {common[-1]:.3f} s, "
            f"median {common[len(common) // 2]:.3f} s"
        )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value
