"""The processes of one measurement: model servers, a router on a snapshot of its own, and plain relays beside it.

The router (and each relay) has one core, everything else the other, where the machine has two. All of it runs on free
ports and in a temporary folder, and is gone when the context is left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from router_ext.errors import FairlaneError
from router_ext.ops import process
from router_ext.ops.embedded import free_port
from router_ext.ops.gatewaybench.peers import PEERS
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

_READY_LIMIT_S = 60.0
_COMMAND = [sys.executable, "-m", "router_ext.cli"]


class BenchFailed(FairlaneError):
    """A process of the bench did not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go. ``pid``: of the process that relays them, None where there is none."""

    name: str
    port: int
    key: str | None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Cores:
    """Which core the relay under test has, and which the others. None: the system decides."""

    relay: int | None
    others: int | None

    @classmethod
    def of_machine(cls) -> Cores:
        """The first two of those this process may use."""
        usable = sorted(os.sched_getaffinity(0))
        return cls(usable[0], usable[1]) if len(usable) > 1 else cls(None, None)

    def describe(self) -> str:
        """For the reader of the figures."""
        if self.relay is None:
            return "one core for everything"
        return f"router and relays on core {self.relay}, load and servers on core {self.others}"

    def pin(self, pid: int, core: int | None) -> None:
        """Keep a process that was just started, and what it will start, on a core."""
        if core is not None:
            os.sched_setaffinity(pid, {core})


@dataclass(slots=True, kw_only=True)
class Arena:
    """What runs. ``servers``: processes and ports, in the order asked for. ``admin_port``: the router's."""

    folder: Path
    cores: Cores
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    server_ports: list[int] = field(default_factory=list)
    router: subprocess.Popen[bytes]
    routed: Target
    peers: list[Target] = field(default_factory=list)
    admin_port: int
    admin_token: str

    @property
    def direct(self) -> Target:
        """The first server itself."""
        return Target(name="direct", port=self.server_ports[0], key=None)

    def log_of(self, server: int) -> list[bytes]:
        """What a server with ``keeps_log`` has received: lines of instant and name."""
        return (self.folder / f"received-{server}").read_bytes().splitlines()


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Which servers to start.

    ``has_model``: the model engine of the devserver, else ``pacer``. ``interval_us``: between the tokens of a stream.
    """

    has_model: bool = False
    count: int = 1
    interval_us: int = 0
    seats: int = 100_000
    has_stamps: bool = False
    keeps_log: bool = False

    def command(self, folder: Path, number: int, port: int) -> list[str]:
        """How one of them is started."""
        if self.has_model:
            return [
                *_COMMAND, "devserver", "--engine", "model", "--port", str(port),
                "--max-input-tokens", "2048", "--max-total-tokens", "4096",
                "--max-batch-prefill-tokens", "65536", "--max-batch-total-tokens", "4000000",
                "--max-concurrent-requests", str(self.seats),
                "--sim-step-ms", f"{self.interval_us / 1_000:g}", "--sim-mean-tokens", "0",
                "--sim-data-dir", str(folder / "model"),
            ]  # fmt: skip
        words = [sys.executable, "-m", "router_ext.ops.gatewaybench.pacer", "--port", str(port)]
        words += ["--interval-us", str(self.interval_us), "--seats", str(self.seats)]
        words += ["--stamps"] if self.has_stamps else []
        return [*words, "--log", str(folder / f"received-{number}")] if self.keeps_log else words


@contextlib.contextmanager
def arena(
    cores: Cores, servers: Servers, *, peers: Sequence[str] = (), settings: Mapping[str, str] | None = None
) -> Iterator[Arena]:
    """Start everything.

    Args:
        peers: names of ``PEERS`` to start as well; those not installed are left out.
        settings: further variables of the router's environment.

    Raises:
        BenchFailed: a process did not come up; the message has the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="fairlane-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)

        def start(what: str, command: Sequence[str], core: int | None, **options: Mapping[str, str]) -> _Started:
            log = folder / f"{what}.log"
            started = process.spawn(command, log=log, env=options.get("env"))
            stack.callback(_end, started)
            cores.pin(started.pid, core)
            return _Started(started, log, what)

        ports = [free_port() for _ in range(servers.count)]
        running = [start(f"server-{i}", servers.command(folder, i, port), cores.others) for i, port in enumerate(ports)]
        for each, port in zip(running, ports, strict=True):
            each.wait_ready(port, "/health")
        key, public_id = generate_key()
        pepper = secrets.token_bytes(32)
        snapshot = _snapshot(ports, key=key, public_id=public_id, pepper=pepper)
        file = folder / "snapshot.json"
        file.write_bytes(msgspec.json.encode(snapshot))
        router_port, admin_port, token = free_port(), free_port(), secrets.token_hex(24)
        environment = {
            **os.environ,
            "FAIRLANE_ROUTER_PORT": str(router_port),
            "FAIRLANE_ROUTER_DIR": str(folder / "router"),
            "FAIRLANE_ROUTER_SNAPSHOT_FILE": str(file),
            "FAIRLANE_ROUTER_LOG_LEVEL": "warning",
            "FAIRLANE_KEY_PEPPER": pepper.hex(),
            "FAIRLANE_ADMIN_PORT": str(admin_port),
            "FAIRLANE_ADMIN_TOKEN": token,
            **(settings or {}),
        }
        router = start("router", [*_COMMAND, "router"], cores.relay, env=environment)
        router.wait_ready(router_port, "/readyz")
        result = Arena(
            folder=folder,
            cores=cores,
            servers=[each.process for each in running],
            server_ports=ports,
            router=router.process,
            routed=Target(name="router", port=router_port, key=key, pid=router.process.pid),
            admin_port=admin_port,
            admin_token=token,
        )
        for peer in peers:
            if (program := shutil.which(peer, path=_PROGRAMS)) is None:
                continue
            port = free_port()
            command = PEERS[peer](program, folder, port, ports[0], key)
            started = start(peer, command, cores.relay)
            started.wait_ready(port, "/health", key=key)
            result.peers.append(Target(name=peer, port=port, key=key, pid=started.process.pid))
        yield result


_PROGRAMS = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
"""Where a system keeps relays: not always in the path of a user."""


@dataclass(frozen=True, slots=True)
class _Started:
    process: subprocess.Popen[bytes]
    log: Path
    what: str

    def wait_ready(self, port: int, path: str, key: str | None = None) -> None:
        deadline = time.monotonic() + _READY_LIMIT_S
        auth = f"authorization: Bearer {key}\r\n" if key else ""
        request = f"GET {path} HTTP/1.1\r\nhost: bench\r\n{auth}connection: close\r\n\r\n".encode()
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
                peer.sendall(request)
                if peer.recv(64).startswith(b"HTTP/1.1 200"):
                    return
            time.sleep(0.05)
        why = "was not ready in time" if self.process.poll() is None else f"ended with code {self.process.returncode}"
        raise BenchFailed(f"{self.what} {why}:\n{process.tail(self.log)}")


def _end(started: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        # One that a measurement has stopped takes no other signal.
        started.send_signal(signal.SIGCONT)
    process.stop(started)


def _snapshot(ports: Sequence[int], *, key: str, public_id: str, pepper: bytes) -> ConfigSnapshot:
    backends = [
        BackendRecord(
            backend=f"bke_{number}",
            name=f"bench-{number}",
            url=f"http://127.0.0.1:{port}",
            kv_tokens=40_000_000,
            block_size=16,
            prefill_budget_tokens=65_536,
        )
        for number, port in enumerate(ports)
    ]
    snapshot = ConfigSnapshot(
        revision=1,
        published_at_us=time.time_ns() // 1_000,
        pools=[PoolRecord(pool="pol_bench", name="bench", scheduling={"policy": "slo-fair"}, backends=backends)],
        tiers=[TierRecord(name="standard", rank=10)],
        tenants=[
            TenantRecord(
                tenant="ten_bench", name="bench", tiers=["standard"], default_tier="standard", max_queued=10_000
            )
        ],
        keys=[
            KeyRecord(
                key="key_bench",
                public_id=public_id,
                digest=key_digest(key, pepper),
                pepper_version=1,
                tenant="ten_bench",
                default_pool="bench",
            )
        ],
    )
    return msgspec.structs.replace(snapshot, digest=snapshot_digest(snapshot))
