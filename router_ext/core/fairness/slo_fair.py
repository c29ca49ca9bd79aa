"""``slo-fair``: weighted virtual token counters with bounded urgency. The default policy.

Rule:
    1. The *pick* is the head of the backlogged tenant with the smallest key
       ``c + gamma * predicted service in flight / w`` (gamma 0: the counter itself).
    2. An admission of tenant ``f`` that is not the pick is allowed only while ``c_f - V <= pass_f``, with ``V`` taken
       again after every admission. Three kinds of admissions use such a pass:
       - *urgent*: heads of tiers with a TTFT target that have shown no token, ``pass = burst / w``; the earliest
         deadline that can still be met first, then late ones. They pass gates and claims.
       - *another backend* than the one the pick waits for, and *backfill* behind it, ``pass = 0.02 U' / w``: less than
         the lead that running work may be cut for (``core.preemption``), or what goes ahead would be cut again.
    3. Urgent heads that fit nowhere, then the pick, claim the backend where they fit soonest; non-urgent work does
       not use a claimed backend in the same decision, except what the claimant leaves over.
    4. A request whose slice has just ended goes on where it ended, ahead of the pick, while the bound leaves room for
       it (``may_go_on``); not while somebody urgent can be on time.
    5. While a tenant owes an admission to an aged request of a lower tier, its urgent heads stand back: the aged one
       gets what their pass would have allowed (behind the claims), and if it fits nowhere, the tenant's next turn.
       Otherwise a tenant that lives on its pass, and so is never in turn, would starve its own lower tiers.

Guarantee: ``c_f - V <= U'/w_f + max pass_f`` for every backlogged tenant, the pair bound of ``core.bounds``, and for
a tenant inside its share its tier's target as far as the hardware allows. Urgency is a privilege of those inside
their share: a tenant that floods a tier with a target runs out of pass and is served at its share.

Cost: O(log n) amortised per decision. Urgent heads lie in heaps by deadline (on time, late); those whose tenant is out
of pass lie in a third heap by the floor at which they may pass again. At most a few heads of each kind may fail per
pass over the candidates, so nothing scans all tenants.

A head that was late once stays among the late ones, so that the order does not flip with estimates.

Failure mode: with a deadline that nothing can meet, urgent heads are late and go in the order of their deadlines
within their pass, then at their share.

Source: Sheng et al. (OSDI 2024) for counters and lift; urgency within a pass and claims are this product's own, from
token-level simulation: free skipping broke the bound, claims that stick to a request broke it less often.
"""

from __future__ import annotations

from typing import ClassVar

from router_ext.core.calls import TagOrder
from router_ext.core.config import PoolConfig
from router_ext.core.cost import pool_tokens
from router_ext.core.fairness.base import FairnessPolicy, Standing, Surroundings, Walk
from router_ext.core.front_heap import FrontHeap
from router_ext.core.queues import Tenant, TierQueue
from router_ext.core.request import Request
from router_ext.core.siblings import MinIndex

_ON_TIME_TRIES = 3
_LATE_TRIES = 2
"""Urgent heads that may fail per pass: enough to fill a gap the first is too large for, few enough to stay O(1)."""

_BACKFILL_TRIES = 3
"""Other tenants tried behind a pick that waits."""

_OWN_TRIES = 3
_BACKFILL_AGENTS = 3
"""Calls per agent, and agents behind the first, tried in the pick's own lane if that is one of agents."""

_URGENT, _LATE_HEAD, _URGENT_PICK = Standing.URGENT, Standing.LATE, Standing.URGENT_PICK
_PICK, _BACKFILL = Standing.PICK, Standing.BACKFILL

_NOWHERE, _ON_TIME, _LATE, _OUT_OF_PASS = range(4)
"""Which heap holds the entry of a queue that counts (``TierQueue.urgency``)."""

_Entry = tuple[float, int, int, TierQueue]
"""(key, order of its head, version, queue): counts only while ``queue.version == version``."""


def urgency_ratio(config: PoolConfig) -> float:
    """Share of ``U'`` by which urgent work may go ahead; 0 if no tier has a target."""
    has_target = any(tier.ttft_target_s is not None for tier in config.tiers.values())
    return config.burst_ratio if has_target else 0.0


class SloFair(FairnessPolicy):
    """See the module."""

    is_gated: ClassVar[bool] = True
    is_preemptive: ClassVar[bool] = True
    is_bounded: ClassVar[bool] = True
    orders_agents: ClassVar[bool] = True

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        counters, config = around.counters, around.config
        self._first_token_s = around.first_token_s
        self._aging_s = config.aging_s
        self._aging_ratio = config.aging_ratio
        self._on_time: FrontHeap[_Entry] = FrontHeap()
        self._late: FrontHeap[_Entry] = FrontHeap()
        self._parked: FrontHeap[_Entry] = FrontHeap()
        self._num_live = 0
        self._gamma = config.gamma
        self._peak_service = around.peak_service
        self._service_per_held = around.peak_service / max(1, pool_tokens(config))
        self._keys = counters.index
        if self._gamma:
            self._keys = MinIndex(self._key)
            self.charge = self._charge

    @classmethod
    def passes(cls, config: PoolConfig) -> dict[str, float]:
        """Urgent heads, and whoever starts while the pick waits."""
        return {"urgency": urgency_ratio(config), "backfill": config.backfill_ratio}

    @classmethod
    def gamma(cls, config: PoolConfig) -> float:
        """As configured."""
        return config.gamma

    def _key(self, tenant: Tenant) -> float:
        return tenant.counter + self._gamma * tenant.expected_rest / tenant.weight

    # --- what the scheduler reports --------------------------------------------------------------------------------

    def backlogged(self, tenant: Tenant) -> None:
        """Lift, and enter the order of keys."""
        self._counters.backlogged(tenant)
        if self._keys is not self._counters.index:
            self._keys.add(tenant)

    def adopt(self, tenant: Tenant) -> None:
        """Enter a tenant that has been backlogged before this policy took over; no lift."""
        if self._keys is not self._counters.index:
            self._keys.add(tenant)

    def idle(self, tenant: Tenant) -> None:
        """Leave the order of keys."""
        self._counters.idle(tenant)
        if self._keys is not self._counters.index:
            self._keys.discard(tenant)

    def stopped(self, request: Request, now: float) -> None:
        """What it had in flight no longer counts in its tenant's key."""
        if self._gamma and request.tenant.since:
            self._keys.lowered(request.tenant)

    def _charge(self, request: Request, service: float) -> None:
        """With gamma: what is delivered counts in full and is expected no longer, so the key may fall."""
        self._counters.charge(request, service)
        if request.tenant.since:
            self._keys.lowered(request.tenant)

    def refunded(self, request: Request) -> None:
        """Its tenant may be in turn sooner, or within its pass again."""
        self.reweighed(request.tenant)

    def reweighed(self, tenant: Tenant) -> None:
        """It may be in turn sooner, or within its pass again."""
        if not tenant.since:
            return
        self._keys.lowered(tenant)
        for queue in tenant.by_rank:
            if queue.urgency == _OUT_OF_PASS:
                queue.urgency = _NOWHERE
                queue.indexed = None
                self._num_live -= 1
                self.head_changed(queue)

    def head_changed(self, queue: TierQueue) -> None:
        """Keep the urgency index: one counting entry per queue whose head is urgent."""
        if queue.ttft_target_s is None and queue.urgency == _NOWHERE:
            return
        head = queue.head
        if head is None or head.output_tokens or head.deadline_s is None:
            if queue.urgency != _NOWHERE:
                queue.urgency = _NOWHERE
                queue.indexed = queue.late = None
                queue.version += 1
                self._num_live -= 1
            return
        if queue.indexed is head:
            return
        queue.indexed = head
        if queue.urgency == _OUT_OF_PASS:
            return
        if queue.urgency == _NOWHERE:
            self._num_live += 1
            if queue.late is head:
                # Taken over from the policy before: estimates wobble, and a new weight somewhere reorders nobody.
                self._enter(self._late, _LATE, queue, head.deadline_s)
                return
        self._enter(self._on_time, _ON_TIME, queue, head.deadline_s)

    def _enter(self, heap: FrontHeap[_Entry], where: int, queue: TierQueue, key: float) -> None:
        head = queue.head
        assert head is not None
        queue.urgency = where
        queue.late = head if where == _LATE else None
        queue.version += 1
        heap.push((key, head.order, queue.version, queue))
        if len(heap) > 2 * self._num_live + 64:
            heap.keep(lambda entry: entry[3].version == entry[2])

    def ahead(self, request: Request, now: float) -> tuple[float, float] | None:
        """What its tenant has in line before it, at the tenant's share; at the whole rate where urgency lets it pass,
        and nothing can be said of an agent's calls, which go by the agent's tag."""
        if request.agent_id is not None:
            return None
        tenant = request.tenant
        floor = self._counters.floor()
        may_pass = floor is None or tenant.counter - floor <= tenant.urgency_pass
        share = 1.0 if request.deadline_s is not None and may_pass else self._counters.share(request.member)
        return request.member.tokens_ahead(request, self._aging_ratio), share

    # --- the decision ----------------------------------------------------------------------------------------------

    def first_urgent(self, now: float, floor: float) -> Request | None:
        """The head with the earliest deadline that can still be met, of tenants within their pass."""
        entry = self._next_on_time(now, floor) if self._on_time else None
        if entry is None:
            return None
        self._on_time.push(entry)
        return entry[3].head

    def candidates(self, now: float) -> Walk:
        """Urgent heads within their pass, the pick, then others within the smaller pass.

        After an urgent admission the generator goes on, with the floor taken again; after any other the caller
        starts anew.
        """
        counters = self._counters
        floor = counters.floor()
        if floor is None:
            return
        if self._num_live:
            on_time: list[_Entry] = []
            late: list[_Entry] = []
            on_time_tries = _ON_TIME_TRIES
            late_tries = _LATE_TRIES
            in_turn = self._keys.top()
            self._unpark(floor)
            try:
                while True:
                    if on_time_tries and (entry := self._next_on_time(now, floor)) is not None:
                        on_time.append(entry)
                        on_time_tries -= 1
                        standing = _URGENT
                    elif late_tries and (entry := self._next_late(floor)) is not None:
                        late.append(entry)
                        late_tries -= 1
                        standing = _LATE_HEAD
                    else:
                        break
                    queue = entry[3]
                    aged = queue.member.aged(now, self._aging_s)
                    if aged is not None:
                        # Its tenant's pass belongs to the aged request, then its turn.
                        if in_turn is None or queue.member is not in_turn.front:
                            yield aged, _BACKFILL
                            until = max(queue.tenant.counter, floor + queue.tenant.held_inside(queue.member, 0.0))
                            self._enter(self._parked, _OUT_OF_PASS, queue, until)
                            if standing is _URGENT:
                                on_time_tries += 1
                            else:
                                late_tries += 1
                        continue
                    head = queue.head
                    assert head is not None
                    yield head, standing
                    if queue.version != entry[2]:
                        # It was admitted. Its tenant's next head, and whoever the floor lets pass, may be on time.
                        floor = counters.floor()
                        if floor is None:
                            return
                        self._unpark(floor)
                        if standing is _URGENT:
                            on_time_tries += 1
                        else:
                            late_tries += 1
            finally:
                _restore(self._on_time, on_time)
                _restore(self._late, late)
        yield from self._in_turn(now, floor)

    def may_go_on(self, request: Request, held_tokens: int, now: float) -> bool:
        """While its tier is in turn in its tenant, nobody urgent can be on time, and the bounds leave room.

        Calls of agents go in the order of their tags alone, and while an aged request is owed an admission it gets it.

        What a tenant can still be charged for what it runs is at most ``U'`` times the share of the pool's KV that this
        holds. So a lead of at most ``pass + U' * (1 - held / M)``, this slice counted, keeps it below ``U' + pass`` as
        without; the same for a member inside its group and, without the pass, for a key.
        """
        unit, member, lane = request.tenant, request.member, request.lane
        floor = self._counters.floor()
        head = member.head(now, self._aging_s)
        if floor is None or head is None or head.queue is not request.queue:
            return False
        if isinstance(lane.line, TagOrder) and lane.line.first() is not request:
            return False
        if member.aged(now, self._aging_s) is not None:
            return False
        if self._num_live and self.first_urgent(now, floor) is not None:
            return False
        room, per_held = self._peak_service, self._service_per_held
        lead = (unit.counter - floor - unit.backfill_pass) * unit.weight
        if lead > room - per_held * (unit.held_tokens + held_tokens):
            return False
        if member is not unit and (front := unit.front) is not None:
            lead = (member.counter - front.counter - member.backfill_pass) * member.weight
            if lead > room - per_held * (member.held_tokens + held_tokens):
                return False
        lead = lane.counter - request.queue.keys.floor()
        return lead <= room - per_held * (lane.held_tokens + held_tokens)

    def _in_turn(self, now: float, floor: float) -> Walk:
        keys = self._keys
        popped: list[tuple[float, int, Tenant]] = []
        try:
            is_pick = True
            while len(popped) <= _BACKFILL_TRIES and (entry := keys.pop()) is not None:
                popped.append(entry)
                tenant = entry[2]
                if is_pick:
                    head = tenant.head(now, self._aging_s)
                    assert head is not None
                    is_urgent = (
                        head.deadline_s is not None
                        and head.output_tokens == 0
                        and tenant.counter - floor <= tenant.urgency_pass
                    )
                    yield head, _URGENT_PICK if is_urgent else _PICK
                    is_pick = False
                    if isinstance(head.lane.line, TagOrder):
                        yield from self._behind(head, head.lane.line)
                elif tenant.counter - floor <= tenant.backfill_pass:
                    # In the order of counters everybody behind is further above the floor; passes differ by weight
                    # only, so the few tries go to those who are next in turn anyway.
                    head = tenant.head(now, self._aging_s)
                    assert head is not None
                    yield head, _BACKFILL
        finally:
            keys.restore(popped)

    def _behind(self, head: Request, calls: TagOrder) -> Walk:
        """Calls of agents that may use what their tenant's pick, one of them, leaves: the tenant is in turn."""
        behind = calls.walk(1 + _BACKFILL_AGENTS, _OWN_TRIES)
        try:
            for call in behind:
                if call is not head:
                    yield call, _BACKFILL
        finally:
            behind.close()

    def _next_on_time(self, now: float, floor: float) -> _Entry | None:
        heap = self._on_time
        while (entry := heap.first()) is not None:
            heap.pop()
            queue = entry[3]
            if queue.version != entry[2]:
                continue
            head = queue.head
            assert head is not None
            assert head.deadline_s is not None
            if not self._may_pass(queue, floor):
                continue
            if now + self._first_token_s(head.input_tokens) > head.deadline_s:
                self._enter(self._late, _LATE, queue, head.deadline_s)
                continue
            return entry
        return None

    def _next_late(self, floor: float) -> _Entry | None:
        heap = self._late
        while (entry := heap.first()) is not None:
            heap.pop()
            queue = entry[3]
            if queue.version == entry[2] and self._may_pass(queue, floor):
                return entry
        return None

    def _may_pass(self, queue: TierQueue, floor: float) -> bool:
        """Whether the tenant is inside its pass (also in its group); if not, it is parked until the floor has risen."""
        tenant = queue.tenant
        until = tenant.counter - tenant.urgency_pass
        if until <= floor:
            member = queue.member
            if member is tenant:
                return True
            held = tenant.held_inside(member, member.urgency_pass)
            if held == 0.0:
                return True
            until = floor + held
        self._enter(self._parked, _OUT_OF_PASS, queue, until)
        return False

    def _unpark(self, floor: float) -> None:
        parked = self._parked
        while (first := parked.first()) is not None and first[0] <= floor:
            parked.pop()
            _, _, version, queue = first
            if queue.version != version:
                continue
            head = queue.head
            assert head is not None
            assert head.deadline_s is not None
            self._enter(self._on_time, _ON_TIME, queue, head.deadline_s)


def _restore(heap: FrontHeap[_Entry], held: list[_Entry]) -> None:
    for entry in held:
        if entry[3].version == entry[2]:
            heap.push(entry)
