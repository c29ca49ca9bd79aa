"""The private servers against real processes and real kills."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
import redis

from router_ext.ops import process
from router_ext.ops.embedded import EmbeddedPostgres, EmbeddedServerError, EmbeddedValkey, port_is_free

SUPERVISOR = """
import json, signal, sys
from router_ext.ops.embedded import EmbeddedPostgres, EmbeddedValkey
postgres, valkey = EmbeddedPostgres(sys.argv[1] + "/postgres"), EmbeddedValkey(sys.argv[1] + "/valkey")
postgres.start(); valkey.start()
print(json.dumps({"pids": [postgres.pid, valkey.pid], "urls": [postgres.url, valkey.url]}), flush=True)
signal.pause()
"""


@pytest.fixture
def supervisor(tmp_path: Path):
    """A process of its own that runs both servers in ``tmp_path``; yields (process, what it printed)."""
    child = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert child.stdout is not None
        yield child, json.loads(child.stdout.readline())
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def _alive(pid: int) -> bool:
    try:
        return not Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0].startswith("Z")
    except OSError:
        return False


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_killed_supervisor_leaves_no_orphan_no_busy_port_and_no_loss(supervisor, tmp_path: Path) -> None:
    child, started = supervisor
    with psycopg.connect(started["urls"][0]) as connection:
        connection.execute("create table kept (n int)")
        connection.execute("insert into kept select generate_series(1, 1000)")
    store = redis.from_url(started["urls"][1])
    store.set("kept", "yes")
    port = store.connection_pool.connection_kwargs["port"]
    store.close()
    family = [*started["pids"], *(grandchild for pid in started["pids"] for grandchild in _children(pid))]
    assert len(family) > 4

    os.kill(child.pid, signal.SIGKILL)

    assert process.wait_until(lambda: not any(map(_alive, family)), limit_s=20)
    assert port_is_free("127.0.0.1", port)
    with EmbeddedPostgres(tmp_path / "postgres") as url, psycopg.connect(url) as connection:
        assert connection.execute("select count(*), sum(n) from kept").fetchone() == (1000, 500500)
    with EmbeddedValkey(tmp_path / "valkey") as url:
        assert url == started["urls"][1], "the same port and password as before"
        store = redis.from_url(url, decode_responses=True)
        assert store.get("kept") == "yes"
        store.close()


def test_start_right_after_the_kill_waits_for_the_servers_to_end(supervisor, tmp_path: Path) -> None:
    child, started = supervisor
    with psycopg.connect(started["urls"][0]) as connection:
        connection.execute("create table kept as select generate_series(1, 50000) as n")
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    with EmbeddedPostgres(tmp_path / "postgres") as url, psycopg.connect(url) as connection:
        assert connection.execute("select count(*) from kept").fetchone() == (50000,)
    with EmbeddedValkey(tmp_path / "valkey") as url:
        store = redis.from_url(url)
        assert store.ping()
        store.close()


@pytest.mark.parametrize("server", [EmbeddedPostgres, EmbeddedValkey])
def test_folder_of_a_running_server_is_refused(supervisor, tmp_path: Path, server) -> None:
    folder = tmp_path / ("postgres" if server is EmbeddedPostgres else "valkey")
    with pytest.raises(EmbeddedServerError, match="in use by another process"):
        server(folder).start()


def test_postgres_killed_with_its_sessions_open_starts_again(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path)
    with server as url:
        with psycopg.connect(url) as connection:
            connection.execute("create table kept (n int)")
            connection.execute("insert into kept values (1)")
        os.kill(server.pid, signal.SIGKILL)
        assert process.wait_until(lambda: server.pid is None, limit_s=5)
        server.start()
        with psycopg.connect(url) as connection:
            assert connection.execute("select n from kept").fetchone() == (1,)


def test_stale_pid_file_naming_a_stranger_does_not_stop_the_start(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path):
        kept = (tmp_path / "data" / "postmaster.pid").read_text()
    stranger = subprocess.Popen(["sleep", "300"])
    try:
        (tmp_path / "data" / "postmaster.pid").write_text(kept.replace(kept.split()[0], str(stranger.pid), 1))
        with EmbeddedPostgres(tmp_path) as url, psycopg.connect(url) as connection:
            assert connection.execute("select 1").fetchone() == (1,)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_cluster_left_half_made_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "data.new").mkdir()
    (tmp_path / "data.new" / "PG_VERSION").write_text("18\n")
    with EmbeddedPostgres(tmp_path) as url, psycopg.connect(url) as connection:
        assert connection.execute("show server_encoding").fetchone() == ("UTF8",)


def test_socket_of_a_deep_folder_moves_to_a_short_path(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / ("deep" * 20)) as url, psycopg.connect(url) as connection:
        assert connection.execute("select current_database()").fetchone() == ("fairlane",)
        folder = Path(connection.info.host)
    assert str(folder).startswith("/tmp/fairlane-")
    assert not folder.exists(), "nothing stays behind outside of the server's own folder"


def test_valkey_takes_another_port_when_its_last_one_is_busy(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path) as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
    with socket.create_server(("127.0.0.1", port)), EmbeddedValkey(tmp_path) as url:
        assert f":{port}/" not in url


def test_valkey_refuses_clients_without_the_password(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path) as url:
        store = redis.from_url(url.replace(url.partition("//")[2].partition("@")[0] + "@", ""))
        with pytest.raises(redis.AuthenticationError):
            store.ping()
        store.close()


def test_files_of_the_servers_are_closed_to_other_users(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "postgres"), EmbeddedValkey(tmp_path / "valkey"):
        for folder in ("postgres", "postgres/data", "postgres/run", "valkey", "valkey/data"):
            assert (tmp_path / folder).stat().st_mode & 0o077 == 0, folder
        for file in ("postgres/server.json", "postgres/server.log", "valkey/valkey.conf", "valkey/password"):
            assert (tmp_path / file).stat().st_mode & 0o077 == 0, file


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to become somebody else")
def test_root_without_namespaces_runs_postgres_as_nobody_inside_a_closed_folder(tmp_path: Path) -> None:
    """First start with namespaces, second without, third with: the data changes hands and stays whole."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with EmbeddedPostgres(closed / "postgres") as url, psycopg.connect(url) as connection:
        connection.execute("create table kept as select 7 as n")
    masked = tmp_path / "bin" / "unshare"
    masked.parent.mkdir()
    masked.write_text("#!/bin/sh\nexit 1\n")
    masked.chmod(0o755)
    environment = os.environ | {"PATH": f"{masked.parent}:{os.environ['PATH']}"}
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(closed)], stdout=subprocess.PIPE, env=environment
    ) as child:
        started = json.loads(child.stdout.readline())
        with psycopg.connect(started["urls"][0]) as connection:
            assert connection.execute("select n from kept").fetchone() == (7,)
        assert Path(f"/proc/{started['pids'][0]}").stat().st_uid == 65534
        child.kill()
    assert process.wait_until(lambda: not any(map(_alive, started["pids"])), limit_s=20)
    with EmbeddedPostgres(closed / "postgres") as url, psycopg.connect(url) as connection:
        assert connection.execute("select n from kept").fetchone() == (7,)
