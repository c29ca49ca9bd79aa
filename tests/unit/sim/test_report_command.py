"""``fairlane simulate --report``: the report is of the very runs whose numbers are printed."""

from __future__ import annotations

import html
import json
import re
import shlex
from pathlib import Path

import pytest

from router_ext.cli import main


def test_the_report_shows_the_printed_numbers_and_how_to_get_them_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "light", "--policy", "fifo", "slo-fair", "--seeds", "2", "--jobs", "1"]
    assert main([*words, "--predictor", "oracle", "--report", str(tmp_path / "it's here"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    page = (tmp_path / "it's here" / "report.html").read_text()
    for entry in result["results"]:
        assert f">{entry['metrics']['throughput_tokens_per_s']:,.0f}" in page
        for tenant in entry["tenants"].values():
            assert f"{tenant['ttft_s']['p99'] * 1e3:.3g} ms" in page
    found = re.search(r"<dt>again</dt><dd><code>(.*?)</code>", page)
    assert found is not None
    program, *again = shlex.split(html.unescape(found.group(1)))
    assert program == "fairlane"
    assert main([*again, "--jobs", "1", "--json"]) == 0
    repeated = json.loads(capsys.readouterr().out)
    for one in (result, repeated):
        for entry in one["results"]:
            del entry["metrics"]["sim_speed"]
    assert repeated == result


def test_a_directory_that_cannot_be_made_is_told_before_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["simulate", "incident", "--report", str(tmp_path / "file" / "sub")]) == 1
    assert "--report" in capsys.readouterr().err
