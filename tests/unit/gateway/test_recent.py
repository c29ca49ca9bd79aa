"""The last minutes of a pool: what is in the window, what a percentile of it is worth, and who was due what."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_ext.gateway import recent
from router_ext.gateway.pool_states import parted
from router_ext.gateway.recent import WINDOW_SLOTS, FirstTokens, Recent
from router_ext.wire.controlplane import SLOT_S
from router_ext.wire.log_histogram import RELATIVE_ERROR, quantile_us

SECOND = 1_000_000
START = 1_700_000_003 * SECOND

Seen = list[tuple[int, str, float]]
"""Seconds after the start, tier, TTFT in seconds."""

first_tokens = st.lists(
    st.tuples(st.integers(0, 900), st.sampled_from(["fast", "slow"]), st.floats(0.001, 600.0)), max_size=60
).map(lambda seen: sorted(seen, key=lambda each: each[0]))


@dataclass
class Stats:
    """What ``Recent.look`` reads of ``PoolStats``."""

    tenants: list[Any]
    groups: list[Any]
    preempted_total: dict[str, int]


def stats(tenants: dict[str, dict[str, Any]], groups: dict[str, float] | None = None, **preempted: int) -> Any:
    blank = {"group": None, "weight": 1.0, "queued": 0, "running": 0, "prompt_tokens_total": 0,
             "output_tokens_total": 0}  # fmt: skip
    return Stats(
        [SimpleNamespace(tenant=name, **{**blank, **values}) for name, values in tenants.items()],
        [SimpleNamespace(group=name, weight=weight) for name, weight in (groups or {}).items()],
        preempted,
    )


def check_window(kind: type[Recent], seen: Seen, end_s: int) -> None:
    """The percentiles of the window are those of exactly the first tokens in it, within the error of a bucket."""
    ring = kind(START)
    for at_s, tier, ttft_s in seen:
        ring.first_token(tier, ttft_s, 1.0, START + at_s * SECOND)
    end_us = START + max(end_s, *(each[0] for each in seen), 0) * SECOND
    window = ring.window(end_us)
    oldest = (end_us // SECOND // SLOT_S - WINDOW_SLOTS + 1) * SLOT_S * SECOND
    assert window.seconds == (end_us - max(oldest, START)) // SECOND
    for tier in ("fast", "slow"):
        inside = sorted(ttft for at_s, name, ttft in seen if name == tier and START + at_s * SECOND >= oldest)
        told = window.tiers.get(tier, FirstTokens())
        assert told.counts.total() == len(inside)
        assert told.in_time == sum(ttft <= 1.0 for ttft in inside)
        for level in (0.5, 0.95, 0.99):
            found = quantile_us(told.counts, level)
            if not inside:
                assert found is None
                continue
            true = inside[max(1, math.ceil(level * len(inside))) - 1] * 1e6
            assert found is not None
            assert abs(found - true) <= RELATIVE_ERROR * true + 1


@given(first_tokens, st.integers(0, 1_500))
def test_the_window_holds_the_first_tokens_of_the_last_five_minutes(seen: Seen, end_s: int) -> None:
    check_window(Recent, seen, end_s)


class Keeps(Recent):
    """Mutant: nothing leaves the ring."""

    def _slot(self, now_us: int) -> Any:
        return super()._slot(min(now_us, START + (WINDOW_SLOTS - 1) * SLOT_S * SECOND))


class Coarse(Recent):
    """Mutant: counts in whole powers of two."""

    def first_token(self, tier: str, ttft_s: float, target_s: float | None, now_us: int) -> None:
        super().first_token(tier, 2.0 ** math.floor(math.log2(ttft_s)), target_s, now_us)


class Late(Recent):
    """Mutant: the slot that runs is one of the future."""

    def _slot(self, now_us: int) -> Any:
        return super()._slot(now_us + SLOT_S * SECOND)


@pytest.mark.parametrize("mutant", [Keeps, Coarse, Late])
def test_a_ring_that_is_wrong_is_found(mutant: type[Recent]) -> None:
    seen = [(at_s, "fast", 0.3 + at_s / 100) for at_s in range(0, 900, 7)]
    check_window(Recent, seen, 900)
    with pytest.raises(AssertionError):
        check_window(mutant, seen, 900)


looks = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(0, 900), st.booleans()), max_size=4),
    ),
    max_size=40,
)


@given(looks)
def test_what_tenants_were_entitled_to_is_what_all_of_them_got(taken: list[Any]) -> None:
    """And after the window nothing is left of it."""
    ring, now, totals = Recent(START), START, Counter[str]()
    weights = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 0.5}
    slots: dict[int, Counter[str]] = {}
    ring.look(stats({}), now)
    for gap_s, served in taken:
        now += gap_s * SECOND
        for name, (tokens, _) in served.items():
            totals[name] += tokens
            slots.setdefault(now // SECOND // SLOT_S, Counter())[name] += 2 * tokens
        ring.look(
            stats(
                {
                    name: {
                        "weight": weights[name],
                        "group": "g" if name in "cd" else None,
                        "output_tokens_total": totals[name],
                        "queued": int(served.get(name, (0, False))[1]),
                    }
                    for name in "abcd"
                    if name in totals or name in served
                },
                {"g": 1.5},
            ),
            now,
        )
        first = now // SECOND // SLOT_S - WINDOW_SLOTS + 1
        due = Counter[str]()
        for number, counts in slots.items():
            if number >= first:
                due.update(counts)
        got = {name: ring.received(name) for name in "abcd"}
        assert {name: each.service for name, each in got.items()} == {name: due[name] for name in "abcd"}
        assert sum(each.entitled for each in got.values()) == pytest.approx(due.total(), abs=1e-6)
        assert all(each.entitled >= 0 for each in got.values())
    ring.look(stats({}), now + (WINDOW_SLOTS + 1) * SLOT_S * SECOND)
    assert all(ring.received(name) is recent.NOTHING for name in "abcd")


def test_a_tenant_is_due_its_weight_among_those_with_requests() -> None:
    ring = Recent(START)
    ring.look(stats({"a": {}, "b": {"weight": 3.0}, "idle": {"weight": 50.0}}), START)
    ring.look(
        stats({"a": {"output_tokens_total": 40, "running": 1}, "b": {"weight": 3.0, "queued": 2}, "idle": {}}),
        START + SECOND,
    )
    assert [(ring.received(name).service, ring.received(name).entitled) for name in ("a", "b", "idle")] == [
        (80, 20.0),
        (0, 60.0),
        (0, 0.0),
    ]


def test_what_ran_before_the_first_look_is_not_of_the_window() -> None:
    ring = Recent(START)
    ring.look(stats({"a": {"output_tokens_total": 9_000}}, deadline=7), START)
    ring.look(stats({"a": {"output_tokens_total": 9_001}}, deadline=9), START + SECOND)
    window = ring.window(START + SECOND)
    assert (window.output_tokens, dict(window.preempted)) == (1, {"deadline": 2})


def test_a_clock_that_steps_back_loses_nothing() -> None:
    ring = Recent(START)
    ring.refused("queue_full", START + 100 * SECOND)
    ring.refused("queue_full", START - 5_000 * SECOND)
    assert ring.window(START + 100 * SECOND).refused == {"queue_full": 2}


def test_slots_that_are_over_are_told_three_times_and_the_one_that_runs_is_not() -> None:
    ring = Recent(START - START % (SLOT_S * SECOND))
    begin = START - START % (SLOT_S * SECOND)
    ring.first_token("fast", 0.5, None, begin)
    assert ring.ended({}, begin) == []
    for ahead in (1, 2, 3):
        told = ring.ended({"fast": 2.0}, begin + ahead * SLOT_S * SECOND)
        assert [slot.slot for slot in told] == [begin // SECOND // SLOT_S + n for n in range(ahead)]
        assert [sum(tier.counts[0] for tier in slot.tiers) for slot in told] == [1, 0, 0][:ahead]
    assert told[0].tiers[0].ttft_target_s == 2.0
    assert all(not slot.tiers for slot in ring.ended({}, begin + 4 * SLOT_S * SECOND))


def check_parted(kind: Any, places: int, wanted: dict[str, int]) -> None:
    found = kind(places, wanted)
    assert all(0 <= found[pool] <= wanted[pool] for pool in wanted)
    assert sum(found.values()) <= places
    if sum(wanted.values()) <= places:
        assert found == wanted
    elif wanted:
        # Nobody is short while another has more than one beyond it, and no place is left over.
        short = [found[pool] for pool in wanted if found[pool] < wanted[pool]]
        assert max(found.values()) <= min(short) + 1
        assert sum(found.values()) == places


@given(st.integers(0, 60), st.dictionaries(st.sampled_from("pqrst"), st.integers(0, 40)))
def test_pools_part_the_places_of_a_heartbeat(places: int, wanted: dict[str, int]) -> None:
    check_parted(parted, places, wanted)


@pytest.mark.parametrize(
    "mutant",
    [
        lambda places, wanted: {pool: min(n, places // len(wanted)) for pool, n in wanted.items()},
        lambda places, wanted: dict(wanted),
    ],
)
def test_places_parted_wrongly_are_found(mutant: Any) -> None:
    with pytest.raises(AssertionError):
        check_parted(mutant, 20, {"p": 1, "q": 30, "r": 30})
