"""What a predicted distribution changes: slices, what is expected of running and waiting answers, what sizes them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from router_ext.core.actions import Dispatch
from router_ext.core.events import Finished, Preempted, Reconfigured, SliceEnded
from router_ext.core.ids import RequestId
from router_ext.core.lengths import LEAST_SLICE
from router_ext.core.scheduler import Scheduler
from router_ext.core.sizing import KvPrice, cheapest
from router_ext.core.survival import Survival, next_look
from tests.unit.core.builders import arrival, pool, started, tokens

FEW = (50, 60, 80, 100, 150, 220, 300)
"""A prediction."""


def state(scheduler: Scheduler, name: str) -> dict[str, Any]:
    return next(r for r in scheduler.snapshot()["requests"] if r["request"] == name)


def slices(actions: list[Any]) -> dict[str, int]:
    return {str(a.request_id): a.slice_tokens for a in actions if isinstance(a, Dispatch)}


def test_a_slice_is_the_quantile_of_its_own_request() -> None:
    """As long as somebody waits for what it leaves; and no slice is shorter than the least one."""
    scheduler = started(pool(kv=1_000))
    scheduler.handle(arrival("r0", prompt=100, cap=890, quantiles=FEW), 0.0)
    scheduler.handle(arrival("r1", prompt=100, cap=900, quantiles=FEW), 0.1)
    scheduler.handle(arrival("r2", prompt=100, cap=900, quantiles=(5,) * 7), 0.2)
    scheduler.handle(arrival("r3", prompt=900, cap=90), 0.3)
    actions = scheduler.handle(Finished(request_id=RequestId("r0")), 1.0)
    size = cheapest(Survival(FEW), prompt_tokens=100, produced=0, cap=900, most=1_024, price=KvPrice().ratio)
    assert slices(actions)["r1"] == size
    assert LEAST_SLICE <= slices(actions)["r2"] < 80
    assert 100 < size < 900
    level = 1.0 - Survival(FEW).beyond(size)
    assert f"long enough for {level:.1%} of such answers" in scheduler.timeline(RequestId("r1"))[-1].text
    scheduler.handle(Finished(request_id=RequestId("r1")), 2.0)
    scheduler.handle(Finished(request_id=RequestId("r2")), 2.0)
    scheduler.handle(Finished(request_id=RequestId("r3")), 3.0)
    scheduler.handle(arrival("r4", prompt=100, cap=890, quantiles=FEW), 9.0)
    assert scheduler.timeline(RequestId("r4"))[-1].tokens == 890
    assert "long enough" not in scheduler.timeline(RequestId("r4"))[-1].text


def test_a_continuation_goes_by_what_has_been_written() -> None:
    sharp = (300, 310, 320, 330, 340, 350, 360)
    scheduler = started(pool(kv=2_000))
    scheduler.handle(arrival("r0", prompt=500, cap=2_000, quantiles=sharp), 0.0)
    scheduler.handle(arrival("r1", prompt=500, cap=2_000, quantiles=sharp), 0.1)
    scheduler.handle(arrival("r2", prompt=1_900, cap=90, quantiles=sharp), 0.1)
    actions = scheduler.handle(Finished(request_id=RequestId("r0")), 1.0)
    first = slices(actions)["r1"]
    assert 300 <= first < 400
    scheduler.handle(tokens("r1", first), 2.0)
    over = SliceEnded(request_id=RequestId("r1"), dropped_tokens=0, next_prompt_tokens=500 + first)
    actions = scheduler.handle(over, 3.0)
    assert 64 <= slices(actions)["r1"] < first


def test_what_is_expected_of_a_running_answer_follows_what_it_has_written() -> None:
    scheduler = started(pool(kv=10_000))
    scheduler.handle(arrival("r0", prompt=100, cap=2_000, quantiles=FEW), 0.0)
    assert state(scheduler, "r0")["predicted_output_tokens"] == 100
    for produced in range(1, 400):
        scheduler.handle(tokens("r0"), float(produced))
        assert state(scheduler, "r0")["predicted_output_tokens"] >= min(produced, 100)
    looks = [0]
    while next_look(looks[-1]) < 400:
        looks.append(next_look(looks[-1]))
    # Half of those that reach the last look go on that far.
    assert state(scheduler, "r0")["predicted_output_tokens"] == Survival(FEW).total(looks[-1], 0.5) > 450


def test_nobody_is_expected_to_pass_the_cap() -> None:
    scheduler = started(pool(kv=10_000))
    scheduler.handle(arrival("r0", prompt=100, cap=90, quantiles=FEW), 0.0)
    assert state(scheduler, "r0")["predicted_output_tokens"] == 90
    scheduler.handle(tokens("r0", 80), 1.0)
    assert state(scheduler, "r0")["predicted_output_tokens"] == 90


def test_what_waits_is_counted_by_its_mean() -> None:
    scheduler = started(pool(kv=500))
    scheduler.handle(arrival("r0", prompt=100, cap=400), 0.0)
    for index in range(10):
        scheduler.handle(arrival(f"w{index}", prompt=100, cap=300, quantiles=FEW), 0.1)
    scheduler.handle(tokens("r0", 100), 1.0)
    scheduler.handle(tokens("r0", 100), 3.0)
    rate = scheduler.stats().output_tokens_per_s
    assert rate is not None
    mean = round(Survival(FEW).expected_rest(0, 300))
    assert 100 < mean < 150
    assert scheduler.drain_estimate() == pytest.approx(10 * mean / rate)


def taught(*, prefill_rate: float, step_s: float) -> Scheduler:
    """A pool that holds one request at a time, others waiting, at these speeds."""
    scheduler = started(pool(kv=1_000))

    def arrive(number: int) -> None:
        prompt = 500 + 5 * number
        scheduler.handle(arrival(f"q{number}", prompt=prompt, cap=990 - prompt, quantiles=FEW), now)

    now = 0.0
    arrive(0)
    arrive(1)
    for number in range(39):
        arrive(number + 2)
        now += (500 + 5 * number) / prefill_rate
        scheduler.handle(tokens(f"q{number}", 1), now)
        now += 64 * step_s
        scheduler.handle(tokens(f"q{number}", 64), now)
        scheduler.handle(Finished(request_id=RequestId(f"q{number}")), now)
    return scheduler


def test_slices_are_sized_by_what_was_observed_of_prompts_and_steps() -> None:
    """KV is the dearer the longer steps are, and what is sent again the slower prompts go."""
    slow, fast = taught(prefill_rate=500.0, step_s=0.05), taught(prefill_rate=50_000.0, step_s=0.05)
    assert slow.stats().resent_token_s == pytest.approx(1 / 500.0, rel=0.02)
    assert fast.stats().resent_token_s == pytest.approx(1 / 50_000.0, rel=0.02)
    for scheduler in (slow, fast):
        assert scheduler.stats().held_token_s == pytest.approx(0.05 * 0.4 / 999, rel=0.1)
    assert fast.stats().slice_level < slow.stats().slice_level - 0.2


def test_requests_without_a_distribution_teach_nothing_and_change_nothing() -> None:
    """The two events differ in nothing but what is not given."""
    scheduler = started(pool(kv=1_000))
    scheduler.handle(arrival("r0", prompt=100, cap=890), 0.0)
    scheduler.handle(arrival("r1", prompt=100, cap=900, slice_tokens=200), 0.1)
    scheduler.handle(arrival("r2", prompt=100, cap=900, slice_tokens=200), 0.1)
    actions = scheduler.handle(Finished(request_id=RequestId("r0")), 1.0)
    assert slices(actions)["r1"] == 200
    scheduler.handle(tokens("r1", 199), 2.0)
    scheduler.handle(Preempted(request_id=RequestId("r1"), dropped_tokens=0, next_prompt_tokens=0), 2.0)
    assert state(scheduler, "r1")["predicted_output_tokens"] == 256
    scheduler.handle(Finished(request_id=RequestId("r1")), 3.0)
    stats = asdict(scheduler.stats())
    assert (stats["slice_level"], stats["resent_token_s"], stats["held_token_s"]) == (1.0, None, None)


def test_a_policy_that_does_not_slice_sizes_none_until_another_does() -> None:
    scheduler = started(pool(kv=1_200, policy="fifo"))
    # 1,024 is also what a slice is before any was sized: nothing may be learned from it.
    for number in range(3):
        scheduler.handle(arrival(f"r{number}", prompt=100, cap=1_024, quantiles=FEW), 0.1 * number)
    assert slices(scheduler.handle(Finished(request_id=RequestId("r0")), 1.0)) == {"r1": 1_024}
    stats = scheduler.stats()
    assert (stats.slice_level, stats.resent_token_s, stats.held_token_s) == (1.0, None, None)
    assert "long enough" not in scheduler.timeline(RequestId("r1"))[-1].text
    scheduler.handle(Reconfigured(config=pool(kv=1_200, policy="slo-fair")), 1.0)
    scheduler.handle(arrival("r3", prompt=100, cap=1_024, quantiles=FEW), 1.1)
    actions = scheduler.handle(Finished(request_id=RequestId("r1")), 2.0)
    size = cheapest(Survival(FEW), prompt_tokens=100, produced=0, cap=1_024, most=1_024, price=KvPrice().ratio)
    assert slices(actions)["r2"] == size < 1_024


def test_work_that_is_sent_whole_teaches_nothing_about_slices() -> None:
    scheduler = started(pool(kv=1_200))
    for number in range(2):
        scheduler.handle(arrival(f"r{number}", prompt=100, cap=1_024, quantiles=FEW, is_sliceable=False), 0.0)
    assert slices(scheduler.handle(Finished(request_id=RequestId("r0")), 1.0)) == {"r1": 1_024}
    assert scheduler.stats().slice_level == 1.0
