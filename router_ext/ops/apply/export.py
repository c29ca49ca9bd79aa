"""``fairlane export``: what the control plane has, as a file that ``fairlane apply`` takes."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

import yaml

from router_ext.ops.apply.api import Api, add_connection_arguments, connection_of
from router_ext.ops.apply.kinds import KINDS, Kind
from router_ext.ops.apply.plan import DEFAULT_LABEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--managed-by", help="only objects with this label, which the file then names")
    parser.add_argument("--json", action="store_true", help="JSON, which is YAML as well")
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    url, token = connection_of(args)
    document = asyncio.run(_read(Api(url, token), args.managed_by))
    if args.json:
        print(json.dumps(document, ensure_ascii=False))
    else:
        yaml.safe_dump(document, sys.stdout, sort_keys=False, allow_unicode=True, width=120)
    return 0


async def _read(api: Api, label: str | None) -> dict[str, Any]:
    document: dict[str, Any] = {"managed_by": label or DEFAULT_LABEL}
    async with api:
        for kind in KINDS:
            rows = [row for row in await api.all_of(kind) if label is None or row["managed_by"] == label]
            document[kind.path] = [_stated(kind, row) for row in sorted(rows, key=lambda row: str(row[kind.key]))]
    return document


def _stated(kind: Kind, row: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row that say something: nothing that is null or empty, and only limits that are set."""
    stated: dict[str, Any] = {kind.key: row[kind.key]}
    for name in kind.fields:
        value = row[name]
        if isinstance(value, dict):
            value = {inner: each for inner, each in value.items() if each is not None}
        if value is not None and value not in ("", [], {}):
            stated[name] = value
    return stated
