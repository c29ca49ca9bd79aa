"""What became of a request, step by step."""

from __future__ import annotations

from router_ext.core.events import Cancelled, Failed, Finished, SliceEnded
from router_ext.core.ids import RequestId
from router_ext.core.scheduler import Scheduler
from router_ext.core.timeline import Moment
from tests.unit.core.builders import arrival, down, pool, started, tokens, up

R0 = RequestId("r0")


def steps(scheduler: Scheduler, name: str = "r0") -> list[tuple[float, str, str | None, int]]:
    return [(m.at_s, m.step.value, m.backend, m.tokens) for m in scheduler.timeline(RequestId(name))]


def test_a_request_that_is_sliced_fails_over_and_ends() -> None:
    scheduler = started(pool(kv=[1_001, 1_001]))
    scheduler.handle(arrival("r0", prompt=100, cap=300, slice_tokens=100), 10.0)
    scheduler.handle(tokens("r0", 1), 11.0)
    scheduler.handle(tokens("r0", 99), 12.0)
    scheduler.handle(SliceEnded(request_id=R0, dropped_tokens=2, next_prompt_tokens=198), 13.0)
    scheduler.handle(tokens("r0", 5), 14.0)
    scheduler.handle(Failed(request_id=R0, is_retryable=True, dropped_tokens=0, next_prompt_tokens=203), 15.0)
    scheduler.handle(tokens("r0", 20), 16.0)
    scheduler.handle(Finished(request_id=R0), 17.0)
    assert steps(scheduler) == [
        (0.0, "queued", None, 0),
        (0.0, "dispatched", "bke_0", 300),
        (1.0, "first_token", "bke_0", 1),
        (3.0, "slice_ended", "bke_0", 98),
        (3.0, "dispatched", "bke_0", 202),
        (5.0, "retried", "bke_0", 103),
        (5.0, "dispatched", "bke_1", 197),
        (7.0, "finished", None, 123),
    ]
    texts = [moment.text for moment in scheduler.timeline(R0)]
    assert "of 2 backends where it could start the one with the least prompts to process" in texts[1]
    assert "goes on: its slice ended here, where its prompt is still held" in texts[4]
    assert "of 2 backends" in texts[6]


def test_a_request_says_why_it_went_where_its_prompt_was_cached() -> None:
    scheduler = started(pool(kv=[5_001, 5_001]))
    chain = tuple(range(1, 9))
    scheduler.handle(arrival("r0", prompt=600, cap=50, prefix=chain), 1.0)
    scheduler.handle(tokens("r0", 1), 2.0)
    scheduler.handle(Finished(request_id=R0), 3.0)
    scheduler.handle(arrival("r1", prompt=600, cap=50, prefix=chain), 4.0)
    placed = scheduler.timeline(RequestId("r1"))[1]
    assert placed.backend == "bke_0"
    assert "of 2 backends where it could start the one that holds most of its prompt" in placed.text
    assert "tokens of its input were cached there" in placed.text


def test_waiting_for_a_backend_large_enough_is_told() -> None:
    scheduler = started(pool(kv=[301, 1_001]))
    scheduler.handle(down("bke_1"), 1.0)
    scheduler.handle(arrival("r0", prompt=600, cap=100), 2.0)
    scheduler.handle(up("bke_1"), 5.0)
    assert [step[1] for step in steps(scheduler)] == ["queued", "parked", "unparked", "dispatched"]
    assert "the only backend where it could start" in scheduler.timeline(R0)[-1].text


def test_a_client_that_leaves_and_a_request_nobody_knows() -> None:
    scheduler = started(pool(kv=301))
    scheduler.handle(arrival("r0", prompt=200, cap=100), 1.0)
    scheduler.handle(arrival("r1", prompt=200, cap=100), 1.0)
    scheduler.handle(Cancelled(request_id=RequestId("r1")), 3.0)
    assert [step[:2] for step in steps(scheduler, "r1")] == [(0.0, "queued"), (2.0, "cancelled")]
    assert scheduler.timeline(RequestId("nobody")) == []


def test_of_many_steps_the_first_and_the_last_are_kept() -> None:
    scheduler = started(pool(kv=2_001, max_slice_tokens=1, min_slice_tokens=1))
    scheduler.handle(arrival("r0", prompt=100, cap=100, slice_tokens=1), 0.0)
    for number in range(1, 100):
        scheduler.handle(tokens("r0", 1), float(number))
        scheduler.handle(SliceEnded(request_id=R0, dropped_tokens=0, next_prompt_tokens=100 + number), float(number))
    scheduler.handle(tokens("r0", 1), 100.0)
    scheduler.handle(Finished(request_id=R0), 100.0)
    moments: list[Moment] = scheduler.timeline(R0)
    assert len(moments) == 32
    assert (moments[0].step, moments[-1].step, moments[-1].tokens) == ("queued", "finished", 100)
    # 1 arrival, 100 dispatches, 1 first token, 99 slice ends, 1 end.
    assert "(170 steps before this one are not kept)" in moments[24].text
