"""Entitled against delivered share of tenants in a pool.

Service is prompt tokens and twice the output tokens, as on the live page. In each quarter of an hour the tenants that
had any in the pool are entitled to its service by the weights that held when it began: groups and tenants without one
by theirs, and a group's among its members by theirs. Over a span, what a tenant was entitled to is the sum of that, so
that quarters count by their service. A tenant that asks for less than it is entitled to gets less, and others more.

Weights of the past are ``usage_weight``, written by triggers whenever one changes. Storing them in the rollups instead
would be wrong where a late event has a quarter computed anew, and revisions are not kept for as long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from django.db import connection

from controlplane.common.errors import Invalid
from controlplane.usage.report import MAX_HOUR_DAYS, Question, parts_sql

MAX_ROWS = 1_000
_COLUMNS = ("at", "pool", "tenant", "prompt_tokens", "output_tokens")

_SHARES_SQL = """, served AS (
        SELECT at, pool, tenant, sum(prompt_tokens::numeric + 2 * output_tokens::numeric)::float8 AS service
        FROM parts GROUP BY at, pool, tenant
    ), weighed AS (
        SELECT served.*, coalesce(held.weight, 1) AS weight, held.grp, coalesce(held.group_weight, 1) AS group_weight
        FROM served LEFT JOIN LATERAL (
            (SELECT 1 AS place, weight, "group" AS grp, group_weight FROM usage_weight AS past
             WHERE past.tenant = served.tenant AND past.at <= served.at ORDER BY past.at DESC, past.id DESC LIMIT 1)
            UNION ALL
            (SELECT 2, weight, "group", group_weight FROM usage_weight AS first
             WHERE first.tenant = served.tenant AND first.at > served.at ORDER BY first.at, first.id LIMIT 1)
            ORDER BY place LIMIT 1
        ) AS held ON true
    ), inside AS (
        SELECT *, coalesce('group ' || grp, 'tenant ' || tenant) AS competitor,
               CASE WHEN grp IS NULL THEN weight ELSE group_weight END AS outer_weight
        FROM weighed
    ), parted AS (
        SELECT *, weight / sum(weight) OVER competitors AS inner_share,
               outer_weight / count(*) OVER competitors AS part
        FROM inside WINDOW competitors AS (PARTITION BY at, pool, competitor)
    ), entitled AS (
        SELECT pool, tenant, service,
               sum(service) OVER quarters * inner_share * outer_weight / sum(part) OVER quarters AS entitled
        FROM parted WINDOW quarters AS (PARTITION BY at, pool)
    ), sums AS (
        SELECT pool, tenant, sum(service) AS service, sum(entitled) AS entitled,
               sum(sum(service)) OVER (PARTITION BY pool) AS whole
        FROM entitled GROUP BY pool, tenant
    )
    SELECT sums.pool, coalesce(fleet_pool.name, sums.pool), sums.tenant, coalesce(tenants_tenant.name, sums.tenant),
           service, CASE WHEN whole > 0 THEN service / whole ELSE 0 END,
           CASE WHEN whole > 0 THEN entitled / whole ELSE 0 END
    FROM sums LEFT JOIN fleet_pool ON fleet_pool.id = sums.pool
    LEFT JOIN tenants_tenant ON tenants_tenant.id = sums.tenant
    WHERE %(only)s = '' OR sums.tenant = %(only)s
    ORDER BY sums.pool, service DESC, sums.tenant LIMIT %(limit)s
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Of one pool's service over the span: what a tenant got, and what it was entitled to, as ratios from 0 to 1."""

    pool: str
    pool_name: str
    tenant: str
    tenant_name: str
    service: int
    delivered: float
    entitled: float


def shares(question: Question) -> list[Share]:
    """Shares over the whole span, by pool and falling service; ``MAX_ROWS`` at most.

    All tenants compete in the computation, whoever may see which of them.

    Cost: one statement, some microseconds a rollup; hence at most 93 days.
    """
    if (question.to_day - question.from_day).days >= MAX_HOUR_DAYS:
        raise Invalid({"to": f"more than {MAX_HOUR_DAYS} days after from; shares are told of no more at once"})
    only = question.filters.get("tenant", "")
    pools = {name: value for name, value in question.filters.items() if name == "pool"}
    question = replace(question, filters=pools)
    with connection.cursor() as cursor:
        cursor.execute(
            parts_sql(_COLUMNS, tuple(pools)) + _SHARES_SQL,
            {
                "from": question.starts[0],
                "to": question.starts[-1],
                "only": only,
                "limit": MAX_ROWS,
                **{f"is_{name}": value for name, value in pools.items()},
            },
        )
        return [
            Share(
                pool=pool,
                pool_name=pool_name,
                tenant=tenant,
                tenant_name=tenant_name,
                service=round(service),
                delivered=delivered,
                entitled=entitled,
            )
            for pool, pool_name, tenant, tenant_name, service, delivered, entitled in cursor.fetchall()
        ]
