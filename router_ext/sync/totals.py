"""How much of their quotas tenants and keys have used, from the control plane, every five seconds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import msgspec
import structlog

from router_ext.sync.session import ControlPlaneRefused, ControlPlaneSession, ControlPlaneUnavailable
from router_ext.wire.controlplane import TOTALS_PATH, Totals
from router_ext.wire.decoding import NotDecoded

log = structlog.get_logger(__name__)

INTERVAL_S = 5.0
TIMEOUT_S = 10.0
_MAX_ANSWER_BYTES = 64 << 20
_INLINE_BYTES = 64 << 10
"""A larger answer is decoded off the loop."""


class TotalsClient:
    """Pulls what has changed since the last answer, and everything at first, on a new day and when asked to.

    Args:
        apply: takes an answer; False: it does not continue what is in force, ask for everything.
        turn: held from the question to the answer's taking effect; whoever has events booked holds it as well.

    Attributes:
        last_error: text of the newest failure, None while all is well.
    """

    def __init__(
        self,
        session: ControlPlaneSession,
        apply: Callable[[Totals], bool],
        *,
        turn: asyncio.Lock,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.last_error: str | None = None
        self._session = session
        self._apply = apply
        self._turn = turn
        self._interval_s = interval_s
        self._since_us = 0
        self._is_whole_due = True
        self._pulled_s: float | None = None
        self._due = asyncio.Event()

    @property
    def age_s(self) -> float | None:
        """Seconds since the last answer; None before the first."""
        return None if self._pulled_s is None else time.monotonic() - self._pulled_s

    def notify(self, *, is_whole: bool = False) -> None:
        """Pull at once. ``is_whole``: others have quotas now, of whom nothing was said before."""
        self._is_whole_due |= is_whole
        self._due.set()

    async def run(self) -> None:
        """Pull until cancelled."""
        while True:
            self._due.clear()
            async with self._turn:
                await self.pull()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._due.wait()

    async def pull(self) -> bool:
        """Ask once; False without a usable answer, after which the totals in force stay."""
        since_us, self._is_whole_due = 0 if self._is_whole_due else self._since_us, False
        try:
            answer = await self._session.request(
                "GET", f"{TOTALS_PATH}?since_us={since_us}", timeout_s=TIMEOUT_S, max_bytes=_MAX_ANSWER_BYTES
            )
            if answer.status != 200:
                raise ControlPlaneUnavailable(f"GET {TOTALS_PATH}: status {answer.status}")
            if len(answer.body) > _INLINE_BYTES:
                totals = await asyncio.to_thread(msgspec.json.decode, answer.body, type=Totals)
            else:
                totals = msgspec.json.decode(answer.body, type=Totals)
            is_continued = self._apply(totals)
        except (ControlPlaneUnavailable, ControlPlaneRefused, ValueError, *NotDecoded) as error:
            # An answer that got lost may have told what will not be told again.
            self._is_whole_due = self._is_whole_due or since_us == 0
            reason = error.message if isinstance(error, ControlPlaneUnavailable | ControlPlaneRefused) else str(error)
            if self.last_error is None:
                log.warning("totals.failed", reason=reason)
            self.last_error = reason
            return False
        self._pulled_s = time.monotonic()
        if not is_continued:
            self._is_whole_due = True
            if since_us:
                self._due.set()
            return False
        self._since_us = totals.as_of_us
        if self.last_error is not None:
            log.info("totals.resumed")
        self.last_error = None
        return True
