"""DLPM's choice among those whose deficit is positive, by what a backend has answered before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router_ext.core.events import Finished, Reconfigured, SliceEnded
from router_ext.core.fairness import dlpm as dlpm_module
from router_ext.core.ids import RequestId
from router_ext.core.scheduler import Scheduler
from tests.unit.core.builders import arrival, dispatched, pool, started, tokens

WARM, COLD = (1, 2, 3), (7, 8, 9)


def done(scheduler: Scheduler, name: str, now: float) -> list[str]:
    scheduler.handle(tokens(name), now)
    return dispatched(scheduler.handle(Finished(request_id=RequestId(name)), now))


def warm(**knobs: float) -> Scheduler:
    """One request at a time fits; the backend has answered ``WARM``, and ``z`` fills it for the moment."""
    config = pool(
        kv=701, policy="dlpm", tenants={"z": 1.0, "a": 1.0, "b": 1.0}, **{"dlpm_quantum_ratio": 10.0, **knobs}
    )
    scheduler = started(config)
    scheduler.handle(arrival("w", "z", prompt=200, cap=10, prefix=WARM), 0.0)
    done(scheduler, "w", 0.1)
    assert dispatched(scheduler.handle(arrival("z", "z", prompt=200, cap=290, prefix=WARM), 0.2)) == ["z"]
    return scheduler


def queue(scheduler: Scheduler, name: str, tenant: str, prefix: tuple[int, ...]) -> None:
    assert dispatched(scheduler.handle(arrival(name, tenant, prompt=200, cap=200, prefix=prefix), 0.3)) == []


def test_the_prompt_that_is_cached_goes_before_earlier_ones_of_its_tenant_and_of_others() -> None:
    scheduler = warm()
    for name, tenant, prefix in [("a1", "a", COLD), ("b1", "b", ()), ("b2", "b", WARM), ("a2", "a", WARM)]:
        queue(scheduler, name, tenant, prefix)
    # Line and ring: a1, b1. Of a, a2 is warm; b's first has no whole block, so b is not looked into.
    assert done(scheduler, "z", 1.0) == ["a2"]
    assert done(scheduler, "a2", 2.0) == ["a1"]


def test_a_small_quantum_leaves_the_turn_to_the_least_served() -> None:
    scheduler = warm(dlpm_quantum_ratio=0.001)
    for name, tenant, prefix in [("a1", "a", WARM), ("a2", "a", WARM), ("b1", "b", COLD)]:
        queue(scheduler, name, tenant, prefix)
    assert done(scheduler, "z", 1.0) == ["a1"]
    assert done(scheduler, "a1", 2.0) == ["b1"]


@pytest.mark.parametrize("is_reconfigured", [False, True])
def test_a_request_is_not_passed_over_for_ever(is_reconfigured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlpm_module, "_MAX_PASSED", 2)
    scheduler = warm()
    queue(scheduler, "cold", "a", COLD)
    for number in range(4):
        queue(scheduler, f"warm{number}", "a", WARM)
    assert done(scheduler, "z", 1.0) == ["warm0"]
    if is_reconfigured:
        scheduler.handle(Reconfigured(config=replace(scheduler.config, max_queued=99)), 1.5)
    assert done(scheduler, "warm0", 2.0) == ["warm1"]
    assert done(scheduler, "warm1", 3.0) == ["cold"]
    assert done(scheduler, "cold", 4.0) == ["warm2"]


def test_what_ran_before_goes_first_whatever_is_cached() -> None:
    scheduler = started(pool(kv=701, policy="dlpm", tenants={"a": 1.0}))
    scheduler.handle(arrival("w", prompt=200, cap=10, prefix=WARM), 0.0)
    done(scheduler, "w", 0.1)
    scheduler.handle(arrival("long", prompt=200, cap=400, prefix=COLD, slice_tokens=64), 0.2)
    scheduler.handle(arrival("warm", prompt=200, cap=400, prefix=WARM), 0.3)
    scheduler.handle(tokens("long", 64), 1.0)
    ended = SliceEnded(request_id=RequestId("long"), dropped_tokens=0, next_prompt_tokens=264)
    assert dispatched(scheduler.handle(ended, 1.0)) == ["long"]
