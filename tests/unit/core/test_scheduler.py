"""What the scheduler answers to single events."""

from __future__ import annotations

import pytest

from router_ext.core.actions import Dispatch, Expire, Reject, RejectCode, SetTimer
from router_ext.core.admission import Backend, Gates
from router_ext.core.events import (
    Arrived,
    BackendChanged,
    Cancelled,
    Failed,
    Finished,
    PromptMeasured,
    Reconfigured,
    SliceEnded,
    TimerFired,
)
from router_ext.core.ids import BackendId, RequestId
from router_ext.core.lifecycle import IllegalTransition
from router_ext.core.scheduler import Scheduler
from tests.unit.core.builders import BATCH, CHAT, arrival, dispatched, down, pool, said, started, tokens, up


def finished(name: str) -> Finished:
    return Finished(request_id=RequestId(name))


def cancelled(name: str) -> Cancelled:
    return Cancelled(request_id=RequestId(name))


def reserved(scheduler: Scheduler) -> list[int]:
    return [backend.reserved_tokens for backend in scheduler.stats().backends]


# --- dispatch and slices ---------------------------------------------------------------------------------------------


def test_a_request_that_fits_starts_at_once_and_unsliced_while_nobody_waits() -> None:
    scheduler = started(pool(kv=5_000))
    (action,) = scheduler.handle(arrival("r1", cap=3_000, slice_tokens=64), 1.0)
    assert isinstance(action, Dispatch)
    assert (action.backend, action.slice_tokens, action.segment) == ("bke_0", 1_024, 0)
    assert reserved(scheduler) == [100 + 1_024 - 1]


def test_a_request_is_sliced_while_others_wait_if_two_slices_remain() -> None:
    scheduler = started(pool(kv=1_001))
    scheduler.handle(arrival("full", prompt=900, cap=100), 1.0)
    scheduler.handle(arrival("long", tenant="b", cap=800, slice_tokens=200), 1.0)
    scheduler.handle(arrival("short", tenant="a", cap=399, slice_tokens=200), 1.0)
    actions = scheduler.handle(finished("full"), 2.0)
    assert {a.request_id: a.slice_tokens for a in actions if isinstance(a, Dispatch)} == {"long": 200, "short": 399}


def test_work_that_cannot_be_resumed_is_dispatched_whole() -> None:
    scheduler = started(pool(kv=10_000))
    (action,) = scheduler.handle(arrival("r1", cap=3_000, is_sliceable=False), 1.0)
    assert isinstance(action, Dispatch)
    assert action.slice_tokens == 3_000
    assert reserved(scheduler) == [100 + 3_000 - 1]


def test_a_slice_end_frees_the_kv_and_continues_with_the_next_segment() -> None:
    scheduler = started(pool(kv=1_001, max_slice_tokens=50))
    scheduler.handle(arrival("r1", cap=200), 1.0)
    scheduler.handle(tokens("r1", 50), 2.0)
    (action,) = scheduler.handle(SliceEnded(request_id=RequestId("r1"), dropped_tokens=2, next_prompt_tokens=148), 3.0)
    assert isinstance(action, Dispatch)
    assert (action.segment, action.slice_tokens) == (1, 50)
    assert reserved(scheduler) == [148 + 50 - 1]


def test_tokens_generated_again_and_prompts_sent_again_are_charged_once() -> None:
    scheduler = started(pool(kv=1_001, max_slice_tokens=50))
    scheduler.handle(arrival("r1", cap=60), 1.0)
    scheduler.handle(tokens("r1", 50), 2.0)
    scheduler.handle(SliceEnded(request_id=RequestId("r1"), dropped_tokens=5, next_prompt_tokens=145), 3.0)
    scheduler.handle(tokens("r1", 15), 4.0)
    scheduler.handle(finished("r1"), 5.0)
    tenant = scheduler.stats().tenants[0]
    assert (tenant.prompt_tokens_total, tenant.output_tokens_total) == (100, 60)
    assert tenant.raw_counter == 100 + 2 * 60


def test_a_request_in_turn_gets_a_shorter_slice_rather_than_wait() -> None:
    scheduler = started(pool(kv=1_001))
    scheduler.handle(arrival("first", prompt=500, cap=200), 1.0)
    scheduler.handle(arrival("second", tenant="b", prompt=100, cap=1_000, slice_tokens=800), 1.0)
    assert reserved(scheduler)[0] <= 1_000
    assert scheduler.stats().queued == 0


# --- fairness --------------------------------------------------------------------------------------------------------


def test_the_tenant_with_less_service_per_weight_goes_first() -> None:
    scheduler = started(pool(kv=301, tenants={"a": 1.0, "b": 3.0}, backfill_ratio=0.0))
    scheduler.handle(arrival("a0", prompt=200, cap=100), 1.0)
    for index in range(1, 6):
        scheduler.handle(arrival(f"a{index}", "a", prompt=200, cap=100), 1.0)
        scheduler.handle(arrival(f"b{index}", "b", prompt=200, cap=100), 1.0)
    order = []
    running = "a0"
    for step in range(8):
        scheduler.handle(tokens(running, 100), 2.0 + step)
        (running,) = dispatched(scheduler.handle(finished(running), 2.5 + step))
        order.append(running[0])
    assert order.count("b") == 5
    assert order[:5].count("b") >= 3


def test_an_urgent_head_goes_ahead_within_its_pass_and_not_beyond() -> None:
    """U' is 2 * 1,001; a quarter of it is five prompts of 100 tokens, and the sixth finds its tenant at the edge."""
    scheduler = started(pool(kv=1_001, burst_ratio=0.25))
    scheduler.handle(arrival("full", "a", prompt=901, cap=100), 1.0)
    scheduler.handle(arrival("a1", "a", prompt=100, cap=1), 1.0)
    for index in range(10):
        scheduler.handle(arrival(f"b{index}", "b", "chat", prompt=100, cap=1), 1.0)
    first = dispatched(scheduler.handle(finished("full"), 1.2))
    assert first[:7] == ["b0", "b1", "b2", "b3", "b4", "b5", "a1"]


def test_under_fifo_the_head_that_does_not_fit_stops_everybody() -> None:
    scheduler = started(pool(policy="fifo", kv=1_001))
    scheduler.handle(arrival("first", prompt=700, cap=100), 1.0)
    assert dispatched(scheduler.handle(arrival("large", "a", prompt=500, cap=100), 1.0)) == []
    assert dispatched(scheduler.handle(arrival("small", "b", "chat", prompt=10, cap=10), 1.0)) == []
    assert dispatched(scheduler.handle(finished("first"), 2.0)) == ["large", "small"]


def test_requests_of_one_tenant_go_by_tier_then_arrival() -> None:
    scheduler = started(pool(kv=301, burst_ratio=0.0))
    scheduler.handle(arrival("full", prompt=200, cap=100), 1.0)
    scheduler.handle(arrival("batch", prompt=200, cap=100), 1.0)
    scheduler.handle(arrival("chat", tier="chat", prompt=200, cap=100), 1.0)
    assert dispatched(scheduler.handle(finished("full"), 1.5)) == ["chat"]


def test_an_aged_request_of_a_lower_tier_gets_its_share_of_admissions() -> None:
    scheduler = started(pool(kv=301, tenants={"a": 1.0}, aging_s=10.0, aging_ratio=0.25))
    scheduler.handle(arrival("old", prompt=200, cap=100), 0.0)
    scheduler.handle(arrival("batch", prompt=200, cap=100), 0.0)
    for index in range(20):
        scheduler.handle(arrival(f"chat{index}", tier="chat", prompt=200, cap=100), 1.0)
    running, order = "old", []
    for step in range(12):
        (running,) = dispatched(scheduler.handle(finished(running), 20.0 + step))
        order.append(running)
    assert order.index("batch") <= 6


# --- gates and placement ---------------------------------------------------------------------------------------------


def test_requests_spread_to_the_backend_with_least_prefill_then_most_free() -> None:
    scheduler = started(pool(kv=[1_001, 1_001]))
    placed = [scheduler.handle(arrival(f"r{i}", prompt=100 + i, cap=10), 1.0)[0] for i in range(3)]
    assert [action.backend for action in placed if isinstance(action, Dispatch)] == ["bke_0", "bke_1", "bke_0"]


def placed_on(scheduler: Scheduler, *requests: Arrived) -> list[str]:
    actions = [action for request in requests for action in scheduler.handle(request, 3.0)]
    return [action.backend for action in actions if isinstance(action, Dispatch)]


def after_a_first_turn() -> Scheduler:
    """``bke_1`` has answered a prompt of three blocks, and both backends are idle."""
    scheduler = started(pool(kv=[1_001, 1_001]))
    assert placed_on(scheduler, arrival("r0", prompt=10, cap=10)) == ["bke_0"]
    assert placed_on(scheduler, arrival("r1", prompt=200, cap=10, prefix=(1, 2, 3))) == ["bke_1"]
    for name in ("r0", "r1"):
        scheduler.handle(tokens(name), 3.0)
        scheduler.handle(Finished(request_id=RequestId(name)), 3.0)
    return scheduler


def test_a_conversation_returns_to_the_backend_that_holds_most_of_its_prompt() -> None:
    scheduler = after_a_first_turn()
    assert placed_on(scheduler, arrival("r2", prompt=200, cap=10, prefix=(1, 2, 9))) == ["bke_1"]
    assert placed_on(scheduler, arrival("r3", prompt=200, cap=10, prefix=(9, 8, 7))) == ["bke_0"]


def test_a_backend_that_was_down_holds_no_prompts() -> None:
    scheduler = after_a_first_turn()
    scheduler.handle(down("bke_1"), 3.0)
    scheduler.handle(up("bke_1"), 3.0)
    assert placed_on(scheduler, arrival("r2", prompt=200, cap=10, prefix=(1, 2, 9))) == ["bke_0"]


def test_prompts_are_pushed_out_by_what_is_reserved() -> None:
    scheduler = after_a_first_turn()
    assert placed_on(scheduler, arrival("large", prompt=10, cap=970), arrival("next", prompt=10, cap=970)) == [
        "bke_0",
        "bke_1",
    ]
    for name in ("large", "next"):
        scheduler.handle(Cancelled(request_id=RequestId(name)), 4.0)
    scheduler.handle(TimerFired(), 10.0)
    assert placed_on(scheduler, arrival("r2", prompt=200, cap=10, prefix=(1, 2, 9))) == ["bke_0"]


def test_the_prefill_gate_holds_long_prompts_back_until_the_first_token() -> None:
    scheduler = started(pool(kv=10_001, backend={"prefill_budget_tokens": 500}))
    scheduler.handle(arrival("one", prompt=400, cap=10), 1.0)
    assert dispatched(scheduler.handle(arrival("two", "b", prompt=200, cap=10), 1.0)) == []
    assert scheduler.stats().held_by == "prefill"
    assert dispatched(scheduler.handle(arrival("urgent", "b", "chat", prompt=200, cap=10), 1.0)) == ["urgent"]
    assert dispatched(scheduler.handle(tokens("one"), 2.0)) == ["two"]


def test_an_elephant_goes_alone() -> None:
    scheduler = started(pool(kv=10_001, backend={"prefill_budget_tokens": 500}))
    scheduler.handle(arrival("small", prompt=10, cap=10), 1.0)
    assert dispatched(scheduler.handle(arrival("elephant", prompt=2_000, cap=10), 1.0)) == []
    assert dispatched(scheduler.handle(tokens("small"), 2.0)) == ["elephant"]


def test_one_backend_is_kept_free_of_prompts_that_take_longer_than_half_the_target() -> None:
    scheduler = started(pool(kv=[100_001, 100_001]))
    for index in range(12):
        scheduler.handle(arrival(f"w{index}", tier="chat", prompt=100 * (index + 1), cap=1), float(index))
        scheduler.handle(tokens(f"w{index}"), index + 0.1 * (index + 1) / 2)
        scheduler.handle(finished(f"w{index}"), index + 0.9)
    assert dispatched(scheduler.handle(arrival("e1", prompt=20_000, cap=10), 20.0)) == ["e1"]
    assert dispatched(scheduler.handle(arrival("e2", "b", prompt=20_000, cap=10), 20.0)) == []
    assert scheduler.stats().held_by == "prefill"


def test_headroom_is_left_for_urgent_work_while_its_tier_is_active() -> None:
    scheduler = started(pool(kv=1_001))
    scheduler.handle(arrival("chat", tier="chat", prompt=200, cap=101), 1.0)
    scheduler.handle(tokens("chat"), 1.1)
    assert dispatched(scheduler.handle(arrival("batch", prompt=400, cap=101), 1.2)) == []
    assert scheduler.stats().held_by == "headroom"
    assert dispatched(scheduler.handle(arrival("urgent", "b", "chat", prompt=400, cap=101), 1.2)) == ["urgent"]


@pytest.mark.parametrize(
    ("kv", "size", "is_low", "blocks"),
    [
        (10_001, 500, False, 500),
        (10_001, 500, True, 1_000),
        (10_001, 800, True, 1_250),
        (10_001, 1_400, True, 1_400),
        (100_001, 400, False, 1_000),
        (100_001, 800, True, 1_600),
    ],
)
def test_headroom_is_doubled_up_to_an_eighth_while_cuts_are_dear(kv: int, size: int, is_low: bool, blocks: int) -> None:
    gates = Gates(headroom_ratio=0.01, is_on=True)
    gates.tightest_target_s = 1.0
    gates.note_urgent(size)
    gates.is_waste_low = is_low
    assert gates.headroom_blocks(Backend(pool(kv=kv).backends[BackendId("bke_0")])) == blocks


@pytest.mark.parametrize(("is_chunked", "tokens"), [(True, 1_000), (False, 4_096)])
def test_the_prefill_gate_follows_the_target_where_prompts_are_chunked(is_chunked: bool, tokens: int) -> None:
    config = pool(kv=10_001, backend={"is_chunked": is_chunked, "prefill_budget_tokens": 4_096})
    backend = Backend(config.backends[BackendId("bke_0")])
    assert backend.window_tokens(1.0, 2_000.0) == tokens
    assert backend.window_tokens(None, 2_000.0) == backend.window_tokens(1.0, None) == 4_096


def test_an_idle_backend_ignores_headroom() -> None:
    scheduler = started(pool(kv=1_001))
    scheduler.handle(arrival("chat", tier="chat", prompt=200, cap=101), 1.0)
    scheduler.handle(finished("chat"), 1.1)
    assert dispatched(scheduler.handle(arrival("batch", prompt=800, cap=101), 1.2)) == ["batch"]


def test_the_limit_of_concurrent_requests_counts_every_sequence() -> None:
    scheduler = started(pool(kv=10_001, backend={"max_concurrent_requests": 3}))
    scheduler.handle(arrival("two", num_sequences=2, is_sliceable=False), 1.0)
    assert dispatched(scheduler.handle(arrival("pair", num_sequences=2, is_sliceable=False), 1.0)) == []
    assert scheduler.stats().held_by == "concurrency"
    assert dispatched(scheduler.handle(finished("two"), 2.0)) == ["pair"]


def test_a_cordoned_backend_finishes_its_work_and_gets_none() -> None:
    scheduler = started(pool(kv=[1_001, 1_001]))
    scheduler.handle(arrival("r0"), 1.0)
    scheduler.handle(Reconfigured(config=pool(kv=[1_001, 1_001], backend={"is_cordoned": True})), 2.0)
    assert dispatched(scheduler.handle(arrival("r1"), 3.0)) == []
    assert scheduler.stats().running == 1
    assert dispatched(scheduler.handle(Reconfigured(config=pool(kv=[1_001, 1_001])), 4.0)) == ["r1"]


def test_work_behind_the_pick_uses_only_what_the_pick_leaves() -> None:
    scheduler = started(pool(kv=1_001, backfill_ratio=0.5, burst_ratio=0.0))
    scheduler.handle(arrival("running", "a", prompt=500, cap=100), 1.0)
    scheduler.handle(arrival("pick", "b", prompt=800, cap=100), 1.0)
    assert dispatched(scheduler.handle(arrival("harmful", "a", prompt=300, cap=50), 1.0)) == []
    assert dispatched(scheduler.handle(arrival("harmless", "c", prompt=40, cap=20), 1.0)) == ["harmless"]


# --- leaving ---------------------------------------------------------------------------------------------------------


def test_the_kv_of_a_closed_stream_is_free_only_after_the_running_step() -> None:
    scheduler = started(pool(kv=1_001))
    scheduler.handle(arrival("gone", prompt=800, cap=100), 1.0)
    scheduler.handle(tokens("gone"), 1.1)
    scheduler.handle(arrival("next", prompt=800, cap=100), 1.2)
    (timer,) = scheduler.handle(cancelled("gone"), 1.3)
    assert isinstance(timer, SetTimer)
    assert timer.at_s > 1.3
    assert reserved(scheduler) == [899]
    assert dispatched(scheduler.handle(TimerFired(), timer.at_s)) == ["next"]


def test_a_cancelled_prefill_holds_its_kv_for_the_whole_prefill() -> None:
    scheduler = started(pool(kv=100_001))
    for index in range(8):
        scheduler.handle(arrival(f"w{index}", prompt=1_000 * (index + 1), cap=1), float(index))
        scheduler.handle(tokens(f"w{index}"), index + 0.1 * (index + 1))
        scheduler.handle(finished(f"w{index}"), index + 0.95)
    scheduler.handle(arrival("long", prompt=50_000, cap=10), 20.0)
    scheduler.handle(arrival("next", prompt=60_000, cap=10), 20.0)
    (timer,) = scheduler.handle(cancelled("long"), 20.1)
    assert isinstance(timer, SetTimer)
    assert timer.at_s - 20.1 > 4.0


def test_events_about_requests_that_are_gone_are_ignored() -> None:
    scheduler = started(pool())
    scheduler.handle(arrival("r1"), 1.0)
    scheduler.handle(cancelled("r1"), 1.1)
    for event in (
        tokens("r1"),
        finished("r1"),
        cancelled("r1"),
        PromptMeasured(request_id=RequestId("r1"), prompt_tokens=7),
    ):
        assert dispatched(scheduler.handle(event, 1.2)) == []


def test_an_event_that_contradicts_the_state_changes_nothing() -> None:
    scheduler = started(pool(kv=301))
    scheduler.handle(arrival("r1", prompt=200, cap=100), 1.0)
    scheduler.handle(arrival("r2", prompt=200, cap=100), 1.0)
    before = scheduler.snapshot()
    with pytest.raises(IllegalTransition, match="QUEUED cannot FINISH"):
        scheduler.handle(finished("r2"), 1.0)
    with pytest.raises(IllegalTransition, match="arrived already"):
        scheduler.handle(arrival("r1"), 1.0)
    assert scheduler.snapshot() == before


def test_a_wrong_estimate_of_the_prompt_is_settled() -> None:
    scheduler = started(pool())
    scheduler.handle(arrival("r1", prompt=100, cap=10), 1.0)
    scheduler.handle(PromptMeasured(request_id=RequestId("r1"), prompt_tokens=160), 1.1)
    assert reserved(scheduler) == [169]
    assert scheduler.stats().tenants[0].prompt_tokens_total == 160
    scheduler.handle(PromptMeasured(request_id=RequestId("r1"), prompt_tokens=60), 1.2)
    assert scheduler.stats().tenants[0].raw_counter == 60


# --- refusals and limits ---------------------------------------------------------------------------------------------


def test_a_request_no_backend_can_ever_hold_is_refused_with_the_numbers() -> None:
    scheduler = started(pool(kv=[501, 801]))
    (action,) = scheduler.handle(arrival("r1", prompt=790, cap=100), 1.0)
    assert isinstance(action, Reject)
    assert action.code is RejectCode.TOO_LARGE
    assert action.retry_after_s is None
    assert all(number in action.detail for number in ("790", "100", "801"))


def test_a_full_queue_refuses_with_an_estimate_of_when_it_has_drained() -> None:
    config = pool(kv=301, max_queued=2)
    scheduler = started(config)
    scheduler.handle(arrival("r0", prompt=200, cap=100, predicted_output_tokens=50), 0.0)
    for second in range(1, 6):
        scheduler.handle(tokens("r0", 10), float(second))
        scheduler.handle(PromptMeasured(request_id=RequestId("none"), prompt_tokens=1), float(second))
        if second <= 2:
            scheduler.handle(arrival(f"r{second}", prompt=200, cap=100, predicted_output_tokens=50), float(second))
    (action,) = [a for a in scheduler.handle(arrival("r9"), 6.0) if isinstance(a, Reject)]
    assert action.code is RejectCode.QUEUE_FULL
    assert action.retry_after_s is not None
    assert action.retry_after_s == pytest.approx(2 * 50 / 10, rel=0.7)


def test_a_tenant_has_a_limit_of_its_own() -> None:
    config = pool(kv=301)
    scheduler = started(config)
    limited = build_with_limit(1)
    scheduler.handle(Reconfigured(config=limited), 0.0)
    scheduler.handle(arrival("r0", prompt=200, cap=100), 1.0)
    scheduler.handle(arrival("r1", prompt=200, cap=100), 1.0)
    (action,) = [a for a in scheduler.handle(arrival("r2"), 1.0) if isinstance(a, Reject)]
    assert action.code is RejectCode.QUEUE_FULL
    assert dispatched(scheduler.handle(arrival("other", "b", prompt=10, cap=10), 1.0)) == []
    assert scheduler.stats().queued == 2


def build_with_limit(limit: int):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    config = pool(kv=301)
    return replace(config, tenants={t: replace(c, max_queued=limit) for t, c in config.tenants.items()})


def test_a_request_that_waits_too_long_expires() -> None:
    scheduler = started(pool(kv=301, tiers=[CHAT, {**BATCH, "max_queue_wait_s": 5.0}]))
    scheduler.handle(arrival("r0", prompt=200, cap=100), 0.0)
    (timer,) = scheduler.handle(arrival("r1", prompt=200, cap=100), 1.0)
    assert timer == SetTimer(at_s=6.0)
    scheduler.handle(TimerFired(), 5.0)
    (expired,) = scheduler.handle(TimerFired(), 6.0)
    assert isinstance(expired, Expire)
    assert (expired.request_id, expired.code) == ("r1", RejectCode.QUEUE_TIMEOUT)
    assert scheduler.stats().queued == 0


# --- backends come and go --------------------------------------------------------------------------------------------


def test_a_new_backend_counts_as_down_until_it_is_reported_up() -> None:
    scheduler = Scheduler(pool())
    assert dispatched(scheduler.handle(arrival("r1"), 1.0)) == []
    assert scheduler.stats().held_by == "no_backend"
    assert dispatched(scheduler.handle(up(), 2.0)) == ["r1"]


def test_without_any_backend_requests_wait_for_the_stated_time_then_expire_and_later_ones_are_refused() -> None:
    scheduler = started(pool(backend_wait_s=30.0))
    scheduler.handle(down(), 10.0)
    (timer,) = scheduler.handle(arrival("r1"), 12.0)
    assert timer == SetTimer(at_s=40.0)
    assert scheduler.handle(arrival("r2"), 39.0) == []
    expired = [a for a in scheduler.handle(TimerFired(), 40.0) if isinstance(a, Expire)]
    assert [(a.request_id, a.code) for a in expired] == [("r1", RejectCode.NO_BACKEND), ("r2", RejectCode.NO_BACKEND)]
    (action,) = scheduler.handle(arrival("r3"), 41.0)
    assert isinstance(action, Reject)
    assert action.code is RejectCode.NO_BACKEND
    assert dispatched(scheduler.handle(up(), 50.0)) == []
    assert dispatched(scheduler.handle(arrival("r4"), 51.0)) == ["r4"]


def test_requests_of_a_lost_backend_are_retried_elsewhere_ahead_of_others() -> None:
    scheduler = started(pool(kv=[301, 301]))
    scheduler.handle(arrival("r0", prompt=200, cap=100), 1.0)
    scheduler.handle(arrival("r1", prompt=200, cap=100), 1.0)
    scheduler.handle(arrival("r2", prompt=200, cap=100), 1.0)
    scheduler.handle(tokens("r0", 10), 2.0)
    scheduler.handle(down("bke_0"), 2.1)
    scheduler.handle(Failed(request_id=RequestId("r0"), is_retryable=True, next_prompt_tokens=210), 2.2)
    assert scheduler.stats().queued == 2
    (action,) = [a for a in scheduler.handle(finished("r1"), 3.0) if isinstance(a, Dispatch)]
    assert (action.request_id, action.backend, action.segment, action.slice_tokens) == ("r0", "bke_1", 1, 90)
    assert scheduler.stats().tenants[0].prompt_tokens_total == 400


def test_a_request_that_cannot_be_retried_ends_and_frees_its_seat() -> None:
    scheduler = started(pool())
    scheduler.handle(arrival("r0"), 1.0)
    scheduler.handle(Failed(request_id=RequestId("r0"), is_retryable=False), 1.1)
    scheduler.handle(TimerFired(), 60.0)
    assert (scheduler.stats().running, reserved(scheduler)) == (0, [0])


# --- configuration while running -------------------------------------------------------------------------------------


def test_queues_ledger_and_counters_survive_a_change_of_policy() -> None:
    scheduler = started(pool(kv=301, policy="fifo"))
    scheduler.handle(arrival("a0", "a", prompt=200, cap=100), 1.0)
    for index in range(1, 4):
        scheduler.handle(arrival(f"a{index}", "a", prompt=200, cap=100), 1.0)
    scheduler.handle(arrival("b1", "b", prompt=200, cap=100), 1.0)
    scheduler.handle(tokens("a0", 50), 2.0)
    before = scheduler.stats()
    scheduler.handle(Reconfigured(config=pool(kv=301, policy="slo-fair")), 3.0)
    after = scheduler.stats()
    assert after.policy == "slo-fair"
    assert [t.raw_counter for t in after.tenants] == [t.raw_counter for t in before.tenants]
    assert (after.queued, after.running, reserved(scheduler)) == (4, 1, [299])
    assert dispatched(scheduler.handle(finished("a0"), 4.0)) == ["b1"]
    scheduler.handle(Reconfigured(config=pool(kv=301, policy="fifo")), 5.0)
    assert dispatched(scheduler.handle(finished("b1"), 6.0)) == ["a1"]


def test_a_changed_weight_counts_from_the_next_charge_on() -> None:
    scheduler = started(pool(tenants={"a": 1.0, "b": 1.0}))
    scheduler.handle(arrival("r0", prompt=100, cap=100), 1.0)
    scheduler.handle(Reconfigured(config=pool(tenants={"a": 4.0, "b": 1.0})), 2.0)
    assert scheduler.stats().tenants[0].raw_counter == 100
    scheduler.handle(tokens("r0", 10), 3.0)
    assert scheduler.stats().tenants[0].raw_counter == 100 + 2 * 10 / 4


def test_removed_tenants_and_backends_finish_their_work_and_are_forgotten() -> None:
    scheduler = started(pool(kv=[301, 301], tenants={"a": 1.0, "b": 1.0}))
    scheduler.handle(arrival("b0", "b", prompt=200, cap=100), 1.0)
    scheduler.handle(arrival("b1", "b", prompt=200, cap=100), 1.0)
    scheduler.handle(Reconfigured(config=pool(kv=[301], tenants={"a": 1.0})), 2.0)
    assert [backend.is_retired for backend in scheduler.stats().backends] == [False, True]
    scheduler.handle(finished("b0"), 3.0)
    scheduler.handle(finished("b1"), 3.0)
    scheduler.handle(arrival("a0", "a", prompt=290, cap=10), 3.1)
    scheduler.handle(arrival("a1", "a", prompt=290, cap=10), 3.1)
    scheduler.handle(Reconfigured(config=pool(kv=[301], tenants={"a": 1.0})), 4.0)
    stats = scheduler.stats()
    assert [backend.backend for backend in stats.backends] == ["bke_0"]
    assert scheduler.audit() == []


def test_a_tenant_added_while_running_is_served() -> None:
    scheduler = started(pool(tenants={"a": 1.0}))
    scheduler.handle(Reconfigured(config=pool(tenants={"a": 1.0, "z": 2.0})), 1.0)
    assert dispatched(scheduler.handle(arrival("r0", "z"), 2.0)) == ["r0"]


def test_a_backend_added_while_running_takes_work_once_it_is_up() -> None:
    scheduler = started(pool(kv=[301]))
    scheduler.handle(arrival("r0", prompt=200, cap=100), 1.0)
    scheduler.handle(arrival("r1", prompt=200, cap=100), 1.0)
    assert dispatched(scheduler.handle(Reconfigured(config=pool(kv=[301, 301])), 2.0)) == []
    event = BackendChanged(backend=BackendId("bke_1"), is_up=True)
    assert dispatched(scheduler.handle(event, 3.0)) == ["r1"]


def test_the_kv_of_a_stream_closed_before_its_end_is_free_after_the_release_lag() -> None:
    scheduler = started(pool(kv=301))
    scheduler.handle(arrival("r0", prompt=200, cap=100), 1.0)
    scheduler.handle(tokens("r0", 20), 2.0)
    scheduler.handle(arrival("r1", prompt=200, cap=100), 2.1)
    (timer,) = scheduler.handle(Finished(request_id=RequestId("r0"), is_upstream_over=False), 2.2)
    assert isinstance(timer, SetTimer)
    assert timer.at_s > 2.2
    assert scheduler.audit() == []
    assert dispatched(scheduler.handle(TimerFired(), timer.at_s)) == ["r1"]


# --- explanations ----------------------------------------------------------------------------------------------------


def test_an_explanation_names_the_gate_and_who_went_first_but_no_other_tenant() -> None:
    scheduler = started(pool(kv=301))
    scheduler.handle(arrival("r0", "a", prompt=200, cap=100), 1.0)
    scheduler.handle(arrival("r1", "a", prompt=200, cap=100), 1.0)
    scheduler.handle(arrival("r2", "b", prompt=200, cap=100), 1.0)
    assert said(scheduler, "r2")[0].startswith("waited 0.000 s")
    scheduler.handle(finished("r0"), 4.0)
    scheduler.handle(finished("r1"), 7.0)
    reasons = scheduler.explain(RequestId("r2"))
    assert (reasons[0].cause, reasons[0].seconds) == ("wait", 6.0)
    assert reasons[0].counts == {"turns": 1, "own": 0, "others": 1}
    kv = next(reason for reason in reasons if reason.cause == "kv")
    assert kv.seconds == 6.0
    assert kv.counts["in_turn"] >= 1
    assert "KV" in kv.text
    scheduler.handle(finished("r2"), 8.0)
    assert scheduler.explain(RequestId("r2")) == reasons
    assert scheduler.explain(RequestId("unknown")) == []


def test_a_request_that_started_at_once_waited_for_nothing() -> None:
    scheduler = started(pool())
    scheduler.handle(arrival("r0"), 1.0)
    assert said(scheduler, "r0")[0].startswith("waited 0.000 s in 1 turn; meanwhile 0 requests")
