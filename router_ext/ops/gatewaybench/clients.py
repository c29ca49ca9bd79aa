"""Clients that leave, stall or go on, on plain sockets; and what the servers and the router say of themselves."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from router_ext.ops.gatewaybench.arena import Arena, Target
from router_ext.ops.load import request_bytes

_SAMPLE = re.compile(r"^([a-z_]+)(?:\{([^}]*)\})? ([0-9.eE+-]+|NaN)$", re.MULTILINE)
_LIVE = re.compile(r"inflight|queue_length|parked|running|reserved|reservations|waiting|overflow_events")
"""Gauges of what lives in the router: 0 when nothing does."""


def generation(target: Target, prompt: str, *, tokens: int, is_stream: bool = True) -> bytes:
    """One request."""
    body = json.dumps({"inputs": prompt, "parameters": {"max_new_tokens": tokens}}).encode()
    path = "/generate_stream" if is_stream else "/generate"
    return request_bytes(host="127.0.0.1", port=target.port, path=path, body=body, key=target.key)


def connect(port: int, *, receive_bytes: int | None = None) -> socket.socket:
    """A client's connection. ``receive_bytes``: its kernel buffer for what it does not read."""
    client = socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(10)
    client.connect(("127.0.0.1", port))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def read_events(client: socket.socket, count: int) -> None:
    """Read until ``count`` events have begun.

    Raises:
        ConnectionError: the connection closed before.
    """
    seen = b""
    while seen.count(b"data:") < count:
        data = client.recv(65_536)
        if not data:
            raise ConnectionError(f"closed after {seen[-200:]!r}")
        seen += data


def get(port: int, path: str, *, token: str | None = None) -> bytes:
    """One GET."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"authorization": f"Bearer {token}"} if token else {})
        return connection.getresponse().read()


def stats(run: Arena, server: int = 0) -> dict[str, int]:
    """A pacer's counts."""
    counts: dict[str, int] = json.loads(get(run.server_ports[server], "/stats"))
    return counts


def closes(run: Arena, server: int = 0) -> dict[str, tuple[int, int]]:
    """Name to (instant in ns, tokens sent) of the generations whose connection has closed, as a pacer saw it."""
    return {rid: (at, sent) for rid, at, sent in json.loads(get(run.server_ports[server], "/closes"))}


def metrics(run: Arena) -> list[tuple[str, str, float]]:
    """Samples of the router's operator port: (name, labels, value)."""
    page = get(run.admin_port, "/metrics", token=run.admin_token).decode()
    return [(name, labels, float(value)) for name, labels, value in _SAMPLE.findall(page)]


def live_gauges(samples: Iterable[tuple[str, str, float]]) -> dict[str, float]:
    """Those of what lives in the router that are not 0, with their labels."""
    return {
        f"{name}{{{labels}}}" if labels else name: value
        for name, labels, value in samples
        if value != 0 and _LIVE.search(name) and not name.endswith(("_total", "_bucket", "_sum", "_count", "_created"))
    }


def queued(run: Arena) -> int:
    """Requests in the router's queue."""
    return int(sum(value for name, _, value in metrics(run) if name == "fairlane_queue_length"))


def wait_for(what: str, condition: Callable[[], Any], *, limit_s: float = 15.0, every_s: float = 0.005) -> Any:
    """Poll until the condition gives something true, which is returned.

    Raises:
        TimeoutError: it did not within the limit.
    """
    deadline = time.monotonic() + limit_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {limit_s:g} s")
        time.sleep(every_s)
