"""Which suspect is tried next.

A suspect may start only while no other is exposed (``core.exposure``). If all of them stood in line, the first of each
tenant would keep everybody behind it waiting meanwhile. So at most one suspect of a pool, the one *on trial*, stands in
line or runs; the others are *held* outside the queues, in nobody's way:

    first token, end --> nobody is on trial --> the next of those held joins the line

Those that were somewhere when it failed go before those that are suspects for their tenant's sake alone; either in the
order of arrival. The latter, who may each be another hazard, also wait until a backend that fell under a suspect is
back, at most ``RECOVERY_S``: a tenant that fells backends costs a pool one of them at a time.

Cost: O(suspects) per trial.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router_ext.core.request import Request

RECOVERY_S = 30.0
"""How long a backend that fell under a suspect is waited for."""


def next_on_trial(held: Collection[Request], *, is_wounded: bool) -> Request | None:
    """The one of ``held`` that goes next, None if none may. ``is_wounded``: a backend that fell is not back yet."""
    first: Request | None = None
    for request in held:
        if is_wounded and request.avoid is None:
            continue
        if first is None or _rank(request) < _rank(first):
            first = request
    return first


def _rank(request: Request) -> tuple[bool, int]:
    return request.avoid is None, request.seq
