"""How much of their quotas tenants and keys have used, from the control plane, every five seconds."""

from __future__ import annotations

import asyncio
import contextlib
import time

import msgspec
import structlog

from router_ext.sync.quota import QuotaBook
from router_ext.sync.session import ControlPlaneRefused, ControlPlaneSession, ControlPlaneUnavailable
from router_ext.wire.controlplane import TOTALS_PATH, TotalRecord, Totals
from router_ext.wire.decoding import NotDecoded

log = structlog.get_logger(__name__)

INTERVAL_S = 5.0
TIMEOUT_S = 10.0
_MAX_ANSWER_BYTES = 64 << 20
_INLINE_BYTES = 64 << 10
"""A larger answer is decoded off the loop."""

_CHUNK = 512
"""Records decoded at once there, before the interpreter is given away."""


class _Outline(msgspec.Struct):
    """``Totals`` before its records are decoded."""

    as_of_us: int
    day: str
    live_routers: int = 1
    is_whole: bool = True
    totals: list[msgspec.Raw] = []


def _decode_large(body: bytes) -> tuple[Totals, dict[str, TotalRecord]]:
    """For a worker thread: decoded at once, 100,000 records would stop the loop for some 20 ms."""
    outline = msgspec.json.decode(body, type=_Outline)
    decode = msgspec.json.Decoder(TotalRecord).decode
    records: dict[str, TotalRecord] = {}
    parts = outline.totals
    parts.reverse()
    while parts:
        for _ in range(min(_CHUNK, len(parts))):
            record = decode(parts.pop())
            records[record.scope] = record
        time.sleep(0)
    totals = Totals(
        as_of_us=outline.as_of_us, day=outline.day, live_routers=outline.live_routers, is_whole=outline.is_whole
    )
    return totals, records


class TotalsClient:
    """Pulls what has changed since the last answer, and everything at first, on a new day and when asked to.

    Args:
        book: takes the answers.
        turn: held from the question to the answer's taking effect; whoever has events booked holds it as well.

    Attributes:
        last_error: text of the newest failure, None while all is well.
    """

    def __init__(
        self,
        session: ControlPlaneSession,
        book: QuotaBook,
        *,
        turn: asyncio.Lock,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.last_error: str | None = None
        self._session = session
        self._book = book
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
                totals, records = await asyncio.to_thread(_decode_large, answer.body)
                is_continued = self._book.apply(totals, records)
                del records
                await asyncio.to_thread(self._book.let_go)
            else:
                totals = msgspec.json.decode(answer.body, type=Totals)
                is_continued = self._book.apply(totals)
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
