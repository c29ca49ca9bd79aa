"""A light open-loop load generator for streamed generations, on raw sockets.

One connection per request, one ``Probe`` per connection. A probe counts events by their ``data:`` marks instead of
parsing them, so that the generator stays cheaper than what it measures.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from typing import cast

_MARK = b"data:"
_LAST_CHUNK = b"0\r\n\r\n"


class Probe(asyncio.Protocol):
    """One request and the instants at which its events came.

    Attributes:
        sent_at: ``perf_counter`` seconds when the request was written.
        token_at: ``perf_counter`` seconds of every event, in order.
        status: HTTP status, 0 before the head has come.
        error: set when the connection could not be made or broke before the end of the body.
    """

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self._request = request
        self._done = done
        self._tail = b""
        self._transport: asyncio.Transport | None = None
        self.sent_at = 0.0
        self.token_at: array[float] = array("d")
        self.status = 0
        self.error: str | None = None
        self.is_complete = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self.sent_at = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.status and data.startswith(b"HTTP/1."):
            self.status = int(data[9:12])
        joined = self._tail + data
        for _ in range(joined.count(_MARK)):
            self.token_at.append(now)
        # A mark split over two reads is found with the next one: keep as much as cannot hold a whole mark.
        self._tail = joined[-(len(_MARK) - 1) :]
        if joined.endswith(_LAST_CHUNK):
            self.is_complete = True
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_complete:
            self.error = f"connection lost: {exc}"
        if not self._done.done():
            self._done.set_result(None)


def request_bytes(*, host: str, port: int, path: str, body: bytes, key: str | None) -> bytes:
    """A complete HTTP/1.1 POST."""
    auth = f"authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\n{auth}"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def run_open_loop(
    *, host: str, port: int, requests: Sequence[tuple[float, bytes]], limit_s: float
) -> list[Probe]:
    """Send every request at its own time, whatever the answers do.

    Args:
        requests: (seconds from now, complete request bytes), in time order.
        limit_s: give up on what has not ended this long after the last send.
    """
    loop = asyncio.get_running_loop()
    start = time.perf_counter() + 0.05
    probes: list[Probe] = []
    ends: list[asyncio.Future[None]] = []

    async def connect(request: bytes, end: asyncio.Future[None]) -> None:
        probe = Probe(request, end)
        probes.append(probe)
        try:
            await loop.create_connection(lambda: probe, host, port)
        except OSError as problem:
            probe.error = str(problem)
            if not end.done():
                end.set_result(None)

    async with asyncio.TaskGroup() as group:
        for at_s, request in requests:
            delay = start + at_s - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            end: asyncio.Future[None] = loop.create_future()
            ends.append(end)
            group.create_task(connect(request, end))
    if ends:
        _, pending = await asyncio.wait(ends, timeout=limit_s)
        for future in pending:
            future.cancel()
    return probes
