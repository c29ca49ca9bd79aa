"""Backup under writes and restore into an empty cluster: the same rows, books, chain, triggers, owners and rights.

Slow: two clusters of their own, all migrations, and the control plane's programs as processes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from router_ext import cli
from router_ext.ops import process, stack
from router_ext.ops.embedded import EmbeddedPostgres
from router_ext.ops.restore import restore

ROOT = Path(__file__).resolve().parents[3]
FAST = {"fsync": "off", "full_page_writes": "off"}
NO_VALKEY = "redis://127.0.0.1:1/0"


@pytest.fixture
def no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "FAIRLANE_DIR"):
        monkeypatch.delenv(name, raising=False)


def plain(value: Any) -> Any:
    """Without casts and brackets: PostgreSQL writes an expression that it has read from a dump in another way."""
    return re.sub(r"::(character varying|text)(\[\])?|[()]", "", value) if isinstance(value, str) else value


class Cluster:
    """The database part of an embedded stack."""

    def __init__(self, folder: Path) -> None:
        self.folders = stack.Folders(folder)
        self.folders.prepare()
        self.server = EmbeddedPostgres(folder / "postgres", parameters=FAST)
        self.settings = stack.read_settings({"FAIRLANE_DIR": str(folder)})

    def environment(self, *, is_super: bool = False) -> dict[str, str]:
        url = self.server.url if is_super else self.server.url_of(stack.APPLICATION_ROLE)
        given = stack.controlplane_environment(
            self.settings, self.folders, os.environ, database_url=url, redis_url=NO_VALKEY
        )
        role = {"FAIRLANE_DB_APPLICATION_ROLE": stack.APPLICATION_ROLE} if is_super else {}
        return given | role | {"PYTHONPATH": str(ROOT), "FAIRLANE_LOG_LEVEL": "ERROR"}

    def django(self, *words: str, is_super: bool = False, **variables: str) -> tuple[int, str, str]:
        return process.run(stack.django_command(*words), env=self.environment(is_super=is_super) | variables)

    def python(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "tests.support.backed_up", *words]

    def rows(self, text: str, *, role: str | None = None) -> list[tuple[Any, ...]]:
        url = self.server.url if role is None else self.server.url_of(role)
        with psycopg.connect(url) as connection:
            return connection.execute(text).fetchall()

    def contents(self) -> dict[str, tuple[Any, ...]]:
        """Number of rows and a digest of all of them, by table."""
        tables = self.rows(
            "SELECT oid::regclass::text FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
        )
        text = "SELECT count(*), md5(coalesce(string_agg(t::text, E'\\n' ORDER BY t::text), '')) FROM {} t"
        return {name: self.rows(text.format(name))[0] for (name,) in tables}

    def catalog(self) -> dict[str, list[tuple[Any, ...]]]:
        """What beside rows makes the database: partitions, triggers, owners, rights, constraints, sequences."""
        return {
            name: sorted((tuple(map(plain, row)) for row in self.rows(text)), key=repr)
            for name, text in {
                "partitions": "SELECT inhrelid::regclass::text, inhparent::regclass::text,"
                " pg_get_expr(relpartbound, oid) FROM pg_inherits JOIN pg_class ON oid = inhrelid",
                "triggers": "SELECT tgrelid::regclass::text, tgenabled, pg_get_triggerdef(oid) FROM pg_trigger"
                " WHERE NOT tgisinternal",
                "owners": "SELECT relname, relkind, relowner::regrole::text, relacl::text FROM pg_class"
                " WHERE relnamespace = 'public'::regnamespace",
                "functions": "SELECT proname, proowner::regrole::text, md5(prosrc) FROM pg_proc"
                " WHERE pronamespace = 'public'::regnamespace",
                "constraints": "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint"
                " WHERE connamespace = 'public'::regnamespace AND contype <> 'n'",
                "indexes": "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'",
                "sequences": "SELECT sequencename, last_value FROM pg_sequences",
            }.items()
        }


@pytest.fixture
def source(tmp_path: Path, no_database: None) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path / "source")
    with cluster.server:
        status, _, err = cluster.django("migrate", "--noinput", is_super=True)
        assert status == 0, err
        yield cluster


def written(cluster: Cluster) -> tuple[int, int]:
    """The writer's audit entries and events."""
    (pair,) = cluster.rows(
        "SELECT (SELECT count(*) FROM audit_auditentry WHERE actor_label = 'writer' AND action = 'tenant.updated'),"
        " (SELECT count(*) FROM usage_event WHERE event LIKE 'evt_written_%')"
    )
    return pair


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_backup_under_writes_becomes_the_same_database(
    source: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(source.python("fill"), env=source.environment(), cwd=ROOT, check=True)
    stop, file, quiet = tmp_path / "stop", tmp_path / "live.dump", tmp_path / "quiet.dump"
    writer = subprocess.Popen(
        source.python("write", str(stop), "written"),
        env=source.environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == "1\n"
        before = written(source)
        assert cli.main(["backup", str(file), "--dir", str(source.folders.root)]) == 0
        after = written(source)
    finally:
        stop.touch()
        writer.communicate(timeout=60)
    assert before[0] < after[0], "nothing was written meanwhile"
    assert cli.main(["backup", str(quiet), "--dir", str(source.folders.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bytes"] == quiet.stat().st_size
    assert file.stat().st_mode & 0o077 == 0
    assert not list(tmp_path.glob("*.part"))

    # Of one instant: as many of one kind as of the other, between what there was before and after.
    copy = Cluster(tmp_path / "copy")
    with copy.server:
        restore(copy.server, file)
        entries, events = written(copy)
        assert entries == events
        assert before[0] <= entries <= after[0]
    head = json.loads(source.django("verify_audit", "--json")[1])["head"]
    contents, catalog = source.contents(), source.catalog()
    assert contents["audit_auditentry"][0] > 0
    assert sum(n for name, (n, _) in contents.items() if name.startswith("usage_event_")) == 1_200 + written(source)[1]

    # As an operator does it, into what the first restore has left.
    words = ["restore", str(quiet), "--dir", str(copy.folders.root)]
    assert cli.main(words) == 1
    assert "--replace" in capsys.readouterr().err
    assert cli.main([*words, "--replace"]) == 0
    with copy.server:
        assert copy.contents() == contents
        assert copy.catalog() == catalog
        status, said, err = copy.django("verify_audit", "--head", head, "--json")
        assert (status, json.loads(said)["head"]) == (0, head), err
        # The program's role may work, and may not touch the log.
        status, _, err = copy.django("check", "--deploy", FAIRLANE_INSECURE_HTTP="0")
        assert (status, "fairlane.W001" in err) == (0, False), err
        for attempt in (
            "UPDATE audit_auditentry SET action = 'x'",
            "DELETE FROM audit_auditentry",
            "TRUNCATE audit_auditentry",
            "ALTER TABLE audit_auditentry DISABLE TRIGGER ALL",
            "ALTER TABLE audit_auditentry OWNER TO fairlane_app",
            "DROP TABLE audit_auditentry",
            "DROP FUNCTION audit_refuse_change CASCADE",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                copy.rows(attempt, role=stack.APPLICATION_ROLE)
        status, said, err = copy.django("migrate", "--noinput", is_super=True)
        assert (status, "No migrations to apply" in said) == (0, True), err
        subprocess.run(copy.python("write", str(stop), "later"), env=copy.environment(), cwd=ROOT, check=True)
        assert json.loads(copy.django("verify_audit", "--head", head, "--json")[1])["is_whole"]
        # What fails leaves what is there.
        (tmp_path / "torn").write_bytes(quiet.read_bytes()[:-20_000])
    assert cli.main(["restore", str(tmp_path / "torn"), "--dir", str(copy.folders.root), "--replace"]) == 1
    with copy.server:
        assert copy.contents().keys() == contents.keys()
        assert copy.rows("SELECT datname FROM pg_database WHERE datname LIKE 'fairlane%'") == [("fairlane",)]


def test_what_cannot_be_backed_up_or_restored_is_said(
    tmp_path: Path, no_database: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "state", tmp_path / "file.dump"

    def refused(*words: str) -> str:
        assert cli.main([*words, "--dir", str(folder)]) == 1
        return capsys.readouterr().err

    assert "holds no stack yet" in refused("backup", str(file))
    assert "no such file" in refused("restore", str(file))
    file.write_bytes(b"PGDMP")
    assert "key_pepper is not there" in refused("restore", str(file))
    assert not folder.exists()
    monkeypatch.setenv("DATABASE_URL", "postgresql://elsewhere/books")
    for command in ("backup", "restore"):
        assert "DATABASE_URL names a server of yours" in refused(command, str(file))
