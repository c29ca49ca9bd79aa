"""Refused requests, as long as their tenants may ask why. Nothing of them is booked, and no scheduler knows them.

The newest are remembered, and of one tenant no more than a part: whose every request is refused pushes few of others'
out.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from router_ext.wire.headers import Headers

_REMEMBERED = 1_024
_OF_ONE_TENANT = 64
_MESSAGE_CHARACTERS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A request that was refused after its key was accepted, in the words that its client was given.

    ``event``: its id if it came as far as to have one. ``limits``: headers about the tenant's and key's own limits.
    """

    request: str
    event: str | None
    tenant: str
    tier: str | None
    tier_reason: str | None
    arrived_at_us: int
    code: str
    status: int
    message: str
    retry_after_s: float | None
    limits: dict[str, str]
    total_s: float


class Refusals:
    """See the module. All of it is O(1), but for searches: O(what is remembered of the tenant)."""

    def __init__(self) -> None:
        self._number = 0
        self._all: OrderedDict[int, Refused] = OrderedDict()
        self._of: dict[str, deque[int]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def remember(self, refused: Refused) -> None:
        """The newest of all."""
        self._number += 1
        self._all[self._number] = refused
        own = self._of.setdefault(refused.tenant, deque())
        own.append(self._number)
        if len(own) > _OF_ONE_TENANT:
            del self._all[own.popleft()]
        elif len(self._all) > _REMEMBERED:
            _, oldest = self._all.popitem(last=False)
            others = self._of[oldest.tenant]
            others.popleft()
            if not others:
                del self._of[oldest.tenant]

    def find(self, wanted: str, tenant: str | None = None) -> Iterator[Refused]:
        """By what their client got as ``x-request-id``, or their event; newest first. ``tenant`` None: of all."""
        numbers = reversed(self._all) if tenant is None else reversed(self._of.get(tenant, ()))
        for number in numbers:
            refused = self._all[number]
            if wanted in (refused.request, refused.event):
                yield refused


def shortened(message: str) -> str:
    """A refusal's words as they are remembered: a client's own text in them may be long."""
    return message if len(message) <= _MESSAGE_CHARACTERS else message[: _MESSAGE_CHARACTERS - 1] + "…"


def texts(headers: Headers) -> dict[str, str]:
    """Headers as JSON has them."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
