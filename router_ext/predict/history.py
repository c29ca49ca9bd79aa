"""What experience says of a request by who sends it: pool, tenant, key, each corrects what those before leave.

    correction = shrunk(pool) + shrunk(tenant in pool) + shrunk(key in pool)
    shrunk(x) = m * n / (n + SHRINK) * m^2 / (m^2 + DOUBT * variance of m)        m the median of n residuals

A residual is booked with every level as what the levels above left of it, so a tenant is not taught what its pool has
learned already. A model that never saw a tenant, a served model or a new habit is so put right within a hundred or two
of answers. Bounded: a level moves a prediction by ``BOUND`` at most, a tenant's own wrongs that of others by what the
median of the pool's newest answers moves.

Source: empirical Bayes shrinkage (Efron and Morris 1973), by medians.

Cost: O(1) per request, three sorts of at most ``SIZE`` numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import msgspec

from router_ext.predict.residuals import Table, is_news

SIZE, SHRINK, DOUBT = 96, 8.0, 12.0
"""Answers remembered of a name, answers' worth of doubt, and doubt of what may be chance. A model that knows its
tenants is right on average, so what looks like a tenant's habit is mostly chance: a median within a few standard errors
of none is hardly believed, a real habit within some dozens of answers."""
_VARIANCE, _WEIGHT = 0.25, 8.0
"""Of residuals of a name of which little is known."""
_OF_MEDIAN = math.pi / 2.0
"""Variance of a median of n normal numbers over that of one of them, times n."""
BOUND = math.log(2.0)
CAPACITY = 4_096
EXPIRY_S = 14 * 86_400.0
_Row: TypeAlias = tuple[str, float, int, bytes]


class History:
    """See the module. Times are wall seconds, so that they outlive the process."""

    def __init__(self, *, capacity: int = CAPACITY) -> None:
        self._table: Table[str] = Table(capacity=capacity, size=SIZE, expiry_s=EXPIRY_S)

    def __len__(self) -> int:
        return len(self._table)

    def correction(self, pool: str, tenant: str, key: str, now_s: float) -> float:
        """What to add to the log of a predicted length."""
        return math.fsum(self._shrunk(name, now_s) for name in _levels(pool, tenant, key))

    def add(self, pool: str, tenant: str, key: str, residual: float, now_s: float, *, is_complete: bool = True) -> None:
        """An answer came out ``residual`` above (in logs) what was predicted without any correction."""
        for name in _levels(pool, tenant, key):
            shrunk = self._shrunk(name, now_s)
            if is_news(residual, shrunk, is_complete=is_complete):
                self._table.add(name, residual, now_s)
            residual -= shrunk

    def _shrunk(self, name: str, now_s: float) -> float:
        row = self._table.find(name, now_s)
        if row is None:
            return 0.0
        n = len(row.values)
        middle, variance = row.middle_and_variance(prior=_VARIANCE, weight=_WEIGHT)
        square = middle * middle
        belief = square / (square + DOUBT * _OF_MEDIAN * variance / n)
        return min(max(middle * belief * n / (n + SHRINK), -BOUND), BOUND)

    def dump(self) -> Iterator[bytes]:
        """For ``restore``, in slices that are as old as they are when they are taken."""
        for rows in self._table.dump():
            yield msgspec.msgpack.encode(rows)

    def restore(self, slices: Iterable[bytes]) -> None:
        """Go on with what ``dump`` gave.

        Raises:
            ValueError: damaged.
        """
        self._table.restore([row for data in slices for row in msgspec.msgpack.decode(data, type=list[_Row])])


def _levels(pool: str, tenant: str, key: str) -> Sequence[str]:
    return (pool, f"{pool}\x00{tenant}", f"{pool}\x00{tenant}\x00{key}")
