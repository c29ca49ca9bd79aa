"""When a backend that failed may be tried again, and how carefully.

    CLOSED --failed--> OPEN --wait over, health answers--> HALF_OPEN --a token, or a whole answer--> CLOSED
                        ^                                      |
                        '---------------failed-----------------'

Half-open, a backend is given one request at a time until one of them has shown a token (the scheduler sees to that, see
``BackendChanged``). The first opening waits for the next good check only, so that a server that was restarted is back
at once. One that opens again before it was closed for ``STEADY_S`` flaps: each further opening waits twice as long as
the last, spread by a quarter either way, up to ``max_wait_s``.

Source: the circuit breaker of Nygard (Release It!, 2007), with the exponential waits of its common implementations.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable

STEADY_S = 60.0
"""Closed for so long a backend has stopped flapping."""

FIRST_WAIT_S = 0.5
"""Wait of the second opening in a row."""

SPREAD = 0.25
"""Waits are spread by this much either way, lest many routers try one backend in the same moment."""


class Phase(enum.StrEnum):
    """Where a breaker stands; the words of logs and of the heartbeat's detail."""

    CLOSED = "closed"
    HALF_OPEN = "half-open"
    OPEN = "open"


class Breaker:
    """Of one backend. Instants are seconds of one monotonic clock.

    Attributes:
        openings: since start. not_before_s: until then the backend is not tried again.
    """

    __slots__ = ("_closed_s", "_draw", "_in_a_row", "_max_wait_s", "not_before_s", "openings", "phase")

    def __init__(self, *, max_wait_s: float, draw: Callable[[], float] = random.random) -> None:
        self.phase = Phase.CLOSED
        self.openings = 0
        self.not_before_s = 0.0
        self._max_wait_s = max_wait_s
        self._draw = draw
        self._in_a_row = 0
        self._closed_s: float | None = None

    def open(self, now: float) -> None:
        """The backend failed."""
        if self.phase is Phase.OPEN:
            return
        if self._closed_s is not None and now - self._closed_s >= STEADY_S:
            self._in_a_row = 0
        self._closed_s = None
        self.phase = Phase.OPEN
        self.openings += 1
        self._in_a_row += 1
        self.not_before_s = now + self._wait_s()

    def _wait_s(self) -> float:
        if self._in_a_row == 1:
            return 0.0
        # The exponent is bounded, a float is not.
        wait_s = min(self._max_wait_s, FIRST_WAIT_S * 2.0 ** min(self._in_a_row - 2, 20))
        return min(self._max_wait_s, wait_s * (1.0 - SPREAD + 2.0 * SPREAD * self._draw()))

    def try_again(self, now: float) -> bool:
        """The backend says it is well: let one request through at a time. False if it is too early."""
        if now < self.not_before_s:
            return False
        if self.phase is Phase.OPEN:
            self.phase = Phase.HALF_OPEN
        elif self._closed_s is None and self.phase is Phase.CLOSED:
            self._closed_s = now
        return True

    def close(self, now: float) -> None:
        """A request has shown that the backend serves."""
        if self.phase is Phase.HALF_OPEN:
            self.phase = Phase.CLOSED
            self._closed_s = now
