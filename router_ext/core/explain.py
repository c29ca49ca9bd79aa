"""Why a request waited, in constant time per decision.

The pool keeps one clock per gate: how long, in sum, the next request in turn was held by it. A waiting request
stores the clocks' readings when it is queued and when it is dispatched; the difference, together with the number of
requests dispatched meanwhile, is its explanation. Nothing is written per waiting request per decision.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from router_ext.core.request import Request


class Gate(enum.IntEnum):
    """What can hold a request back, in the order the checks are made; the last one reached is reported."""

    NONE = 0
    NO_BACKEND = 1
    KV = 2
    CONCURRENCY = 3
    PREFILL = 4
    HEADROOM = 5
    ALONE = 6
    CLAIM = 7
    SHARE = 8


GATE_TEXT = {
    Gate.NO_BACKEND: "no backend was up",
    Gate.KV: "no backend had enough free KV",
    Gate.CONCURRENCY: "every backend with room was at its limit of concurrent requests",
    Gate.PREFILL: "the prefill gate was closed: prompts sent before had not been processed",
    Gate.HEADROOM: "the free KV was kept for requests with a latency target",
    Gate.ALONE: "a new grammar or a suspect request starts alone: nobody else may wait for a first token beside it",
    Gate.CLAIM: "the free backend was claimed by a request ahead",
    Gate.SHARE: "the tenant had received its share and others were ahead",
}

_GATES = len(Gate)


WaitMark: TypeAlias = tuple[float, tuple[float, ...], int, int]
"""Readings at one instant: the instant, the pool's clocks by gate, dispatches of the pool and of the tenant."""


class WaitClock:
    """The pool's clocks. ``held`` is the gate that stopped the last decision."""

    __slots__ = ("_held_s", "_reading", "_since_s", "held", "num_dispatched")

    def __init__(self) -> None:
        self._held_s = [0.0] * _GATES
        self._reading: tuple[float, ...] = tuple(self._held_s)
        self._since_s = 0.0
        self.held = Gate.NONE
        self.num_dispatched = 0

    def set(self, gate: Gate, now: float) -> None:
        """The last decision ended because of ``gate``."""
        if gate is not self.held:
            self._settle(now)
            self.held = gate

    def mark(self, now: float, num_own_dispatched: int) -> WaitMark:
        """Readings now. Those of one instant share one tuple."""
        if now != self._since_s:
            self._settle(now)
        return now, self._reading, self.num_dispatched, num_own_dispatched

    def _settle(self, now: float) -> None:
        self._held_s[self.held] += now - self._since_s
        self._since_s = now
        self._reading = tuple(self._held_s)


def note_blocked(request: Request, gate: Gate) -> None:
    """The request was in turn and ``gate`` held it."""
    blocked = request.blocked
    if blocked is None:
        blocked = request.blocked = [0] * _GATES
    blocked[gate] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One cause of a wait, in numbers and in words. No other tenant is named.

    Attributes:
        cause: ``wait`` (the sum), a gate in lower case (``kv``, ``share``, ...), ``parked``, ``held``, ``preempted`` or
            ``recomputed``.
        seconds: how long, None where that says nothing.
        counts: by what is counted, for example ``own`` and ``others`` dispatched meanwhile.
    """

    cause: str
    seconds: float | None
    counts: Mapping[str, int]
    text: str


def _of_gate(gate: Gate, seconds: float, in_turn: int, note: str) -> Reason:
    return Reason(
        cause=gate.name.lower(),
        seconds=seconds,
        counts={"in_turn": in_turn} if in_turn else {},
        text=f"{GATE_TEXT[gate]} ({note})",
    )


def waiting_reasons(request: Request, now_mark: WaitMark | None) -> list[Reason]:
    """Why the request waited, longest cause first.

    Args:
        now_mark: present readings if the request is waiting, else None.
    """
    cuts = [
        Reason(cause="preempted", seconds=None, counts={}, text=f"told to stop once for others ({reason})")
        for reason in request.cuts or ()
    ]
    spans = list(request.waited)
    if request.mark is not None and now_mark is not None:
        spans.append((request.mark, now_mark))
    if not spans:
        return cuts
    total = sum(end[0] - start[0] for start, end in spans)
    held = [sum(end[1][gate] - start[1][gate] for start, end in spans) for gate in range(_GATES)]
    own = sum(end[3] - start[3] for start, end in spans)
    ahead = sum(end[2] - start[2] for start, end in spans) - own
    found = [
        Reason(
            cause="wait",
            seconds=total,
            counts={"turns": len(spans), "own": own, "others": ahead},
            text=f"waited {total:.3f} s in {len(spans)} turn{'s' if len(spans) > 1 else ''}; meanwhile "
            f"{own} request{'' if own == 1 else 's'} of this tenant and {ahead} of others were dispatched",
        ),
        *cuts,
    ]
    if cuts and request.recomputed_tokens:
        tokens = request.recomputed_tokens
        text = f"{tokens} tokens were computed again, at the system's expense"
        found.append(Reason(cause="recomputed", seconds=None, counts={"tokens": tokens}, text=text))
    parked_s = request.parked_for_s
    if request.parked_s is not None and now_mark is not None:
        parked_s += now_mark[0] - request.parked_s
    if parked_s > 0.0:
        text = f"no backend that could hold it was usable ({parked_s:.3f} s)"
        found.append(Reason(cause="parked", seconds=parked_s, counts={}, text=text))
    held_s = request.held_for_s
    if request.held_s is not None and now_mark is not None:
        held_s += now_mark[0] - request.held_s
    if held_s > 0.0:
        text = f"a backend may fall under it: others like it were tried one at a time before it ({held_s:.3f} s)"
        found.append(Reason(cause="held", seconds=held_s, counts={}, text=text))
    found += _gates(held, request.blocked or [0] * _GATES, own=own, ahead=ahead)
    return found


def _gates(held: list[float], blocked: list[int], *, own: int, ahead: int) -> Iterator[Reason]:
    """Gates that were closed, the longest first; ``blocked``: how often while the request was in turn."""
    for gate in sorted(GATE_TEXT, key=lambda gate: (-held[gate], -blocked[gate], gate)):
        seconds, in_turn = held[gate], blocked[gate]
        if in_turn:
            yield _of_gate(gate, seconds, in_turn, f"{seconds:.3f} s in the pool, {in_turn} times when in turn")
        elif seconds >= 0.001:
            yield _of_gate(gate, seconds, 0, f"{seconds:.3f} s in the pool")
    if (ahead or own) and not blocked[Gate.SHARE]:
        text = f"{GATE_TEXT[Gate.SHARE]} ({ahead} dispatched first)" if ahead else "earlier requests went first"
        yield Reason(cause="share", seconds=None, counts={"own": own, "others": ahead}, text=text)
