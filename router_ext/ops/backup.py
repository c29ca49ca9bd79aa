"""``fairlane backup FILE``: the embedded stack's database as one file, while it serves or while it does not run.

The file is pg_dump's own format, of one instant: all rows, triggers, owners and rights. Secrets are not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from router_ext.errors import FairlaneError
from router_ext.ops import stack
from router_ext.ops.embedded import EmbeddedPostgres, EmbeddedServerError

DATABASE = "fairlane"


class BackupFailed(FairlaneError):
    """Nothing to back up, no room, or PostgreSQL's programs failed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="where to; replaced once the new backup is whole")
    parser.add_argument("--dir", type=Path, help="state folder (else FAIRLANE_DIR, else .fairlane)")
    parser.add_argument("--json", action="store_true", help='one JSON object {"file", "bytes", "seconds"} on stdout')


def run(args: argparse.Namespace) -> int:
    folders = embedded_folders(args.dir)
    server = EmbeddedPostgres(folders.root / "postgres")
    if not server.data.exists():
        raise BackupFailed(f"{folders.root} holds no stack yet: `fairlane up` makes one")
    began = time.monotonic()
    with answering(server):
        dump(server, args.file)
    seconds, size = round(time.monotonic() - began, 1), args.file.stat().st_size
    if args.json:
        print(json.dumps({"file": str(args.file), "bytes": size, "seconds": seconds}))
    else:
        print(f"{args.file}: {size:,} bytes in {seconds} s")
        print(f"Keep {folders.root / 'secrets'} as well, elsewhere: without its key_pepper no key of it is good.")
    return 0


def embedded_folders(directory: Path | None) -> stack.Folders:
    """Folders of the embedded stack.

    Raises:
        BackupFailed: the database is another one.
    """
    settings = stack.read_settings(dict(os.environ) | ({"FAIRLANE_DIR": str(directory)} if directory else {}))
    if settings.database_url:
        raise BackupFailed("DATABASE_URL names a server of yours: use its pg_dump (docs/control_plane.md, Backup)")
    return stack.Folders(settings.directory)


@contextlib.contextmanager
def answering(server: EmbeddedPostgres) -> Iterator[None]:
    """The server of a running stack, or started for the moment."""
    try:
        server.start()
    except EmbeddedServerError:
        if server.tool("pg_isready", "--quiet").returncode != 0:
            raise
        yield
        return
    try:
        yield
    finally:
        server.stop()


def dump(server: EmbeddedPostgres, file: Path) -> None:
    """Write the database as of now to ``file`` (0600), which is replaced once all of it is there.

    Raises:
        BackupFailed: with what pg_dump says.
    """
    draft = file.with_name(f"{file.name}.part")
    try:
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        done = server.tool("pg_dump", "--format=custom", "--file", str(draft.absolute()), DATABASE)
        if done.returncode != 0:
            raise BackupFailed(f"pg_dump: {done.stderr.strip()}")
        draft.replace(file)
    except OSError as error:
        raise BackupFailed(f"{file}: {error.strerror}") from None
    finally:
        draft.unlink(missing_ok=True)
