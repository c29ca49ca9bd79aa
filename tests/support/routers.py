"""A router as a process of its own on a snapshot file, with tenants and keys made for the test."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from router_ext import compiled
from router_ext.ops.embedded import free_port
from router_ext.sync.spool import scan
from router_ext.wire.controlplane import (
    BackendRecord,
    ConfigSnapshot,
    GroupRecord,
    KeyRecord,
    PoolRecord,
    TenantRecord,
    TierRecord,
    UsageEvent,
    generate_key,
    key_digest,
    snapshot_digest,
)

START_LIMIT_S = 60.0
HELD = (
    "fairlane_queue_length",
    "fairlane_queue_bytes",
    "fairlane_parked_requests",
    "fairlane_inflight_requests",
    "fairlane_tenant_queue_length",
    "fairlane_tenant_inflight_requests",
    "fairlane_backend_running_requests",
    "fairlane_backend_reservations",
    "fairlane_backend_reserved_tokens",
    "fairlane_limit_reservations",
    "fairlane_limit_reserved_tokens",
    "fairlane_paused_clients",
)
"""Gauges of what requests hold: all 0 when there are none."""


@dataclass(slots=True)
class Setup:
    """What a test's router knows: pools, tiers, tenants and their keys. Change it, then ``publish``."""

    backends: list[BackendRecord]
    scheduling: dict[str, Any] = field(default_factory=dict)
    tokenizer_path: str | None = None
    tiers: list[TierRecord] = field(
        default_factory=lambda: [
            TierRecord(name="standard", rank=10),
            TierRecord(name="interactive", rank=1, ttft_target_s=1.0),
        ]
    )
    tenants: dict[str, TenantRecord] = field(default_factory=dict)
    groups: list[GroupRecord] = field(default_factory=list)
    keys: dict[str, KeyRecord] = field(default_factory=dict)
    pepper: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    revision: int = 0

    def tenant(self, name: str, **fields: Any) -> None:
        values = {"tiers": ["standard", "interactive"], "default_tier": "standard", **fields}
        self.tenants[name] = TenantRecord(tenant=f"ten_{name}", name=name, **values)

    def key(self, tenant: str, **fields: Any) -> str:
        """Issue a key for a tenant (made if missing); returns its text."""
        if tenant not in self.tenants:
            self.tenant(tenant)
        text, public_id = generate_key()
        values = {"default_pool": "main", **fields}
        self.keys[text] = KeyRecord(
            key=f"key_{public_id}",
            public_id=public_id,
            digest=key_digest(text, self.pepper),
            pepper_version=1,
            tenant=f"ten_{tenant}",
            **values,
        )
        return text

    def snapshot(self) -> ConfigSnapshot:
        self.revision += 1
        blank = ConfigSnapshot(
            revision=self.revision,
            published_at_us=time.time_ns() // 1_000,
            pools=[
                PoolRecord(
                    pool="pol_main",
                    name="main",
                    aliases=["smol"],
                    scheduling={"policy": "slo-fair", **self.scheduling},
                    backends=self.backends,
                    tokenizer_path=self.tokenizer_path,
                )
            ],
            tiers=self.tiers,
            tenants=list(self.tenants.values()),
            keys=list(self.keys.values()),
            groups=self.groups,
        )
        return msgspec.structs.replace(blank, digest=snapshot_digest(blank))


def backend(port: int, name: str = "one", **fields: Any) -> BackendRecord:
    values = {"kv_tokens": 20_000, "block_size": 16, **fields}
    return BackendRecord(backend=f"bke_{name}", name=name, url=f"http://127.0.0.1:{port}", **values)


@dataclass(slots=True)
class RouterProcess:
    """A running router. ``process`` may be killed by the test."""

    port: int
    admin_port: int
    admin_token: str
    directory: Path
    snapshot_file: Path
    setup: Setup
    process: subprocess.Popen[bytes]
    log: Path
    command: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def publish(self) -> None:
        """Put the setup as it stands in force, and wait until it is."""
        write_snapshot(self.snapshot_file, self.setup.snapshot())
        self.wait(lambda: self.metric("fairlane_applied_revision") == self.setup.revision)

    def metrics_page(self) -> str:
        """Everything the admin port tells Prometheus."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.admin_port}/metrics", headers={"Authorization": f"Bearer {self.admin_token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the series of ``name`` with these labels on the admin port; 0 if there is none."""
        total = 0.0
        for line in self.metrics_page().splitlines():
            match = re.match(rf"{name}(?:\{{(.*)\}})? (\S+)$", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total += float(match[2])
        return total

    @contextlib.contextmanager
    def successor(self, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
        """Another process that replaces this one; the caller waits for what it expects. Ended with the block."""
        with self.log.open("ab") as sink:
            process = subprocess.Popen(
                [*self.command, "--take-over"], env=self.environment | variables, stdout=sink, stderr=sink
            )
        try:
            yield process
        finally:
            end(process)

    def wait(self, condition: Any, limit_s: float = 20.0) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"not within {limit_s} s; log:\n{self.log.read_text()[-4_000:]}"
            time.sleep(0.01)

    def usage(self) -> list[UsageEvent]:
        """Every event in the router's spool, oldest first."""
        return [
            msgspec.json.decode(item[1], type=UsageEvent)
            for path in sorted((self.directory / "spool").glob("*.seg"))
            for item in scan(path.read_bytes())
            if isinstance(item, tuple)
        ]

    def is_idle(self) -> bool:
        """Nothing queued, running or reserved."""
        values = [line.split() for line in self.metrics_page().splitlines() if line.startswith(HELD)]
        assert {name.partition("{")[0] for name, _ in values} <= set(HELD)
        return all(float(value) == 0 for _, value in values)


def write_snapshot(path: Path, snapshot: ConfigSnapshot) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(snapshot))
    part.replace(path)


@contextlib.contextmanager
def router(
    setup: Setup,
    *,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    is_awaited: bool = True,
    descriptors: Sequence[int] = (),
    program: str = "router",
) -> Iterator[RouterProcess]:
    """Start ``fairlane router`` on a snapshot file and wait until it is ready (``is_awaited``).

    Args:
        descriptors: open files that the router inherits.
        program: ``router``, or ``serve`` for one with a supervisor.
    """
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fairlane-router-")))
        folder = directory or root / "state"
        snapshot_file = root / "snapshot.json"
        write_snapshot(snapshot_file, setup.snapshot())
        port, admin_port = int((environment or {}).get("FAIRLANE_ROUTER_PORT", free_port())), free_port()
        token = secrets.token_hex(16)
        log = root / "log"
        command = [sys.executable, "-m", "router_ext.cli", program, *arguments]
        variables = {
            **{k: v for k, v in os.environ.items() if k in compiled.VARIABLES or not k.startswith("FAIRLANE_")},
            "FAIRLANE_ROUTER_PORT": str(port),
            "FAIRLANE_ROUTER_DIR": str(folder),
            "FAIRLANE_ROUTER_SNAPSHOT_FILE": str(snapshot_file),
            "FAIRLANE_KEY_PEPPER": setup.pepper.hex(),
            "FAIRLANE_ADMIN_PORT": str(admin_port),
            "FAIRLANE_ADMIN_TOKEN": token,
            "FAIRLANE_ROUTER_HEALTH_INTERVAL_S": "0.2",
            **(environment or {}),
        }
        with log.open("wb") as sink:
            process = subprocess.Popen(command, env=variables, stdout=sink, stderr=sink, pass_fds=descriptors)
        running = RouterProcess(port, admin_port, token, folder, snapshot_file, setup, process, log, command, variables)
        try:
            deadline = time.monotonic() + START_LIMIT_S
            while not _answers(running.base + ("/readyz" if is_awaited else "/livez")):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the router is not ready: {log.read_text()}")
                time.sleep(0.02)
            yield running
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL if that is not heard."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (OSError, urllib.error.URLError):
        return False
