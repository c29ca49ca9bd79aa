"""``fairlane simulate --report``: the report is of the very runs whose numbers are printed."""

from __future__ import annotations

import html
import json
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

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


@pytest.mark.slow
def test_several_rates_give_a_curve_and_a_report_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "agents", "--policy", "fifo", "justitia", "--seeds", "1", "--jobs", "1"]
    assert main([*words, "--rate", "0.05", "0.02", "--report", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [load["rate"] for load in result["rates"]] == [0.02, 0.05]
    titles = {each.text for each in ElementTree.parse(tmp_path / "load.svg").iter("{http://www.w3.org/2000/svg}title")}
    for load in result["rates"]:
        page = (tmp_path / f"{load['rate']:g}" / "report.html").read_text()
        assert f"--rate {load['rate']:g}" in page
        for entry in load["results"]:
            seconds = entry["metrics"]["completion_mean_s"]
            assert f"{load['rate']:g}: {seconds:.3g} s" in titles
            assert f"{seconds:.3g} s" in page
    assert main([*words, "--rate", "0.05", "--json"]) == 0
    (_, at_this_rate) = result["rates"]
    alone = json.loads(capsys.readouterr().out)
    assert [entry["tenants"] for entry in alone["results"]] == [entry["tenants"] for entry in at_this_rate["results"]]
    assert main([*words, "--rate", "0.02", "0.05"]) == 0
    table = capsys.readouterr().out
    assert all(f"{entry['metrics']['completion_mean_s']:.3g} s" in table for entry in alone["results"])
