"""The supervisor over real child processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from router_ext.ops import process
from router_ext.ops.supervisor import Service, StartFailed, Supervisor

STAYS = "import time; print('up', flush=True); time.sleep(300)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"
)
WITH_CHILD = (
    "import subprocess, sys, time; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']);"
    "print(c.pid, flush=True); time.sleep(300)"
)


def _service(tmp_path: Path, name: str, code: str, **options) -> Service:
    log = tmp_path / f"{name}.log"
    options.setdefault("ready", lambda: log.exists() and log.stat().st_size > 0)
    return Service(name=name, command=[sys.executable, "-c", code], env=dict(os.environ), log=log, **options)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def supervisor(tmp_path: Path, lines: list[str]) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path / "run.json", lines.append)
    yield supervisor
    supervisor.stop()


def _gone(pid: int) -> bool:
    return process.started_at(pid) is None


def test_crashed_child_is_named_and_started_again(supervisor: Supervisor, tmp_path: Path, lines: list[str]) -> None:
    router = _service(tmp_path, "router", STAYS)
    supervisor.start(router)
    router.wait_ready()
    first = router.pid
    os.kill(first, signal.SIGKILL)
    assert process.wait_until(lambda: supervisor.look() or router.pid not in (None, first), limit_s=10)
    assert lines == [
        f"router was ended by SIGKILL; starting it again in 0.5 s (log: {router.log})",
        "router started again (restart 1)",
    ]


def test_pauses_between_restarts_double(supervisor: Supervisor, tmp_path: Path, lines: list[str]) -> None:
    supervisor.start(_service(tmp_path, "worker", "raise SystemExit(3)", ready=None))
    assert process.wait_until(lambda: supervisor.look() or len(lines) >= 5, limit_s=20)
    pauses = [line.split(" in ")[1].split(" s")[0] for line in lines if "ended with status 3" in line]
    assert pauses == ["0.5", "1", "2"]


def test_children_of_a_crashed_child_are_ended_before_it_starts_again(supervisor: Supervisor, tmp_path: Path) -> None:
    worker = _service(tmp_path, "worker", WITH_CHILD)
    supervisor.start(worker)
    worker.wait_ready()
    orphan = int(worker.log.read_text())
    os.kill(worker.pid, signal.SIGKILL)
    assert process.wait_until(lambda: supervisor.look() or _gone(orphan), limit_s=10)


def test_stop_goes_in_reverse_order_and_leaves_no_record(
    supervisor: Supervisor, tmp_path: Path, lines: list[str]
) -> None:
    services = [_service(tmp_path, name, STAYS) for name in ("first", "second", "third")]
    for service in services:
        supervisor.start(service)
        service.wait_ready()
    assert len(json.loads((tmp_path / "run.json").read_text())) == 3
    supervisor.stop()
    assert lines == ["stopping third", "stopping second", "stopping first"]
    assert [service.exit_status() for service in services] == [-signal.SIGTERM] * 3
    assert not (tmp_path / "run.json").exists()


def test_child_that_ignores_the_request_to_end_is_killed(supervisor: Supervisor, tmp_path: Path) -> None:
    stubborn = _service(tmp_path, "stubborn", STUBBORN, grace_s=0.3)
    supervisor.start(stubborn)
    stubborn.wait_ready()
    supervisor.stop()
    assert stubborn.exit_status() == -signal.SIGKILL


def test_child_that_ends_before_it_is_ready_fails_the_start_with_its_log(tmp_path: Path) -> None:
    service = _service(tmp_path, "router", "print('no such option'); raise SystemExit(2)", ready=lambda: False)
    service.start()
    with pytest.raises(StartFailed, match=r"router ended with status 2.*\n.*no such option"):
        service.wait_ready()


def test_child_that_never_gets_ready_fails_the_start(supervisor: Supervisor, tmp_path: Path) -> None:
    service = _service(tmp_path, "router", STAYS, ready=lambda: False, ready_limit_s=0.3)
    supervisor.start(service)
    with pytest.raises(StartFailed, match="router is not ready after 0 s"):
        service.wait_ready()


KILLED = """
import os, sys
from pathlib import Path
from router_ext.ops.supervisor import Service, Supervisor
folder = Path(sys.argv[1])
supervisor = Supervisor(folder / "run.json", print)
service = Service(name="router", command=[sys.executable, "-c", sys.argv[2]], env=dict(os.environ),
                  log=folder / "log", ready=lambda: (folder / "log").stat().st_size > 0)
supervisor.start(service)
service.wait_ready()
print(service.pid, flush=True)
supervisor.watch()
"""


@pytest.mark.parametrize("code", [STAYS, STUBBORN])
def test_next_start_ends_what_a_killed_supervisor_left(code: str, tmp_path: Path, lines: list[str]) -> None:
    """Most children end by themselves (the kernel tells them); one that ignores that is ended by the next start."""
    killed = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), code], stdout=subprocess.PIPE)
    with killed:
        child = int(killed.stdout.readline())
        killed.kill()
    if code is STAYS:
        assert process.wait_until(lambda: _gone(child), limit_s=10)
    Supervisor(tmp_path / "run.json", lines.append).end_leftovers(grace_s=0.3)
    assert _gone(child)
    assert lines == ([] if code is STAYS else [f"an earlier router (process {child}) is still ending"])


def test_record_naming_a_stranger_does_not_hurt_it(tmp_path: Path, lines: list[str]) -> None:
    """A process number that belongs to somebody else by now is told apart by its start time."""
    with subprocess.Popen(["sleep", "300"]) as stranger:
        (tmp_path / "run.json").write_text(json.dumps([["router", stranger.pid, 12345]]))
        Supervisor(tmp_path / "run.json", lines.append).end_leftovers(grace_s=0.1)
        assert stranger.poll() is None
        stranger.kill()
