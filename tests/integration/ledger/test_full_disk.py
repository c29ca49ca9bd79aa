"""A disk that is really full under a real router: it says so, serves on, drops nothing, and books it all afterwards."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.exchange import call
from support.modelserver import ModelServer, model_server
from support.routers import RouterProcess, Setup, backend, router

N_BEFORE, N_FULL = 4, 24


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with model_server("--sim-step-ms", "0.2", "--sim-mean-tokens", "0", "--max-total-tokens", "512") as running:
        yield running


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes: the table of running requests takes one of them."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "fairlane-test", str(tmp_path)], check=False
    )
    if mounted.returncode != 0:
        pytest.skip("only root may mount; the unit tests of the spool limit the size of files instead")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Not a byte is left on the disk during the block, nor to be had at the end of files."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size) == size:
                    continue
    try:
        yield
    finally:
        filler.unlink(missing_ok=True)


def generate(running: RouterProcess, key: str, number: int) -> tuple[str, int]:
    """One answer: its request's id and its tokens."""
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 3 + number % 5, "details": True}}
    status, headers, data = call(running.port, "POST", "/generate", body, headers={"Authorization": f"Bearer {key}"})
    assert status == 200, data
    return headers["x-request-id"], json.loads(data)["details"]["generated_tokens"]


def events_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def test_a_full_disk_is_told_and_loses_nothing(server: ModelServer, disk: Path) -> None:
    setup = Setup(backends=[backend(server.port)])
    key = setup.key("alpha")
    state = disk / "state"
    received: list[tuple[str, int]] = []
    with router(setup, directory=state) as running:
        received += [generate(running, key, n) for n in range(N_BEFORE)]
        with filled(disk):
            received += [generate(running, key, n) for n in range(N_FULL)]
            kept = running.metric("fairlane_ledger_overflow_events")
            assert 0 < kept <= N_FULL
            assert running.metric("fairlane_ledger_pending_events") == len(received)
            alarms = [line for line in events_of(running.log) if line["event"] == "ledger.spool_full"]
            assert [line["level"] for line in alarms] == ["error"]
            # Each request is served as long as it can be booked: ``/readyz`` says what clients may expect.
            assert call(running.port, "GET", "/readyz")[0] == 200
            # Killed with what the disk has not taken: it is in the table, with its outcome.
            running.process.kill()
            assert running.process.wait() == -signal.SIGKILL
            with router(setup, directory=state) as again:
                assert again.metric("fairlane_ledger_overflow_events") == kept
                received.append(generate(again, key, 0))
                assert again.metric("fairlane_ledger_overflow_events") == kept + 1
                (disk / "filler").unlink()
                again.wait(lambda: again.metric("fairlane_ledger_overflow_events") == 0)
                assert again.metric("fairlane_ledger_pending_events") == len(received)
                assert "ledger.spool_recovered" in {line["event"] for line in events_of(again.log)}
                booked = again.usage()
    assert sorted((event.request, event.output_tokens) for event in booked) == sorted(received)
    assert {event.outcome for event in booked} == {"completed"}
