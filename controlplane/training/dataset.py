"""Which samples a model is trained on and judged by: the rows of a span, capped by tenant, the newest held out.

Rule of the caps. Of ``n_t`` rows of tenant t at most c are taken, c the largest number with

    c <= max(FLOOR, max(MAX_SHARE, 1 / tenants) * sum of min(n_t, c))      and      sum of min(n_t, c) <= MAX_ROWS

so nobody brings more than a fifth of the rows (with fewer than five tenants: more than an equal share) unless he stays
below ``FLOOR``, and what has to go to keep a run short goes from the largest first. Which rows of a tenant are taken
is decided by the hash of their event ids: the same rows whenever the job runs, and no choice of anybody's.

Held out is the newest fifth by time of arrival, whole instants: what a model will meet comes after what it saw.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from django.db import connection

from controlplane.common.clock import to_us

MAX_ROWS = 50_000
"""A run on as many takes about ten minutes on two cores."""
MAX_SHARE = 0.2
FLOOR = 5_000
"""Rows that any tenant may bring: where all are small, or all but one are tiny, nothing useful is thrown away."""
HELDOUT_SHARE = 0.2
MIN_HELDOUT = 200
_FETCH = 2_000


class Row(NamedTuple):
    """One sample: ``features`` packed, ``quantiles`` and ``fallback`` as they were told when it was served."""

    arrived_at: datetime
    event: str
    pool: str
    tenant: str
    key: str
    model: str
    prompt_tokens: int
    max_new_tokens: int | None
    output_tokens: int
    is_complete: bool
    features: bytes
    quantiles: list[int] | None
    fallback: list[int] | None
    length_model: str
    ended_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Half-open span of arrival; ``pools`` empty for all."""

    from_at: datetime
    to_at: datetime
    pools: Sequence[str]
    feature_version: int

    def as_json(self) -> dict[str, Any]:
        return {"pools": list(self.pools), "feature_version": self.feature_version}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Rows to train on and rows held out, in order of arrival, and how they came to be.

    ``cap``: rows taken of one tenant at most. ``heldout_from``: arrival of the first row held out.
    """

    train: Sequence[Row]
    heldout: Sequence[Row]
    cap: int
    heldout_from: datetime | None
    n_found: int
    n_other_version: int
    digest: str

    @property
    def n_rows(self) -> int:
        return len(self.train) + len(self.heldout)

    def counts(self) -> dict[str, Any]:
        """What the dataset's row and the pages say. Tenants by their rows, the largest ten."""
        rows = [*self.train, *self.heldout]
        tenants = Counter(row.tenant for row in rows)
        return {
            "found": self.n_found,
            "other_version": self.n_other_version,
            "capped": self.n_found - self.n_rows,
            "cap": self.cap,
            "train": len(self.train),
            "heldout": len(self.heldout),
            "complete": sum(row.is_complete for row in rows),
            "tenants": len(tenants),
            "largest_tenants": dict(sorted(tenants.items(), key=lambda item: (-item[1], item[0]))[:10]),
            "pools": dict(sorted(Counter(row.pool for row in rows).items())),
        }


def tenant_cap(sizes: Sequence[int]) -> int:
    """Rows taken of one tenant at most, given how many each has.

    Cost: O(n log n) once, then a binary search.
    """
    if not sizes:
        return 0
    ordered = sorted(sizes)
    below = [0]
    for size in ordered:
        below.append(below[-1] + size)
    share = max(MAX_SHARE, 1.0 / len(ordered))

    def taken(cap: int) -> int:
        place = bisect.bisect_right(ordered, cap)
        return below[place] + cap * (len(ordered) - place)

    def is_allowed(cap: int) -> bool:
        return taken(cap) <= MAX_ROWS and cap <= max(FLOOR, share * taken(cap) + 1e-9)

    # Above the largest size a larger cap changes nothing; both conditions fail for good once they fail, because
    # taken(cap) is concave and begins with the slope of all tenants.
    low, high = 0, ordered[-1]
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_allowed(middle) else (low, middle - 1)
    return low


_WHERE = """
    arrived_at >= %(from)s AND arrived_at < %(to)s AND feature_version = %(version)s
    AND (%(all_pools)s OR pool = ANY(%(pools)s))
"""
_CHOSEN_SQL = f"""
    SELECT arrived_at, event FROM (
        SELECT arrived_at, event, row_number() OVER (PARTITION BY tenant ORDER BY md5(event), event) AS place
        FROM predictor_sample WHERE {_WHERE}
    ) AS placed WHERE place <= %(cap)s ORDER BY arrived_at, event
"""
_ROWS_SQL = """
    SELECT s.arrived_at, s.event, s.pool, s.tenant, s.key, s.model, s.prompt_tokens, s.max_new_tokens, s.output_tokens,
           s.is_complete, s.features, p.quantiles, p.fallback, coalesce(p.length_model, ''),
           coalesce(p.ended_at, s.arrived_at)
    FROM unnest(%(instants)s::timestamptz[], %(events)s::text[]) AS wanted(arrived_at, event)
    JOIN predictor_sample s USING (arrived_at, event)
    LEFT JOIN usage_prediction p USING (arrived_at, event)
    ORDER BY arrived_at, event
"""


def count_usable(filters: Filters) -> int:
    """How many samples there are to choose from."""
    return sum(_sizes(filters).values())


def select(filters: Filters, *, on_rows: Callable[[int, int], None] = lambda done, whole: None) -> Selection:
    """Choose and read the rows of a span.

    Args:
        on_rows: told now and then how many of how many were read.

    Cost: one look into the index of the span, then the chosen rows in pages; no transaction is held open.
    """
    sizes = _sizes(filters)
    cap = tenant_cap(list(sizes.values()))
    with connection.cursor() as cursor:
        cursor.execute(_CHOSEN_SQL, {**_parameters(filters), "cap": cap})
        chosen = cursor.fetchall()
        cursor.execute(
            f"SELECT count(*) FROM predictor_sample WHERE {_WHERE.replace('version = ', 'version <> ')}",
            _parameters(filters),
        )
        (n_other,) = cursor.fetchone()
    rows: list[Row] = []
    digest = hashlib.sha256()
    for begin in range(0, len(chosen), _FETCH):
        for row in _page(chosen[begin : begin + _FETCH]):
            digest.update(f"{to_us(row.arrived_at)} {row.event}\n".encode())
            rows.append(row)
        on_rows(len(rows), len(chosen))
    edge = heldout_edge([row.arrived_at for row in rows])
    return Selection(
        train=rows[:edge],
        heldout=rows[edge:],
        cap=cap,
        heldout_from=rows[edge].arrived_at if edge < len(rows) else None,
        n_found=sum(sizes.values()),
        n_other_version=n_other,
        digest=digest.hexdigest(),
    )


def heldout_edge(instants: Sequence[datetime]) -> int:
    """Index of the first row held out: the newest fifth, at least ``MIN_HELDOUT``, rows of one instant together."""
    n_heldout = min(len(instants), max(MIN_HELDOUT, round(HELDOUT_SHARE * len(instants))))
    edge = len(instants) - n_heldout
    while 0 < edge < len(instants) and instants[edge - 1] == instants[edge]:
        edge -= 1
    return edge


def _parameters(filters: Filters) -> dict[str, Any]:
    return {
        "from": filters.from_at,
        "to": filters.to_at,
        "version": filters.feature_version,
        "pools": list(filters.pools),
        "all_pools": not filters.pools,
    }


def _sizes(filters: Filters) -> Mapping[str, int]:
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT tenant, count(*) FROM predictor_sample WHERE {_WHERE} GROUP BY tenant", _parameters(filters)
        )
        return dict(cursor.fetchall())


def _page(keys: Sequence[tuple[datetime, str]]) -> Iterator[Row]:
    with connection.cursor() as cursor:
        cursor.execute(_ROWS_SQL, {"instants": [at for at, _ in keys], "events": [event for _, event in keys]})
        for values in cursor.fetchall():
            row = Row(*values)
            yield row._replace(features=bytes(row.features))
