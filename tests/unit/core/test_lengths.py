"""Slices from what has finished: whose lengths count, and when they are looked at."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from router_ext.core.actions import Dispatch
from router_ext.core.events import Finished
from router_ext.core.ids import KeyId, RequestId, TenantId
from router_ext.core.lengths import _FEW, _WINDOW, LEAST_SLICE, MIN_SAMPLES, Lengths, _Window
from tests.unit.core.builders import arrival, dispatched, pool, started, tokens

KEY, TENANT = KeyId("k"), TenantId("t")


def taught(*lengths: int, key: str = "k", tenant: str = "t") -> Lengths:
    known = Lengths()
    for length in lengths:
        known.finished(KeyId(key), TenantId(tenant), length)
    return known


def test_nothing_is_known_before_twenty_have_finished() -> None:
    assert taught(*[100] * 19).slice_tokens(KEY, TENANT, 0) == 1_024
    assert taught(*[100] * 20).slice_tokens(KEY, TENANT, 0) == 100


def test_the_nearest_group_with_enough_decides() -> None:
    known = taught(*[100] * 20)
    for _ in range(20):
        known.finished(KeyId("k2"), TENANT, 300)
        known.finished(KeyId("k3"), TenantId("t2"), 500)
    assert known.slice_tokens(KEY, TENANT, 0) == 100
    assert known.slice_tokens(KeyId("k2"), TENANT, 0) == 300
    assert known.slice_tokens(KeyId("unknown"), TENANT, 0) == 300
    assert known.slice_tokens(KeyId("unknown"), TenantId("unknown"), 0) == 500


def test_the_quantile_is_the_smallest_length_that_reaches_it() -> None:
    rng = random.Random(3)
    lengths = [rng.randint(64, 900) for _ in range(337)]
    got = taught(*lengths).slice_tokens(KEY, TENANT, 0)
    assert sum(length <= got for length in lengths) / len(lengths) >= 0.97
    assert sum(length < got for length in lengths) / len(lengths) < 0.97


def test_half_of_the_answers_are_not_longer_than_the_median() -> None:
    assert taught(*[100] * 19).median(KEY, TENANT) == 1_024
    rng = random.Random(4)
    lengths = [rng.randint(1, 3_000) for _ in range(101)]
    got = taught(*lengths).median(KEY, TENANT)
    assert sum(length <= got for length in lengths) == 51
    # A key without enough of its own is told from its tenant's, then from the pool's.
    assert taught(*lengths).median(KeyId("unknown"), TENANT) == got
    assert taught(*lengths).median(KeyId("unknown"), TenantId("unknown")) == got


def test_an_unpredicted_request_is_expected_to_be_as_long_as_those_that_finished() -> None:
    """Stated predictions are left alone, and nobody is expected to pass the client's own limit."""
    scheduler = started(pool(kv=10_000))
    for number in range(20):
        scheduler.handle(arrival(f"r{number}", prompt=10, cap=200), 0.0)
        scheduler.handle(tokens(f"r{number}", 40), 0.0)
        scheduler.handle(Finished(request_id=RequestId(f"r{number}")), 0.0)
    wanted = {"unknown": (None, 200), "stated": (150, 200), "short": (None, 5)}
    for name, (predicted, cap) in wanted.items():
        scheduler.handle(arrival(name, prompt=10, cap=cap, predicted_output_tokens=predicted), 1.0)
    found = {name: scheduler._requests[RequestId(name)].predicted_output_tokens for name in wanted}
    assert found == {"unknown": 40, "stated": 150, "short": 5}


def test_no_slice_is_shorter_than_the_least_nor_longer_than_a_piece() -> None:
    assert taught(*[5] * 30).slice_tokens(KEY, TENANT, 0) == LEAST_SLICE
    assert taught(*[3_000] * 30).slice_tokens(KEY, TENANT, 0) == 1_024


def test_a_continuation_is_compared_with_longer_ones_only() -> None:
    known = taught(*[100] * 90, *[400] * 10)
    assert known.slice_tokens(KEY, TENANT, 0) == 400
    assert known.slice_tokens(KEY, TENANT, 150) == 250
    # Nobody has ever written more: as much again.
    assert known.slice_tokens(KEY, TENANT, 400) == 400


def test_old_lengths_are_forgotten() -> None:
    known = taught(*[900] * 1_000, *[100] * 1_000)
    assert known.slice_tokens(KEY, TENANT, 0) == 100


def test_who_waits_profits_from_what_finishes_meanwhile() -> None:
    scheduler = started(pool(kv=1_300))
    # The first ones take all of the memory, so the rest begins to wait before anything is known.
    now = 0.0
    running = []
    for number in range(40):
        actions = scheduler.handle(arrival(f"r{number}", cap=4_096, slice_tokens=None), now)
        running += dispatched(actions)
    slices = []
    while running:
        now += 1.0
        name = running.pop(0)
        scheduler.handle(tokens(name, 120), now)
        actions = scheduler.handle(Finished(request_id=RequestId(name)), now)
        running += dispatched(actions)
        slices += [action.slice_tokens for action in actions if isinstance(action, Dispatch)]
    assert slices[0] == 1_024
    # The first twenty have finished, and 120 tokens were enough for all of them.
    assert slices[19:-1] == [120] * len(slices[19:-1])
    assert len(slices[19:-1]) > 10


def test_a_stated_slice_is_left_alone() -> None:
    scheduler = started(pool(kv=1_250))
    now = 0.0
    for number in range(30):
        scheduler.handle(arrival(f"r{number}", cap=90), now)
        now += 1.0
        scheduler.handle(tokens(f"r{number}", 90), now)
        scheduler.handle(Finished(request_id=RequestId(f"r{number}")), now)
    first = scheduler.handle(arrival("blocker", cap=4_096, slice_tokens=700), now)
    assert [action.slice_tokens for action in first if isinstance(action, Dispatch)] == [1_024]
    scheduler.handle(arrival("second", cap=4_096, slice_tokens=700), now)
    third = scheduler.handle(arrival("third", cap=4_096, slice_tokens=500), now)
    assert [action.slice_tokens for action in third if isinstance(action, Dispatch)] == []
    freed = scheduler.handle(Finished(request_id=RequestId("blocker")), now)
    assert next(a.slice_tokens for a in freed if isinstance(a, Dispatch)) == 700


def asked_now_and_then(seed: int) -> None:
    """Lengths that come in runs, some longer than a window, are in order whenever somebody asks."""
    rng = random.Random(seed)
    known, told = Lengths(), []
    for run in (5, _FEW - 1, _FEW, _FEW + 1, 3, _WINDOW - 200, 7, _FEW, 2, _WINDOW + 300, 1, _FEW - 1, 40):
        for _ in range(run):
            # Few different lengths: forgetting one must leave its equals.
            told.append(rng.choice([64, 65, 200, 200, rng.randint(64, 1_000)]))
            known.finished(KEY, TENANT, told[-1])
        if len(told) < MIN_SAMPLES:
            continue
        window = sorted(told[-_WINDOW:])
        assert known.median(KEY, TENANT) == window[math.ceil(0.5 * len(window)) - 1]
        assert known.slice_tokens(KEY, TENANT, 0) == window[math.ceil(0.97 * len(window)) - 1]
        longer = [length for length in window if length > 200]
        assert known.slice_tokens(KEY, TENANT, 200) == max(64, longer[math.ceil(0.97 * len(longer)) - 1] - 200)


@pytest.mark.parametrize("seed", range(5))
def test_what_was_put_off_counts_when_somebody_asks(seed: int) -> None:
    asked_now_and_then(seed)


def _forget_nobody(self: Any, tokens: int) -> None:
    self._newest.append(tokens)
    if len(self._newest) > _WINDOW:
        self._newest.popleft()
    if len(self._changes) < _FEW:
        self._changes.append((tokens, -1))


def _never_sort_anew(self: Any) -> list[int]:
    for length, oldest in self._changes:
        bisect.insort(self._sorted, length)
        if oldest >= 0:
            self._sorted.remove(oldest)
    self._changes.clear()
    return list(self._sorted)


def _one_by_one_at_most(self: Any) -> list[int]:
    if len(self._changes) < _FEW:
        return original(self)
    self._changes.clear()
    return list(self._sorted or sorted(self._newest))


original = _Window._by_size


@pytest.mark.parametrize(
    ("name", "mutant"), [("add", _forget_nobody), ("_by_size", _never_sort_anew), ("_by_size", _one_by_one_at_most)]
)
def test_a_window_that_is_out_of_date_is_noticed(
    name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Window, name, mutant)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        any(map(asked_now_and_then, range(5)))
