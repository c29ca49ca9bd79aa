"""``fairlane demo incident`` as a user runs it: real processes, the policy switched through the control plane."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.stack import Stack, running_stack

pytestmark = pytest.mark.timeout(240)
SMALL = ("--batch-requests", "4", "--chat-interval", "1.0")
SHAPE = {"requests", "ttft_ms", "tokens_per_s", "share"}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A model server that a handful of the demo's prompts fills."""
    sizes = ("--max-total-tokens", "1536", "--max-batch-total-tokens", "1536", "--max-batch-prefill-tokens", "512")
    flags = (*sizes, "--sim-step-ms", "20")
    with tempfile.TemporaryDirectory(prefix="fairlane-demo-") as folder, running_stack(Path(folder), *flags) as running:
        yield running


def demo(stack: Stack, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "router_ext.cli", "demo", "incident", "--output", str(folder / "picture.png")]
    environment = {**os.environ, "FAIRLANE_DIR": str(stack.settings.directory)}
    return subprocess.Popen([*command, *SMALL, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def policy(stack: Stack) -> str:
    credentials = json.loads((stack.settings.directory / "credentials.json").read_text())
    request = urllib.request.Request(
        f"{stack.settings.console_url}/api/v1/pools",
        headers={"Authorization": f"Bearer {credentials['operator_token']}"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        (pool,) = json.load(answer)["results"]
        return str(pool["policy"])


@pytest.mark.slow
def test_both_policies_are_played_and_the_one_before_is_restored(stack: Stack, tmp_path: Path) -> None:
    assert policy(stack) == "slo-fair"
    process = demo(stack, tmp_path, "--json", "--policy", "slo-fair", "--policy", "fifo")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err.decode()
    result: dict[str, Any] = json.loads(out)
    assert list(result["policies"]) == ["slo-fair", "fifo"]
    for played in result["policies"].values():
        assert set(played["tenants"]) == {"chatbot", "batch"}
        for row in played["tenants"].values():
            assert set(row) >= SHAPE
            assert set(row["ttft_ms"]) == {"p50", "p95", "p99"}
            assert row["failed"] == 0
        assert sum(row["share"] for row in played["tenants"].values()) == pytest.approx(1.0)
    fair, fifo = (result["policies"][name]["tenants"] for name in ("slo-fair", "fifo"))
    assert {n: r["requests"] for n, r in fair.items()} == {n: r["requests"] for n, r in fifo.items()}
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert policy(stack) == "slo-fair"
    assert [name.decode() for name in re.findall(rb"policy (\S+) in force after", err)] == ["slo-fair", "fifo"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_demo_restores_the_policy(stack: Stack, tmp_path: Path, number: signal.Signals) -> None:
    process = demo(stack, tmp_path, "--policy", "fifo")
    deadline = time.monotonic() + 60
    while policy(stack) != "fifo":
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert policy(stack) == "slo-fair"
