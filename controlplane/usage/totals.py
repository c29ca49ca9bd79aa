"""Tokens of each tenant and key by UTC day and month of arrival: what quotas are held against.

    batch -> usage_added (appended, in the batch's transaction)  -> usage_total (``fold``: one row per span and scope)

All are counted, whoever has a quota at present: one that is set later finds the whole month. Appending waits for
nobody, and is far cheaper than keeping the sums themselves, on whose rows batches would wait for each other; ``fold``
moves what was appended in one transaction, and whoever reads adds both. On the way it notes when keys were last used:
an update of a key costs more than booking the events of a minute with it.

Which batches an answer holds. Routers add to it what they were acknowledged with ``booked_at_us > as_of_us``, so a
batch must be in the answer if and only if ``booked_at_us <= as_of_us``. Both instants are the database's clock, read
under one advisory lock that batches share and an answer has to itself:

- A batch takes the lock when everything else is done, reads the clock and commits; PostgreSQL lets go of the lock only
  after the commit can be seen. It waits for nothing meanwhile.
- An answer takes the lock alone, reads the clock, opens the cursor that fixes what it sees, lets go, and fetches.

So whatever took the lock before the answer has an earlier instant and is seen as a whole; whatever takes it later has a
later instant and is not seen at all, however long it had run before.

An answer to "changed since T" tells of whatever is appended and of sums that were folded after T. What the answer of T
did not see was committed after T and folded later still, so nothing is missed; what it did see may be told of twice,
which does no harm, since these are sums and no differences. A clock that is set back by up to ``CLOCK_STEP_US`` misses
nothing either.
"""

from __future__ import annotations

from calendar import monthrange
from collections import defaultdict
from collections.abc import Sequence
from datetime import date, datetime, timedelta

from django.db import connection, transaction

from controlplane.common.bound import EPOCH_US
from controlplane.common.clock import from_us, utc_now
from controlplane.common.limits import QUOTAS
from controlplane.fleet.queries import n_live_routers
from controlplane.keys.actions import note_used
from controlplane.usage.models import UsageTotal
from router_ext.wire.controlplane import TotalRecord, Totals, UsageEvent

_LOCK = 0x66_6C_05
_FOLD_LOCK = 0x66_6C_06
_DAY_US = 86_400_000_000
KEPT_MONTHS = 1
"""Months before the present one that are kept; what arrived earlier is counted nowhere."""
MAX_SCOPE = 40
"""Characters of an id; a longer one in an event is nobody's."""
MAX_TOKENS = 4 * 10**18
"""Where a sum stops: beyond any quota, and two of them still fit an integer of the database."""
OLDEST_SINCE_US = 3_600_000_000
CLOCK_STEP_US = 2_000_000
EDIT_MARGIN = timedelta(minutes=1)
"""How long an edit may take from its ``updated_at`` to its commit. One that takes longer is told of with the next
tokens of its tenant or key, or with the next whole answer."""

_CLOCK = "(extract(epoch FROM clock_timestamp()) * 1000000)::int8"
_SHARE_SQL = f"WITH held AS MATERIALIZED (SELECT pg_advisory_xact_lock_shared(%s)) SELECT {_CLOCK} FROM held"
_ADD_SQL = "COPY usage_added (day, scope, tokens, last_at) FROM STDIN (FORMAT BINARY)"
# Sums are made as numeric and stop at a limit: no event may keep the others from being counted.
_FOLD_SQL = f"""
    WITH taken AS (
        DELETE FROM usage_added RETURNING day, scope, tokens, last_at
    ), by_day AS (
        SELECT day, scope, sum(tokens) AS tokens FROM taken GROUP BY day, scope
    ), by_span AS (
        SELECT to_char(day, 'YYYY-MM-DD') AS span, scope, tokens FROM by_day
        UNION ALL
        SELECT to_char(day, 'YYYY-MM'), scope, sum(tokens) FROM by_day GROUP BY 1, scope
    ), summed AS (
        INSERT INTO usage_total AS total (span, scope, tokens, changed_at_us)
        SELECT span, scope, least(tokens, %(most)s)::int8, {_CLOCK} FROM by_span
        ON CONFLICT (span, scope) DO UPDATE
        SET tokens = least(total.tokens + excluded.tokens, %(most)s), changed_at_us = excluded.changed_at_us
    )
    SELECT scope, max(last_at) FROM taken WHERE last_at IS NOT NULL GROUP BY scope
"""
_HAS_QUOTA = " OR ".join(f"{name} IS NOT NULL" for name in QUOTAS)
_TOTALS_SQL = f"""
    WITH held AS NOT MATERIALIZED (
        SELECT id::text AS scope, updated_at FROM tenants_tenant WHERE {_HAS_QUOTA}
        UNION ALL
        SELECT id::text, updated_at FROM keys_apikey WHERE revoked_at IS NULL AND ({_HAS_QUOTA})
    ), added AS (
        SELECT scope, sum(tokens) AS month_tokens, coalesce(sum(tokens) FILTER (WHERE day = %(today)s), 0) AS day_tokens
        FROM usage_added WHERE day BETWEEN %(first)s AND %(last)s GROUP BY scope
    ), wanted AS NOT MATERIALIZED (
        {{wanted}}
    )
    SELECT scope,
           least(coalesce(day.tokens, 0) + coalesce(added.day_tokens, 0), %(most)s)::int8,
           least(coalesce(month.tokens, 0) + coalesce(added.month_tokens, 0), %(most)s)::int8
    FROM wanted
    LEFT JOIN (SELECT scope, tokens FROM usage_total WHERE span = %(month)s) AS month USING (scope)
    LEFT JOIN (SELECT scope, tokens FROM usage_total WHERE span = %(day)s) AS day USING (scope)
    LEFT JOIN added USING (scope)
    WHERE month.tokens IS NOT NULL OR added.month_tokens IS NOT NULL
"""
_WHOLE_SQL = _TOTALS_SQL.format(wanted="SELECT scope FROM held")
# Few rows change: they are found first, and looked up one by one.
_CHANGED_SQL = _TOTALS_SQL.format(
    wanted="""
        SELECT scope FROM held JOIN (
            SELECT scope FROM usage_total WHERE span = %(month)s AND changed_at_us > %(changed_us)s
            UNION
            SELECT scope FROM added
        ) AS changed USING (scope)
        UNION
        SELECT scope FROM held WHERE updated_at > %(edited)s
    """
)
_USED_SQL = """
    SELECT least(
        coalesce((SELECT tokens FROM usage_total WHERE span = %(day)s AND scope = %(scope)s), 0)
        + coalesce(sum(tokens) FILTER (WHERE day = %(today)s), 0), %(most)s
    )::int8, least(
        coalesce((SELECT tokens FROM usage_total WHERE span = %(month)s AND scope = %(scope)s), 0)
        + coalesce(sum(tokens), 0), %(most)s
    )::int8
    FROM usage_added WHERE scope = %(scope)s AND day BETWEEN %(first)s AND %(last)s
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


def add(events: Sequence[UsageEvent]) -> int:
    """Add events that were booked just now, in their transaction and as the last thing it does.

    Args:
        events: in the order of their arrival.

    Returns:
        ``booked_at_us``, which holds as soon as the transaction has committed.

    Cost: 0.3 us an event, and one appended row for each tenant, key and day among them.
    """
    by_day: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    last_us = {event.key: event.arrived_at_us for event in events}
    for event in events:
        tokens = event.prompt_tokens + event.output_tokens
        sums = by_day[event.arrived_at_us // _DAY_US]
        sums[event.tenant] += tokens
        sums[event.key] += tokens
    oldest = oldest_month()
    kept = [
        (day, scope, min(n, MAX_TOKENS), last_us[scope] - EPOCH_US if scope in last_us else None)
        for number, sums in by_day.items()
        if (day := from_us(number * _DAY_US).date()) >= oldest
        for scope, n in sums.items()
        if 0 < len(scope) <= MAX_SCOPE
    ]
    with connection.cursor() as cursor:
        if kept:
            with cursor.copy(_ADD_SQL) as copy:
                copy.set_types(("date", "text", "int8", "int8"))
                for row in kept:
                    copy.write_row(row)
        cursor.execute(_SHARE_SQL, [_LOCK])
        found = cursor.fetchone()
        assert found is not None
    return int(found[0])


def fold() -> None:
    """Add what was appended to the sums, and note when keys were last used.

    One session at a time does; another leaves it to that one.

    Cost: some 10 us per span and scope among them.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [_FOLD_LOCK])
        if cursor.fetchone() == (True,):
            cursor.execute(_FOLD_SQL, {"most": MAX_TOKENS})
            note_used(dict(cursor.fetchall()))


def totals(*, since_us: int = 0) -> Totals:
    """What tenants and keys with a quota have used of the present UTC day and month.

    Those without a row have used nothing. Those whose quota was set since ``since_us`` count as changed.

    Args:
        since_us: ``as_of_us`` of an earlier answer; the answer is whole where that is 0, of another day, later than
            now or older than an hour.

    Cost: folding what was appended since the last call, and a join of plain columns; the lock is held only until that
    begins. An answer that is not whole is as large as what changed.
    """
    fold()
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
                # All rows will be fetched: no plan that is quick for the first of them only.
                cursor.execute("SET LOCAL cursor_tuple_fraction = 1")
                # In a transaction a cursor of the server sees what was committed when it was opened, and no more.
                with connection.chunked_cursor() as rows:
                    rows.execute(
                        _WHOLE_SQL if is_whole else _CHANGED_SQL,
                        {
                            "most": MAX_TOKENS,
                            **_spans(today),
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
    with connection.cursor() as cursor:
        cursor.execute(_USED_SQL, {"scope": scope, "most": MAX_TOKENS, **_spans(today)})
        row = cursor.fetchone()
    assert row is not None
    return row[0], row[1]


def _spans(today: date) -> dict[str, str | date]:
    """A day and its month as parameters."""
    last = monthrange(today.year, today.month)[1]
    return {
        "day": day_span(today),
        "month": month_span(today),
        "today": today,
        "first": today.replace(day=1),
        "last": today.replace(day=last),
    }


def forget_old_totals(*, now: datetime | None = None) -> int:
    """Delete what is no longer kept; returns how many rows."""
    # As texts, a month sorts before its days and after those of the month before.
    return UsageTotal.objects.filter(span__lt=month_span(oldest_month(now=now))).delete()[0]
