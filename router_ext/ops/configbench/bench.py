"""``fairlane bench config``: from the publication of a change to its being in force, and how long the loop stood still.

A real router process follows a publisher of the real wire format in this one. It begins with one tenant and then gets,
while it serves: all tenants and keys, whole; one weight, one new key and one revoked key, as a delta; another weight
for a tenth of the tenants, as a delta; and another weight for as many, whole, as from a control plane without deltas.

A stall is by how much later than asked for a task of the router's loop woke that asks for every millisecond. What the
machine itself adds is measured first, with nothing to do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from router_ext.errors import FairlaneError
from router_ext.ops import process
from router_ext.ops.configbench.publisher import Author, Publisher, Revision
from router_ext.ops.embedded import free_port

_SETTLED_S = 1.0
"""Watched after a revision is in force: what it replaced is let go of then."""
_LIMIT_S = 120.0


class ConfigBenchFailed(FairlaneError):
    """The router did not come up, or did not follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One revision.

    ``apply_s``: until a heartbeat said it is in force. ``stall_ms``: longest stall of the loop. ``own_stall_ms``: the
    longest of which no more counts than the processor time that the router used meanwhile, so that others on a busy
    machine add nothing.
    """

    apply_s: float
    stall_ms: float
    own_stall_ms: float
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All changes of one run. ``idle_stall_ms``: longest stall in two seconds without a change."""

    tenants: int
    keys: int
    idle_stall_ms: float
    base: Change
    delta: Change
    large_delta: Change
    whole: Change

    def as_json(self) -> dict[str, object]:
        """Flat figures first, then everything."""
        return {
            "base_apply_s": self.base.apply_s,
            "base_stall_ms": self.base.stall_ms,
            "delta_apply_ms": self.delta.apply_s * 1_000,
            "delta_stall_ms": self.delta.stall_ms,
            "bytes_base": self.base.size_bytes,
            "bytes_delta": self.delta.size_bytes,
            **asdict(self),
        }


class _Bench:
    def __init__(self, folder: Path, publisher: Publisher, port: int, applied: asyncio.Event) -> None:
        self._stalls = folder / "stalls"
        self._publisher = publisher
        self._applied = applied
        self._url = f"http://127.0.0.1:{port}/v1/models"

    def longest_ms(self, since: float, until: float) -> tuple[float, float]:
        """The longest stall of the router's loop between two instants, and the longest that the router itself made."""
        late = own = 0.0
        for line in self._stalls.read_text().splitlines():
            at, by_ms, used_ms = map(float, line.split())
            # A stall ends at its instant, and began that much earlier.
            if since <= at and at - by_ms / 1_000 <= until:
                late = max(late, by_ms)
                own = max(own, min(by_ms, used_ms))
        return late, own

    async def follow(self, revision: Revision, *, is_delta: bool) -> Change:
        """Publish, and wait until it is in force.

        Raises:
            ConfigBenchFailed: it is not, or it came in another way.
        """
        before = self._publisher.deltas_sent
        began = time.monotonic()
        await self._publisher.publish(revision)
        try:
            async with asyncio.timeout(_LIMIT_S):
                while self._publisher.applied != revision.number:
                    self._applied.clear()
                    await self._applied.wait()
        except TimeoutError:
            raise ConfigBenchFailed(
                f"revision {revision.number}: {self._publisher.refused or 'not in force'}"
            ) from None
        ended = time.monotonic()
        await asyncio.sleep(_SETTLED_S)
        if (self._publisher.deltas_sent > before) is not is_delta:
            raise ConfigBenchFailed(f"revision {revision.number} came as {'a whole' if is_delta else 'a delta'}")
        size = len(revision.delta) if is_delta and revision.delta is not None else len(revision.body)
        stall_ms, own_ms = self.longest_ms(began, time.monotonic())
        return Change(apply_s=ended - began, stall_ms=stall_ms, own_stall_ms=own_ms, size_bytes=size)

    async def status_of(self, session: aiohttp.ClientSession, key: str) -> int:
        """What the router answers to a key."""
        async with session.get(self._url, headers={"Authorization": f"Bearer {key}"}) as answer:
            return answer.status


async def measure(tenants: int, keys: int) -> Result:
    """Run everything once.

    Raises:
        ConfigBenchFailed: the router did not come up, did not follow, or did not do what a revision said.
    """
    pepper = secrets.token_bytes(32)
    author = Author(pepper=pepper, backend_port=free_port())
    small, old_key = author.small(), author.key
    base = author.large(tenants, keys)
    delta, new_key = author.change(), author.key
    large_delta = author.reweigh(max(1, tenants // 10))
    whole = author.reweigh(max(1, tenants // 10))
    applied = asyncio.Event()
    publisher = Publisher(on_applied=applied.set)
    await publisher.start()
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="fairlane-bench-") as name:
        folder = Path(name)
        bench = _Bench(folder, publisher, port, applied)
        try:
            with _router(folder, publisher.url, port, pepper):
                await bench.follow(small, is_delta=False)
                began = time.monotonic()
                await asyncio.sleep(2.0)
                idle_ms, _ = bench.longest_ms(began, time.monotonic())
                async with aiohttp.ClientSession() as session:
                    first = await bench.follow(base, is_delta=False)
                    statuses = [await bench.status_of(session, key) for key in (old_key, new_key)]
                    second = await bench.follow(delta, is_delta=True)
                    statuses += [await bench.status_of(session, key) for key in (old_key, new_key)]
                    if statuses != [200, 401, 401, 200]:
                        raise ConfigBenchFailed(f"the keys before and after the change were answered {statuses}")
                    third = await bench.follow(large_delta, is_delta=True)
                    publisher.has_deltas = False
                    fourth = await bench.follow(whole, is_delta=False)
        finally:
            await publisher.stop()
    return Result(
        tenants=tenants,
        keys=keys,
        idle_stall_ms=idle_ms,
        base=first,
        delta=second,
        large_delta=third,
        whole=fourth,
    )


@contextlib.contextmanager
def _router(folder: Path, url: str, port: int, pepper: bytes) -> Iterator[subprocess.Popen[bytes]]:
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FAIRLANE_")},
        "FAIRLANE_CONTROLPLANE_URL": url,
        "FAIRLANE_ROUTER_TOKEN": secrets.token_urlsafe(24),
        "FAIRLANE_ROUTER_DIR": str(folder / "router"),
        "FAIRLANE_ROUTER_PORT": str(port),
        "FAIRLANE_ROUTER_PREDICTOR": "false",
        "FAIRLANE_ROUTER_LOG_LEVEL": "warning",
        "FAIRLANE_KEY_PEPPER": pepper.hex(),
    }
    command = [sys.executable, "-m", "router_ext.ops.configbench.watched", str(folder / "stalls")]
    log = folder / "router.log"
    started = process.spawn(command, log=log, env=env)
    try:
        yield started
    except ConfigBenchFailed as failed:
        raise ConfigBenchFailed(f"{failed.message}\n{process.tail(log)}") from None
    finally:
        process.stop(started)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenants", type=int, default=10_000, help="tenants of the large configuration")
    parser.add_argument("--keys", type=int, default=100_000, help="their keys")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """0: measured."""
    result = asyncio.run(measure(args.tenants, args.keys))
    if args.json:
        print(json.dumps(result.as_json()))
        return 0
    print(f"{result.tenants:,} tenants, {result.keys:,} keys; stall without a change {result.idle_stall_ms:.1f} ms")
    rows = {
        "all of it, whole, the first time": result.base,
        "one weight, one key, one revoked key: delta": result.delta,
        "a tenth of the weights: delta": result.large_delta,
        "a tenth of the weights: whole": result.whole,
    }
    print(f"{'':46}{'bytes':>14}{'in force, ms':>14}{'stall, ms':>11}{'its own':>9}")
    for name, change in rows.items():
        size, apply_ms = f"{change.size_bytes:,}", f"{change.apply_s * 1_000:,.0f}"
        print(f"{name:46}{size:>14}{apply_ms:>14}{change.stall_ms:>11.1f}{change.own_stall_ms:>9.1f}")
    return 0
