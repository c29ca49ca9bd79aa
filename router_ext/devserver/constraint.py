"""What a generation is bound to, and what a grammar does to the server instead of being compiled."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Effect(enum.StrEnum):
    """What a request does to the server."""

    DIE = "die"
    FREEZE = "freeze"
    STALL = "stall"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Hazard:
    """An effect that comes instead of a compilation.

    Attributes:
        stall_s: of ``STALL``, seconds without a token for anybody. message: of ``FAIL``, the shard's.
    """

    effect: Effect
    stall_s: float = 0.0
    message: str = ""


@dataclass(frozen=True, slots=True)
class Constraint:
    """``regex`` binds the answer; ``hazard`` replaces its compilation, and then the ids of ``script`` are the answer.

    Without a script the answer is not bound at all. ``key`` tells grammars that have a hazard apart.
    """

    regex: str = ""
    hazard: Hazard | None = None
    script: tuple[int, ...] = ()
    key: str = ""


class ServerDies(Exception):
    """A request of which TGI's process dies while it validates."""
