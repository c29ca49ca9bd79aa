"""``justitia``: whole agents, in the order in which a fair fluid pool would be done with them.

Rule:
    1. Every request belongs to an agent (``core.agents``) and every agent has an immutable tag ``F = V(a) + C/w``.
    2. The waiting agent with the smallest tag is *pampered*: its calls go first, up to the whole pool. Within it, calls
       that ran before go first, then by arrival. Ties between agents: whose first call came first.
    3. What the pampered agent cannot use is backfilled: a few of its own calls behind the one that does not fit, then
       the next tags. Backfill takes nothing from the call in turn, which claims the backend where it fits soonest.

Guarantee: an arrival never reorders the agents that are there; one agent alone, and agents that are all alike, are
served first come, first served. With true costs an agent ends no later than in the fluid pool by more than a constant
that depends on the largest call and the largest agent, not on the number of agents: fairness is in the order of the
ends, not in progress. No bound on the difference of two tenants' service: a tenant of many agents gets many shares.

Cost: O(log n) amortised per decision and per call, n the number of waiting agents; at most a few calls are tried per
pass.

Failure mode: it is as good as the costs it is told. Agents that declare too little go ahead of their peers; a tenant
that cuts one task into many agents gets more. Weight is shared among tenants' agents, not among tenants.

Source: Justitia (arXiv 2510.17015), as far as known from notes on it: token-time cost, fluid reference, immutable tags,
pampering. This product's own: the claim that keeps backfill from delaying the call in turn, the number of calls tried.
"""

from __future__ import annotations

from typing import ClassVar

from router_ext.core.calls import TagOrder
from router_ext.core.fairness.base import FairnessPolicy, Standing, Surroundings, Walk
from router_ext.core.request import Request

_OWN_TRIES = 3
"""Calls of one agent tried per pass: they differ in size, and one of them may fit where the first does not."""

_BACKFILL_AGENTS = 3
"""Agents tried behind the pampered one."""

_PICK, _BACKFILL = Standing.PICK, Standing.BACKFILL


class Justitia(FairnessPolicy):
    """See the module."""

    is_watching: ClassVar[bool] = True

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._agents = around.agents
        self._calls = TagOrder()
        for request in around.room.in_line.values():
            self.queued(request)

    # --- what the scheduler reports --------------------------------------------------------------------------------

    def arrived(self, request: Request, now: float) -> None:
        """It belongs to an agent; the first call makes the tag."""
        self._agents.join(request, now)

    def queued(self, request: Request) -> None:
        """One more call of its agent waits."""
        if request.agent is None:
            # It arrived under another policy.
            self._agents.join(request, request.arrival_s)
        self._calls.add(request)

    def unqueued(self, request: Request) -> None:
        """The call waits no longer."""
        self._calls.remove(request)

    # --- the decision ----------------------------------------------------------------------------------------------

    def candidates(self, now: float) -> Walk:
        """Calls of the agent with the smallest tag, then a few of the next ones."""
        calls = self._calls.walk(1 + _BACKFILL_AGENTS, _OWN_TRIES)
        try:
            standing = _PICK
            for call in calls:
                yield call, standing
                standing = _BACKFILL
        finally:
            calls.close()
