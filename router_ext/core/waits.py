"""How long requests wait: the hint for those that are refused, and who is refused because waiting would be in vain.

What is queued is counted in output tokens, by its predictions and corrected by how wrong those of finished requests
were; what comes off the queue is the rate at which backends deliver tokens *while somebody waits*: a pool with little
to do is not slow, it is idle.

    drain of the pool       tokens queued / rate
    drain of one tenant     its tokens / (its share of the rate), never more than that of the pool
    least wait at arrival   tokens ahead of the request in its tenant and rank / (its share of the rate), likewise

The least wait errs on the short side: only what is sure to go first is counted as ahead (``FairnessPolicy.ahead``),
others may stop competing and leave their share, and nothing is said before the rate has been measured for
``_MEASURED_S`` and predictions on twenty finished requests. A request is refused only if even so it would wait half as
long again as its tier allows.

Source: waiting-time estimate of QLM (2024): the sum of many outputs concentrates, so means suffice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from router_ext.core.estimates import PredictionBias, ServiceRate, Throughput
from router_ext.core.in_line import InLine, own_ahead

if TYPE_CHECKING:
    from router_ext.core.books import Books
    from router_ext.core.fairness.counters import Counters
    from router_ext.core.fleet import Fleet
    from router_ext.core.queues import Tenant
    from router_ext.core.request import Request

_MEASURED_S = 10.0
"""Time with somebody waiting from which the rate is trusted enough to refuse by it: the first seconds fill the pool."""

CERTAIN = 1.5
"""A refusal on arrival needs an estimate this much above the limit. Too few refusals cost a wait that ends in the same
429; one too many costs a request that would have been served."""


class Waits:
    """See the module.

    Attributes:
        throughput: output tokens per second while anything runs. rate: those of one busy backend while somebody waits.
        bias: how long outputs are, by how long they were predicted.
    """

    __slots__ = ("_books", "_counters", "_fleet", "bias", "rate", "throughput")

    def __init__(self, *, books: Books, counters: Counters, fleet: Fleet) -> None:
        self.throughput = Throughput()
        self.rate = ServiceRate()
        self.bias: PredictionBias = books.bias
        self._books = books
        self._counters = counters
        self._fleet = fleet

    def least_s(self, request: Request, now: float) -> float | None:
        """The least a request that has just arrived will wait in line; None if nothing can be said."""
        rate, bias = self._full_rate(), self.bias.ratio
        if rate is None or bias is None or self.rate.measured_s < _MEASURED_S:
            return None
        ahead = self._books.policy.ahead(request, now)
        if ahead is None:
            return None
        tokens, share = ahead
        return min(tokens / share, self._books.room.queued_tokens) * bias / rate

    def in_line(self, request: Request) -> InLine:
        """Where a waiting request stands. Cost: O(requests of its tenant that wait)."""
        ahead, tokens = own_ahead(request)
        rate, wait_s = self._full_rate(), None
        if rate:
            share = self._counters.share(request.member)
            wait_s = min(tokens / share, self._books.room.queued_tokens) * (self.bias.ratio or 1.0) / rate
        return InLine(
            own_ahead=ahead,
            own_queued=request.member.num_queued,
            is_aside=request.parked_s is not None or request.held_s is not None,
            wait_s=wait_s,
        )

    def drain_s(self, tenant: Tenant | None) -> float:
        """Seconds until what waits now has been produced, at the measured rate; of one tenant at its share of it.

        Unjittered and unbounded; 1 if nothing has been measured yet.
        """
        rate = self._full_rate() or self.throughput.rate
        if not rate:
            return 1.0
        tokens = float(self._books.room.queued_tokens)
        if tenant is not None:
            tokens = min(tokens, tenant.queued_tokens / self._counters.share(tenant))
        return tokens * (self.bias.ratio or 1.0) / rate

    def _full_rate(self) -> float | None:
        """Output tokens per second of all usable backends, measured while somebody waited."""
        per_backend = self.rate.tokens_per_backend_s
        return None if not per_backend else per_backend * max(1, len(self._fleet.usable))
