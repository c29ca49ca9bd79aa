"""``fairlane bench usage``: the books, the console and the configuration of a large installation.

A control plane of its own, with PostgreSQL and Valkey, is filled with a month of events of many tenants, and measured:

* booking the events, in the batches and by the code that take them from routers (``manage.py bench_usage fill``);
* every page of the console, found in its table of addresses, and the usage report by REST in every grouping: time of
  the server and number of queries (``manage.py bench_usage pages``, ``reports``);
* memory of the process that serves while exports of everything stream from it;
* a change of the configuration, from the request to its being in force on two real routers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from router_ext.ops.measures import resident_bytes
from router_ext.ops.usagebench.installation import Installation, serving_process
from router_ext.ops.usagebench.serving import measure_apply, measure_exports
from router_ext.ops.usagebench.table import lines

PARTS = ("pages", "reports", "exports", "config")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--events", type=int, default=1_000_000, help="rows of the books")
    parser.add_argument("--days", type=int, default=30, help="that they are of")
    parser.add_argument("--tenants", type=int, default=10_000)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--sessions", type=int, default=2, help="batches booked at once, as those of so many routers")
    parser.add_argument("--loads", type=int, default=5, help="warm loads of each page and report")
    parser.add_argument("--part", action="append", choices=PARTS, help="beside filling only this one (repeatable)")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="fill this folder and leave it, or measure on what an earlier run left"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, progress on stderr")


def run(args: argparse.Namespace) -> int:
    """0: measured."""
    with _folder(args.keep) as folder:
        result = measure(args, Installation(folder))
    if args.json:
        print(json.dumps(result))
    else:
        for line in lines(result):
            print(line)
    return 0


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        yield kept.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="fairlane-bench-") as name:
        yield Path(name)


def measure(args: argparse.Namespace, installation: Installation) -> dict[str, Any]:
    """All parts that were asked for; their fields are missing otherwise.

    Raises:
        UsageBenchFailed: a part did not work.
    """
    parts: Sequence[str] = args.part or PARTS
    with installation.database():
        if not installation.was_there:
            _say("filling the database")
            words = ("--events", "--days", "--tenants", "--keys", "--sessions")
            sizes = [text for word in words for text in (word, str(getattr(args, word[2:])))]
            installation.remember(installation.step("fill", *sizes))
        filled: Any = installation.remembered()
        configured = filled["configured"]
        token = configured["operator_token"]
        result: dict[str, Any] = {"ingest_events_per_s": round(filled["ingest_events_per_s"])}
        details: dict[str, Any] = {"ingest": filled["ingest"], "rows": filled["rows"]}
        loads = ("--loads", str(args.loads))
        if "pages" in parts:
            _say("pages of the console")
            paged: Any = installation.step("pages", *loads)
            pages = paged["pages"]
            result["worst_page_s"] = max(page["s"] for page in pages.values())
            result["worst_page_queries"] = max(page["queries"] for page in pages.values())
            result["pages"] = {name: {"s": page["s"], "queries": page["queries"]} for name, page in pages.items()}
            details["unmeasured"] = paged["unmeasured"]
        if "reports" in parts:
            _say("usage reports by REST")
            reports: Any = installation.step("reports", *loads, given=token)["reports"]
            result["report_api_ms"] = max(report["s"] for report in reports.values()) * 1_000
            details["reports"] = {name: report["s"] * 1_000 for name, report in reports.items()}
        if {"exports", "config"} & set(parts):
            result |= _serve(installation, parts, configured, details)
    return {**result, "details": details}


def _serve(
    installation: Installation, parts: Sequence[str], configured: dict[str, Any], details: dict[str, Any]
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    token, router_tokens = configured["operator_token"], configured["router_tokens"]
    with installation.serving() as console:
        if "exports" in parts:
            _say("exports")
            process = serving_process(console)
            exports = asyncio.run(measure_exports(installation.url, token, lambda: resident_bytes(process)))
            result["export_peak_mib"] = max(export.peak_mib for export in exports)
            details["exports"] = [asdict(export) for export in exports]
        if "config" in parts:
            _say(f"a changed weight on {len(router_tokens)} routers")
            with installation.routers(router_tokens) as names:
                applied = asyncio.run(measure_apply(installation.url, token, configured["tenants"], routers=names))
            result["config_apply_s"] = applied.worst
            details["config"] = asdict(applied)
    return result


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
