"""The largest gap shown beside the bound speaks of the rules in force, not of those before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router_ext.core.bounds import peak_service
from router_ext.core.events import Finished, Reconfigured
from router_ext.core.fairness.counters import Counters
from router_ext.core.ids import RequestId
from router_ext.core.scheduler import Scheduler
from tests.unit.core.builders import arrival, dispatched, pool, started, tokens

PROMPT, CAP = 100, 100


def play(scheduler: Scheduler, running: list[str], now: float, rounds: int) -> float:
    """Let every running request finish, and what starts instead, ``rounds`` times over."""
    for _ in range(rounds):
        for name in list(running):
            now += 0.1
            scheduler.handle(tokens(name, CAP), now)
            running.remove(name)
            running += dispatched(scheduler.handle(Finished(request_id=RequestId(name)), now))
    return now


def one_sided_fifo() -> tuple[Scheduler, list[str], float]:
    """Tenant a has been served alone, out of a queue of its own making, while b waits behind it."""
    scheduler = started(pool(kv=401, policy="fifo"))
    running: list[str] = []
    for tenant, count in (("a", 60), ("b", 60)):
        for number in range(count):
            event = arrival(f"{tenant}{number}", tenant=tenant, prompt=PROMPT, cap=CAP)
            running += dispatched(scheduler.handle(event, 1.0))
    return scheduler, running, play(scheduler, running, 1.0, 15)


def test_what_a_tenant_is_ahead_from_another_policy_is_no_gap_of_this_one() -> None:
    scheduler, running, now = one_sided_fifo()
    inherited = scheduler.stats().largest_gap_service
    scheduler.handle(Reconfigured(config=pool(kv=401, policy="slo-fair")), now)
    play(scheduler, running, now, 30)
    stats = scheduler.stats()
    assert stats.bound_service is not None
    assert inherited > stats.bound_service
    assert 0.0 < stats.largest_gap_service <= stats.bound_service


def test_a_gap_that_was_never_restarted_would_break_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test above."""
    monkeypatch.setattr(Counters, "restart_gap", lambda *_: None)
    scheduler, running, now = one_sided_fifo()
    scheduler.handle(Reconfigured(config=pool(kv=401, policy="slo-fair")), now)
    play(scheduler, running, now, 30)
    stats = scheduler.stats()
    assert stats.bound_service is not None
    assert stats.largest_gap_service > stats.bound_service


def test_a_configuration_with_the_same_rules_keeps_the_record() -> None:
    scheduler, running, now = one_sided_fifo()
    scheduler.handle(Reconfigured(config=pool(kv=401, policy="slo-fair")), now)
    play(scheduler, running, now, 30)
    before = scheduler.stats().largest_gap_service
    scheduler.handle(Reconfigured(config=pool(kv=401, policy="slo-fair", max_queued=77)), now + 100)
    assert scheduler.stats().largest_gap_service == before > 0.0


def counter(scheduler: Scheduler, tenant: str) -> float:
    return next(each.raw_counter for each in scheduler.stats().tenants if each.tenant == tenant)


def test_another_cost_model_makes_everybody_start_even() -> None:
    """Service counted in other units says nothing; kept, it would shut tenants out or in for hours."""
    before = pool(kv=2_001, cost_model="kv-token-time")
    after = replace(before, cost_model="linear")
    scheduler = started(before)
    for number in range(4):
        scheduler.handle(arrival(f"a{number}", "a", prompt=400, cap=600), 1.0)
    scheduler.handle(tokens("a0", 300), 2.0)
    scheduler.handle(arrival("b0", "b", prompt=900, cap=600), 2.0)
    assert counter(scheduler, "a") > 10 * peak_service(after)
    scheduler.handle(Reconfigured(config=after), 3.0)
    assert counter(scheduler, "a") == counter(scheduler, "b")
    scheduler.handle(tokens("a0", 10), 4.0)
    assert counter(scheduler, "a") - counter(scheduler, "b") == 20.0
    assert scheduler.audit() == []
