"""One client request from admission to its end: its books, its generations and its answer.

    Call (one slot in the ledger, one usage event)
      |-- Client       where the answer goes
      |-- Encoder      how it is written
      '-- Generation   one per prompt (only completions have several); each is one request of the scheduler

A call ends exactly once, by ``finish``: completed, cancelled, failed or expired. Counters are stored in the ledger's
memory-mapped words before the bytes they count are handed to the connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from router_ext.core.ids import RequestId
from router_ext.errors import FairlaneError
from router_ext.gateway.auth import Identity
from router_ext.gateway.encoders import Encoder
from router_ext.gateway.generation import GenerationRequest, ResumeClass, worst_class
from router_ext.gateway.refusals import error_response
from router_ext.gateway.streams import Client, Response
from router_ext.obs.tracing import Trace
from router_ext.sync.inflight import (
    FIRST_DISPATCH_US,
    FIRST_TOKEN_US,
    KV_TOKEN_US,
    OUTPUT_TOKENS,
    PREEMPTIONS,
    PROMPT_TOKENS,
    RECOMPUTED_TOKENS,
    RESUMED_PREFILL_TOKENS,
    SEGMENTS,
    TOKEN_SOURCE,
    TOKEN_SOURCES,
    InflightSlot,
)
from router_ext.wire.headers import Headers, Timings

if TYPE_CHECKING:
    from router_ext.gateway.engine import PoolEngine
    from router_ext.gateway.foresight import Foresight

CLIENT_CLOSED = 499
"""Status in log and trace of a request whose client went away before its answer was complete."""

MAX_EXPLANATION = 16
"""Reasons kept per request; the first ones tell why it waited."""


class Generation(Protocol):
    """One generation of a call, as the engine and the call see it."""

    request_id: RequestId

    @property
    def resume_class(self) -> ResumeClass:
        """How faithful it is so far."""

    def cancel(self) -> None:
        """Stop in whatever state: close the upstream in this turn and tell the scheduler. No callback follows."""

    def pause(self) -> None:
        """The client does not read."""

    def resume(self) -> None:
        """The client reads again."""


def _now_us() -> int:
    return time.time_ns() // 1_000


class Call:
    """State of one client request.

    Attributes:
        arrived_s: instant on the loop's clock. validated_s: when it was measured and ready to be queued.
        dispatched_s, upstream_s (first answer of a backend), first_token_s, last_token_s: likewise, None before.
        characters: of all prompts, a chat's after templating.
        foresight: what was predicted of it. trace: its place in a trace, if it has one.
        limit_headers: what an answer says of the tenant's and key's limits, as of now. demotion: why its tier is not
            the one it would have had, None if it is.
        write_failure: an error inside the stream, in its dialect; set before its first byte.
        attempts: dispatches after a failure, and the first; continuations of slices are none.
        output_tokens: tokens handed to the client's connection. prompt_tokens: of all prompts.
        status: of the answer, known when the call ends.
        resume_class: of its least faithful generation, set when it ends, however it ends.
    """

    __slots__ = (
        "_engine",
        "_generations",
        "_is_ended",
        "_open_generations",
        "_words",
        "arrived_s",
        "attempts",
        "backends",
        "characters",
        "client",
        "demotion",
        "dispatched_s",
        "encoder",
        "explanation",
        "finish_reason",
        "first_token_s",
        "foresight",
        "identity",
        "last_token_s",
        "limit_headers",
        "output_tokens",
        "predicted_tokens",
        "preemptions",
        "prompt_tokens",
        "recomputed_tokens",
        "request",
        "resume_class",
        "resumed_prompt_tokens",
        "segments",
        "slot",
        "status",
        "tier",
        "trace",
        "upstream_s",
        "validated_s",
        "write_failure",
    )

    def __init__(
        self,
        engine: PoolEngine,
        *,
        request: GenerationRequest,
        identity: Identity,
        tier: str,
        client: Client,
        slot: InflightSlot,
        arrived_s: float,
        validated_s: float,
        prompt_tokens: int,
        predicted_tokens: int | None,
        characters: int,
        foresight: Foresight,
        limit_headers: Callable[[], Headers],
        demotion: str | None,
        trace: Trace | None = None,
    ) -> None:
        self._engine = engine
        self._words = slot.words
        self._generations: Sequence[Generation] = ()
        self._open_generations = 0
        self._is_ended = False
        self.request = request
        self.identity = identity
        self.tier = tier
        self.client = client
        self.slot = slot
        self.arrived_s = arrived_s
        self.validated_s = validated_s
        self.dispatched_s: float | None = None
        self.upstream_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.encoder: Encoder | None = None
        self.write_failure: Callable[[FairlaneError], bytes] | None = None
        self.output_tokens = 0
        self.prompt_tokens = prompt_tokens
        self.predicted_tokens = predicted_tokens
        self.characters = characters
        self.foresight = foresight
        self.trace = trace
        self.limit_headers = limit_headers
        self.demotion = demotion
        self.recomputed_tokens = 0
        self.resumed_prompt_tokens = 0
        self.segments = 0
        self.attempts = 1
        self.preemptions = 0
        self.backends: list[str] = []
        self.explanation: list[str] = []
        self.finish_reason: str | None = None
        self.status = 200
        self.resume_class: ResumeClass | None = None

    @property
    def is_ended(self) -> bool:
        return self._is_ended

    @property
    def generations(self) -> Sequence[Generation]:
        """Its generations until it ends."""
        return self._generations

    @property
    def overhead_s(self) -> float:
        """The router's own part of the time to the first token: from the request's head to the queue."""
        return self.validated_s - self.arrived_s

    @property
    def request_id(self) -> str:
        return self.slot.start.request

    def begin(self, generations: Sequence[Generation]) -> None:
        """Watch the client; its generations are about to be queued."""
        self._generations = generations
        self._open_generations = len(generations)
        self.client.on_gone = self.client_gone
        self.client.on_pause = self._paused
        self.client.on_resume = self._resumed
        if self.trace is not None:
            self.trace.event("enqueued")

    # --- progress ---------------------------------------------------------------------------------------------------

    def dispatched(self, backend: str, *, resumed_prompt_tokens: int, is_after_preemption: bool, reason: str) -> None:
        """A slice goes to a backend. What a continuation sends again is nobody's doing, after a cut it is the cut's."""
        words = self._words
        if self.dispatched_s is None:
            self.dispatched_s = self._engine.loop.time()
            words[FIRST_DISPATCH_US] = _now_us()
        self.segments += 1
        words[SEGMENTS] = self.segments
        if resumed_prompt_tokens and is_after_preemption:
            self.recomputed(resumed_prompt_tokens)
        elif resumed_prompt_tokens:
            self.resumed_prompt_tokens += resumed_prompt_tokens
            words[RESUMED_PREFILL_TOKENS] = self.resumed_prompt_tokens
        if backend not in self.backends:
            self.backends.append(backend)
        if reason and len(self.explanation) < MAX_EXPLANATION:
            self.explanation.append(reason)
        if self.trace is not None:
            # A slice or try after the first goes on where the one before stopped.
            self.trace.event("dispatched" if self.segments == 1 else "resumed", {"fairlane.backend": backend})

    def shown(self, count: int) -> None:
        """``count`` tokens are about to be handed to the client: the books come first."""
        if self.first_token_s is None:
            self.first_token_s = self._engine.loop.time()
            self._words[FIRST_TOKEN_US] = now_us = _now_us()
            self._words[PROMPT_TOKENS] = self.prompt_tokens
            if self.trace is not None:
                self.trace.event("first_token")
            self._engine.first_token(self.tier, self.first_token_s - self.arrived_s, now_us)
        self.output_tokens += count
        self._words[OUTPUT_TOKENS] = self.output_tokens

    def recomputed(self, count: int) -> None:
        """``count`` generated tokens were dropped, or ``count`` tokens are processed again after a preemption."""
        self.recomputed_tokens += count
        self._words[RECOMPUTED_TOKENS] = self.recomputed_tokens

    def preempted(self) -> None:
        """A running slice was cut for others; the scheduler knows for whom."""
        self.preemptions += 1
        self._words[PREEMPTIONS] = self.preemptions
        if self.trace is not None:
            self.trace.event("preempted")

    def held(self, kv_tokens: int, seconds: float) -> None:
        """A slice has held ``kv_tokens`` of KV for ``seconds``."""
        self._words[KV_TOKEN_US] += int(kv_tokens * seconds * 1e6)

    def counted(self, prompt_tokens: int, output_tokens: int, source: str = "backend") -> None:
        """The counts of a whole answer: the backend's own, or the router's of its text."""
        self.prompt_tokens = prompt_tokens
        self._words[TOKEN_SOURCE] = TOKEN_SOURCES.index(source)
        self.shown(output_tokens - self.output_tokens)
        self._words[PROMPT_TOKENS] = prompt_tokens

    def write(self, data: bytes) -> None:
        """Hand encoded bytes to a streaming client; the head goes with the first of them."""
        if not data:
            return
        # The way of every token.
        exchange = self.client.exchange
        if not exchange.is_open:
            assert self.encoder is not None
            self.client.begin([*self.encoder.headers(), *self._engine.answer_headers(self)])
        exchange.write(data)

    # --- ends -------------------------------------------------------------------------------------------------------

    def generation_done(self, finish_reason: str) -> None:
        """One generation is complete and its last bytes are written; the last one ends the call."""
        self.finish_reason = finish_reason
        self._open_generations -= 1
        if self._open_generations:
            return
        encoder = self.encoder
        assert encoder is not None
        self._words[PROMPT_TOKENS] = self.prompt_tokens
        self.last_token_s = self._engine.loop.time()
        rest = encoder.end()
        if encoder.is_stream:
            self.write(rest)
            self._end("completed", None)
            self.client.finish()
            return
        headers = [*encoder.headers(self._timings()), *self._engine.answer_headers(self)]
        self._end("completed", None)
        self.client.answer(Response(status=200, headers=headers, body=rest))

    def relayed(self, response: Response | None, *, outcome: str, code: str | None) -> None:
        """A passed-through answer is complete: all of a stream has been written, or ``response`` is the answer."""
        self.last_token_s = self._engine.loop.time()
        self._end(outcome, code)
        if response is None:
            self.client.finish()
        else:
            self.client.answer(response)

    def fail(self, error: FairlaneError, *, outcome: str = "failed") -> None:
        """End with an error in the client's dialect: with its real status if nothing was sent, in-band otherwise."""
        if self._is_ended:
            return
        self._stop_generations()
        self.status = self._status(error)
        self._end(outcome, error.code)
        client = self.client
        if client.has_begun:
            assert self.write_failure is not None
            client.write(self.write_failure(error))
            client.finish()
        else:
            client.answer(self._refusal(error))

    def refuse(self, error: FairlaneError) -> None:
        """End a request that was never queued: it is not in the books."""
        if self._is_ended:
            return
        self._is_ended = True
        self._stop_generations()
        self.status = self._status(error)
        self._engine.call_refused(self, error)
        self.client.answer(self._refusal(error))

    def _status(self, error: FairlaneError) -> int:
        if self.client.has_begun:
            return 200
        return error.status_openai if self.request.dialect.is_openai else error.status_native

    def _refusal(self, error: FairlaneError) -> Response:
        extra = self._engine.answer_headers(self)
        status, headers, body = error_response(error, self.request.dialect, extra=extra)
        return Response(status=status, headers=headers, body=body)

    def client_gone(self) -> None:
        """The client's connection has closed: everything of this request ends in this turn."""
        if self._is_ended:
            return
        self._stop_generations()
        self.status = CLIENT_CLOSED
        self._end("cancelled", "client_stalled" if self.client.is_stalled else None)

    def _stop_generations(self) -> None:
        for generation in self._generations:
            generation.cancel()

    def _end(self, outcome: str, code: str | None) -> None:
        self._is_ended = True
        self.resume_class = worst_class([generation.resume_class for generation in self._generations])
        self._generations = ()
        self._engine.call_ended(self, outcome=outcome, code=code)

    def _timings(self) -> Timings:
        now = self._engine.loop.time()
        dispatched = self.dispatched_s if self.dispatched_s is not None else now
        return Timings(
            total_s=now - self.arrived_s,
            validation_s=self.validated_s - self.arrived_s,
            queue_s=dispatched - self.validated_s,
            inference_s=now - dispatched,
        )

    def _paused(self) -> None:
        for generation in self._generations:
            generation.pause()

    def _resumed(self) -> None:
        for generation in self._generations:
            generation.resume()
