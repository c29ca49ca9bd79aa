"""A control plane as far as a router sees it: real HTTP on a socket, with the faults a network and a server have."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from router_ext.sync.inflight import FIRST_DISPATCH_US, OUTPUT_TOKENS, PROMPT_TOKENS, RequestStart
from router_ext.sync.ledger import Ledger
from router_ext.sync.session import ControlPlaneSession
from router_ext.wire.controlplane import (
    ARTIFACT_PATH,
    HEARTBEAT_PATH,
    SNAPSHOT_PATH,
    USAGE_PATH,
    ConfigSnapshot,
    GroupRecord,
    Heartbeat,
    KeyRecord,
    PoolRecord,
    TenantRecord,
    TierRecord,
    UsageAck,
    UsageBatch,
    UsageEvent,
    snapshot_digest,
)

TOKEN = "router-token"


class ControlPlane:
    """Keeps the books by ``(arrived_at_us, event)`` and publishes snapshots by long poll.

    ``faults`` are taken one per usage request: "drop" closes before booking, "lose_answer" books and closes,
    a number is answered as status without booking, "short" books and acknowledges one event too few.
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[int, str], UsageEvent] = {}
        self.bodies: list[bytes] = []
        self.faults: list[str | int] = []
        self.poison: set[str] = set()
        self.poison_status = 422
        self.refuses_everything = False
        self.retry_after: str | None = None
        self.snapshot: bytes | None = None
        self.etag = ""
        self.polls: list[str | None] = []
        self.damage_next = False
        self.artifacts: dict[str, bytes] = {}
        self.heartbeats: list[Heartbeat] = []
        self.heartbeat_status = 204
        self.changed = asyncio.Condition()
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post(USAGE_PATH, self._usage)
        app.router.add_get(SNAPSHOT_PATH, self._snapshot)
        app.router.add_get(ARTIFACT_PATH + "{digest}", self._artifact)
        app.router.add_post(HEARTBEAT_PATH, self._heartbeat)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Refuse connections until ``start`` is called again on the same port."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def check(self, request: web.Request) -> None:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise web.HTTPUnauthorized

    async def _usage(self, request: web.Request) -> web.Response:
        self.check(request)
        body = await request.read()
        self.bodies.append(body)
        async with self.changed:
            self.changed.notify_all()
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int):
            return web.Response(status=fault, headers={"Retry-After": self.retry_after} if self.retry_after else None)
        if fault == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        batch = msgspec.json.decode(body, type=UsageBatch)
        if self.refuses_everything or any(event.event in self.poison for event in batch.events):
            return web.Response(status=self.poison_status, text="an event of this batch is malformed")
        known = sum((event.arrived_at_us, event.event) in self.rows for event in batch.events)
        for event in batch.events:
            self.rows.setdefault((event.arrived_at_us, event.event), event)
        async with self.changed:
            self.changed.notify_all()
        if fault == "lose_answer":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        accepted = len(batch.events) - known - (fault == "short")
        return web.Response(body=msgspec.json.encode(UsageAck(accepted=accepted, known=known)))

    async def _snapshot(self, request: web.Request) -> web.Response:
        self.check(request)
        seen = request.headers.get("If-None-Match")
        self.polls.append(seen)
        async with self.changed:
            self.changed.notify_all()
            if self.snapshot is None:
                raise web.HTTPNotFound
            if seen == self.etag:
                try:
                    async with asyncio.timeout(float(request.query.get("wait_s", "0"))):
                        await self.changed.wait_for(lambda: seen != self.etag)
                except TimeoutError:
                    return web.Response(status=304, headers={"ETag": self.etag})
        body = self.snapshot
        if self.damage_next:
            self.damage_next = False
            body = body.replace(b'"weight":1.0', b'"weight":9.0')
        return web.Response(body=body, headers={"ETag": self.etag})

    async def publish(self, snapshot: ConfigSnapshot) -> None:
        self.publish_bytes(msgspec.json.encode(snapshot, order="deterministic"), snapshot.digest)
        async with self.changed:
            self.changed.notify_all()

    def publish_bytes(self, body: bytes, digest: str) -> None:
        self.snapshot = body
        self.etag = f'"{digest}"'

    async def _artifact(self, request: web.Request) -> web.Response:
        self.check(request)
        data = self.artifacts.get(request.match_info["digest"])
        if data is None:
            raise web.HTTPNotFound
        return web.Response(body=data)

    async def _heartbeat(self, request: web.Request) -> web.Response:
        self.check(request)
        if self.heartbeat_status == 204:
            self.heartbeats.append(msgspec.json.decode(await request.read(), type=Heartbeat))
        async with self.changed:
            self.changed.notify_all()
        return web.Response(status=self.heartbeat_status)

    async def wait_for(self, condition: Callable[[], bool], limit_s: float = 10.0) -> None:
        """Return once the condition holds; it is looked at whenever a request came in."""
        async with asyncio.timeout(limit_s), self.changed:
            await self.changed.wait_for(condition)


@pytest.fixture
async def control_plane() -> AsyncIterator[ControlPlane]:
    plane = ControlPlane()
    await plane.start()
    yield plane
    await plane.stop()


@pytest.fixture
async def session(control_plane: ControlPlane) -> AsyncIterator[ControlPlaneSession]:
    session = ControlPlaneSession(control_plane.url, TOKEN)
    yield session
    await session.close()


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = Ledger.open(tmp_path / "router", now_us=1)
    yield ledger
    ledger.close()


def make_start(number: int, **fields: object) -> RequestStart:
    values: dict[str, object] = {
        "event": f"evt_{number:08d}",
        "request": f"req_{number:08d}",
        "router": "rtr_test",
        "tenant": f"ten_{number % 3}",
        "key": "key_1",
        "pool": "pool_1",
        "model": "SmolLM2-135M-Instruct",
        "tier": "interactive",
        "dialect": "generate_stream",
        "arrived_at_us": 1_700_000_000_000_000 + number,
    }
    return RequestStart(**(values | fields))  # type: ignore[arg-type]  # fields of a record, by name


@pytest.fixture
def start() -> Callable[..., RequestStart]:
    return make_start


@pytest.fixture
def book(ledger: Ledger) -> Callable[[int, int], UsageEvent]:
    """Begin and finish request ``number`` with so many output tokens."""

    def book(number: int, output_tokens: int) -> UsageEvent:
        slot = ledger.begin(make_start(number))
        slot.words[FIRST_DISPATCH_US] = 1_700_000_000_000_500 + number
        slot.words[PROMPT_TOKENS] = 10
        slot.words[OUTPUT_TOKENS] = output_tokens
        return ledger.finish(
            slot, outcome="completed", ended_at_us=1_700_000_000_900_000 + number, finish_reason="eos_token"
        )

    return book


@pytest.fixture
def make_snapshot() -> Callable[..., ConfigSnapshot]:
    def make(revision: int, *, n_keys: int = 2, pools: list[PoolRecord] | None = None) -> ConfigSnapshot:
        blank = ConfigSnapshot(
            revision=revision,
            published_at_us=1_700_000_000_000_000 + revision,
            pools=pools or [PoolRecord(pool="pool_1", name="model", scheduling={"policy": "fifo", "gamma": 0.5})],
            tiers=[TierRecord(name="interactive", rank=10, ttft_target_s=0.5)],
            tenants=[TenantRecord(tenant=f"ten_{i}", name=f"Tenant {i}", group="research") for i in range(3)],
            groups=[GroupRecord(group="research", weight=2.0)],
            keys=[
                KeyRecord(
                    key=f"key_{i}",
                    public_id=f"{i:012d}",
                    digest=hashlib.sha256(str(i).encode()).hexdigest(),
                    pepper_version=1,
                    tenant=f"ten_{i % 3}",
                    default_pool="model",
                )
                for i in range(n_keys)
            ],
        )
        return msgspec.structs.replace(blank, digest=snapshot_digest(blank))

    return make
