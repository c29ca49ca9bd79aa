"""The arithmetic of ``fairlane bench gateway``, and the server it measures against."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from router_ext.ops.gatewaybench import failing, leaving, rates, soak
from router_ext.ops.gatewaybench.arena import Target
from router_ext.ops.gatewaybench.bench import lines, summarise
from router_ext.ops.gatewaybench.clients import live_gauges
from router_ext.ops.gatewaybench.pacer import Connection, Server, split
from router_ext.ops.load import Probe
from router_ext.ops.measures import cpu_seconds, descendants, gaps, percentile, slope, tree_cpu_seconds


def test_percentiles_gaps_and_slopes() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(range(101)), 0.99) == 99
    assert math.isnan(percentile([], 0.5))
    assert gaps([[0.0, 1.0, 3.0], [], [5.0], [7.0, 7.5]]) == [1.0, 2.0, 0.5]
    assert slope([(0.0, 10.0), (1.0, 12.0), (2.0, 14.0)]) == pytest.approx(2.0)
    assert slope([(1.0, 5.0), (1.0, 9.0)]) == slope([]) == 0.0


def test_a_tree_has_the_children_of_its_children() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, process_group=0) as shell:
        assert shell.stdout is not None
        try:
            grandchild = int(shell.stdout.readline())
            assert descendants(shell.pid) == [shell.pid, grandchild]
            assert grandchild in descendants(os.getpid())
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
    assert tree_cpu_seconds(os.getpid()) >= cpu_seconds(os.getpid()) > 0.0


def probe(sent_at: float, tokens: list[float]) -> Probe:
    loop = asyncio.new_event_loop()
    made = Probe(b"", loop.create_future())
    loop.close()
    made.sent_at, made.token_at = sent_at, array("d", tokens)
    return made


def test_a_stream_is_behind_if_a_token_is_missing_or_late() -> None:
    direct = [probe(0.0, [0.1, 0.2])] * 4
    routed = [probe(5.0, [5.1, 5.2]), probe(5.0, [5.1]), probe(5.0, [5.1, 5.46]), probe(5.0, [5.34, 5.44])]
    assert rates.tokens_behind(direct, routed) == 2


def tool(**changes: Any) -> dict[str, Any]:
    seen: dict[str, Any] = {
        "errors": 0, "early_close": 0, "short": 0, "bad_order": 0, "requests": 10, "tokens": 2_000, "tps": 400.0,
        "transit_us": {"p50": 90.0, "p99": 1_000.0, "max": 249_000.0}, "gap_us": {"p99": 21_000.0},
        "ttfb_us": {"p50": 500.0, "p99": 900.0},
    }  # fmt: skip
    return seen | changes


def test_figures_of_the_load_tool() -> None:
    streams = rates.Streams(count=5, pace=20.0, seconds=5.0)
    assert streams.tokens == 100
    row = rates.from_tool(tool(), {"router": 50_000.0, "load": 8_000.0}, 20.0, streams)
    assert row["cpu_us_per_token"] == {"router": 25.0, "load": 4.0}
    assert (row["behind"], row["not_exact"], row["gap_p99_ms"]) == (0, 0, 21.0)
    assert rates.from_tool(tool(short=1), {}, 20.0, streams)["not_exact"] == 1
    assert rates.from_tool(tool(short=1), {}, 20.0, streams)["behind"] is None
    late = rates.from_tool(tool(transit_us={"p50": 1.0, "p99": 1.0, "max": 251_000.0}), {}, 20.0, streams)
    assert late["behind"] is None, "the tool does not say how many streams were late"


def test_the_load_tool_is_found_by_its_path_or_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is it built"):
        rates.load_tool(tmp_path)
    file = tmp_path / "build" / "streamload"
    file.parent.mkdir()
    file.write_text("#!/bin/sh\n")
    with pytest.raises(FileNotFoundError):
        rates.load_tool(tmp_path)
    file.chmod(0o755)
    assert rates.load_tool(tmp_path) == rates.load_tool(file.parent) == rates.load_tool(file) == file


def round_(p50: float, p99: float) -> dict[str, Any]:
    return {"requests": 10, "failed": 0, "p50": p50, "p99": p99}


def test_the_fields_of_the_result() -> None:
    latency = {
        "direct": [round_(1.0, 2.0), round_(2.0, 3.0), round_(1.0, 9.0)],
        "router": [round_(1.5, 4.0), round_(2.9, 4.0), round_(1.7, 10.0)],
        "nginx": [round_(1.2, 2.1), round_(2.2, 3.1), round_(1.2, 9.1)],
    }
    row = {"open": 5, "complete": 5, "tokens": 10, "tokens_per_s": 1.0, "behind": 0}
    rows = {
        "direct": {**row, "gap_p99_ms": 51.0, "cpu_us_per_token": {"server": 9.0, "load": 9.0}, "kib_per_stream": 0.0},
        "router": {**row, "gap_p99_ms": 58.5, "cpu_us_per_token": {"router": 25.0}, "kib_per_stream": 21.0},
        "nginx": {**row, "gap_p99_ms": 51.5, "cpu_us_per_token": {"nginx": 16.0}, "kib_per_stream": 18.0},
    }
    result = summarise(latency, rows, ["nginx", "haproxy"])
    assert result["added_ms"] == {"p50": pytest.approx(0.7), "p99": pytest.approx(1.0)}
    assert result["cpu_us_per_token"] == 25.0
    assert result["kib_per_stream"] == 21.0
    assert result["gap_added_p99_ms"] == 7.5
    assert result["peers"]["nginx"] == {"cpu_us_per_token": 16.0, "added_ms": pytest.approx(0.2)}
    assert result["peers"]["haproxy"] is None, "it is not installed"
    assert "not installed" in "\n".join(lines({"cores": "two", **result}))
    assert summarise({}, {}, ["nginx"]) == {}
    alone = summarise({}, rows, ["nginx"])
    assert alone["peers"]["nginx"] == {"cpu_us_per_token": 16.0, "added_ms": None}


def test_times_to_the_close_are_pooled() -> None:
    result = leaving.cancel_summary({"queued": [1.0, 2.0, 3.0], "mid_stream": [0.5, 9.0]})
    assert (result["p50"], result["p99"], result["max"]) == (2.0, 9.0, 9.0)
    assert result["phases"]["queued"] == {"p50": 2.0, "p99": 3.0, "max": 3.0}


def test_others_are_those_the_faulty_server_never_had_near_the_fault() -> None:
    second = 1_000_000_000
    log = [b"%d 1" % (5 * second), b"%d 2" % (10 * second - 50_000_000), b"%d 3" % (11 * second)]
    assert failing.others(log, 10 * second) == {"2", "3"}
    seen = [failing.Seen(0.010, True, True), failing.Seen(0.020, True, True), failing.Seen(9.0, False, False)]
    row = failing.summarise(seen)
    assert (row["others_p99_ms"], row["hit"], row["hit_failed"], row["others_failed"]) == (20.0, 1, 1, 0)
    runs = {"none": {"others_p99_ms": 20.0}, "killed": {"others_p99_ms": 22.0}, "frozen": {"others_p99_ms": 30.0}}
    assert failing.failover_summary(runs)["others_p99_ratio"] == 1.5


def test_gauges_of_what_lives() -> None:
    samples = [
        ("fairlane_inflight_requests", 'model="bench"', 0.0),
        ("fairlane_queue_length", 'model="bench",tier="standard"', 2.0),
        ("fairlane_backend_reserved_tokens", 'backend="b"', 7.0),
        ("fairlane_backend_kv_tokens", 'backend="b"', 100.0),
        ("fairlane_queue_wait_seconds_count", "", 5.0),
        ("fairlane_ledger_pending_events", "", 9.0),
    ]
    assert live_gauges(samples) == {
        'fairlane_queue_length{model="bench",tier="standard"}': 2.0,
        'fairlane_backend_reserved_tokens{backend="b"}': 7.0,
    }


def counts(**kinds: dict[str, int]) -> dict[str, Counter[str]]:
    return {kind: Counter(outcomes) for kind, outcomes in kinds.items()}


FINE = counts(success={"as wanted": 80}, cancel={"left": 10}, refuse={"as wanted": 7}, fault={"status 200": 3})


@pytest.mark.parametrize(
    ("growth_kib", "gauges", "outcomes", "is_passed"),
    [
        (0.0, {}, FINE, True),
        (0.1, {}, FINE, False),
        (0.0, {"fairlane_queue_length": 1.0}, FINE, False),
        (0.0, {}, FINE | counts(success={"status 500, complete: True": 1}), False),
        (0.0, {}, FINE | counts(refuse={"status 200, complete: True": 1}), False),
    ],
    ids=["flat", "grows by 100 bytes a request", "a gauge stays", "a request failed", "nothing was refused"],
)
def test_verdict_of_the_soak(
    growth_kib: float, gauges: dict[str, float], outcomes: dict[str, Counter[str]], is_passed: bool
) -> None:
    # The first requests fill caches, in either case.
    samples = [(done, 80_000 + min(done, 5_000) * 2 + growth_kib * done) for done in range(0, 100_001, 500)]
    result = soak.soak_summary(samples, outcomes, gauges, 100_000)
    assert result["is_passed"] is is_passed
    assert result["rss_kib_per_1000"] == pytest.approx(growth_kib * 1_000, abs=1e-6)


def test_the_mixture_is_what_it_says_and_the_same_every_time() -> None:
    target = Target(name="router", port=1, key="k")
    asks = list(soak.Mixture(target, seed=1).requests(5_000))
    assert asks == list(soak.Mixture(target, seed=1).requests(5_000))
    kinds = Counter(ask.kind for ask in asks)
    for kind, share in {"success": 0.82, "cancel": 0.10, "refuse": 0.07, "fault": 0.01}.items():
        assert kinds[kind] / 5_000 == pytest.approx(share, abs=0.015)


def test_a_generated_text_splits_into_the_tokens_it_came_as() -> None:
    assert split("rid=1 hello w1 w2 T123") == ["rid=1", " hello", " w1", " w2", " T123"]
    assert split("") == []


class Watched(Connection):
    """Tells when it has closed."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.closed = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.closed.set()


async def talk(server: Server, raw: bytes) -> bytes:
    connection = Watched(server)
    listening = await asyncio.get_running_loop().create_server(lambda: connection, "127.0.0.1", 0)
    seen = b""
    async with listening, asyncio.timeout(5):
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        writer.write(raw)
        with contextlib.suppress(ConnectionError):
            while not seen.endswith(b"\r\n0\r\n\r\n") and b"overloaded" not in seen:
                data = await reader.read(65_536)
                if not data:
                    break
                seen += data
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await connection.closed.wait()
    return seen


def post(prompt: str, tokens: int) -> bytes:
    body = orjson.dumps({"inputs": prompt, "parameters": {"max_new_tokens": tokens}})
    return b"POST /generate_stream HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize("interval_us", [0, 1_000])
async def test_the_server_streams_what_was_asked_for(interval_us: int) -> None:
    server = Server(interval_us=interval_us, seats=1, has_stamps=False, log=None)
    seen = await talk(server, post("rid=7", 12))
    events = [orjson.loads(line[5:]) for line in seen.split(b"\n") if line.startswith(b"data:")]
    assert [event["index"] for event in events] == list(range(1, 13))
    assert events[-1]["details"] == {
        "finish_reason": "length", "generated_tokens": 12, "seed": None, "input_length": 1,
    }  # fmt: skip
    assert events[-1]["generated_text"] == "".join(event["token"]["text"] for event in events)
    assert server.open == 0


async def test_a_fault_comes_once_per_name() -> None:
    server = Server(interval_us=0, seats=1, has_stamps=False, log=None)
    first = await talk(server, post("rid=7 fault=cut", 12))
    assert first.count(b"data:") == 3, "cut in mid-stream"
    assert (await talk(server, post("rid=7 fault=cut", 12))).count(b"data:") == 12
    assert (await talk(server, post("rid=8 fault=overloaded", 2))).startswith(b"HTTP/1.1 429")
    assert await talk(server, post("rid=9 fault=reset", 2)) == b""
    assert server.open == 0
    assert [rid for rid, _, _ in server.closes][:1] == ["7"]
