"""Log histograms of times: mergeable by adding counts, quantiles within 1% of a true observation.

Bucket i holds the times in (GAMMA^(i-1), GAMMA^i] microseconds and answers with 2 GAMMA^i / (GAMMA + 1), which is
within ``RELATIVE_ERROR`` of everything in it. Bucket 0 holds 1 us and less; a time from a millisecond to ten minutes
is in one of 666 buckets. Routers count the last minutes so, the books every quarter of an hour.

Source: Masson, Rim, Lee, DDSketch (VLDB 2019), the mapping and its error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

RELATIVE_ERROR = 0.01
"""The report may be wrong by 2%; half of it leaves room for rounding to whole milliseconds in displays."""
GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
LOG_GAMMA = math.log(GAMMA)


def bucket(microseconds: int) -> int:
    """Bucket of a time."""
    return max(0, math.ceil(math.log(max(microseconds, 1)) / LOG_GAMMA))


def bucket_us(index: int) -> float:
    """The time, in microseconds, that a bucket answers with."""
    return 2 * GAMMA**index / (GAMMA + 1)


def quantile_us(counts: Mapping[int, int], level: float) -> float | None:
    """The time at ``level`` (0 to 1) by nearest rank, in microseconds; None without observations."""
    total = sum(counts.values())
    if total == 0:
        return None
    rank = max(1, math.ceil(level * total))
    seen = 0
    for index in sorted(counts):
        seen += counts[index]
        if seen >= rank:
            return bucket_us(index)
    raise AssertionError("counts changed while they were read")
