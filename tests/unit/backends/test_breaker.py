"""When a backend that failed is tried again."""

from __future__ import annotations

import pytest

from router_ext.backends.breaker import FIRST_WAIT_S, SPREAD, STEADY_S, Breaker, Phase


def steady(**values: float) -> Breaker:
    breaker = Breaker(max_wait_s=values.get("max_wait_s", 15.0), draw=lambda: values.get("draw", 0.5))
    assert breaker.try_again(0.0)
    assert breaker.phase is Phase.CLOSED, "one that never failed is not on trial"
    return breaker


def test_a_server_that_was_restarted_is_tried_at_once() -> None:
    breaker = steady()
    breaker.open(100.0)
    assert breaker.phase is Phase.OPEN
    assert breaker.try_again(100.0)
    assert breaker.phase is Phase.HALF_OPEN
    breaker.close(101.0)
    assert breaker.phase is Phase.CLOSED


def test_one_that_flaps_waits_twice_as_long_each_time_within_a_bound() -> None:
    breaker = steady(max_wait_s=3.0)
    waits = []
    now = 100.0
    for _ in range(7):
        breaker.open(now)
        waits.append(breaker.not_before_s - now)
        if waits[-1]:
            assert not breaker.try_again(breaker.not_before_s - 0.001)
            assert breaker.phase is Phase.OPEN
        now = breaker.not_before_s
        assert breaker.try_again(now)
        breaker.close(now + 0.1)
        now += 1.0
    assert waits == pytest.approx([0.0, FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S, 3.0, 3.0, 3.0])
    assert breaker.openings == 7


def test_a_trial_that_fails_counts_as_well() -> None:
    breaker = steady()
    for now in (10.0, 20.0, 30.0):
        breaker.open(now)
        assert breaker.try_again(now + 9.0)
        assert breaker.phase is Phase.HALF_OPEN
    breaker.open(40.0)
    assert breaker.not_before_s - 40.0 == pytest.approx(4 * FIRST_WAIT_S)


def test_one_that_was_closed_for_long_begins_anew() -> None:
    breaker = steady()
    for now in (100.0, 101.0):
        breaker.open(now)
        breaker.try_again(now + 1.0)
        breaker.close(now + 1.0)
    breaker.open(102.0 + STEADY_S)
    assert breaker.not_before_s == 102.0 + STEADY_S


@pytest.mark.parametrize("draw", [0.0, 1.0])
def test_waits_are_spread(draw: float) -> None:
    breaker = steady(draw=draw)
    for now in (100.0, 101.0):
        breaker.open(now)
        breaker.try_again(now)
    side = 1.0 + SPREAD if draw else 1.0 - SPREAD
    assert breaker.not_before_s - 101.0 == pytest.approx(FIRST_WAIT_S * side)


def test_opening_twice_is_opening_once() -> None:
    breaker = steady()
    breaker.open(1.0)
    breaker.open(2.0)
    assert breaker.openings == 1
    assert breaker.not_before_s == 1.0
