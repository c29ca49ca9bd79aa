"""``fairlane reset-password``: a new one-time password for an operator of the embedded stack, running or not."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path

from router_ext.errors import FairlaneError
from router_ext.ops import process, stack
from router_ext.ops.embedded import EmbeddedPostgres, EmbeddedServerError


class ResetFailed(FairlaneError):
    """No such account, or the database cannot be reached."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("email", nargs="?", default=stack.OPERATOR_EMAIL, help="the operator's address")
    parser.add_argument("--dir", type=Path, help="state folder (else FAIRLANE_DIR, else .fairlane)")
    parser.add_argument("--json", action="store_true", help='one JSON object {"email", "password"} on stdout')


def run(args: argparse.Namespace) -> int:
    environ = dict(os.environ) | ({"FAIRLANE_DIR": str(args.dir)} if args.dir else {})
    settings = stack.read_settings(environ)
    folders = stack.Folders(settings.directory)
    if not folders.secret("key_pepper").exists():
        raise ResetFailed(f"{settings.directory} holds no stack yet: `fairlane up` makes one")
    with contextlib.ExitStack() as exits:
        env = stack.controlplane_environment(
            settings,
            folders,
            environ,
            database_url=settings.database_url or _embedded_database(folders, exits),
            redis_url=settings.redis_url or "redis://127.0.0.1:1/0",  # resetting a password does not speak to Valkey
        )
        command = stack.django_command("bootstrap_operator", args.email, "--reset", "--json")
        status, out, err = process.run(command, env=env)
    if status != 0:
        raise ResetFailed(err.strip().splitlines()[-1] if err.strip() else f"ended with status {status}")
    if args.json:
        print(out.strip())
    else:
        print(f"one-time password of {args.email}: {json.loads(out)['password']}")
    return 0


def _embedded_database(folders: stack.Folders, exits: contextlib.ExitStack) -> str:
    """Address of the running stack's PostgreSQL; started for the moment when the stack is not running."""
    server = EmbeddedPostgres(folders.root / "postgres")
    try:
        url = server.start()
    except EmbeddedServerError:
        return server.recorded_url()  # in use: the stack is running
    exits.callback(server.stop)
    return url
