"""One text generation, slice after slice, between the scheduler and TGI's ``/generate_stream``.

What may be shown is the continuation's business, how it is written the encoder's; this class moves bytes between a
backend's stream and the two, and reports to the engine. Everything but the cut runs in the loop turn of the read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from router_ext.backends.base import Headers
from router_ext.core.actions import Dispatch
from router_ext.core.events import Finished, Preempted, PromptMeasured, RequestSpec, SliceEnded
from router_ext.errors import FairlaneError, UpstreamFailed
from router_ext.gateway.call import Call
from router_ext.gateway.continuation import Continuation, Phase
from router_ext.gateway.encoders import encoder_for
from router_ext.gateway.generation import ResumeClass
from router_ext.gateway.upstream import MAX_ERROR_BYTES, Opening, Step, UpstreamGeneration
from router_ext.wire.sse import SseError, SseParser
from router_ext.wire.tgi import StreamEvent, decode_error

if TYPE_CHECKING:
    from router_ext.gateway.engine import PoolEngine


class TextGeneration(UpstreamGeneration):
    """A generation that may be cut and continued anywhere."""

    __slots__ = ("_error_body", "_error_status", "_feed", "_has_spoken", "_index", "_is_preempted", "flow")

    def __init__(self, engine: PoolEngine, call: Call, *, spec: RequestSpec, flow: Continuation, index: int) -> None:
        super().__init__(engine, call, spec=spec)
        self.flow = flow
        self._index = index
        self._feed = SseParser().feed
        self._error_status = 0
        self._error_body = b""
        self._is_preempted = False
        self._has_spoken = False

    @property
    def next_prompt_tokens(self) -> int:
        return self.flow.next_prompt_tokens

    @property
    def resume_class(self) -> ResumeClass:
        return self.flow.resume_class

    @property
    def is_upstream_over(self) -> bool:
        return self.flow.is_upstream_over

    @property
    def has_spoken(self) -> bool:
        return self._has_spoken

    def digest(self) -> str:
        return self.flow.digest()

    def _open(self, action: Dispatch) -> Opening:
        flow = self.flow
        self._has_spoken = False
        body = flow.next_slice(action.slice_tokens)
        if flow.kept_tokens:
            assert flow.last_resume is not None
            self._engine.metrics.resumes.labels(self._engine.name, flow.last_resume).inc()
        self._feed = SseParser().feed
        self._error_status = 0
        self._error_body = b""
        inputs = flow.next_prompt_tokens
        is_preempted, self._is_preempted = self._is_preempted, False
        return Opening(
            "/generate_stream",
            body,
            kv_tokens=inputs + action.slice_tokens - 1,
            resumed_prompt_tokens=inputs if flow.segments > 1 else 0,
            is_after_preemption=is_preempted,
        )

    def preempt(self) -> None:
        flow = self.flow
        if self.step is not Step.RUNNING or not flow.is_interruptible:
            return
        # Tokens behind the last one shown wait for the cut, as at the end of a slice.
        flow.interrupt()
        self._close()
        self._is_preempted = True
        self.call.preempted()
        if flow.phase is Phase.READY:
            self._recomputed()
            self.requeue(None)
        else:
            self._engine.spawn_cut(self, failure=None)

    def move(self) -> None:
        if self.step is Step.RUNNING and self.flow.is_interruptible:
            self._close()
            moved = UpstreamFailed("The backend is being drained")
            if not self._go_on(moved):
                self.end_with(moved)

    # --- from the backend -------------------------------------------------------------------------------------------

    def _on_head(self, status: int, headers: Headers) -> None:
        if status != 200:
            self._error_status = status
            return
        call = self.call
        if call.encoder is None:
            call.upstream_s = self._engine.loop.time()
            call.encoder = encoder_for(call.request, self._engine.model.answer_context(headers, call.characters))
            call.write_failure = call.encoder.failed

    def _on_data(self, data: bytes) -> None:
        if self._error_status:
            self._error_body = (self._error_body + data)[:MAX_ERROR_BYTES]
            return
        flow = self.flow
        call = self.call
        try:
            payloads = self._feed(data)
            if not payloads:
                return
            received = flow.received_tokens
            shown: Sequence[StreamEvent]
            if len(payloads) == 1:
                shown = flow.feed(payloads[0])
            else:
                shown = []
                for payload in payloads:
                    shown += flow.feed(payload)
                    if flow.phase is not Phase.RUNNING:
                        break
        except SseError as error:
            self._broken(UpstreamFailed(f"The backend sent something that is not a stream of TGI ({error})"))
            return
        arrived = flow.received_tokens - received
        if arrived:
            self._has_spoken = True
        self._engine.progressed(self, arrived)
        phase = flow.phase
        if phase is Phase.RUNNING:
            if shown:
                call.shown(len(shown))
                encoder = call.encoder
                assert encoder is not None
                call.write(encoder.tokens(shown, self._index))
        elif phase is Phase.DONE:
            self._done(shown)
        else:
            if shown:
                self._show(shown)
            if phase is Phase.CUT:
                self._close()
                self._measured(flow.prompt_tokens)
                self._engine.spawn_cut(self, failure=None)
            else:
                assert flow.error is not None
                self._refused_upstream(flow.error)

    def _on_end(self, error: UpstreamFailed | None) -> None:
        if self._error_status:
            self._refused_upstream(decode_error(self._error_status, self._error_body))
        else:
            # Without a final event the answer is not complete, however politely the connection ended.
            self._broken(error or UpstreamFailed("The backend ended the stream without its final event"))

    # --- ends -------------------------------------------------------------------------------------------------------

    def _show(self, events: Sequence[StreamEvent]) -> None:
        call = self.call
        call.shown(len(events))
        assert call.encoder is not None
        call.write(call.encoder.tokens(events, self._index))

    def _done(self, events: Sequence[StreamEvent]) -> None:
        """The generation is complete with ``events``."""
        flow, call, engine = self.flow, self.call, self._engine
        completion = flow.completion
        assert completion is not None
        assert call.encoder is not None
        self.step = Step.ENDED
        self._close()
        if flow.learned_eos_id is not None:
            engine.model.eos_ids.add(flow.learned_eos_id)
        call.prompt_tokens += completion.prompt_tokens - self.spec.prompt_tokens
        self._measured(completion.prompt_tokens)
        call.shown(len(events))
        call.write(call.encoder.finish(events, completion, self._index))
        call.generation_done(completion.finish_reason)
        engine.report(self, Finished(request_id=self.request_id, is_upstream_over=flow.is_upstream_over))
        engine.forget(self)

    def _measured(self, prompt_tokens: int | None) -> None:
        """Correct what the prompt was charged for, once its first slice has told its length."""
        if self.flow.segments == 1 and prompt_tokens and prompt_tokens != self.spec.prompt_tokens:
            self._engine.report(self, PromptMeasured(request_id=self.request_id, prompt_tokens=prompt_tokens))

    def cut_made(self, events: Sequence[StreamEvent], failure: FairlaneError | None) -> None:
        """The cut is chosen and applied: show what it set free, and go back to the queue or end."""
        flow = self.flow
        self._recomputed()
        if flow.phase is Phase.DONE:
            self._done(events)
            return
        if events:
            self._show(events)
        if failure is not None and flow.remaining_tokens <= 0:
            # Every token is there but the event that says so.
            self.end_with(failure)
            return
        self.requeue(failure)

    def _recomputed(self) -> None:
        """Book the tokens that the last cut has dropped."""
        if self.flow.dropped_at_cut:
            self.call.recomputed(self.flow.dropped_at_cut)

    def requeue(self, failure: FairlaneError | None) -> None:
        """Wait for another slice: after a failure as a retry, after a preemption as one who yielded."""
        flow = self.flow
        if failure is not None:
            self._report_failed(dropped_tokens=flow.dropped_at_cut)
            return
        self.step = Step.QUEUED
        kind = Preempted if self._is_preempted else SliceEnded
        self._engine.report(
            self,
            kind(
                request_id=self.request_id,
                dropped_tokens=flow.dropped_at_cut,
                next_prompt_tokens=flow.next_prompt_tokens,
            ),
        )

    def _go_on(self, error: FairlaneError) -> bool:
        flow = self.flow
        if not flow.interrupt():
            return False
        if flow.phase is not Phase.READY:
            self._engine.spawn_cut(self, failure=error)
            return True
        self._recomputed()
        if flow.remaining_tokens <= 0:
            return False
        self.requeue(error)
        return True
