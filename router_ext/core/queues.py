"""Who waits: per-tenant queues by tier and key, and the room that holds them all.

Inside one tenant and tier, requests wait in lanes by key (``core.lanes``); the key that has received the least
service there goes first. Every operation is O(1) or O(log n); requests are removed by handle, wherever they stand.

A request that no usable backend could hold is *parked*: it waits, counts against the limits of queues and time, but
stands in no queue, so it is nobody's turn and its tenant is not backlogged by it. It comes back to where it stood.
So does a suspect that is *held* until others have been tried (``core.trial``).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from router_ext.core.calls import TagOrder
from router_ext.core.config import TenantConfig, TierConfig
from router_ext.core.ids import KeyId, RequestId, TenantId, TierName
from router_ext.core.lanes import ArrivalOrder, Lane
from router_ext.core.lengths import LEAST_SLICE
from router_ext.core.lifecycle import State
from router_ext.core.request import Request
from router_ext.core.shedding import Shedding
from router_ext.core.siblings import Siblings

_IDLE_LANES = 64
"""Lanes without requests tolerated beside as many others, before those that owe nothing are forgotten."""

if TYPE_CHECKING:
    from router_ext.core.agents import Habits

_COMPARED_LANES = 64
"""With more keys only a request's own is looked at to see what is ahead of it."""


class TierQueue:
    """Waiting requests of one tenant in one tier.

    Attributes:
        member: the tenant they are of. tenant: what competes in the pool, the same or its group.
        head: who goes next, or None. Kept up to date, because decisions read it far more often than it changes.
        queued_tokens: predicted output of those that wait.
        lanes: by key; those without requests are kept while they are ahead of the others. agent_lane: of agents.
        urgency, indexed, late, version: notes of the policy's urgency index (``fairness.slo_fair``), which forgets
            entries lazily.
    """

    __slots__ = (
        "_keep",
        "_num",
        "agent_lane",
        "head",
        "indexed",
        "keys",
        "lanes",
        "late",
        "member",
        "name",
        "queued_tokens",
        "rank",
        "tenant",
        "ttft_target_s",
        "urgency",
        "version",
    )

    def __init__(self, member: Tenant, tier: TierConfig) -> None:
        self.member = member
        self.tenant = member.unit
        self.name = tier.name
        self.rank = tier.rank
        self.ttft_target_s = tier.ttft_target_s
        self.head: Request | None = None
        self.lanes: dict[KeyId, Lane] = {}
        self.agent_lane: Lane | None = None
        self.keys: Siblings[Lane] = Siblings()
        self.urgency = 0
        self.indexed: Request | None = None
        self.late: Request | None = None
        self.version = 0
        self.queued_tokens = 0
        self._num = 0
        self._keep = _IDLE_LANES

    def __len__(self) -> int:
        return self._num

    def lane(self, key: KeyId) -> Lane:
        """The lane of a key, made on first use. Idle lanes that owe nothing are forgotten now and then, in O(n)."""
        lane = self.lanes.get(key)
        if lane is None:
            if len(self.lanes) >= self._keep:
                self._forget_idle()
            lane = self.lanes[key] = Lane(key, ArrivalOrder())
        return lane

    def agents(self) -> Lane:
        """The lane of agents, made on first use."""
        if self.agent_lane is None:
            self.agent_lane = Lane(None, TagOrder())
        return self.agent_lane

    def _forget_idle(self) -> None:
        base = self.keys.base()
        self.lanes = {
            key: lane for key, lane in self.lanes.items() if lane.num_open or lane.since or lane.counter > base
        }
        self._keep = 2 * len(self.lanes) + _IDLE_LANES

    def add(self, request: Request) -> None:
        """Queue a request in its lane."""
        lane = request.lane
        lane.line.add(request)
        tokens = request.weight_tokens
        lane.queued_tokens += tokens
        self.queued_tokens += tokens
        self._num += 1
        if not lane.since:
            self.keys.enter(lane)
        if lane is self.keys.front:
            self.head = lane.line.first()

    def sort(self) -> None:
        """Bring fresh requests back into the order of arrival, after some came back from parking. O(n)."""
        for lane in self.keys.waiting():
            lane.line.sort()
        self._see_head()

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        lane = request.lane
        lane.line.remove(request)
        tokens = request.weight_tokens
        lane.queued_tokens -= tokens
        self.queued_tokens -= tokens
        self._num -= 1
        first = lane.line.first()
        if first is None:
            self.keys.leave(lane)
            self._see_head()
        elif request is self.head:
            self.head = first

    def reorder(self) -> bool:
        """The lane in front has been charged up to its rival. Whether another request heads the queue now."""
        if not self.keys.reorder():
            return False
        self._see_head()
        return True

    def refunded(self, lane: Lane) -> bool:
        """A charge to a lane was taken back in part. Whether another request heads the queue now."""
        if not self.keys.lowered(lane):
            return False
        self._see_head()
        return True

    def tokens_ahead(self, key: KeyId) -> int:
        """Predicted output that is sure to go before a plain request of this key. O(keys), for a few of them."""
        lane = self.lanes.get(key)
        own = 0 if lane is None else lane.queued_tokens
        if len(self.lanes) > _COMPARED_LANES:
            return own
        return sum(min(own, each.queued_tokens) for each in self._all_lanes())

    def level(self) -> None:
        """Make all keys start even: their service was counted in other units."""
        self.keys.level(self._all_lanes())
        self._see_head()

    def _all_lanes(self) -> Iterator[Lane]:
        yield from self.lanes.values()
        if self.agent_lane is not None:
            yield self.agent_lane

    def _see_head(self) -> None:
        front = self.keys.front
        self.head = None if front is None else front.line.first()

    def requests(self) -> list[Request]:
        """All waiting requests: lanes by counter, in each its order. O(n)."""
        return [request for lane in self.keys.waiting() for request in lane.line.requests()]


class Tenant:
    """One tenant's share, counter and queues.

    Tenants compete for the pool; if one is a member of a ``Group``, the group does in its place, and the tenant
    competes with the other members for what the group gets. ``unit`` is the one that competes in the pool, and what
    requests and queues call their ``tenant``; the tenant itself is their ``member``.

    Attributes:
        counter: service received divided by weight, against those it competes with; charged under every policy.
        since: number of the current backlogged period, 0 while idle. Unique, so it tells periods apart and breaks
            ties in favour of whoever has waited longest.
        urgency_pass, backfill_pass: how far above the floor the counter may be for going ahead of the pick.
        account: what the policy in force keeps of a unit beyond its counter; nobody else reads it.
        expected_rest: predicted service of a unit's running slices, kept while the decision key counts it.
        aging_credit: admissions owed to aged requests of lower tiers.
        habits: what its last agents were like (``core.agents``).
        held_tokens: KV that its running slices reserved when they started, of a group that of its members.
        num_queued, num_parked: all that wait, and those of them that are parked or held. queued_bytes: what they hold.
    """

    __slots__ = (
        "account",
        "aging_credit",
        "backfill_pass",
        "by_rank",
        "counter",
        "expected_rest",
        "habits",
        "held_tokens",
        "is_configured",
        "max_queued",
        "num_dispatched",
        "num_parked",
        "num_queued",
        "num_running",
        "output_tokens",
        "prompt_tokens",
        "queued_bytes",
        "queued_tokens",
        "queues",
        "since",
        "stall_service",
        "tenant_id",
        "unit",
        "urgency_pass",
        "weight",
    )

    def __init__(self, config: TenantConfig, *, is_configured: bool = True) -> None:
        self.tenant_id: TenantId = config.tenant
        self.unit: Tenant = self
        self.weight = config.weight
        self.max_queued = config.max_queued
        self.is_configured = is_configured
        self.counter = 0.0
        self.account: Any = None
        self.since = 0
        self.queues: dict[TierName, TierQueue] = {}
        self.by_rank: list[TierQueue] = []
        self.num_queued = 0
        self.num_parked = 0
        self.queued_bytes = 0
        self.num_running = 0
        self.held_tokens = 0
        self.num_dispatched = 0
        self.queued_tokens = 0
        self.prompt_tokens = 0
        self.stall_service = 0.0
        self.output_tokens = 0
        self.expected_rest = 0.0
        self.urgency_pass = 0.0
        self.backfill_pass = 0.0
        self.aging_credit = 0.0
        self.habits: Habits | None = None

    @property
    def has_line(self) -> bool:
        """Somebody stands in its queues (what is parked or held does not)."""
        return self.num_queued != self.num_parked

    @property
    def is_backlogged(self) -> bool:
        """Has at least one request in its queues."""
        return self.since != 0

    def queue(self, tier: TierConfig) -> TierQueue:
        """The tenant's queue of ``tier``, made on first use."""
        queue = self.queues.get(tier.name)
        if queue is None:
            queue = self.queues[tier.name] = TierQueue(self, tier)
            self.sort_tiers()
            self.unit.see_queues()
        return queue

    def tokens_ahead(self, request: Request, aging_ratio: float) -> float:
        """Predicted output of this tenant that is sure to go before a request that has just arrived.

        In its tier that is its own key's, and as much of every other key; of better tiers all, but while its tier is
        served by age at least the share of the aged.
        """
        queue = request.queue
        own = queue.tokens_ahead(request.key)
        better = 0
        for each in self.by_rank:
            if each.rank >= queue.rank:
                break
            better += each.queued_tokens
        return own + better if not aging_ratio else min(own + better, own / aging_ratio)

    def sort_tiers(self) -> None:
        """Bring the queues into rank order, after a tier was added or its rank changed."""
        self.by_rank = sorted(self.queues.values(), key=lambda queue: (queue.rank, queue.name))

    def head(self, now: float, aging_s: float) -> Request | None:
        """Who goes next: the best rank, unless an aged request of a lower tier is owed an admission."""
        if self.aging_credit >= 1.0 and (aged := self.aged(now, aging_s)) is not None:
            return aged
        for queue in self.by_rank:
            if queue.head is not None:
                return queue.head
        return None

    def aged(self, now: float, aging_s: float) -> Request | None:
        """The request of a lower tier that is owed the next admission, the oldest of those in turn there, or None."""
        if self.aging_credit < 1.0:
            return None
        is_below = False
        aged: Request | None = None
        for queue in self.by_rank:
            head = queue.head
            if head is None:
                continue
            if is_below and now - head.arrival_s > aging_s and (aged is None or head.seq < aged.seq):
                aged = head
            is_below = True
        return aged

    def note_admission(self, request: Request, aging_ratio: float) -> None:
        """Book an admission for the aging rule: lower tiers that wait earn their share, the served one pays."""
        rank = request.queue.rank
        if request.queue is not self.by_rank[0] and self.aging_credit >= 1.0 and self._waits_above(rank):
            self.aging_credit -= 1.0
        elif len(self.by_rank) > 1 and self.aging_credit < 1.0:
            self.aging_credit += aging_ratio

    def _waits_above(self, rank: int) -> bool:
        return any(queue.head is not None and queue.rank < rank for queue in self.by_rank)

    def level(self) -> None:
        """Make keys (and members) start even: their service was counted in other units."""
        for queue in self.by_rank:
            queue.level()

    # What a group does and a tenant alone, its own only member, need not.

    def enter(self, member: Tenant) -> None:
        """The queues of a member are no longer empty."""

    def leave(self, member: Tenant) -> None:
        """The queues of a member are empty."""

    def charged(self, member: Tenant, service: float) -> None:
        """The counter of a member has changed."""

    def see_queues(self) -> None:
        """A member has one more queue."""

    def welcome(self, member: Tenant) -> None:
        """A tenant becomes a member."""

    def dismiss(self, member: Tenant) -> None:
        """A tenant is a member no longer."""

    def reweigh(self, member: Tenant, weight: float) -> None:
        """Apply a changed weight of a member to future charges."""

    @property
    def front(self) -> Tenant | None:
        """The member that is next."""
        return self

    def held_inside(self, member: Tenant, allowed: float) -> float:
        """By how much the floor must rise until a member is ahead of the one in front by no more than ``allowed``."""
        return 0.0

    def share_inside(self, member: Tenant) -> float:
        """Share of what the unit gets that a member has by weight among those that wait; 1 for a tenant alone."""
        return 1.0


class Group(Tenant):
    """Tenants that compete in the pool as one, and share what it gets by their own weights.

    Its pick is that of the member with the smallest counter; urgent heads of another member may go ahead inside the
    group as in the pool, while their member is within its pass.

    Attributes:
        members: those that wait, by their counters. waiting_weight: the sum of their weights.
        by_rank: the queues of all members, in no order. Numbers of requests and tokens are kept by the members.
    """

    __slots__ = ("members", "tenants", "waiting_weight")

    def __init__(self, name: str, weight: float) -> None:
        super().__init__(TenantConfig(tenant=TenantId(name), weight=weight))
        self.members: Siblings[Tenant] = Siblings()
        self.tenants: dict[TenantId, Tenant] = {}
        self.waiting_weight = 0.0

    @property
    def has_line(self) -> bool:
        """Somebody stands in a member's queues."""
        return self.members.front is not None

    def enter(self, member: Tenant) -> None:
        """The queues of a member are no longer empty."""
        self.members.enter(member)
        self.waiting_weight += member.weight

    def leave(self, member: Tenant) -> None:
        """The queues of a member are empty."""
        self.members.leave(member)
        self.waiting_weight -= member.weight
        if self.members.front is None:
            self.waiting_weight = 0.0

    def charged(self, member: Tenant, service: float) -> None:
        """The counter of a member has changed: see who is next."""
        members = self.members
        if service < 0.0:
            members.lowered(member)
        elif member.counter >= members.rival and member is members.front:
            members.reorder()

    def head(self, now: float, aging_s: float) -> Request | None:
        """Who goes next of the member that is next."""
        front = self.members.front
        return None if front is None else front.head(now, aging_s)

    def level(self) -> None:
        """Make keys and members start even."""
        super().level()
        self.members.level(self.tenants.values())

    def welcome(self, member: Tenant) -> None:
        """A tenant becomes a member, and starts at the floor."""
        member.counter = self.members.base()
        self.tenants[member.tenant_id] = member
        self.see_queues()

    def dismiss(self, member: Tenant) -> None:
        """A tenant is a member no longer."""
        if member.since:
            self.leave(member)
        self.members.forget(member)
        del self.tenants[member.tenant_id]
        self.see_queues()

    def reweigh(self, member: Tenant, weight: float) -> None:
        """Apply a changed weight of a member to future charges; what it received stays as it was counted."""
        if member.since:
            self.waiting_weight += weight - member.weight
        member.weight = weight

    def see_queues(self) -> None:
        """Membership has changed, or a member has one more queue."""
        self.by_rank = [queue for tenant in self.tenants.values() for queue in tenant.by_rank]

    @property
    def front(self) -> Tenant | None:
        """The member that is next."""
        return self.members.front

    def held_inside(self, member: Tenant, allowed: float) -> float:
        """By how much the floor must rise until this member is ahead of the one in front by no more than ``allowed``.

        An estimate: what the other members must receive for that, by the group's weight.
        """
        front = self.members.front
        if front is None:
            return 0.0
        excess = member.counter - front.counter - allowed
        if excess <= 0.0:
            return 0.0
        return excess * (self.waiting_weight - member.weight) / self.weight

    def share_inside(self, member: Tenant) -> float:
        """Share of what the group gets that a member has by weight while it waits beside those that do."""
        return member.weight / (self.waiting_weight if member.since else self.waiting_weight + member.weight)


class WaitingRoom:
    """Every waiting request of the pool, with counts and time limits.

    Attributes:
        in_line: requests that stand in a queue, in the order they were queued. ``count``: their number.
        queued_tokens: predicted output of those in line. queued_bytes: what all that wait hold in memory.
        shedding: who of them may be displaced.
        parked: requests that wait outside the queues, in the order they were parked. held: suspects that do.
    """

    __slots__ = (
        "_limits",
        "_needs",
        "_orders",
        "_pushes",
        "count",
        "held",
        "in_line",
        "parked",
        "queued_bytes",
        "queued_tokens",
        "shedding",
    )

    def __init__(self) -> None:
        self.count = 0
        self.queued_tokens = 0
        self.queued_bytes = 0
        self.shedding = Shedding()
        self.in_line: OrderedDict[RequestId, Request] = OrderedDict()
        self.parked: dict[RequestId, Request] = {}
        self.held: dict[RequestId, Request] = {}
        self._limits: list[tuple[float, int, Request]] = []
        self._needs: list[tuple[int, int, Request]] = []
        self._pushes = 0
        self._orders = 0

    @property
    def num_waiting(self) -> int:
        """All that wait, parked and held ones included."""
        return self.count + len(self.parked) + len(self.held)

    def waiting(self) -> Iterator[Request]:
        """All that wait: those in line in their order, then those parked, then those held."""
        yield from self.in_line.values()
        yield from self.parked.values()
        yield from self.held.values()

    def enter(self, request: Request) -> None:
        """The request begins to wait, wherever."""
        self.queued_bytes += request.prompt_bytes
        request.member.queued_bytes += request.prompt_bytes
        self.shedding.add(request)

    def leave(self, request: Request) -> None:
        """The request waits no longer."""
        self.queued_bytes -= request.prompt_bytes
        request.member.queued_bytes -= request.prompt_bytes
        self.shedding.remove(request)

    def take_place(self, request: Request, *, at_front: bool = False) -> None:
        """Give a request that begins to wait its place in the pool-wide order, which it keeps while it waits."""
        self._orders += 1
        request.order = -self._orders if at_front else self._orders

    def add(self, request: Request, *, at_front: bool = False) -> None:
        """Queue a request under its tenant and tier. ``at_front`` concerns the pool-wide order only."""
        tenant = request.member
        tokens = request.mean_rest()
        request.weight_tokens = tokens
        request.queue.add(request)
        if not tenant.since:
            tenant.unit.enter(tenant)
        self.in_line[request.request_id] = request
        if at_front:
            self.in_line.move_to_end(request.request_id, last=False)
        tenant.queued_tokens += tokens
        tenant.num_queued += 1
        self.queued_tokens += tokens
        self.count += 1
        self.note_need(request)

    def remove(self, request: Request) -> None:
        """Take a request out, in O(log n) or better."""
        tenant = request.member
        request.queue.remove(request)
        del self.in_line[request.request_id]
        tenant.queued_tokens -= request.weight_tokens
        tenant.num_queued -= 1
        if not tenant.has_line:
            tenant.unit.leave(tenant)
        self.queued_tokens -= request.weight_tokens
        self.count -= 1

    def park(self, request: Request, now: float) -> None:
        """Let a request that stands in no queue wait outside of them."""
        request.parked_s = now
        self.parked[request.request_id] = request
        request.member.num_queued += 1
        request.member.num_parked += 1

    def unpark(self, request: Request, now: float) -> None:
        """The request waits outside the queues no longer."""
        assert request.parked_s is not None
        request.parked_for_s += now - request.parked_s
        request.parked_s = None
        del self.parked[request.request_id]
        request.member.num_queued -= 1
        request.member.num_parked -= 1

    def hold(self, request: Request, now: float) -> None:
        """Let a suspect that stands in no queue wait outside of them for its trial."""
        request.held_s = now
        self.held[request.request_id] = request
        request.member.num_queued += 1
        request.member.num_parked += 1

    def release(self, request: Request, now: float) -> None:
        """The suspect is held no longer."""
        assert request.held_s is not None
        request.held_for_s += now - request.held_s
        request.held_s = None
        del self.held[request.request_id]
        request.member.num_queued -= 1
        request.member.num_parked -= 1

    def sort(self) -> None:
        """Bring the pool-wide order back, after requests were added out of order. O(n), nearly sorted."""
        self.in_line = OrderedDict(sorted(self.in_line.items(), key=lambda item: item[1].order))

    def least_need(self) -> int:
        """A number of tokens (input plus slice) that no waiting request is below: with less free, nobody can start.

        A lower bound: a request that was queued twice may count with its smaller need.
        """
        needs = self._needs
        while needs and needs[0][2].state is not State.QUEUED:
            heapq.heappop(needs)
        return needs[0][0] if needs else 0

    def note_need(self, request: Request) -> None:
        """The request's slice was planned, or planned anew."""
        self._pushes += 1
        heapq.heappush(self._needs, (_need(request), self._pushes, request))
        if len(self._needs) > 2 * self.count + 64:
            self.measure_needs()

    def measure_needs(self) -> None:
        """Take the need of everyone in line anew: slices were planned anew, or too many entries are forgotten."""
        self._needs = [(_need(request), number, request) for number, request in enumerate(self.in_line.values())]
        heapq.heapify(self._needs)

    def limit(self, request: Request, until_s: float) -> None:
        """Remember that a request may wait until ``until_s``. Requests that left meanwhile are forgotten lazily."""
        self._pushes += 1
        heapq.heappush(self._limits, (until_s, self._pushes, request))
        if len(self._limits) > 2 * self.num_waiting + 64:
            self._limits = [entry for entry in self._limits if _waits(entry[2])]
            heapq.heapify(self._limits)

    def next_limit_s(self) -> float | None:
        """Instant of the next time limit, or None."""
        limits = self._limits
        while limits and not _waits(limits[0][2]):
            heapq.heappop(limits)
        return limits[0][0] if limits else None

    def overdue(self, now: float) -> list[Request]:
        """Requests whose limit has come, in order. One that was queued twice may be named twice."""
        due = []
        while (at := self.next_limit_s()) is not None and at <= now:
            due.append(heapq.heappop(self._limits)[2])
        return due

    def forget_limits(self) -> None:
        """Drop all time limits, before they are set anew from a changed configuration."""
        self._limits = []


def _need(request: Request) -> int:
    """What the request takes when it starts, or less: a slice that follows what is learned may shrink meanwhile."""
    tokens = request.slice_busy
    if request.slice_count >= 0 and tokens > LEAST_SLICE:
        tokens = LEAST_SLICE
    return request.input_tokens + tokens


def _waits(request: Request) -> bool:
    """Whether a time limit still concerns this request: waiting, with nothing shown to its client."""
    return request.state is State.QUEUED and request.output_tokens == 0
