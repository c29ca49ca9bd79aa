"""``fairlane check-config``: the effective settings, where each came from, and whether a snapshot would be applied."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from rich.console import Console
from rich.table import Column, Table

from router_ext.errors import FairlaneError, SettingsError, SnapshotRefused
from router_ext.gateway.configure import Directory
from router_ext.settings import RouterSettings, load_router_settings, variable_of
from router_ext.sync.saved_snapshot import read_with_deltas
from router_ext.wire.controlplane import ConfigSnapshot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--snapshot", type=Path, metavar="FILE", help="snapshot to check (default: the router's last)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def effective(settings: RouterSettings, origins: dict[str, str]) -> list[dict[str, Any]]:
    """One row per setting; a secret shows that it is set, never what it is."""
    rows = []
    for name in RouterSettings.model_fields:
        value = getattr(settings, name)
        if isinstance(value, SecretStr):
            shown: Any = f"set ({len(value.get_secret_value())} characters)"
        elif value is None or isinstance(value, int | float):
            shown = value
        else:
            shown = str(value)
        rows.append({"name": name, "variable": variable_of(name), "value": shown, "from": origins[name]})
    return rows


def read_snapshot(path: Path) -> ConfigSnapshot:
    """A snapshot file.

    Raises:
        SnapshotRefused: unreadable, or not a snapshot.
    """
    try:
        return read_with_deltas(path)
    except OSError as error:
        raise SnapshotRefused(f"{path}: {error.strerror}") from None


def check_snapshot(settings: RouterSettings, path: Path) -> dict[str, Any]:
    """Validate a snapshot as the router would; the verdict never raises."""
    try:
        directory = Directory(read_snapshot(path), settings.peppers)
    except FairlaneError as error:
        return {"file": str(path), "is_good": False, "reason": error.message}
    snapshot = directory.snapshot
    return {
        "file": str(path),
        "is_good": True,
        "revision": snapshot.revision,
        "pools": [pool.name for pool in snapshot.pools],
        "tenants": len(snapshot.tenants),
        "keys": len(snapshot.keys),
        "keys_without_pepper": directory.keys.without_pepper.total(),
    }


def run(args: argparse.Namespace) -> int:
    """0: everything would be accepted. 1: something would not."""
    try:
        settings, origins = load_router_settings()
    except SettingsError as error:
        if args.json:
            print(json.dumps({"is_good": False, "reason": error.message}))
            return 1
        raise
    path = args.snapshot or settings.snapshot_file or settings.dir / "snapshot.json"
    verdict = check_snapshot(settings, path) if args.snapshot or path.exists() else None
    rows = effective(settings, origins)
    is_good = verdict is None or bool(verdict["is_good"])
    if args.json:
        print(json.dumps({"is_good": is_good, "settings": rows, "snapshot": verdict}))
        return 0 if is_good else 1
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        # In a file or a pipe nothing is narrow.
        console = Console(soft_wrap=True, width=4_096)
    columns = [Column(title, overflow="fold") for title in ("setting", "value", "from")]
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(row["variable"], "" if row["value"] is None else str(row["value"]), row["from"])
    console.print(table)
    if verdict is None:
        console.print(f"\nno snapshot yet ({path})", highlight=False)
    elif is_good:
        console.print(
            f"\nsnapshot {path}: revision {verdict['revision']} would be applied"
            f" ({len(verdict['pools'])} pools, {verdict['tenants']} tenants, {verdict['keys']} keys)",
            highlight=False,
        )
        if without := verdict["keys_without_pepper"]:
            console.print(f"{without} of its keys would be refused: their version of the pepper is not here")
    else:
        console.print(f"\nsnapshot {path} would be refused: {verdict['reason']}", highlight=False)
    return 0 if is_good else 1
