"""What became of a request, step by step: when it waited, where it ran, why there, what stopped it.

One small tuple is kept per step, words are made when somebody asks. A request of many slices keeps its first and its
last steps; how many are left out between is told.

Cost: O(1) per step.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from router_ext.core.ids import BackendId

if TYPE_CHECKING:
    from router_ext.core.request import Request

_FIRST = 24
_MAX_ENTRIES = 32
"""Of a request with more steps the first 24 and the last 8 are kept."""


class Step(enum.StrEnum):
    """What happened."""

    QUEUED = "queued"
    PARKED = "parked"
    UNPARKED = "unparked"
    HELD = "held"
    TRIED = "tried"
    DISPATCHED = "dispatched"
    FIRST_TOKEN = "first_token"
    SLICE_ENDED = "slice_ended"
    PREEMPTED = "preempted"
    RETRIED = "retried"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


_WORDS = {
    Step.QUEUED: "began to wait",
    Step.PARKED: "waits for a backend that could hold it",
    Step.UNPARKED: "such a backend is there: back in line",
    Step.HELD: "a backend may fall under it: waits until others like it have been tried",
    Step.TRIED: "its turn to be tried alone: back in line",
    Step.FIRST_TOKEN: "first token",
    Step.SLICE_ENDED: "the slice is over, it waits for the next",
    Step.PREEMPTED: "stopped for others, it waits to go on",
    Step.RETRIED: "the backend failed, it waits to go on elsewhere",
    Step.FINISHED: "complete",
    Step.FAILED: "failed",
    Step.CANCELLED: "its client went away",
    Step.EXPIRED: "waited too long",
}


class Placed(NamedTuple):
    """Why a dispatch went where it went. ``turn``: with what right it was its turn. ``slice_level``: the share of such
    answers that the slice is long enough for, 0 if its size has other reasons. ``num_options``: 0: went on in place."""

    turn: str
    num_options: int
    cached_tokens: int
    is_home: bool
    slice_level: float

    @property
    def text(self) -> str:
        """Both in words."""
        if not self.num_options:
            where = "nowhere else was looked at"
        elif self.num_options == 1:
            where = "the only backend where it could start"
        elif self.is_home:
            where = f"the backend it ran on before, of {self.num_options} where it could start"
        elif self.cached_tokens:
            where = f"of {self.num_options} backends where it could start the one that holds most of its prompt"
        else:
            where = f"of {self.num_options} backends where it could start the one with the least prompts to process"
        held = f"; about {self.cached_tokens} tokens of its input were cached there" if self.cached_tokens else ""
        level = self.slice_level
        size = f"; the slice is long enough for {level:.1%} of such answers" if level else ""
        return f"{self.turn}; {where}{held}{size}"


Entry = tuple[float, Step, BackendId | None, int, tuple[str, int, int, bool, float] | None]
"""(instant, step, backend, tokens, fields of ``Placed``). Tokens: of the slice at a dispatch, else output so far."""


def words(step: Step) -> str:
    """A step in words."""
    return _WORDS[step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One step of a request. ``at_s``: seconds since it arrived. ``tokens``: as in ``Entry``."""

    at_s: float
    step: Step
    backend: BackendId | None
    tokens: int
    text: str


def note(
    request: Request,
    step: Step,
    now: float,
    backend: BackendId | None = None,
    tokens: int = 0,
    placed: tuple[str, int, int, bool, float] | None = None,
) -> None:
    """Write a step down."""
    steps = request.steps
    if len(steps) == _MAX_ENTRIES:
        del steps[_FIRST]
        request.num_steps_omitted += 1
    steps.append((now, step, backend, tokens, placed))


def timeline(request: Request) -> list[Moment]:
    """The steps of a request in order, as far as they are kept."""
    moments = []
    for index, (at, step, backend, tokens, placed) in enumerate(request.steps):
        text = Placed(*placed).text if placed is not None else _WORDS[step]
        if index == _FIRST and request.num_steps_omitted:
            text = f"({request.num_steps_omitted} steps before this one are not kept) {text}"
        moments.append(
            Moment(at_s=max(0.0, at - request.arrival_s), step=step, backend=backend, tokens=tokens, text=text)
        )
    return moments
