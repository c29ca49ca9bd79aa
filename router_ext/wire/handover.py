"""What a router says to the one that replaces it, over a unix socket: frames of four bytes of length and a msgpack map.

    successor                         leaver
      Hello    ---------------------->        its books move to a folder of its own
               <----------------------  Moved, with the listening sockets: the clients', the operator's if there is one
      (loads the configuration, meets the backends, until it could serve)
      Take     ---------------------->        decides nothing from here on
               <----------------------  Left: counters, where every request stands, KV that is closing
      Taken    ---------------------->        accepts nothing from here on
               <----------------------  Taken
               <----------------------  Happened ...      what becomes of its requests
      Told ... ---------------------->                    what to do with them

``Take`` without ``Taken`` changes nothing: when the connection ends, or after ``TAKEN_LIMIT_S``, the leaver goes on.

Both sides may be one version apart: maps by name, unknown fields are ignored, missing ones have defaults, a message of
an unknown kind is skipped. ``version`` rises only if that is not enough; the lower of the two is spoken.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

VERSION = 1
MAX_FRAME_BYTES = 256 << 20
TAKEN_LIMIT_S = 5.0

_LENGTH = struct.Struct(">I")


class Hello(msgspec.Struct, tag_field="is", tag="hello", kw_only=True):
    """The first word. ``is_peer``: only requests are wanted; nothing moves, and no descriptor comes."""

    version: int = VERSION
    pid: int = 0
    is_peer: bool = False


class Moved(msgspec.Struct, tag_field="is", tag="moved", kw_only=True):
    """The answer. ``folder``: where its books are now. ``up``: backends that are up, by pool.

    ``has_admin``: a second descriptor came along. ``has_left``: it decides nothing, and waits for a successor.
    """

    version: int = VERSION
    pid: int = 0
    folder: str = ""
    revision: int = 0
    up: dict[str, list[str]] = {}
    has_admin: bool = False
    has_left: bool = False


class Take(msgspec.Struct, tag_field="is", tag="take"):
    """The successor could serve now."""


class LeftRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request: ``core.events.RequestSpec``, then ``core.inheritance.Standing``, by the same names."""

    request_id: str
    tenant: str
    key: str
    tier: str
    prompt_tokens: int
    max_new_tokens: int
    predicted_output_tokens: int | None = None
    preferred_slice_tokens: int | None = None
    is_sliceable: bool = True
    num_sequences: int = 1
    agent_id: str | None = None
    agent_cost: float | None = None
    prefix: list[int] = []
    quantiles: list[int] | None = None
    grammar: str | None = None
    stall_s: float = 0.0
    was_suspect: bool = False
    prompt_bytes: int = 0

    age_s: float = 0.0
    measured_tokens: int = 0
    input_tokens: int = 0
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
    backend: str | None = None
    running_s: float = 0.0
    slice_tokens: int = 0
    slice_output: int = 0
    has_first_token: bool = False
    is_preempting: bool = False


class LeftClosing(msgspec.Struct, kw_only=True):
    """``core.inheritance.Closing``."""

    backend: str
    tokens: int
    rest_s: float


class LeftPool(msgspec.Struct, kw_only=True):
    """``counters``: what ``Scheduler.save`` gave, None if this leaver decides nothing any more."""

    counters: Any = None
    requests: list[LeftRequest] = []
    closing: list[LeftClosing] = []


class Left(msgspec.Struct, tag_field="is", tag="left", kw_only=True):
    """Everything that is handed over, by pool."""

    pools: dict[str, LeftPool]


class Taken(msgspec.Struct, tag_field="is", tag="taken"):
    """The successor has it all, and decides."""


class Occurrence(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An event of ``core.events``, ``kind`` in lower case: ``arrived`` has ``arrival``, the others what they need."""

    kind: str
    request_id: str
    arrival: LeftRequest | None = None
    tokens: int = 0
    dropped_tokens: int = 0
    next_prompt_tokens: int = 0
    is_retryable: bool = False
    is_suspect: bool = False
    is_upstream_over: bool = True


class Happened(msgspec.Struct, tag_field="is", tag="happened", kw_only=True):
    """What became of requests of one pool in one turn of the leaver's loop, in order."""

    pool: str
    events: list[Occurrence]


class Order(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An action of ``core.actions`` (``dispatch``, ``preempt``, ``reject``, ``expire``), or ``end``: give it up."""

    kind: str
    request_id: str
    backend: str = ""
    slice_tokens: int = 0
    segment: int = 0
    reason: str = ""
    code: str = ""
    retry_after_s: float | None = None


class Told(msgspec.Struct, tag_field="is", tag="told", kw_only=True):
    """What to do with requests of one pool, in order."""

    pool: str
    orders: list[Order]


Message = Hello | Moved | Take | Left | Taken | Happened | Told

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Message)
_KINDS = frozenset(("hello", "moved", "take", "left", "taken", "happened", "told"))


def encode(message: Message) -> bytes:
    """A frame."""
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


def frame_length(head: bytes) -> int:
    """Bytes that follow the four of a frame's head.

    Raises:
        ValueError: more than ``MAX_FRAME_BYTES``: the other side speaks something else.
    """
    length = int(_LENGTH.unpack(head)[0])
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return length


def decode(body: bytes) -> Message | None:
    """The message of a frame; None if it is of a kind this version does not know.

    Raises:
        ValueError: it is no message.
    """
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        try:
            kind = msgspec.msgpack.decode(body).get("is")
        except (msgspec.MsgspecError, AttributeError):
            kind = None
        if isinstance(kind, str) and kind not in _KINDS:
            return None
        raise ValueError(f"not a message of a hand-over: {error}") from None
