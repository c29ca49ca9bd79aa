"""Requests that one scheduler leaves to another: what the successor must know of each, and how it takes them in.

A router that is replaced goes on serving its clients, but its successor schedules them: ``leave`` writes down where
every request stands, ``Inherited`` carries that into the successor's scheduler, and from there on the events of these
requests go to it. Counters come first, by ``Scheduler.restore``. Then the sum of both is what one scheduler would have:

- KV: a running request holds the blocks of its slice again, a closed stream those it holds until TGI has noticed;
- service: what was charged stays charged (the marks of ``core.cost``), so nothing is charged twice or forgiven;
- places: requests of a lane keep their order, the resumed ones before the fresh ones.

Not carried: what was learned (speeds, lengths, prefixes), the timeline so far, an agent's virtual time.

Cost: O(n log n) in the requests that live.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router_ext.core.ids import BackendId, RequestId
from router_ext.core.lifecycle import State

if TYPE_CHECKING:
    from router_ext.core.fleet import Fleet
    from router_ext.core.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a request stands.

    Attributes:
        age_s: since its arrival. running_s: since its dispatch, 0 while it waits.
        prompt_tokens: the client's prompt as measured so far; ``input_tokens``: what the next or running slice sends.
        output_tokens: kept so far. slice_output: of these by the running slice.
        paid_in, paid_out, paid_cached: marks of charged tokens. is_charged, has_paid_stall: what was charged once.
        segment: dispatches so far. num_preempted: how often it was told to stop.
        is_resumed: it ran before. backend: where it runs, None while it waits.
        slice_tokens: the running slice's limit. has_first_token: something of that slice has come.
        is_preempting: it was told to stop, and has not said yet what it keeps.
    """

    request_id: RequestId
    age_s: float
    prompt_tokens: int
    input_tokens: int
    output_tokens: int = 0
    paid_in: int = 0
    paid_out: int = 0
    paid_cached: int = 0
    is_charged: bool = False
    has_paid_stall: bool = False
    is_suspect: bool = False
    segment: int = 0
    num_preempted: int = 0
    is_resumed: bool = False
    backend: BackendId | None = None
    running_s: float = 0.0
    slice_tokens: int = 0
    slice_output: int = 0
    has_first_token: bool = False
    is_preempting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """KV of a stream that was closed: ``tokens`` on ``backend``, for ``rest_s`` seconds more."""

    backend: BackendId
    tokens: int
    rest_s: float


def leave(requests: Iterable[Request], now: float) -> list[Standing]:
    """Where everybody stands: those who run in the order of their dispatch, then those who wait in theirs."""
    running: list[tuple[int, Request]] = []
    waiting: list[tuple[int, Request]] = []
    for request in requests:
        if request.backend is None:
            waiting.append((request.order, request))
        else:
            running.append((request.ticket, request))
    running.sort(key=_first)
    waiting.sort(key=_first)
    return [_standing(request, now) for _, request in (*running, *waiting)]


def closing(fleet: Fleet, now: float) -> list[Closing]:
    """KV that closed streams still hold."""
    return [
        Closing(
            backend=backend.backend_id,
            tokens=backend.ledger.holdings[ticket] * backend.block_size,
            rest_s=max(0.0, at_s - now),
        )
        for at_s, ticket, backend, is_freed in sorted(fleet.lags, key=_ticket)
        if is_freed and ticket in backend.ledger.holdings
    ]


def _first(entry: tuple[int, Request]) -> int:
    return entry[0]


def _ticket(lag: tuple[float, int, object, bool]) -> int:
    return lag[1]


def _standing(request: Request, now: float) -> Standing:
    backend = request.backend
    runs = backend is not None
    return Standing(
        request_id=request.request_id,
        age_s=max(0.0, now - request.arrival_s),
        prompt_tokens=request.prompt_tokens,
        input_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
        paid_in=request.paid_in,
        paid_out=request.paid_out,
        paid_cached=request.paid_cached,
        is_charged=request.is_charged,
        has_paid_stall=request.has_paid_stall,
        is_suspect=request.is_suspect,
        segment=request.segment,
        num_preempted=request.num_preempted,
        is_resumed=request.is_resumed,
        backend=None if backend is None else backend.backend_id,
        running_s=max(0.0, now - request.dispatched_s) if runs else 0.0,
        slice_tokens=request.slice_tokens if runs else 0,
        slice_output=request.slice_output if runs else 0,
        has_first_token=runs and request.state is not State.PREFILLING,
        is_preempting=request.state is State.PREEMPTING,
    )


def take_over_marks(request: Request, standing: Standing) -> None:
    """Set on a fresh record what does not depend on where the request goes on."""
    request.prompt_tokens = standing.prompt_tokens
    request.input_tokens = standing.input_tokens
    request.output_tokens = standing.output_tokens
    request.paid_in = standing.paid_in
    request.paid_out = standing.paid_out
    request.paid_cached = standing.paid_cached
    request.is_charged = standing.is_charged
    request.has_paid_stall = standing.has_paid_stall
    request.is_suspect = standing.is_suspect
    request.segment = standing.segment
    request.is_resumed = standing.is_resumed
    request.num_preempted = standing.num_preempted
    if standing.num_preempted:
        request.cuts = ["told to stop before the router was replaced"] * standing.num_preempted
    if request.output_tokens:
        request.look_ahead()
