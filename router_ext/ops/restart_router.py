"""``fairlane restart-router``: replace the running router by a new process, without a failed request.

For what a running process cannot take over: another version of the package, files of secrets that have changed. The
supervisor that started the router (``fairlane up``, ``fairlane serve``) does it; this command asks for it and waits.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from router_ext.errors import FairlaneError
from router_ext.ops.router_service import RESTART_LIMIT_S, RESTART_SIGNAL, RESULT_NAME, supervisor_of

_LOOK_S = 0.05


class RestartFailed(FairlaneError):
    """The router was not replaced; it serves as before."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dir", type=Path, help="the router's state folder (else FAIRLANE_ROUTER_DIR, else router in FAIRLANE_DIR)"
    )


def run(args: argparse.Namespace) -> int:
    folder = args.dir or folder_of(os.environ)
    result = restart(folder)
    Console(highlight=False).print(f"The router was replaced by process {result['pid']} in {result['seconds']:.1f} s.")
    return 0


def folder_of(environ: Mapping[str, str]) -> Path:
    """The state folder of the router that the environment speaks of."""
    if named := environ.get("FAIRLANE_ROUTER_DIR"):
        return Path(named)
    return Path(environ.get("FAIRLANE_DIR") or ".fairlane") / "router"


def restart(folder: Path, *, limit_s: float = RESTART_LIMIT_S + 15.0) -> dict[str, Any]:
    """Have the router of a state folder replaced, and wait for it.

    Raises:
        RestartFailed: with the reason; the router serves on.
    """
    supervisor = supervisor_of(folder)
    if supervisor is None:
        raise RestartFailed(
            f"no supervisor runs a router in {folder} (one is started by `fairlane up` and `fairlane serve`)"
        )
    path = folder / RESULT_NAME
    before = _read(path)
    try:
        os.kill(supervisor, RESTART_SIGNAL)
    except OSError as error:
        raise RestartFailed(f"the supervisor (process {supervisor}) cannot be asked: {error.strerror}") from None
    deadline = time.monotonic() + limit_s
    while (result := _read(path)) == before:
        if time.monotonic() >= deadline:
            raise RestartFailed(f"nothing came of it within {limit_s:.0f} s; the supervisor's output says more")
        if supervisor_of(folder) != supervisor:
            raise RestartFailed("the supervisor has ended")
        time.sleep(_LOOK_S)
    if result is None or not result.get("ok"):
        raise RestartFailed(f"the router was not replaced, and serves on: {(result or {}).get('why')}")
    return result


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
