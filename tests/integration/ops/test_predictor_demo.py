"""``fairlane demo predictor`` as a user runs it: real traffic, a real training, and nothing left that must not stay."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.stack import Stack, running_stack

from router_ext.ops import process
from router_ext.ops.predictor.demo import HABITS, POOL, prompts

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="fairlane-demo-") as folder, running_stack(Path(folder)) as running:
        yield running


def demo(stack: Stack, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "router_ext.cli", "demo", "predictor", *words]
    environment = {**os.environ, "FAIRLANE_DIR": str(stack.settings.directory)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def listed(stack: Stack, what: str) -> list[dict[str, Any]]:
    token = json.loads((stack.settings.directory / "credentials.json").read_text())["operator_token"]
    address = f"{stack.settings.console_url}/api/v1/{what}"
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        found: list[dict[str, Any]] = json.load(answer)["results"]
        return found


def left_behind(stack: Stack) -> list[str]:
    """Backends and keys of the demo that still work."""
    backends = [each["name"] for each in listed(stack, "backends") if each["name"].startswith("demo-")]
    return backends + [k["id"] for k in listed(stack, "keys") if k["name"] == "demo predictor" and not k["revoked_at"]]


@pytest.mark.slow
def test_a_model_is_learnt_promoted_and_run(stack: Stack) -> None:
    with stack.trainer(FAIRLANE_TRAINING_MIN_SAMPLES="500"):
        running = demo(stack, "--requests", "560", "--json")
        out, err = running.communicate(timeout=380)
    assert running.returncode == 0, err.decode()
    result = json.loads(out)
    assert result["is_promoted"], result
    contenders = result["contenders"]
    assert contenders["candidate"]["n"] >= 100
    assert isinstance(contenders["candidate"]["n"], int)
    assert contenders["candidate"]["pinball"] < min(c["pinball"] for n, c in contenders.items() if n != "candidate")
    (pool,) = [each for each in listed(stack, "pools") if each["name"] == POOL]
    assert pool["length_model"]["digest"] == result["artifact"]
    assert pool["id"] in result["page"]
    assert left_behind(stack) == []


@pytest.mark.slow
def test_a_stopped_demo_cleans_up(stack: Stack) -> None:
    running = demo(stack, "--requests", "100000")
    assert process.wait_until(lambda: len(left_behind(stack)) == 1 + len(HABITS), limit_s=60, every_s=0.2)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130, err.decode()
    assert left_behind(stack) == []


def test_prompts_differ_and_ask_for_the_tenants_lengths() -> None:
    asked = [next(all_of) for all_of in [prompts(1)] for _ in range(500)]
    assert len({text for _, text in asked}) > 495
    assert {slug for slug, _ in asked} == {habit.slug for habit in HABITS}
    habits = {habit.slug: habit for habit in HABITS}
    for slug, text in asked:
        n = int(next(word.strip(",.") for word in text.split() if word.strip(",.").isdecimal()))
        assert habits[slug].shortest <= n <= habits[slug].longest
