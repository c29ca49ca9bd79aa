"""Interactions: tasks of several requests that shall not be cut short.

An interaction is all requests of one tenant that carry the same agent id. Unlike an agent (``core.agents``) it has no
cost and no place in an order; it is only known to have begun, for as long as somebody may come back to it.

Cost: O(1) amortised per request. Memory: bounded, see the constants.
"""

from __future__ import annotations

from collections import OrderedDict

from router_ext.core.ids import TenantId
from router_ext.core.request import Request

SILENCE_S = 3_600.0
"""An interaction is over after an hour without a request: people come back to a conversation after lunch."""

_MAX_INTERACTIONS = 65_536
"""Beyond it the one that has been silent for longest is over."""


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
