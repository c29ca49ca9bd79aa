"""Four model servers, a router in front of them, and an orchestrator that looks after the servers.

Everything runs in processes of its own, on free ports and in a temporary folder; all of it is gone when the context is
left, and when this process ends in whatever way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec

from router_ext.devserver.smollm import load_tokenizer
from router_ext.errors import FairlaneError
from router_ext.ops import process
from router_ext.ops.embedded import free_port
from router_ext.wire.controlplane import (
    BackendRecord,
    ConfigSnapshot,
    KeyRecord,
    PoolRecord,
    TenantRecord,
    TierRecord,
    generate_key,
    key_digest,
    snapshot_digest,
)

BACKENDS = 4
FROZEN_S = 5.0
"""Without an answer of ``/health`` for so long a server is frozen."""

RESTART_S = 5.0
"""From the detection of a dead or frozen server to its restart."""

TENANTS = ("streams", "answers", "hostile")
_LOOK_S = 0.25
_START_LIMIT_S = 120.0
_COMMAND = [sys.executable, "-m", "router_ext.cli"]


@dataclass(frozen=True, slots=True)
class Loss:
    """A server was found dead or frozen. ``at_s``: on the monotonic clock."""

    backend: str
    kind: str
    at_s: float


@dataclass(slots=True)
class Server:
    """One model server and what the orchestrator knows of it."""

    name: str
    port: int
    log: Path
    flags: list[str]
    process: subprocess.Popen[bytes] | None = None
    answered_s: float = 0.0

    def start(self) -> None:
        """Start it, or start it again."""
        if self.process is not None:
            process.kill_session(self.process)
            self.process.wait()
        command = [*_COMMAND, "devserver", "--engine", "model", "--port", str(self.port), *self.flags]
        self.process = process.spawn(command, log=self.log)

    @property
    def is_dead(self) -> bool:
        return self.process is None or self.process.poll() is not None


class Orchestrator:
    """Asks every server for its health, as a container platform does, and starts anew what is dead or stays frozen.

    Attributes:
        losses: what was found dead or frozen, each time once.
    """

    def __init__(self, servers: list[Server], session: aiohttp.ClientSession) -> None:
        self.losses: list[Loss] = []
        self._servers = servers
        self._session = session

    async def started(self) -> None:
        """Start all servers and wait until they answer.

        Raises:
            FairlaneError: one does not.
        """
        for server in self._servers:
            server.start()
        await asyncio.gather(*(self._wait(server) for server in self._servers))

    async def run(self) -> None:
        """Look after the servers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for server in self._servers:
                tasks.create_task(self._look_after(server))

    async def _look_after(self, server: Server) -> None:
        while True:
            answering = asyncio.create_task(self._ask(server, "/health"))
            try:
                while not answering.done() and not server.is_dead and time.monotonic() < server.answered_s + FROZEN_S:
                    await asyncio.wait([answering], timeout=_LOOK_S)
                if server.is_dead or not answering.done():
                    self.losses.append(Loss(server.name, "dead" if server.is_dead else "frozen", time.monotonic()))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(RESTART_S):
                            # It may only have stalled: then its answer comes after all.
                            await (asyncio.Event().wait() if server.is_dead else asyncio.shield(answering))
                    if server.is_dead or not answering.done():
                        server.start()
                        await self._wait(server)
            finally:
                answering.cancel()
            await asyncio.sleep(_LOOK_S)

    async def _ask(self, server: Server, path: str) -> None:
        """Ask until it answers."""
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with self._session.get(f"http://127.0.0.1:{server.port}{path}") as answer:
                    if answer.status == 200:
                        server.answered_s = time.monotonic()
                        return
            await asyncio.sleep(_LOOK_S)

    async def _wait(self, server: Server) -> None:
        """Wait until it has started; it may have been given something that freezes it by then."""
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                await self._ask(server, "/info")
        except TimeoutError:
            raise FairlaneError(f"{server.name} does not start; its log ends:\n{process.tail(server.log)}") from None


@dataclass(slots=True, kw_only=True)
class Arena:
    """What a phase runs in. ``keys``: by tenant."""

    url: str
    admin_url: str
    admin_token: str
    keys: Mapping[str, str]
    orchestrator: Orchestrator
    session: aiohttp.ClientSession
    servers: list[Server] = field(default_factory=list)

    async def timeline(self, request: str) -> list[dict[str, str]]:
        """Steps of a request, as the router tells an operator; empty if it never was in a queue."""
        headers = {"authorization": f"Bearer {self.admin_token}"}
        async with self.session.get(f"{self.admin_url}/requests/{request}", headers=headers) as answer:
            if answer.status != 200:
                return []
            found: list[dict[str, str]] = (await answer.json())["requests"][0]["timeline"]
            return found


@contextlib.asynccontextmanager
async def arena(folder: Path, *, is_guarded: bool) -> AsyncIterator[Arena]:
    """Servers and router on their ports, all ready; the orchestrator at work."""
    model = _prepared(folder)
    servers = [Server(f"bke_{n}", free_port(), folder / f"server-{n}.log", _flags(model)) for n in range(BACKENDS)]
    keys = {tenant: generate_key() for tenant in TENANTS}
    pepper, admin_token = secrets.token_bytes(32), secrets.token_hex(24)
    tokenizer = next(model.rglob("tokenizer.json"))
    snapshot = _snapshot(servers, keys, pepper, tokenizer=tokenizer, is_guarded=is_guarded)
    (folder / "snapshot.json").write_bytes(msgspec.json.encode(snapshot))
    port, admin_port = free_port(), free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FAIRLANE_")} | {
        "FAIRLANE_ROUTER_PORT": str(port),
        "FAIRLANE_ROUTER_DIR": str(folder / "router"),
        "FAIRLANE_ROUTER_SNAPSHOT_FILE": str(folder / "snapshot.json"),
        "FAIRLANE_KEY_PEPPER": pepper.hex(),
        "FAIRLANE_ADMIN_TOKEN": admin_token,
        "FAIRLANE_ADMIN_PORT": str(admin_port),
    }
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    router: subprocess.Popen[bytes] | None = None
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        orchestrator = Orchestrator(servers, session)
        looking: asyncio.Task[None] | None = None
        try:
            await orchestrator.started()
            looking = asyncio.create_task(orchestrator.run())
            router = process.spawn([*_COMMAND, "router"], env=environment, log=folder / "router.log")
            made = Arena(
                url=f"http://127.0.0.1:{port}",
                admin_url=f"http://127.0.0.1:{admin_port}",
                admin_token=admin_token,
                keys={tenant: key for tenant, (key, _) in keys.items()},
                orchestrator=orchestrator,
                session=session,
                servers=servers,
            )
            await _router_ready(made, router, folder / "router.log")
            yield made
        finally:
            if looking is not None:
                looking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await looking
            for each in (router, *(server.process for server in servers)):
                if each is not None:
                    process.kill_session(each)
                    each.wait()


async def _router_ready(made: Arena, router: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the router has every server up.

    Raises:
        FairlaneError: it ended, or was not ready in time.
    """
    headers = {"authorization": f"Bearer {made.admin_token}"}
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline and router.poll() is None:
        with contextlib.suppress(aiohttp.ClientError):
            async with made.session.get(f"{made.admin_url}/readyz", headers=headers) as answer:
                states = (await answer.json())["backends"].get("bench", {}).values()
                if len(states) == BACKENDS and all(each["state"] == "up" for each in states):
                    return
        await asyncio.sleep(0.2)
    raise FairlaneError(f"the router is not ready; its log ends:\n{process.tail(log)}")


def _prepared(folder: Path) -> Path:
    """Make the phase's folder; the model's, with its tokenizer, is the same for all phases."""
    model = folder.parent / "model"
    load_tokenizer(model)
    folder.mkdir()
    return model


def _flags(model: Path) -> list[str]:
    sizes = {"input-tokens": 4096, "total-tokens": 6144, "batch-prefill-tokens": 4096, "batch-total-tokens": 40_000}
    limits = [word for name, value in sizes.items() for word in (f"--max-{name}", str(value))]
    return [*limits, "--sim-hazards", "--sim-mean-tokens", "0", "--sim-step-ms", "20", "--sim-data-dir", str(model)]


def _snapshot(
    servers: list[Server],
    keys: Mapping[str, tuple[str, str]],
    pepper: bytes,
    *,
    tokenizer: Path,
    is_guarded: bool,
) -> ConfigSnapshot:
    snapshot = ConfigSnapshot(
        revision=1,
        published_at_us=time.time_ns() // 1_000,
        pools=[
            PoolRecord(
                pool="pol_bench",
                name="bench",
                tokenizer_path=str(tokenizer),
                is_guarded=is_guarded,
                backends=[
                    BackendRecord(
                        backend=server.name,
                        name=server.name,
                        url=f"http://127.0.0.1:{server.port}",
                        kv_tokens=40_000,
                        block_size=16,
                        prefill_budget_tokens=4_096,
                    )
                    for server in servers
                ],
            )
        ],
        tiers=[TierRecord(name="standard", rank=10)],
        tenants=[
            TenantRecord(tenant=f"ten_{name}", name=name, tiers=["standard"], default_tier="standard") for name in keys
        ],
        keys=[
            KeyRecord(
                key=f"key_{name}",
                public_id=public_id,
                digest=key_digest(key, pepper),
                pepper_version=1,
                tenant=f"ten_{name}",
                default_pool="bench",
            )
            for name, (key, public_id) in keys.items()
        ],
    )
    return msgspec.structs.replace(snapshot, digest=snapshot_digest(snapshot))
