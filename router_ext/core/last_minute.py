"""Who did how much in the last minute, for limits per minute.

Cost: O(1) amortised per instant noted. Memory: the instants of the last minute, whatever the number of owners.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

WINDOW_S = 60.0

_ROUNDING_S = 1e-6
"""A request that comes exactly when it was told to is in time, however the sum of two instants was rounded."""

K = TypeVar("K")


class LastMinute(Generic[K]):
    """Instants of the last minute, by who they are of."""

    __slots__ = ("_all", "_by_owner")

    def __init__(self) -> None:
        self._all: deque[tuple[float, K]] = deque()
        self._by_owner: dict[K, deque[float]] = {}

    def note(self, owner: K, now: float) -> None:
        """One more of this owner."""
        self._forget(now)
        self._all.append((now, owner))
        self._by_owner.setdefault(owner, deque()).append(now)

    def full_until(self, owner: K, limit: int, now: float) -> float | None:
        """Until when the owner has as many as ``limit``; None if it has fewer."""
        self._forget(now)
        times = self._by_owner.get(owner, ())
        return times[-limit] + WINDOW_S if len(times) >= limit else None

    def _forget(self, now: float) -> None:
        while self._all and self._all[0][0] + WINDOW_S <= now + _ROUNDING_S:
            over = self._all.popleft()[1]
            self._by_owner[over].popleft()
            if not self._by_owner[over]:
                del self._by_owner[over]
