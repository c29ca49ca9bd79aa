"""Lanes: the waiting requests of one key inside one tenant and tier, and the key's service counter there.

Inside a lane requests that ran before go first (by arrival), then fresh ones by arrival. Lanes of one queue are
siblings (``core.siblings``), so keys that wait share their tenant's turns in that tier equally, and splitting work
over more keys buys nothing outside the tenant.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router_ext.core.ids import KeyId
    from router_ext.core.request import Request


class Lane:
    """See the module.

    Attributes:
        counter: service charged to the key's requests of this tier, lifts included. since: see ``siblings``.
        num_open: requests that wait or run.
    """

    __slots__ = ("_fresh", "_resumed", "counter", "key", "num_open", "since")

    def __init__(self, key: KeyId) -> None:
        self.key = key
        self.counter = 0.0
        self.since = 0
        self.num_open = 0
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
