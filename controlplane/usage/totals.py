"""Tokens of each tenant and key by UTC day and month of arrival: what quotas are held against.

Every batch adds what was new in it to ``usage_total``, in its own transaction, whoever has a quota at present: one
that is set later finds the whole month counted.

Which batches an answer holds. Routers add to it what they were acknowledged with ``booked_at_us > as_of_us``, so a
batch must be in the answer if and only if ``booked_at_us <= as_of_us``. Both instants are the database's clock, read
under one advisory lock that batches share and an answer has to itself:

- A batch takes the lock, reads the clock, adds its tokens and commits; PostgreSQL lets go of the lock only after the
  commit can be seen. Nothing is done under the lock but this, so it is held for milliseconds.
- An answer takes the lock alone, reads the clock, opens the cursor that fixes what it sees, lets go, and fetches.

So whatever took the lock before the answer has an earlier instant and is seen as a whole; whatever takes it later has a
later instant and is not seen at all, however long it had run before. A batch that waits for another's rows waits for
somebody who holds the lock already, adds in the same order and needs nothing else: there is no cycle.

``changed_at_us`` of a row is such an instant too, hence "changed since" misses nothing. A clock that is set back by up
to ``CLOCK_STEP_US`` costs rows sent twice; they carry sums, not differences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import date, datetime, timedelta
from typing import TypeAlias

from django.db import connection, transaction

from controlplane.common.clock import from_us, utc_now
from controlplane.common.limits import QUOTAS
from controlplane.fleet.queries import n_live_routers
from controlplane.usage.models import UsageTotal
from router_ext.wire.controlplane import TotalRecord, Totals, UsageEvent

Arrived: TypeAlias = tuple[UsageEvent, datetime]
"""An event, and when it arrived."""

_LOCK = 0x66_6C_05
KEPT_MONTHS = 1
"""Months before the present one that are kept; what arrived earlier is counted nowhere."""
MAX_SCOPE = 40
"""Characters of an id; a longer one in an event is nobody's."""
MAX_TOKENS = 4 * 10**18
"""Where a sum stops: beyond any quota, and two of them still fit the column."""
OLDEST_SINCE_US = 3_600_000_000
CLOCK_STEP_US = 5_000_000
EDIT_MARGIN = timedelta(minutes=1)
"""How long an edit may take from its ``updated_at`` to its commit. One that takes longer is told of with the next
tokens of its tenant or key, or with the next whole answer."""

_CLOCK = "(extract(epoch FROM clock_timestamp()) * 1000000)::int8"
_SHARE_SQL = f"WITH held AS MATERIALIZED (SELECT pg_advisory_xact_lock_shared(%s)) SELECT {_CLOCK} FROM held"
_ADD_SQL = """
    INSERT INTO usage_total AS total (span, scope, tokens, changed_at_us)
    SELECT span, scope, tokens, %(at)s
    FROM unnest(%(spans)s::text[], %(scopes)s::text[], %(tokens)s::int8[]) AS new(span, scope, tokens)
    ORDER BY span, scope
    ON CONFLICT (span, scope) DO UPDATE
    SET tokens = least(total.tokens, %(most)s) + excluded.tokens, changed_at_us = excluded.changed_at_us
"""
_HAS_QUOTA = " OR ".join(f"{name} IS NOT NULL" for name in QUOTAS)
_TOTALS_SQL = f"""
    WITH held AS (
        SELECT id, updated_at FROM tenants_tenant WHERE {_HAS_QUOTA}
        UNION ALL
        SELECT id, updated_at FROM keys_apikey WHERE revoked_at IS NULL AND ({_HAS_QUOTA})
    )
    SELECT month.scope, coalesce(day.tokens, 0), month.tokens
    FROM held JOIN usage_total AS month ON month.span = %(month)s AND month.scope = held.id
    LEFT JOIN usage_total AS day ON day.span = %(day)s AND day.scope = held.id
    WHERE %(is_whole)s OR month.changed_at_us > %(changed_us)s OR held.updated_at > %(edited)s
"""


def day_span(day: date) -> str:
    return f"{day:%Y-%m-%d}"


def month_span(day: date) -> str:
    return f"{day:%Y-%m}"


def oldest_month(*, now: datetime | None = None) -> date:
    """The first day that is counted."""
    month = (now or utc_now()).date().replace(day=1)
    for _ in range(KEPT_MONTHS):
        month = (month - timedelta(days=1)).replace(day=1)
    return month


def add(events: Sequence[Arrived]) -> int:
    """Add events that were booked just now, in their transaction and as the last thing it does.

    Returns:
        ``booked_at_us``, which holds as soon as the transaction has committed.

    Cost: 0.3 us an event, and one upsert for the day and one for the month of each tenant and key among them.
    """
    by_day: Counter[tuple[date, str]] = Counter()
    for event, arrived in events:
        day, tokens = arrived.date(), event.prompt_tokens + event.output_tokens
        by_day[day, event.tenant] += tokens
        by_day[day, event.key] += tokens
    oldest = oldest_month()
    sums: Counter[tuple[str, str]] = Counter()
    for (day, scope), tokens in by_day.items():
        if day >= oldest and 0 < len(scope) <= MAX_SCOPE:
            sums[day_span(day), scope] += tokens
            sums[month_span(day), scope] += tokens
    with connection.cursor() as cursor:
        cursor.execute(_SHARE_SQL, [_LOCK])
        row = cursor.fetchone()
        assert row is not None
        if sums:
            tokens_of = [min(tokens, MAX_TOKENS) for tokens in sums.values()]
            spans, scopes = zip(*sums, strict=True)
            cursor.execute(
                _ADD_SQL,
                {"at": row[0], "spans": list(spans), "scopes": list(scopes), "tokens": tokens_of, "most": MAX_TOKENS},
            )
    return int(row[0])


def totals(*, since_us: int = 0) -> Totals:
    """What tenants and keys with a quota have used of the present UTC day and month.

    Those without a row have used nothing. Those whose quota was set since ``since_us`` count as changed.

    Args:
        since_us: ``as_of_us`` of an earlier answer; the answer is whole where that is 0, of another day, later than
            now or older than an hour.

    Cost: three scans of plain columns, some 100 ms at 100,000 keys with quotas; the lock is held for the first of them
    to begin. An answer that is not whole is as large as what changed.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [_LOCK])
        is_held = True
        try:
            with transaction.atomic():
                cursor.execute(f"SELECT {_CLOCK}")
                (as_of_us,) = cursor.fetchone() or (0,)
                today = from_us(as_of_us).date()
                is_whole = not (
                    0 < since_us <= as_of_us
                    and as_of_us - since_us <= OLDEST_SINCE_US
                    and from_us(since_us).date() == today
                )
                # In a transaction a cursor of the server sees what was committed when it was opened, and no more.
                with connection.chunked_cursor() as rows:
                    rows.execute(
                        _TOTALS_SQL,
                        {
                            "month": month_span(today),
                            "day": day_span(today),
                            "is_whole": is_whole,
                            "changed_us": since_us - CLOCK_STEP_US,
                            "edited": from_us(as_of_us if is_whole else since_us) - EDIT_MARGIN,
                        },
                    )
                    cursor.execute("SELECT pg_advisory_unlock(%s)", [_LOCK])
                    is_held = False
                    found = rows.fetchall()
        finally:
            # Sessions are pooled: a lock that stayed with one would stop the books.
            if is_held:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [_LOCK])
    return Totals(
        as_of_us=as_of_us,
        day=day_span(today),
        live_routers=n_live_routers(),
        is_whole=is_whole,
        totals=[TotalRecord(scope=scope, day_tokens=day, month_tokens=month) for scope, day, month in found],
    )


def used(scope: str, today: date) -> tuple[int, int]:
    """Tokens of one tenant or key in that day and its month."""
    day, month = day_span(today), month_span(today)
    found = dict(UsageTotal.objects.filter(span__in=[day, month], scope=scope).values_list("span", "tokens"))
    return found.get(day, 0), found.get(month, 0)


def forget_old_totals(*, now: datetime | None = None) -> int:
    """Delete what is no longer kept; returns how many rows."""
    # As texts, a month sorts before its days and after those of the month before.
    return UsageTotal.objects.filter(span__lt=month_span(oldest_month(now=now))).delete()[0]
