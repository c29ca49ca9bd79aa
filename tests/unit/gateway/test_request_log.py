"""One line per request, however it ends: which ids and counts it has."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.routers import backend
from support.scripted import BODY, Peer, World, running, stream, until

from router_ext.backends.fake import Ending
from router_ext.obs import logs

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(logs, "_requests", logs._RequestLines("rtr_logged"))
    async with running(tmp_path) as opened:
        yield opened


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    return [line for line in found if line["event"] == "request.ended"]


async def test_every_end_is_one_line(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    head = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "x-request-id": 'mine"\\'}
    await Peer(world, "/generate_stream", BODY, headers=head).wait()
    (done,) = lines(capsys)
    assert (done["request"], done["trace"], done["router"]) == ('mine"\\', TRACE, "rtr_logged")
    assert (done["outcome"], done["status"], done["code"]) == ("completed", 200, None)
    assert (done["tenant"], done["model"], done["tier"], done["dialect"]) == (
        "ten_alice",
        "main",
        "standard",
        "generate_stream",
    )
    assert (done["prompt_tokens"], done["output_tokens"], done["slices"]) == (3, 5, 1)
    assert 0 <= done["overhead_ms"] <= done["ttft_ms"] <= done["duration_ms"]
    assert done["id"].startswith("evt_")
    assert (done["level"], done["timestamp"][-1]) == ("info", "Z")

    await Peer(world, "/generate", BODY, key="sk-fl-wrong").wait()
    await Peer(world, "/v1/completions", {"prompt": "a", "model": "none"}).wait()
    await Peer(world, "/nowhere", BODY).wait()
    refused = lines(capsys)
    assert [(line["status"], line["code"], line["tenant"]) for line in refused] == [
        (401, "invalid_api_key", None),
        (404, "model_not_found", "ten_alice"),
        (404, "not_found", None),
    ]
    assert {line["trace"] for line in refused} == {None}

    world.generation = stream(2, ending=Ending.HANG)
    gone = Peer(world, "/generate_stream", BODY)
    await until(lambda: gone.data.count(b"data: ") == 2)
    gone.exchange.connection_lost()
    await gone.wait()
    (left,) = lines(capsys)
    assert (left["outcome"], left["status"], left["output_tokens"]) == ("cancelled", 499, 2)

    world.setup.backends = [backend(1, is_cordoned=True)]
    await world.router.apply(world.setup.snapshot())
    late = Peer(world, "/generate", BODY)
    await until(lambda: bool(world.router.engines["pol_main"].calls))
    world.router.engines["pol_main"].end_overdue()
    for call in world.router.engines["pol_main"].calls:
        call.arrived_s -= 10_000
    world.router.engines["pol_main"].end_overdue()
    await late.wait()
    (overdue,) = lines(capsys)
    assert (overdue["outcome"], overdue["status"], overdue["code"]) == ("failed", 504, "timeout")
    assert (overdue["ttft_ms"], overdue["queue_ms"], overdue["backends"]) == (None, None, [])


async def test_the_heartbeat_tells_no_prompt_and_no_key(world: World) -> None:
    world.generation = stream(2, ending=Ending.HANG)
    peer = Peer(world, "/generate_stream", {**BODY, "inputs": "canary a b c"}, headers={"x-request-id": "mine"})
    await until(lambda: peer.data.count(b"data: ") == 2)
    beat = msgspec.json.encode(world.router.heartbeat())
    peer.exchange.connection_lost()
    await peer.wait()
    assert b'"mine"' in beat
    assert b"canary" not in beat
    assert world.key.encode() not in beat


def test_the_level_and_the_setting_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_requests", None)
    monkeypatch.setattr(logs.structlog, "configure", lambda **_: None)
    monkeypatch.setattr(logs.structlog.contextvars, "bind_contextvars", lambda **_: None)
    root = logs.logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        for name, has_requests, expected in [
            ("debug", True, True),
            ("info", True, True),
            ("info", False, False),
            ("warning", True, False),
        ]:
            logs.configure(level=name, router="rtr_1", has_requests=has_requests)
            assert logs.has_request_lines() is expected
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
