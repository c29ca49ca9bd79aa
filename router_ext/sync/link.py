"""Everything between one router and its control plane, as one object with one task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from router_ext.sync.config_client import Apply, ConfigClient, OnArtifact, OnArtifactRefused
from router_ext.sync.heartbeat import HeartbeatClient
from router_ext.sync.ledger import Ledger
from router_ext.sync.quota import QuotaBook
from router_ext.sync.session import Answer, ControlPlaneSession
from router_ext.sync.totals import TotalsClient
from router_ext.sync.usage_client import UsageClient
from router_ext.wire.controlplane import KEY_HEADER, TENANT_USAGE_PATH, Heartbeat

REPORT_TIMEOUT_S = 15.0
MAX_REPORT_BYTES = 4 << 20
MAX_REPORTS = 8
"""Reports asked for at once."""


class ControlPlaneLink:
    """Builds the clients, runs them together. Create it inside the running loop.

    Attributes:
        config, usage, heartbeat, totals: the clients, for their state and counters. totals: None unless ``quotas``
            are given, which they and the acknowledgments of usage keep up to date.
    """

    def __init__(
        self,
        *,
        url: str,
        token: str,
        directory: Path,
        router: str,
        ledger: Ledger,
        apply: Apply,
        build_heartbeat: Callable[[], Heartbeat],
        on_artifact: OnArtifact | None = None,
        on_artifact_refused: OnArtifactRefused | None = None,
        quotas: QuotaBook | None = None,
    ) -> None:
        self._session = ControlPlaneSession(url, token)
        self._ledger = ledger
        # Reports are for people: many at once must not take the connections of the books.
        self._reports = asyncio.Semaphore(MAX_REPORTS)
        self._heartbeats: asyncio.Task[None] | None = None
        self.heartbeat = HeartbeatClient(self._session, build_heartbeat)
        # An event is booked either before totals are asked for or after they were taken.
        turn = asyncio.Lock()
        self.totals = None if quotas is None else TotalsClient(self._session, quotas, turn=turn)
        self.usage = UsageClient(
            self._session,
            ledger,
            router=router,
            on_acked=None if quotas is None else quotas.acked,
            on_known=None if self.totals is None else self.totals.notify,
            turn=turn,
        )
        self.config = ConfigClient(
            self._session,
            directory,
            apply=apply,
            on_artifact=on_artifact,
            on_artifact_refused=on_artifact_refused,
            on_changed=self.heartbeat.notify,
        )

    async def start(self) -> bool:
        """Apply the saved copy of the configuration. False if there is none: ``config.wait_ready`` then waits."""
        return await self.config.load_saved()

    async def run(self) -> None:
        """Everything in the background, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ledger.run())
            tasks.create_task(self.config.run())
            tasks.create_task(self.usage.run())
            self._heartbeats = tasks.create_task(self.heartbeat.run())
            if self.totals is not None:
                tasks.create_task(self.totals.run())

    async def tenant_usage(self, key: str, query: str) -> Answer:
        """The usage report of the tenant that holds a key, which the caller has authenticated.

        Args:
            key: its id. query: parameters of the report, encoded.

        Raises:
            ControlPlaneUnavailable: no answer.
        """
        async with self._reports:
            return await self._session.exchange(
                "GET",
                f"{TENANT_USAGE_PATH}?{query}",
                headers={KEY_HEADER: key},
                timeout_s=REPORT_TIMEOUT_S,
                max_bytes=MAX_REPORT_BYTES,
            )

    def leave(self, directory: Path) -> None:
        """Another process speaks for this router from here on, and keeps the saved configuration; this one follows it
        (what an operator stops is stopped here as well), and delivers what it has booked."""
        if self._heartbeats is not None:
            self._heartbeats.cancel()
        self.config.save_at(directory)

    async def close(self, *, flush_s: float = 2.0) -> None:
        """After ``run`` has ended: send what is pending for a moment, then close the connections."""
        await self.usage.flush(limit_s=flush_s)
        await self._session.close()
