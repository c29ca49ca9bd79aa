"""States of a request inside the scheduler and the one table of legal transitions.

The diagram in the documentation is ``diagram()``; it is rendered from the table, so it cannot disagree with it.
A request leaves the scheduler in exactly one terminal state.
"""

from __future__ import annotations

import enum


class State(enum.IntEnum):
    """Where a request is. ``PREEMPTING``: told to stop, still running. ``REJECTED`` requests were never queued."""

    NEW = 0
    QUEUED = 1
    PREFILLING = 2
    DECODING = 3
    PREEMPTING = 4
    FINISHED = 5
    FAILED = 6
    CANCELLED = 7
    EXPIRED = 8
    REJECTED = 9

    @property
    def is_terminal(self) -> bool:
        return self >= State.FINISHED

    @property
    def is_running(self) -> bool:
        return State.PREFILLING <= self <= State.PREEMPTING


class Trigger(enum.IntEnum):
    """What moves a request from one state to the next."""

    QUEUE = 0
    REJECT = 1
    DISPATCH = 2
    FIRST_TOKEN = 3
    SLICE_END = 4
    RETRY = 5
    FINISH = 6
    FAIL = 7
    CANCEL = 8
    EXPIRE = 9
    PREEMPT = 10
    PREEMPTED = 11


class IllegalTransition(Exception):
    """An event does not fit the state of its request: the caller reported something that cannot have happened."""


TRANSITIONS: dict[tuple[State, Trigger], State] = {
    (State.NEW, Trigger.QUEUE): State.QUEUED,
    (State.NEW, Trigger.REJECT): State.REJECTED,
    (State.QUEUED, Trigger.DISPATCH): State.PREFILLING,
    (State.QUEUED, Trigger.CANCEL): State.CANCELLED,
    (State.QUEUED, Trigger.EXPIRE): State.EXPIRED,
    (State.PREFILLING, Trigger.FIRST_TOKEN): State.DECODING,
    # An answer that is not streamed upstream is complete before any single token was reported.
    (State.PREFILLING, Trigger.FINISH): State.FINISHED,
    (State.PREFILLING, Trigger.SLICE_END): State.QUEUED,
    (State.PREFILLING, Trigger.RETRY): State.QUEUED,
    (State.PREFILLING, Trigger.FAIL): State.FAILED,
    (State.PREFILLING, Trigger.CANCEL): State.CANCELLED,
    (State.DECODING, Trigger.FINISH): State.FINISHED,
    (State.DECODING, Trigger.SLICE_END): State.QUEUED,
    (State.DECODING, Trigger.RETRY): State.QUEUED,
    (State.DECODING, Trigger.FAIL): State.FAILED,
    (State.DECODING, Trigger.CANCEL): State.CANCELLED,
    (State.DECODING, Trigger.PREEMPT): State.PREEMPTING,
    (State.PREEMPTING, Trigger.PREEMPTED): State.QUEUED,
    # What was on its way when the stream was told to stop may arrive first.
    (State.PREEMPTING, Trigger.FINISH): State.FINISHED,
    (State.PREEMPTING, Trigger.SLICE_END): State.QUEUED,
    (State.PREEMPTING, Trigger.RETRY): State.QUEUED,
    (State.PREEMPTING, Trigger.FAIL): State.FAILED,
    (State.PREEMPTING, Trigger.CANCEL): State.CANCELLED,
}


def advance(state: State, trigger: Trigger) -> State:
    """The state after ``trigger``.

    Raises:
        IllegalTransition: if the table has no such row.
    """
    try:
        return TRANSITIONS[state, trigger]
    except KeyError:
        raise IllegalTransition(f"a request that is {state.name} cannot {trigger.name}") from None


def diagram() -> str:
    """The transition table as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2", "    [*] --> NEW"]
    lines += [f"    {old.name} --> {new.name}: {trigger.name.lower()}" for (old, trigger), new in TRANSITIONS.items()]
    lines += [f"    {state.name} --> [*]" for state in State if state.is_terminal]
    return "\n".join(lines)
