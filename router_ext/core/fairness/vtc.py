"""``vtc``: the weighted virtual token counter, as published.

Rule: the head of the backlogged tenant with the smallest counter goes next, charged with its prompt before the next
one is looked at. If it does not fit, nobody goes: skipping it would let small requests starve large ones and break the
bound. Ties go to whoever has waited longest.

Guarantee: ``c_f - min c <= U'/w_f`` over backlogged tenants, so two of them differ by at most ``U'(1/w_f + 1/w_g)`` in
service per weight over any interval. With unit weights a backlogged tenant receives at most ``4 U'`` less than any
other, and the next request of one that is not over-served starts within ``2 (n - 1) U' / a``, ``a`` being the service
per second of the pool.

Cost: O(log n) amortised per decision, O(1) per charge.

Failure mode: it equalises progress, not waiting. A tenant inside its share waits behind a full pool of others' work
like everybody else, so its time to first token is that of the longest answers; while a large head waits for room, the
room that comes free meanwhile stands empty. A declared ``max_new_tokens`` that is never used blocks KV and costs
nothing.

Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), algorithm 2, with the lift against the
tenant that left last while nobody waits, which the published artifact leaves out, and ``U'`` of ``core.bounds``.
"""

from __future__ import annotations

from typing import ClassVar

from router_ext.core.fairness.base import NOBODY, Candidates, FairnessPolicy, Standing, Surroundings
from router_ext.core.queues import Tenant
from router_ext.core.request import Request
from router_ext.core.siblings import MinIndex

_HEAD = Standing.HEAD


class Vtc(FairnessPolicy):
    """See the module. The order is that of one key per tenant, here its counter."""

    is_bounded: ClassVar[bool] = True

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._aging_s = around.config.aging_s
        self._aging_ratio = around.config.aging_ratio
        self._keys: MinIndex[Tenant] = around.counters.index

    def ahead(self, request: Request, now: float) -> tuple[float, float] | None:
        """What its tenant has in line before it, at the tenant's share."""
        tenant = request.member
        return tenant.tokens_ahead(request, self._aging_ratio), self._counters.share(tenant)

    def candidates(self, now: float) -> Candidates:
        """The head in turn, and nobody else."""
        tenant = self._keys.top()
        if tenant is None:
            return NOBODY
        head = tenant.head(now, self._aging_s)
        assert head is not None
        return ((head, _HEAD),)


class Keyed(Vtc):
    """A policy of the family whose key is not the counter itself: ``key`` mostly grows as the counter does."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._keys = MinIndex(self.key)

    def key(self, tenant: Tenant) -> float:
        """Whose is smallest goes next."""
        raise NotImplementedError

    def adopt(self, tenant: Tenant) -> None:
        """Enter a tenant that has been backlogged before this policy took over; no lift."""
        self._keys.add(tenant)

    def backlogged(self, tenant: Tenant) -> None:
        """Lift, and enter the order of keys."""
        self._counters.backlogged(tenant)
        self._keys.add(tenant)

    def refunded(self, request: Request) -> None:
        """Its tenant may be in turn sooner."""
        self.reweighed(request.tenant)

    def reweighed(self, tenant: Tenant) -> None:
        """It may be in turn sooner."""
        if tenant.since:
            self._keys.lowered(tenant)

    def idle(self, tenant: Tenant) -> None:
        """Leave the order of keys."""
        self._counters.idle(tenant)
        self._keys.discard(tenant)
