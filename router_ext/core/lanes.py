"""Lanes: who waits inside one tenant and tier, by key, each with the key's service counter there.

Inside a key's lane requests that ran before go first (by arrival), then fresh ones by arrival. Lanes of one queue are
siblings (``core.siblings``), so keys that wait share their tenant's turns in that tier equally, and splitting work
over more keys buys nothing outside the tenant.

Under policies that order agents, calls of agents wait in one lane of their own, by tag (``core.calls``), whatever their
key: an order among agents means something only if it goes across keys. One lane, not one per key: otherwise a key
would get a second share by giving some of its requests an agent id.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from itertools import islice
from typing import Protocol

from router_ext.core.ids import KeyId
from router_ext.core.request import Request


class Line(Protocol):
    """An order in which requests of one lane wait."""

    def __len__(self) -> int:
        """How many do."""

    def first(self) -> Request | None:
        """Who goes next."""

    def next(self, count: int) -> list[Request]:
        """The first few in order: at most ``count``, at least one if there is one."""

    def add(self, request: Request) -> None:
        """Queue a request."""

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""

    def sort(self) -> None:
        """Bring the order back, after some came back from parking."""

    def requests(self) -> list[Request]:
        """All waiting requests, in order."""


class Lane:
    """One account inside a queue, and the line of those who wait on it.

    Attributes:
        key: whose lane it is; None for the lane of agents.
        counter: service charged to requests of this lane, lifts included. since: see ``siblings``.
        num_open: requests that wait or run. held_tokens: KV that its running slices reserved when they started.
            queued_tokens: predicted output of those that wait.
    """

    __slots__ = ("counter", "held_tokens", "key", "line", "num_open", "queued_tokens", "since")

    def __init__(self, key: KeyId | None, line: Line) -> None:
        self.key = key
        self.line = line
        self.counter = 0.0
        self.since = 0
        self.num_open = 0
        self.held_tokens = 0
        self.queued_tokens = 0


class ArrivalOrder:
    """Requests that ran before, then fresh ones, each by arrival. O(1) for fresh ones, O(log n) for the others."""

    __slots__ = ("_fresh", "_resumed")

    def __init__(self) -> None:
        self._fresh: OrderedDict[int, Request] = OrderedDict()
        self._resumed: list[tuple[int, Request]] = []
        """(-seq, request), ascending: the oldest is last, where a list gives it up cheaply. Its length is bounded
        by what the backends can run at once."""

    def __len__(self) -> int:
        return len(self._fresh) + len(self._resumed)

    def first(self) -> Request | None:
        """Who goes next."""
        if self._resumed:
            return self._resumed[-1][1]
        return next(iter(self._fresh.values()), None)

    def next(self, count: int) -> list[Request]:
        """The first ``count`` in order (at least 1)."""
        found = [request for _, request in self._resumed[: -count - 1 : -1]]
        found.extend(islice(self._fresh.values(), count - len(found)))
        return found

    def add(self, request: Request) -> None:
        """Queue a request: a resumed one before all fresh ones."""
        if request.is_resumed:
            insort(self._resumed, (-request.seq, request))
        else:
            self._fresh[request.seq] = request

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        if request.is_resumed:
            del self._resumed[bisect_left(self._resumed, (-request.seq,))]
        else:
            del self._fresh[request.seq]

    def sort(self) -> None:
        """Bring fresh requests back into the order of arrival, after some came back from parking. O(n)."""
        self._fresh = OrderedDict(sorted(self._fresh.items()))

    def requests(self) -> list[Request]:
        """All waiting requests, in order."""
        return [request for _, request in reversed(self._resumed)] + list(self._fresh.values())
