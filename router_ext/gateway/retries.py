"""The retry budget of a pool: failures may not multiply the load that caused them.

A *retry* is another dispatch of a request whose last one showed nothing and reached a backend; a suspect's trial is one
(``gateway.suspects`` says where it runs, this says whether). No retries are: the continuation of an answer that has
shown a token since its last dispatch, which is bounded by its own progress, and another dispatch after a refused
connection, which no backend has seen.

    retries in the last WINDOW_S  <=  floor + ratio * first dispatches and continuations in the last WINDOW_S

Beyond it a request ends with the error it met. The floor lets a quiet pool retry at all.

Source: retry budgets of Finagle (``RetryBudget``), Google SRE book, chapter 21.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0

_BUCKET_S = 1.0


class RetryBudget:
    """See the module. Instants are seconds of one monotonic clock. O(1) amortised.

    Attributes:
        granted, refused: retries since start.
    """

    __slots__ = ("_buckets", "_dispatches", "_floor", "_ratio", "_retries", "granted", "refused")

    def __init__(self, *, ratio: float, floor: int) -> None:
        self.granted = 0
        self.refused = 0
        self._ratio = ratio
        self._floor = floor
        self._buckets: deque[list[float]] = deque()
        """[begins, dispatches, retries], the newest last."""
        self._dispatches = 0.0
        self._retries = 0.0

    def dispatched(self, now: float) -> None:
        """A request was dispatched for the first time, or goes on."""
        self._bucket(now)[1] += 1
        self._dispatches += 1

    def take(self, now: float) -> bool:
        """Whether one more retry is within the budget; if so it is spent."""
        bucket = self._bucket(now)
        if self._retries + 1 > self._floor + self._ratio * self._dispatches:
            self.refused += 1
            return False
        bucket[2] += 1
        self._retries += 1
        self.granted += 1
        return True

    def left(self, now: float) -> int:
        """Retries that could be taken now."""
        self._forget(now)
        return max(0, int(self._floor + self._ratio * self._dispatches - self._retries))

    def _bucket(self, now: float) -> list[float]:
        self._forget(now)
        buckets = self._buckets
        if not buckets or now >= buckets[-1][0] + _BUCKET_S:
            buckets.append([now, 0, 0])
        return buckets[-1]

    def _forget(self, now: float) -> None:
        buckets = self._buckets
        while buckets and buckets[0][0] <= now - WINDOW_S:
            _, dispatches, retries = buckets.popleft()
            self._dispatches -= dispatches
            self._retries -= retries
