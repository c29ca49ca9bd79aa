"""Interactions: tasks of several requests that shall not be cut short, and who sent how much in the last minute.

An interaction is all requests of one tenant that carry the same agent id. Unlike an agent (``core.agents``) it has no
cost and no place in an order; it is only known to have begun, for as long as somebody may come back to it.

Cost: O(1) amortised per request. Memory: bounded, see the constants.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from router_ext.core.ids import TenantId
from router_ext.core.request import Request

WINDOW_S = 60.0

SILENCE_S = 3_600.0
"""An interaction is over after an hour without a request: people come back to a conversation after lunch."""

_MAX_INTERACTIONS = 65_536
"""Beyond it the one that has been silent for longest is over."""

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


class Interaction:
    """One interaction.

    Attributes:
        has_run: something of it was dispatched.
        waiting: its requests that wait for that; empty afterwards.
    """

    __slots__ = ("has_run", "seen_s", "waiting")

    def __init__(self) -> None:
        self.seen_s = 0.0
        self.has_run = False
        self.waiting: dict[Request, None] = {}


class Interactions:
    """Those that have begun and are not over."""

    __slots__ = ("_by_id",)

    def __init__(self) -> None:
        self._by_id: OrderedDict[tuple[TenantId, str], Interaction] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request: Request) -> Interaction | None:
        """The interaction a request goes on with; None if it would begin one, or is one by itself."""
        if request.agent_id is None:
            return None
        return self._by_id.get((request.member.tenant_id, request.agent_id))

    def note(self, request: Request, now: float) -> None:
        """A request was accepted. Its interaction has begun, and is not silent."""
        if request.agent_id is None:
            return
        by_id, name = self._by_id, (request.member.tenant_id, request.agent_id)
        by_id.setdefault(name, Interaction()).seen_s = now
        by_id.move_to_end(name)
        while len(by_id) > _MAX_INTERACTIONS or next(iter(by_id.values())).seen_s + SILENCE_S < now:
            by_id.popitem(last=False)
