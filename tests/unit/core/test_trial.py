"""Suspects wait for their trial outside the queues, in nobody's way, and a pool loses one backend at a time to them."""

from __future__ import annotations

import pytest

from router_ext.core.books import Books
from router_ext.core.events import Cancelled, Failed, Finished, TimerFired
from router_ext.core.ids import RequestId
from router_ext.core.scheduler import Scheduler
from router_ext.core.trial import RECOVERY_S
from tests.unit.core.builders import arrival, dispatched, down, pool, said, started, tokens, up
from tests.unit.core.test_exposure import audited, failed, on


def on_trial() -> Scheduler:
    """``s1`` is being tried on one of three backends, ``s2`` of the same tenant waits for that."""
    scheduler = started(pool(kv=[1_001, 1_001, 1_001]))
    for name in ("s1", "s2"):
        scheduler.handle(arrival(name, is_suspect=True), 0.0)
    return scheduler


def ended(name: str) -> Finished:
    return Finished(request_id=RequestId(name))


def test_nobody_waits_behind_a_suspect_that_waits() -> None:
    scheduler = on_trial()
    assert len(on(scheduler.handle(arrival("plain"), 0.1))) == 1
    audited(scheduler)
    assert dispatched(scheduler.handle(tokens("plain"), 0.2)) == []
    assert scheduler.stats().queued == 1
    assert dispatched(scheduler.handle(tokens("s1"), 0.3)) == ["s2"]
    assert any("tried one at a time before it" in sentence for sentence in said(scheduler, "s2"))
    assert [moment.step for moment in scheduler.timeline(RequestId("s2"))][:3] == ["queued", "held", "tried"]
    audited(scheduler)


def test_in_line_it_would_keep_its_tenant_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test above: what held suspects would do in a queue."""
    monkeypatch.setattr(Books, "_hold", lambda self, request, now: self._come_back([request]))
    assert dispatched(on_trial().handle(arrival("plain"), 0.1)) == []


def test_who_was_there_when_a_backend_fell_goes_before_who_is_only_watched() -> None:
    scheduler = on_trial()
    scheduler.handle(arrival("mate", "b"), 0.1)
    assert dispatched(scheduler.handle(failed("mate"), 0.2)) == []
    assert dispatched(scheduler.handle(tokens("s1"), 0.3)) == ["mate"]
    assert dispatched(scheduler.handle(tokens("mate"), 0.4)) == ["s2"]
    audited(scheduler)


@pytest.mark.parametrize("how", ["back", "late"])
def test_a_pool_loses_one_backend_at_a_time_to_who_is_only_watched(how: str) -> None:
    scheduler = on_trial()
    scheduler.handle(down("bke_0"), 1.0)
    actions = scheduler.handle(Failed(request_id=RequestId("s1"), is_retryable=False), 1.0)
    assert dispatched(actions) == [], "two backends are up, and stay so"
    scheduler.handle(arrival("mate", "b"), 1.1)
    assert dispatched(scheduler.handle(failed("mate"), 1.2)) == ["mate"], "others are not kept waiting for that"
    scheduler.handle(tokens("mate"), 1.3)
    audited(scheduler)
    assert dispatched(scheduler.handle(TimerFired(), RECOVERY_S)) == []
    event = up("bke_0") if how == "back" else TimerFired()
    assert dispatched(scheduler.handle(event, RECOVERY_S + 1.0)) == ["s2"]
    audited(scheduler)


def test_a_backend_that_falls_under_others_stops_no_trial() -> None:
    scheduler = on_trial()
    (tried,) = on(scheduler.handle(arrival("plain"), 0.1)).values()
    scheduler.handle(down(tried), 0.2)
    assert dispatched(scheduler.handle(tokens("s1"), 0.3)) == ["s2"]


@pytest.mark.parametrize("gone", ["s1", "s2"])
def test_a_client_that_leaves_leaves_no_trial_behind(gone: str) -> None:
    scheduler = on_trial()
    scheduler.handle(arrival("s3", is_suspect=True), 0.0)
    scheduler.handle(Cancelled(request_id=RequestId(gone)), 0.1)
    audited(scheduler)
    for name in ("s1", "s2", "s3"):
        scheduler.handle(tokens(name), 5.0)
        scheduler.handle(ended(name), 5.1)
        audited(scheduler)
        scheduler.handle(TimerFired(), 9.0)
    assert (scheduler.stats().queued, scheduler.stats().running) == (0, 0)


def test_a_suspect_that_nobody_could_hold_gives_its_trial_up() -> None:
    scheduler = started(pool(kv=[1_001, 4_001]))
    scheduler.handle(down("bke_1"), 0.0)
    scheduler.handle(arrival("s1", is_suspect=True), 0.1)
    scheduler.handle(up("bke_1"), 0.2)
    scheduler.handle(arrival("large", prompt=2_000, is_suspect=True), 0.3)
    scheduler.handle(arrival("s2", "b", is_suspect=True), 0.3)
    scheduler.handle(down("bke_1"), 0.4)
    audited(scheduler)
    assert scheduler.stats().parked == 0
    assert dispatched(scheduler.handle(tokens("s1"), 0.5)) == ["s2"]
    assert scheduler.stats().parked == 1
    audited(scheduler)
    scheduler.handle(tokens("s2"), 0.6)
    assert dispatched(scheduler.handle(up("bke_1"), 0.7)) == ["large"]
    audited(scheduler)
