"""A control plane as far as a router sees it: real HTTP on a socket, with the faults a network and a server have."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import msgspec
from aiohttp import web

from router_ext.wire.controlplane import (
    ARTIFACT_PATH,
    BASE_HEADER,
    HEARTBEAT_PATH,
    SNAPSHOT_PATH,
    TOTALS_PATH,
    USAGE_PATH,
    ConfigSnapshot,
    Heartbeat,
    Totals,
    UsageAck,
    UsageBatch,
    UsageEvent,
)
from router_ext.wire.deltas import difference

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
        self.revisions: list[bytes] | None = None
        """With a list deltas are answered to those that ask for them; without one as by an older control plane."""
        self.answers: list[str] = []
        self.artifacts: dict[str, bytes] = {}
        self.booked_at_us = 0
        self.totals: Totals | None = None
        self.asked_since: list[int] = []
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
        app.router.add_get(TOTALS_PATH, self._totals)
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
        return web.Response(
            body=msgspec.json.encode(UsageAck(accepted=accepted, known=known, booked_at_us=self.booked_at_us))
        )

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
        deltas = self._deltas_since(request.query.get("base", ""))
        if deltas:
            self.answers.append("delta")
            text = b'{"deltas":[' + b",".join(deltas) + b"]}"
            if self.damage_next:
                self.damage_next = False
                text = text.replace(b'"weight":', b'"weigth":')
            return web.Response(body=text, headers={"ETag": self.etag, BASE_HEADER: f'"{request.query["base"]}"'})
        self.answers.append("whole")
        if self.damage_next:
            self.damage_next = False
            body = body.replace(b'"weight":1.0', b'"weight":9.0')
        return web.Response(body=body, headers={"ETag": self.etag})

    def _deltas_since(self, base: str) -> list[bytes]:
        digests = [msgspec.json.decode(body, type=ConfigSnapshot).digest for body in self.revisions or []]
        if base not in digests:
            return []
        steps = itertools.pairwise((self.revisions or [])[digests.index(base) :])
        return [msgspec.json.encode(difference(old, new), order="deterministic") for old, new in steps]

    async def publish(self, snapshot: ConfigSnapshot) -> None:
        self.publish_bytes(msgspec.json.encode(snapshot, order="deterministic"), snapshot.digest)
        async with self.changed:
            self.changed.notify_all()

    def publish_bytes(self, body: bytes, digest: str) -> None:
        self.snapshot = body
        if self.revisions is not None:
            self.revisions.append(body)
        self.etag = f'"{digest}"'

    async def _artifact(self, request: web.Request) -> web.Response:
        self.check(request)
        data = self.artifacts.get(request.match_info["digest"])
        if data is None:
            raise web.HTTPNotFound
        return web.Response(body=data)

    async def _totals(self, request: web.Request) -> web.Response:
        self.check(request)
        self.asked_since.append(int(request.query["since_us"]))
        async with self.changed:
            self.changed.notify_all()
        if self.totals is None:
            raise web.HTTPNotFound
        return web.Response(body=msgspec.json.encode(self.totals))

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
