"""Counters that survive a restart: what is saved, and what is believed of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router_ext.core.events import Cancelled, Finished, Reconfigured
from router_ext.core.ids import RequestId
from router_ext.core.saved import SETTLE_S
from router_ext.core.scheduler import Scheduler
from tests.unit.core.builders import arrival, dispatched, pool, started, tokens
from tests.unit.core.test_lanes import keyed

CONFIG = pool(kv=401, policy="slo-fair", tenants={"a": 1.0, "b": 2.0, "c": 1.0})


def counters(scheduler: Scheduler) -> dict[str, float]:
    return {str(tenant.tenant): tenant.raw_counter for tenant in scheduler.stats().tenants}


def of(tenants: dict[str, Any]) -> dict[str, Any]:
    """A saved state that says this of tenants."""
    return {"version": 1, "cost_model": "linear", "tenants": tenants}


def one_ahead() -> Scheduler:
    """Both wait, b was lifted to the 100 that a had received; then a received 2 * 50 more."""
    scheduler = started(CONFIG)
    for name in ("a0", "a1", "a2"):
        scheduler.handle(keyed(arrival(name, prompt=100, cap=200), "key_a"), 1.0)
    scheduler.handle(keyed(arrival("b0", tenant="b", prompt=100, cap=200), "key_b"), 1.0)
    scheduler.handle(tokens("a0", 50), 2.0)
    return scheduler


def restored(saved: Any, now: float = 5.0) -> tuple[Scheduler, list[str]]:
    scheduler = started(CONFIG)
    return scheduler, scheduler.restore(saved, now)


def test_only_differences_to_the_floor_are_saved_and_only_of_those_ahead() -> None:
    scheduler = one_ahead()
    saved = json.loads(json.dumps(scheduler.save()))
    assert saved == {"version": 1, "cost_model": "linear", "groups": {}, "tenants": {"a": {"ahead": 100.0}}}
    other, reasons = restored(saved)
    assert reasons == []
    assert counters(other) == {"a": 100.0, "b": 0.0, "c": 0.0}


def test_the_differences_do_not_depend_on_where_the_floor_is() -> None:
    first = one_ahead()
    again, _ = restored(of({name: {"ahead": 7_000.0} for name in "abc"}))
    for event in (
        keyed(arrival("a0", prompt=100, cap=200), "key_a"),
        keyed(arrival("a1", prompt=100, cap=200), "key_a"),
        keyed(arrival("a2", prompt=100, cap=200), "key_a"),
        keyed(arrival("b0", tenant="b", prompt=100, cap=200), "key_b"),
        tokens("a0", 50),
    ):
        again.handle(event, 5.0 + SETTLE_S)
    saved = again.save()["tenants"]
    assert saved["a"]["ahead"] == first.save()["tenants"]["a"]["ahead"]
    assert "b" not in saved


def test_who_was_ahead_waits_for_those_who_were_behind_also_if_it_comes_back_first() -> None:
    scheduler, _ = restored(one_ahead().save())
    names = [
        *dispatched(scheduler.handle(arrival("a0", prompt=200, cap=200), 6.0)),
        *dispatched(scheduler.handle(arrival("a1", prompt=200, cap=200), 6.0)),
        *dispatched(scheduler.handle(arrival("b0", tenant="b", prompt=200, cap=200), 6.0)),
    ]
    assert names == ["a0"]
    assert dispatched(scheduler.handle(Finished(request_id=RequestId("a0")), 7.0)) == ["b0"]


def test_after_a_minute_who_comes_back_is_lifted_as_ever() -> None:
    scheduler, _ = restored(one_ahead().save())
    late = 5.0 + SETTLE_S
    scheduler.handle(arrival("a0", prompt=200, cap=200), late)
    scheduler.handle(arrival("a1", prompt=200, cap=200), late)
    scheduler.handle(arrival("b0", tenant="b", prompt=200, cap=200), late)
    assert counters(scheduler)["b"] == counters(scheduler)["a"] == 300.0
    assert dispatched(scheduler.handle(Finished(request_id=RequestId("a0")), late)) == ["a1"]


def test_keys_keep_their_order_inside_their_tenant() -> None:
    scheduler = started(CONFIG)
    scheduler.handle(keyed(arrival("a0", prompt=100, cap=200), "key_a"), 1.0)
    for name, key in (("a1", "key_a"), ("b1", "key_b")):
        scheduler.handle(keyed(arrival(name, prompt=200, cap=200), key), 1.0)
    scheduler.handle(tokens("a0", 50), 2.0)
    saved = scheduler.save()
    assert saved["tenants"]["a"]["keys"] == {"batch": {"key_a": 100.0}}
    other, reasons = restored(saved)
    assert reasons == []
    other.handle(keyed(arrival("a0", prompt=200, cap=200), "key_a"), 6.0)
    other.handle(keyed(arrival("a1", prompt=200, cap=200), "key_a"), 6.0)
    other.handle(keyed(arrival("b1", prompt=200, cap=200), "key_b"), 6.0)
    assert dispatched(other.handle(Finished(request_id=RequestId("a0")), 7.0)) == ["b1"]


def test_a_second_restart_before_all_are_back_loses_nothing() -> None:
    saved = one_ahead().save()
    scheduler, _ = restored(saved)
    assert scheduler.save() == saved
    scheduler.handle(arrival("a0", prompt=200, cap=200), 6.0)
    scheduler.handle(arrival("a1", prompt=200, cap=200), 6.0)
    assert scheduler.save() == saved


@pytest.mark.parametrize(
    ("saved", "reason"),
    [
        (None, "saved counters are not of version 1"),
        ({"version": 2, "tenants": {}}, "saved counters are not of version 1"),
        ({"version": 1, "cost_model": "linear"}, "saved counters name no tenants"),
        ({"version": 1, "cost_model": "step-time", "tenants": {}}, "in units of 'step-time'"),
        (of({}) | {"groups": {"x": 1.0}}, "group 'x' is not configured"),
        (of({}) | {"groups": 7}, "saved groups are not an object"),
        (of({"a": {"ahead": 9.0, "group": "x"}}), "tenant 'a': was ahead in group 'x', is in None"),
        (of({"z": {"ahead": 5.0}}), "tenant 'z' is not configured"),
        (of({"a": 5.0}), "tenant 'a': not an object"),
        (
            {"version": 1, "cost_model": "linear", "tenants": {"a": {"ahead": float("nan")}}},
            "nan is not a number from 0",
        ),
        (
            {"version": 1, "cost_model": "linear", "tenants": {"a": {"ahead": float("inf")}}},
            "inf is not a number from 0",
        ),
        (of({"a": {"ahead": 1e30}}), "1e+30 is not a number from 0"),
        (of({"a": {"ahead": -1.0}}), "-1.0 is not a number from 0"),
        (of({"a": {"ahead": True}}), "True is not a number from 0"),
        (of({"a": {"ahead": "12"}}), "'12' is not a number from 0"),
        (of({"a": {}}), "None is not a number from 0"),
        (
            {"version": 1, "cost_model": "linear", "tenants": {"a": {"ahead": 1.0, "keys": 3}}},
            "tenant 'a': keys are not an object",
        ),
        (
            {"version": 1, "cost_model": "linear", "tenants": {"a": {"ahead": 1.0, "keys": {"x": {}}}}},
            "tier 'x' is not configured",
        ),
        (
            {"version": 1, "cost_model": "linear", "tenants": {"a": {"ahead": 1.0, "keys": {"batch": 1}}}},
            "tier 'batch': not an object",
        ),
        (
            {"version": 1, "cost_model": "linear", "tenants": {"a": {"ahead": 1.0, "keys": {"batch": {"k": -2}}}}},
            "key 'k': -2 is not",
        ),
    ],
)
def test_what_is_not_a_counter_is_ignored_and_named(saved: Any, reason: str) -> None:
    scheduler, reasons = restored(saved)
    assert len(reasons) == 1
    assert reason in reasons[0]
    assert set(counters(scheduler).values()) <= {0.0, 1.0}
    assert scheduler.audit() == []


def test_a_damaged_entry_spoils_no_other() -> None:
    scheduler, reasons = restored(
        {"version": 1, "cost_model": "linear", "tenants": {"a": {"ahead": "x"}, "b": {"ahead": 30.0}}}
    )
    assert len(reasons) == 1
    assert counters(scheduler) == {"a": 0.0, "b": 30.0, "c": 0.0}


def test_many_reasons_are_counted_instead_of_listed() -> None:
    _, reasons = restored(
        {"version": 1, "cost_model": "linear", "tenants": {f"t{number}": {} for number in range(500)}}
    )
    assert len(reasons) == 21
    assert reasons[-1] == "and 480 more"


def test_counters_cannot_be_restored_once_a_request_has_arrived() -> None:
    scheduler = started(CONFIG)
    scheduler.handle(arrival("a0"), 1.0)
    scheduler.handle(Cancelled(request_id=RequestId("a0")), 1.0)
    with pytest.raises(ValueError, match="before the first request"):
        scheduler.restore(of({}), 2.0)


def test_a_gap_from_before_the_restart_is_not_shown_as_one_of_the_rules_in_force() -> None:
    scheduler, _ = restored(of({"a": {"ahead": 1e6}}))
    scheduler.handle(arrival("a0", prompt=200, cap=200), 6.0)
    for name in ("b0", "b1"):
        scheduler.handle(arrival(name, tenant="b", prompt=200, cap=200), 6.0)
    scheduler.handle(arrival("a1", prompt=200, cap=200), 6.0)
    assert scheduler.stats().largest_gap_service == 0.0
    scheduler.handle(arrival("a2", prompt=200, cap=200), 6.0 + SETTLE_S)
    scheduler.handle(Reconfigured(config=CONFIG), 7.0 + SETTLE_S)
    stats = scheduler.stats()
    assert stats.bound_service is not None
    assert stats.largest_gap_service <= stats.bound_service


def test_beyond_the_limit_those_furthest_ahead_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router_ext.core.saved._MAX_TENANTS", 2)
    scheduler, _ = restored(of({"a": {"ahead": 1.0}, "b": {"ahead": 3.0}, "c": {"ahead": 2.0}}))
    assert scheduler.save()["tenants"] == {"b": {"ahead": 3.0}, "c": {"ahead": 2.0}}


def test_agents_keep_their_place_among_the_keys() -> None:
    saved = of({"a": {"ahead": 0.0, "agents": {"batch": 500.0}, "keys": {"batch": {"key_a": 200.0}}}})
    scheduler, reasons = restored(saved)
    assert reasons == []
    assert scheduler.save()["tenants"] == saved["tenants"]
    scheduler.handle(arrival("x0", agent_id="x", prompt=200, cap=200), 6.0)
    scheduler.handle(arrival("x1", agent_id="x", prompt=200, cap=200), 6.0)
    scheduler.handle(keyed(arrival("k0", prompt=200, cap=200), "key_a"), 6.0)
    assert dispatched(scheduler.handle(Finished(request_id=RequestId("x0")), 7.0)) == ["k0"]
