"""Log histograms: error, merging, agreement with their SQL."""

from __future__ import annotations

import math
from collections import Counter

from django.db import connection
from hypothesis import given
from hypothesis import strategies as st

from controlplane.usage.histogram import BUCKET_SQL
from router_ext.wire.log_histogram import bucket, quantile_us

times_us = st.lists(st.integers(min_value=1, max_value=3_600_000_000), min_size=1, max_size=200)


def nearest_rank(values: list[int], level: float) -> int:
    return sorted(values)[max(1, math.ceil(level * len(values))) - 1]


@given(times_us, st.sampled_from([0.05, 0.5, 0.95, 0.99, 1.0]))
def test_quantile_is_within_two_percent_of_the_true_observation(values: list[int], level: float) -> None:
    found = quantile_us(Counter(map(bucket, values)), level)
    true = nearest_rank(values, level)
    assert found is not None
    assert abs(found - true) <= 0.02 * true


@given(times_us, times_us)
def test_merging_equals_observing_together(first: list[int], second: list[int]) -> None:
    merged = Counter(map(bucket, first)) + Counter(map(bucket, second))
    assert merged == Counter(map(bucket, first + second))


def test_no_observation_has_no_quantile() -> None:
    assert quantile_us({}, 0.5) is None


def test_sql_counts_into_buckets_that_keep_the_error(db: None) -> None:
    """At a border PostgreSQL's logarithm may round to the other side; the error stays within two percent."""
    values = [0, 1, 2, 3, 10, 999, 1_000, 250_000, 3_599_999_999, *(round(1.3**n) for n in range(85))]
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT v, {BUCKET_SQL.format(us='v')} FROM unnest(%s::bigint[]) AS v", [values])
        for value, index in cursor.fetchall():
            found = quantile_us({index: 1}, 0.5)
            assert found is not None
            assert abs(found - max(value, 1)) <= 0.02 * max(value, 1)
