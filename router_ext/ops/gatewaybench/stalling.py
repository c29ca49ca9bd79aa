"""Clients that stop reading: what each costs the router, and that it is dropped in the end."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console

from router_ext.ops.gatewaybench.arena import Arena, Cores, Servers, arena
from router_ext.ops.gatewaybench.clients import connect, generation, live_gauges, metrics, read_events, stats, wait_for
from router_ext.ops.measures import resident_bytes

LIMIT_S = 6.0
"""The router's limit for a reader that stalls, in this bench."""

_LONG = 1_000_000


def _dropped(run: Arena) -> int:
    return int(
        sum(value for name, labels, value in metrics(run) if name == "fairlane_requests_total" and "stalled" in labels)
    )


def measure_stalled(cores: Cores, count: int, console: Console) -> dict[str, Any]:
    """``count`` unthrottled streams of which nothing is read after the first event.

    Raises:
        TimeoutError: not all of them were dropped and counted. RuntimeError: their streams went on at the server.
    """
    settings = {"FAIRLANE_ROUTER_STALL_LIMIT_S": f"{LIMIT_S:g}"}
    with arena(cores, Servers(), settings=settings) as run:
        console.print(f"{count} clients stop reading")
        warm = connect(run.routed.port)
        warm.sendall(generation(run.routed, "rid=warm", tokens=100))
        read_events(warm, 100)
        warm.close()
        before = resident_bytes(run.routed.pid or 0)
        clients = []
        for number in range(count):
            client = connect(run.routed.port, receive_bytes=4_096)
            client.sendall(generation(run.routed, f"rid=stalled{number} interval_us=0", tokens=_LONG))
            read_events(client, 1)
            clients.append(client)
        begun = time.monotonic()
        peak = before
        while time.monotonic() - begun < LIMIT_S / 2:
            peak = max(peak, resident_bytes(run.routed.pid or 0))
            time.sleep(0.05)
        open_streams = stats(run)["open"]
        wait_for("stalled readers dropped", lambda: _dropped(run) == count, limit_s=3 * LIMIT_S, every_s=0.1)
        wait_for("their streams closed", lambda: stats(run)["open"] == 0)
        wait_for("gauges at zero", lambda: not live_gauges(metrics(run)))
        for client in clients:
            client.close()
    return {
        "clients": count,
        "kib_per_client": (peak - before) / count / 1024,
        "open_while_stalled": open_streams,
        "dropped": count,
    }
