"""Going on in place: a request whose slice has just ended starts the next one where its prompt is still held."""

from __future__ import annotations

import pytest

from router_ext.core.actions import Action, Dispatch
from router_ext.core.admission import Gates
from router_ext.core.events import Finished, SliceEnded
from router_ext.core.explain import Gate
from router_ext.core.ids import BackendId, RequestId
from router_ext.core.scheduler import Scheduler
from tests.unit.core.builders import arrival, dispatched, pool, started, tokens


def end_slice(scheduler: Scheduler, name: str, next_prompt: int, now: float) -> list[Action]:
    event = SliceEnded(request_id=RequestId(name), dropped_tokens=0, next_prompt_tokens=next_prompt)
    return scheduler.handle(event, now)


def crowded(policy: str = "slo-fair") -> Scheduler:
    """r0 of a has written its slice of 50, and b is in turn with q0, which does not fit."""
    scheduler = started(pool(policy=policy, max_preemptions=0))
    scheduler.handle(arrival("f0", "b", prompt=100, cap=500), 0.0)
    scheduler.handle(arrival("f1", "b", prompt=20, cap=300), 0.0)
    scheduler.handle(arrival("r0", "a", prompt=100, cap=300, slice_tokens=50), 0.1)
    scheduler.handle(arrival("q0", "b", prompt=850, cap=90), 0.2)
    assert dispatched(scheduler.handle(Finished(request_id=RequestId("f1")), 0.3)) == ["r0"]
    scheduler.handle(tokens("r0", 50), 1.0)
    return scheduler


def test_it_goes_ahead_of_whoever_is_in_turn() -> None:
    scheduler = crowded()
    actions = end_slice(scheduler, "r0", 150, 2.0)
    assert [(a.request_id, a.slice_tokens) for a in actions if isinstance(a, Dispatch)] == [("r0", 50)]
    assert "goes on" in scheduler.timeline(RequestId("r0"))[-1].text
    assert scheduler.audit() == []


def test_what_it_was_sent_before_is_no_work_for_its_backend() -> None:
    scheduler = crowded()
    backend = scheduler._fleet.backends[BackendId("bke_0")]
    scheduler.handle(tokens("f0"), 1.5)
    before = backend.prefill_tokens
    end_slice(scheduler, "r0", 150, 2.0)
    assert backend.prefill_tokens == before + 50


def test_no_other_policy_lets_anybody_go_ahead() -> None:
    """There the one in turn, who does not fit, is waited for."""
    assert dispatched(end_slice(crowded("vtc"), "r0", 150, 2.0)) == []


def test_it_stands_back_for_the_urgent() -> None:
    """A head that can still be on time takes what the slice leaves."""
    scheduler = crowded()
    scheduler.handle(arrival("u0", "b", "chat", prompt=300, cap=90), 1.9)
    assert dispatched(end_slice(scheduler, "r0", 150, 2.0)) == ["u0"]


def test_fresh_work_leaves_kv_to_those_that_will_go_on() -> None:
    """A tenth of what runs, at what slices go on with; nothing where answers end with their slices."""
    scheduler = crowded()
    backend = scheduler._fleet.backends[BackendId("bke_0")]
    scheduler.handle(tokens("f0"), 1.5)
    request = scheduler._requests[RequestId("q0")]
    gates, free, usable = Gates(headroom_ratio=0.0, is_on=True), backend.ledger.free_blocks, [backend]
    assert gates.check(backend, request, free, usable) is Gate.NONE
    for _ in range(200):
        gates.note_slice_end(400)
    assert gates.headroom_blocks(backend) == pytest.approx(0.1 * backend.num_running * 400, abs=1)
    assert gates.check(backend, request, free, usable) is Gate.HEADROOM
    assert gates.check(backend, request, free, usable, is_onward=True) is Gate.NONE
    for _ in range(400):
        gates.note_slice_end(0)
    assert gates.headroom_blocks(backend) <= 1
