"""The virtual server against steps worked out by hand."""

from __future__ import annotations

import pytest

from router_ext.core.ids import RequestId
from router_ext.sim.jobs import Job
from router_ext.sim.models import A10G, ServerModel
from router_ext.sim.prefix_cache import PrefixCache
from router_ext.sim.server import Server
from router_ext.sim.streams import Stream


def stream(name: str, input_tokens: int, length: int, new_tokens: int | None = None, **fields: bool) -> Stream:
    job = Job(tenant=0, arrival_s=0.0, input_tokens=input_tokens, output_tokens=length, max_new_tokens=length)
    job.request_id = RequestId(name)
    return Stream(job, input_tokens=input_tokens, length=length, new_tokens=new_tokens or length, **fields)


def test_a_prefill_alone_takes_the_prefill_constant() -> None:
    server = Server(A10G)
    server.open(stream("a", 100, 2))
    end = server.begin(0.0)
    assert end == pytest.approx((35.8 + 100 * 0.2131) / 1_000)


def test_decoders_and_a_chunk_share_an_iteration() -> None:
    server = Server(A10G)
    server.open(stream("a", 100, 3))
    now = server.begin(0.0)
    assert now is not None
    outcome = server.finish(now)
    assert [s.job.request_id for s in outcome.started] == ["a"]
    server.open(stream("b", 50, 1))
    end = server.begin(now)
    assert end is not None
    # One decoder with 100 prompt tokens and one of its own, and 50 prompt tokens of the newcomer.
    assert end - now == pytest.approx((15.3 + 0.253 + 0.00216 * 101 + 50 * 0.2131) / 1_000)
    outcome = server.finish(end)
    assert [s.job.request_id for s in outcome.decoded.streams] == ["a"]
    assert [s.job.request_id for s in outcome.started] == ["b"]
    assert [s.job.request_id for s in outcome.ended] == ["b"]
    assert server.reserved == 100 + 3 - 1


def test_the_head_that_does_not_fit_stops_the_queue() -> None:
    server = Server(A10G)
    for name, size in (("a", 9_000), ("b", 2_000), ("c", 10)):
        server.open(stream(name, size, 100))
    server.begin(0.0)
    assert server.num_running == 1
    assert [s.job.request_id for s in server.queue] == ["b", "c"]


def test_a_long_prompt_takes_the_budget_until_it_is_done() -> None:
    model = ServerModel(
        name="t",
        decode_base_ms=1.0,
        per_sequence_ms=0.0,
        per_context_token_ms=0.0,
        prefill_base_ms=0.0,
        per_prefill_token_ms=1.0,
        kv_tokens=100_000,
        prefill_budget_tokens=100,
    )
    server = Server(model)
    server.open(stream("long", 250, 2))
    server.open(stream("short", 10, 2))
    ends = []
    now = 0.0
    while (end := server.begin(now)) is not None:
        outcome = server.finish(end)
        ends.append((round((end - now) * 1_000), [str(s.job.request_id) for s in outcome.started]))
        now = end
    # 100 + 100 + 50 of the long one, with which the short one rides; then both decode once.
    assert ends == [(100, []), (100, []), (60, ["long", "short"]), (1, [])]


def finish_all(server: Server, now: float = 0.0) -> list[list[str]]:
    """Run until nothing is left; who ended, by iteration."""
    ended = []
    while (end := server.begin(now)) is not None:
        ended.append([str(s.job.request_id) for s in server.finish(end).ended])
        now = end
    return ended


def test_a_continuation_finds_its_prompt_while_nobody_needed_the_room() -> None:
    server = Server(A10G)
    server.open(stream("a", 300, 20, new_tokens=10))
    finish_all(server)
    assert server.cache.tokens == 300
    server.open(stream("a", 310, 10, was_sliced=True))
    server.begin(0.0)
    # 300 of the 310 tokens are still there; the ten it wrote are not: only prompts are cached.
    assert server.num_continued == 10
    assert server.cache.tokens == 0
    assert server.reserved == 310 + 10 - 1


def test_a_cut_request_pays_for_what_was_evicted_meanwhile() -> None:
    server = Server(A10G)
    server.open(stream("a", 4_000, 100))
    now = server.begin(0.0)
    assert now is not None
    outcome = server.finish(now)
    server.close(outcome.started[0])
    end = server.begin(now)
    assert end is not None
    server.finish(end)
    assert (server.reserved, server.cache.tokens) == (0, 4_000)
    # 9,999 tokens are usable: this one leaves room for 1,000 of the cached prompt, its beginning.
    server.open(stream("b", 8_900, 100))
    server.begin(end)
    assert (server.reserved, server.cache.tokens) == (8_999, 1_000)
    finish_all(server)
    server.open(stream("a", 4_001, 99, was_preempted=True))
    server.begin(100.0)
    assert server.num_recomputed == 3_001


def test_the_cache_gives_up_what_was_used_longest_ago() -> None:
    cache = PrefixCache()
    for name, tokens in (("a", 30), ("b", 20), ("c", 10)):
        cache.put(name, tokens)
    cache.put("a", 35)
    cache.shrink(50)
    assert [cache.peek(name, 100) for name in "abc"] == [35, 5, 10]
    # A forward computes at least one token.
    assert cache.take("a", 35) == 34
    assert cache.tokens == 15


def test_more_than_a_piece_goes_to_the_tail_for_each_further_one() -> None:
    server = Server(A10G)
    long = stream("long", 100, 1_500, new_tokens=4_096)
    server.open(long)
    assert long.reserved == 100 + 1_024 - 1
    server.open(stream("short", 10, 1_100, new_tokens=1_100))
    history = finish_all(server)
    ends = {name: number for number, names in enumerate(history) for name in names}
    # A token per iteration, from the first to the last: the second piece waits for nobody here. It computes the text so
    # far again, while the prompt is still cached.
    assert ends["long"] == 1_500 - 1
    assert long.written == 1_500
    assert server.num_continued == (100 + 1_024 - 100) + (10 + 1_024 - 10)
    assert server.reserved == 0


def test_what_a_stream_has_shown_follows_the_outcomes_that_arrived() -> None:
    server = Server(A10G)
    one = stream("a", 10, 5)
    server.open(one)
    seen = [one.shown(0, 0)]
    now = 0.0
    outcomes = []
    while (end := server.begin(now)) is not None:
        outcomes.append(server.finish(end))
        now = end
    # The server is done; the client learns of it outcome by outcome.
    seen += [one.shown(outcome.tick, outcome.iteration) for outcome in outcomes]
    assert seen == [0, 1, 2, 3, 4, 5]


def test_a_closed_stream_in_the_queue_is_never_started() -> None:
    server = Server(A10G)
    first, second = stream("a", 9_000, 10), stream("b", 9_000, 10)
    server.open(first)
    server.open(second)
    server.begin(0.0)
    server.close(second)
    history = finish_all_from(server, 0.2)
    assert history == ["a"]
    assert not server.queue


def finish_all_from(server: Server, now: float) -> list[str]:
    """Finish the iteration that runs and all that follow; who ended."""
    ended = []
    end: float | None = now
    while end is not None:
        ended += [str(s.job.request_id) for s in server.finish(end).ended]
        end = server.begin(end)
    return ended


def test_integrals_follow_every_change() -> None:
    server = Server(A10G)
    server.open(stream("a", 100, 2))
    now = server.begin(1.0)
    assert now is not None
    server.finish(now)
    end = server.begin(now)
    assert end is not None
    server.finish(end)
    server.settle(end + 5.0)
    assert server.kv_seconds == pytest.approx(101 * (end - 1.0))
    assert server.running_seconds == pytest.approx(end - 1.0)
