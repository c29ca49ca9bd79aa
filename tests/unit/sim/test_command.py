"""``fairlane simulate``: the JSON it prints, its table, and its refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from router_ext.cli import main
from router_ext.core.config import policy_names
from router_ext.sim.capacity import capacity
from router_ext.sim.recording import Recording
from router_ext.sim.runs import Task
from router_ext.sim.suites import SuiteChoice, suite_names
from tests.unit.sim.test_metrics import recording, tenant

METRICS = {
    "throughput_tokens_per_s",
    "accumulated_difference",
    "accumulated_while_waiting",
    "bound",
    "window_difference_mean",
    "window_difference_max",
    "share_error_60s_points",
    "jain",
    "recomputed_ratio",
    "resumed_prefill_ratio",
    "kv_occupancy",
    "mean_running",
    "ttft_p99_s",
    "completion_mean_s",
    "violations_ratio",
    "capacity_rps",
    "makespan_s",
    "unstarted",
    "refused",
    "sim_speed",
}
TENANT = {"weight", "requests", "ttft_s", "completion_s", "tokens", "share"}


def simulate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["simulate", *words, "--jobs", "1", "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_the_result_has_the_stated_shape(capsys: pytest.CaptureFixture[str]) -> None:
    result = simulate(capsys, "light", "--policy", "fifo", "slo-fair", "--seeds", "2")
    assert list(result) == ["suite", "seeds", "results"]
    assert result["suite"] == "light"
    assert result["seeds"] == [1, 2]
    assert [entry["policy"] for entry in result["results"]] == ["fifo", "slo-fair"]
    for entry in result["results"]:
        assert set(entry) == {"policy", "predictor", "metrics", "tenants"}
        assert set(entry["metrics"]) == METRICS
        assert list(entry["tenants"]) == ["client0", "client1"]
        for values in entry["tenants"].values():
            assert set(values) == TENANT
            assert set(values["ttft_s"]) == set(values["completion_s"]) == {"p50", "p95", "p99"}
    # Mean of two seeds of evenly spaced arrivals: 0.2 and 0.8 req/s over 300 s, give or take one.
    assert result["results"][0]["tenants"]["client0"]["requests"] == pytest.approx(60, abs=1)
    assert result["results"][0]["metrics"]["bound"] is None
    assert result["results"][1]["metrics"]["bound"] > 0


@pytest.mark.slow
def test_all_policies_and_no_router_are_the_default_where_that_says_something(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = simulate(capsys, "light", "--seed", "4", "4")
    assert result["seeds"] == [4]
    assert [entry["policy"] for entry in result["results"]] == list(policy_names())
    result = simulate(capsys, "kv-overreserve", "--policy", "raw", "slo-fair", "--seed", "4")
    raw, fair = (entry["metrics"] for entry in result["results"])
    assert fair["mean_running"] > 2.5 * raw["mean_running"]
    assert fair["throughput_tokens_per_s"] > 1.7 * raw["throughput_tokens_per_s"]


def test_every_tenant_is_compared_with_itself_alone(capsys: pytest.CaptureFixture[str]) -> None:
    result = simulate(capsys, "mixed", "--policy", "slo-fair", "--seed", "1")
    tenants = result["results"][0]["tenants"]
    assert tenants["interactive"]["ttft_alone_ratio_p99"] > 1.0
    assert tenants["batch"]["ttft_alone_ratio_p99"] > 1.0
    assert result["results"][0]["metrics"]["makespan_s"] > 600.0


def test_a_trace_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("t_s,client,input_tokens,output_tokens\n" + "".join(f"{i},c{i % 3},50,40\n" for i in range(60)))
    result = simulate(capsys, "trace", str(path), "--policy", "slo-fair", "--model", "a10g", "--backends", "1")
    assert result["seeds"] == [1]
    assert list(result["results"][0]["tenants"]) == ["c0", "c1", "c2"]
    assert result["results"][0]["metrics"]["unstarted"] == 1.0  # the last one arrives at the very end


def test_the_tables_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "light", "--policy", "fifo", "--seed", "1", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    assert "light, mean of seeds 1" in printed
    assert all(word in printed for word in ("fifo", "client0", "client1", "tokens/s", "p99"))


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["trace"], 1, "suite trace needs a file"),
        (["trace", "absent.csv"], 1, "absent.csv: No such file"),
        (["light", "x.csv"], 1, "suite light takes no file"),
        (["light", "--rate", "2"], 1, "suite light has no rate"),
        (["trace", "x.csv", "--span", "0"], 2, "0 is not a number of seconds above 0"),
        (["lihgt"], 2, "invalid choice: 'lihgt'"),
        (["light", "--policy", "fare"], 2, "invalid choice: 'fare'"),
        (["light", "--seeds", "0"], 2, "0 is not a whole number from 1 on"),
        (["light", "--jobs", "two"], 2, "two is not a whole number from 1 on"),
        (["light", "--seeds", "1", "--seed", "3"], 2, "not allowed with"),
        (["agents", "--rate", "-1"], 2, "not a number above 0"),
        (["agents", "--rate", "fast"], 2, "fast is not a number above 0"),
        (["incident", "--no-chunking", "--policy", "raw", "--jobs", "1"], 1, "these servers take nothing of the batch"),
    ],
)
def test_refusals_name_what_is_wrong(
    words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if status == 2:
        with pytest.raises(SystemExit) as refused:
            main(["simulate", *words])
        assert refused.value.code == 2
    else:
        assert main(["simulate", *words]) == status
    assert message in capsys.readouterr().err


def test_the_page_names_every_suite_and_every_number() -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulator.md").read_text()
    absent = [name for name in (*suite_names(), *METRICS, *TENANT) if f"`{name}" not in page]
    assert absent == ["window_difference_max"]  # written as a suffix


def test_capacity_is_the_last_rate_before_the_first_that_misses() -> None:
    """2 of 150 requests are too many, 1 is not; and what happens at higher rates does not matter."""

    def perform_up_to(limit: float) -> list[float]:
        looked_at: list[float] = []

        def perform(tasks: Sequence[Task], title: str) -> list[Recording]:
            rate = tasks[0].choice.rate
            assert rate is not None
            assert [task.seed for task in tasks] == list(range(11, 21))
            assert f"{rate:.2f}" in title
            looked_at.append(round(rate, 2))
            is_over = rate > limit + 1e-9
            runs = []
            for index in range(len(tasks)):
                late = index == 0 or (is_over and index == 1)
                rows = [(0, 0.0, 9.0 if late and row == 0 else 0.5, 10.0, 1, 1, 1) for row in range(15)]
                runs.append(recording([tenant("a", target=1.0), tenant("b", target=1.0)], rows))
            return runs

        task = Task(choice=SuiteChoice(name="tiers"), policy="fifo", seed=11)
        looked_at.append(capacity(task, perform=perform))
        return looked_at

    assert perform_up_to(0.34) == [0.3, 0.32, 0.34, 0.36, 0.34]
    assert perform_up_to(0.04) == [0.3, 0.02, 0.04, 0.06, 0.04]
    assert perform_up_to(0.0) == [0.3, 0.02, 0.0]
