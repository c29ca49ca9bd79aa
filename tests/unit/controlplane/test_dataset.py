"""The caps of training rows: nobody dominates, nobody small is starved; and what is held out."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.training import dataset
from controlplane.training.dataset import FLOOR, MAX_ROWS, MAX_SHARE, heldout_edge, tenant_cap

SIZES = st.lists(st.integers(1, 200_000), min_size=1, max_size=30)


def taken(sizes: Sequence[int], cap: int) -> int:
    return sum(min(size, cap) for size in sizes)


def is_lawful(sizes: Sequence[int], cap: int) -> bool:
    whole = taken(sizes, cap)
    largest = min(max(sizes), cap)
    return whole <= MAX_ROWS and largest <= max(FLOOR, max(MAX_SHARE, 1 / len(sizes)) * whole + 1e-6)


@given(SIZES)
def test_no_tenant_brings_more_than_the_rule_allows(sizes: list[int]) -> None:
    assert is_lawful(sizes, tenant_cap(sizes))


@given(SIZES)
def test_one_row_more_of_each_would_be_too_many(sizes: list[int]) -> None:
    cap = tenant_cap(sizes)
    assert cap == max(sizes) or not is_lawful(sizes, cap + 1)


@given(SIZES)
def test_nobody_below_the_floor_loses_a_row_while_there_is_room(sizes: list[int]) -> None:
    if len(sizes) * FLOOR <= MAX_ROWS:
        assert tenant_cap(sizes) >= min(max(sizes), FLOOR)


@pytest.mark.parametrize(
    ("sizes", "cap"),
    [
        ([30_000], 30_000),  # alone: everything
        ([80_000], 50_000),  # up to what a run can take
        ([60_000, 3], 5_000),  # not alone, and yet nobody else has much: the floor
        ([60_000, 20_000], 20_000),  # an equal share
        ([100_000, *[4_000] * 10], 10_000),  # a fifth of 50,000
        ([40_000] * 10, 5_000),
        ([], 0),
    ],
)
def test_caps_of_known_sizes(sizes: list[int], cap: int) -> None:
    assert tenant_cap(sizes) == cap


def test_a_rule_without_a_share_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "MAX_SHARE", 1.0)
    assert not is_lawful([40_000, *[500] * 10], tenant_cap([40_000, *[500] * 10]))


def test_the_newest_fifth_is_held_out_and_instants_are_not_torn() -> None:
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    instants = [begin + timedelta(seconds=i) for i in range(5_000)]
    assert heldout_edge(instants) == 4_000
    assert heldout_edge(instants[:300]) == 100  # at least so many
    assert heldout_edge(instants[:50]) == 0
    same = [*instants[:3_990], *[instants[3_990]] * 20, *instants[4_010:]]
    assert heldout_edge(same) == 3_990
