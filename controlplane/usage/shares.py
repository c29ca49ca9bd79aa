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
from controlplane.usage.report import MAX_HOUR_DAYS, Question, one_state, parts_sql

MAX_ROWS = 1_000
_COLUMNS = ("at", "pool", "tenant", "prompt_tokens", "output_tokens")

# A weight holds from its instant until the next one of the tenant; the first one, before its own instant as well.
# Instants and competitors are told apart by grouping, not by sorting, which would take most of the time.
_SHARES_SQL = """, served AS MATERIALIZED (
        SELECT at, pool, tenant, sum(prompt_tokens::float8 + 2 * output_tokens::float8) AS service
        FROM parts GROUP BY at, pool, tenant
    ), held AS MATERIALIZED (
        SELECT tenant, weight, "group" AS grp, group_weight,
               CASE WHEN row_number() OVER changes = 1 THEN '-infinity' ELSE at END AS from_at,
               lead(at, 1, 'infinity') OVER changes AS to_at
        FROM usage_weight WHERE tenant IN (SELECT tenant FROM served)
        WINDOW changes AS (PARTITION BY tenant ORDER BY at, id)
    ), weighed AS MATERIALIZED (
        SELECT served.*, coalesce(held.weight, 1) AS weight, held.grp, coalesce(held.group_weight, 1) AS group_weight
        FROM served LEFT JOIN held
             ON held.tenant = served.tenant AND held.from_at <= served.at AND held.to_at > served.at
    ), grouped AS (
        SELECT at, pool, grp, sum(weight) AS inside, max(group_weight) AS group_weight FROM weighed
        WHERE grp IS NOT NULL GROUP BY at, pool, grp
    ), quarters AS (
        SELECT at, pool, sum(service) AS service, sum(alone) AS alone FROM (
            SELECT at, pool, service, CASE WHEN grp IS NULL THEN weight ELSE 0 END AS alone FROM weighed
            UNION ALL
            SELECT at, pool, 0, group_weight FROM grouped
        ) AS competitors GROUP BY at, pool
    ), entitled AS (
        SELECT pool, tenant, weighed.service,
               quarters.service * CASE WHEN grp IS NULL THEN weight ELSE grouped.group_weight * weight / inside END
                   / quarters.alone AS entitled
        FROM weighed JOIN quarters USING (at, pool) LEFT JOIN grouped USING (at, pool, grp)
    ), sums AS (
        SELECT pool, tenant, sum(service) AS service, sum(entitled) AS entitled,
               sum(sum(service)) OVER (PARTITION BY pool) AS whole,
               row_number() OVER (PARTITION BY pool ORDER BY sum(service) DESC, tenant) AS place
        FROM entitled GROUP BY pool, tenant
    )
    SELECT sums.pool, coalesce(fleet_pool.name, sums.pool), sums.tenant, coalesce(tenants_tenant.name, sums.tenant),
           service, CASE WHEN whole > 0 THEN service / whole ELSE 0 END,
           CASE WHEN whole > 0 THEN entitled / whole ELSE 0 END
    FROM sums LEFT JOIN fleet_pool ON fleet_pool.id = sums.pool
    LEFT JOIN tenants_tenant ON tenants_tenant.id = sums.tenant
    WHERE %(only)s = '' OR sums.tenant = %(only)s
    ORDER BY place, sums.pool LIMIT %(limit)s
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

    @property
    def delivered_percent(self) -> float:
        return 100 * self.delivered

    @property
    def entitled_percent(self) -> float:
        return 100 * self.entitled


def shares(question: Question) -> list[Share]:
    """Shares over the whole span, by pool and falling service; the first ``MAX_ROWS`` of all pools at most.

    All tenants compete in the computation, whoever may see which of them.

    Cost: one statement, some microseconds a rollup; hence at most 93 days.
    """
    if (question.to_day - question.from_day).days >= MAX_HOUR_DAYS:
        raise Invalid({"to": f"more than {MAX_HOUR_DAYS} days after from; shares are told of no more at once"})
    only = question.filters.get("tenant", "")
    pools = {name: value for name, value in question.filters.items() if name == "pool"}
    question = replace(question, filters=pools)
    with one_state(), connection.cursor() as cursor:
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
        # The largest of every pool are told, whatever there is of others.
        return sorted(
            (
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
            ),
            key=lambda share: share.pool,
        )
