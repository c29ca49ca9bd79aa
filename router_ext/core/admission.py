"""May this request start on this backend, now?

Four gates, in this order: KV (``core.kv``), concurrency (TGI answers 429 beyond ``max_concurrent_requests``, queued
ones included), the prefill gate and the headroom. The last two hold back non-urgent work only.

Prefill gate: TGI admits nobody while a long prompt is processed. Non-urgent work is dispatched only while the prompt
tokens sent before and not yet answered, plus its own, stay within the window

    min(prefill budget, prefill rate * half of the tightest active TTFT target)

so that an urgent request arriving next waits at most about half its target. A prompt larger than the window (an
elephant) goes alone; and where one elephant takes longer than half of the target and the pool has several backends,
one backend is always kept free of elephants.

Headroom: while a tier with a target is active, non-urgent work leaves one typical urgent reservation free on each
backend; an idle backend ignores it. Where slices end before their answers, it also leaves what a tenth of the running
requests would go on with: a request that goes on where its slice ended finds its prompt in the prefix cache
(``Decider.slice_ended``), one that finds no KV there has it computed again.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from router_ext.core.config import BackendConfig
from router_ext.core.estimates import LinearFit
from router_ext.core.explain import Gate
from router_ext.core.exposure import Exposure
from router_ext.core.ids import BackendId
from router_ext.core.kv import Ledger
from router_ext.core.lifecycle import State
from router_ext.core.prefix import PREFIX_BLOCK_TOKENS, PrefixIndex
from router_ext.core.request import Request

_DEFAULT_STEP_S = 0.05
"""Step time before anything was observed; only orders guesses, and bounds the release lag of the first cancels."""

_LARGE_HEADROOM = 0.125
"""Share of the KV up to which headroom is doubled."""

_LAG_MARGIN = 1.5
"""A closed stream's KV counts as held for this many estimated steps: too early a release queues inside TGI."""

_OVERTIME_RATIO = 0.25
"""A request that has outlived its prediction is expected to produce this share of its output again."""

_BURST_TOKENS = 8
"""More tokens than this at once are the end of an answer that came whole, not its first token."""

_ONWARD_SHARE = 0.1
"""Share of the running requests for whose next slices KV is left free: nine in ten go on in place for 1% of the KV.
Chosen on traces and seeds that are not reported; half as much gains less, much more costs small pools output."""

_SCAN_LIMIT = 64
"""Expected releases looked at; beyond it the KV counts as far away."""


class Backend:
    """What the scheduler knows of one backend: ledger, seats, prompts in prefill, learned speed.

    Attributes:
        index: position in the order of backend ids; the tie-break of placement.
        is_on_trial: it failed lately, and has one seat until it has shown that it serves.
        exposure: what may not start beside whom here.
        prefixes: starts of prompts it probably still holds.
        spare_tokens: input plus new tokens beyond the free KV that still fit (TGI reserves one token less).
        prefill: prompt tokens of dispatches whose first token has not come, by ticket, in dispatch order (TGI's
            prefill is first come, first served).
        running: dispatches that run here, by ticket, in dispatch order.
        cut: tickets of those of them that were told to stop.
        closing: when TGI frees the KV of streams that were closed, by ticket.
        releases: (expected time, ticket, blocks) of running and closing dispatches, ascending: when KV will come back.
    """

    __slots__ = (
        "backend_id",
        "block_size",
        "closing",
        "config",
        "cut",
        "exposure",
        "index",
        "is_cordoned",
        "is_on_trial",
        "is_retired",
        "is_up",
        "ledger",
        "num_running",
        "prefill",
        "prefill_fit",
        "prefill_tokens",
        "prefixes",
        "releases",
        "running",
        "seats",
        "spare_tokens",
        "step_fit",
    )

    def __init__(self, config: BackendConfig) -> None:
        self.backend_id: BackendId = config.backend
        self.index = 0
        self.is_up = False
        self.is_on_trial = False
        self.is_retired = False
        self.ledger = Ledger(config)
        self.num_running = 0
        self.seats = 0
        self.prefill: dict[int, int] = {}
        self.prefill_tokens = 0
        self.running: dict[int, Request] = {}
        self.cut: set[int] = set()
        self.closing: dict[int, float] = {}
        self.releases: list[tuple[float, int, int]] = []
        self.exposure = Exposure()
        self.prefixes = PrefixIndex()
        self.prefill_fit = LinearFit()
        self.step_fit = LinearFit()
        self.apply(config)

    def apply(self, config: BackendConfig) -> None:
        """Take over a changed statement of the operator."""
        self.config = config
        self.block_size = config.block_size
        self.is_cordoned = config.is_cordoned
        self.ledger.resize(config)
        self.spare_tokens = 1 - config.speculate

    @property
    def is_usable(self) -> bool:
        """May be given work."""
        return self.is_up and not self.is_cordoned and not self.is_retired

    @property
    def max_seats(self) -> int:
        """Sequences it may run at once. A request alone may have more: TGI refuses those of two, never the first."""
        return 1 if self.is_on_trial else self.config.max_concurrent_requests

    def blocks(self, request: Request, new_tokens: int) -> int:
        """Blocks a dispatch of ``request`` with ``new_tokens`` reserves here, over all its sequences.

        The 1,024 cap of TGI's rule is in ``new_tokens`` already; work that cannot be sliced reserves its whole
        length instead, because TGI would come back for the rest without asking.
        """
        tokens = request.input_tokens + new_tokens + self.config.speculate - 1
        return -(-tokens // self.block_size) * request.num_sequences

    def can_hold(self, request: Request, new_tokens: int) -> bool:
        """Whether a dispatch of ``request`` with ``new_tokens`` would fit here if nothing else ran."""
        config = self.config
        prompt = request.input_tokens
        if prompt > config.max_input_tokens or prompt + new_tokens > config.max_total_tokens:
            return False
        if request.grammar is not None and not config.takes_grammars:
            return False
        return self.blocks(request, new_tokens) <= self.ledger.usable_blocks

    # --- changes -------------------------------------------------------------------------------------------------

    def start(self, request: Request, blocks: int, now: float) -> None:
        """Book a dispatch."""
        ticket = request.ticket
        ledger = self.ledger
        ledger.reserve(ticket, blocks)
        prefixes = self.prefixes
        if request.prefix:
            found = prefixes.start(ticket, request.prefix) * PREFIX_BLOCK_TOKENS
            # TGI matches whole blocks of its own, and computes at least the last token.
            request.cached_tokens = min(found - found % self.block_size, request.input_tokens - 1)
        if prefixes.idle:
            prefixes.trim(ledger.free_blocks * self.block_size)
        self.running[ticket] = request
        self.num_running += 1
        self.seats += request.num_sequences
        prompt = request.input_tokens - request.kept_tokens
        request.prefill_ahead_tokens = self.prefill_tokens + prompt
        self.prefill[ticket] = prompt
        self.prefill_tokens += prompt
        if request.grammar is not None or request.is_suspect:
            self.exposure.begin(request)
        expected = request.predicted_rest()
        if expected > request.slice_tokens:
            expected = request.slice_tokens
        first_token_s = self.first_token_s(request.prefill_ahead_tokens) + self.exposure.stall_s
        request.release_at_s = now + first_token_s + expected * self.step_s()
        insort(self.releases, (request.release_at_s, ticket, blocks))

    def first_token(self, request: Request, now: float, tokens: int = 1) -> None:
        """The prompt of a running dispatch is done, and with it every prompt sent before. ``tokens``: so many came."""
        prefill = self.prefill
        ticket = request.ticket
        is_watched = ticket in prefill
        taken_s = now - request.dispatched_s
        is_compiled = request.grammar is not None and self.exposure.is_new(request)
        if is_compiled:
            usual_s = self.first_token_s(request.prefill_ahead_tokens)
            is_seen = is_watched and tokens <= _BURST_TOKENS
            self.exposure.compiled(request, taken_s - usual_s if is_seen else None)
        if not is_watched:
            return
        if not is_compiled:
            self.prefill_fit.observe(request.prefill_ahead_tokens, taken_s)
        for earlier in list(prefill):
            self.prefill_over(earlier)
            if earlier == ticket:
                return

    def prefill_over(self, ticket: int) -> None:
        """The prompt of a dispatch needs no more attention, whatever became of it."""
        tokens = self.prefill.pop(ticket, None)
        if tokens is not None:
            self.prefill_tokens -= tokens
            if ticket == self.exposure.ticket:
                self.exposure.end()

    def correct(self, request: Request, blocks: int) -> None:
        """The running dispatch reserves something else than was assumed."""
        self._forget_release(request.release_at_s, request.ticket)
        self.ledger.correct(request.ticket, blocks)
        request.blocks = blocks
        insort(self.releases, (request.release_at_s, request.ticket, blocks))
        tokens = self.prefill.get(request.ticket)
        if tokens is not None:
            left = max(1, request.input_tokens - request.kept_tokens)
            self.prefill[request.ticket] = left
            self.prefill_tokens += left - tokens

    def stop(self, request: Request) -> None:
        """The dispatch no longer runs; seats and expected release go at once, KV by ``free``."""
        if request.prefix:
            self.prefixes.stop(request.ticket, is_prefilled=request.ticket not in self.prefill)
        del self.running[request.ticket]
        self.cut.discard(request.ticket)
        self.num_running -= 1
        self.seats -= request.num_sequences
        self._forget_release(request.release_at_s, request.ticket)

    def close(self, ticket: int, at_s: float) -> None:
        """The stream of a dispatch that no longer runs was closed before its end; its KV comes back at ``at_s``."""
        self.closing[ticket] = at_s
        insort(self.releases, (at_s, ticket, self.ledger.holdings[ticket]))

    def free(self, ticket: int) -> None:
        """The KV of a dispatch is free again."""
        self.ledger.release(ticket)
        self.prefill_over(ticket)
        at_s = self.closing.pop(ticket, None)
        if at_s is not None:
            self._forget_release(at_s, ticket)

    def expect_release(self, request: Request, at_s: float) -> None:
        """The KV of a running dispatch is expected at another instant than before."""
        self._forget_release(request.release_at_s, request.ticket)
        request.release_at_s = at_s
        insort(self.releases, (at_s, request.ticket, request.blocks))

    def _forget_release(self, at_s: float, ticket: int) -> None:
        position = bisect_left(self.releases, (at_s, ticket))
        if position < len(self.releases) and self.releases[position][1] == ticket:
            del self.releases[position]

    # --- estimates -----------------------------------------------------------------------------------------------

    def step_s(self) -> float:
        """Seconds per token of a running request, at the present load (of one request, if there is none)."""
        line = self.step_fit.line
        return _DEFAULT_STEP_S if line is None else line[0] + line[1] * (self.num_running or 1)

    def first_token_s(self, prompt_tokens: int) -> float:
        """Seconds from dispatch to first token with so many prompt tokens to process, own ones included."""
        line = self.prefill_fit.line
        return _DEFAULT_STEP_S if line is None else line[0] + line[1] * prompt_tokens

    def first_token_line(self) -> tuple[float, float]:
        """The same as (seconds whatever the prompt, seconds per prompt token)."""
        return self.prefill_fit.line or (_DEFAULT_STEP_S, 0.0)

    def free_from(self, blocks: int, now: float, before_s: float) -> tuple[float, int] | None:
        """When so many blocks are expected to be free, and how many are then; None if not before ``before_s``.

        Expectations that time has proved wrong are taken anew: whoever outlives its prediction by a token is not
        about to end. Cost: a few expected releases, at most ``_SCAN_LIMIT``.
        """
        free = self.ledger.free_blocks
        if blocks <= free:
            return now, free
        releases = self.releases
        while releases and releases[0][0] < now and (late := self.running.get(releases[0][1])) is not None:
            self.expect_release(late, now + self.rest_s(late))
        for position, (expected_s, _, released) in enumerate(releases):
            free += released
            if blocks <= free:
                return max(expected_s, now), free
            if expected_s >= before_s:
                return None
            if position >= _SCAN_LIMIT:
                return expected_s + _SCAN_LIMIT * self.step_s(), free
        return (max(releases[-1][0], now) if releases else now), free

    def rest_s(self, request: Request) -> float:
        """Seconds until a running dispatch that shows tokens is expected to end."""
        if request.state is State.PREEMPTING:
            return self.step_s()
        rest = request.predicted_output_tokens - request.output_tokens
        if rest <= 0:
            rest = 1 + int(_OVERTIME_RATIO * request.output_tokens)
        limit = request.slice_tokens - request.slice_output
        return (1 + min(rest, max(limit, 0))) * self.step_s()

    def prefill_rate(self) -> float | None:
        """Prompt tokens per second, None before anything was observed."""
        line = self.prefill_fit.line
        return 1.0 / line[1] if line is not None and line[1] > 0.0 else None

    def release_lag_s(self, request: Request) -> float:
        """How long the KV of a stream that was just closed stays taken."""
        if request.ticket in self.prefill:
            ahead = 0
            for ticket, tokens in self.prefill.items():
                ahead += tokens
                if ticket == request.ticket:
                    break
            return _LAG_MARGIN * (self.first_token_s(ahead) + self.exposure.stall_s)
        return self.cut_lag_s()

    def cut_lag_s(self) -> float:
        """How long the KV of a stream that shows tokens stays taken after it was closed."""
        # The step in flight may be one that carries a long prompt: never count on less than the mean.
        return _LAG_MARGIN * max(self.step_s(), self.step_fit.mean() or 0.0)

    def closing_blocks(self, until_s: float) -> int:
        """Blocks that streams which are closed, or told to stop, give back until then."""
        blocks = 0
        closing, cut = self.closing, self.cut
        left = len(closing) + len(cut)
        if not left:
            return 0
        for at_s, ticket, released in self.releases:
            if at_s > until_s:
                break
            if ticket in closing or ticket in cut:
                blocks += released
                left -= 1
                if not left:
                    break
        return blocks

    # --- gates ---------------------------------------------------------------------------------------------------

    def window_tokens(self, tightest_target_s: float | None, rate: float | None) -> int:
        """The prefill gate's window, at ``rate`` prompt tokens per second (None: unknown).

        Without chunking a server takes newcomers when enough of them have come, so that fewer at once only lengthen
        everybody's wait: a narrower window would cost a fifth of the throughput and gain 6% of the TTFT (``flood``).
        """
        budget = self.config.prefill_budget_tokens
        if tightest_target_s is None or rate is None or not self.config.is_chunked:
            return budget
        return max(1, min(budget, int(rate * tightest_target_s / 2.0)))

    def has_elephant(self, limit_tokens: float) -> bool:
        """Whether a prompt longer than this is in prefill."""
        return any(tokens > limit_tokens for tokens in self.prefill.values())


def known_rate(backend: Backend, usable: list[Backend]) -> float | None:
    """Prefill rate of a backend; the slowest of the others' while its own is unknown."""
    rate = backend.prefill_rate()
    if rate is None:
        rates = [known for other in usable if (known := other.prefill_rate()) is not None]
        rate = min(rates, default=None)
    return rate


class Gates:
    """The prefill gate and the headroom of one pool, at one decision.

    Attributes:
        is_on: False under policies that do what TGI itself would do.
        is_waste_low: what preemption may cost is nearly spent. Headroom is then for two typical urgent reservations, as
            long as that is no large part of the KV: while work that started together runs, urgent heads find room no
            other way (burst: p99 of 16 seeds 1.48 -> 1.11 s; mixed: 0.80 -> 0.74 s for 0.1% of throughput; without the
            limit the capacity of tiers falls from 0.48 to 0.44 req/s).
    """

    __slots__ = (
        "_headroom_ratio",
        "_mean_onward_tokens",
        "_mean_urgent_tokens",
        "is_on",
        "is_waste_low",
        "tightest_target_s",
    )

    def __init__(self, *, headroom_ratio: float, is_on: bool) -> None:
        self.is_on = is_on
        self.is_waste_low = False
        self.tightest_target_s: float | None = None
        self._headroom_ratio = headroom_ratio
        self._mean_urgent_tokens: float | None = None
        self._mean_onward_tokens = 0.0

    def configure(self, *, headroom_ratio: float, is_on: bool) -> None:
        """Apply a changed configuration; what was learned stays."""
        self._headroom_ratio = headroom_ratio
        self.is_on = is_on

    def note_urgent(self, reservation_tokens: int) -> None:
        """Learn the size of a typical urgent reservation (mean of about the last thirty)."""
        mean = self._mean_urgent_tokens
        self._mean_urgent_tokens = (
            float(reservation_tokens) if mean is None else mean + (reservation_tokens - mean) / 32.0
        )

    def note_slice_end(self, onward_tokens: int) -> None:
        """A slice ended, and its request would go on at once with one of so many tokens (0: its answer is complete)."""
        self._mean_onward_tokens += (onward_tokens - self._mean_onward_tokens) / 32.0

    def headroom_blocks(self, backend: Backend, *, is_onward: bool = False) -> int:
        """Blocks that non-urgent work leaves free; ``is_onward``: work whose slice has just ended there."""
        if not self.is_on:
            return 0
        onward = 0.0 if is_onward else _ONWARD_SHARE * backend.num_running * self._mean_onward_tokens
        if self.tightest_target_s is None:
            return math.ceil(onward / backend.block_size)
        tokens = max(onward, self._headroom_ratio * backend.ledger.usable_blocks * backend.block_size)
        mean = self._mean_urgent_tokens
        if mean is not None:
            if self.is_waste_low:
                mean = max(mean, min(2.0 * mean, _LARGE_HEADROOM * backend.ledger.usable_blocks * backend.block_size))
            if mean > tokens:
                tokens = mean
        return int(-(-tokens // backend.block_size))

    def check(
        self, backend: Backend, request: Request, blocks: int, usable: list[Backend], *, is_onward: bool = False
    ) -> Gate:
        """Which gate holds non-urgent work back from a backend whose KV and seats suffice; NONE if it may start."""
        if not self.is_on:
            return Gate.NONE
        target = self.tightest_target_s
        prompt = request.input_tokens
        backlog = backend.prefill_tokens
        rate = None if target is None else known_rate(backend, usable)
        if backlog and backlog + prompt > backend.window_tokens(target, rate):
            return Gate.PREFILL
        if target is not None and rate is not None and len(usable) > 1:
            limit = rate * target / 2.0
            if prompt > limit:
                others = sum(1 for other in usable if other is not backend and other.has_elephant(limit))
                if others >= len(usable) - 1:
                    return Gate.PREFILL
        if backend.num_running and backend.ledger.free_blocks - blocks < self.headroom_blocks(
            backend, is_onward=is_onward
        ):
            return Gate.HEADROOM
        return Gate.NONE
