"""``rpm``: a limit of requests per minute and tenant, first come, first served within it.

Rule: a tenant may send ``rpm_limit * weight`` requests (at least one) in any 60 seconds. A request beyond that is
refused (429), and is told when the oldest of those that count leaves the window; only accepted requests
count. What is accepted waits in one queue and is treated as under ``fifo``.

Guarantee: a refused request that comes again after ``retry_after_s`` is accepted, unless its tenant has used the room
in between. No starvation. No bound on anything else.

Cost: O(1) amortised per arrival and per decision. Memory: one instant per request accepted in the last minute, whatever
the number of tenants.

Failure mode: requests are not tokens: a tenant within its limit can send prompts of any length and delays everybody by
them. And a limit that protects when all are busy refuses work while the pool is idle.

Source: the baseline of Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), at 5 to 30 requests per
minute for one GPU (at 20 it served 1,158 of 1,500 requests of a real trace). Weights are this product's own.
"""

from __future__ import annotations

from typing import Any

from router_ext.core.actions import Reject, RejectCode
from router_ext.core.fairness.base import Surroundings
from router_ext.core.fairness.fifo import Fifo
from router_ext.core.ids import TenantId
from router_ext.core.last_minute import LastMinute
from router_ext.core.request import Request


class Rpm(Fifo):
    """See the module. A member of a group has a limit of its own, by its own weight."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._per_weight = around.config.rpm_limit
        self._recent: LastMinute[TenantId] = LastMinute()

    def inherit(self, before: Any) -> None:
        """A change of some number gives nobody a new minute."""
        self._recent = before._recent

    def refusal(self, request: Request, now: float) -> Reject | None:
        """Refuse what is beyond the limit."""
        tenant = request.member
        limit = max(1, int(self._per_weight * tenant.weight))
        until = self._recent.full_until(tenant.tenant_id, limit, now)
        if until is None:
            return None
        return Reject(
            request_id=request.request_id,
            code=RejectCode.RATE_LIMITED,
            detail=f"this tenant has sent {limit} in the last minute, its limit is {limit} requests per minute",
            retry_after_s=until - now,
        )

    def arrived(self, request: Request, now: float) -> None:
        """It counts from here on, whatever becomes of it."""
        self._recent.note(request.member.tenant_id, now)
