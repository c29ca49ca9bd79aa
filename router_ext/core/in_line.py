"""Where a request stands that waits now, as far as that can be said without naming others.

Inside its tenant that is a place: requests of better tiers go first, then those that stand before it. Between tenants
there is none, because shares decide; what others mean for it is in the estimate of its wait (``core.waits``).
"""

from __future__ import annotations

from dataclasses import dataclass

from router_ext.core.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class InLine:
    """Of one waiting request.

    Attributes:
        own_ahead: requests of its own tenant that go before it. own_queued: all of it that wait, this one too.
        is_aside: it waits outside the line, for a backend that could hold it or for a trial of its own.
        wait_s: estimate of the time until it is dispatched, None while nothing has been measured.
    """

    own_ahead: int
    own_queued: int
    is_aside: bool
    wait_s: float | None


def own_ahead(request: Request) -> tuple[int, int]:
    """Requests of its tenant that go before a waiting one, and their predicted output. O(its tenant's requests)."""
    ahead = tokens = 0
    queue = request.queue
    for each in request.member.by_rank:
        if each.rank > queue.rank:
            break
        for other in each.requests():
            if each.rank < queue.rank or (other is not request and other.order < request.order):
                ahead += 1
                tokens += other.weight_tokens
    return ahead, tokens
