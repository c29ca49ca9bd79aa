"""How well output lengths are predicted: hourly figures by pool and tenant, of what served and of what is trivial.

Every answer that came to its natural end and had quantiles is judged for four predictors on the same rows, so that
their figures can be compared:

    served        what the scheduler was told
    fallback      the empirical quantiles of the same instant; 1,024 where there were too few answers
    tenant_mean5  the mean of the last five answers of the tenant in the pool that had ended before (Sheng et al., VTC),
                  of those that arrived in the seven days before the hour or in it; 1,024 before the first
    pool_median   the median of the pool's answers of the 24 hours before the hour; 1,024 without any

Answers that were cut are counted beside, not judged: only a lower bound of their length is known.

Pinball is the mean over ``LEVELS`` of the pinball loss of ln(1 + tokens), so that short and long answers weigh alike;
a predictor of one number is judged as if it said that number at every level. The histogram of the probability
integral transform has a bin between any two levels (8 bins); an answer that equals some quantiles is spread over the
bins around them by their width, without which short answers, which meet their quantiles exactly, would look
miscalibrated. Relative errors come from a histogram of ln(median / actual) with buckets of 2%, so figures of hours,
tenants and models can be added up.

A figure depends on its own hour's rows, and on those before it through the two running baselines; an event that comes
late changes the figures of its own hour only.

Readers see rollups only, so a page costs the same whatever the traffic (``usage.rollup`` makes them):

    predictor_hour      hours that have ended, exact
    predictor_minute    minutes of the hours since, made again once a minute where events came; whoever shows them says
                        as of when. An answer that comes late leaves the running means of other minutes as they were,
                        until the whole hour is computed at its end.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta
from typing import Any

from django.db import connection

from controlplane.common.actor import Actor, Scope
from controlplane.common.errors import Invalid
from controlplane.common.validation import without_nul
from controlplane.usage.models import AccuracyHour, AccuracyMinute, PoolMedian, RolledUp
from controlplane.usage.partitions import PREDICTIONS, oldest_day
from router_ext.predict.baseline import DEFAULT_TOKENS, LEVELS

PREDICTORS = ("served", "fallback", "tenant_mean5", "pool_median")
ACCURACY = "accuracy"
"""Name of the line that says as of when (``RolledUp``)."""
HOUR = timedelta(hours=1)
MAX_SPAN = timedelta(days=92)
N_BINS = len(LEVELS) + 1
WIDTHS = tuple(b - a for a, b in itertools.pairwise((0.0, *LEVELS, 1.0)))
"""Share of answers that a perfect predictor has in each bin of the transform."""
RATIO_STEP = 0.02
_MAX_RATIO = 350  # a factor of 1,100 either way

_CUMULATED = (0.0, *LEVELS, 1.0)
_LOSS = " + ".join(
    f"greatest({level!r} * (log_actual - {told}), {level - 1.0!r} * (log_actual - {told}))"
    for level, told in ((level, f"ln(1.0::float8 + q[{i}])") for i, level in enumerate(LEVELS, 1))
)
_BELOW = " + ".join(f"(q[{i}] < output_tokens)::int" for i in range(1, N_BINS))
_NOT_ABOVE = " + ".join(f"(q[{i}] <= output_tokens)::int" for i in range(1, N_BINS))
_EDGES = f"ARRAY[{', '.join(repr(float(edge)) for edge in _CUMULATED)}]::float8[]"
# Bins lowest to highest share one answer by their width. SQL's arrays begin with 1.
_BINS = ", ".join(
    f"coalesce(sum(({width!r} / (edges[highest + 2] - edges[lowest + 1]))) "
    f"FILTER (WHERE is_complete AND lowest <= {i} AND {i} <= highest), 0) AS bin{i}"
    for i, width in enumerate(WIDTHS)
)
_BIN_SUMS = ", ".join(f"sum(bin{i})" for i in range(N_BINS))
_COLUMNS = (
    "pool", "tenant", "length_model", "predictor", "n", "n_cut", "n_model", "n_memory", "n_fallen_back",
    "tokens", "abs_error", "pinball", "covered_80", "covered_90", "pit", "ratio_buckets", "ratio_counts",
)  # fmt: skip
_LIST = ", ".join(_COLUMNS)

_MEDIANS_SQL = """
    SELECT pool, percentile_disc(0.5) WITHIN GROUP (ORDER BY output_tokens) AS median FROM usage_prediction
    WHERE arrived_at >= %(hour)s - interval '1 day' AND arrived_at < %(hour)s AND is_complete GROUP BY pool
"""
_KEPT_MEDIANS_SQL = "SELECT pool, median FROM predictor_median WHERE hour = %(hour)s"
_FIGURES_SQL = f"""
    WITH told AS (
        SELECT pool, tenant, length_model, source, fallback_reason,
               arrived_at, event, output_tokens, is_complete, quantiles,
               coalesce(fallback, array_fill({DEFAULT_TOKENS}, ARRAY[{len(LEVELS)}])) AS fallback,
               ln(1.0::float8 + output_tokens) AS log_actual
        FROM usage_prediction
        WHERE arrived_at >= %(from)s AND arrived_at < %(to)s AND quantiles IS NOT NULL
    ), medians AS ({{medians}}), ends AS (
        -- Of each tenant: what ended in this time, and the five before. By index, so old partitions cost nothing much.
        SELECT who.pool, who.tenant, ended.ended_at AS at, ended.event, ended.output_tokens
        FROM (SELECT DISTINCT pool, tenant FROM told) AS who
        CROSS JOIN LATERAL (
            SELECT ended_at, event, output_tokens FROM usage_prediction AS p
            WHERE p.pool = who.pool AND p.tenant = who.tenant AND p.is_complete AND p.ended_at >= %(from)s
              AND p.ended_at < %(to)s AND p.arrived_at > %(from)s - interval '7 days' AND p.arrived_at < %(to)s
            UNION ALL
            (SELECT ended_at, event, output_tokens FROM usage_prediction AS p
             WHERE p.pool = who.pool AND p.tenant = who.tenant AND p.is_complete AND p.ended_at < %(from)s
               AND p.arrived_at > %(from)s - interval '7 days' AND p.arrived_at < %(from)s
             ORDER BY ended_at DESC, event DESC LIMIT 5)
        ) AS ended
    ), means AS (
        SELECT pool, tenant, at, event, avg(output_tokens) OVER (
            PARTITION BY pool, tenant ORDER BY at, event ROWS BETWEEN 4 PRECEDING AND CURRENT ROW
        ) AS mean5 FROM ends
    ), mixed AS (
        SELECT pool, tenant, at, 0 AS kind, event, mean5, NULL::timestamptz AS arrived_at FROM means
        UNION ALL SELECT pool, tenant, arrived_at, 1, event, NULL, arrived_at FROM told
    ), counted AS (
        SELECT *, count(mean5) OVER (
            PARTITION BY pool, tenant ORDER BY at, kind, event ROWS UNBOUNDED PRECEDING
        ) AS n_ended FROM mixed
    ), mine AS (
        -- Every arrival is in the group of the last end before it, which alone carries a mean.
        SELECT arrived_at, event, max(mean5) OVER (PARTITION BY pool, tenant, n_ended) AS mean5 FROM counted
    ), named AS (
        SELECT told.*, said.predictor, said.q, {_EDGES} AS edges
        FROM told JOIN mine USING (arrived_at, event) LEFT JOIN medians USING (pool)
        CROSS JOIN LATERAL (VALUES
            ('served', told.quantiles::float8[]),
            ('fallback', told.fallback::float8[]),
            ('tenant_mean5', array_fill(round(coalesce(mean5, {DEFAULT_TOKENS}))::float8, ARRAY[{len(LEVELS)}])),
            ('pool_median', array_fill(coalesce(median, {DEFAULT_TOKENS})::float8, ARRAY[{len(LEVELS)}]))
        ) AS said(predictor, q)
    ), judged AS (
        SELECT pool, tenant, length_model, predictor, source, fallback_reason, output_tokens, is_complete, edges,
               {_BELOW} AS lowest, {_NOT_ABOVE} AS highest, abs(q[4] - output_tokens) AS error,
               ({_LOSS}) / {len(LEVELS)} AS loss,
               output_tokens BETWEEN q[2] AND q[6] AS is_in_80, output_tokens BETWEEN q[1] AND q[7] AS is_in_90,
               CASE WHEN is_complete THEN
                   least({_MAX_RATIO}, greatest(-{_MAX_RATIO}, round(ln(q[4] / output_tokens) / {RATIO_STEP})))::int
               END AS bucket
        FROM named
    ), by_bucket AS (
        SELECT pool, coalesce(tenant, '') AS tenant, length_model, predictor, bucket,
               count(*) FILTER (WHERE is_complete) AS n, count(*) FILTER (WHERE NOT is_complete) AS n_cut,
               count(*) FILTER (WHERE is_complete AND source = 'model') AS n_model,
               count(*) FILTER (WHERE is_complete AND source = 'memory') AS n_memory,
               count(*) FILTER (WHERE is_complete AND fallback_reason IS NOT NULL) AS n_fallen_back,
               coalesce(sum(output_tokens) FILTER (WHERE is_complete), 0) AS tokens,
               coalesce(sum(error) FILTER (WHERE is_complete), 0) AS abs_error,
               coalesce(sum(loss) FILTER (WHERE is_complete), 0) AS pinball,
               count(*) FILTER (WHERE is_complete AND is_in_80) AS covered_80,
               count(*) FILTER (WHERE is_complete AND is_in_90) AS covered_90, {_BINS}
        FROM judged GROUP BY pool, length_model, predictor, bucket, GROUPING SETS ((tenant), ())
    )
    SELECT %(from)s, pool, tenant, length_model, predictor, sum(n)::bigint, sum(n_cut)::bigint, sum(n_model)::bigint,
           sum(n_memory)::bigint, sum(n_fallen_back)::bigint, sum(tokens)::bigint, sum(abs_error), sum(pinball),
           sum(covered_80)::bigint, sum(covered_90)::bigint, ARRAY[{_BIN_SUMS}],
           coalesce(array_agg(bucket ORDER BY bucket) FILTER (WHERE bucket IS NOT NULL), '{{}}'),
           coalesce(array_agg(n ORDER BY bucket) FILTER (WHERE bucket IS NOT NULL), '{{}}')
    FROM by_bucket GROUP BY pool, tenant, length_model, predictor
"""
_HOUR_SQL = f"INSERT INTO predictor_hour (hour, {_LIST}) {_FIGURES_SQL.replace('{medians}', _MEDIANS_SQL)}"
_MINUTE_SQL = f"INSERT INTO predictor_minute (minute, {_LIST}) {_FIGURES_SQL.replace('{medians}', _KEPT_MEDIANS_SQL)}"
"""Parameters ``hour``, and ``from`` and ``to``: that hour, or a minute of it. Every pool has a row of the tenant '' as
well, which is all of them."""


def roll_up_accuracy(hour: datetime) -> None:
    """Replace the figures of one hour by what its predictions say, in the caller's transaction.

    Hours whose predictions are no longer kept stay as they are.
    """
    if hour < _kept_from():
        return
    end = hour + HOUR
    AccuracyHour.objects.filter(hour=hour).delete()
    AccuracyMinute.objects.filter(minute__gte=hour, minute__lt=end).delete()
    PoolMedian.objects.filter(hour=hour).delete()
    with connection.cursor() as cursor:
        cursor.execute(_HOUR_SQL, {"from": hour, "to": end, "hour": hour})


def roll_up_minute(minute: datetime) -> None:
    """Replace the figures of one minute of an hour that is not rolled up yet, in the caller's transaction.

    Cost: some 60 us per prediction, and of every hour's first minute the median of a day.
    """
    hour = minute.replace(minute=0)
    AccuracyMinute.objects.filter(minute=minute).delete()
    with connection.cursor() as cursor:
        if not PoolMedian.objects.filter(hour=hour).exists():
            cursor.execute(
                f"INSERT INTO predictor_median (hour, pool, median) SELECT %(hour)s, * FROM ({_MEDIANS_SQL}) AS found",
                {"hour": hour},
            )
        cursor.execute(_MINUTE_SQL, {"from": minute, "to": minute + timedelta(minutes=1), "hour": hour})


def _kept_from() -> datetime:
    return datetime.combine(oldest_day(PREDICTIONS), time(), UTC)


def transform(quantiles: Sequence[float], actual: int) -> list[float]:
    """The share of one answer in each bin of the transform; they sum to 1."""
    lowest = sum(q < actual for q in quantiles)
    highest = sum(q <= actual for q in quantiles)
    whole = sum(WIDTHS[lowest : highest + 1])
    return [width / whole if lowest <= i <= highest else 0.0 for i, width in enumerate(WIDTHS)]


@dataclass(slots=True)
class Figures:
    """Sums over judged answers, and what follows from them. Add with ``+=``."""

    n: int = 0
    n_cut: int = 0
    n_model: int = 0
    n_memory: int = 0
    n_fallen_back: int = 0
    tokens: int = 0
    abs_error: float = 0.0
    loss: float = 0.0
    covered_80: int = 0
    covered_90: int = 0
    pit: list[float] = field(default_factory=lambda: [0.0] * N_BINS)
    ratios: dict[int, int] = field(default_factory=dict)

    def __iadd__(self, other: Figures) -> Figures:
        for name in ("n", "n_cut", "n_model", "n_memory", "n_fallen_back", "tokens", "abs_error", "loss",
                     "covered_80", "covered_90"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.pit = [a + b for a, b in zip(self.pit, other.pit, strict=True)]
        for bucket, n in other.ratios.items():
            self.ratios[bucket] = self.ratios.get(bucket, 0) + n
        return self

    @property
    def mae(self) -> float | None:
        """Mean absolute error of the median, in tokens."""
        return self.abs_error / self.n if self.n else None

    @property
    def pinball(self) -> float | None:
        return self.loss / self.n if self.n else None

    @property
    def coverage_80(self) -> float | None:
        return self.covered_80 / self.n if self.n else None

    @property
    def coverage_90(self) -> float | None:
        return self.covered_90 / self.n if self.n else None

    @property
    def median_relative_error(self) -> float | None:
        """Median of abs(median - actual) / actual, within a hundredth of median / actual."""
        errors = sorted((abs(math.exp(RATIO_STEP * bucket) - 1.0), n) for bucket, n in self.ratios.items())
        seen = 0
        for error, n in errors:
            seen += n
            if 2 * seen >= self.n:
                return error
        return None

    @property
    def calibration(self) -> list[tuple[float, float]]:
        """Nominal level and the observed share of answers up to that quantile, for every level."""
        if not self.n:
            return []
        return list(zip(LEVELS, (s / self.n for s in itertools.accumulate(self.pit[:-1])), strict=True))

    @property
    def miscalibration(self) -> float | None:
        """The largest distance of observed from nominal; 0 is perfect."""
        return max((abs(seen - level) for level, seen in self.calibration), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Figures of one pool, and of one tenant of it if ``tenant`` is not empty.

    ``total`` by predictor; ``steps``: the same by begin of each step of ``step``, those without answers left out;
    ``models``: of what served, by digest of the length model ('' for none). ``as_of``: up to when answers were looked
    at, None before the first time.
    """

    pool: str
    tenant: str
    from_at: datetime
    to_at: datetime
    step: timedelta
    total: Mapping[str, Figures]
    steps: Sequence[tuple[datetime, Mapping[str, Figures]]]
    models: Mapping[str, Figures]
    as_of: datetime | None


_READ_SQL = f"""
    SELECT hour, {_LIST} FROM predictor_hour
    WHERE hour >= %(from)s AND hour < %(to)s AND pool = %(pool)s AND tenant = %(tenant)s
    UNION ALL
    SELECT date_trunc('hour', minute, 'UTC'), {_LIST} FROM predictor_minute
    WHERE minute >= %(from)s AND minute < %(to)s AND pool = %(pool)s AND tenant = %(tenant)s
"""


def accuracy(*, actor: Actor, pool: str, from_at: datetime, to_at: datetime, tenant: str = "") -> Accuracy:
    """Figures of a pool over a span, whole hours, as they were rolled up last.

    Cost: two statements; reads the rows of the hours, and of the minutes since.

    Raises:
        Invalid: the span is empty or longer than ``MAX_SPAN``.
    """
    actor.require(Scope.READ)
    if to_at <= from_at:
        raise Invalid({"to": f"must be after from ({from_at.isoformat()}), not {to_at.isoformat()}"})
    if to_at - from_at > MAX_SPAN:
        raise Invalid({"to": f"at most {MAX_SPAN.days} days after from, not {(to_at - from_at).days}"})
    first = from_at.replace(minute=0, second=0, microsecond=0)
    step = _step(to_at - first)
    # Each row is added once, into its cell; what is shown are sums of cells, of which there are few.
    cells: dict[tuple[datetime, str, str], Figures] = {}
    for hour, length_model, predictor, figures in _read(pool, tenant, first, to_at):
        cell = (first + (hour - first) // step * step, length_model, predictor)
        if cell in cells:
            cells[cell] += figures
        else:
            cells[cell] = figures
    total: dict[str, Figures] = {name: Figures() for name in PREDICTORS}
    steps: dict[datetime, dict[str, Figures]] = defaultdict(lambda: {name: Figures() for name in PREDICTORS})
    models: dict[str, Figures] = defaultdict(Figures)
    for (begin, length_model, predictor), figures in cells.items():
        total[predictor] += figures
        steps[begin][predictor] += figures
        if predictor == "served":
            models[length_model] += figures
    return Accuracy(
        pool=pool,
        tenant=tenant,
        from_at=first,
        to_at=to_at,
        step=step,
        total=total,
        steps=sorted(steps.items()),
        models=dict(models),
        as_of=RolledUp.objects.filter(pk=ACCURACY).values_list("at", flat=True).first(),
    )


MAX_TENANTS = 500
# From one name to the next by index: a month of a pool has a million rows, and DISTINCT would read them all.
_TENANTS_SQL = """
    WITH RECURSIVE names AS (
        (SELECT tenant FROM {table} WHERE pool = %(pool)s AND tenant > '' ORDER BY tenant LIMIT 1)
        UNION ALL
        SELECT (SELECT tenant FROM {table} WHERE pool = %(pool)s AND tenant > names.tenant ORDER BY tenant LIMIT 1)
        FROM names WHERE names.tenant IS NOT NULL
    )
    SELECT tenant, coalesce(tenants_tenant.name, tenant) FROM names
    LEFT JOIN tenants_tenant ON tenants_tenant.id = tenant WHERE tenant IS NOT NULL AND EXISTS (
        SELECT 1 FROM {table} AS rows WHERE rows.pool = %(pool)s AND rows.tenant = names.tenant AND {time} >= %(from)s
    ) LIMIT %(limit)s
"""
_ALL_TENANTS_SQL = " UNION ".join(
    f"({_TENANTS_SQL.format(table=table, time=time)})"
    for table, time in (("predictor_hour", "hour"), ("predictor_minute", "minute"))
)


def judged_tenants(*, actor: Actor, pool: str, from_at: datetime) -> dict[str, str]:
    """Names by id of tenants of whom there are figures since ``from_at``, in order, ``MAX_TENANTS`` at most."""
    actor.require(Scope.READ)
    with connection.cursor() as cursor:
        cursor.execute(_ALL_TENANTS_SQL, {"pool": pool, "from": from_at, "limit": MAX_TENANTS})
        return dict(sorted(cursor.fetchall())[:MAX_TENANTS])


def _step(span: timedelta) -> timedelta:
    """At most about a hundred steps."""
    for hours in (1, 3, 6, 12):
        if span <= timedelta(hours=100 * hours):
            return timedelta(hours=hours)
    return timedelta(days=1)


def _read(pool: str, tenant: str, from_at: datetime, to_at: datetime) -> Iterable[tuple[datetime, str, str, Figures]]:
    names = {"pool": without_nul(pool), "tenant": without_nul(tenant)}
    with connection.cursor() as cursor:
        cursor.execute(_READ_SQL, {"from": from_at, "to": to_at, **names})
        for hour, _, _, length_model, predictor, *values in cursor.fetchall():
            yield hour, length_model, predictor, _figures(values)


def _figures(values: Sequence[Any]) -> Figures:
    *sums, pit, buckets, counts = values
    figures = Figures(*sums)
    figures.pit, figures.ratios = list(pit), dict(zip(buckets, counts, strict=True))
    return figures
