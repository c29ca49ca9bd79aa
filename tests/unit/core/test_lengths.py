"""Slices from what has finished: whose lengths count, and when they are looked at."""

from __future__ import annotations

import random

from router_ext.core.actions import Dispatch
from router_ext.core.events import Finished
from router_ext.core.ids import KeyId, RequestId, TenantId
from router_ext.core.lengths import LEAST_SLICE, Lengths
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
