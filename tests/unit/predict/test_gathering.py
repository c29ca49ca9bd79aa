"""When questions are answered: at once while they are rare, together while they are not."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from router_ext.predict.gathering import ENOUGH, SHARE, Gathering

LIMIT_S = 0.005
BATCH_S = 0.0005


def batches(arrivals: Iterable[float]) -> list[list[float]]:
    """How long each question of each batch waited, with a worker that is never busy."""
    gathering, found = Gathering(LIMIT_S), []
    there: list[float] = []
    for at in [*arrivals, float("inf")]:
        while gathering.due_s is not None and gathering.due_s <= at:
            found.append([gathering.due_s - came for came in there])
            there.clear()
            gathering.answered(0, found[-1][0])
        if at < float("inf"):
            there.append(at)
            gathering.came(at)
    return found


def at_rate(rate: float, n: int) -> list[float]:
    rng = random.Random(1)
    now, times = 0.0, []
    for _ in range(n):
        now += rng.expovariate(rate)
        times.append(now)
    return times


def test_rare_questions_are_answered_at_once() -> None:
    assert batches(at_rate(20.0, 500)) == [[0.0]] * 500


@pytest.mark.parametrize(("rate", "least"), [(300.0, 1.5), (600.0, 1.9), (2_000.0, 3.5)])
def test_frequent_ones_are_answered_together_and_none_waits_for_long(rate: float, least: float) -> None:
    found = batches(at_rate(rate, 3_000))
    assert 3_000 / len(found) > least
    assert max(map(max, found)) <= SHARE * LIMIT_S * 1.000_001
    assert max(map(len, found)) <= ENOUGH


def test_who_asks_when_he_is_answered_is_not_kept_waiting() -> None:
    """However often that is: nobody else ever comes."""
    gathering, now, waits = Gathering(LIMIT_S), 0.0, []
    for _ in range(2_000):
        gathering.came(now)
        assert gathering.due_s is not None
        waits.append(gathering.due_s - now)
        now = gathering.due_s + BATCH_S
        gathering.answered(0, now)
        now += 0.0002
    assert sum(wait > 0.0 for wait in waits[:100]) < 30
    assert sum(wait > 0.0 for wait in waits[100:]) <= 4


def test_company_that_comes_later_is_noticed() -> None:
    gathering, now = Gathering(LIMIT_S), 0.0
    for _ in range(100):
        gathering.came(now)
        assert gathering.due_s is not None
        now = gathering.due_s
        gathering.answered(0, now)
        now += 0.001
    together = 0
    for _ in range(2_000):
        gathering.came(now)
        assert gathering.due_s is not None
        if gathering.due_s > now:
            gathering.came(now + 0.001)
            together += 1
        now = max(now, gathering.due_s) + BATCH_S
        gathering.answered(0, now)
    assert together > 500


def test_what_a_batch_left_is_answered_next() -> None:
    gathering = Gathering(LIMIT_S)
    for _ in range(6):
        gathering.came(1.0)
    assert gathering.due_s == 1.0
    gathering.answered(2, 1.2)
    assert gathering.due_s == 1.2
    gathering.answered(0, 1.3)
    assert gathering.due_s is None
