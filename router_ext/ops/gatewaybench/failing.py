"""One of three model servers is killed, or stops answering, in mid-run: what requests on the others notice."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from router_ext.ops.gatewaybench.arena import Cores, Servers, arena
from router_ext.ops.gatewaybench.clients import generation
from router_ext.ops.load import Probe, run_open_loop
from router_ext.ops.measures import percentile

SERVERS = 3
TOKENS = 20
_INTERVAL_US = 10_000

FAULTS: Mapping[str, signal.Signals | None] = {"none": None, "killed": signal.SIGKILL, "frozen": signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Seen:
    """One request of a run: seconds to its first token (None: none came), and whether its answer was complete."""

    ttft_s: float | None
    is_complete: bool
    is_others: bool


def others(log: Iterable[bytes], fault_ns: int) -> set[str]:
    """Names that the faulty server had received too near the fault to be done with, or later: not "others"."""
    near_ns = fault_ns - (TOKENS + 5) * _INTERVAL_US * 1_000
    lines = (line.split() for line in log)
    return {name.decode() for at, name in lines if int(at) >= near_ns}


def summarise(seen: Sequence[Seen]) -> dict[str, Any]:
    """Of one run. ``hit``: requests that the faulty server had."""
    rest = [each for each in seen if each.is_others]
    times = [each.ttft_s * 1_000 for each in rest if each.ttft_s is not None]
    return {
        "requests": len(seen),
        "hit": len(seen) - len(rest),
        "hit_failed": sum(not each.is_complete for each in seen if not each.is_others),
        "others_failed": sum(not each.is_complete for each in rest),
        "others_p50_ms": percentile(times, 0.5),
        "others_p99_ms": percentile(times, 0.99),
    }


def failover_summary(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The worst fault's p99 of the others by that of the run without a fault."""
    base = runs["none"]["others_p99_ms"]
    worst = max(row["others_p99_ms"] for name, row in runs.items() if name != "none")
    return {"others_p99_ratio": worst / base, "others_p99_added_ms": worst - base, "runs": dict(runs)}


async def _run(cores: Cores, fault: signal.Signals | None, rate: float, seconds: float) -> dict[str, Any]:
    with arena(cores, Servers(count=SERVERS, interval_us=_INTERVAL_US, keeps_log=True)) as run:
        target = run.routed

        async def send(first: int, count: int) -> list[Probe]:
            requests = [(i / rate, generation(target, f"rid={first + i}", tokens=TOKENS)) for i in range(count)]
            return await run_open_loop(host="127.0.0.1", port=target.port, requests=requests, limit_s=40)

        await send(1_000_000, int(rate))  # warm; not counted
        count = int(rate * seconds)
        sending = asyncio.create_task(send(0, count))
        await asyncio.sleep(seconds / 3)
        fault_ns = time.monotonic_ns()
        if fault is not None:
            run.servers[0].send_signal(fault)
        probes = await sending
        hit: set[str] = set()
        if fault is not None:
            # What a frozen server was sent meanwhile it reads, and logs, as soon as it goes on.
            if fault is signal.SIGSTOP:
                run.servers[0].send_signal(signal.SIGCONT)
                await asyncio.sleep(0.5)
            hit = others(run.log_of(0), fault_ns)
        return summarise(
            [
                Seen(p.token_at[0] - p.sent_at if p.token_at else None, p.is_complete, str(number) not in hit)
                for number, p in enumerate(probes)
            ]
        )


async def measure_failover(cores: Cores, *, rate: float, seconds: float, console: Console) -> dict[str, Any]:
    """The same load without a fault, with one server killed, and with one frozen."""
    runs: dict[str, dict[str, Any]] = {}
    for name, fault in FAULTS.items():
        console.print(f"{rate:g} req/s on {SERVERS} servers, fault of one: {name}")
        runs[name] = await _run(cores, fault, rate, seconds)
    return failover_summary(runs)
