"""How many tokens to ask of a backend at once.

A slice bounds the reservation (TGI reserves ``input + slice - 1`` up front) and ends in a free yield point. It costs
the prompt's prefill again, so a request is sliced only if at least two slices remain, and never while nobody waits.

    slice = min(remaining, 1024, preferred)   if remaining >= 2 * preferred and somebody waits
            min(remaining, 1024)              otherwise

The sizes are those of the backends that may be given work at present: while the largest is lost, a slice becomes as
small as the next one needs. A request whose smallest slice fits on none of them is *stuck*; it is parked until that
changes.

Work that cannot be resumed is dispatched whole. A slice is shrunk further only to admit a request in turn that would
not fit otherwise, and only out of a budget, since every such slice is paid with another prefill.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from router_ext.core.config import BackendConfig, PoolConfig
from router_ext.core.kv import TGI_NEW_TOKENS_CAP, usable_blocks
from router_ext.core.request import Request

_BUDGET_CAP_TOKENS = 1_000
"""Prefill tokens that shrunk slices may cost in one burst."""

_BUDGET_REFILL_RATIO = 0.015
"""Share of the delivered output tokens by which the budget refills: the most throughput shrinking may cost."""


def room_tokens(config: BackendConfig, sequences: int = 1) -> int:
    """Most tokens (input plus new) each of the sequences of one request can ever have on this backend."""
    kv = usable_blocks(config) // sequences * config.block_size - config.speculate + 1
    return min(kv, config.max_total_tokens)


def largest_slice(backends: Iterable[BackendConfig], input_tokens: int, sequences: int = 1) -> int:
    """Most new tokens that some backend, empty, could take with this input; <= 0 if none takes the input."""
    largest: int | None = None
    for backend in backends:
        if input_tokens <= backend.max_input_tokens:
            room = room_tokens(backend, sequences) - input_tokens
            if largest is None or room > largest:
                largest = room
    return 0 if largest is None else largest


def smallest_slice(request: Request, config: PoolConfig) -> int:
    """Least new tokens a dispatch of this request must be able to produce."""
    rest = request.remaining_tokens()
    if request.is_sliceable:
        return min(rest, config.min_slice_tokens, config.max_slice_tokens)
    return min(rest, TGI_NEW_TOKENS_CAP)


def plan(request: Request, config: PoolConfig, usable: Collection[BackendConfig], *, is_sliced: bool) -> bool:
    """Set the next slice of a request that is about to wait, and whether it is stuck.

    Args:
        usable: backends that may be given work at present. If there are none, the slice is that of the configured
            ones, and a request remains as stuck as it was.

    Returns:
        whether any configured backend could ever hold that slice.
    """
    rest = request.remaining_tokens()
    prompt, sequences = request.input_tokens, request.num_sequences
    backends: Collection[BackendConfig] = config.backends.values()
    if request.grammar is not None:
        backends = [backend for backend in backends if backend.takes_grammars]
        some = [backend for backend in usable if backend.takes_grammars]
        if usable and not some:
            request.is_stuck = True
            request.slice_busy = request.slice_idle = min(rest, TGI_NEW_TOKENS_CAP)
            return bool(backends) and largest_slice(backends, prompt, sequences) >= smallest_slice(request, config)
        usable = some
    largest = largest_slice(backends, prompt, sequences) if config.backends else rest
    least = smallest_slice(request, config)
    can_fit = largest >= least
    if not request.is_sliceable:
        whole = request.slice_busy = request.slice_idle = min(rest, max(largest, 1))
        if usable:
            request.is_stuck = largest_slice(usable, prompt, sequences) < whole
        return can_fit
    if usable:
        largest_now = largest_slice(usable, prompt, sequences)
        request.is_stuck = largest_now < least
        if not request.is_stuck:
            largest = largest_now
    whole = min(rest, config.max_slice_tokens, max(largest, 1))
    request.slice_idle = whole
    preferred = max(1, request.preferred_slice_tokens)
    request.slice_busy = min(whole, preferred) if is_sliced and rest >= 2 * preferred else whole
    return can_fit


class SliceBudget:
    """Prefill tokens that shrunk slices may still cost. A slice may overdraw it; then nothing is shrunk for a while."""

    __slots__ = ("level_tokens",)

    def __init__(self) -> None:
        self.level_tokens = float(_BUDGET_CAP_TOKENS)

    def refill(self, output_tokens: int) -> None:
        """Earn from delivered output."""
        level = self.level_tokens + _BUDGET_REFILL_RATIO * output_tokens
        self.level_tokens = level if level < _BUDGET_CAP_TOKENS else float(_BUDGET_CAP_TOKENS)

    @property
    def is_open(self) -> bool:
        """Whether a slice may be shrunk."""
        return self.level_tokens > 0.0

    def spend(self, request: Request, new_tokens: int) -> None:
        """Pay for a shrunk slice: the next one sends all of it again."""
        self.level_tokens -= request.input_tokens + new_tokens


def shrunk_slice(request: Request, config: PoolConfig, free_tokens: int, slice_tokens: int) -> int:
    """The longest slice that fits into ``free_tokens`` (input plus new), or 0 if shrinking cannot help."""
    if not request.is_sliceable:
        return 0
    new = min(free_tokens - request.input_tokens, slice_tokens, request.remaining_tokens() // 2)
    return new if new >= config.min_slice_tokens else 0
