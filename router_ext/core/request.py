"""The scheduler's own record of one request, from arrival to its terminal state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router_ext.core.kv import TGI_NEW_TOKENS_CAP
from router_ext.core.lifecycle import State
from router_ext.core.survival import Survival, next_look

if TYPE_CHECKING:
    from router_ext.core.admission import Backend
    from router_ext.core.agents import Agent
    from router_ext.core.events import RequestSpec
    from router_ext.core.explain import WaitMark
    from router_ext.core.lanes import Lane
    from router_ext.core.queues import Tenant, TierQueue
    from router_ext.core.shedding import Crowd
    from router_ext.core.timeline import Entry

_NEVER = 1 << 62


class Request:
    """Mutable state of one request. Plain attributes: the hot path reads them directly.

    Attributes:
        member: its tenant. tenant: what competes for the pool in its place, the same or its group (``core.queues``).
        seq: order of arrival; the tie-break everywhere.
        lane: where it waits inside its queue, and the counter it is charged to there (``core.lanes``); set when it is
            first queued.
        prompt_tokens: the client's prompt; ``input_tokens``: what the next (or running) slice sends upstream.
        output_tokens: tokens kept so far over all slices.
        paid_in, paid_out: high-water marks of charged tokens (``core.cost``). is_charged: the prompt was charged.
            paid_cached: prompt tokens that were cached at the first charge.
        slice_count: ``core.lengths.Lengths.count`` at which the preferred slice was taken, -1 if it was given.
        survival: the distribution of its length, if one was predicted. expected_tokens: its mean output, and
            ``look_at`` the output at which to look at the rest again, 0 and never without one.
        slice_level: the quantile of its rest that ``preferred_slice_tokens`` is (``core.sizing``), 0 if none is.
        slice_busy, slice_idle: next slice while others wait, and while nobody does (``core.slicing``).
        slice_tokens, slice_output: the running slice's limit, and what it has produced.
        ticket: names this dispatch in the ledger; a closing slice keeps its own after the request moved on.
        is_resumed: it ran before (slice end, retry, preemption) and goes ahead of fresh requests of its lane.
        order: place in the pool-wide order of those who wait (``core.queues``).
        cached_tokens: tokens of the running slice's input that its backend probably held already (``core.prefix``).
        grammar, stall_s: what forces its answer's form, and how long a backend stalls that compiles it. has_paid_stall:
            its tenant was charged for one. is_suspect: it may have felled a backend (``core.exposure``).
        held_tokens: KV that the running slice reserved when it started.
        kept_tokens: tokens of its input that its backend still holds if it goes on at once (``Decider.slice_ended``).
        agent: the agent it is a call of, under policies that order agents (``core.agents``).
        is_stuck: no backend that may be given work could hold its next slice (``core.slicing``).
        parked_s: since when it waits outside the order for such a backend, None if it does not.
        parked_for_s: how long it did so before. held_s, held_for_s: likewise, for its trial (``core.trial``).
        num_preempted: how often it was told to stop for others.
        cut_tokens: what the last cut is expected to cost, until the request is dispatched again; 0 if nothing is owed.
        steps: what became of it (``core.timeline``); num_steps_omitted: those not kept.
        cuts: what each cut was for, in words.
        prompt_bytes: memory that it takes while it waits. crowd: where it may be displaced from (``core.shedding``).
    """

    __slots__ = (
        "agent",
        "agent_cost",
        "agent_id",
        "arrival_s",
        "avoid",
        "backend",
        "blocked",
        "blocks",
        "cached_tokens",
        "crowd",
        "cut_tokens",
        "cuts",
        "deadline_s",
        "dispatched_s",
        "expected_rest",
        "expected_tokens",
        "first_token_s",
        "grammar",
        "has_paid_stall",
        "held_for_s",
        "held_s",
        "held_tokens",
        "input_tokens",
        "is_charged",
        "is_resumed",
        "is_sliceable",
        "is_stuck",
        "is_suspect",
        "kept_tokens",
        "key",
        "lane",
        "last_backend",
        "look_at",
        "mark",
        "max_new_tokens",
        "member",
        "num_preempted",
        "num_sequences",
        "num_steps_omitted",
        "order",
        "output_tokens",
        "paid_cached",
        "paid_in",
        "paid_out",
        "parked_for_s",
        "parked_s",
        "predicted_output_tokens",
        "preferred_slice_tokens",
        "prefill_ahead_tokens",
        "prefix",
        "prompt_bytes",
        "prompt_tokens",
        "queue",
        "recomputed_tokens",
        "release_at_s",
        "request_id",
        "sampled_output",
        "sampled_s",
        "segment",
        "seq",
        "slice_busy",
        "slice_count",
        "slice_idle",
        "slice_level",
        "slice_output",
        "slice_tokens",
        "stall_s",
        "standing",
        "state",
        "steps",
        "survival",
        "tenant",
        "ticket",
        "waited",
        "weight_tokens",
    )

    def __init__(self, spec: RequestSpec, *, tenant: Tenant, queue: TierQueue, seq: int, arrival_s: float) -> None:
        self.request_id = spec.request_id
        self.key = spec.key
        self.member = tenant
        self.tenant = tenant.unit
        self.queue = queue
        self.lane: Lane
        self.seq = seq
        self.arrival_s = arrival_s
        target = queue.ttft_target_s
        self.deadline_s: float | None = None if target is None else arrival_s + target
        self.state = State.NEW
        self.prompt_tokens = spec.prompt_tokens
        self.input_tokens = spec.prompt_tokens
        self.max_new_tokens = spec.max_new_tokens
        self.predicted_output_tokens = spec.predicted_output_tokens or 0
        self.preferred_slice_tokens = spec.slice_tokens or TGI_NEW_TOKENS_CAP
        self.slice_count = 0 if spec.slice_tokens is None else -1
        self.survival: Survival | None = None
        self.expected_tokens = 0
        self.look_at = _NEVER
        self.slice_level = 0.0
        self.is_sliceable = spec.is_sliceable
        self.num_sequences = spec.num_sequences
        self.prefix = spec.prefix
        self.prompt_bytes = spec.prompt_bytes
        self.crowd: Crowd | None = None
        self.cached_tokens = 0
        self.agent_id = spec.agent_id
        self.agent_cost = spec.agent_cost
        self.agent: Agent | None = None
        self.output_tokens = 0
        self.is_charged = False
        self.paid_cached = 0
        self.paid_in = 0
        self.paid_out = 0
        self.recomputed_tokens = 0
        self.num_preempted = 0
        self.cut_tokens = 0
        self.cuts: list[str] | None = None
        self.segment = 0
        self.is_resumed = False
        self.is_stuck = False
        self.grammar = spec.grammar
        self.stall_s = spec.stall_s
        self.has_paid_stall = False
        self.is_suspect = spec.is_suspect
        self.parked_s: float | None = None
        self.parked_for_s = 0.0
        self.held_s: float | None = None
        self.held_for_s = 0.0
        self.order = 0
        self.slice_busy = 0
        self.slice_idle = 0
        self.slice_tokens = 0
        self.slice_output = 0
        self.backend: Backend | None = None
        self.last_backend: Backend | None = None
        self.avoid: Backend | None = None
        self.ticket = 0
        self.blocks = 0
        self.prefill_ahead_tokens = 0
        self.dispatched_s = 0.0
        self.first_token_s: float | None = None
        self.sampled_s = 0.0
        self.sampled_output = 0
        self.release_at_s = 0.0
        self.expected_rest = 0.0
        self.held_tokens = 0
        self.kept_tokens = 0
        self.weight_tokens = 0
        self.standing = 0
        self.mark: WaitMark | None = None
        self.steps: list[Entry] = []
        self.num_steps_omitted = 0
        self.waited: list[tuple[WaitMark, WaitMark]] = []
        self.blocked: list[int] | None = None
        if spec.quantiles is not None:
            self._foresee(Survival(spec.quantiles))

    def _foresee(self, survival: Survival) -> None:
        self.survival = survival
        self.slice_count = -1
        self.expected_tokens = round(survival.expected_rest(0, self.max_new_tokens))
        self.look_ahead()

    def look_ahead(self) -> None:
        """Expect by what has been written so far: half of the answers that got here go on beyond the prediction."""
        survival = self.survival
        if survival is not None:
            self.predicted_output_tokens = min(survival.total(self.output_tokens, 0.5), self.max_new_tokens)
            self.look_at = next_look(self.output_tokens)

    @property
    def sent_prompt_tokens(self) -> int:
        """Prompt tokens over all sequences: ``best_of`` prompts are prefilled once per sequence."""
        return self.prompt_tokens * self.num_sequences

    def remaining_tokens(self) -> int:
        """Output tokens the client's cap still allows (at least 1: a request at its cap is finished)."""
        rest = self.max_new_tokens - self.output_tokens
        return rest if rest > 0 else 1

    def mean_rest(self) -> int:
        """Output still to come, at least 1; the mean where a distribution is known, for what is summed over many."""
        survival = self.survival
        if survival is None:
            return self.predicted_rest()
        if not self.output_tokens:
            return self.expected_tokens
        return round(survival.expected_rest(self.output_tokens, self.max_new_tokens))

    def predicted_rest(self) -> int:
        """Predicted output still to come, at least 1."""
        rest = self.predicted_output_tokens - self.output_tokens
        limit = self.max_new_tokens - self.output_tokens
        rest = min(rest, limit)
        return rest if rest > 0 else 1
