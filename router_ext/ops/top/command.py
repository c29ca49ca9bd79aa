"""``fairlane top``: a live view of routers, or with ``--once`` one plain table."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from router_ext.errors import FairlaneError
from router_ext.ops.top import rows
from router_ext.ops.top.sources import Look, find_sources, look_at

PLAIN_WIDTH = 160
"""Columns of a table that is written to no terminal."""


class NothingToShow(FairlaneError):
    """No router answered."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", action="append", default=None, help="a router's admin port; may be repeated")
    parser.add_argument(
        "--token-file", type=Path, help="its token (else FAIRLANE_ADMIN_TOKEN[_FILE], else the stack's)"
    )
    parser.add_argument("--dir", type=Path, default=Path(os.environ.get("FAIRLANE_DIR", ".fairlane")), help="state")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="how often to look")
    names = {column: key for key, (column, _) in rows.SORTS.items()}
    parser.add_argument(
        "--sort", choices=list(names), default=rows.SORTS[rows.DEFAULT_SORT][0], help="order of tenants"
    )
    parser.add_argument("--once", action="store_true", help="print one plain table and end")
    parser.add_argument("--json", action="store_true", help="print once what the routers say, as JSON")


def run(args: argparse.Namespace) -> int:
    """Show until ``q``, or once. 0: at least one router answered.

    Raises:
        SettingsError: it is not known where to look. NothingToShow: nobody answered.
    """
    sources = find_sources(args.url or [], token_file=args.token_file, directory=args.dir)
    sort = next(key for key, (column, _) in rows.SORTS.items() if column == args.sort)
    if args.json or args.once or not sys.stdout.isatty():
        looks = look_at(sources)
        if args.json:
            print(json.dumps([{"url": look.url, "problem": look.problem, "router": look.document} for look in looks]))
        if all(look.document is None for look in looks):
            raise NothingToShow("; ".join(rows.headline(look) for look in looks))
        if not args.json:
            print_once(looks, sort)
        return 0
    from router_ext.ops.top.view import TopApp

    TopApp(sources, every_s=max(args.every, 0.1), sort=sort).run()
    return 0


def print_once(looks: Sequence[Look], sort: str, console: Console | None = None) -> None:
    """The same as the live view, as text."""
    if console is None:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    for look in looks:
        console.print(rows.headline(look), markup=False, soft_wrap=True)
    tenants = rows.sorted_tenants(rows.Shares().tenants(looks), sort)
    for title, columns, found in (
        ("Pools", rows.POOL_COLUMNS, rows.pool_rows(looks)),
        ("Tiers, last five minutes", rows.TIER_COLUMNS, rows.tier_rows(looks)),
        ("Tenants", rows.TENANT_COLUMNS, rows.tenant_rows(tenants)),
        ("Backends", rows.BACKEND_COLUMNS, rows.backend_rows(looks)),
    ):
        table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)
        for row in found:
            table.add_row(*row)
        console.print(table, markup=False)
