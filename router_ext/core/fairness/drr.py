"""``drr``: deficit round robin, charged by the token.

Rule: backlogged tenants stand in a ring, in the order in which they became backlogged. A round grants each of them a
quantum ``Q`` of service per weight; in turn, a tenant is served while its deficit is positive. Prompts and output
tokens are taken from the deficit as they are delivered, so it may become negative; such a tenant is passed over until
the grants of later rounds have made up for it. Who was stopped for lack of KV is tried first next time.

Here the grants are one level ``L`` for all, which rises by ``Q`` when nobody in the ring is below it, and the deficit
of a tenant is ``w (L - c)`` with the service counter ``c``. Whoever becomes backlogged is lifted as under ``vtc``, so
idling earns nothing; debt is kept until the others have caught up.

``Q`` is ``quantum_ratio * U'`` divided by the largest weight: the heaviest tenant gets this much per round. The
default, 1/40, is a twentieth of the pool's tokens at the prices 1 and 2.

Guarantee: ``c_f - min c <= U'/w_f + Q``: nobody is served above the level, and nobody waits more than ``Q`` below it.
Two backlogged tenants differ by at most ``U'(1/w_f + 1/w_g) + 2 Q`` in service per weight. A quantum near 0 is ``vtc``.

Cost: O(log n) amortised per decision: rounds in which nobody can be served are skipped, not walked through.

Failure mode: a tenant's requests come in clumps of a quantum, and whoever arrives waits for the rest of the round. Like
``vtc`` it knows no latency targets and stands still behind a head that does not fit.

Source: Shreedhar and Varghese, Efficient Fair Queuing using Deficit Round Robin (SIGCOMM 1995); the form for tokens is
the baseline of Sheng et al. (OSDI 2024). One level in place of a deficit per tenant is this product's own: it lets the
counters survive a change of policy, and forgives no debt and keeps no credit that the counters do not know.
"""

from __future__ import annotations

from typing import ClassVar

from router_ext.core.config import PoolConfig
from router_ext.core.fairness.base import Surroundings
from router_ext.core.fairness.vtc import Keyed
from router_ext.core.queues import Tenant


class Drr(Keyed):
    """See the module. The key is the number of the round in which the deficit becomes positive; ties are the ring."""

    is_weighted: ClassVar[bool] = True

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._start = 0.0
        self._quantum = quantum(around.config, around.peak_service, around.config.quantum_ratio)

    @classmethod
    def passes(cls, config: PoolConfig) -> dict[str, float]:
        """One quantum, which is less for all but the heaviest tenant."""
        return {"quantum": config.quantum_ratio}

    def key(self, tenant: Tenant) -> float:
        """Rounds until the level is above the tenant's counter."""
        return (tenant.counter - self._start) // self._quantum

    def adopt(self, tenant: Tenant) -> None:
        """A change of policy or configuration begins the first round at the floor."""
        self._start = self._counters.floor_or_last()
        super().adopt(tenant)

    def backlogged(self, tenant: Tenant) -> None:
        """Lift, and enter the ring; whoever finds it empty begins the first round."""
        self._counters.backlogged(tenant)
        if not len(self._keys):
            self._start = tenant.counter
        self._keys.add(tenant)


def quantum(config: PoolConfig, peak_service: float, ratio: float) -> float:
    """``Q``: service per weight that a round grants. A pool without KV serves nobody; any number will do there."""
    weights = [*(t.weight for t in config.tenants.values()), *(g.weight for g in config.groups.values())]
    heaviest = max(weights, default=1.0)
    return ratio * (peak_service or 1.0) / heaviest
