"""Who is displaced when the queue is full: the lowest first, and never for somebody who is not above them.

An arrival that finds its tenant's or the pool's queue full takes the place of waiting requests of lower tiers, as many
as it needs, if there are enough; otherwise it is refused itself. Displaced is, of the lowest tier of all that wait,
what came last of the tenant that is most over its share of the queue. Whatever has shown a token to its client stays,
and so does everybody of the arrival's own tier and above, whoever they are.

    rank (the largest first) --> unit (the largest load) --> tenant (the largest load) --> request (the newest)
    load = max(requests / the pool's limit, bytes / the pool's limit) / weight

Requests and bytes count together as dominant shares (Ghodsi et al., NSDI 2011), so one index serves both limits.

Cost: O(log n) amortised per request that begins or ceases to wait, and per displaced one; O(tiers) to see whether
enough may go. Nothing where all tiers have one rank: nobody is above anybody.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from router_ext.core.config import PoolConfig

if TYPE_CHECKING:
    from router_ext.core.queues import Tenant
    from router_ext.core.request import Request

_SLACK = 64
"""Forgotten entries tolerated beside as many live ones, before a heap is rebuilt."""


class Crowd:
    """Those of one tenant and rank that may be displaced; or a unit's, or a rank's, which consist of such.

    Attributes:
        num, num_bytes: of all in it. inside: what it consists of, by tenant; empty for a tenant's own.
    """

    __slots__ = ("_heap", "_newest", "_pushes", "inside", "num", "num_bytes", "parent", "scale", "serial")

    def __init__(self, parent: Crowd | None, serial: int, scale: tuple[float, float]) -> None:
        self.parent = parent
        self.serial = serial
        self.scale = scale
        self.num = 0
        self.num_bytes = 0
        self.inside: dict[Tenant, Crowd] = {}
        self._heap: list[tuple[float, int, Crowd]] = []
        self._newest: list[tuple[int, Request]] = []
        self._pushes = 0

    @property
    def load(self) -> float:
        """How much of the queue it fills, by its weight."""
        by_num, by_bytes = self.num * self.scale[0], self.num_bytes * self.scale[1]
        return by_num if by_num > by_bytes else by_bytes

    def part(self, tenant: Tenant, scale: tuple[float, float]) -> Crowd:
        """The part of a tenant, made on first use."""
        part = self.inside.get(tenant)
        if part is None:
            self._pushes += 1
            part = self.inside[tenant] = Crowd(self, self._pushes, scale)
        return part

    def count(self, num: int, num_bytes: int) -> None:
        """So many more, here and in everything it is part of."""
        part: Crowd | None = self
        while part is not None:
            part.num += num
            part.num_bytes += num_bytes
            if num > 0 and part.parent is not None:
                part.parent.grew(part)
            part = part.parent

    def grew(self, part: Crowd) -> None:
        """The load of a part has risen. Loads that fall are seen when they reach the top."""
        heap = self._heap
        heapq.heappush(heap, (-part.load, part.serial, part))
        if len(heap) > 2 * len(self.inside) + _SLACK:
            self._heap = [(-each.load, each.serial, each) for each in self.inside.values()]
            heapq.heapify(self._heap)

    def largest(self) -> Crowd:
        """The part with the largest load; there is one."""
        heap = self._heap
        while True:
            load, serial, part = heap[0]
            if not part.num:
                heapq.heappop(heap)
            elif -load > part.load:
                heapq.heapreplace(heap, (-part.load, serial, part))
            else:
                return part

    def add(self, request: Request) -> None:
        """One more of a tenant's own."""
        newest = self._newest
        heapq.heappush(newest, (-request.seq, request))
        if len(newest) > 2 * self.num + _SLACK:
            self._newest = list({entry[0]: entry for entry in newest if entry[1].crowd is self}.values())
            heapq.heapify(self._newest)

    def newest(self) -> Request:
        """That of a tenant's own which arrived last; there is one."""
        newest = self._newest
        while newest[0][1].crowd is not self:
            heapq.heappop(newest)
        return newest[0][1]


class Shedding:
    """See the module."""

    __slots__ = ("_is_on", "_ranks", "_scale")

    def __init__(self) -> None:
        self._ranks: dict[int, Crowd] = {}
        self._is_on = False
        self._scale = (1.0, 0.0)

    def apply(self, config: PoolConfig, waiting: Iterable[Request]) -> None:
        """Take over limits, ranks, weights and groups of a configuration. O(n)."""
        self._is_on = len({tier.rank for tier in config.tiers.values()}) > 1
        self._scale = (1.0 / config.max_queued, 1.0 / config.max_queued_bytes)
        self._ranks = {}
        for request in waiting:
            request.crowd = None
            self.add(request)

    def add(self, request: Request) -> None:
        """It begins to wait."""
        if not self._is_on or request.output_tokens:
            return
        rank = self._ranks.get(request.queue.rank)
        if rank is None:
            rank = self._ranks[request.queue.rank] = Crowd(None, 0, self._scale)
        unit, member = request.tenant, request.member
        crowd = rank.part(unit, self._weighed(unit))
        own = crowd.part(member, self._weighed(member))
        request.crowd = own
        own.count(1, request.prompt_bytes)
        own.add(request)

    def reweighed(self, tenant: Tenant) -> None:
        """A tenant or group has got another weight. O(tiers)."""
        scale = self._weighed(tenant)
        for rank in self._ranks.values():
            crowd = rank.inside.get(tenant.unit)
            if crowd is None:
                continue
            if tenant.unit is tenant:
                crowd.scale = scale
                rank.grew(crowd)
            own = crowd.inside.get(tenant)
            if own is not None:
                own.scale = scale
                crowd.grew(own)

    def _weighed(self, tenant: Tenant) -> tuple[float, float]:
        return self._scale[0] / tenant.weight, self._scale[1] / tenant.weight

    def remove(self, request: Request) -> None:
        """It waits no longer."""
        own = request.crowd
        if own is None:
            return
        request.crowd = None
        own.count(-1, -request.prompt_bytes)
        if own.num:
            return
        crowd = own.parent
        assert crowd is not None
        del crowd.inside[request.member]
        if crowd.num:
            return
        rank = crowd.parent
        assert rank is not None
        del rank.inside[request.tenant]
        if not rank.num:
            self._ranks = {name: each for name, each in self._ranks.items() if each is not rank}

    def suffices(self, request: Request, num: int, num_bytes: int, *, of: Tenant | None = None) -> bool:
        """Whether so many, with so many bytes, may be displaced for this request (``of`` one tenant)."""
        for crowd in self._below(request, of):
            num -= crowd.num
            num_bytes -= crowd.num_bytes
        return num <= 0 and num_bytes <= 0

    def next(self, request: Request, *, of: Tenant | None = None) -> Request | None:
        """Who is displaced next for this request (``of`` one tenant), None if nobody may be."""
        for crowd in self._below(request, of):
            while crowd.inside:
                crowd = crowd.largest()
            return crowd.newest()
        return None

    def _below(self, request: Request, of: Tenant | None) -> Iterator[Crowd]:
        """What waits of lower tiers, the lowest first."""
        own = request.queue.rank
        for rank in sorted(self._ranks, reverse=True):
            if rank <= own:
                return
            crowd: Crowd | None = self._ranks[rank]
            if of is not None and crowd is not None:
                unit = crowd.inside.get(of.unit)
                crowd = None if unit is None else unit.inside.get(of)
            if crowd is not None:
                yield crowd

    def audit(self, waiting: Iterable[Request]) -> Iterator[str]:
        """What does not agree with those who wait. O(n)."""
        sums: dict[int, list[int]] = {}
        for request in waiting:
            if self._is_on and not request.output_tokens:
                row = sums.setdefault(request.queue.rank, [0, 0])
                row[0] += 1
                row[1] += request.prompt_bytes
                if request.crowd is None or request.crowd.parent is None:
                    yield f"{request.request_id} may be displaced and is in no index"
            elif request.crowd is not None:
                yield f"{request.request_id} may not be displaced and is in an index"
        found = {rank: [crowd.num, crowd.num_bytes] for rank, crowd in self._ranks.items()}
        if found != sums:
            yield f"those that may be displaced are {sums} by rank, the index holds {found}"
