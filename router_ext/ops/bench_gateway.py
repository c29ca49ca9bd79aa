"""``fairlane bench gateway``: what the router adds, measured against the same server without it.

Three processes on one machine: the model server (model engine), the router on a snapshot of its own (no control
plane), and this load generator. Two measurements:

* added latency: one-token ``/generate_stream`` requests at a fixed open-loop rate, rounds without and with the
  router in turn; the difference of the medians (and of the 99th percentiles) of the time to the first event;
* streams: many long streams at a fixed pace, once without and once with the router; a stream is *behind* if any of
  its tokens comes more than 250 ms later than in the run without the router.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from router_ext.ops.embedded import free_port
from router_ext.ops.load import Probe, request_bytes, run_open_loop
from router_ext.wire.controlplane import (
    BackendRecord,
    ConfigSnapshot,
    KeyRecord,
    PoolRecord,
    TenantRecord,
    TierRecord,
    generate_key,
    key_digest,
    snapshot_digest,
)

BEHIND_S = 0.250
"""A token later than in the run without the router by more than this makes its stream "behind"."""

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go, and which process answers them."""

    name: str
    port: int
    key: str | None


@dataclass(slots=True, kw_only=True)
class Processes:
    """The two servers under test."""

    server: subprocess.Popen[bytes]
    router: subprocess.Popen[bytes]
    direct: Target
    routed: Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second of the latency rounds")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one latency round")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds without and with the router")
    parser.add_argument("--streams", type=int, default=1_000, help="concurrent streams of the second measurement")
    parser.add_argument("--pace", type=float, default=20.0, help="tokens per second of each stream")
    parser.add_argument("--stream-seconds", type=float, default=20.0, help="length of one stream")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, progress on stderr")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def _wait_ready(port: int, path: str, process: subprocess.Popen[bytes], what: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    request = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n\r\n".encode()
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{what} ended with code {process.returncode}: {log.read_text()[-2000:]}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as peer:
            peer.sendall(request)
            if peer.recv(64).startswith(b"HTTP/1.1 200"):
                return
        time.sleep(0.1)
    raise RuntimeError(f"{what} was not ready within 60 s: {log.read_text()[-2000:]}")


def _snapshot(*, server_port: int, key: str, public_id: str, pepper: bytes, streams: int) -> ConfigSnapshot:
    snapshot = ConfigSnapshot(
        revision=1,
        published_at_us=time.time_ns() // 1_000,
        pools=[
            PoolRecord(
                pool="pol_bench",
                name="bench",
                scheduling={"policy": "slo-fair"},
                backends=[
                    BackendRecord(
                        backend="bke_bench",
                        name="bench",
                        url=f"http://127.0.0.1:{server_port}",
                        kv_tokens=4_000_000,
                        block_size=16,
                        prefill_budget_tokens=65_536,
                    )
                ],
            )
        ],
        tiers=[TierRecord(name="standard", rank=10)],
        tenants=[
            TenantRecord(
                tenant="ten_bench",
                name="bench",
                tiers=["standard"],
                default_tier="standard",
                max_queued=max(2_000, 2 * streams),
            )
        ],
        keys=[
            KeyRecord(
                key="key_bench",
                public_id=public_id,
                digest=key_digest(key, pepper),
                pepper_version=1,
                tenant="ten_bench",
                default_pool="bench",
            )
        ],
    )
    return msgspec.structs.replace(snapshot, digest=snapshot_digest(snapshot))


@contextlib.contextmanager
def processes(*, pace: float, streams: int) -> Iterator[Processes]:
    """Start model server and router in a folder of their own; both are gone at the end, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="fairlane-bench-") as folder:
        root = Path(folder)
        server_port, router_port = free_port(), free_port()
        key, public_id = generate_key()
        pepper = secrets.token_bytes(32)
        router_dir = root / "router"
        router_dir.mkdir()
        snapshot = _snapshot(server_port=server_port, key=key, public_id=public_id, pepper=pepper, streams=streams)
        (router_dir / "snapshot.json").write_bytes(msgspec.json.encode(snapshot))
        server_log, router_log = root / "server.log", root / "router.log"
        command = [sys.executable, "-m", "router_ext.cli"]
        environment = {
            **os.environ,
            "FAIRLANE_ROUTER_PORT": str(router_port),
            "FAIRLANE_ROUTER_DIR": str(router_dir),
            "FAIRLANE_ROUTER_TOKEN": secrets.token_hex(24),
            "FAIRLANE_KEY_PEPPER": pepper.hex(),
            # Nothing listens there: the router serves on the snapshot in its folder.
            "FAIRLANE_CONTROLPLANE_URL": f"http://127.0.0.1:{free_port()}",
        }
        started: list[subprocess.Popen[bytes]] = []
        try:
            with server_log.open("wb") as out:
                server = subprocess.Popen(
                    [
                        *command, "devserver", "--engine", "model", "--port", str(server_port),
                        "--max-input-tokens", "2048", "--max-total-tokens", "4096",
                        "--max-batch-prefill-tokens", "65536", "--max-batch-total-tokens", "4000000",
                        "--max-concurrent-requests", str(4 * streams + 1_000),
                        "--sim-step-ms", f"{1_000 / pace:g}", "--sim-mean-tokens",
                        "0",
                        "--sim-data-dir", str(root / "model"),
                    ],
                    stdout=out, stderr=subprocess.STDOUT,
                )  # fmt: skip
            started.append(server)
            _wait_ready(server_port, "/health", server, "the model server", server_log)
            with router_log.open("wb") as out:
                router = subprocess.Popen([*command, "router"], env=environment, stdout=out, stderr=subprocess.STDOUT)
            started.append(router)
            _wait_ready(router_port, "/health", router, "the router", router_log)
            yield Processes(
                server=server,
                router=router,
                direct=Target(name="direct", port=server_port, key=None),
                routed=Target(name="router", port=router_port, key=key),
            )
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _generation(target: Target, *, max_new_tokens: int) -> bytes:
    body = json.dumps({"inputs": "Tell me about rivers.", "parameters": {"max_new_tokens": max_new_tokens}}).encode()
    return request_bytes(host="127.0.0.1", port=target.port, path="/generate_stream", body=body, key=target.key)


def percentile(values: Sequence[float], q: float) -> float:
    """Nearest-rank percentile; NaN where there is nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]


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


async def streams_run(
    target: Target, run: Processes, *, streams: int, pace: float, seconds: float
) -> tuple[list[Probe], dict[str, Any]]:
    """Open ``streams`` streams over two seconds, let them run, and account CPU and memory to the processes."""
    tokens = max(2, int(pace * seconds))
    request = _generation(target, max_new_tokens=tokens)
    ramp_s = 2.0
    pids = {"server": run.server.pid, "router": run.router.pid, "load": os.getpid()}
    cpu_before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    rss_before = resident_bytes(run.router.pid)
    peak = rss_before

    async def watch_memory() -> None:
        nonlocal peak
        while True:
            peak = max(peak, resident_bytes(run.router.pid))
            await asyncio.sleep(0.5)

    watcher = asyncio.create_task(watch_memory())
    try:
        probes = await run_open_loop(
            host="127.0.0.1",
            port=target.port,
            requests=[(ramp_s * i / streams, request) for i in range(streams)],
            limit_s=seconds * 3 + 30,
        )
    finally:
        watcher.cancel()
    total = sum(len(p.token_at) for p in probes)
    begun = [p.token_at[0] for p in probes if p.token_at]
    ended = [p.token_at[-1] for p in probes if p.token_at]
    # All streams are open between the last first token and the first last token.
    low, high = max(begun, default=0.0), min(ended, default=0.0)
    steady = sum(1 for p in probes for at in p.token_at if low <= at < high)
    used = {name: cpu_seconds(pid) - cpu_before[name] for name, pid in pids.items()}
    return probes, {
        "open": sum(1 for p in probes if p.status == 200 and p.token_at),
        "complete": sum(p.is_complete and len(p.token_at) >= tokens for p in probes),
        "tokens": total,
        "tokens_per_s": steady / (high - low) if high > low else total / max(1e-9, seconds),
        "cpu_us_per_token": {name: seconds_used / max(1, total) * 1e6 for name, seconds_used in used.items()},
        "router_kib_per_stream": max(0, peak - rss_before) / max(1, streams) / 1024,
    }


async def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Both measurements, in order."""
    rounds: dict[str, list[dict[str, Any]]] = {"direct": [], "router": []}
    with processes(pace=1_000.0, streams=args.streams) as run:
        for target in (run.direct, run.routed):  # warm both paths; not counted
            await latency_round(target, rate=args.rate, seconds=1)
        for number in range(args.rounds):
            for target in (run.direct, run.routed):
                console.print(f"latency round {number + 1} of {args.rounds}, {target.name}: {args.rate:g} req/s")
                rounds[target.name].append(await latency_round(target, rate=args.rate, seconds=args.seconds))
    with processes(pace=args.pace, streams=args.streams) as run:
        console.print(f"{args.streams} streams at {args.pace:g} tokens/s, without the router")
        direct, direct_row = await streams_run(
            run.direct, run, streams=args.streams, pace=args.pace, seconds=args.stream_seconds
        )
        console.print(f"{args.streams} streams at {args.pace:g} tokens/s, through the router")
        routed, routed_row = await streams_run(
            run.routed, run, streams=args.streams, pace=args.pace, seconds=args.stream_seconds
        )

    def summary(name: str) -> dict[str, Any]:
        rows = rounds[name]
        return {
            "p50_ms": statistics.median(r["p50"] for r in rows),
            "p99_ms": statistics.median(r["p99"] for r in rows),
            "failed": sum(r["failed"] for r in rows),
            "rounds": rows,
        }

    pairs = list(zip(rounds["direct"], rounds["router"], strict=True))
    return {
        "direct": {**summary("direct"), "streams": direct_row},
        "router": summary("router"),
        "added_ms": {
            "p50": statistics.median(b["p50"] - a["p50"] for a, b in pairs),
            "p99": statistics.median(b["p99"] - a["p99"] for a, b in pairs),
        },
        "streams": {**routed_row, "behind": tokens_behind(direct, routed)},
    }


def run(args: argparse.Namespace) -> int:
    console = Console(stderr=True)
    result = asyncio.run(measure(args, console))
    if args.json:
        print(json.dumps(result))
        return 0
    streams = result["streams"]
    cpu = streams["cpu_us_per_token"]
    print(f"added latency      p50 {result['added_ms']['p50']:.2f} ms   p99 {result['added_ms']['p99']:.2f} ms")
    print(f"                   direct {result['direct']['p50_ms']:.2f} / {result['direct']['p99_ms']:.2f} ms, "
          f"router {result['router']['p50_ms']:.2f} / {result['router']['p99_ms']:.2f} ms")  # fmt: skip
    print(
        f"streams            {streams['open']} open, {streams['tokens_per_s']:.0f} tokens/s, {streams['behind']} behind"
    )
    print(f"CPU per token      server {cpu['server']:.1f} us, router {cpu['router']:.1f} us, load {cpu['load']:.1f} us")
    print(f"router memory      {streams['router_kib_per_stream']:.1f} KiB per stream")
    return 0
