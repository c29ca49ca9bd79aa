"""``fairlane bench scheduler``: what it prints for machines and for people."""

from __future__ import annotations

import argparse
import gc
import json

import pytest

from router_ext.obs import collector
from router_ext.ops import bench_scheduler


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    bench_scheduler.add_arguments(parser)
    return bench_scheduler.run(parser.parse_args(words))


def test_json_is_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(
            "--json",
            "--policy",
            "slo-fair",
            "--policy",
            "fifo",
            "--tenants",
            "20",
            "--queued",
            "100",
            "--decisions",
            "40",
        )
        == 0
    )
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(r["policy"], r["tenants"], r["queued"]) for r in results] == [("slo-fair", 20, 100), ("fifo", 20, 100)]
    for result in results:
        assert 0.0 < result["decision_us"]["p50"] <= result["decision_us"]["p99"]
        assert result["decisions"] >= 40
        assert sum(result["events"].values()) == result["decisions"]
        assert sum(result["dispatches"].values()) >= result["decisions"]


def test_it_collects_garbage_as_a_router_does_and_leaves_the_collector_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = gc.get_threshold()
    with collector.tuned():
        of_a_router = gc.get_threshold()
    seen: set[tuple[int, int, int]] = set()
    step = bench_scheduler.Saturated.step

    def spied(load: bench_scheduler.Saturated) -> None:
        seen.add(gc.get_threshold())
        step(load)

    monkeypatch.setattr(bench_scheduler.Saturated, "step", spied)
    assert run("--policy", "fifo", "--tenants", "5", "--queued", "10", "--decisions", "5") == 0
    assert seen == {of_a_router}
    assert of_a_router != before
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_the_pool_stays_saturated_with_every_tenant_waiting() -> None:
    load = bench_scheduler.Saturated(policy="slo-fair", tenants=10, queued=50, seed=3)
    for _ in range(50):
        load.step()
    stats = load._scheduler.stats()
    assert stats.queued >= 45
    assert all(tenant.queued for tenant in stats.tenants)
    assert load._scheduler.audit() == []


def test_the_table_names_the_mix_of_events(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--policy", "fifo", "--tenants", "10", "--queued", "40", "--decisions", "20") == 0
    assert "events: Finished" in capsys.readouterr().out
