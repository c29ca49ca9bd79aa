"""``fairlane bench usage``, small: a real installation, every field, and a table that says what is not reached."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from router_ext.ops.usagebench.table import BARS, lines

FIELDS = {*BARS, "pages"}


@pytest.mark.slow  # a database, the console, two routers, and every page: a minute
def test_all_of_it_small(tmp_path: Path) -> None:
    sizes = ("--events", "20000", "--tenants", "100", "--keys", "300", "--loads", "1")
    command = [
        sys.executable,
        "-m",
        "router_ext.cli",
        "bench",
        "usage",
        *sizes,
        "--json",
        "--keep",
        str(tmp_path / "k"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    result = json.loads(done.stdout)
    assert result.keys() >= FIELDS
    assert all(result[name] > 0 for name in BARS)
    assert result["worst_page_s"] == max(page["s"] for page in result["pages"].values())
    assert result["details"]["rows"]["usage events"] == 20_000
    assert not any(router_token in done.stdout for router_token in ("flr_", "flt_"))
    # Again on what is there: nothing is filled, the figure of booking is that of before.
    done = subprocess.run([*command, "--part", "config"], capture_output=True, text=True, timeout=120, check=False)
    again = json.loads(done.stdout)
    assert again["ingest_events_per_s"] == result["ingest_events_per_s"]
    assert "pages" not in again
    assert "filling" not in done.stderr


@pytest.mark.parametrize(("name", "value"), [("ingest_events_per_s", 49_999), ("worst_page_s", 1.01)])
def test_the_table_tells_what_is_not_reached(name: str, value: float) -> None:
    details = {"ingest": {"sessions": 2, "copy_events_per_s": 1.0}, "rows": {"events": 1}}
    assert [line for line in lines({name: value, "details": details}) if "NOT REACHED" in line]
    at_the_bar = BARS[name][1]
    assert not [line for line in lines({name: at_the_bar, "details": details}) if "NOT REACHED" in line]
