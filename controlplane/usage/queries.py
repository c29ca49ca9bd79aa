"""Reads of the books: the report, the latest events, quarantine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta

from django.db import connection
from django.db.models import QuerySet

from controlplane.common.access import visible, visible_tenant
from controlplane.common.actor import Actor
from controlplane.common.clock import from_us, utc_now
from controlplane.common.errors import Invalid
from controlplane.common.validation import without_nul
from controlplane.usage.histogram import quantile_us
from controlplane.usage.models import QuarantinedEvent, UsageEvent, UsageExplanation
from controlplane.usage.rollup import ROLLUP_SQL

MAX_REPORT_DAYS = 400
CALENDAR = (date(2000, 1, 1), date(9998, 12, 31))
"""Days a report may name: nothing was booked before, and instants around them can still be computed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """One tenant and one UTC day (by arrival). Times in milliseconds, None where no request had a first token."""

    day: date
    tenant: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Rows by day and tenant, and their totals, all read from one state of the database."""

    from_day: date
    to_day: date
    rows: Sequence[ReportRow]
    requests: int
    prompt_tokens: int
    output_tokens: int


# Rolled-up hours come from usage_hour, touched ones from their events; one statement sees one state, so an hour is
# never counted from both and never from neither.
_REPORT_SQL = """
    WITH touched AS MATERIALIZED (
        SELECT DISTINCT hour FROM usage_touched_hour WHERE hour >= %(from)s AND hour < %(to)s
    ), parts AS (
        SELECT date_trunc('day', hour, 'UTC') AS day, tenant, requests, prompt_tokens, output_tokens,
               ttft_buckets, ttft_counts
        FROM usage_hour WHERE hour >= %(from)s AND hour < %(to)s AND hour NOT IN (SELECT hour FROM touched)
          AND (%(tenant)s = '' OR tenant = %(tenant)s)
        UNION ALL
        SELECT date_trunc('day', touched.hour, 'UTC'), tail.tenant, tail.requests, tail.prompt_tokens,
               tail.output_tokens, tail.ttft_buckets, tail.ttft_counts
        FROM touched CROSS JOIN LATERAL ({tail}) AS tail
        WHERE (%(tenant)s = '' OR tail.tenant = %(tenant)s)
    ), sums AS (
        SELECT day, tenant, sum(requests) AS requests, sum(prompt_tokens) AS prompt_tokens,
               sum(output_tokens) AS output_tokens
        FROM parts GROUP BY day, tenant
    ), buckets AS (
        SELECT day, tenant, bucket, sum(n) AS n
        FROM parts, unnest(ttft_buckets, ttft_counts) AS pair(bucket, n) GROUP BY day, tenant, bucket
    ), histograms AS (
        SELECT day, tenant, array_agg(bucket) AS buckets, array_agg(n::bigint) AS counts
        FROM buckets GROUP BY day, tenant
    )
    SELECT sums.day, sums.tenant, sums.requests::bigint, sums.prompt_tokens::bigint, sums.output_tokens::bigint,
           histograms.buckets, histograms.counts
    FROM sums LEFT JOIN histograms USING (day, tenant) ORDER BY sums.day, sums.tenant
"""
_TAIL_SQL = ROLLUP_SQL.replace("%(from)s", "touched.hour").replace("%(to)s", "touched.hour + interval '1 hour'")


def first_day(to_day: date, *, n_days: int) -> date:
    """First of the ``n_days`` days that end with ``to_day``; the calendar's first day at the earliest."""
    return max(to_day, CALENDAR[0] + timedelta(days=n_days - 1)) - timedelta(days=n_days - 1)


def usage_report(*, actor: Actor, from_day: date, to_day: date, tenant: str = "") -> Report:
    """Usage by tenant and UTC day, both days included. Page, JSON and CSV read these rows.

    Cost: one statement; reads the rollups of the span and the events of hours not yet rolled up.
    """
    tenant = visible_tenant(tenant, actor=actor)
    for name, day in (("from", from_day), ("to", to_day)):
        if not CALENDAR[0] <= day <= CALENDAR[1]:
            raise Invalid({name: f"must be a day from {CALENDAR[0]} to {CALENDAR[1]}, not {day}"})
    if to_day < from_day:
        raise Invalid({"to": "lies before from"})
    if (to_day - from_day).days >= MAX_REPORT_DAYS:
        raise Invalid({"to": f"more than {MAX_REPORT_DAYS} days after from"})
    parameters: dict[str, datetime | str] = {
        "from": datetime.combine(from_day, time(), UTC),
        "to": datetime.combine(to_day, time(), UTC) + timedelta(days=1),
        "tenant": tenant,
    }
    with connection.cursor() as cursor:
        cursor.execute(_REPORT_SQL.format(tail=_TAIL_SQL), parameters)
        rows = [_report_row(*values) for values in cursor.fetchall()]
    return Report(
        from_day=from_day,
        to_day=to_day,
        rows=rows,
        requests=sum(r.requests for r in rows),
        prompt_tokens=sum(r.prompt_tokens for r in rows),
        output_tokens=sum(r.output_tokens for r in rows),
    )


def _report_row(
    day: datetime,
    tenant: str,
    requests: int,
    prompt_tokens: int,
    output_tokens: int,
    buckets: list[int] | None,
    counts: list[int] | None,
) -> ReportRow:
    histogram: Counter[int] = Counter(dict(zip(buckets or (), counts or (), strict=True)))
    return ReportRow(
        day=day.astimezone(UTC).date(),
        tenant=tenant,
        requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        ttft_p50_ms=_ms(quantile_us(histogram, 0.50)),
        ttft_p95_ms=_ms(quantile_us(histogram, 0.95)),
    )


def _ms(microseconds: float | None) -> float | None:
    return None if microseconds is None else round(microseconds / 1_000, 3)


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


def quarantined(*, actor: Actor) -> QuerySet[QuarantinedEvent]:
    return visible(QuarantinedEvent.objects.order_by("-received_at", "digest"), actor=actor)


def n_quarantined() -> int:
    """How many events wait for an operator's eyes; pages show it as an alarm."""
    return QuarantinedEvent.objects.count()
