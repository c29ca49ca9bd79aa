"""What the scheduler asks of a fairness policy.

A policy says whose turn it is; where there is room is not its concern. The scheduler owns tenants, queues, ledger and
counters; a policy only keeps indexes over them, so replacing the policy loses nothing.

    scheduler                              policy
    tenant's queue became non-empty   -->  backlogged(tenant)     lift
    tenant's queue became empty       -->  idle(tenant)
    service was delivered             -->  charge(tenant, service)
    a head changed                    -->  head_changed(queue)
    who may go?                       -->  candidates(now)        heads, in order, with their standing
    policy takes over                 -->  adopt(tenant)          for each one that is backlogged already
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

from router_ext.core.config import PoolConfig
from router_ext.core.fairness.counters import Counters
from router_ext.core.queues import Tenant, TierQueue, WaitingRoom
from router_ext.core.request import Request


class Standing(enum.IntEnum):
    """With what right a head is offered.

    Up to ``URGENT_PICK``, heads may pass claims and gates. The pick is the one in turn; it claims a backend if it fits
    nowhere, as urgent heads do. ``BACKFILL`` may use only what claims leave. ``HEAD`` is the pick of a policy that
    stops there.
    """

    URGENT = 1
    LATE = 2
    URGENT_PICK = 3
    PICK = 4
    BACKFILL = 5
    HEAD = 6


Candidates: TypeAlias = Generator[tuple[Request, Standing], None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a policy may read, and the counters it must keep charging.

    Attributes:
        first_token_s: estimated seconds from dispatch to first token for a prompt of so many tokens.
    """

    config: PoolConfig
    counters: Counters
    room: WaitingRoom
    first_token_s: Callable[[int], float]


class FairnessPolicy(Protocol):
    """See the module.

    Attributes:
        is_gated: prefill gate, headroom and slices apply; else TGI's own behaviour is imitated.
        is_bounded: the bounds of ``core.bounds`` hold.
    """

    is_gated: ClassVar[bool]
    is_bounded: ClassVar[bool]

    def __init__(self, around: Surroundings) -> None: ...

    def adopt(self, tenant: Tenant) -> None:
        """The tenant was backlogged before this policy took over; its counter stays as it is."""
        ...

    def backlogged(self, tenant: Tenant) -> None:
        """The tenant's queue has just become non-empty."""
        ...

    def idle(self, tenant: Tenant) -> None:
        """The tenant's queue has just become empty."""
        ...

    def charge(self, tenant: Tenant, service: float) -> None:
        """The tenant received ``service`` (service units; negative only when an estimate is settled)."""
        ...

    def head_changed(self, queue: TierQueue) -> None:
        """Another request (or none) heads this queue of one tenant and tier."""
        ...

    def candidates(self, now: float) -> Candidates:
        """Heads in the order in which placement shall be tried.

        An admission of an ``URGENT`` or ``LATE`` head is made while the generator waits, and it goes on; any other
        admission is made after closing it. Nothing else may be asked of the policy before it is closed.
        """
        ...
