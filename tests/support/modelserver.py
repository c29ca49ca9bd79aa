"""A model server as a process of its own, on a free port, ready when the context is entered."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from router_ext.ops.embedded import free_port

START_LIMIT_S = 120.0

# Tokenizer and weights are extracted once, not once per test run; the same folder as the ``model_dir`` fixture's.
_KEPT = Path(__file__).parents[2] / ".pytest_cache" / "d" / "model"
DATA_DIR = Path(os.environ.get("FAIRLANE_MODEL_DIR", _KEPT))


@dataclass(frozen=True, slots=True)
class ModelServer:
    """A running server. ``process`` may be killed by the test; leaving the context then only reaps it."""

    host: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def base(self) -> str:
        return f"http://{self.host}:{self.port}"


@contextlib.contextmanager
def model_server(*flags: str, engine: str = "model", port: int | None = None) -> Iterator[ModelServer]:
    """Start ``python -m router_ext.devserver`` and wait until it answers.

    Args:
        flags: flags of ``fairlane devserver``, for example ``"--sim-step-ms", "2"``.

    Raises:
        RuntimeError: it ended, or did not answer in time; the text holds its log.
    """
    port = port or free_port()
    with tempfile.TemporaryDirectory(prefix="fairlane-devserver-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "router_ext.devserver",
                    *("--engine", engine, "--port", str(port), "--sim-data-dir", str(DATA_DIR)),
                    *flags,
                ],
                stdout=sink,
                stderr=sink,
            )
        try:
            _wait_until_ready(process, port, log)
            yield ModelServer("127.0.0.1", port, process, log)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the model server ended with {process.returncode}: {log.read_text()}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/info", timeout=5):
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"the model server did not answer: {log.read_text()}")
