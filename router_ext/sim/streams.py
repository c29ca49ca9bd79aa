"""What passes between a server and its client: streams, and what they show at the end of an iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router_ext.core.events import Stepped

if TYPE_CHECKING:
    from router_ext.sim.jobs import Job


class Stream:
    """One request as the server sees it, from opening to end.

    Attributes:
        input_tokens: prompt of the present piece. length: tokens it will write in all before it stops by itself.
        new_tokens: the limit the client gave. written: tokens of pieces that are over; before: those of pieces before
            the one that decodes or decoded last.
        was_sliced, was_preempted: it goes on where a slice ended, or where the router cut it.
        token: what the router is told of each of its tokens.
        order: arrival at this server. left, chunk: prompt tokens still to compute, and those of this iteration.
        piece, reserved: new tokens and KV tokens of the present piece. end_tick: tick at whose end it is over.
        base: tick at whose end the first token of the piece came; first_iteration: number of that iteration.
        left_iteration: number of the iteration at whose end it left the batch last.
        is_cut: its client has closed it. is_closed: the server has been told.
    """

    __slots__ = (
        "base",
        "before",
        "chunk",
        "end_tick",
        "first_iteration",
        "input_tokens",
        "is_closed",
        "is_cut",
        "is_decoding",
        "is_running",
        "job",
        "left",
        "left_iteration",
        "length",
        "new_tokens",
        "order",
        "piece",
        "reserved",
        "token",
        "was_preempted",
        "was_sliced",
        "written",
    )

    def __init__(
        self,
        job: Job,
        *,
        input_tokens: int,
        length: int,
        new_tokens: int,
        was_sliced: bool = False,
        was_preempted: bool = False,
    ) -> None:
        self.job = job
        self.token = (job.request_id, 1)
        self.input_tokens = input_tokens
        self.length = length
        self.new_tokens = new_tokens
        self.was_sliced = was_sliced
        self.was_preempted = was_preempted
        self.written = 0
        self.order = 0
        self.piece = 0
        self.reserved = 0
        self.left = 0
        self.chunk = 0
        self.base = 0
        self.before = 0
        self.first_iteration = 0
        self.end_tick = 0
        self.is_running = False
        self.is_decoding = False
        self.left_iteration = 0
        self.is_cut = False
        self.is_closed = False

    def shown(self, tick: int, iteration: int) -> int:
        """Tokens its client has seen, if the newest outcome it has is of that tick and iteration of the server."""
        if not self.first_iteration or iteration < self.first_iteration:
            return self.before
        return self.before + min(tick, self.end_tick) - self.base + 1


class Outcome:
    """What the streams of a server show at the end of one iteration.

    Attributes:
        decoded: streams that got one more token, in batch order; shared between iterations while nobody comes or goes.
        started: streams that got their first token. ended: streams that are over.
        tick, iteration: the server's clocks, for counting what a stream has shown.
    """

    __slots__ = ("decoded", "ended", "iteration", "started", "tick")

    def __init__(
        self, decoded: Batch, started: list[Stream], ended: list[Stream], *, tick: int, iteration: int
    ) -> None:
        self.decoded = decoded
        self.started = started
        self.ended = ended
        self.tick = tick
        self.iteration = iteration


class Batch:
    """The streams that decode together. Immutable; made anew when one comes or goes.

    Attributes:
        stepped: one token for each, as the router's scheduler is told.
        tally: (tenant, number of streams).
    """

    __slots__ = ("stepped", "streams", "tally")

    def __init__(self, streams: tuple[Stream, ...]) -> None:
        self.streams = streams
        self.stepped = Stepped(tokens=tuple([stream.token for stream in streams]))
        tally: dict[int, int] = {}
        for stream in streams:
            tenant = stream.job.tenant
            tally[tenant] = tally.get(tenant, 0) + 1
        self.tally = tuple(tally.items())


NOBODY = Batch(())
