"""Who is refused on arrival because waiting would be in vain, and what hints those get who are refused."""

from __future__ import annotations

from typing import Any

import pytest

from router_ext.core.actions import Action, Reject, RejectCode
from router_ext.core.estimates import PredictionBias, ServiceRate
from router_ext.core.events import Finished
from router_ext.core.ids import RequestId, TenantId
from router_ext.core.scheduler import Scheduler
from tests.unit.core.builders import arrival, dispatched, pool, started, tokens

TIERS: list[dict[str, Any]] = [
    {"name": "chat", "rank": 1, "ttft_target_s": 2.0, "max_queue_wait_s": 4.0},
    {"name": "batch", "rank": 10, "max_queue_wait_s": 10.0},
    {"name": "night", "rank": 20},
]


def busy(
    policy: str = "slo-fair", *, seconds: float = 130.0, waiting: int = 30, **knobs: Any
) -> tuple[Scheduler, float]:
    """A backend that makes 20 tokens per second, for long enough to be known, with tenant a's night work waiting.

    Two requests of 100 tokens run at a time, and tenant b has nothing here.
    """
    scheduler = started(pool(kv=401, tiers=TIERS, policy=policy, **knobs))
    running: list[str] = []
    number = 0

    def refill(now: float) -> None:
        nonlocal number
        while scheduler.stats().queued < waiting:
            number += 1
            event = arrival(f"n{number}", "a", "night", predicted_output_tokens=100)
            running.extend(dispatched(scheduler.handle(event, now)))

    refill(0.0)
    produced = dict.fromkeys(running, 0)
    now = 0.0
    while now < seconds:
        now = round(now + 0.1, 3)
        for name in list(running):
            scheduler.handle(tokens(name, 1), now)
            produced[name] = produced.get(name, 0) + 1
            if produced[name] == 100:
                running.remove(name)
                running.extend(dispatched(scheduler.handle(Finished(request_id=RequestId(name)), now)))
        refill(now)
    return scheduler, now


def ask(scheduler: Scheduler, now: float, name: str, tenant: str, tier: str, **fields: Any) -> Reject | None:
    actions: list[Action] = scheduler.handle(arrival(name, tenant, tier, predicted_output_tokens=100, **fields), now)
    return next((action for action in actions if isinstance(action, Reject)), None)


def test_what_would_wait_longer_than_its_tier_allows_is_refused_with_the_time_to_come_back() -> None:
    """Both tenants wait, so b has half of 20 tokens per second: 100 tokens ahead are 10 s, 200 are 20 s."""
    scheduler, now = busy()
    assert ask(scheduler, now, "x0", "b", "batch") is None
    assert ask(scheduler, now, "x1", "b", "batch") is None
    refused = ask(scheduler, now, "x2", "b", "batch")
    assert refused is not None
    assert refused.code is RejectCode.DEADLINE_UNREACHABLE
    assert "the tier allows 10 s" in refused.detail
    assert refused.retry_after_s == pytest.approx(10.0, rel=0.2)
    assert scheduler.audit() == []


def test_nobody_is_refused_before_the_rate_is_known() -> None:
    scheduler, now = busy(seconds=8.0)
    for number in range(30):
        assert ask(scheduler, now, f"x{number}", "b", "batch") is None


def test_nobody_is_refused_by_what_an_idle_pool_delivers() -> None:
    """One request at a time makes few tokens per second; that says nothing of what the pool can do."""
    scheduler = started(pool(kv=10_001, tiers=TIERS))
    now = 0.0
    for number in range(40):
        scheduler.handle(arrival(f"n{number}", "a", "night", cap=10, predicted_output_tokens=10), now)
        for _ in range(10):
            now += 0.2
            scheduler.handle(tokens(f"n{number}", 1), now)
        scheduler.handle(Finished(request_id=RequestId(f"n{number}")), now)
    for number in range(300):
        assert ask(scheduler, now, f"x{number}", "b", "batch") is None


def test_an_urgent_request_inside_its_pass_is_never_refused_for_the_share_of_its_tenant() -> None:
    """Its tenant has the whole rate as far as it may pass: 60 tokens ahead are 3 s, not 6."""
    scheduler, now = busy()
    for number in range(4):
        assert ask(scheduler, now, f"x{number}", "b", "batch") is None or number >= 2
    assert ask(scheduler, now, "c0", "b", "chat") is None


def test_who_goes_first_is_not_refused() -> None:
    scheduler, now = busy(waiting=200)
    assert ask(scheduler, now, "x0", "b", "batch") is None
    # Another key of the same tenant is ahead of nobody of its own.
    assert ask(scheduler, now, "x1", "a", "batch") is None


def test_under_fifo_everybody_is_ahead() -> None:
    scheduler, now = busy("fifo", waiting=2)
    assert ask(scheduler, now, "x0", "b", "batch") is None
    scheduler, now = busy("fifo", waiting=10)
    refused = ask(scheduler, now, "x0", "b", "batch")
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(40.0, rel=0.1)


@pytest.mark.parametrize("policy", ["justitia", "equinox"])
def test_a_policy_that_cannot_tell_refuses_nobody(policy: str) -> None:
    scheduler, now = busy(policy)
    for number in range(20):
        assert ask(scheduler, now, f"x{number}", "b", "batch") is None


def test_the_drain_of_a_tenant_is_at_its_share_and_never_above_that_of_the_pool() -> None:
    scheduler, now = busy(waiting=20)
    scheduler.handle(arrival("x0", "b", "night", predicted_output_tokens=100), now)
    assert scheduler.drain_estimate() == pytest.approx(2_100 / 20, rel=0.1)
    assert scheduler.drain_estimate(TenantId("b")) == pytest.approx(100 / 10, rel=0.1)
    assert scheduler.drain_estimate(TenantId("a")) == pytest.approx(2_100 / 20, rel=0.1)
    assert scheduler.drain_estimate(TenantId("nobody")) == 0.0


def test_the_first_windows_of_a_rate_are_a_plain_mean() -> None:
    class Busy:
        num_running = 1

    rate = ServiceRate()
    for second in range(11):
        # Nothing in the first second, then 10 tokens and 20 of service in each.
        rate.tick(float(second), 20.0 * max(0, second - 1), 10 * max(0, second - 1), [Busy()])  # type: ignore[list-item]
    assert rate.measured_s == 10.0
    assert rate.tokens_per_backend_s == pytest.approx(9.0)
    assert rate.per_backend_s == pytest.approx(18.0)
    rate.idle()
    rate.tick(100.0, 10_000.0, 5_000, [Busy()])  # type: ignore[list-item]
    assert rate.per_backend_s == pytest.approx(18.0)


def test_the_bias_of_predictions_needs_twenty_requests() -> None:
    bias = PredictionBias()
    for _ in range(19):
        bias.finished(100, 50)
    assert bias.ratio is None
    bias.finished(100, 50)
    assert bias.ratio == pytest.approx(0.5)
    for _ in range(500):
        bias.finished(100, 200)
    assert bias.ratio == pytest.approx(2.0, rel=0.02)
