"""The sliding minute: what is counted stays for 60 to 62 s, whatever the bursts, and can be given back to."""

from __future__ import annotations

import random

from router_ext.sync.window import BUCKET_S, N_BUCKETS, REQUESTS, TOKENS, MinuteWindow


def test_no_sixty_seconds_hold_more_than_the_limit() -> None:
    rng = random.Random(7)
    window = MinuteWindow("w")
    limit, taken, clock = 20, [], 0.0
    for _ in range(4_000):
        clock += rng.choice([0.0, 0.01, 0.5, 3.0, 20.0])
        bucket = int(clock / BUCKET_S)
        window.advance(bucket)
        if window.sums[REQUESTS] < limit:
            window.add(bucket, 1, 0)
            taken.append(clock)
            assert sum(at > clock - 60.0 for at in taken[-3 * limit :]) <= limit
        else:
            # Nobody is refused for what is older than 62 s.
            assert sum(at > clock - N_BUCKETS * BUCKET_S for at in taken[-3 * limit :]) >= limit
    assert len(taken) > 200


def test_what_comes_back_comes_off_where_it_was_added() -> None:
    window = MinuteWindow("w")
    window.add(100, 1, 50)
    window.add(110, 1, 30)
    assert window.take_back(100, 1, 20)
    assert (window.sums, window.counts(100), window.counts(110)) == ([1, 60], (0, 30), (1, 30))
    window.advance(100 + N_BUCKETS - 1)
    assert window.sums == [1, 60]
    window.advance(100 + N_BUCKETS)
    assert window.sums == [1, 30]
    assert not window.take_back(100, 1, 30)
    # Never below nothing.
    window.take_back(110, 5, 500)
    assert window.sums == [0, 0]
    window.add(109, 2, 2)
    assert list(window.spread()) == [109, 110]


def test_when_it_is_free() -> None:
    window = MinuteWindow("w")
    window.add(10, 2, 100)
    window.add(20, 1, 50)
    assert window.free_at(TOKENS, 100) == 10 + N_BUCKETS
    assert window.free_at(TOKENS, 101) == 20 + N_BUCKETS
    assert window.free_at(TOKENS, 151) is None
    assert window.empty_at(REQUESTS, 25) == 20 + N_BUCKETS


def test_others_are_remembered_for_as_long_as_they_can_count() -> None:
    window = MinuteWindow("w")
    window.add(10, 1, 10)
    window.heard(10, 5, 70)
    assert (window.others(10, REQUESTS), window.others(10, TOKENS)) == (4, 60)
    assert window.others(10 + N_BUCKETS - 1, TOKENS) == 60
    assert window.others(10 + N_BUCKETS, TOKENS) == 0
    assert window.empty_at(TOKENS, 12) == 10 + N_BUCKETS
