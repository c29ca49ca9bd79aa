"""What the scheduler asks of a fairness policy.

A policy says whose turn it is; where there is room is not its concern. The scheduler owns tenants, queues, ledger and
counters; a policy only keeps indexes over them, so replacing the policy loses nothing.

    scheduler                              policy
    tenant's queue became non-empty   -->  backlogged(tenant)     lift
    tenant's queue became empty       -->  idle(tenant)
    service was delivered             -->  charge(tenant, service)
    a head changed                    -->  head_changed(queue)
    who may go?                       -->  candidates(now)        heads, in order, with their standing
"""

from __future__ import annotations

import enum
from collections.abc import Generator
from typing import Protocol, TypeAlias

from router_ext.core.queues import Tenant, TierQueue
from router_ext.core.request import Request


class Standing(enum.IntEnum):
    """With what right a head is offered.

    ``URGENT`` and ``LATE`` may pass claims and gates, ``PICK`` is the one in turn and claims a backend if it fits
    nowhere, ``BACKFILL`` may use only what claims leave. ``HEAD`` is the pick of a policy that stops there.
    """

    URGENT = 1
    LATE = 2
    PICK = 3
    BACKFILL = 4
    HEAD = 5


Candidates: TypeAlias = Generator[tuple[Request, Standing], None, None]


class FairnessPolicy(Protocol):
    """See the module. ``is_gated``: prefill gate, headroom and slices apply; else TGI's own behaviour is imitated."""

    is_gated: bool

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
        """Heads in the order in which placement shall be tried, ended by the caller at the first admission.

        The generator must be closed before anything else is asked of the policy.
        """
        ...
