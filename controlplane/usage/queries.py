"""Reads of the books: the latest events, single requests, quarantine. Reports: ``usage.report``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Q, QuerySet

from controlplane.common.access import visible, visible_tenant
from controlplane.common.actor import Actor
from controlplane.common.clock import from_us, to_us, utc_now
from controlplane.common.errors import Invalid
from controlplane.common.validation import Checks, without_nul
from controlplane.usage.models import QuarantinedEvent, UsageEvent, UsageExplanation


def latest_events(*, actor: Actor, limit: int) -> list[UsageEvent]:
    """The newest events of the last two days, for live pages."""
    rows = visible(UsageEvent.objects.filter(arrived_at__gte=utc_now() - timedelta(days=2)), actor=actor)
    return list(rows.order_by("-arrived_at", "-event")[:limit])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedRequest:
    """A booked request and why it waited; None for one that neither waited nor was cut, and completed."""

    event: UsageEvent
    explanation: UsageExplanation | None

    @property
    def waited_s(self) -> float:
        """From arrival to its first dispatch, or to its end without one."""
        return ((self.event.first_dispatch_at or self.event.ended_at) - self.event.arrived_at).total_seconds()

    @property
    def ttft_s(self) -> float | None:
        first = self.event.first_token_at
        return None if first is None else (first - self.event.arrived_at).total_seconds()


MAX_SAME_ID = 20

_EVENT_ID = re.compile(r"evt_([0-9a-f]{14})[0-9a-f]{16}", re.ASCII)
"""As routers make them; 14 digits of microseconds since 1970 are years until 4253."""


def explained_requests(*, actor: Actor, request_id: str) -> list[ExplainedRequest]:
    """The requests that carry this id, newest first: what clients get as ``x-request-id``, which they may choose, or
    the id of the books.

    Cost: one look into the index of every day, and one more for the explanations.
    """
    events = visible(UsageEvent.objects.all(), actor=actor)
    wanted_id = without_nul(request_id)
    rows = list(events.filter(request=wanted_id).order_by("-arrived_at", "-event")[:MAX_SAME_ID])
    match = _EVENT_ID.fullmatch(wanted_id)
    if match is not None:
        # The id says when its request arrived, and so in which day to look.
        booked = events.filter(arrived_at=from_us(int(match[1], 16)), event=wanted_id)
        rows += [row for row in booked if row.request != wanted_id]
    wanted = UsageExplanation.objects.filter(arrived_at__in=[row.arrived_at for row in rows])
    found = {(each.arrived_at, each.event): each for each in wanted}
    return [ExplainedRequest(event=row, explanation=found.get((row.arrived_at, row.event))) for row in rows]


OUTCOMES = ("completed", "cancelled", "failed", "expired", "aborted")
WIDE = timedelta(days=7)
"""Of all tenants no more is searched at once; of one there is an index for as long as events are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A page of booked requests, newest first; ``following``: where the next begins, "" for nowhere."""

    events: Sequence[UsageEvent]
    following: str


def search_events(
    *,
    actor: Actor,
    from_at: datetime,
    to_at: datetime,
    tenant: str = "",
    key: str = "",
    outcome: str = "",
    after: str = "",
    limit: int = 50,
) -> Found:
    """Requests that arrived from ``from_at`` on, before ``to_at``.

    Args:
        tenant, key: ids. after: ``following`` of the page before.

    Raises:
        Invalid: naming the field.

    Cost: one range of the index by tenant where it is named, else of that by time, read until the page is full.
    """
    checks = Checks()
    if to_at <= from_at:
        checks.add("to", f"must be after from ({from_at.isoformat()}), not {to_at.isoformat()}")
    elif not tenant and actor.tenant is None and to_at - from_at > WIDE:
        checks.add("from", f"at most {WIDE.days} days before to, unless a tenant is named")
    if outcome and outcome not in OUTCOMES:
        checks.add("outcome", f"one of {', '.join(OUTCOMES)}, not {outcome[:40]!r}")
    checks.done()
    rows = visible(UsageEvent.objects.filter(arrived_at__gte=from_at, arrived_at__lt=to_at), actor=actor)
    given = {"tenant": visible_tenant(tenant, actor=actor), "key": without_nul(key), "outcome": outcome}
    rows = rows.filter(**{name: value for name, value in given.items() if value})
    if after:
        match = _PLACE.fullmatch(after)
        if match is None:
            raise Invalid({"cursor": "not a cursor of this list"})
        at = from_us(int(match[1]))
        rows = rows.filter(arrived_at__lte=at).filter(Q(arrived_at__lt=at) | Q(event__lt=without_nul(match[2])))
    found = list(rows.order_by("-arrived_at", "-event")[: limit + 1])
    last = found[limit - 1] if len(found) > limit else None
    following = "" if last is None else f"{to_us(last.arrived_at)}.{last.event}"
    return Found(events=found[:limit], following=following)


_PLACE = re.compile(r"(\d{1,16})\.(.{1,200})", re.ASCII | re.DOTALL)


def quarantined(*, actor: Actor) -> QuerySet[QuarantinedEvent]:
    return visible(QuarantinedEvent.objects.order_by("-received_at", "digest"), actor=actor)


def n_quarantined() -> int:
    """How many events wait for an operator's eyes; pages show it as an alarm."""
    return QuarantinedEvent.objects.count()
