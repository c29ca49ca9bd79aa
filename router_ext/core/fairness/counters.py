"""Service counters: charge, lift, floor. The same under every policy, so that counters survive a policy switch.

Rule: a tenant's counter grows by service divided by weight. The floor ``V`` is the smallest counter among
backlogged tenants. A tenant that becomes backlogged is lifted to ``V``, or, when nobody waits, to the counter of
the tenant that was last to stop waiting: idling earns nothing.

Guarantee: ``V`` never decreases (but for settlements of estimated prompts), and lift never lowers a counter.

The counter of the request's key inside its tenant and tier is charged with it (``core.lanes``).

Cost: O(1) per charge; O(log n) amortised per look at the floor (``siblings.MinIndex``).

Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), algorithm 2 and its weighted form.
"""

from __future__ import annotations

from collections.abc import Iterable

from router_ext.core.config import TenantConfig
from router_ext.core.queues import Tenant
from router_ext.core.request import Request
from router_ext.core.siblings import MinIndex, lift


class Counters:
    """The counters of one pool."""

    __slots__ = (
        "_inherited",
        "_inherited_above",
        "_is_settling",
        "_last_left",
        "_lead",
        "_next_since",
        "_seen_floor",
        "index",
        "largest_gap_service",
        "total_service",
        "waiting_weight",
    )

    def __init__(self) -> None:
        self.index: MinIndex[Tenant] = MinIndex(lambda tenant: tenant.counter)
        self.waiting_weight = 0.0
        self.total_service = 0.0
        """Service charged so far, over all tenants."""
        self.largest_gap_service = 0.0
        """Largest ``(c_f - V) * w_f`` seen among backlogged tenants since ``restart_gap``, in service units."""
        self._inherited: set[Tenant] = set()
        self._inherited_above = 0.0
        self._last_left: Tenant | None = None
        self._lead: float | None = 0.0
        self._is_settling = False
        self._next_since = 1
        self._seen_floor = float("inf")

    def floor(self) -> float | None:
        """``V``, None while nobody waits."""
        top = self.index.top()
        if top is None:
            return None
        self._seen_floor = top.counter
        return top.counter

    @property
    def last_left(self) -> Tenant | None:
        """The tenant whose queue became empty last."""
        return self._last_left

    def floor_or_last(self) -> float:
        """``V``, or while nobody waits the counter that a returning tenant would be lifted to."""
        floor = self.floor()
        if floor is not None:
            return floor
        return 0.0 if self._last_left is None else self._last_left.counter

    def base(self) -> float:
        """Whose counter is not above this owes nothing: the floor, but for what is forgiven while they settle."""
        return self.floor_or_last() - (self._lead or 0.0)

    def backlogged(self, tenant: Tenant, above: float = float("-inf")) -> None:
        """Lift and enter a tenant whose queue has just become non-empty. ``above``: where the floor is not enough."""
        if self._lead is None:
            self._lead = tenant.counter
        tenant.counter = lift(tenant.counter, lift(above, self._lift_to()) - self._lead)
        self.enter(tenant)

    def enter(self, tenant: Tenant) -> None:
        """Enter a tenant whose queue has just become non-empty, its counter as it is."""
        tenant.since = self._next_since
        self._next_since += 1
        self.waiting_weight += tenant.weight
        self.index.add(tenant)
        if tenant.counter < self._seen_floor:
            self._seen_floor = tenant.counter
        self._watch(tenant)

    def idle(self, tenant: Tenant) -> None:
        """The tenant's queue has just become empty, by dispatch, cancellation or expiry alike."""
        self._last_left = tenant
        tenant.since = 0
        self.waiting_weight -= tenant.weight
        self.index.discard(tenant)

    def charge(self, request: Request, service: float) -> None:
        """Add service delivered to a request to its key, and divided by weight to its tenant and the tenant's group.

        Negative: an estimate is settled.
        """
        request.lane.counter += service
        tenant = request.tenant
        member = request.member
        if member is not tenant:
            member.counter += service / member.weight
        tenant.counter += service / tenant.weight
        self.total_service += service
        if tenant.since:
            if service < 0.0:
                self.index.lowered(tenant)
            elif (
                tenant.counter - self._seen_floor
            ) * tenant.weight > self.largest_gap_service or tenant in self._inherited:
                self._watch(tenant)

    def restart_gap(self, tenants: Iterable[Tenant], allowed_service: float) -> None:
        """Watch the gap anew, because policy, bound or weights have changed.

        A tenant that is ahead by more than ``allowed_service`` (the largest pass) got there under the old rules. What
        it is ahead says nothing of the new ones, so it is watched from the moment it is back within the pass.
        """
        floor = self.floor_or_last()
        self.largest_gap_service = 0.0
        self._inherited_above = allowed_service
        self._inherited = {t for t in tenants if (t.counter - floor) * t.weight > allowed_service}

    def forget(self, tenant: Tenant) -> None:
        """It does not wait, and competes elsewhere: its counter means something else from here on."""
        self._inherited.discard(tenant)
        if self._last_left is tenant:
            self._last_left = Tenant(TenantConfig(tenant=tenant.tenant_id, weight=tenant.weight))
            self._last_left.counter = tenant.counter

    def settle(self) -> None:
        """Counters were restored (``core.saved``): who comes back first lifts nobody to what it is ahead itself.

        No gap is watched meanwhile; follow with ``settled``, then ``restart_gap``.
        """
        self._lead = None
        self._is_settling = True

    def settled(self) -> None:
        """Those that were expected back are here, or will not come."""
        self._lead = 0.0
        self._is_settling = False

    def share(self, tenant: Tenant) -> float:
        """The tenant's part of the service while it waits beside those who wait now; in a group, its part of that's."""
        unit = tenant.unit
        waiting = self.waiting_weight if unit.since else self.waiting_weight + unit.weight
        return unit.share_inside(tenant) * (unit.weight / waiting if waiting > 0.0 else 1.0)

    def reweigh(self, tenant: Tenant, weight: float) -> None:
        """Apply a changed weight to future charges; service received stays as it was counted."""
        if tenant.since:
            self.waiting_weight += weight - tenant.weight
        tenant.weight = weight

    def rebase(self, tenants: list[Tenant]) -> None:
        """Subtract the smallest counter from all: only differences matter, and small numbers keep their digits."""
        base = min((tenant.counter for tenant in tenants), default=0.0)
        for tenant in tenants:
            tenant.counter -= base
        if self._last_left is not None and self._last_left not in tenants:
            self._last_left.counter -= base
        self._seen_floor = float("inf")
        self.index.rebuild()

    def level(self, tenants: Iterable[Tenant]) -> None:
        """Make tenants and keys start even: what they received was counted in other units. Costs one ``U'`` at most."""
        floor = self.floor_or_last()
        for tenant in tenants:
            tenant.counter = floor
            tenant.level()
        if self._last_left is not None:
            self._last_left.counter = floor
        self._seen_floor = float("inf")
        self.index.rebuild()

    def _lift_to(self) -> float:
        floor = self.floor()
        if floor is not None:
            return floor
        return float("-inf") if self._last_left is None else self._last_left.counter

    def _watch(self, tenant: Tenant) -> None:
        floor = self.floor()
        if floor is not None and not self._is_settling:
            gap = (tenant.counter - floor) * tenant.weight
            if tenant in self._inherited:
                if gap > self._inherited_above:
                    return
                self._inherited.discard(tenant)
            if gap > self.largest_gap_service:
                self.largest_gap_service = gap
