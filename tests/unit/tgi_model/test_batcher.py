"""Who is admitted, when, and how prompts are cut into chunks: TGI's rules on small numbers."""

from __future__ import annotations

import pytest

from router_ext.tgi_model import Batcher, BatchRules, Entry, Step, StepKind


def entry(input_length: int, max_new_tokens: int = 10) -> Entry:
    return Entry(input_length=input_length, max_new_tokens=max_new_tokens)


def batcher(**rules: object) -> Batcher:
    return Batcher(BatchRules(**{"block_size": 1, "max_batch_total_tokens": 1001, **rules}))  # type: ignore[arg-type]


def queued(made: Batcher, *entries: Entry) -> None:
    for one in entries:
        made.append(one, 0.0)


def step(made: Batcher, *, finished: tuple[Entry, ...] = ()) -> Step:
    found = made.next_step(0.0)
    assert found is not None
    made.complete(found, finished=finished)
    return found


def test_nothing_behind_a_head_that_does_not_fit_is_looked_at() -> None:
    made = batcher(max_batch_total_tokens=101)
    first, big, small = entry(50), entry(60), entry(1, 1)
    queued(made, first, big, small)
    assert step(made).admitted == [first]
    for _ in range(3):
        assert step(made).kind is StepKind.DECODE
    assert list(made.queue) == [big, small]
    found = made.next_step(0.0)
    assert found is not None
    made.complete(found, finished=[first])
    assert step(made).admitted == [big, small], "the blocks are free in the very next iteration"


def test_a_request_that_needs_the_reserved_block_blocks_the_queue_for_ever() -> None:
    made = batcher(block_size=256, max_batch_total_tokens=1024)
    queued(made, entry(1000, 20))
    assert made.next_step(0.0) is None
    assert len(made.queue) == 1


def test_padded_models_count_the_longest_prompt_for_everyone() -> None:
    rules = {"block_size": None, "chunking": False, "max_batch_prefill_tokens": 4096}
    queued(fits := batcher(**rules, max_batch_total_tokens=2800), *(entry(500, 200) for _ in range(4)))
    queued(tight := batcher(**rules, max_batch_total_tokens=2799), *(entry(500, 200) for _ in range(4)))
    assert len(step(fits).admitted) == 4
    assert len(step(tight).admitted) == 3
    assert fits.batch_max_tokens == 2800


def test_the_budget_gauge_counts_whole_blocks() -> None:
    made = batcher(block_size=16, max_batch_total_tokens=4096)
    queued(made, entry(17, 100), entry(1, 1))
    step(made)
    assert made.batch_max_tokens == (8 + 1) * 16


class TestChunking:
    def test_a_long_prompt_is_cut_and_shuts_the_door_while_it_lasts(self) -> None:
        made = batcher(max_batch_prefill_tokens=100)
        long, late = entry(250), entry(5)
        queued(made, long, late)
        first = step(made)
        assert [(e, chunk) for e, chunk in first.prefill] == [(long, 100)]
        assert first.sampled == []
        second = step(made)
        assert second.prefill == [(long, 100)]
        assert list(made.queue) == [late]
        third = step(made)
        assert third.prefill == [(long, 50), (late, 5)], "what is left of the budget is the newcomers'"
        assert set(third.sampled) == {long, late}

    def test_newcomers_join_a_running_batch_whose_requests_get_their_token_too(self) -> None:
        made = batcher()
        first, second, third = entry(10), entry(20), entry(7)
        queued(made, first)
        step(made)
        queued(made, second, third)
        joined = step(made)
        assert joined.kind is StepKind.PREFILL
        assert joined.decode == [first]
        assert joined.prefill == [(second, 20), (third, 7)]
        assert made.last_admission.concat == "chunking"

    def test_a_decode_follows_before_the_queue_is_asked_again(self) -> None:
        made = batcher()
        queued(made, entry(1))
        kinds = []
        for _ in range(5):
            kinds.append(step(made).kind)
            queued(made, entry(1))
        prefill, decode = StepKind.PREFILL, StepKind.DECODE
        assert kinds == [prefill, prefill, decode, prefill, decode]

    def test_running_requests_lower_the_prefill_budget(self) -> None:
        made = batcher(max_batch_prefill_tokens=12)
        queued(made, entry(4), entry(4))
        step(made)
        step(made)
        queued(made, entry(30))
        assert step(made).prefill_tokens == 10

    def test_the_budget_is_rounded_up_to_whole_blocks(self) -> None:
        made = batcher(block_size=16, max_batch_prefill_tokens=20)
        queued(made, entry(100))
        assert step(made).prefill_tokens == 32

    def test_batch_size_is_not_limited_while_running(self) -> None:
        made = batcher(max_batch_size=1)
        queued(made, entry(1), entry(1))
        assert len(step(made).admitted) == 1
        assert len(step(made).admitted) == 1
        assert len(made.running) == 2


class TestWithoutChunking:
    def test_a_prompt_over_the_budget_waits(self) -> None:
        made = batcher(chunking=False, max_batch_prefill_tokens=100)
        queued(made, entry(60), entry(50))
        assert len(step(made).admitted) == 1

    def test_decoding_stops_while_newcomers_are_prefilled(self) -> None:
        made = batcher(chunking=False, waiting_served_ratio=0.3)
        first, second = entry(10), entry(20)
        queued(made, first)
        step(made)
        step(made)
        queued(made, second)
        joined = step(made)
        assert joined.kind is StepKind.PREFILL
        assert joined.decode == []
        assert step(made).decode == [first, second]

    def test_too_few_newcomers_wait_until_the_batch_has_waited_long_enough(self) -> None:
        made = batcher(chunking=False, waiting_served_ratio=1.2, max_waiting_tokens=3)
        queued(made, entry(1), entry(1))
        step(made)
        queued(made, entry(1))
        kinds = [step(made).kind for _ in range(3)]
        assert kinds == [StepKind.DECODE, StepKind.DECODE, StepKind.PREFILL]
        assert made.last_admission.concat == "wait_exceeded"

    def test_what_was_taken_goes_back_in_order_if_it_is_too_few(self) -> None:
        made = batcher(chunking=False, waiting_served_ratio=1.0, max_batch_total_tokens=101)
        queued(made, entry(10), entry(10))
        step(made)
        step(made)
        small, big = entry(5), entry(80)
        queued(made, small, big)
        assert step(made).kind is StepKind.DECODE
        assert list(made.queue) == [small, big]
        assert made.allocator is not None
        assert made.allocator.free_blocks == 100 - 2 * 19

    def test_max_batch_size_holds(self) -> None:
        made = batcher(chunking=False, max_batch_size=2, waiting_served_ratio=0.0)
        queued(made, entry(1), entry(1), entry(1))
        assert len(step(made).admitted) == 2
        assert step(made).kind is StepKind.DECODE
        assert step(made).kind is StepKind.DECODE


def test_a_dead_entry_leaves_the_queue_only_at_its_head() -> None:
    made = batcher(max_batch_total_tokens=101)
    first, dead, third = entry(80), entry(80), entry(1)
    queued(made, first, dead, third)
    step(made)
    assert step(made).kind is StepKind.DECODE
    dead.is_closed = True
    assert len(made.queue) == 2
    assert step(made).admitted == [third]
    assert made.dropped == 1


def test_a_padded_model_cannot_chunk() -> None:
    with pytest.raises(ValueError, match="padded"):
        Batcher(BatchRules(block_size=None, chunking=True))


def test_the_whole_budget_is_free_after_everyone_has_left() -> None:
    made = batcher(block_size=16, max_batch_prefill_tokens=64, max_batch_total_tokens=2000)
    everyone = [entry(n * 7 % 90 + 1, n % 13 + 1) for n in range(200)]
    queued(made, *everyone)
    left = {e: e.max_new_tokens for e in everyone}
    assert made.allocator is not None
    while (found := made.next_step(0.0)) is not None:
        done = []
        for one in found.sampled:
            left[one] -= 1
            if left[one] == 0:
                done.append(one)
        made.complete(found, finished=done)
        reserved = sum(e.allocation.blocks for e in made.running if e.allocation)
        assert made.allocator.free_blocks + reserved == made.allocator.usable
    assert set(left.values()) == {0}
    assert made.allocator.free_blocks == made.allocator.usable
