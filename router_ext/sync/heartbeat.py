"""What the router is doing, every two seconds and on every applied revision: soft state for the live pages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec
import structlog

from router_ext.sync.session import ControlPlaneRefused, ControlPlaneSession, ControlPlaneUnavailable
from router_ext.wire.controlplane import HEARTBEAT_PATH, Heartbeat

log = structlog.get_logger(__name__)

INTERVAL_S = 2.0
TIMEOUT_S = 5.0


class HeartbeatClient:
    """Sends what ``build`` returns. A heartbeat that fails is not repeated: the next one is fresher.

    Attributes:
        n_sent: heartbeats taken. last_error: text of the newest failure, None while all is well.
    """

    def __init__(
        self, session: ControlPlaneSession, build: Callable[[], Heartbeat], *, interval_s: float = INTERVAL_S
    ) -> None:
        self.n_sent = 0
        self.last_error: str | None = None
        self._session = session
        self._build = build
        self._interval_s = interval_s
        self._due = asyncio.Event()

    def notify(self) -> None:
        """Send the next heartbeat at once (a revision was applied, a drain began)."""
        self._due.set()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            self._due.clear()
            await self.send()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._due.wait()

    async def send(self) -> bool:
        """Send one heartbeat; False if it did not arrive."""
        try:
            body = msgspec.json.encode(self._build())
        except Exception as error:  # a defect in looking at the router must not end it
            log.exception("heartbeat.not_built")
            self.last_error = f"{type(error).__name__} while it was built"
            return False
        try:
            await self._session.request("POST", HEARTBEAT_PATH, body=body, timeout_s=TIMEOUT_S, max_bytes=1 << 16)
        except (ControlPlaneUnavailable, ControlPlaneRefused) as error:
            if self.last_error is None:
                log.warning("heartbeat.failed", reason=error.message)
            self.last_error = error.message
            return False
        if self.last_error is not None:
            log.info("heartbeat.resumed")
        self.last_error = None
        self.n_sent += 1
        return True
