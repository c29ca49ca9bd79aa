"""What router and prediction worker say to each other over their socket: MessagePack in ``wire.frames``.

    router                      worker
    Assign(pool, digest)  -->           which model answers for a pool, None: none; any number of times
                          <--   Assigned, or with the reason why the model before stays
    Ask(id, prompt, ...)  -->           all that wait together are one batch
                          <--   Answers, one per batch, in the order of the questions
    Ended(id, tokens)     -->           what the answer of that question proved to be
                          <--   Ready, once, when it can answer

Prompts travel here as bounded pieces of text and go no further: neither side keeps, logs or writes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import msgspec

from router_ext.predict.baseline import LEVELS, MAX_TOKENS
from router_ext.wire.frames import frame


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """How long will this answer be?

    Attributes:
        prompt: as the client sent it, bounded (``predict.prompts``): a text, or the turns of a chat as (role, text).
        model: name of the pool, as in the books. max_new_tokens: 0 if the client stated none.
        top_k, typical_p, repetition_penalty: None where the client stated none.
        base: empirical quantiles of the same instant, None if too few answers are known.
    """

    id: int
    pool: str
    model: str
    tenant: str
    key: str
    prompt: str | list[tuple[str, str]]
    is_chat: bool
    max_new_tokens: int
    temperature: float
    top_p: float
    is_greedy: bool
    has_stop: bool
    base: tuple[int, ...] | None = None
    top_k: int | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """The answer of a question is over. ``is_complete``: it came to its natural end; else it is longer than this."""

    id: int
    output_tokens: int
    is_complete: bool


class Assign(msgspec.Struct, frozen=True, array_like=True, tag="assign"):
    """The model of a pool: its digest and the file that holds it."""

    pool: str
    digest: str | None = None
    path: str = ""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The worker answers. ``known``: prompts and histories it has from before."""

    pid: int
    known: int


class Assigned(msgspec.Struct, frozen=True, array_like=True, tag="assigned"):
    """What became of ``Assign`` of ``digest``: ``current`` answers; if that is another one, ``refused`` says why."""

    pool: str
    digest: str | None
    current: str | None
    refused: str | None = None


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """One prediction.

    Attributes:
        quantiles: at ``core.survival.LEVELS``; None: neither a model nor the memory says anything.
        source: ``model`` or ``memory``, empty without quantiles. runaway: None without a model.
        features: packed, for training; None: none were made. model: digest of the model that was asked.
    """

    id: int
    quantiles: tuple[float, ...] | None
    source: str
    runaway: float | None
    features: bytes | None
    feature_version: int | None
    model: str | None


def plausible(quantiles: Sequence[float]) -> tuple[int, ...] | None:
    """The quantiles as whole tokens; None if they are none: not seven, not finite, falling, out of range."""
    if len(quantiles) != len(LEVELS) or not all(map(math.isfinite, quantiles)):
        return None
    whole = tuple(map(round, quantiles))
    if whole[0] < 1 or whole[-1] > MAX_TOKENS or any(a > b for a, b in pairwise(whole)):
        return None
    return whole


class Answers(msgspec.Struct, frozen=True, array_like=True, tag="answers"):
    """The answers of one batch. ``seconds``: what it took. ``refused``: ids whose prompt tripped a defect."""

    answers: list[Answer]
    seconds: float
    refused: list[int] = []


ToWorker: TypeAlias = Ask | Ended | Assign
FromWorker: TypeAlias = Ready | Assigned | Answers

_encode = msgspec.msgpack.Encoder().encode


def framed(message: ToWorker | FromWorker) -> bytes:
    """Bytes of one message."""
    return frame(_encode(message))
