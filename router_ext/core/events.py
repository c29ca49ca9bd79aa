"""What happened: the only input of ``Scheduler.handle``. Past participles, immutable.

Token counts are those of the backend's tokenizer. ``output_tokens`` counts tokens *kept* for the request
(shown to its client or held for it); tokens dropped at a slice end are reported as ``dropped_tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from router_ext.core.config import PoolConfig
from router_ext.core.ids import BackendId, KeyId, RequestId, TenantId, TierName
from router_ext.core.inheritance import Closing, Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """A request as the scheduler sees it: sizes and entitlements, never text.

    Attributes:
        prompt_tokens: measured or estimated input length; corrected by ``PromptMeasured``.
        max_new_tokens: the client's cap, already clamped to what the model allows (>= 1).
        predicted_output_tokens: median prediction, for estimates only; never decides safety. None to have it taken from
            what has finished so far (``core.lengths``).
        slice_tokens: upper quantile of the predicted output, the preferred slice (>= 64 unless the cap is smaller);
            None to have it taken from what has finished so far (``core.lengths``).
        quantiles: predicted output at ``core.survival.LEVELS``, rising, each at least 1; what is expected then follows
            what has been written, and slices are the cheapest quantile of what is left (``core.sizing``), instead of
            the two numbers above. None: nobody predicted a distribution.
        is_sliceable: False for work that cannot be resumed (grammar, tools, best_of); it is dispatched whole.
        num_sequences: independent generations behind this request on the backend (``best_of``, >= 1).
        agent_id: the agent (program) the request belongs to, if declared. agent_cost: declared cost of the whole agent
            in KV token-time (``sum of p * d + d * (d + 1) / 2`` over its calls), None to have it predicted.
        grammar: digest of what forces the answer's form, None if nothing does. stall_s: seconds in which a backend that
            has not compiled it makes no token for anybody, as predicted. is_suspect: it may fell a backend
            (``core.exposure``).
        prompt_bytes: memory that it takes while it waits, which the queues' limits count.
        prefix: tenant-salted hash chain of the prompt's whole blocks (``core.prefix``): equal starts of two chains are
            equal starts of prompts.
    """

    request_id: RequestId
    tenant: TenantId
    key: KeyId
    tier: TierName
    prompt_tokens: int
    max_new_tokens: int
    predicted_output_tokens: int | None = 256
    slice_tokens: int | None = 1024
    is_sliceable: bool = True
    num_sequences: int = 1
    agent_id: str | None = None
    agent_cost: float | None = None
    prefix: tuple[int, ...] = ()
    quantiles: tuple[int, ...] | None = None
    grammar: str | None = None
    stall_s: float = 0.0
    is_suspect: bool = False
    prompt_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heir:
    """A request to take in: who it is, and where it stands."""

    # Beside its type: compiled, a class looks for the types of its fields when it is made.
    request: RequestSpec
    standing: Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A request was accepted by the gateway and wants to be queued."""

    request: RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMeasured:
    """The backend (or a tokenizer) told the true input length of the current segment's prompt."""

    request_id: RequestId
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """``output_tokens`` more tokens of a running request arrived (the first one means prefill is over)."""

    request_id: RequestId
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """One step of a backend: ``Progressed`` for several of its requests at once, for drivers that know steps.

    ``tokens``: (request, output tokens) in the order of the batch. One decision at most follows.
    """

    tokens: Sequence[tuple[RequestId, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceEnded:
    """The running slice ended by ``length`` and the request has more to generate.

    Its KV on the backend is free. ``dropped_tokens`` of the tokens reported by ``Progressed`` were given up to
    make the cut exact (they are generated again, and not charged twice: high-water mark).
    ``next_prompt_tokens`` is the input length of the next slice (prompt plus everything kept).
    """

    request_id: RequestId
    dropped_tokens: int
    next_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """The stream of a running request was closed at ``Preempt``'s word; the request goes on later.

    ``dropped_tokens``, ``next_prompt_tokens``: as in ``SliceEnded``. The KV is free once the backend has noticed.
    """

    request_id: RequestId
    dropped_tokens: int
    next_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The request is complete.

    ``is_upstream_over``: the backend said so itself and has freed its KV. False: its stream was closed before its end
    (a stop string seen by the router alone), and the KV is free once the backend has noticed, as after ``Cancelled``.
    """

    request_id: RequestId
    is_upstream_over: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The upstream stream of a running request broke.

    ``is_retryable``: it goes back to the front of its tenant's queue (kept tokens in ``next_prompt_tokens``,
    ``dropped_tokens`` as in ``SliceEnded``); otherwise it ends here. ``is_suspect``: it may be why the backend failed,
    so it is tried again where it can hurt nobody (``core.exposure``).
    """

    request_id: RequestId
    is_retryable: bool
    dropped_tokens: int = 0
    next_prompt_tokens: int = 0
    is_suspect: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """The client went away, in any state. The upstream has been closed in the same turn."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChanged:
    """A backend became usable or unusable (health, breaker). Requests running there report for themselves.

    ``is_on_trial``: it failed lately and is given one request at a time, until this event says otherwise.
    """

    backend: BackendId
    is_up: bool
    is_on_trial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfigured:
    """The pool's configuration was replaced; queues, ledger and counters survive."""

    config: PoolConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """Another scheduler leaves its requests to this one (``core.inheritance``); their events come here from now on.

    Requests that are known already are left as they are.
    """

    requests: Sequence[Heir]
    closing: Sequence[Closing] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """The instant asked for by ``SetTimer`` has come."""


Event: TypeAlias = (
    Arrived
    | PromptMeasured
    | Progressed
    | Stepped
    | SliceEnded
    | Preempted
    | Finished
    | Failed
    | Cancelled
    | BackendChanged
    | Reconfigured
    | Inherited
    | TimerFired
)
