"""``fairlane up`` as a person starts it: real processes, the real model, real kills."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from router_ext.ops import process
from router_ext.ops.credentials import read_credentials
from router_ext.ops.embedded import free_port, port_is_free

pytestmark = [pytest.mark.torch_engine, pytest.mark.timeout(600)]
READY_LIMIT_S = 240.0


class Up:
    """One ``fairlane up`` and what it prints."""

    def __init__(self, environ: dict[str, str], output: Path) -> None:
        self.output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "router_ext.cli", "up"],
                env=environ,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def printed(self) -> str:
        return self.output.read_text()

    def wait_ready(self) -> str:
        ready = process.wait_until(
            lambda: self.process.poll() is not None or "Ctrl-C stops everything" in self.printed, limit_s=READY_LIMIT_S
        )
        assert ready, self.printed
        assert self.process.poll() is None, self.printed
        return self.printed

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("up") / "state"
    folder.mkdir()
    (folder / "model").symlink_to(model_dir)  # converting the weights is tested elsewhere
    ports = [str(free_port()) for _ in range(3)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FAIRLANE_", "DJANGO_"))}
    kept.pop("DATABASE_URL", None)
    kept.pop("REDIS_URL", None)
    names = ("FAIRLANE_ROUTER_PORT", "FAIRLANE_CONSOLE_PORT", "FAIRLANE_MODEL_PORT")
    return kept | {"FAIRLANE_DIR": str(folder), "COLUMNS": "100"} | dict(zip(names, ports, strict=True))


@pytest.fixture
def start(environ: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(**changes: str) -> Up:
        started.append(Up(environ | changes, tmp_path / f"up-{len(started)}.log"))
        return started[-1]

    yield start
    for up in started:
        if up.process.poll() is None:
            up.end(signal.SIGTERM)


def _ask(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "router_ext.cli", "ask", "--max-tokens", "8", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)


def _family(state: Path) -> dict[str, int]:
    """Every long-running process of the stack by name."""
    running = {name: pid for name, pid, _ in json.loads((state / "run.json").read_text())}
    for server in ("postgres", "valkey"):
        running[server] = json.loads((state / server / "server.json").read_text())["pid"]
    return running


def _gone(pid: int) -> bool:
    return process.started_at(pid) is None


def _check_audit_log(url: str) -> None:
    """The programs are no superuser, and the audit log is out of their reach."""
    with psycopg.connect(url.replace("//fairlane@", "//fairlane_app@")) as connection:
        others = connection.execute("SELECT DISTINCT usename FROM pg_stat_activity WHERE datname = 'fairlane'")
        assert others.fetchall() == [("fairlane_app",)]
        assert connection.execute("SELECT count(*) > 0 FROM audit_auditentry").fetchone() == (True,)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("ALTER TABLE audit_auditentry DISABLE TRIGGER ALL")


def test_first_start_kill_second_start_and_orderly_stop(start: Callable[..., Up], environ: dict[str, str]) -> None:
    """One story, because each chapter needs the state that the one before left."""
    state = Path(environ["FAIRLANE_DIR"])

    first = start()
    printed = first.wait_ready()
    assert re.search(r"password +[a-z0-9-]{20,}", printed)
    key = read_credentials(state / "credentials.json").tenants["chatbot"]
    curl = next(line for line in printed.splitlines() if "curl -N" in line)
    assert f"http://127.0.0.1:{environ['FAIRLANE_ROUTER_PORT']}/v1/chat/completions" in curl
    assert key in curl
    answer = _ask(environ, "Why is the sky blue?")
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout.split()) > 3
    seen = [sys.executable, "-m", "router_ext.cli", "top", "--json"]
    top = subprocess.run(seen, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert top.returncode == 0, top.stderr
    (said,) = json.loads(top.stdout)
    assert (said["router"]["is_ready"], said["router"]["pools"][0]["backends"][0]["state"]) == (True, "up")
    _check_audit_log(json.loads((state / "postgres" / "server.json").read_text())["url"])
    exposed = [path for path in state.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o077]
    assert [path for path in exposed if not path.is_socket()] == []

    second = start()
    assert second.process.wait(30) == 1
    assert "is in use" in second.printed

    family = _family(state)
    assert set(family) == {"model server", "console", "worker", "trainer", "beat", "router", "postgres", "valkey"}
    os.kill(family["router"], signal.SIGKILL)
    assert process.wait_until(lambda: "router started again (restart 1)" in first.printed, limit_s=30)
    assert "router was ended by SIGKILL" in first.printed
    # The listening socket survived, so nobody is refused a connection while the new router gets ready.
    assert process.wait_until(lambda: _ask(environ, "Name a colour.").returncode == 0, limit_s=30)

    family = _family(state)
    first.process.kill()
    first.process.wait()
    assert process.wait_until(lambda: all(map(_gone, family.values())), limit_s=60), family
    for name in ("FAIRLANE_ROUTER_PORT", "FAIRLANE_CONSOLE_PORT", "FAIRLANE_MODEL_PORT"):
        assert port_is_free("127.0.0.1", int(environ[name])), name

    third = start()
    printed = third.wait_ready()
    assert "password" not in printed
    assert read_credentials(state / "credentials.json").tenants["chatbot"] == key
    answer = _ask(environ, "--raw", "Once upon a time")
    assert answer.returncode == 0, answer.stderr
    database = json.loads((state / "postgres" / "server.json").read_text())["url"]

    def delivered() -> int:
        with psycopg.connect(database) as connection:
            row = connection.execute("select count(*) from usage_event where outcome = 'completed'").fetchone()
        return row[0]

    assert process.wait_until(lambda: delivered() == 3, limit_s=30), "usage of both starts is in the books, once"

    family = _family(state)
    assert third.end(signal.SIGTERM) == 0
    stopped = re.findall(r"stopping (.*)", third.printed)
    assert stopped == ["router", "beat", "trainer", "worker", "console", "Valkey", "PostgreSQL", "model server"]
    assert all(map(_gone, family.values()))
    assert not (state / "run.json").exists()


def test_busy_port_is_named_and_nothing_is_started(
    start: Callable[..., Up], environ: dict[str, str], tmp_path: Path
) -> None:
    port = int(environ["FAIRLANE_CONSOLE_PORT"])
    with socket.create_server(("127.0.0.1", port)):
        up = start(FAIRLANE_DIR=str(tmp_path / "other"))
        assert up.process.wait(30) == 1
    assert f"port {port} of the console is taken by another program (set FAIRLANE_CONSOLE_PORT" in up.printed
    assert not (tmp_path / "other" / "postgres").exists()


def test_backend_that_does_not_answer_is_named_and_nothing_is_started(start: Callable[..., Up], tmp_path: Path) -> None:
    up = start(FAIRLANE_DIR=str(tmp_path / "other"), FAIRLANE_BACKENDS="http://127.0.0.1:1")
    assert up.process.wait(30) == 1
    assert "FAIRLANE_BACKENDS: http://127.0.0.1:1/info does not answer as TGI does" in up.printed
    assert not (tmp_path / "other" / "postgres").exists()
