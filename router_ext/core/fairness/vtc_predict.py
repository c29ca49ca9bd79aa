"""``vtc-predict``: the virtual token counter, charged with the predicted output in advance.

Rule: as ``vtc``, by the *pre-charged* counter ``p = c + E / w``, where ``E`` is the service still expected of what
runs of the tenant. A dispatch adds the predicted output at once; tokens within the prediction move from ``E``
to ``c`` and leave ``p`` as it is, tokens beyond it are charged as they come; whatever ends a running slice (its end,
the request's, a cancel, a cut, a failure) refunds what was not produced. A tenant that becomes backlogged is lifted to
the smallest ``p`` among those waiting. Predictions are clipped to what the slice in flight may produce, so that an
absurd one cannot park a tenant, and a refund is never more than was charged in advance.

Guarantee: with equal weights that of ``vtc``, whatever the predictions; in general
``c_f - min c <= max(U'/w_f, U'/w_g)``, and for a pair the sum of both. The same holds between ``p`` of two waiting
tenants. Where tenants send few long requests, good predictions make the gap one sees much smaller, since nobody is
admitted twice before the first one shows its size.

Cost: O(log n) amortised per decision; a refund enters the heap anew.

Failure mode: as ``vtc``. A tenant whose outputs are predicted too long waits for refunds it need not have waited for;
one whose outputs are predicted too short goes ahead of its peers, within the bound.

Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), algorithm 3. The clip at the slice and the
form in which the pre-charge is derived from what runs, so that nothing of it can be left over, are this product's own.
"""

from __future__ import annotations

from typing import ClassVar

from router_ext.core.config import PoolConfig
from router_ext.core.fairness.base import Surroundings
from router_ext.core.fairness.vtc import Keyed
from router_ext.core.queues import Tenant
from router_ext.core.request import Request


class VtcPredict(Keyed):
    """See the module. ``Tenant.expected_rest`` is ``E``, which the books keep."""

    is_bounded: ClassVar[bool] = True

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)

    @classmethod
    def gamma(cls, config: PoolConfig) -> float:
        """What is predicted counts in full."""
        return 1.0

    def key(self, tenant: Tenant) -> float:
        """``p``."""
        return tenant.counter + tenant.expected_rest / tenant.weight

    def backlogged(self, tenant: Tenant) -> None:
        """Lift to the smallest ``p``, or, while nobody waits, to that of the tenant that was last to stop waiting."""
        first = self._keys.top() or self._counters.last_left
        if first is None:
            self._counters.backlogged(tenant)
        else:
            self._counters.backlogged(tenant, self.key(first) - tenant.expected_rest / tenant.weight)
        self._keys.add(tenant)

    def stopped(self, request: Request, now: float) -> None:
        """What it did not produce is refunded."""
        if request.tenant.since:
            self._keys.lowered(request.tenant)
