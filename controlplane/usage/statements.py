"""Monthly statements: what a tenant used and owes, closed once and never changed.

A statement begins where the one before ended, so that nothing falls between two, whatever happens to the tenant's time
zone. Events that arrive after their statement was closed are found at the next closing: what the books say now of the
time of an earlier statement, less what was charged for it, is a line of its own, a correction. It is charged at the
price of the line it adds to, so that a price edited later changes nothing that was closed.

Each line is rounded once, half to even, to micro-currency; the amount of a statement is the sum of its lines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any, TypeAlias
from zoneinfo import ZoneInfo

import structlog
from django.db import connection, transaction
from django.db.models import Q, QuerySet, TextField
from django.db.models.functions import Cast

from controlplane.common.access import visible, visible_tenant
from controlplane.common.actor import Actor
from controlplane.common.clock import utc_now
from controlplane.common.keeper import Report, unreported
from controlplane.common.sorting import SortKey
from controlplane.common.zones import find_zone, month_start, next_month
from controlplane.tenants.models import Tenant
from controlplane.usage.models import Statement, StatementLine
from controlplane.usage.prices import PRICE_SQL, price_changes, rounded_micro
from controlplane.usage.report import parts_sql
from controlplane.usage.rollup import MOST

logger = structlog.get_logger(__name__)

_LOCK = 0x66_6C_08
SETTLE = timedelta(hours=1)
"""A month is closed this long after its end: routers may still be sending what arrived in it."""
LOOKED_BACK = timedelta(days=125)
"""Statements that ended longer ago get no more corrections: events are booked for 90 days, and closed in a month."""
USAGE, CORRECTION = "usage", "correction"


@dataclass(frozen=True, slots=True)
class Rate:
    """What a model cost; no price: ``valid_from`` None.

    ``valid_from``: since when the tenant pays it, the later of the days of the price and of the list's assignment.
    Together with the model it names a price of the tenant, whatever the lists it has paid by have in common.
    """

    currency: str
    valid_from: date | None
    prompt_micro: int | None
    output_micro: int | None


@dataclass(frozen=True, slots=True)
class Used:
    requests: int
    prompt_tokens: int
    output_tokens: int

    def less(self, other: Used) -> Used:
        return Used(
            self.requests - other.requests,
            self.prompt_tokens - other.prompt_tokens,
            self.output_tokens - other.output_tokens,
        )

    def plus(self, other: Used) -> Used:
        return Used(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
        )


NOTHING = Used(0, 0, 0)
Usage: TypeAlias = dict[tuple[str, Rate], Used]
"""By model and price."""

_USED_SQL = f""", used AS (
        SELECT tenant, model, period, sum(requests) AS requests, sum(prompt_tokens) AS prompt_tokens,
               sum(output_tokens) AS output_tokens
        FROM (SELECT *, width_bucket(at, %(changes)s::timestamptz[]) AS period FROM parts) AS each
        GROUP BY tenant, model, period
    )
    SELECT used.model, CASE WHEN price.id IS NULL THEN '' ELSE list.currency END AS paid_in,
           CASE WHEN price.id IS NOT NULL THEN greatest(price.valid_from, pays.valid_from) END AS valid_from,
           price.prompt_micro, price.output_micro, sum(requests), sum(used.prompt_tokens), sum(used.output_tokens)
    FROM used {PRICE_SQL}
    GROUP BY 1, 2, 3, price.prompt_micro, price.output_micro
    ORDER BY 1, 2, 3
"""
_PARTS = ("at", "tenant", "model", "requests", "prompt_tokens", "output_tokens")


def usage_between(tenant: str, from_at: datetime, to_at: datetime, changes: Sequence[datetime]) -> Usage:
    """What the books say of a tenant, by model and price."""
    parameters: dict[str, Any] = {
        "from": from_at,
        "to": to_at,
        "is_tenant": tenant,
        "changes": list(changes) or [from_at],
    }
    with connection.cursor() as cursor:
        cursor.execute(parts_sql(_PARTS, ("tenant",)) + _USED_SQL, parameters)
        return {
            (model, Rate(currency, valid_from, prompt_micro, output_micro)): Used(*(min(int(n), MOST) for n in used))
            for model, currency, valid_from, prompt_micro, output_micro, *used in cursor.fetchall()
        }


SORTED_BY = {
    "month": SortKey(by=Cast("month", TextField())),
    "tenant": SortKey(by="tenant_name"),
    "timezone": SortKey(by="timezone"),
    "closed": SortKey(by=Cast("closed_at", TextField())),
}
"""What ``statements`` may be sorted by."""


def statements(*, actor: Actor, tenant: str = "", search: str = "") -> QuerySet[Statement]:
    """Statements with their lines, newest first; ``search``: a tenant's id, or a part of its name then."""
    rows = visible(Statement.objects.prefetch_related("lines"), actor=actor)
    if tenant := visible_tenant(tenant, actor=actor):
        rows = rows.filter(tenant=tenant)
    if search:
        rows = rows.filter(Q(tenant=search) | Q(tenant_name__icontains=search))
    return rows.order_by("-id")


def close_months(*, now: datetime | None = None, limit: int = 2_000, report: Report = unreported) -> int:
    """Close the months that have ended; returns how many statements. One process at a time does.

    Cost: some 10 ms a tenant, each in a transaction of its own.
    """
    instant = now or utc_now()
    n_closed = 0
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [_LOCK])
        if cursor.fetchone() != (True,):
            return 0
        try:
            for zone_name in Tenant.objects.values_list("timezone", flat=True).distinct():
                zone = find_zone(zone_name) or ZoneInfo("UTC")
                month = _last_ended(instant, zone)
                for tenant in _unclosed(zone_name, month, zone, instant)[: limit - n_closed]:
                    report(n_closed / limit)
                    n_closed += _close_tenant(tenant, month, zone, instant)
        finally:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [_LOCK])
    if n_closed:
        logger.info("usage.statements_closed", statements=n_closed)
    return n_closed


def _last_ended(now: datetime, zone: ZoneInfo) -> date:
    """The month that ended last, with time for what was under way."""
    local = (now - SETTLE).astimezone(zone).date()
    return (local.replace(day=1) - timedelta(days=1)).replace(day=1)


_UNCLOSED_SQL = """
    WITH used AS (
        SELECT DISTINCT tenant FROM usage_quarter WHERE at >= %(from)s AND at < %(to)s
        UNION
        SELECT DISTINCT event.tenant FROM (SELECT DISTINCT quarter FROM usage_touched_quarter) AS touched
        JOIN usage_event AS event
          ON event.arrived_at >= quarter AND event.arrived_at < quarter + interval '15 minutes'
        WHERE quarter >= %(from)s AND quarter < %(to)s
        UNION
        SELECT tenant FROM usage_statement WHERE to_at > %(since)s
    )
    SELECT tenants_tenant.id FROM tenants_tenant JOIN used ON used.tenant = tenants_tenant.id
    WHERE timezone = %(zone)s
      AND NOT EXISTS (SELECT FROM usage_statement AS closed
                      WHERE closed.tenant = tenants_tenant.id AND closed.month >= %(month)s)
    ORDER BY tenants_tenant.id
"""


def _unclosed(zone_name: str, month: date, zone: ZoneInfo, now: datetime) -> list[str]:
    """Tenants of this zone that used something in the month, or lately, and have no statement of it."""
    with connection.cursor() as cursor:
        cursor.execute(
            _UNCLOSED_SQL,
            {
                "from": month_start(month, zone),
                "to": month_start(next_month(month), zone),
                "since": now - LOOKED_BACK,
                "zone": zone_name,
                "month": month,
            },
        )
        return [tenant for (tenant,) in cursor.fetchall()]


def _close_tenant(tenant_id: str, last: date, zone: ZoneInfo, now: datetime) -> int:
    """Close the months of a tenant up to ``last``."""
    newest = Statement.objects.filter(tenant=tenant_id).order_by("-month").first()
    month = last if newest is None else next_month(newest.month)
    n_closed = 0
    while month <= last:
        with transaction.atomic():
            _close(Tenant.objects.get(pk=tenant_id), month, zone, now)
        n_closed += 1
        month = next_month(month)
    return n_closed


def _close(tenant: Tenant, month: date, zone: ZoneInfo, now: datetime) -> Statement:
    """The statement of one month, with corrections of those before."""
    earlier = list(Statement.objects.filter(tenant=tenant.id).order_by("-month").prefetch_related("lines"))
    to_at = month_start(next_month(month), zone)
    from_at = min(earlier[0].to_at, to_at) if earlier else month_start(month, zone)
    changes = price_changes()
    lines = _lines(USAGE, month, usage_between(tenant.id, from_at, to_at, changes))
    charged: dict[date, list[StatementLine]] = defaultdict(list)
    for statement in earlier:
        for line in statement.lines.all():
            charged[line.month].append(line)
    for statement in reversed(earlier):
        if statement.to_at > now - LOOKED_BACK:
            said = usage_between(tenant.id, statement.from_at, statement.to_at, changes)
            late = late_usage(said, charged[statement.month], statement.currency)
            lines += _lines(CORRECTION, statement.month, late)
    # Of the tenant's list at present; what was charged in another currency before is corrected without an amount.
    priced = [(line, currency) for line, currency in lines if currency]
    own = next((currency for line, currency in reversed(priced) if line.kind == USAGE), "")
    own = own or (priced[-1][1] if priced else "")
    for line, currency in priced:
        if currency != own:
            line.amount_micro = None
    closed = Statement(
        tenant=tenant.id,
        tenant_name=tenant.name,
        month=month,
        timezone=zone.key,
        from_at=from_at,
        to_at=to_at,
        currency=own,
        amount_micro=sum(line.amount_micro or 0 for line, _ in lines),
        closed_at=now,
    )
    closed.save(force_insert=True)
    for number, (line, _) in enumerate(lines, 1):
        line.statement, line.number = closed, number
    StatementLine.objects.bulk_create(line for line, _ in lines)
    return closed


def late_usage(said: Usage, charged: Sequence[StatementLine], currency: str) -> Usage:
    """What the books say less what was charged, at the prices that were charged where there were any.

    Args:
        said: of the time of an earlier statement, now. charged: all lines about it. currency: of the statement.
    """
    before: dict[tuple[str, date | None], Used] = {}
    rates: dict[tuple[str, date | None], Rate] = {}
    for line in charged:
        key = (line.model, line.valid_from)
        used = Used(line.requests, line.prompt_tokens, line.output_tokens)
        before[key] = before.get(key, NOTHING).plus(used)
        has_price = line.valid_from is not None
        rates.setdefault(
            key, Rate(currency if has_price else "", line.valid_from, line.prompt_micro, line.output_micro)
        )
    late: Usage = {}
    for model in sorted({model for model, _ in said}):
        now = {rate: used for (each, rate), used in said.items() if each == model}
        found = {rate: used.less(before.get((model, rate.valid_from), NOTHING)) for rate, used in now.items()}
        gone = [key for key in before if key[0] == model and all(key[1] != rate.valid_from for rate in now)]
        if gone or any(min(used.requests, used.prompt_tokens, used.output_tokens) < 0 for used in found.values()):
            # The days of prices were edited since: only how much came late is known, not under which of the old ones.
            rate = max(now, key=lambda rate: rate.valid_from or date.min)
            whole = _sum(now).less(_sum({k: v for k, v in before.items() if k[0] == model}))
            found = {rate: whole}
        for rate, used in found.items():
            if used != NOTHING:
                late[model, rates.get((model, rate.valid_from), rate)] = used
    return late


def _sum(usage: Mapping[Any, Used]) -> Used:
    total = NOTHING
    for used in usage.values():
        total = total.plus(used)
    return total


def _lines(kind: str, month: date, usage: Usage) -> list[tuple[StatementLine, str]]:
    """Lines, not yet of a statement, each with its currency."""
    lines = []
    for (model, rate), used in usage.items():
        amount = None
        if rate.prompt_micro is not None and rate.output_micro is not None:
            amount = rounded_micro(rate.prompt_micro * used.prompt_tokens + rate.output_micro * used.output_tokens)
        line = StatementLine(
            kind=kind, month=month, model=model, valid_from=rate.valid_from, prompt_micro=rate.prompt_micro,
            output_micro=rate.output_micro, requests=used.requests, prompt_tokens=used.prompt_tokens,
            output_tokens=used.output_tokens, amount_micro=amount,
        )  # fmt: skip
        lines.append((line, rate.currency))
    return lines
