"""A long mixture of requests that succeed, are cancelled, are refused and meet faults: nothing may be left of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from rich.console import Console

from router_ext.ops.gatewaybench.arena import Arena, Cores, Servers, Target, arena
from router_ext.ops.gatewaybench.clients import generation, live_gauges, metrics, stats
from router_ext.ops.gatewaybench.pacer import FAULTS
from router_ext.ops.load import request_bytes
from router_ext.ops.measures import percentile, resident_bytes, slope

CLIENTS = 48
SERVERS = 2
FLAT_KIB = 4_096
"""How much more the router may have at the end than after the first part: what its allocator moves to and fro."""

_SAMPLE_S = 0.5
_SETTLE_S = 20.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. ``leaves_after``: events after which its client leaves; 0: in the turn after the request."""

    kind: str
    request: bytes
    status: int = 200
    leaves_after: int | None = None


class Mixture:
    """Requests in a fixed order: 82% succeed (a quarter of them whole), 10% cancelled, 7% refused, 1% meet a fault."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._stranger = Target(name="stranger", port=target.port, key="no key of anybody")

    def requests(self, count: int) -> Iterator[Ask]:
        """The first ``count`` of them."""
        for number in range(count):
            yield self._ask(number)

    def _ask(self, number: int) -> Ask:
        draw = self._random.random()
        tokens = self._random.randint(1, 24)
        if draw < 0.82:
            is_stream = draw >= 0.20
            return Ask("success", generation(self._target, f"rid={number}", tokens=tokens, is_stream=is_stream))
        if draw < 0.92:
            prompt = f"rid={number} interval_us=5000 delay_ms={self._random.choice((0, 0, 20))}"
            return Ask(
                "cancel", generation(self._target, prompt, tokens=1_000), leaves_after=self._random.randint(0, 3)
            )
        if draw < 0.95:
            return Ask("refuse", generation(self._stranger, "hello", tokens=tokens), status=401)
        if draw < 0.97:
            return Ask("refuse", generation(self._target, "hello", tokens=0), status=422)
        if draw < 0.99:
            return Ask("refuse", self._post(b"{not json"), status=422)
        fault = self._random.choice(FAULTS)
        return Ask("fault", generation(self._target, f"rid={number} fault={fault}", tokens=tokens))

    def _post(self, body: bytes) -> bytes:
        key = self._target.key
        return request_bytes(host="127.0.0.1", port=self._target.port, path="/generate", body=body, key=key)


class _Client(asyncio.Protocol):
    """Sends one request and reads its answer, or leaves."""

    def __init__(self, ask: Ask, done: asyncio.Future[None]) -> None:
        self._ask = ask
        self._done = done
        self._seen = b""
        self._head_bytes = 0
        self._length: int | None = None
        self.status = 0
        self.is_complete = False
        self.has_left = False
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._ask.request)
        if self._ask.leaves_after == 0:
            asyncio.get_running_loop().call_later(0.002, self._leave)

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if not self._head_bytes:
            end = self._seen.find(b"\r\n\r\n")
            if end < 0:
                return
            self._head_bytes = end + 4
            self.status = int(self._seen[9:12])
            mark = self._seen.find(b"content-length: ", 0, end)
            if mark >= 0:
                self._length = int(self._seen[mark + 16 : self._seen.index(b"\r\n", mark)])
        self.events = self._seen.count(b"data:")
        if self._ask.leaves_after is not None and self.events >= self._ask.leaves_after > 0:
            self._leave()
        elif self._length is not None:
            self.is_complete = len(self._seen) >= self._head_bytes + self._length
        else:
            self.is_complete = self._seen.endswith(b"\r\n0\r\n\r\n") and b'"generated_text":"' in self._seen
        if self.is_complete or self._seen.endswith(b"\r\n0\r\n\r\n"):
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def _leave(self) -> None:
        self.has_left = True
        self._transport.abort()

    @property
    def outcome(self) -> str:
        """In the words of the summary."""
        ask = self._ask
        if ask.leaves_after is not None:
            return "left" if self.has_left else "answered before it left"
        if self.status == ask.status and self.is_complete:
            return "as wanted"
        return f"status {self.status}, complete: {self.is_complete}"


def _same(client: _Client) -> _Client:
    return client


async def _play(target: Target, asks: Iterator[Ask], counts: dict[str, Counter[str]]) -> None:
    loop = asyncio.get_running_loop()
    for ask in asks:
        done: asyncio.Future[None] = loop.create_future()
        client = _Client(ask, done)
        try:
            await loop.create_connection(partial(_same, client), "127.0.0.1", target.port)
            async with asyncio.timeout(60):
                await done
        except (OSError, TimeoutError) as problem:
            counts.setdefault(ask.kind, Counter())[type(problem).__name__] += 1
            continue
        counts.setdefault(ask.kind, Counter())[client.outcome] += 1


def soak_summary(
    samples: Sequence[tuple[int, float]], counts: dict[str, Counter[str]], gauges: dict[str, float], requests: int
) -> dict[str, Any]:
    """Verdict over the memory and what is left.

    Args:
        samples: (requests ended, KiB of the router) in order. gauges: those that are not 0 at the end.
    """
    first = min(10_000, requests // 5)
    early = [kib for done, kib in samples if first <= done <= 2 * first]
    late = [kib for done, kib in samples if done >= requests - first]
    early_kib = percentile(early or late, 0.5)
    late_kib = percentile(late or early, 0.5)
    per_1000 = slope([(done / 1_000, kib) for done, kib in samples if done >= first])
    unexpected = {
        f"{kind}: {outcome}": count
        for kind, outcomes in counts.items()
        for outcome, count in outcomes.items()
        if kind in ("success", "refuse") and outcome != "as wanted"
    }
    is_flat = late_kib - early_kib <= FLAT_KIB
    return {
        "requests": requests,
        "outcomes": {kind: dict(outcomes) for kind, outcomes in counts.items()},
        "unexpected": unexpected,
        "rss_early_kib": early_kib,
        "rss_end_kib": late_kib,
        "rss_kib_per_1000": per_1000,
        "gauges_left": gauges,
        "is_flat": is_flat,
        "is_passed": is_flat and not gauges and not unexpected,
    }


def _left(run: Arena) -> dict[str, float]:
    """What has not ended after a while: gauges of the router, streams at the servers."""
    deadline = time.monotonic() + _SETTLE_S
    while (left := live_gauges(metrics(run))) and time.monotonic() < deadline:
        time.sleep(0.2)
    for number in range(SERVERS):
        if still_open := stats(run, number)["open"]:
            left[f"streams open at server {number}"] = still_open
    return left


async def measure_soak(cores: Cores, requests: int, console: Console) -> dict[str, Any]:
    """``requests`` of the mixture, ``CLIENTS`` at a time."""
    counts: dict[str, Counter[str]] = {}
    samples: list[tuple[int, float]] = []
    with arena(cores, Servers(count=SERVERS)) as run:
        asks = Mixture(run.routed, seed=1).requests(requests)
        begun = time.monotonic()

        def ended() -> int:
            return sum(sum(each.values()) for each in counts.values())

        async def sample() -> None:
            shown = 0
            while True:
                samples.append((ended(), resident_bytes(run.routed.pid or 0) / 1024))
                if ended() * 10 // max(1, requests) > shown:
                    shown = ended() * 10 // max(1, requests)
                    console.print(f"soak: {ended()} of {requests}, {samples[-1][1]:.0f} KiB")
                await asyncio.sleep(_SAMPLE_S)

        sampler = asyncio.create_task(sample())
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(CLIENTS):
                    tasks.create_task(_play(run.routed, asks, counts))
        finally:
            sampler.cancel()
        seconds = time.monotonic() - begun
        samples.append((ended(), resident_bytes(run.routed.pid or 0) / 1024))
        left = await asyncio.to_thread(_left, run)
    return {**soak_summary(samples, counts, left, requests), "requests_per_s": requests / seconds}
