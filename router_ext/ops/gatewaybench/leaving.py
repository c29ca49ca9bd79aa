"""Clients that leave: from their close to the close that the model server sees, by what the request was doing."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console

from router_ext.ops.gatewaybench.arena import Arena, Cores, Servers, arena
from router_ext.ops.gatewaybench.clients import (
    closes,
    connect,
    generation,
    live_gauges,
    metrics,
    queued,
    read_events,
    stats,
    wait_for,
)
from router_ext.ops.measures import percentile

SEATS = 4
_LONG = 20_000


@dataclass(frozen=True, slots=True)
class Phase:
    """What a request is doing when its client leaves.

    ``directions``: to the server (``pacer``). ``events``: read before the client leaves. ``is_reset``: it leaves by a
    reset. ``settles_s``: time for the state to be reached after the last of what can be seen.
    """

    directions: str
    events: int = 0
    is_stream: bool = True
    is_reset: bool = False
    settles_s: float = 0.02
    receive_bytes: int | None = None


PHASES: Mapping[str, Phase] = {
    "before_first_token": Phase("delay_ms=60000"),
    "whole_answer": Phase("delay_ms=60000", is_stream=False),
    "mid_stream": Phase("interval_us=20000", events=2),
    "silent_stream": Phase("interval_us=60000000", events=1),
    "silent_stream_reset": Phase("interval_us=60000000", events=1, is_reset=True),
    "paused_reader": Phase("interval_us=0", events=1, settles_s=0.3, receive_bytes=4_096, is_reset=True),
}
"""Those whose end the server sees. ``queued``: it never heard of them; the router's own queue is asked."""


def leave(client: socket.socket, *, is_reset: bool) -> int:
    """Close, and the instant just before in ns."""
    if is_reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    now = time.monotonic_ns()
    client.close()
    return now


def _more_than(run: Arena, requests: int) -> bool:
    return stats(run)["requests"] > requests


def _close_of(run: Arena, rid: str) -> tuple[int, int] | None:
    return closes(run).get(rid)


def _times(run: Arena, name: str, phase: Phase, count: int) -> list[float]:
    found: list[float] = []
    for number in range(count):
        rid = f"{name}{number}"
        before = stats(run)["requests"]
        client = connect(run.routed.port, receive_bytes=phase.receive_bytes)
        prompt = f"rid={rid} {phase.directions}"
        client.sendall(generation(run.routed, prompt, tokens=_LONG, is_stream=phase.is_stream))
        if phase.events:
            read_events(client, phase.events)
        else:
            wait_for("the request at the server", partial(_more_than, run, before))
        time.sleep(phase.settles_s)
        left = leave(client, is_reset=phase.is_reset)
        at, _ = wait_for("the close at the server", partial(_close_of, run, rid))
        found.append((at - left) / 1e6)
    return found


def _times_queued(run: Arena, count: int) -> list[float]:
    """Behind ``SEATS`` streams that stay: until the queue is empty again, with the time of asking for it."""
    holders = []
    for number in range(SEATS):
        holder = connect(run.routed.port)
        holder.sendall(generation(run.routed, f"rid=holder{number} interval_us=60000000", tokens=_LONG))
        read_events(holder, 1)
        holders.append(holder)
    found: list[float] = []
    for number in range(count):
        client = connect(run.routed.port)
        client.sendall(generation(run.routed, f"rid=queued{number}", tokens=10))
        wait_for("the request in the queue", lambda: queued(run) == 1)
        left = leave(client, is_reset=False)
        wait_for("an empty queue", lambda: queued(run) == 0, every_s=0)
        found.append((time.monotonic_ns() - left) / 1e6)
    served = stats(run)["requests"]
    for holder in holders:
        holder.close()
    wait_for("the ends of those in front", lambda: all(f"holder{i}" in closes(run) for i in range(SEATS)))
    if stats(run)["requests"] != served:
        raise RuntimeError("a request whose client left in the queue was dispatched all the same")
    return found


def measure_cancel(cores: Cores, count: int, console: Console) -> dict[str, Any]:
    """``count`` clients leave in each phase.

    Raises:
        TimeoutError: the server did not see a close. RuntimeError: something of the requests is left in the router.
    """
    times: dict[str, list[float]] = {}
    with arena(cores, Servers(seats=SEATS)) as run:
        for name, phase in PHASES.items():
            console.print(f"{count} clients leave: {name.replace('_', ' ')}")
            times[name] = _times(run, name, phase, count)
        console.print(f"{count} clients leave: queued")
        times["queued"] = _times_queued(run, count)
        wait_for("gauges at zero", _at_zero(run))
    return cancel_summary(times)


def _at_zero(run: Arena) -> Callable[[], bool]:
    return lambda: not live_gauges(metrics(run))


def cancel_summary(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Milliseconds, of all phases together and by phase."""
    pooled = [ms for each in times.values() for ms in each]

    def row(values: Sequence[float]) -> dict[str, float]:
        return {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99), "max": max(values)}

    return {**row(pooled), "phases": {name: row(values) for name, values in times.items()}}
