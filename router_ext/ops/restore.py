"""``fairlane restore FILE``: a backup becomes the embedded stack's database. The stack must not run."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from router_ext.ops.backup import DATABASE, BackupFailed, embedded_folders
from router_ext.ops.embedded import EmbeddedPostgres
from router_ext.ops.stack import APPLICATION_ROLE

AUDIT_ROLE = "fairlane_audit"
"""Owner of the audit log (``controlplane.audit.ownership``): a dump names its roles and does not make them."""
_DRAFT, _OLD = "fairlane_restored", "fairlane_replaced"
_N_TABLES = "SELECT count(*) FROM pg_class WHERE relkind IN ('r', 'p') AND relnamespace = 'public'::regnamespace"
_ROLES = """
DO $$ BEGIN
  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{name}') THEN CREATE ROLE {name} {how}; END IF;
END $$
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="made by `fairlane backup`")
    parser.add_argument("--dir", type=Path, help="state folder (else FAIRLANE_DIR, else .fairlane)")
    parser.add_argument("--replace", action="store_true", help="in place of a database that holds something already")
    parser.add_argument(
        "--new-secrets", action="store_true", help="there is no pepper of the backup: its keys and tokens are void"
    )
    parser.add_argument("--json", action="store_true", help='one JSON object {"tables", "seconds"} on stdout')


def run(args: argparse.Namespace) -> int:
    folders = embedded_folders(args.dir)
    if not args.file.is_file():
        raise BackupFailed(f"{args.file}: there is no such file")
    if not folders.secret("key_pepper").exists() and not args.new_secrets:
        raise BackupFailed(
            f"{folders.secret('key_pepper')} is not there: put the secrets of the stack that was backed up into that"
            " folder first. Without its pepper none of its keys and tokens is good (--new-secrets goes on all the same)"
        )
    os.umask(0o077)
    folders.prepare()
    began = time.monotonic()
    server = EmbeddedPostgres(folders.root / "postgres")
    with server:
        n_tables = restore(server, args.file, is_replacing=args.replace)
    seconds = round(time.monotonic() - began, 1)
    if args.json:
        print(json.dumps({"tables": n_tables, "seconds": seconds}))
    else:
        print(f"{n_tables} tables restored in {seconds} s; `fairlane up` serves them")
    return 0


def restore(server: EmbeddedPostgres, file: Path, *, is_replacing: bool = False) -> int:
    """Load a backup beside the present database, then put it in that one's place; returns its number of tables.

    What goes wrong leaves the present database as it is.

    Raises:
        BackupFailed: the present one holds tables and is not to be replaced, or with what pg_restore says.
    """
    if int(_sql(server, DATABASE, _N_TABLES)) and not is_replacing:
        raise BackupFailed(f"{server.directory} holds a database already (--replace puts the backup in its place)")
    for name, how in ((APPLICATION_ROLE, "LOGIN"), (AUDIT_ROLE, "NOLOGIN")):
        _sql(server, "postgres", _ROLES.format(name=name, how=how))
    for left in (_DRAFT, _OLD):
        _sql(server, "postgres", f"DROP DATABASE IF EXISTS {left}")
    _sql(server, "postgres", f"CREATE DATABASE {_DRAFT} TEMPLATE template0")
    try:
        done = server.tool("pg_restore", "--exit-on-error", "--dbname", _DRAFT, str(file.absolute()))
        if done.returncode != 0:
            raise BackupFailed(f"{file}: pg_restore: {done.stderr.strip()}")
        n_tables = int(_sql(server, _DRAFT, _N_TABLES))
        _sql(server, _DRAFT, "ANALYZE")
        # Two renames in one transaction: a kill leaves either database under the name.
        _sql(
            server,
            "postgres",
            f"BEGIN; ALTER DATABASE {DATABASE} RENAME TO {_OLD}; ALTER DATABASE {_DRAFT} RENAME TO {DATABASE}; COMMIT",
        )
        _sql(server, "postgres", f"DROP DATABASE {_OLD}")
    finally:
        _sql(server, "postgres", f"DROP DATABASE IF EXISTS {_DRAFT}")
    return n_tables


def _sql(server: EmbeddedPostgres, database: str, text: str) -> str:
    done = server.tool("psql", "--no-psqlrc", "-qAt", "-v", "ON_ERROR_STOP=1", "-d", database, "-c", text)
    if done.returncode != 0:
        raise BackupFailed(f"psql: {done.stderr.strip()}")
    return done.stdout.strip()
