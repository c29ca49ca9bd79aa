"""``fairlane bench gateway`` as a user runs it, with few of everything."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # a router and its servers for each part: a minute


def bench(*words: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "router_ext.cli", "bench", "gateway", "--json", *words]
    done = subprocess.run(command, capture_output=True, timeout=280, check=False)
    assert done.stdout, done.stderr.decode()
    result: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, result


def test_every_field_is_there() -> None:
    code, result = bench(
        "--rate", "50", "--seconds", "1", "--rounds", "1", "--streams", "20", "--stream-seconds", "2",
        "--leaving", "2", "--stalled", "4", "--failover-rate", "20", "--failover-seconds", "6",
    )  # fmt: skip
    assert code == 0
    assert result["streams"]["complete"] == result["streams"]["open"] == 20
    assert result["cpu_us_per_token"] > 0
    assert result["kib_per_stream"] >= 0
    assert {"gap_added_p99_ms", "added_ms", "direct", "router"} <= result.keys()
    assert set(result["peers"]) == {"nginx", "haproxy"}
    assert 0 < result["cancel_ms"]["p50"] <= result["cancel_ms"]["p99"]
    assert len(result["cancel_ms"]["phases"]) == 7
    assert result["stalled"]["dropped"] == 4
    assert result["failover"]["others_p99_ratio"] > 0
    assert [row["others_failed"] for row in result["failover"]["runs"].values()] == [0, 0, 0]


def test_a_short_soak_leaves_nothing() -> None:
    code, result = bench("--part", "soak", "--requests", "1500")
    soak = result["soak"]
    assert (soak["gauges_left"], soak["unexpected"]) == ({}, {})
    assert sum(soak["outcomes"]["fault"].values()) > 5
    assert code == (0 if soak["is_flat"] else 1)
