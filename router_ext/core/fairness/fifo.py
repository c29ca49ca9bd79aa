"""``fifo``: one queue over all tenants.

Rule: the request that was queued first goes first; if it does not fit, nobody goes. No slices below TGI's own 1,024,
no gate, no headroom: what TGI's queue would do, with the queue held in the router. A request that continues after
1,024 tokens goes to the tail, as TGI's own pieces do; one whose backend failed goes to the front.
Guarantee: no starvation; no isolation: a tenant's share is its share of the offered tokens.
Cost: O(1) per decision.
Failure mode: one tenant's burst delays everybody by the whole burst.
Source: TGI v3 ``queue.rs``. Counters are charged all the same, so that a policy switch finds them right.
"""

from __future__ import annotations

from typing import ClassVar

from router_ext.core.fairness.base import NOBODY, Candidates, FairnessPolicy, Standing, Surroundings
from router_ext.core.request import Request

_HEAD = Standing.HEAD


class Fifo(FairnessPolicy):
    """See the module."""

    is_sliced: ClassVar[bool] = False

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._room = around.room

    def ahead(self, request: Request, now: float) -> tuple[float, float]:
        """Everybody who stands in line."""
        return self._room.queued_tokens, 1.0

    def candidates(self, now: float) -> Candidates:
        """The one head."""
        for request in self._room.in_line.values():
            return ((request, _HEAD),)
        return NOBODY
