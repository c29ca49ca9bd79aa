"""A line of waiting requests that a policy picks from by its own key of the tenant, then by its own order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from router_ext.core.queues import Tenant
from router_ext.core.request import Request
from router_ext.core.siblings import MinIndex


class Line:
    """Requests by their tenant's key; of one tenant, whoever ran before goes first, then arrival decides.

    For policies that are ``is_watching``; requests of several kinds are several lines.

    Cost: O(log n) amortised, beside a memory move over the requests of one tenant.

    Attributes:
        index: the tenants that have a request here.
    """

    __slots__ = ("_by_tenant", "index")

    def __init__(self, key: Callable[[Tenant], float]) -> None:
        self.index: MinIndex[Tenant] = MinIndex(key)
        self._by_tenant: dict[Tenant, list[tuple[bool, int, Request]]] = {}
        """(is fresh, seq, request), ascending."""

    def add(self, request: Request) -> None:
        """Enter a request of a tenant that is backlogged."""
        line = self._by_tenant.get(request.tenant)
        if line is None:
            line = self._by_tenant[request.tenant] = []
            self.index.add(request.tenant)
        insort(line, (not request.is_resumed, request.seq, request))

    def remove(self, request: Request) -> bool:
        """Take a request out; whether it was here."""
        line = self._by_tenant.get(request.tenant, [])
        position = bisect_left(line, (not request.is_resumed, request.seq))
        if position == len(line) or line[position][2] is not request:
            return False
        del line[position]
        if not line:
            del self._by_tenant[request.tenant]
            self.index.discard(request.tenant)
        return True

    def first(self) -> Request | None:
        """Who goes next."""
        tenant = self.index.top()
        return None if tenant is None else self._by_tenant[tenant][0][2]
