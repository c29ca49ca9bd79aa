"""What preemption may cost: one bucket of tokens that may be computed again because of cuts.

    capacity = min(1,000, 2% of one minute's output at the pool's peak rate)
    cut      - the estimate (prompt and output so far: in a full pool the prompt is evicted as well)
    resume   - what is really sent again, + the estimate
    output   + ``waste_ratio`` of it, up to the capacity

Guarantee: over any span, tokens computed again <= capacity + ``waste_ratio`` x output tokens delivered + the last
overdraft; an overdraft is at most one set of victims. What is computed again is charged to this account of the system,
never to the victim (high-water marks of ``core.cost``).

The bucket is full at the start, but before the first second of work its capacity is unknown, and nothing is cut.

Cost: O(1).
"""

from __future__ import annotations

from router_ext.core.request import Request

_CAPACITY_TOKENS = 1_000
_CAPACITY_SHARE = 0.03
_MINUTE_S = 60.0

_LOW_LEVEL = 0.75
"""Below this share of its capacity the budget may not pay for the next few cuts."""


class WasteBudget:
    """See the module.

    Attributes:
        capacity_tokens: 0 until the pool's rate is known.
        spent_tokens: what has not been earned back yet; estimates of cuts whose request has not resumed included.
        pending_tokens: the latter alone.
        recomputed_tokens: input tokens sent again by resumed victims, in all.
    """

    __slots__ = ("capacity_tokens", "pending_tokens", "recomputed_tokens", "spent_tokens")

    def __init__(self) -> None:
        self.capacity_tokens = 0.0
        self.spent_tokens = 0.0
        self.pending_tokens = 0
        self.recomputed_tokens = 0

    @property
    def level_tokens(self) -> float:
        """What may be spent now; negative after an overdraft."""
        return self.capacity_tokens - self.spent_tokens

    @property
    def is_low(self) -> bool:
        """Whether cuts may soon be too dear, so that urgent work needs more room kept free instead."""
        return self.level_tokens < _LOW_LEVEL * self.capacity_tokens

    def refill(self, output_tokens: int, ratio: float, peak_rate: float) -> None:
        """Earn from delivered output. ``peak_rate``: output tokens per second, 0 while unknown."""
        self.capacity_tokens = min(_CAPACITY_TOKENS, _CAPACITY_SHARE * _MINUTE_S * peak_rate)
        spent = self.spent_tokens
        if spent > 0.0:
            spent -= ratio * output_tokens
            self.spent_tokens = spent if spent > 0.0 else 0.0

    def cut(self, request: Request, tokens: int) -> None:
        """A running request is told to stop; it is expected to send so many tokens again."""
        request.cut_tokens = tokens
        self.pending_tokens += tokens
        self.spent_tokens += tokens

    def resumed(self, request: Request) -> None:
        """A request that was cut is dispatched: settle."""
        tokens = request.input_tokens - request.cached_tokens
        self.spent_tokens += tokens
        self.recomputed_tokens += tokens
        request.recomputed_tokens += tokens
        self.spared(request)

    def spared(self, request: Request) -> None:
        """The cut of a request costs nothing (any more): its end overtook it, or it will not come back."""
        self.spent_tokens = max(0.0, self.spent_tokens - request.cut_tokens)
        self.pending_tokens -= request.cut_tokens
        request.cut_tokens = 0
