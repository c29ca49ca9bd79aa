"""A publisher of snapshots and deltas by the real wire format, for one router: it answers what was made before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web

from router_ext.wire.controlplane import (
    BASE_HEADER,
    HEARTBEAT_PATH,
    SNAPSHOT_PATH,
    TOTALS_PATH,
    USAGE_PATH,
    BackendRecord,
    ConfigSnapshot,
    Heartbeat,
    KeyRecord,
    PoolRecord,
    TenantRecord,
    TierRecord,
    Totals,
    UsageAck,
    UsageBatch,
    generate_key,
    key_digest,
    snapshot_digest,
)
from router_ext.wire.deltas import difference

POOL = "bench"


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """What may be answered: the whole, and the delta from the revision before."""

    number: int
    digest: str
    body: bytes
    delta: bytes | None = None


class Author:
    """Writes revisions, one after another.

    Attributes:
        snapshot: the newest. key, new_key: two tenants' keys; the second comes with ``change`` and the first goes.
    """

    def __init__(self, *, pepper: bytes, backend_port: int) -> None:
        self._pepper = pepper
        self.key, self._public_id = generate_key()
        self.new_key, self._new_id = generate_key()
        blank = ConfigSnapshot(
            revision=0,
            published_at_us=1,
            pools=[
                PoolRecord(
                    pool="pol_bench",
                    name=POOL,
                    is_guarded=False,
                    backends=[
                        BackendRecord(
                            backend="bke_bench", name="b", url=f"http://127.0.0.1:{backend_port}", kv_tokens=4096
                        )
                    ],
                )
            ],
            tiers=[TierRecord(name="standard", rank=10), TierRecord(name="interactive", rank=1, ttft_target_s=1.0)],
            tenants=[],
            keys=[],
        )
        self.snapshot = blank
        self._body = b""

    def small(self) -> Revision:
        """One tenant, one key."""
        return self._publish(tenants=[_tenant(0)], keys=[self._own_key(self.key, self._public_id)])

    def large(self, tenants: int, keys: int) -> Revision:
        """So many of both."""
        return self._publish(
            tenants=[_tenant(number) for number in range(tenants)],
            keys=[
                self._own_key(self.key, self._public_id),
                *(_key(number % tenants, f"{number:012d}", f"{number:064x}") for number in range(1, keys)),
            ],
        )

    def change(self) -> Revision:
        """One weight, one new key, one revoked key."""
        tenants, keys = list(self.snapshot.tenants), list(self.snapshot.keys)
        tenants[1] = msgspec.structs.replace(tenants[1], weight=tenants[1].weight + 1.0)
        gone = self._public_id
        self.key, self._public_id = self.new_key, self._new_id
        self.new_key, self._new_id = generate_key()
        keys = [key for key in keys if key.public_id != gone]
        keys.append(self._own_key(self.key, self._public_id))
        return self._publish(tenants=tenants, keys=keys)

    def reweigh(self, count: int) -> Revision:
        """Another weight for so many tenants."""
        tenants = [
            msgspec.structs.replace(record, weight=record.weight + 1.0) if number < count else record
            for number, record in enumerate(self.snapshot.tenants)
        ]
        return self._publish(tenants=tenants, keys=self.snapshot.keys)

    def _publish(self, *, tenants: list[TenantRecord], keys: list[KeyRecord]) -> Revision:
        number = self.snapshot.revision + 1
        blank = msgspec.structs.replace(
            self.snapshot, revision=number, published_at_us=number, tenants=tenants, keys=keys, digest=""
        )
        self.snapshot = msgspec.structs.replace(blank, digest=snapshot_digest(blank))
        before, self._body = self._body, msgspec.json.encode(self.snapshot, order="deterministic")
        delta = msgspec.json.encode(difference(before, self._body), order="deterministic") if before else None
        if delta is not None and len(delta) > len(self._body) // 2:
            delta = None
        return Revision(number=number, digest=self.snapshot.digest, body=self._body, delta=delta)

    def _own_key(self, key: str, public_id: str) -> KeyRecord:
        return _key(0, public_id, key_digest(key, self._pepper))


def _key(owner: int, public_id: str, digest: str) -> KeyRecord:
    return KeyRecord(
        key=f"key_{public_id:0>26}",
        public_id=public_id,
        digest=digest,
        pepper_version=1,
        tenant=_tenant_id(owner),
        default_pool=POOL,
    )


def _tenant_id(number: int) -> str:
    return f"ten_{number:026d}"


def _tenant(number: int) -> TenantRecord:
    return TenantRecord(
        tenant=_tenant_id(number),
        name=f"Tenant {number}",
        weight=1.0 + number % 5,
        tiers=["interactive", "standard"],
        default_tier="standard",
    )


class Publisher:
    """Serves the newest of the revisions given to ``publish``, with deltas or without, and hears heartbeats.

    Attributes:
        applied: number of the newest revision that a heartbeat named. deltas_sent, wholes_sent: answers of each kind.
    """

    def __init__(self, *, on_applied: Callable[[], None]) -> None:
        self.applied = 0
        self.refused: str | None = None
        self.deltas_sent = self.wholes_sent = 0
        self.has_deltas = True
        self._on_applied = on_applied
        self._revisions: list[Revision] = []
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        """Listen on a free port of this machine."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get(SNAPSHOT_PATH, self._snapshot)
        app.router.add_post(HEARTBEAT_PATH, self._heartbeat)
        app.router.add_post(USAGE_PATH, self._usage)
        app.router.add_get(TOTALS_PATH, self._totals)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Close every connection."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def publish(self, revision: Revision) -> None:
        """Make it the newest."""
        async with self._changed:
            self._revisions.append(revision)
            self._changed.notify_all()

    async def _snapshot(self, request: web.Request) -> web.Response:
        held = request.headers.get("If-None-Match", "").strip('"')
        async with self._changed:
            try:
                async with asyncio.timeout(float(request.query.get("wait_s", "0"))):
                    await self._changed.wait_for(lambda: bool(self._revisions) and self._revisions[-1].digest != held)
            except TimeoutError:
                return web.Response(status=304, headers={"ETag": f'"{held}"'})
        newest = self._revisions[-1]
        headers = {"ETag": f'"{newest.digest}"'}
        deltas = self._deltas_since(request.query.get("base", "")) if self.has_deltas else None
        if deltas is not None:
            self.deltas_sent += 1
            headers[BASE_HEADER] = f'"{request.query["base"]}"'
            return web.Response(body=b'{"deltas":[' + b",".join(deltas) + b"]}", headers=headers)
        self.wholes_sent += 1
        return web.Response(body=newest.body, headers=headers)

    def _deltas_since(self, base: str) -> Sequence[bytes] | None:
        digests = [revision.digest for revision in self._revisions]
        if base not in digests:
            return None
        deltas = [revision.delta for revision in self._revisions[digests.index(base) + 1 :]]
        return None if None in deltas or not deltas else [delta for delta in deltas if delta is not None]

    async def _heartbeat(self, request: web.Request) -> web.Response:
        beat = msgspec.json.decode(await request.read(), type=Heartbeat)
        self.refused = beat.refused_reason
        if beat.applied_revision != self.applied:
            self.applied = beat.applied_revision
            self._on_applied()
        return web.Response(status=204)

    async def _usage(self, request: web.Request) -> web.Response:
        batch = msgspec.json.decode(await request.read(), type=UsageBatch)
        return web.Response(body=msgspec.json.encode(UsageAck(accepted=len(batch.events), known=0)))

    async def _totals(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(Totals(as_of_us=1, day="2026-01-01")))
