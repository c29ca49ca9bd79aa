"""``fairlane bench gateway``: what the router adds to a request and a stream, beside the same server without it.

Parts, each with processes of its own, so that one can be run alone:

* latency: one-token ``/generate_stream`` requests at a fixed open-loop rate, rounds without the router, through it and
  through plain relays in turn; the difference of the medians (and of the 99th percentiles) of the time to first event;
* streams: many long streams at a fixed pace, once each; a stream is *behind* if any of its tokens comes more than
  250 ms later than in the run without the router;
* cancel: clients leave in every phase of a request; ms until the model server sees it;
* stalled: clients stop reading; memory of each, and that it is dropped;
* failover: one of three servers is killed, or frozen; first tokens on the others;
* soak (only when named): a long mixture; memory flat, nothing left. Exit status 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from router_ext.ops.gatewaybench.arena import BenchFailed, Cores
from router_ext.ops.gatewaybench.failing import measure_failover
from router_ext.ops.gatewaybench.leaving import measure_cancel
from router_ext.ops.gatewaybench.peers import PEERS
from router_ext.ops.gatewaybench.rates import (
    Streams,
    added,
    latency_summary,
    load_tool,
    measure_latency,
    measure_streams,
)
from router_ext.ops.gatewaybench.soak import measure_soak
from router_ext.ops.gatewaybench.stalling import measure_stalled

PARTS = ("latency", "streams", "cancel", "stalled", "failover", "soak")
USUAL = PARTS[:-1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one (repeatable); soak only if named")
    parser.add_argument("--rate", type=float, default=300.0, help="requests per second of the latency rounds")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of one latency round")
    parser.add_argument("--rounds", type=int, default=3, help="latency rounds, targets in turn")
    parser.add_argument("--streams", type=int, default=1_500, help="concurrent streams")
    parser.add_argument("--pace", type=float, default=20.0, help="tokens per second of each stream")
    parser.add_argument("--stream-seconds", type=float, default=15.0, help="length of one stream")
    parser.add_argument("--load-tool", type=Path, metavar="PATH", help="compiled load generator for the streams")
    parser.add_argument("--peers", default=",".join(PEERS), help="relays to compare with, if installed; none: no relay")
    parser.add_argument("--leaving", type=int, default=20, help="clients that leave in each phase")
    parser.add_argument("--stalled", type=int, default=64, help="clients that stop reading")
    parser.add_argument("--failover-rate", type=float, default=150.0, help="requests per second of the failover runs")
    parser.add_argument("--failover-seconds", type=float, default=12.0, help="length of one failover run")
    parser.add_argument("--requests", type=int, default=100_000, help="requests of the soak")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, progress on stderr")


def run(args: argparse.Namespace) -> int:
    """Measure the parts asked for, then print. 1: the soak failed, or something did not work at all."""
    console = Console(stderr=True)
    cores = Cores.of_machine()
    # This process is the load.
    cores.pin(os.getpid(), cores.others)
    console.print(cores.describe())
    try:
        result = uvloop.run(measure(args, cores, console))
    except (BenchFailed, FileNotFoundError, RuntimeError, TimeoutError) as problem:
        console.print(f"[red]{problem}[/red]", markup=True, highlight=False)
        return 1
    if args.json:
        print(json.dumps(_finite(result)))
    else:
        for line in lines(result):
            print(line)
    return 1 if "soak" in result and not result["soak"]["is_passed"] else 0


async def measure(args: argparse.Namespace, cores: Cores, console: Console) -> dict[str, Any]:
    """All parts asked for, in order."""
    parts: Sequence[str] = args.part or USUAL
    names = [] if args.peers == "none" else [name.strip() for name in args.peers.split(",")]
    if unknown := [name for name in names if name not in PEERS]:
        raise BenchFailed(f"no relay is called {unknown[0]!r}; there are {', '.join(PEERS)}, and none")
    result: dict[str, Any] = {"cores": cores.describe()}
    latency: dict[str, list[dict[str, Any]]] = {}
    rows: dict[str, dict[str, Any]] = {}
    if "latency" in parts:
        latency = await measure_latency(
            cores, names, rate=args.rate, seconds=args.seconds, rounds=args.rounds, console=console
        )
    if "streams" in parts:
        tool = None if args.load_tool is None else load_tool(args.load_tool)
        streams = Streams(count=args.streams, pace=args.pace, seconds=args.stream_seconds)
        rows = await measure_streams(cores, names, streams, tool, console)
    result |= summarise(latency, rows, names)
    if "cancel" in parts:
        result["cancel_ms"] = await asyncio.to_thread(measure_cancel, cores, args.leaving, console)
    if "stalled" in parts:
        stalled = await asyncio.to_thread(measure_stalled, cores, args.stalled, console)
        result |= {"stalled_kib": stalled["kib_per_client"], "stalled": stalled}
    if "failover" in parts:
        result["failover"] = await measure_failover(
            cores, rate=args.failover_rate, seconds=args.failover_seconds, console=console
        )
    if "soak" in parts:
        result["soak"] = await measure_soak(cores, args.requests, console)
    return result


def summarise(
    latency: Mapping[str, Sequence[Mapping[str, Any]]], rows: Mapping[str, Mapping[str, Any]], peers: Sequence[str]
) -> dict[str, Any]:
    """Latency rounds and stream runs by target, as the fields of the result."""
    result: dict[str, Any] = {}
    if latency:
        result["direct"] = latency_summary(latency["direct"])
        result["router"] = latency_summary(latency["router"])
        result["added_ms"] = _added(latency, "router")
    if rows:
        direct, routed = rows["direct"], rows["router"]
        result.setdefault("direct", {})["streams"] = direct
        result["streams"] = routed
        result["cpu_us_per_token"] = routed["cpu_us_per_token"]["router"]
        result["kib_per_stream"] = routed["kib_per_stream"]
        result["gap_added_p99_ms"] = routed["gap_p99_ms"] - direct["gap_p99_ms"]
    if latency or rows:
        result["peers"] = {name: _peer(name, latency, rows) for name in peers}
    return result


def _added(latency: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> dict[str, float]:
    return {which: added(latency["direct"], latency[name], which) for which in ("p50", "p99")}


def _peer(
    name: str, latency: Mapping[str, Sequence[Mapping[str, Any]]], rows: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """None: it is not installed."""
    if name not in latency and name not in rows:
        return None
    return {
        "cpu_us_per_token": rows[name]["cpu_us_per_token"][name] if name in rows else None,
        "added_ms": _added(latency, name)["p50"] if name in latency else None,
    }


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def lines(result: Mapping[str, Any]) -> list[str]:
    """The result for people."""
    out = [f"cores              {result['cores']}"]
    if "added_ms" in result:
        ms, a, b = result["added_ms"], result["direct"], result["router"]
        out += [
            f"added latency      p50 {ms['p50']:.2f} ms   p99 {ms['p99']:.2f} ms",
            f"                   direct {a['p50_ms']:.2f} / {a['p99_ms']:.2f} ms, "
            f"router {b['p50_ms']:.2f} / {b['p99_ms']:.2f} ms, {a['failed'] + b['failed']} failed",
        ]
    if "streams" in result:
        s = result["streams"]
        cpu = ", ".join(f"{name} {us:.1f} us" for name, us in s["cpu_us_per_token"].items())
        behind = "unknown how many" if s["behind"] is None else s["behind"]
        out += [
            f"streams            {s['open']} open, {s['tokens_per_s']:.0f} tokens/s, {behind} behind",
            f"CPU per token      {cpu}",
            f"gap added          p99 {result['gap_added_p99_ms']:.2f} ms",
            f"router memory      {s['kib_per_stream']:.1f} KiB per stream",
        ]
    for name, peer in result.get("peers", {}).items():
        out.append(f"{name:18} {'not installed' if peer is None else _peer_line(peer)}")
    if "cancel_ms" in result:
        c = result["cancel_ms"]
        out.append(f"client gone        p50 {c['p50']:.2f} ms   p99 {c['p99']:.2f} ms until the server sees it")
        out += [f"  {name:20} {row['p50']:.2f} / {row['max']:.2f} ms" for name, row in c["phases"].items()]
    if "stalled" in result:
        s = result["stalled"]
        out.append(f"stalled readers    {s['kib_per_client']:.0f} KiB each; {s['dropped']} of {s['clients']} dropped")
    if "failover" in result:
        f = result["failover"]
        out.append(f"failover           p99 of the others {f['others_p99_ratio']:.2f} times, at worst")
        out += [
            f"  {name:16} {r['others_p50_ms']:.1f} / {r['others_p99_ms']:.1f} ms, "
            f"{r['others_failed']} failed; {r['hit']} hit, {r['hit_failed']} failed"
            for name, r in f["runs"].items()
        ]
    if "soak" in result:
        k = result["soak"]
        out += [
            f"soak               {k['requests']} requests at {k['requests_per_s']:.0f}/s: {k['outcomes']}",
            f"  memory           {k['rss_early_kib']:.0f} KiB early, {k['rss_end_kib']:.0f} at the end, "
            f"{k['rss_kib_per_1000']:+.1f} per 1,000 requests",
            f"  left             {k['gauges_left'] or 'nothing'}; unexpected: {k['unexpected'] or 'nothing'}",
            f"  {'passed' if k['is_passed'] else 'FAILED'}",
        ]
    return out


def _peer_line(peer: Mapping[str, Any]) -> str:
    words = []
    if peer["cpu_us_per_token"] is not None:
        words.append(f"{peer['cpu_us_per_token']:.1f} us CPU per token")
    if peer["added_ms"] is not None:
        words.append(f"added p50 {peer['added_ms']:.2f} ms")
    return ", ".join(words)
