"""What the guard and its nursery tell each other: MessagePack in ``wire.frames``."""

from __future__ import annotations

import msgspec

from router_ext.wire.frames import frame


class Job(msgspec.Struct, frozen=True, array_like=True):
    """One grammar to judge. ``cpu_s``: seconds of CPU it may take; ``memory_mb``: address space beyond the parent's."""

    digest: str
    kind: str
    text: str
    cpu_s: float
    memory_mb: int


class Proof(msgspec.Struct, array_like=True):
    """What became of a job.

    Attributes:
        states: of the automaton, 0 if there is none. cpu_s: CPU seconds used. regex_bytes: of the regex, likewise.
        inlined: the schema, or the functions, without references, where there were some.
        problem: why the grammar cannot be used, None if it can. is_cost: it was given up for what it costs.
        tried_s: CPU seconds it was allowed, if it was given up for them: more may prove it.
    """

    digest: str
    states: int = 0
    cpu_s: float = 0.0
    regex_bytes: int = 0
    inlined: str | None = None
    problem: str | None = None
    is_cost: bool = False
    tried_s: float | None = None


_encode = msgspec.msgpack.Encoder().encode


def framed(message: Job | Proof) -> bytes:
    """Bytes of one message."""
    return frame(_encode(message))
