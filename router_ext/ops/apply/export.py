"""``fairlane export``: what the control plane has, as a file that ``fairlane apply`` takes."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from typing import Any

import yaml

from router_ext.ops.apply.deeds import all_of
from router_ext.ops.apply.kinds import KINDS, Kind
from router_ext.ops.apply.plan import DEFAULT_LABEL
from router_ext.ops.rest import Rest, add_connection_arguments, connection_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--managed-by", help="only objects with this label, which the file then names")
    parser.add_argument("--json", action="store_true", help="JSON, which is YAML as well")
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    url, token = connection_of(args)
    document = asyncio.run(_read(Rest(url, token), args.managed_by))
    if args.json:
        print(json.dumps(document, ensure_ascii=False))
    else:
        yaml.safe_dump(document, sys.stdout, sort_keys=False, allow_unicode=True, width=120)
    return 0


async def _read(rest: Rest, label: str | None) -> dict[str, Any]:
    document: dict[str, Any] = {"managed_by": label or DEFAULT_LABEL}
    async with rest:
        for kind in KINDS:
            rows = [row for row in await all_of(rest, kind) if label is None or row["managed_by"] == label]
            rows.sort(key=lambda row, kind=kind: kind.key_of(kind.stated(row)))  # type: ignore[misc] # bound early
            document[kind.name] = _once(kind, [stated(kind, row) for row in rows])
    return document


def _once(kind: Kind, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that a file can name: of live keys of one tenant several may have one name."""
    times = Counter(kind.key_of(each) for each in objects)
    for key, n in times.items():
        if n > 1:
            print(f"left out: {n} of {kind.name}/{'/'.join(key)}; a file knows them by name", file=sys.stderr)
    return [each for each in objects if times[kind.key_of(each)] == 1]


def stated(kind: Kind, row: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row that say something: nothing that is null or empty, and only limits that are set."""
    found: dict[str, Any] = {}
    for name, value in kind.stated(row).items():
        if isinstance(value, dict):
            value = {inner: each for inner, each in value.items() if each is not None}
        if name in (*kind.key, *kind.required) or (value is not None and value not in ("", [], {})):
            found[name] = value
    return found
