"""What service costs, and the marks that keep every token from being charged twice.

A cost model prices what a request has received, ``h(p, q)`` for ``p`` prompt and ``q`` output tokens, and charges it as
it grows: ``h(p, 0)`` at the first dispatch, ``h(p, q) - h(p, q - 1)`` with output token ``q``. All of them are members
of one family,

    h(p, q) = base + prompt * p + output * q + cross * p * q + square * q * q        (no coefficient below 0)

    linear         w_prompt p + w_output q
    uncached       w_prompt (p - cached) + w_output q        cached: prompt tokens found in the backend's prefix cache
    profiled       measured milliseconds of a full batch: all five coefficients
    step-time      milliseconds by a model of the server's steps (``step_coefficients``)
    kv-token-time  p q + q (q + 1) / 2: tokens of KV held, summed over the steps

so one fairness core and one bound serve them all. A request of several sequences (``best_of``) is charged as so many
requests of ``q / n`` tokens each.

A resumed or retried request sends its prompt again and may generate tokens again. It remembers how many prompt and
output tokens have been paid for; only tokens beyond the marks are charged. What is computed again is the system's loss,
never the tenant's. Nothing is given back but what an estimated prompt proved too long: so counters are monotone, which
the bounds of ``core.bounds`` need.

Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), linear and general cost; uncached extend
after Locality-aware Fair Scheduling (DLPM); KV token-time as in Justitia.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from router_ext.core.config import BackendConfig, PoolConfig
from router_ext.core.kv import usable_blocks

if TYPE_CHECKING:
    from router_ext.core.request import Request


class CostModel:
    """A member of the family. ``is_uncached``: prompt tokens found in a prefix cache cost nothing.

    Units: service, not divided by the tenant's weight: weighted tokens under ``linear`` and ``uncached``, milliseconds
    of a GPU under ``profiled`` and ``step-time``, token-steps under ``kv-token-time``.
    Cost: O(1) per charge.
    """

    __slots__ = ("base", "cross", "is_uncached", "output_price", "prompt_price", "square")

    def __init__(
        self,
        *,
        prompt: float,
        output: float,
        base: float = 0.0,
        cross: float = 0.0,
        square: float = 0.0,
        is_uncached: bool = False,
    ) -> None:
        self.prompt_price = prompt
        self.output_price = output
        self.base = base
        self.cross = cross
        self.square = square
        self.is_uncached = is_uncached

    def service(self, prompt: float, output: float) -> float:
        """``h(prompt, output)`` of one sequence of which nothing was cached."""
        return self.base + self.prompt_price * prompt + self.decode(prompt, output)

    def decode(self, prompt: float, output: float) -> float:
        """``h(prompt, output) - h(prompt, 0)``."""
        return output * (self.output_price + self.cross * prompt + self.square * output)

    # --- charging --------------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> float:
        """Service to charge at a dispatch: the prompt at the first, nothing later. Moves the mark."""
        if request.is_charged:
            return self.correct_prompt(request) if request.sent_prompt_tokens > request.paid_in else 0.0
        request.is_charged = True
        request.paid_in = request.sent_prompt_tokens
        if self.is_uncached:
            request.paid_cached = request.cached_tokens
        return self.base * request.num_sequences + self.prompt_price * _uncached(request)

    def correct_prompt(self, request: Request) -> float:
        """Service to charge (or, negative, to give back) once the true length of a charged prompt is known.

        The only settlement: at most what was charged on the estimate is given back. Moves the mark.
        """
        before = _uncached(request)
        longer = request.sent_prompt_tokens - request.paid_in
        request.paid_in = request.sent_prompt_tokens
        service = self.prompt_price * (_uncached(request) - before)
        return service + self.cross * longer / request.num_sequences * request.paid_out

    def output(self, request: Request) -> float:
        """Service of the output tokens beyond the mark. Moves the mark."""
        paid, tokens = request.paid_out, request.output_tokens
        if tokens <= paid:
            return 0.0
        request.paid_out = tokens
        return self._decode_between(request, paid, tokens)

    def ahead(self, request: Request, tokens: int) -> float:
        """Service that the next ``tokens`` output tokens of a request will cost. Moves nothing."""
        paid, total = request.paid_out, request.output_tokens + tokens
        return self._decode_between(request, paid, total) if total > paid else 0.0

    def _decode_between(self, request: Request, first: int, last: int) -> float:
        price = self.output_price + self.cross * request.prompt_tokens
        return (last - first) * (price + self.square * (last + first) / request.num_sequences)

    # --- the bound -------------------------------------------------------------------------------------------------

    def peak_service(self, config: PoolConfig) -> float:
        """``U'``: the most service one tenant can still be charged for what runs, from its last admission on.

        A dispatch of ``t = p + q`` tokens holds ``t - 1`` tokens of KV, and its decode charge per token of KV grows
        with ``q``: so it is at most ``density = max over p of decode(p, T - p) / (T - 1)``, with ``T`` the most tokens
        of one request a backend takes. All backends full of work at that density, and in one place the request
        admitted last, whose prompt is charged as well:

            U' = sum over backends of density * M  +  max over p, q of  h(p, q) - density * (p + q - 1)

        Both maxima are those of a quadratic function of ``p``, taken over real numbers: never too small, and too large
        by less than one request. 0 for a pool without KV.
        """
        total = largest = 0.0
        for backend in config.backends.values():
            held = _held(backend)
            if held <= 0:
                continue
            density = max(self.decode(p, t - p) / (t - 1) for p, t in self._shapes(backend, 1, 0.0))
            total += density * held
            for sequences in range(1, backend.max_sequences + 1):
                for p, t in self._shapes(backend, sequences, self.prompt_price):
                    for q in (1.0, t - p):
                        excess = self.service(p, q) - density * (p + q - 1.0)
                        largest = max(largest, sequences * excess)
        return total + largest

    def _shapes(self, backend: BackendConfig, sequences: int, prompt_price: float) -> Iterator[tuple[float, float]]:
        """(p, T) with the largest ``prompt_price * p + decode(p, T - p)`` among them, T being the longest total.

        The charge is quadratic in ``p``: its maximum is at the shortest prompt, at the longest, or where the derivative
        is 0.
        """
        total = float(min(_held(backend) // sequences + 1, backend.max_total_tokens))
        longest = max(1.0, min(float(backend.max_input_tokens), total - 1.0))
        total = max(total, 2.0)
        yield 1.0, total
        yield longest, total
        curve = self.square - self.cross
        if curve < 0.0:
            slope = prompt_price - self.output_price + (self.cross - 2.0 * self.square) * total
            yield min(longest, max(1.0, -slope / (2.0 * curve))), total


class LinearCost(CostModel):
    """``w_prompt p + w_output q``: the default, and the cheapest per token."""

    __slots__ = ()

    def output(self, request: Request) -> float:
        """Service of the output tokens beyond the mark. Moves the mark."""
        unpaid = request.output_tokens - request.paid_out
        if unpaid <= 0:
            return 0.0
        request.paid_out = request.output_tokens
        return self.output_price * unpaid

    def peak_service(self, config: PoolConfig) -> float:
        """``w_output (M + n) + max(0, w_prompt - w_output) L``, with ``n`` the most sequences of one request.

        The tokens charged are those that hold KV and ``n`` more, because the last token a sequence produces takes none.
        """
        tokens = pool_tokens(config)
        if tokens <= 0:
            return 0.0
        sequences = max(backend.max_sequences for backend in config.backends.values())
        excess = max(0.0, self.prompt_price - self.output_price)
        return self.output_price * (tokens + sequences) + excess * longest_prompt(config)


def build_cost(config: PoolConfig) -> CostModel:
    """The model a pool's configuration names, with its coefficients."""
    match config.cost_model:
        case "linear" | "uncached":
            is_uncached = config.cost_model == "uncached"
            return LinearCost(prompt=config.w_prompt, output=config.w_output, is_uncached=is_uncached)
        case "profiled":
            return CostModel(
                base=config.profiled_base,
                prompt=config.profiled_prompt,
                output=config.profiled_output,
                cross=config.profiled_cross,
                square=config.profiled_square,
            )
        case "step-time":
            return step_cost(config)
        case _:
            return CostModel(prompt=0.0, output=0.5, cross=1.0, square=0.5)


def step_cost(config: PoolConfig) -> CostModel:
    """Milliseconds by the server's steps: a prompt is processed in ``prefill_ms + prefill_token_ms * p``; a step of
    ``n`` sequences takes ``step_ms + step_sequence_ms * n + step_context_ms * context``, of which a token pays its own
    context and sequence and the n-th part of the rest, with ``n`` the batch stated in ``step_batch``."""
    context = config.step_context_ms
    return CostModel(
        base=config.prefill_ms,
        prompt=config.prefill_token_ms,
        output=config.step_ms / config.step_batch + config.step_sequence_ms + context / 2.0,
        cross=context,
        square=context / 2.0,
    )


def pool_tokens(config: PoolConfig) -> int:
    """``M``: KV tokens that requests can hold together, over all configured backends."""
    return sum(_held(backend) for backend in config.backends.values())


def longest_prompt(config: PoolConfig) -> int:
    """``L``: prompt tokens of the longest request some backend takes, over all its sequences."""
    return max(
        (min(b.max_sequences * b.max_input_tokens, _held(b)) for b in config.backends.values()),
        default=0,
    )


def _held(backend: BackendConfig) -> int:
    return usable_blocks(backend) * backend.block_size


def _uncached(request: Request) -> int:
    """Prompt tokens charged for, over all sequences: those of the mark that were not cached at the first charge."""
    return max(0, request.paid_in - request.paid_cached * request.num_sequences)
