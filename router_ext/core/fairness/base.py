"""What the scheduler asks of a fairness policy.

A policy says whose turn it is; where there is room is not its concern. The scheduler owns tenants, queues, ledger and
counters; a policy only keeps indexes over them, so replacing the policy loses nothing.

    scheduler                              policy
    request arrives                   -->  refusal(request)       may turn it away; ahead(request) may say how
                                                                  much goes before it
    request will wait                 -->  arrived(request)       once, before it enters the line
    request enters, leaves the line   -->  queued, unqueued       only if it ``is_watching``
    tenant's queue became non-empty   -->  backlogged(tenant)     lift
    tenant's queue became empty       -->  idle(tenant)
    a head changed                    -->  head_changed(queue)
    who may go?                       -->  candidates(now)        requests, in order, with their standing
    request was dispatched            -->  started(request)
    service was delivered             -->  charge(request, service)
    less than was charged             -->  charge, with the negative difference, then refunded(request)
    its slice is over                 -->  stopped(request)       then queued again, or
    it is over                        -->  ended(request)
    policy takes over                 -->  inherit(before)        if ``before`` is of the same kind, then
                                           adopt(tenant)          for each one that is backlogged already

What a policy knows of a tenant beyond its counter it keeps in ``Tenant.account``: it goes when the tenant goes, stays
when the pool is reconfigured, and is gone when another policy takes over.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from router_ext.core.actions import Reject
from router_ext.core.agents import Agents
from router_ext.core.config import PoolConfig
from router_ext.core.cost import CostModel
from router_ext.core.fairness.counters import Counters
from router_ext.core.queues import Tenant, TierQueue, WaitingRoom
from router_ext.core.request import Request


class Standing(enum.IntEnum):
    """With what right a head is offered.

    Up to ``URGENT_PICK``, heads may pass claims and gates. The pick is the one in turn; it claims a backend if it fits
    nowhere, as urgent heads do. ``BACKFILL`` may use only what claims leave. ``HEAD`` is the pick of a policy that
    stops there. ``ONWARD`` is nobody's turn: its slice has just ended (``Decider.slice_ended``).
    """

    URGENT = 1
    LATE = 2
    URGENT_PICK = 3
    PICK = 4
    BACKFILL = 5
    HEAD = 6
    ONWARD = 7


Offer: TypeAlias = tuple[Request, Standing]
Walk: TypeAlias = Generator[Offer, None, None]
Candidates: TypeAlias = tuple[Offer, ...] | Walk
"""A tuple where a policy offers the head in turn and nobody else: a generator, with its end, would cost as much as the
rest of such a decision."""

NOBODY: Candidates = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a policy may read, and the counters it must keep charging.

    Attributes:
        cost: what service costs, for policies that charge predictions.
        peak_service: U', the most one tenant can still be charged for what runs (``core.bounds``).
        first_token_s: estimated seconds from dispatch to first token for a prompt of so many tokens.
        step_s: estimated seconds per token of a running request, at the present load.
        free_ratio: share of the usable backends' KV that nobody holds.
        agents: tags of agents, which outlive the policy as counters do.
        held_blocks: blocks of a prompt's chain that the backend with most of them probably holds (``core.prefix``).
        most_free: tokens (input plus new) that fit on the backend with the most free KV.
    """

    config: PoolConfig
    counters: Counters
    room: WaitingRoom
    agents: Agents
    peak_service: float
    cost: CostModel
    first_token_s: Callable[[int], float]
    step_s: Callable[[], float]
    free_ratio: Callable[[], float]
    most_free: Callable[[], int]
    held_blocks: Callable[[tuple[int, ...]], int]


class FairnessPolicy:
    """See the module. A policy overrides what it needs; ``candidates`` it must.

    Attributes:
        is_gated: prefill gate and headroom apply; else TGI's own behaviour is imitated.
        is_sliced: requests are sliced by their predicted length (``core.slicing``), not only by TGI's own 1,024.
        is_preemptive: running work may be cut for others (``core.preemption``).
        is_bounded: the bounds of ``core.bounds`` hold.
        is_watching: every request that enters or leaves the line is shown to ``queued`` and ``unqueued``.
        is_weighted: it keeps a number that follows from the weights of all tenants.
        orders_agents: inside a tenant and tier, calls of agents wait in one lane, by tag (``core.lanes``).
    """

    is_gated: ClassVar[bool] = False
    is_sliced: ClassVar[bool] = True
    is_preemptive: ClassVar[bool] = False
    is_bounded: ClassVar[bool] = False
    is_watching: ClassVar[bool] = False
    orders_agents: ClassVar[bool] = False
    is_weighted: ClassVar[bool] = False

    def __init__(self, around: Surroundings) -> None:
        self._counters = around.counters
        # Counters are charged under every policy, so that the next one finds them right.
        self.charge: Callable[[Request, float], None] = around.counters.charge

    @classmethod
    def passes(cls, config: PoolConfig) -> dict[str, float]:
        """Shares of U' by which somebody may be served ahead of the floor, by the way of going ahead
        (``core.bounds``)."""
        return {}

    @classmethod
    def gamma(cls, config: PoolConfig) -> float:
        """How much of a tenant's predicted service in flight its key counts (``Tenant.expected_rest``); at most 1."""
        return 0.0

    def may_go_on(self, request: Request, held_tokens: int, now: float) -> bool:
        """Whether a request whose slice has just ended may start the next one, which reserves so much KV, before
        whoever is in turn (``Decider.slice_ended``)."""
        return False

    def inherit(self, before: Any) -> None:
        """Take over what ``before`` (of the same class) knows beyond counters: only the configuration has changed."""

    def refusal(self, request: Request, now: float) -> Reject | None:
        """Why a request that has just arrived may not even wait."""
        return None

    def ahead(self, request: Request, now: float) -> tuple[float, float] | None:
        """Of a request that has just arrived: predicted tokens that are sure to go before it, and the largest share of
        the pool's rate at which they can. None if the policy cannot tell."""
        return None

    def arrived(self, request: Request, now: float) -> None:
        """The request was not refused and is about to wait for the first time."""

    def adopt(self, tenant: Tenant) -> None:
        """The tenant was backlogged before this policy took over; its counter stays as it is."""

    def backlogged(self, tenant: Tenant) -> None:
        """The tenant's queue has just become non-empty."""
        self._counters.backlogged(tenant)

    def idle(self, tenant: Tenant) -> None:
        """The tenant's queue has just become empty."""
        self._counters.idle(tenant)

    def queued(self, request: Request) -> None:
        """The request stands in line, for the first time or again (``request.is_resumed``)."""

    def unqueued(self, request: Request) -> None:
        """The request has left the line: it starts, it ends, or it is parked."""

    def head_changed(self, queue: TierQueue) -> None:
        """Another request (or none) heads this queue of one tenant and tier."""

    def started(self, request: Request, now: float) -> None:
        """The request was dispatched; its prompt, as far as unpaid, has been charged."""

    def refunded(self, request: Request) -> None:
        """A charge was taken back in part, because it rested on an estimate: the tenant's key may have fallen."""

    def reweighed(self, tenant: Tenant) -> None:
        """The tenant or group waits, and it or a member has got another weight: its key or passes may have changed."""

    def stopped(self, request: Request, now: float) -> None:
        """Its running slice is over, whatever the reason."""

    def ended(self, request: Request) -> None:
        """The request is over and will not come back."""

    def first_urgent(self, now: float, floor: float) -> Request | None:
        """The first of those that ``candidates`` would offer as ``URGENT``, None if there is none.

        Args:
            floor: the smallest counter among backlogged tenants.

        Cost: O(log n) amortised.
        """
        return None

    def candidates(self, now: float) -> Candidates:
        """Requests in the order in which placement shall be tried.

        An admission of an ``URGENT`` or ``LATE`` head is made while the generator waits, and it goes on; any other
        admission is made after closing it. Nothing else may be asked of the policy before it is closed or at its end.
        """
        raise NotImplementedError
