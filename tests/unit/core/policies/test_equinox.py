"""Equinox's two counters: charges, settlement and latency, by what is dispatched next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from router_ext.core.config import ConfigError
from router_ext.core.events import Arrived, Cancelled, Finished, Reconfigured, TimerFired
from router_ext.core.ids import RequestId
from router_ext.core.scheduler import Scheduler
from tests.unit.core.builders import arrival, dispatched, pool, started, tokens

SERVICE_ALONE = {"equinox_alpha": 1.0, "equinox_delta": 0.0}


def filler(name: str, tenant: str, predicted: int = 110) -> Arrived:
    """A request that fills the pool: 290 prompt tokens and at most 110 more."""
    return arrival(name, tenant, prompt=290, cap=110, predicted_output_tokens=predicted)


def race(*waiting: Arrived, **knobs: Any) -> Scheduler:
    """While ``z1`` runs, these queue up, all with equal counters; it ends at 1 s."""
    scheduler = started(pool(kv=401, policy="equinox", tenants={"z": 1.0, "a": 1.0, "b": 1.0}, **knobs))
    for request in (filler("z1", "z"), *waiting):
        scheduler.handle(request, 0.0)
    return scheduler


def done(scheduler: Scheduler, name: str, output: int, now: float) -> list[str]:
    """The request ends with so much output; who starts."""
    if output:
        scheduler.handle(tokens(name, output), now)
    return dispatched(scheduler.handle(Finished(request_id=RequestId(name)), now))


@pytest.mark.parametrize("predicted", [1, 30, 110])
@pytest.mark.parametrize(("output", "then"), [(25, "b2"), (35, "a2")])
def test_counters_after_completion_do_not_depend_on_the_prediction(predicted: int, output: int, then: str) -> None:
    scheduler = race(filler("a1", "a", predicted), filler("b1", "b"), *after(), **SERVICE_ALONE)
    assert done(scheduler, "z1", 10, 1.0) == ["a1"]
    assert done(scheduler, "a1", 30, 2.0) == ["b1"]
    assert done(scheduler, "b1", output, 3.0) == [then]


def after() -> list[Arrived]:
    return [filler("a2", "a"), filler("b2", "b"), filler("a3", "a"), filler("b3", "b")]


def test_output_beyond_the_prediction_is_charged_as_it_comes() -> None:
    scheduler = started(pool(kv=801, policy="equinox", tenants={"z": 1.0, "a": 1.0, "b": 1.0}, **SERVICE_ALONE))
    for request in (
        arrival("z1", "z", prompt=700, cap=100),
        arrival("a1", "a", prompt=10, cap=390, predicted_output_tokens=1),
        arrival("b1", "b", prompt=50, cap=350, predicted_output_tokens=1),
        *after(),
    ):
        scheduler.handle(request, 0.0)
    assert done(scheduler, "z1", 10, 1.0) == ["a1", "b1"]
    scheduler.handle(tokens("a1", 200), 2.0)
    # 10 + 4 * 200 of a are known already, 50 of b.
    assert done(scheduler, "b1", 0, 3.0) == ["b2"]


def test_a_cancelled_request_is_charged_for_what_was_delivered_only() -> None:
    scheduler = race(filler("a1", "a"), filler("b1", "b"), *after(), **SERVICE_ALONE)
    done(scheduler, "z1", 10, 1.0)
    scheduler.handle(Cancelled(request_id=RequestId("a1")), 2.0)
    assert dispatched(scheduler.handle(TimerFired(), 9.0)) == ["b1"]
    # a was charged 290, b is charged 290 + 4 * 10.
    assert done(scheduler, "b1", 10, 10.0) == ["a2"]


@pytest.mark.parametrize(("delta", "then"), [(0.0, "a2"), (0.5, "b2")])
def test_a_tenant_that_had_to_wait_is_charged_less(delta: float, then: str) -> None:
    scheduler = race(filler("a1", "a"), filler("b1", "b"), *after(), equinox_alpha=1.0, equinox_delta=delta)
    done(scheduler, "z1", 10, 1.0)
    assert done(scheduler, "a1", 100, 11.0) == ["b1"]
    assert done(scheduler, "b1", 100, 21.0) == [then]


def test_the_resource_counter_favours_whose_work_is_slow() -> None:
    scheduler = race(filler("a1", "a"), filler("b1", "b"), *after(), equinox_alpha=0.0)
    assert done(scheduler, "z1", 100, 1.0) == ["a1"]
    assert done(scheduler, "a1", 100, 1.1) == ["b1"]
    assert done(scheduler, "b1", 100, 11.1) == ["b2"]
    assert done(scheduler, "b2", 100, 21.1) == ["b3"]


def test_a_change_of_configuration_keeps_what_running_requests_were_charged() -> None:
    scheduler = race(filler("a1", "a"), filler("b1", "b"), *after(), **SERVICE_ALONE)
    done(scheduler, "z1", 10, 1.0)
    config = replace(scheduler.config, max_queued=50)
    scheduler.handle(Reconfigured(config=config), 1.5)
    assert done(scheduler, "a1", 10, 2.0) == ["b1"]
    assert done(scheduler, "b1", 25, 3.0) == ["a2"]


@pytest.mark.parametrize(
    ("knob", "value"), [("equinox_alpha", 1.5), ("equinox_delta", -0.1), ("equinox_w_output", 0.0)]
)
def test_knobs_out_of_range_are_refused(knob: str, value: float) -> None:
    with pytest.raises(ConfigError, match=knob):
        pool(policy="equinox", **{knob: value})
