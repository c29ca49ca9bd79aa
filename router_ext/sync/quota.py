"""Tokens used in the UTC day and month: what the control plane has booked, plus what of this router it does not yet.

    used = totals of the control plane, as of one instant of its database
         + this router's events that are not in them: in the spool, or acknowledged after that instant

An event belongs to the day of its arrival, here and there. Open reservations are the limiter's (``gateway.limits``).

An event leaves the second term when totals are in force whose ``as_of_us`` is not before the acknowledgment's
``booked_at_us``. Nothing is acknowledged while totals are asked for (``sync.link``), so it is counted once, in
whatever order the two come. Where an acknowledgment got lost, or a restart reads events that were taken already from
the spool again, they count twice from the next totals on until they are acknowledged again, which asks for new totals
at once: never too little, and never for long. Without any totals (first start, control plane away) only what is this
router's own is known.

Days are numbered from 1970-01-01. Pure but for the log; event loop's thread only.
"""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache

import msgspec
import structlog

from router_ext.wire.controlplane import TotalRecord, Totals, UsageEvent
from router_ext.wire.decoding import NotDecoded

log = structlog.get_logger(__name__)

DAY_US = 86_400_000_000
MAX_ACKED = 512
"""Acknowledged batches kept apart while no totals come; the oldest are then kept together."""

_CHUNK = 512
"""Totals freed at once."""

_EPOCH = datetime.date(1970, 1, 1).toordinal()

Sums = dict[tuple[str, int], int]
"""Tokens by scope and day."""


class _Spent(msgspec.Struct):
    """What of an event in the spool counts."""

    tenant: str
    key: str
    arrived_at_us: int
    prompt_tokens: int = 0
    output_tokens: int = 0


def day_of(at_us: int) -> int:
    """UTC day of an instant."""
    return at_us // DAY_US


@lru_cache(maxsize=8)
def month_of(day: int) -> int:
    """First day of a day's month."""
    return day - (datetime.date.fromordinal(_EPOCH + day).day - 1)


@lru_cache(maxsize=8)
def month_after(day: int) -> int:
    """First day of the month after a day's."""
    return month_of(month_of(day) + 31)


class QuotaBook:
    """See the module.

    Attributes:
        as_of_us: of the totals in force, 0 without any. live_routers: routers that share the limits.
    """

    def __init__(self) -> None:
        self.as_of_us = 0
        self.live_routers = 1
        self._day = 0
        self._totals: dict[str, TotalRecord] = {}
        self._replaced: list[dict[str, TotalRecord]] = []
        self._own: dict[str, dict[int, int]] = {}
        self._acked: deque[tuple[int, Sums]] = deque()
        self._decode = msgspec.json.Decoder(_Spent).decode

    # --- own events -------------------------------------------------------------------------------------------------

    def booked(self, event: UsageEvent | _Spent) -> None:
        """An event is in the books of this router."""
        tokens = event.prompt_tokens + event.output_tokens
        if tokens:
            day = event.arrived_at_us // DAY_US
            for scope in (event.tenant, event.key):
                days = self._own.setdefault(scope, {})
                days[day] = days.get(day, 0) + tokens

    def load(self, payloads: Iterable[bytes]) -> None:
        """Events that the spool held at the start."""
        for event in self._spent(payloads):
            self.booked(event)

    def adopted(self, payload: bytes) -> None:
        """An event that a router which was replaced has left is in the spool of this one, which delivers it."""
        self.load((payload,))

    def _spent(self, payloads: Iterable[bytes]) -> Iterator[_Spent]:
        for payload in payloads:
            try:
                yield self._decode(payload)
            except NotDecoded as error:  # the control plane will refuse it, and it is set aside
                log.error("quota.event_unreadable", reason=str(error))

    def acked(self, payloads: Iterable[bytes], booked_at_us: int) -> None:
        """The control plane has booked these events by that instant; 0: it never will."""
        is_over = booked_at_us <= self.as_of_us and self.as_of_us > 0
        sums: Sums = {}
        for event in self._spent(payloads):
            tokens = event.prompt_tokens + event.output_tokens
            if tokens:
                day = event.arrived_at_us // DAY_US
                for scope in (event.tenant, event.key):
                    if is_over and day <= self._day:
                        self._forget(scope, day, tokens)
                    else:
                        sums[scope, day] = sums.get((scope, day), 0) + tokens
        if not sums:
            return
        self._acked.append((booked_at_us, sums))
        if len(self._acked) > MAX_ACKED:
            first_us, first = self._acked.popleft()
            second_us, second = self._acked.popleft()
            for at, tokens in first.items():
                second[at] = second.get(at, 0) + tokens
            self._acked.appendleft((max(first_us, second_us), second))

    def _forget(self, scope: str, day: int, tokens: int) -> None:
        days = self._own.get(scope)
        if days is None or day not in days:
            return
        days[day] -= tokens
        if days[day] <= 0:
            # Below 0 only what was acknowledged twice, by a delivery that was broken off at the end of the process.
            del days[day]
            if not days:
                del self._own[scope]

    # --- totals -----------------------------------------------------------------------------------------------------

    def apply(self, totals: Totals, records: dict[str, TotalRecord] | None = None) -> bool:
        """Put an answer of the control plane in force. False: it does not continue those in force; ask for all.

        Args:
            records: those of ``totals`` by scope, where that was made of many elsewhere. Call ``let_go`` then.
        """
        day = datetime.date.fromisoformat(totals.day).toordinal() - _EPOCH
        if records is None:
            records = {each.scope: each for each in totals.totals}
        if totals.is_whole:
            self._replaced.append(self._totals)
            self._totals = records
            if len(self._replaced[-1]) <= _CHUNK:
                self._replaced.pop()
        elif day == self._day and self.as_of_us:
            self._totals.update(records)
        else:
            return False
        self._day, self.as_of_us, self.live_routers = day, totals.as_of_us, max(1, totals.live_routers)
        kept: deque[tuple[int, Sums]] = deque()
        for booked_at_us, sums in self._acked:
            later = sums
            if booked_at_us <= totals.as_of_us:
                # What arrived behind a midnight that the control plane has yet to see is not in these totals.
                later = {at: tokens for at, tokens in sums.items() if at[1] > day}
                for (scope, of_day), tokens in sums.items():
                    if of_day <= day:
                        self._forget(scope, of_day, tokens)
            if later:
                kept.append((booked_at_us, later))
        self._acked = kept
        return True

    def let_go(self) -> None:
        """Free totals that have been replaced, in small pieces: for a worker thread."""
        while self._replaced:
            old = self._replaced.pop()
            while old:
                for _ in range(min(_CHUNK, len(old))):
                    old.popitem()
                time.sleep(0)

    def today(self, at_us: int) -> int:
        """The day that a request of this instant is judged by: the later one where clocks differ about midnight."""
        return max(at_us // DAY_US, self._day)

    def used(self, scope: str, day: int) -> tuple[int, int]:
        """Tokens used by ``day`` and in its month so far, reservations apart."""
        used_day = used_month = 0
        if self._day and month_of(self._day) == month_of(day):
            total = self._totals.get(scope)
            if total is not None:
                used_month = total.month_tokens
                used_day = total.day_tokens if self._day == day else 0
        days = self._own.get(scope)
        if days:
            first, after = month_of(day), month_after(day)
            for of_day, tokens in days.items():
                if of_day == day:
                    used_day += tokens
                if first <= of_day < after:
                    used_month += tokens
        return used_day, used_month
