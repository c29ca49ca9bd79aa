"""What the router adds to a request, and what it takes for many streams; plain relays beside it."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from router_ext.ops.gatewaybench.arena import Arena, Cores, Servers, Target, arena
from router_ext.ops.load import Probe, request_bytes, run_open_loop
from router_ext.ops.measures import cpu_seconds, gaps, percentile, resident_bytes, tree_cpu_seconds

BEHIND_S = 0.250
"""A token later than in the run without the router by more than this makes its stream "behind"."""

RAMP_S = 2.0
"""Over which the streams are opened."""

_TOOL = "streamload"


def _generation(target: Target, *, max_new_tokens: int) -> bytes:
    body = json.dumps({"inputs": "Tell me about rivers.", "parameters": {"max_new_tokens": max_new_tokens}}).encode()
    return request_bytes(host="127.0.0.1", port=target.port, path="/generate_stream", body=body, key=target.key)


# --- latency ----------------------------------------------------------------------------------------------------------


async def latency_round(target: Target, *, rate: float, seconds: float) -> dict[str, Any]:
    """One-token streams at ``rate`` per second; milliseconds from the request's bytes to the first event."""
    request = _generation(target, max_new_tokens=1)
    count = int(rate * seconds)
    probes = await run_open_loop(
        host="127.0.0.1", port=target.port, requests=[(i / rate, request) for i in range(count)], limit_s=30
    )
    times = [(p.token_at[0] - p.sent_at) * 1_000 for p in probes if p.is_complete and p.status == 200 and p.token_at]
    return {
        "requests": count,
        "failed": count - len(times),
        "p50": percentile(times, 0.5),
        "p99": percentile(times, 0.99),
    }


async def measure_latency(
    cores: Cores, peers: Sequence[str], *, rate: float, seconds: float, rounds: int, console: Console
) -> dict[str, list[dict[str, Any]]]:
    """Rounds by target, in turn: without the router, through it, through each relay."""
    rows: dict[str, list[dict[str, Any]]] = {}
    with arena(cores, Servers(has_model=True, interval_us=1_000), peers=peers) as run:
        targets = [run.direct, run.routed, *run.peers]
        for target in targets:  # warm the paths; not counted
            await latency_round(target, rate=rate, seconds=1)
        for number in range(rounds):
            for target in targets:
                console.print(f"latency round {number + 1} of {rounds}, {target.name}: {rate:g} req/s")
                rows.setdefault(target.name, []).append(await latency_round(target, rate=rate, seconds=seconds))
    return rows


def latency_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of rounds."""
    return {
        "p50_ms": statistics.median(r["p50"] for r in rows),
        "p99_ms": statistics.median(r["p99"] for r in rows),
        "failed": sum(r["failed"] for r in rows),
        "rounds": list(rows),
    }


def added(direct: Sequence[Mapping[str, float]], relayed: Sequence[Mapping[str, float]], which: str) -> float:
    """Median of what the rounds' pairs differ by."""
    return statistics.median(b[which] - a[which] for a, b in zip(direct, relayed, strict=True))


# --- streams ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """``count`` streams of ``seconds`` at ``pace`` tokens a second."""

    count: int
    pace: float
    seconds: float

    @property
    def tokens(self) -> int:
        """Of each."""
        return max(2, int(self.pace * self.seconds))


class _Meter:
    """CPU and memory of the processes over a stretch of time."""

    def __init__(self, run: Arena, target: Target) -> None:
        self._pids = {"server": run.servers[0].pid}
        if target.pid is not None:
            self._pids[target.name] = target.pid
        self._relay = target.pid
        self.begin()

    def begin(self) -> None:
        """The stretch begins now."""
        self._before = {name: tree_cpu_seconds(pid) for name, pid in self._pids.items()}
        self._rss = self._peak = 0 if self._relay is None else resident_bytes(self._relay)

    def look(self) -> None:
        """Remember the memory if it is the most so far."""
        if self._relay is not None:
            self._peak = max(self._peak, resident_bytes(self._relay))

    def us_per_token(self, tokens: int) -> dict[str, float]:
        """By process, with its children."""
        return {
            name: (tree_cpu_seconds(pid) - self._before[name]) / max(1, tokens) * 1e6
            for name, pid in self._pids.items()
        }

    def kib_per_stream(self, streams: int) -> float:
        """Growth of the relay itself."""
        self.look()
        return max(0, self._peak - self._rss) / max(1, streams) / 1024


def tokens_behind(direct: Sequence[Probe], routed: Sequence[Probe]) -> int:
    """Streams of the routed run with a missing token or one more than ``BEHIND_S`` later than in the direct run."""
    behind = 0
    for before, after in zip(direct, routed, strict=True):
        is_late = len(after.token_at) < len(before.token_at) or any(
            (b - after.sent_at) - (a - before.sent_at) > BEHIND_S
            for a, b in zip(before.token_at, after.token_at, strict=False)
        )
        behind += is_late
    return behind


async def streams_run(target: Target, run: Arena, streams: Streams) -> tuple[list[Probe], dict[str, Any]]:
    """Open the streams over ``RAMP_S``, let them run to their ends, and account CPU and memory to the processes."""
    request = _generation(target, max_new_tokens=streams.tokens)
    meter = _Meter(run, target)
    load_before = cpu_seconds(os.getpid())

    async def watch_memory() -> None:
        while True:
            meter.look()
            await asyncio.sleep(0.5)

    watcher = asyncio.create_task(watch_memory())
    try:
        probes = await run_open_loop(
            host="127.0.0.1",
            port=target.port,
            requests=[(RAMP_S * i / streams.count, request) for i in range(streams.count)],
            limit_s=streams.seconds * 3 + 30,
        )
    finally:
        watcher.cancel()
    total = sum(len(p.token_at) for p in probes)
    begun = [p.token_at[0] for p in probes if p.token_at]
    ended = [p.token_at[-1] for p in probes if p.token_at]
    # All streams are open between the last first token and the first last token.
    low, high = max(begun, default=0.0), min(ended, default=0.0)
    steady = sum(1 for p in probes for at in p.token_at if low <= at < high)
    load = (cpu_seconds(os.getpid()) - load_before) / max(1, total) * 1e6
    return probes, {
        "open": sum(1 for p in probes if p.status == 200 and p.token_at),
        "complete": sum(p.is_complete and len(p.token_at) >= streams.tokens for p in probes),
        "tokens": total,
        "tokens_per_s": steady / (high - low) if high > low else total / max(1e-9, streams.seconds),
        "gap_p99_ms": percentile(gaps(p.token_at for p in probes), 0.99) * 1_000,
        "cpu_us_per_token": {**meter.us_per_token(total), "load": load},
        "kib_per_stream": meter.kib_per_stream(streams.count),
    }


# --- streams, with the compiled load generator ------------------------------------------------------------------------


def load_tool(path: Path) -> Path:
    """The program, from its path or its folder.

    Raises:
        FileNotFoundError: there is none.
    """
    for file in (path, path / _TOOL, path / "build" / _TOOL):
        if file.is_file() and os.access(file, os.X_OK):
            return file
    raise FileNotFoundError(f"{path}: neither the load generator {_TOOL} nor a folder of it (is it built?)")


async def tool_run(target: Target, run: Arena, streams: Streams, tool: Path) -> dict[str, Any]:
    """The same by ``streamload``: it prints S and E at the ends of the stretch it counts, then one line of JSON.

    Its streams begin anew when they end, so the stretch is longer than a stream by the time of its opening.
    """
    warm_s = RAMP_S + 0.5
    meter = _Meter(run, target)
    command = [
        str(tool), "-p", str(target.port), "-m", "stream", "-c", str(streams.count), "-n", str(streams.tokens),
        "-d", f"{streams.seconds:g}", "-w", f"{warm_s:g}", "-r", f"{RAMP_S:g}", "-k", target.key or "none",
    ]  # fmt: skip
    child = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    memory = meter
    load_before = 0.0
    used: dict[str, float] = {}
    seen: dict[str, Any] = {}
    kib = 0.0
    async for line in child.stdout:
        if line == b"S\n":
            meter = _Meter(run, target)
            load_before = cpu_seconds(child.pid)
        elif line == b"E\n":
            used = {**meter.us_per_token(1), "load": (cpu_seconds(child.pid) - load_before) * 1e6}
            kib = memory.kib_per_stream(streams.count)
        else:
            seen = json.loads(line)
    if await child.wait() != 0 or not seen:
        raise RuntimeError(f"{tool.name} ended with code {child.returncode}")
    return from_tool(seen, used, kib, streams)


def from_tool(seen: Mapping[str, Any], used_us: Mapping[str, float], kib: float, streams: Streams) -> dict[str, Any]:
    """Its figures under our names. ``used_us``: CPU of the stretch by process.

    ``behind`` is 0 if no token was on its way for longer than ``BEHIND_S``, else unknown.
    """
    broken = int(seen["errors"] + seen["early_close"] + seen["short"] + seen["bad_order"])
    transit = seen["transit_us"]
    return {
        "open": streams.count,
        "complete": int(seen["requests"]),
        "tokens": int(seen["tokens"]),
        "tokens_per_s": float(seen["tps"]),
        "gap_p99_ms": seen["gap_us"]["p99"] / 1_000,
        "transit_ms": {name: transit[name] / 1_000 for name in ("p50", "p99", "max")},
        "ttft_ms": {name: seen["ttfb_us"][name] / 1_000 for name in ("p50", "p99")},
        "cpu_us_per_token": {name: us / max(1, seen["tokens"]) for name, us in used_us.items()},
        "kib_per_stream": kib,
        "not_exact": broken,
        "behind": 0 if not broken and transit["max"] <= BEHIND_S * 1e6 else None,
    }


async def measure_streams(
    cores: Cores, peers: Sequence[str], streams: Streams, tool: Path | None, console: Console
) -> dict[str, dict[str, Any]]:
    """One run by target: without the router, through it, through each relay."""
    rows: dict[str, dict[str, Any]] = {}
    servers = Servers(
        interval_us=round(1e6 / streams.pace),
        seats=4 * streams.count + 1_000,
        has_stamps=tool is not None,
    )
    direct: list[Probe] = []
    with arena(cores, servers, peers=peers) as run:
        for target in (run.direct, run.routed, *run.peers):
            console.print(f"{streams.count} streams at {streams.pace:g} tokens/s, {target.name}")
            if tool is not None:
                rows[target.name] = await tool_run(target, run, streams, tool)
                continue
            probes, row = await streams_run(target, run, streams)
            if target.pid is None:
                direct = probes
            else:
                row["behind"] = tokens_behind(direct, probes)
            rows[target.name] = row
    return rows
