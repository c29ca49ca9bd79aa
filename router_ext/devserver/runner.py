"""Drives the batcher with a real clock: asks it for forwards, has the engine run them, hands out the tokens.

The torch engine's forwards run in one worker thread, so the event loop stays responsive; the model engine's are
instantaneous and made to last by the step-time model. Delivery happens on the event loop in batch order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from router_ext.devserver.constraint import Constraint, Effect, Hazard
from router_ext.devserver.engine import Engine, Guide, Sampled
from router_ext.devserver.faults import Faults
from router_ext.devserver.generation import Generation, GenerationFailed, Token, generation_error
from router_ext.devserver.grammars import KEPT, CompilerGone, GrammarFailed, Grammars, ScriptedGuide
from router_ext.devserver.metrics import Metrics
from router_ext.tgi_model import Batcher, Entry, Step, StepKind, StepTime

SHARD_LOST = "transport error"
"""What the batch is told in which the shard dies; all later ones hear that it is gone."""

SHARD_GONE = "error trying to connect: Connection refused (os error 111)"
FATAL_AFTER_S = 0.2
"""From the answers to a batch that an error of TGI's shard has failed to the end of the server."""

_SLICE = 128  # tokens handed out before other connections get a turn

# Tokenises and checks the prompt of a further piece: ids and its token limit, or None if it does not fit any more.
NextPiece = Callable[[Generation], "tuple[list[int], int] | None"]


class Runner:
    """The one owner of batcher and engine.

    Args:
        die: ends the process, because TGI's would have died; told why.
        step_time: how long a forward lasts; None for an engine that takes its own time.
        time_scale: virtual seconds per real second of the step-time model.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        batcher: Batcher,
        metrics: Metrics,
        faults: Faults,
        step_time: StepTime | None,
        time_scale: float = 1.0,
        grammars: Grammars,
        die: Callable[[str], None],
        next_piece: NextPiece,
        on_finished: Callable[[Generation], None],
        on_left: Callable[[Generation], None],
    ) -> None:
        self._engine = engine
        self._batcher = batcher
        self._metrics = metrics
        self._faults = faults
        self._step_time = step_time
        self._time_scale = time_scale
        self._grammars = grammars
        self._die = die
        self._next_piece = next_piece
        self._on_finished = on_finished
        self._on_left = on_left
        self._wake = asyncio.Event()
        self._pool = (
            ThreadPoolExecutor(1, thread_name_prefix="engine") if getattr(engine, "runs_in_thread", True) else None
        )
        self._steps = 0
        self._sequences = 0
        self._dropped_seen = 0
        self._is_shard_gone = False
        self._stalled: OrderedDict[str, None] = OrderedDict()
        self.is_healthy = True
        self._thawed = asyncio.Event()
        self._thawed.set()

    def submit(self, generation: Generation) -> None:
        """Put a validated generation at the tail of the queue."""
        self._sequences += 1
        generation.sequence.sequence_id = self._sequences
        self._batcher.append(generation.entry, time.monotonic())
        self._metrics.gauge("tgi_queue_size", self._metrics.gauge_value("tgi_queue_size") + 1)
        self._wake.set()

    async def health(self) -> bool:
        """True if a one-token prefill would work: hangs while the shard does."""
        await self._thawed.wait()
        if self._faults.is_shard_dead(self._steps):
            return False
        if self._pool is not None:
            await asyncio.get_running_loop().run_in_executor(self._pool, lambda: None)
        self.is_healthy = True
        return True

    async def run(self) -> None:
        """Step for ever."""
        free_at = 0.0
        while True:
            now = time.monotonic()
            step = self._batcher.next_step(now)
            self._after_admission()
            if step is None:
                self._metrics_idle()
                self._wake.clear()
                await self._wake.wait()
                free_at = 0.0
                continue
            if free_at < now - 0.25:
                free_at = now  # the loop was late; do not try to catch up
            free_at = await self._one(step, free_at)

    def close(self) -> None:
        self._grammars.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _one(self, step: Step, started: float) -> float:
        """One forward and its delivery; the instant the next one may start."""
        self._steps += 1
        metrics, method = self._metrics, f'method="{step.kind}"'
        self._note_admitted(step)
        metrics.count("tgi_batch_inference_count", method)
        await self._maybe_freeze()
        if self._faults.exit_after_steps and self._steps >= self._faults.exit_after_steps:
            os._exit(1)
        try:
            if await self._bind(step):
                started = 0.0
        except GrammarFailed as e:
            self._fail(step, str(e))
            if e.is_fatal:
                asyncio.get_running_loop().call_later(FATAL_AFTER_S, self._die, f"the shard ends of an error: {e}")
            return time.monotonic()
        began = time.monotonic()
        error = None
        sampled: list[Sampled] = []
        if self._faults.is_shard_dead(self._steps):
            error = SHARD_GONE if self._is_shard_gone else SHARD_LOST
            self._is_shard_gone = True
        elif self._faults.is_failing(self._steps):
            error = self._faults.fail_message
        else:
            try:
                sampled = await self._forward(step)
            except (RuntimeError, ValueError) as e:
                error = str(e)
        due = await self._last(step, began if started == 0.0 else started)
        forward_s = max(due, time.monotonic()) - began
        if error is not None:
            self._fail(step, error)
            return due
        metrics.observe("tgi_batch_forward_duration", forward_s, method)
        handing_out = time.monotonic()
        await self._deliver(step, sampled)
        done = time.monotonic()
        metrics.skipped(len(sampled))
        metrics.count("tgi_batch_inference_success", method)
        metrics.observe("tgi_batch_decode_duration", 0.0, method)
        metrics.observe("tgi_batch_filter_duration", done - handing_out, method)
        metrics.observe("tgi_batch_inference_duration", done - began, method)
        return due

    async def _bind(self, step: Step) -> bool:
        """Give newcomers with a grammar their guides; nobody gets a token meanwhile, and ``/health`` hangs.

        Returns:
            whether that took time.

        Raises:
            GrammarFailed: one of the grammars does not compile, which fails the whole batch.
        """
        waiting = [s for entry in step.admitted if (s := entry.owner.sequence).sampling.constraint is not None]
        if not waiting:
            return False
        self._thawed.clear()
        try:
            for sequence in waiting:
                sequence.guide = guide = await self._guide_of(sequence.sampling.constraint)
                sequence.guide_state = -1 if guide is None else guide.initial
        except CompilerGone as e:
            self._die(str(e))
        finally:
            self._thawed.set()
        return True

    async def _guide_of(self, constraint: Constraint) -> Guide | None:
        if constraint.hazard is not None:
            if constraint.key not in self._stalled:
                await self._suffer(constraint.hazard)
            self._stalled[constraint.key] = None
            self._stalled.move_to_end(constraint.key)
            if len(self._stalled) > KEPT:
                self._stalled.popitem(last=False)
            return ScriptedGuide(constraint.script, min(self._engine.eos_ids)) if constraint.script else None
        return await self._grammars.guide(constraint.regex)

    async def _suffer(self, hazard: Hazard) -> None:
        match hazard.effect:
            case Effect.STALL:
                await asyncio.sleep(hazard.stall_s / self._time_scale)
            case Effect.FREEZE:
                await asyncio.Event().wait()
            case Effect.FAIL:
                raise GrammarFailed(hazard.message, is_fatal=False)
            case Effect.DIE:
                self._die(hazard.message)

    async def _forward(self, step: Step) -> list[Sampled]:
        prefill = [(entry.owner.sequence, chunk) for entry, chunk in step.prefill]
        for entry, _ in step.prefill:
            entry.owner.sequence.prefilled = entry.computed
        decode = [entry.owner.sequence for entry in step.decode]
        if self._pool is None:
            return self._engine.step(prefill=prefill, decode=decode)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: self._engine.step(prefill=prefill, decode=decode))

    async def _last(self, step: Step, started: float) -> float:
        """Wait until the modelled forward is over."""
        if self._step_time is None:
            return time.monotonic()
        context = 0
        if self._step_time.per_context_token_s:
            context = sum(e.input_length + len(e.owner.sequence.output_ids) for e in step.decode)
        duration = self._step_time.duration_s(
            sequences=len(step.decode), prefill_tokens=step.prefill_tokens, context_tokens=context
        )
        due = started + duration / self._time_scale
        left = due - time.monotonic()
        if left > 0.0005:
            await asyncio.sleep(left)
        return due

    async def _deliver(self, step: Step, sampled: list[Sampled]) -> None:
        finished: list[Entry] = []
        again: list[Generation] = []
        owners = {entry.owner.sequence: entry.owner for entry in step.sampled}
        faults = self._faults
        for n, one in enumerate(sampled):
            generation: Generation = owners[one.sequence]
            if generation.is_closed and generation.is_lagging:
                generation.is_lagging = False  # its forwarding task learns of the end with this event
            elif generation.is_closed:
                self._on_left(generation)
                self._metrics.count("tgi_request_failure", 'err="dropped"')
                finished.append(generation.entry)
                continue
            token, reason = generation.advance(one)
            if faults.is_stalled(one.sequence.sequence_id, generation.generated):
                continue
            if reason is None:
                generation.sink.on_token(generation, token, None)
            else:
                finished.append(generation.entry)
                if self._end(generation, token, reason):
                    again.append(generation)
            if n % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
        for entry in finished:
            self._engine.remove(entry.owner.sequence)
        self._batcher.complete(step, finished=finished)
        for generation in again:
            self.submit_piece(generation)
        self._gauges()

    def _end(self, generation: Generation, token: Token, reason: str) -> bool:
        """The end of a piece: True if another one follows."""
        text = generation.piece_text()
        if reason == "length" and generation.generated < generation.wanted:
            generation.text_so_far += text
            generation.fed_text += text
            found = self._next_piece(generation)
            if found is not None:
                generation.sink.on_token(generation, token, None)
                generation.next_ids, generation.next_limit = found
                return True
            ending = generation.ending(reason, "")
        else:
            ending = generation.ending(reason, text)
        generation.timing.ended = time.monotonic()
        self._metrics.observe("tgi_request_generated_tokens", generation.generated)
        self._on_finished(generation)
        generation.sink.on_token(generation, token, ending)
        return False

    def submit_piece(self, generation: Generation) -> None:
        generation.start_piece(generation.next_ids, generation.next_limit, sequence_id=0)
        self.submit(generation)

    def _fail(self, step: Step, message: str) -> None:
        """The batch is lost: with chunked prefill the running requests are part of it."""
        self.is_healthy = False
        lost = {entry for entry, _ in step.prefill} | set(step.decode)
        if self._batcher.rules.chunking or step.kind is StepKind.DECODE:
            lost.update(self._batcher.running)
        self._batcher.remove(lost)
        for entry in lost:
            generation: Generation = entry.owner
            self._engine.remove(generation.sequence)
            self._on_left(generation)
            if generation.is_closed:
                continue
            self._metrics.count("tgi_request_failure", 'err="generation"')
            generation.sink.on_error(generation, generation_error(message))
        self._gauges()

    async def _maybe_freeze(self) -> None:
        faults = self._faults
        if not faults.freeze_after_steps or self._steps < faults.freeze_after_steps:
            return
        faults.freeze_after_steps = 0
        self._thawed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._thawed.wait(), faults.freeze_s or None)
        self._thawed.set()

    def _note_admitted(self, step: Step) -> None:
        for entry in step.admitted:
            timing = entry.owner.timing
            if not timing.batched:
                timing.batched = entry.batched_at or time.monotonic()
        admission = self._batcher.last_admission
        if admission.size:
            self._metrics.observe("tgi_batch_next_size", admission.size)
        if admission.concat:
            self._metrics.count("tgi_batch_concat", f'reason="{admission.concat}"')
            self._metrics.observe("tgi_batch_concat_duration", 0.0, 'method="decode"')
        self._gauges()

    def _after_admission(self) -> None:
        dropped = self._batcher.dropped - self._dropped_seen
        if dropped:
            self._dropped_seen += dropped
            self._metrics.count("tgi_request_failure", 'err="dropped"', dropped)
        if self._metrics.gauge_value("tgi_queue_size") != len(self._batcher.queue):
            self._metrics.gauge("tgi_queue_size", len(self._batcher.queue))

    def _gauges(self) -> None:
        self._metrics.gauge("tgi_batch_current_size", len(self._batcher.running))
        self._metrics.gauge("tgi_batch_current_max_tokens", self._batcher.batch_max_tokens)

    def _metrics_idle(self) -> None:
        if self._steps:
            self._gauges()


__all__ = ["SHARD_GONE", "GenerationFailed", "Runner", "StepKind"]
