"""``fairlane bench hazards`` as a user runs it: real servers that die and freeze, a router, an orchestrator."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from router_ext.devserver.constraint import Effect
from router_ext.ops.hazards.odd import odd_requests

pytestmark = pytest.mark.timeout(300)
RECORDED = Path(__file__).parents[2] / "conformance" / "transcripts" / "poison.jsonl"


def bench(*words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "router_ext.cli", "bench", "hazards", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_the_odd_requests_are_those_recorded_and_those_of_the_guard() -> None:
    odd = odd_requests()
    recorded = {e["name"]: e["request"] for e in map(json.loads, RECORDED.read_text("utf-8").splitlines())}
    assert {o.name.removeprefix("recorded: "): o.body for o in odd if o.name.startswith("recorded: ")} == recorded
    assert len(recorded) == 33
    assert len(odd) == 33 + 18 + 1
    assert [o.effect for o in odd[:5]] == [Effect.DIE, Effect.FREEZE, Effect.FAIL, Effect.STALL, None]
    assert all(o.varied(1) != o.varied(2) != o.body for o in odd)


@pytest.mark.slow
def test_one_odd_request_of_each_kind_hurts_nobody_else(tmp_path: Path) -> None:
    process = bench("--json", "--seconds", "6", "--rate", "5", "--keep-logs", str(tmp_path))
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err.decode()
    result: dict[str, Any] = json.loads(out)
    phases = result["phases"]
    assert list(phases) == ["baseline", "guarded", "unguarded"]
    assert (result["requests"], result["backends_lost"], result["others_failed"]) == (6, 0, 0), phases
    assert result["ttft_p99_ratio"] > 0.0
    assert phases["baseline"]["backends_lost"] == 0
    assert phases["baseline"]["requests"] == 0
    unguarded = result["unguarded"]
    assert unguarded["others_failed"] == 0, phases["unguarded"]["problems"]
    assert 1 <= unguarded["backends_hit_per_culprit"] <= 2, "with the guard off a hazard reaches backends"
    assert phases["unguarded"]["backends_lost"] >= 2, "the first of them ends two servers"
    assert all(phase["others"] > 20 for phase in phases.values())
    assert result["others_changed"] == 0, "an answer that went on elsewhere is the same"
    assert "hazard.refused" in (tmp_path / "unguarded" / "router.log").read_text()
    assert "hazard.strike" not in (tmp_path / "guarded" / "router.log").read_text()


def test_ctrl_c_leaves_nothing_behind() -> None:
    process = bench("--seconds", "60", "--rate", "2", "--phase", "baseline")
    assert process.stderr is not None
    pids: set[int] = set()
    deadline = time.monotonic() + 120
    while len(pids) < 5:
        assert time.monotonic() < deadline
        assert process.poll() is None
        pids = _children(process.pid)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def _children(pid: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = re.sub(r"\(.*\)", "", stat.read_text()).split()
        except OSError:
            continue
        if int(fields[2]) == pid:
            found.add(int(fields[0]))
    return found
