"""Permits, validation and the life of a generation between its endpoint and the runner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from router_ext.devserver.codec import Codec
from router_ext.devserver.constraint import ServerDies
from router_ext.devserver.generation import Generation, GenerationFailed, Sink, Timing
from router_ext.devserver.http import Exchange
from router_ext.devserver.metrics import Metrics
from router_ext.devserver.runner import Runner
from router_ext.devserver.sinks import Collected, Collector
from router_ext.devserver.validation import Constrain, Limits, ValidRequest, check_lengths, check_parameters, validate

_INLINE_CHARACTERS = 8192  # longer prompts are tokenised by the validation workers, off the event loop


class Admission:
    """TGI's semaphore and validation in front of the queue. ``runner`` is set once it exists.

    A permit is held from the request to its last event, or until its client leaves; nobody waits for one.

    Args:
        constrain: what a grammar binds a generation to.
        die: ends the process, because TGI's would have died here; told why.
    """

    runner: Runner

    def __init__(
        self,
        *,
        limits: Limits,
        codec: Codec,
        metrics: Metrics,
        eos_ids: frozenset[int],
        constrain: Constrain,
        die: Callable[[str], None],
    ) -> None:
        self.limits = limits
        self.codec = codec
        self.metrics = metrics
        self._eos_ids = eos_ids
        self._constrain = constrain
        self._die = die
        self._permits = limits.max_concurrent_requests
        self._workers = ThreadPoolExecutor(limits.validation_workers, thread_name_prefix="tokenizer")

    async def begin(
        self,
        exchange: Exchange,
        inputs: str,
        parameters: dict[str, Any],
        sink: Sink,
        *,
        add_special_tokens: bool,
        is_detached: bool = False,
        uses_prefix_cache: bool = True,
        before_queueing: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """Take a permit, validate, queue. The permit is given back when the generation ends or its client leaves.

        Args:
            is_detached: a task of its own forwards the tokens, so that the client's leaving is noticed one token
                late and the permit kept till then (streamed completions).

        Raises:
            GenerationFailed: overloaded or invalid; no permit is held then.
        """
        if self._permits <= 0:
            self.metrics.count("tgi_request_failure", 'err="overloaded"')
            raise GenerationFailed(message="Model is overloaded", error_type="overloaded", status=429)
        self._permits -= 1
        started = time.monotonic()
        try:
            request = await self._validated(inputs, parameters, add_special_tokens=add_special_tokens)
        except BaseException:
            self._permits += 1
            raise
        timing = Timing(arrived=exchange.arrived, validated=time.monotonic())
        self.metrics.observe("tgi_request_validation_duration", timing.validated - started)
        self._note_validated(request)
        generation = Generation(request, sink, self.codec, self._eos_ids, timing)
        if not uses_prefix_cache:
            generation.entry.prompt_ids = None
        if before_queueing is not None:
            before_queueing(generation)
        self._watch(exchange, generation, is_detached=is_detached)
        if not generation.is_closed:
            self.runner.submit(generation)
        return generation

    def _watch(self, exchange: Exchange, generation: Generation, *, is_detached: bool) -> None:
        """Close the generation when the client leaves."""
        before = exchange.on_gone

        def gone() -> None:
            if before is not None:
                before()
            if generation.timing.ended or generation.is_closed:
                return
            generation.is_closed = True
            if is_detached:
                generation.is_lagging = True
            else:
                generation.entry.is_closed = True
                self._release(generation)

        if exchange.is_gone:
            generation.is_closed = generation.entry.is_closed = True
            self._release(generation)
            self.metrics.count("tgi_request_failure", 'err="dropped"')
        else:
            exchange.on_gone = gone

    def drop(self, generation: Generation) -> None:
        """End a generation that nobody wants any more; without effect on one that has ended."""
        if not generation.timing.ended:
            generation.is_closed = generation.entry.is_closed = True
            self._release(generation)

    def _release(self, generation: Generation) -> None:
        if generation.holds_permit:
            generation.holds_permit = False
            self._permits += 1

    async def _validated(self, inputs: str, parameters: dict[str, Any], *, add_special_tokens: bool) -> ValidRequest:
        try:
            check_parameters(inputs, parameters, self.limits)
            ids = await self.in_worker(
                inputs, lambda text: self.codec.encode(text, add_special_tokens=add_special_tokens)
            )
            return validate(
                inputs,
                parameters,
                ids,
                self.limits,
                add_special_tokens=add_special_tokens,
                constrain=self._constrain,
            )
        except GenerationFailed as e:
            if e.error_type == "validation":
                self.metrics.count("tgi_request_failure", 'err="validation"')
            raise
        except ServerDies as e:
            self._die(str(e))
            raise GenerationFailed(message=str(e), error_type="incomplete_generation", status=500) from e

    async def in_worker(self, text: str, work: Callable[[str], Any]) -> Any:
        """Tokenise with ``work``: at once if the text is short, else in a validation worker."""
        if len(text) <= _INLINE_CHARACTERS:
            return work(text)
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, text)

    def _note_validated(self, request: ValidRequest) -> None:
        self.metrics.observe("tgi_request_input_length", len(request.input_ids))
        self.metrics.observe("tgi_request_max_new_tokens", request.piece_tokens)

    def next_piece(self, generation: Generation) -> tuple[list[int], int] | None:
        """Ids and limit of the next 1024-token piece, or None if it does not fit any more."""
        request = generation.request
        ids = self.codec.encode(generation.fed_text, add_special_tokens=request.add_special_tokens)
        if request.truncate is not None:
            ids = ids[-request.truncate :]
        try:
            piece, _ = check_lengths(len(ids), request.max_new_tokens, self.limits)
        except GenerationFailed:
            return None
        self.metrics.observe("tgi_request_input_length", len(ids))
        self.metrics.observe("tgi_request_max_new_tokens", piece)
        return ids, piece

    def finished(self, generation: Generation) -> None:
        """The runner says that a generation has ended by itself."""
        self._release(generation)
        timing, metrics = generation.timing, self.metrics
        metrics.count("tgi_request_success")
        total = timing.ended - timing.arrived
        inference = timing.ended - timing.batched
        metrics.observe("tgi_request_duration", total)
        metrics.observe("tgi_request_queue_duration", timing.batched - timing.validated)
        metrics.observe("tgi_request_inference_duration", inference)
        metrics.observe("tgi_request_mean_time_per_token_duration", inference / generation.generated)

    def left(self, generation: Generation) -> None:
        """The runner says that a generation was dropped or has failed."""
        self._release(generation)

    async def collect(
        self,
        exchange: Exchange,
        prompts: list[str],
        parameters: dict[str, Any],
        *,
        add_special_tokens: bool,
        uses_prefix_cache: bool = True,
    ) -> list[Collected]:
        """Run the prompts side by side; the first failure is everyone's, and the others are dropped.

        Raises:
            GenerationFailed: one of them failed.
            asyncio.CancelledError: the client has left.
        """
        loop = asyncio.get_running_loop()
        collectors = [Collector(loop) for _ in prompts]
        begun: list[Generation] = []
        try:
            for prompt, collector in zip(prompts, collectors, strict=True):
                begun.append(
                    await self.begin(
                        exchange,
                        prompt,
                        parameters,
                        collector,
                        add_special_tokens=add_special_tokens,
                        uses_prefix_cache=uses_prefix_cache,
                    )
                )
            task = asyncio.current_task()
            before = exchange.on_gone

            def gone() -> None:
                if before is not None:
                    before()
                if task is not None:
                    task.cancel()

            exchange.on_gone = gone
            if exchange.is_gone:
                raise asyncio.CancelledError
            return await asyncio.gather(*(c.future for c in collectors))
        except GenerationFailed:
            for generation in begun:
                self.drop(generation)
            raise

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
