"""Usage reports: any grouping, by hour or day of any time zone; pages and exports of the same statement.

Rolled-up quarters of an hour come from ``usage_quarter``, or from its sums over all tenants and keys, ``usage_sum``,
where a report asks of neither; touched ones from their events. All statements of a report see one state
(``one_state``), so that a quarter is never counted from two of them and never from none. Where days and hours begin is
computed here (``common.zones``), not by the database, whose knowledge of time zones may be of another year.

Sums agree however they are grouped: all of them are sums of the same rows, made of integers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
from django.db import connection, transaction

from controlplane.common import cursors
from controlplane.common.access import visible_tenant
from controlplane.common.actor import Actor
from controlplane.common.errors import Invalid
from controlplane.common.validation import without_nul
from controlplane.common.zones import QUARTER, day_start, days, find_zone, hour_starts
from controlplane.usage.histogram import QUANTILE_SQL
from controlplane.usage.prices import LIST_PRICE_SQL, PAYS_SQL, PICO_SQL, PRICE_CHANGES_SQL, PRICE_SQL
from controlplane.usage.rollup import DIMENSIONS, QUARTER_SQL, ROLLUP_SQL, SUMS
from router_ext.wire.log_histogram import bucket_us

MAX_DAYS = 775
"""As long as rollups are kept."""
MAX_HOUR_DAYS = 93
CALENDAR = (date(2000, 1, 1), date(9998, 12, 31))
"""Days a report may name: nothing was booked before, and instants around them can still be computed with."""
STEPS = ("day", "hour")
MAX_PAGE = 1_000
LEADING = frozenset({"tenant", "key"})
"""Dimensions that rows and rollups grow with; they come first in the order of a report."""
_TABLE = {"tenant": "tenants_tenant", "key": "keys_apikey"}
FEW_REQUESTS = 10_000
"""So many are read at once, rather than by stretches."""
_GROWTH = 32
_FETCHED = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a report is asked for. Checked by ``usage_question``, which alone makes it.

    ``step``: day or hour of ``zone``, "" for the span as a whole. ``by``: some of ``DIMENSIONS``. ``filters``: value by
    dimension. ``starts``: where the steps begin, and where the last one ends.
    """

    from_day: date
    to_day: date
    zone: ZoneInfo
    step: str
    by: tuple[str, ...]
    filters: Mapping[str, str]
    starts: Sequence[datetime]


@dataclass(slots=True, kw_only=True)
class Row:
    """Sums of one step and group; ``names``: of tenant, key and pool, where they are known.

    ``start``: in the zone of the question. What is not grouped by is "". Times in milliseconds, None where no request
    had a first token. ``cost_pico`` of ``currency`` (``usage.prices``): what has a price; None and "" without any,
    None and ``MIXED`` where it is of several currencies. ``unpriced``: requests without a price.
    """

    start: datetime
    group: Mapping[str, str]
    names: Mapping[str, str]
    sums: Mapping[str, int]
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    currency: str = ""
    cost_pico: int | None = None
    unpriced: int = 0


MIXED = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A page of rows in order of step and group, the sums of all rows whatever the page, and where the next begins.

    ``costs``: by currency, in 10^-12 of it; ``unpriced``: requests without a price.

    ``is_coarse``: some hours were kept as a whole only and the zone's days are not made of whole hours, so that such an
    hour counts where it begins.
    """

    question: Question
    rows: Sequence[Row]
    totals: Mapping[str, int]
    costs: Mapping[str, int]
    unpriced: int
    next_cursor: str | None
    is_coarse: bool


def usage_question(
    *,
    actor: Actor,
    from_day: date,
    to_day: date,
    timezone: str = "UTC",
    group_by: Sequence[str] = ("day", "tenant"),
    filters: Mapping[str, str] | None = None,
) -> Question:
    """A question that the actor may ask.

    Raises:
        Invalid: naming the field.
    """
    wanted = {name: without_nul(value) for name, value in (filters or {}).items()}
    wanted["tenant"] = visible_tenant(wanted.get("tenant", ""), actor=actor)
    problems: dict[str, str] = {}
    for name, day in (("from", from_day), ("to", to_day)):
        if not CALENDAR[0] <= day <= CALENDAR[1]:
            problems[name] = f"must be a day from {CALENDAR[0]} to {CALENDAR[1]}, not {day}"
    zone = find_zone(timezone)
    if zone is None:
        problems["tz"] = f"{timezone[:60]!r} is no time zone of the IANA database, such as Europe/Berlin"
    steps = [name for name in group_by if name in STEPS]
    unknown = [name for name in group_by if name not in (*STEPS, *DIMENSIONS)]
    if unknown or len(steps) > 1 or len(set(group_by)) < len(group_by):
        problems["group_by"] = (
            f"day or hour or neither, and any of {', '.join(DIMENSIONS)}, each once; not {','.join(group_by)[:80]!r}"
        )
    if not problems:
        if to_day < from_day:
            problems["to"] = "lies before from"
        elif (to_day - from_day).days >= MAX_DAYS:
            problems["to"] = f"more than {MAX_DAYS} days after from"
        elif "hour" in steps and (to_day - from_day).days >= MAX_HOUR_DAYS:
            problems["to"] = f"more than {MAX_HOUR_DAYS} days after from; by hour no more are told at once"
    if problems:
        raise Invalid(problems)
    assert zone is not None
    step = steps[0] if steps else ""
    return Question(
        from_day=from_day,
        to_day=to_day,
        zone=zone,
        step=step,
        by=tuple(name for name in DIMENSIONS if name in group_by),
        filters={name: value for name, value in wanted.items() if value},
        starts=_starts(from_day, to_day, zone, step),
    )


def first_day(to_day: date, *, n_days: int) -> date:
    """First of the ``n_days`` days that end with ``to_day``; the calendar's first day at the earliest."""
    return max(to_day, CALENDAR[0] + timedelta(days=n_days - 1)) - timedelta(days=n_days - 1)


def _starts(first: date, last: date, zone: ZoneInfo, step: str) -> list[datetime]:
    end = day_start(last + timedelta(days=1), zone)
    if step == "hour":
        starts = [start for day in days(first, last) for start in hour_starts(day, zone)]
    elif step == "day":
        starts = [day_start(day, zone) for day in days(first, last)]
    else:
        starts = [day_start(first, zone)]
    # A day that a zone skipped begins and ends at once, and nothing is in it.
    return [a for a, b in itertools.pairwise([*starts, end]) if a < b] + [end]


_HISTOGRAM = ("ttft_buckets", "ttft_counts")
_NAMED = {
    "tenant": "LEFT JOIN tenants_tenant ON tenants_tenant.id = sums.tenant",
    "key": "LEFT JOIN keys_apikey ON keys_apikey.id = sums.key",
    "pool": "LEFT JOIN fleet_pool ON fleet_pool.id = sums.pool",
}
_NAME = {"tenant": "tenants_tenant.name", "key": "keys_apikey.name", "pool": "fleet_pool.name"}


@dataclass(frozen=True, slots=True)
class _Marks:
    """Quarters whose rollups, or sums, do not hold: CTEs that find them, and conditions of ``at``.

    ``tail``: rollups of the touched quarters, of events where ``{where}`` holds.
    """

    head: str
    stale_head: str
    not_touched: str
    stale: str
    not_stale: str
    tail: str


def _of_events(first: str, end: str) -> str:
    return ROLLUP_SQL.replace("%(from)s", first).replace("%(to)s", end)


_FOUND = _Marks(
    head="""
    WITH touched AS MATERIALIZED (
        SELECT DISTINCT quarter FROM usage_touched_quarter WHERE quarter >= %(from)s AND quarter < %(to)s
    ), """,
    stale_head="""stale AS MATERIALIZED (
        SELECT DISTINCT quarter FROM usage_stale_sum WHERE quarter >= %(from)s AND quarter < %(to)s
    ), """,
    not_touched="at NOT IN (SELECT quarter FROM touched)",
    stale="at IN (SELECT quarter FROM stale)",
    not_stale="at NOT IN (SELECT quarter FROM stale)",
    tail="touched CROSS JOIN LATERAL ("
    + _of_events("touched.quarter", "touched.quarter + interval '15 minutes'")
    + ") AS tail",
)
# The same of what was read before, which may run in parallel workers: sub-plans and lateral joins may not. Only the
# partitions of events between the first and the last touched quarter are planned for, and all of these are read.
_KNOWN = _Marks(
    head=" WITH ",
    stale_head="",
    not_touched="at <> ALL (%(touched)s::timestamptz[])",
    stale="at = ANY (%(stale)s::timestamptz[])",
    not_stale="at <> ALL (%(stale)s::timestamptz[])",
    tail=f"({_of_events('%(touched_from)s', '%(touched_to)s')}) AS tail",
)
_AT_MOST = timedelta(hours=6)
"""How far apart touched quarters may lie for ``_KNOWN``."""
_SPAN = "at >= %(from)s AND at < %(to)s"


def _of_touched(marks: _Marks, where: str) -> str:
    """Rollups of the touched quarters, computed from their events."""
    if marks is _KNOWN:
        where += f" AND {QUARTER_SQL.format(at='arrived_at')} = ANY (%(touched)s::timestamptz[])"
    return marks.tail.format(where=where)


def _where(filters: Sequence[str]) -> str:
    return "".join(f" AND {name} = %(is_{name})s" for name in filters)


def parts_sql(columns: Sequence[str], filters: Sequence[str], within: str = "", *, marks: _Marks = _FOUND) -> str:
    """``WITH parts``: the rows of the rollups between ``from`` and ``to``, touched quarters from their events.

    Parameters are ``from``, ``to`` and ``is_<dimension>`` of each filter. ``within``: a further condition, " AND ...".
    ``marks``: found by the statement itself, unless they are parameters (``_parameters``).
    """
    where = _where(filters) + within
    return f"""{marks.head}parts AS (
        SELECT {", ".join(columns)} FROM usage_quarter WHERE {_SPAN} AND {marks.not_touched}{where}
        UNION ALL
        SELECT {", ".join(f"tail.{name}" for name in columns)} FROM {_of_touched(marks, where)}
    )"""


def sum_parts_sql(columns: Sequence[str], filters: Sequence[str], *, marks: _Marks = _FOUND) -> str:
    """As ``parts_sql``, for what asks of no tenant or key: of ``usage_sum``, which has a ``price_list`` besides.

    A quarter whose sums do not hold comes from its rollups, with the lists that are paid by at present.
    """
    where = _where(filters)
    payer = "coalesce(pays.price_list_id, '') AS price_list"
    listed = ", ".join(columns)
    return f"""{marks.head}{marks.stale_head}parts AS (
        SELECT {listed} FROM usage_sum
        WHERE {_SPAN} AND {marks.not_touched} AND {marks.not_stale}{where}
        UNION ALL
        SELECT {listed} FROM (
            SELECT usage_quarter.*, {payer} FROM usage_quarter {PAYS_SQL.format(row="usage_quarter", at="at")}
            WHERE {_SPAN} AND {marks.not_touched} AND {marks.stale}{where}
        ) AS rolled
        UNION ALL
        SELECT {listed} FROM (
            SELECT tail.*, {payer} FROM {_of_touched(marks, where)} {PAYS_SQL.format(row="tail", at="tail.at")}
        ) AS booked
    )"""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the rows of a report come from: ``usage_sum`` unless it asks of tenants or keys.

    ``payer``: the column that says who pays; ``price``: joins the price to rows ``used`` by it.
    """

    parts: Callable[..., str]
    payer: str
    price: str


_OF_ALL = _Source(sum_parts_sql, "price_list", LIST_PRICE_SQL)
_OF_EACH = _Source(parts_sql, "tenant", PRICE_SQL)


def _source(*named: str) -> _Source:
    return _OF_ALL if LEADING.isdisjoint(named) else _OF_EACH


_PERIOD = "width_bucket(at, %(changes)s::timestamptz[]) AS period"
# More than one currency in a group is told by two different ends.
_COST = "min(currency) AS currency, max(currency) AS other_currency, sum(pico) AS pico, sum(unpriced) AS unpriced"
_NO_COST = "NULL AS currency, NULL AS other_currency, NULL AS pico, sum(requests) AS unpriced"
_VALUED = f"""list.currency, {PICO_SQL} AS pico,
    CASE WHEN price.id IS NULL THEN used.requests ELSE 0 END AS unpriced"""


# Of rows ``stepped``, for each of ``placed``: groups and their place. Numbers are told apart quicker than texts.
_QUANTILES_SQL = f"""pairs AS (
        SELECT place, unnest(ttft_buckets) AS bucket, unnest(ttft_counts) AS n
        FROM stepped JOIN placed USING ({{group}}) WHERE ttft_buckets <> '{{{{}}}}'
    ), buckets AS (
        -- No bucket of a rollup counts more than an integer holds; adding those up is far cheaper.
        SELECT place, bucket, sum(n::integer) AS n FROM pairs GROUP BY place, bucket
    ), ranked AS (
        SELECT place, bucket, sum(n) OVER (PARTITION BY place ORDER BY bucket) AS seen,
               sum(n) OVER (PARTITION BY place) AS total FROM buckets
    ), quantiles AS (
        SELECT place, {QUANTILE_SQL.format(level="0.50")} AS p50, {QUANTILE_SQL.format(level="0.95")} AS p95
        FROM ranked GROUP BY place
    )"""


def _report_sql(
    question: Question,
    *,
    is_priced: bool,
    marks: _Marks,
    within: str = "",
    has_cursor: bool = False,
    has_limit: bool = False,
    has_quantiles: bool = True,
) -> str:
    by = question.by
    source = _source(*by, *question.filters)
    group = ", ".join(("step", *by))
    # Prices depend on who pays, model and time: sums by those first, and what is asked for from them.
    extra = tuple(name for name in (source.payer, "model") if is_priced and name not in by)
    columns = ("at", *by, *extra, *SUMS, *(_HISTOGRAM if has_quantiles else ()))
    parts = source.parts(columns, tuple(question.filters), *filter(None, [within]), marks=marks)
    sums = ", ".join(f"sum({name}) AS {name}" for name in SUMS)
    fine = ", ".join(("step", *by, *extra, "period"))
    valued = (
        f"""used AS (SELECT {fine}, {sums} FROM stepped GROUP BY {fine}), valued AS (
        SELECT used.*, {_VALUED} FROM used {source.price}), """
        if is_priced
        else ""
    )
    after = f"WHERE ({group}) > (%(after_step)s{''.join(f', %(after_{n})s' for n in by)})" if has_cursor else ""
    shown = ", ".join(
        ("sums.step", *(f"sums.{name}" for name in by), *(f"coalesce({_NAME[n]}, '')" for n in by if n in _NAME),
         *(f"sums.{name}" for name in SUMS), "sums.currency", "sums.other_currency", "sums.pico", "sums.unpriced",
         *(("quantiles.p50", "quantiles.p95") if has_quantiles else ()))
    )  # fmt: skip
    quantiles = (
        f", placed AS (SELECT {group}, place FROM sums), {_QUANTILES_SQL.format(group=group)}" if has_quantiles else ""
    )
    return f"""{parts}, stepped AS (
        SELECT width_bucket(at, %(starts)s::timestamptz[]) AS step, {f"{_PERIOD}, " if is_priced else ""}
               {", ".join(columns[1:])} FROM parts
    ), {valued}sums AS MATERIALIZED (
        SELECT every.*, row_number() OVER (ORDER BY {group}) AS place FROM (
            SELECT {group}, {sums}, {_COST if is_priced else _NO_COST}
            FROM {"valued" if is_priced else "stepped"} GROUP BY {group}
        ) AS every {after}
        ORDER BY {group} {"LIMIT %(limit)s" if has_limit else ""}
    ){quantiles}
    SELECT {shown} FROM sums {"LEFT JOIN quantiles USING (place)" if has_quantiles else ""}
    {" ".join(_NAMED[name] for name in by if name in _NAMED)}
    ORDER BY sums.place
    """


def _page_quantiles_sql(question: Question, marks: _Marks, within: str) -> str:
    """Place and quantiles of the rows of a page; parameters ``placed_step`` and ``placed_<dimension>`` are columns."""
    by = question.by
    group = ", ".join(("step", *by))
    columns = ("at", *by, *_HISTOGRAM)
    source = _source(*by, *question.filters)
    parts = source.parts(columns, tuple(question.filters), *filter(None, [within]), marks=marks)
    placed = ", ".join(("%(placed_step)s::integer[]", *(f"%(placed_{name})s::text[]" for name in by)))
    return f"""{parts}, stepped AS (
        SELECT width_bucket(at, %(starts)s::timestamptz[]) AS step, {", ".join(columns[1:])} FROM parts
    ), placed AS NOT MATERIALIZED (
        SELECT * FROM unnest({placed}) WITH ORDINALITY AS each ({group}, place)
    ), {_QUANTILES_SQL.format(group=group)}
    SELECT place, p50, p95 FROM quantiles"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Of the state that a report is read from: when prices change, and which quarters' rollups and sums do not hold."""

    changes: Sequence[datetime]
    touched: Sequence[datetime]
    stale: Sequence[datetime]

    @property
    def marks(self) -> _Marks:
        touched = self.touched
        return _KNOWN if not touched or max(touched) - min(touched) <= _AT_MOST else _FOUND


def _state(question: Question) -> _State:
    with connection.cursor() as database:
        database.execute(
            f"{_FOUND.head}{_FOUND.stale_head}changes AS ({PRICE_CHANGES_SQL})"
            " SELECT ARRAY(TABLE touched), ARRAY(TABLE stale), ARRAY(TABLE changes)",
            {"from": question.starts[0], "to": question.starts[-1]},
        )
        touched, stale, changes = database.fetchone() or ((), (), ())
    return _State(changes=sorted(changes), touched=touched, stale=stale)


def _parameters(question: Question, first: int, last: int, state: _State | None = None) -> dict[str, Any]:
    """Of the steps ``first`` up to ``last``, not included."""
    start, end = question.starts[first], question.starts[last]
    parameters = {
        "from": start,
        "to": end,
        "starts": list(question.starts[:-1]),
        **{f"is_{name}": value for name, value in question.filters.items()},
    }
    if state is not None:
        touched = [at for at in state.touched if start <= at < end]
        parameters |= {
            "changes": list(state.changes),
            "touched": touched,
            "touched_from": min(touched, default=start),
            "touched_to": max(touched) + QUARTER if touched else start,
            "stale": [at for at in state.stale if start <= at < end],
        }
    return parameters


def usage_report(
    question: Question, *, limit: int | None = MAX_PAGE, cursor: str = "", with_totals: bool = True
) -> Report:
    """One page of a report; without ``limit`` all of it.

    All of a page is read from one state of the database; the next page from a later one.

    Cost: one statement for the totals, for the rows one to four, each of a stretch of the report (``_Stretch``) until
    the page is full, and one for their quantiles. Each reads the rollups of its stretch, and the events of quarters not
    yet rolled up; all of them may run in parallel workers.
    """
    with one_state():
        state = _state(question)
        totals, costs, unpriced, is_coarse = _totals(question, state) if with_totals else ({}, {}, 0, False)
        first, after = _decode(question, cursor) if cursor else (0, None)
        if limit is None or (with_totals and totals["requests"] <= FEW_REQUESTS):
            n_wanted = None if limit is None else limit + 1
            found = _rows(question, state, [_Stretch(first, len(question.starts) - 1)], after, n_wanted)
        elif question.step or question.by[:1] not in (("tenant",), ("key",)) or LEADING & question.filters.keys():
            found = _rows(question, state, _steps(question, first), after, limit + 1)
        else:
            found = _rows(question, state, _ids(question, after[0] if after else "", limit + 1), after, limit + 1)
        has_more = limit is not None and len(found) > limit
        if limit is not None:
            found = _with_quantiles(question, state, found[:limit])
    rows = list(map(_reader(question), found))
    next_cursor = _encode(question, rows[-1]) if has_more else None
    return Report(
        question=question, rows=rows, totals=totals, costs=costs, unpriced=unpriced, next_cursor=next_cursor,
        is_coarse=is_coarse,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A part of a report in its order: its steps, the last not included, and where ids of its first dimension end.

    ``low``: the last id of the stretch before. ``high``: the last of this one; None: to the end.
    """

    first: int
    last: int
    low: str = ""
    high: str | None = None


def _steps(question: Question, first: int) -> Iterator[_Stretch]:
    """The first step, then 32 times as many each."""
    n_steps, width = len(question.starts) - 1, 1
    while first < n_steps:
        yield _Stretch(first, min(n_steps, first + width))
        first, width = first + width, width * _GROWTH


def _ids(question: Question, low: str, n_wanted: int) -> Iterator[_Stretch]:
    """All steps of as many tenants or keys as have rows enough if each has one, then of all others.

    Where there is more than one row of each, fewer are tried first. The ids of those that exist tell how far that is:
    the books may know more of them, or fewer, and all the stretches together hold every id.
    """
    last = len(question.starts) - 1
    table = _TABLE[question.by[0]]
    least = n_wanted + n_wanted // 8 if len(question.by) == 1 else -(-n_wanted // 8)
    for width in (least, 2 * least, 8 * least):
        with connection.cursor() as database:
            database.execute(f"SELECT id FROM {table} WHERE id > %s ORDER BY id OFFSET %s LIMIT 1", [low, width - 1])
            found = database.fetchone()
        if found is None:
            break
        yield _Stretch(0, last, low, found[0])
        low = found[0]
    yield _Stretch(0, last, low)


def _rows(
    question: Question,
    state: _State,
    stretches: Iterable[_Stretch],
    after: Sequence[str] | None,
    n_wanted: int | None = None,
) -> list[tuple[Any, ...]]:
    """The rows of the stretches, one after the other, until there are enough; without quantiles if that is a number."""
    rows: list[tuple[Any, ...]] = []
    for stretch in stretches:
        parameters = _parameters(question, stretch.first, stretch.last, state)
        within = ""
        if stretch.low or stretch.high is not None:
            # What the cursor names is in the first stretch, and left out by the cursor alone.
            within = f" AND {question.by[0]} {'>=' if after is not None or not stretch.low else '>'} %(low)s"
            parameters["low"] = stretch.low
        if stretch.high is not None:
            within += f" AND {question.by[0]} <= %(high)s"
            parameters["high"] = stretch.high
        if after is not None:
            parameters |= {"after_step": stretch.first + 1} | {
                f"after_{name}": value for name, value in zip(question.by, after, strict=True)
            }
        if n_wanted is not None:
            parameters["limit"] = n_wanted - len(rows)
        sql = _report_sql(
            question, is_priced=bool(state.changes), marks=state.marks, within=within, has_cursor=after is not None,
            has_limit=n_wanted is not None, has_quantiles=n_wanted is None,
        )  # fmt: skip
        with connection.cursor() as database:
            database.execute(sql, parameters)
            rows += database.fetchall()
        after = None
        if n_wanted is not None and len(rows) >= n_wanted:
            break
    return rows


def _with_quantiles(question: Question, state: _State, rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The rows of a page, in order, with their quantiles. Histograms are merged of these alone."""
    if not rows:
        return []
    by = question.by
    parameters = _parameters(question, rows[0][0] - 1, rows[-1][0], state)
    placed = zip(*(row[: 1 + len(by)] for row in rows), strict=True)
    parameters |= {f"placed_{name}": list(values) for name, values in zip(("step", *by), placed, strict=True)}
    within = ""
    if by and by[0] in LEADING:
        ids = parameters[f"placed_{by[0]}"]
        within = f" AND {by[0]} >= %(low)s AND {by[0]} <= %(high)s"
        parameters |= {"low": min(ids), "high": max(ids)}
    with connection.cursor() as database:
        database.execute(_page_quantiles_sql(question, state.marks, within), parameters)
        quantiles = {place: (p50, p95) for place, p50, p95 in database.fetchall()}
    return [(*row, *quantiles.get(place, (None, None))) for place, row in enumerate(rows, 1)]


def stream_rows(question: Question) -> Iterator[Row]:
    """All rows, as the database hands them out; the memory needed does not depend on how many there are.

    Holds a connection and the state of the database it began with until it is used up or closed.
    """
    with one_state(), connection.cursor() as setting, connection.chunked_cursor() as database:
        # All rows will be fetched: a plan that is quick for the first of them took minutes for a million.
        setting.execute("SET LOCAL cursor_tuple_fraction = 1")
        state = _state(question)
        sql = _report_sql(question, is_priced=bool(state.changes), marks=state.marks)
        database.execute(sql, _parameters(question, 0, len(question.starts) - 1, state))
        read = _reader(question)
        while batch := database.fetchmany(_FETCHED):
            yield from map(read, batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Output tokens by step of one pool, model or tier, or of all others together (``n_others`` of them, else 0)."""

    name: str
    values: Sequence[int]
    n_others: int = 0


def output_by(question: Question, dimension: str, n_shown: int) -> list[Series]:
    """Output tokens by step of the ``n_shown`` pools, models or tiers with most of them, and of the others together.

    Cost: one statement; of sums over all tenants, unless the question names a tenant or key.
    """
    source = _source(*question.filters)
    named = _NAMED.get(dimension, "")
    sql = f"""{source.parts(("at", dimension, "output_tokens"), tuple(question.filters))}, sums AS (
        SELECT width_bucket(at, %(starts)s::timestamptz[]) AS step, {dimension}, sum(output_tokens) AS n
        FROM parts GROUP BY step, {dimension}
    )
    SELECT {f"coalesce({_NAME[dimension]}, sums.{dimension})" if named else f"sums.{dimension}"}, step, n
    FROM sums {named}"""
    n_steps = len(question.starts) - 1
    found: dict[str, list[int]] = {}
    with connection.cursor() as database:
        database.execute(sql, _parameters(question, 0, n_steps))
        for name, step, n in database.fetchall():
            found.setdefault(name, [0] * n_steps)[step - 1] += int(n)
    ranked = sorted(found.items(), key=lambda item: (-sum(item[1]), item[0]))
    series = [Series(name=name, values=values) for name, values in ranked[:n_shown]]
    if others := [values for _, values in ranked[n_shown:]]:
        series.append(Series(name="", values=[sum(step) for step in zip(*others, strict=True)], n_others=len(others)))
    return series


@contextmanager
def one_state() -> Iterator[None]:
    """Several statements that see one state of the database; within a transaction, what that one sees."""
    is_outermost = not connection.in_atomic_block
    with transaction.atomic():
        if is_outermost:
            with connection.cursor() as database:
                # Joins by merging sort what hashing need not; so does adding up in little memory.
                database.execute(
                    "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY; "
                    "SET LOCAL work_mem = '64MB'; SET LOCAL enable_mergejoin = off"
                )
        yield


def _totals(question: Question, state: _State) -> tuple[dict[str, int], dict[str, int], int, bool]:
    """Sums, costs by currency, requests without a price, and whether hours were kept as a whole that days cut."""
    sums = ", ".join(f"sum({name}) AS {name}" for name in SUMS)
    source = _source(*question.filters)
    columns: tuple[str, ...]
    if state.changes:
        columns = ("at", "minutes", source.payer, "model", *SUMS)
        rest = f""", used AS (
            SELECT {source.payer}, model, period, bool_or(minutes = 60) AS is_wide, {sums}
            FROM (SELECT *, {_PERIOD} FROM parts) AS each GROUP BY {source.payer}, model, period
        )
        SELECT currency, {sums}, sum(pico), sum(unpriced), bool_or(is_wide)
        FROM (SELECT used.*, {_VALUED} FROM used {source.price}) AS valued GROUP BY currency"""
    else:
        columns = ("minutes", *SUMS)
        rest = f"SELECT NULL, {sums}, NULL, sum(requests), bool_or(minutes = 60) FROM parts"
    totals, costs, unpriced, has_wide = dict.fromkeys(SUMS, 0), {}, 0, False
    with connection.cursor() as database:
        database.execute(
            source.parts(columns, tuple(question.filters), marks=state.marks) + rest,
            _parameters(question, 0, len(question.starts) - 1, state),
        )
        for currency, *values, pico, n_unpriced, is_wide in database.fetchall():
            for name, value in zip(SUMS, values, strict=True):
                totals[name] += int(value or 0)
            unpriced += int(n_unpriced or 0)
            has_wide = has_wide or bool(is_wide)
            if pico is not None:
                costs[currency] = int(pico)
    return totals, costs, unpriced, has_wide and {at.minute for at in question.starts} != {0}


def _reader(question: Question) -> Callable[[Sequence[Any]], Row]:
    by = question.by
    named = [name for name in by if name in _NAME]
    starts = [at.astimezone(question.zone) for at in question.starts]

    def read(values: Sequence[Any]) -> Row:
        rest = iter(values)
        start = starts[next(rest) - 1]
        group = dict(zip(by, itertools.islice(rest, len(by)), strict=True))
        names = dict(zip(named, itertools.islice(rest, len(named)), strict=True))
        sums = dict(zip(SUMS, map(int, itertools.islice(rest, len(SUMS))), strict=True))
        currency, other_currency, pico, unpriced, p50, p95 = rest
        is_mixed = currency != other_currency
        return Row(
            start=start, group=group, names=names, sums=sums,
            ttft_p50_ms=_ms(p50), ttft_p95_ms=_ms(p95),
            currency=MIXED if is_mixed else "" if pico is None else currency,
            cost_pico=None if is_mixed or pico is None else int(pico), unpriced=int(unpriced),
        )  # fmt: skip

    return read


def _ms(bucket: int | None) -> float | None:
    return None if bucket is None else round(bucket_us(bucket) / 1_000, 3)


def _encode(question: Question, row: Row) -> str:
    """A cursor: the last row that was told, by its step and group."""
    said = [row.start.astimezone(UTC).isoformat(), *(row.group[name] for name in question.by)]
    return cursors.sealed(msgspec.json.encode(said))


def _decode(question: Question, cursor: str) -> tuple[int, list[str]]:
    """The step a page begins in, and the group after which it does.

    Raises:
        Invalid: no cursor of this question.
    """
    try:
        text = cursors.opened(cursor)
        start, *group = msgspec.json.decode(text, type=list[str])
        if len(group) != len(question.by) or any("\0" in value for value in group):
            raise ValueError("of another question")
        return question.starts.index(datetime.fromisoformat(start), 0, len(question.starts) - 1), group
    except (ValueError, msgspec.MsgspecError) as error:
        raise Invalid({"cursor": "not a cursor of this report"}) from error
