"""What to do: the only output of ``Scheduler.handle``. Imperatives, immutable, in the order to be carried out."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from router_ext.core.ids import BackendId, RequestId


class RejectCode(enum.StrEnum):
    """Why a request was refused or left the queue; the gateway maps it to status and dialect."""

    TOO_LARGE = "context_length_exceeded"
    QUEUE_FULL = "queue_full"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    RATE_LIMITED = "rate_limit_exceeded"
    QUEUE_TIMEOUT = "queue_timeout"
    NO_BACKEND = "no_backend_available"


class Dispatch(NamedTuple):
    """Open a stream to ``backend`` with ``max_new_tokens = slice_tokens``.

    ``segment`` counts the dispatches of the request from 0. ``reason`` says why this backend, why now.

    A tuple, because a frozen dataclass takes three times as long to make, and no other action comes by the dozen.
    """

    request_id: RequestId
    backend: BackendId
    slice_tokens: int
    segment: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """Refuse a request that was never queued.

    ``retry_after_s`` is the unjittered drain estimate, None if retrying is futile.
    """

    request_id: RequestId
    code: RejectCode
    detail: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expire:
    """End a request that waited in the queue beyond its limit, or whose pool has had no backend for too long."""

    request_id: RequestId
    code: RejectCode
    detail: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt:
    """Close the stream of a running request, so that its KV comes free for others; its client's stream stays open.

    Answer with ``Preempted`` once it is known what the request keeps. Tokens seen before are reported as ever, and the
    end of the slice or of the request may overtake the cut.
    """

    request_id: RequestId
    backend: BackendId
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Send ``TimerFired`` at instant ``at_s`` (the newest one replaces earlier ones)."""

    at_s: float


Action: TypeAlias = Dispatch | Preempt | Reject | Expire | SetTimer
