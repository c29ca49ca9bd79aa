"""A router that is killed under load and started again still knows who is ahead of whom."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from support.exchange import Wire, call
from support.modelserver import model_server
from support.routers import RouterProcess, Setup, backend, router

FLAGS = ("--sim-step-ms", "5", "--sim-mean-tokens", "0", "--max-total-tokens", "2048")
LONG = {"inputs": "Tell me a long story", "parameters": {"max_new_tokens": 950}}
SHORT = {"inputs": "Hi", "parameters": {"max_new_tokens": 5}}


def counters(running: RouterProcess) -> dict[str, float]:
    """Service per weight above the floor, by tenant, as the scheduler has it."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{running.admin_port}/debug/pools",
        headers={"Authorization": f"Bearer {running.admin_token}"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return {tenant["tenant"]: tenant["counter"] for tenant in json.load(answer)["main"]["tenants"]}


def saved(directory: Path) -> float:
    """How far ``ahead`` is saved to be ahead of ``behind``; 0 while nothing is."""
    path = directory / "counters.json"
    if not path.exists():
        return 0.0
    tenants: dict[str, Any] = json.loads(path.read_bytes())["pools"]["pol_main"]["tenants"]
    ahead, behind = (float(tenants.get(name, {}).get("ahead", 0.0)) for name in ("ten_ahead", "ten_behind"))
    return ahead - behind


def make_setup(port: int) -> tuple[Setup, str, str]:
    """A server with room for one long answer, which nobody may cut; two tenants of equal weight."""
    setup = Setup(backends=[backend(port, kv_tokens=1_040)], scheduling={"max_preemptions": 0})
    return setup, setup.key("ahead"), setup.key("behind")


def test_counters_survive_a_kill_under_load(tmp_path: Path) -> None:
    with model_server(*FLAGS) as server:
        setup, ahead, behind = make_setup(server.port)
        with router(setup, directory=tmp_path) as running, Wire(running.port) as long, Wire(running.port) as short:
            long.send("POST", "/generate_stream", LONG, headers={"Authorization": f"Bearer {ahead}"})
            long.head()
            # It waits for the other's KV, so the other's lead grows with every token.
            short.send("POST", "/generate_stream", SHORT, headers={"Authorization": f"Bearer {behind}"})
            running.wait(lambda: saved(tmp_path) > 300.0)
            running.process.kill()
            running.process.wait()
        lead = saved(tmp_path)
        with router(setup, directory=tmp_path) as running:
            # Whoever is on the floor and has not been seen yet is not listed.
            assert counters(running) == {"ten_ahead": lead}
            # Both are served as ever, and the lead is kept through an orderly end as well.
            for key in (ahead, behind):
                status, _, _ = call(
                    running.port, "POST", "/generate", SHORT, headers={"Authorization": f"Bearer {key}"}
                )
                assert status == 200
            found = counters(running)
        assert saved(tmp_path) == found["ten_ahead"] - found["ten_behind"] > 0.9 * lead


def test_damaged_counters_are_no_reason_not_to_serve(tmp_path: Path) -> None:
    with model_server(*FLAGS) as server:
        setup, ahead, _ = make_setup(server.port)
        entry = {"version": 1, "tenants": {"ten_ahead": {"ahead": 1e300}, "ten_gone": {"ahead": 1.0}}}
        for content in (b"\x00" * 100, json.dumps({"version": 1, "pools": {"pol_main": entry}}).encode()):
            (tmp_path / "counters.json").write_bytes(content)
            with router(setup, directory=tmp_path) as running:
                assert set(counters(running).values()) <= {0.0}
                headers = {"Authorization": f"Bearer {ahead}"}
                assert call(running.port, "POST", "/generate", SHORT, headers=headers)[0] == 200
                assert '"counters.' in running.log.read_text()
