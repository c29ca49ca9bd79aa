"""What a router that was replaced knows of its requests is what the scheduler that decides for them knows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, precondition, run_state_machine_as_test

from router_ext.core.actions import Action, SetTimer
from router_ext.core.events import Event, Progressed, Stepped
from router_ext.gateway.leaving import Mirror, action_of, event_of, heir_of, occurrence_of, order_of, record_of
from router_ext.wire import handover
from router_ext.wire.handover import Happened, Hello, Left, LeftPool, LeftRequest, Moved, Occurrence, Order, Take, Told
from tests.property.test_machine import SchedulerMachine

# Ages are counted by another clock; the rest only the scheduler knows.
_UNTOLD = (
    "age_s",
    "running_s",
    "paid_cached",
    "has_paid_stall",
    "is_suspect",
    "predicted_output_tokens",
    "was_suspect",
)


class MirroredMachine(SchedulerMachine):
    """Whatever happens goes over the wire before it comes to the scheduler, as every decision does on its way back."""

    mirror_type: type[Mirror] = Mirror

    def __init__(self) -> None:
        super().__init__()
        self.mirror = self.mirror_type(lambda: self.now)

    def send(self, event: Event) -> None:
        # A router tells of each request by itself.
        steps = event.tokens if isinstance(event, Stepped) else ()
        for each in [Progressed(request_id=name, output_tokens=count) for name, count in steps] or [event]:
            said = self.mirror.happened(each)
            if said is not None and occurrence_of(each) is not None:
                assert event_of(said) == each
        super().send(event)

    def carry_out(self, action: Action) -> None:
        if not isinstance(action, SetTimer):
            order = order_of(action)
            assert action_of(order) == action
            self.mirror.told(order)
        super().carry_out(action)

    @precondition(lambda self: hasattr(self, "scheduler"))
    @invariant()
    def both_say_the_same(self) -> None:
        standings, _ = self.scheduler.leave(self.now)
        assert self.facts(record_of(self.specs[s.request_id], s) for s in standings) == self.facts(
            self.mirror.requests()
        )

    def facts(self, records: Any) -> dict[str, dict[str, Any]]:
        found = {}
        for record in records:
            fields = {name: value for name, value in msgspec.structs.asdict(record).items() if name not in _UNTOLD}
            # The machine corrects what it knows of a prompt; the mirror keeps what arrived.
            del fields["prompt_tokens"]
            if not fields["is_sliceable"]:
                del fields["slice_tokens"]  # an order names what is left, which is what such a request reserves
            found[record.request_id] = fields
        return found


def run(machine: type[MirroredMachine], examples: int = 40) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_mirror_follows_every_event_and_every_order() -> None:
    run(MirroredMachine)


class Forgetful(Mirror):
    """Does not take back what a slice's end has dropped."""

    def _wait(self, entry: Any, said: Occurrence) -> None:
        super()._wait(entry, msgspec.structs.replace(said, dropped_tokens=0))


def test_a_mirror_that_misses_something_is_found_out() -> None:
    mutant = type("Mutant", (MirroredMachine,), {"mirror_type": Forgetful})
    with pytest.raises(AssertionError):
        run(mutant, examples=100)


# --- the wire ---------------------------------------------------------------------------------------------------------

REQUEST = LeftRequest(
    request_id="evt_1",
    tenant="ten_a",
    key="key_a",
    tier="chat",
    prompt_tokens=10,
    max_new_tokens=20,
    quantiles=[1, 2, 3, 4, 5, 6, 7],
    backend="bke_a",
    slice_tokens=16,
)
MESSAGES = [
    Hello(pid=7),
    Moved(pid=7, folder="leaving-7", up={"pol_a": ["bke_a"]}, has_admin=True),
    Take(),
    Left(pools={"pol_a": LeftPool(counters={"version": 1}, requests=[REQUEST])}),
    Happened(pool="pol_a", events=[Occurrence(kind="arrived", request_id="evt_1", arrival=REQUEST)]),
    Told(pool="pol_a", orders=[Order(kind="dispatch", request_id="evt_1", backend="bke_a", slice_tokens=16)]),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire_and_may_have_fields_of_another_version(message: handover.Message) -> None:
    frame = handover.encode(message)
    assert handover.frame_length(frame[:4]) == len(frame) - 4
    assert handover.decode(frame[4:]) == message
    later = {**msgspec.msgpack.decode(frame[4:]), "invented": {"later": [1]}}
    assert handover.decode(msgspec.msgpack.encode(later)) == message


def test_a_message_without_the_fields_that_came_later_has_their_defaults() -> None:
    least = {"request_id": "r", "tenant": "t", "key": "k", "tier": "c", "prompt_tokens": 3, "max_new_tokens": 4}
    body = msgspec.msgpack.encode({"is": "left", "pools": {"p": {"requests": [least]}}})
    left = handover.decode(body)
    assert isinstance(left, Left)
    (request,) = left.pools["p"].requests
    assert heir_of(request).request.max_new_tokens == 4


def test_a_kind_of_another_version_is_skipped_and_nonsense_is_not() -> None:
    assert handover.decode(msgspec.msgpack.encode({"is": "invented", "at": 1})) is None
    for body in (b"", b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"is": "told"})):
        with pytest.raises(ValueError, match="not a message"):
            handover.decode(body)
    with pytest.raises(ValueError, match="a frame of"):
        handover.frame_length(b"\xff\xff\xff\xff")
    assert event_of(Occurrence(kind="invented", request_id="evt_1")) is None
    assert action_of(Order(kind="invented", request_id="evt_1")) is None
