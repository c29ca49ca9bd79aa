"""One text generation, slice after slice, between the scheduler and TGI's ``/generate_stream``.

    QUEUED --dispatch--> RUNNING --slice end, broken stream--> CUTTING --SliceEnded, Failed(retryable)--> QUEUED
                            '--end of text, stop, cap--> ENDED           (client gone, error: ENDED from anywhere)

What may be shown is the continuation's business, how it is written the encoder's; this class moves bytes between a
backend's stream and the two, and reports to the engine. Everything but the cut runs in the loop turn of the read.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from router_ext.backends.base import Headers, StreamHandle
from router_ext.core.actions import Dispatch
from router_ext.core.events import Failed, Finished, PromptMeasured, RequestSpec, SliceEnded
from router_ext.errors import FairlaneError, UpstreamFailed
from router_ext.gateway.call import Call
from router_ext.gateway.continuation import Continuation, Phase
from router_ext.gateway.encoders import encoder_for
from router_ext.gateway.generation import ResumeClass
from router_ext.gateway.refusals import refusal_of
from router_ext.wire.sse import SseError, SseParser
from router_ext.wire.tgi import ErrorKind, StreamEvent, UpstreamError, decode_error

if TYPE_CHECKING:
    from router_ext.gateway.engine import PoolEngine
    from router_ext.gateway.model import Member

MAX_ERROR_BYTES = 65_536
"""How much of a backend's error answer is read."""


class Step(enum.Enum):
    """Where a generation stands; see the module's diagram."""

    QUEUED = "queued"
    RUNNING = "running"
    CUTTING = "cutting"
    ENDED = "ended"


class TextGeneration:
    """Implements ``Generation`` and receives its backend's stream."""

    __slots__ = (
        "_engine",
        "_error_body",
        "_error_status",
        "_failures",
        "_feed",
        "_handle",
        "_index",
        "_parser",
        "_slice_kv_tokens",
        "_slice_started_s",
        "call",
        "flow",
        "member",
        "request_id",
        "spec",
        "step",
    )

    def __init__(self, engine: PoolEngine, call: Call, *, spec: RequestSpec, flow: Continuation, index: int) -> None:
        self._engine = engine
        self.call = call
        self.spec = spec
        self.request_id = spec.request_id
        self.flow = flow
        self.step = Step.QUEUED
        self.member: Member | None = None
        self._index = index
        self._handle: StreamHandle | None = None
        self._parser = SseParser()
        self._feed = self._parser.feed
        self._failures = 0
        self._error_status = 0
        self._error_body = b""
        self._slice_started_s = 0.0
        self._slice_kv_tokens = 0

    # --- from the engine --------------------------------------------------------------------------------------------

    def dispatch(self, action: Dispatch, member: Member) -> None:
        """Open the next slice."""
        flow = self.flow
        body = flow.next_slice(action.slice_tokens)
        self.member = member
        self.step = Step.RUNNING
        self._parser = SseParser()
        self._feed = self._parser.feed
        self._error_status = 0
        self._error_body = b""
        self._slice_started_s = self._engine.loop.time()
        self._slice_kv_tokens = flow.next_prompt_tokens + action.slice_tokens - 1
        self.call.dispatched(
            member.backend,
            resumed_prompt_tokens=flow.next_prompt_tokens if flow.segments > 1 else 0,
            reason=action.reason,
        )
        self._handle = member.client.open_stream("/generate_stream", body, self)
        if self.call.client.is_paused:
            self._handle.pause_reading()

    def cancel(self) -> None:
        step, self.step = self.step, Step.ENDED
        self._close()
        if step is not Step.ENDED:
            self._engine.cancelled(self)

    def expired(self, error: FairlaneError) -> None:
        """The scheduler gave the request up; it knows of its end already."""
        self.step = Step.ENDED
        self.call.fail(error, outcome="expired")

    def refused(self, error: FairlaneError) -> None:
        """The scheduler never queued it."""
        self.step = Step.ENDED
        self.call.refuse(error)

    def undispatched(self) -> None:
        """The backend chosen is gone from the configuration: queue again, nothing was sent."""
        self._engine.report(
            self,
            Failed(request_id=self.request_id, is_retryable=True, next_prompt_tokens=self.flow.next_prompt_tokens),
        )

    def pause(self) -> None:
        if self._handle is not None:
            self._handle.pause_reading()

    def resume(self) -> None:
        if self._handle is not None:
            self._handle.resume_reading()

    # --- from the backend -------------------------------------------------------------------------------------------

    def on_head(self, status: int, headers: Headers) -> None:
        if status != 200:
            self._error_status = status
            return
        call = self.call
        if call.encoder is None:
            call.upstream_s = self._engine.loop.time()
            call.encoder = encoder_for(call.request, self._engine.model.answer_context(headers, call.characters))

    def on_data(self, data: bytes) -> None:
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
        self._engine.progressed(self, flow.received_tokens - received)
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
                self._engine.spawn_cut(self, failure=None)
            else:
                assert flow.error is not None
                self._refused_upstream(flow.error)

    def on_end(self, error: UpstreamFailed | None) -> None:
        self._handle = None
        if self.step is not Step.RUNNING:
            return
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
        if completion.prompt_tokens != self.spec.prompt_tokens:
            call.prompt_tokens += completion.prompt_tokens - self.spec.prompt_tokens
            engine.report(self, PromptMeasured(request_id=self.request_id, prompt_tokens=completion.prompt_tokens))
        call.resume_class = flow.resume_class
        call.shown(len(events))
        call.write(call.encoder.finish(events, completion, self._index))
        call.generation_done(completion.finish_reason)
        engine.report(self, Finished(request_id=self.request_id))
        engine.forget(self)

    def cut_made(self, events: Sequence[StreamEvent], failure: FairlaneError | None) -> None:
        """The cut is chosen and applied: show what it set free, and go back to the queue or end."""
        flow, engine = self.flow, self._engine
        if flow.dropped_at_cut:
            self.call.recomputed(flow.dropped_at_cut)
        if flow.phase is Phase.DONE:
            self._done(events)
            return
        if events:
            self._show(events)
        self.requeue(failure)
        engine.metrics.resumes.labels(
            engine.name, "approximate" if flow.resume_class is ResumeClass.APPROXIMATE else "exact"
        ).inc()

    def requeue(self, failure: FairlaneError | None) -> None:
        """Wait for another slice; after a failure as a retry."""
        flow = self.flow
        self.step = Step.QUEUED
        if failure is None:
            self._engine.report(
                self,
                SliceEnded(
                    request_id=self.request_id,
                    dropped_tokens=flow.dropped_at_cut,
                    next_prompt_tokens=flow.next_prompt_tokens,
                ),
            )
        else:
            self._engine.report(
                self,
                Failed(
                    request_id=self.request_id,
                    is_retryable=True,
                    dropped_tokens=flow.dropped_at_cut,
                    next_prompt_tokens=flow.next_prompt_tokens,
                ),
            )

    def _refused_upstream(self, error: UpstreamError) -> None:
        """The backend answered with an error: its verdict on the request itself is final, anything else is not."""
        self._broken(refusal_of(error), is_final=error.kind is ErrorKind.VALIDATION)

    def _broken(self, error: FairlaneError, *, is_final: bool = False) -> None:
        """The stream broke: go on elsewhere if that is possible and allowed, else end with the error."""
        flow, engine, member = self.flow, self._engine, self.member
        assert member is not None
        self._close()
        if not is_final:
            self._failures += 1
            engine.upstream_failed(member, error)
        if is_final or self._failures > engine.settings.retry_limit or not flow.interrupt():
            self.end_with(error)
            return
        if flow.phase is Phase.READY:
            if flow.dropped_at_cut:
                self.call.recomputed(flow.dropped_at_cut)
            self.requeue(error)
        else:
            engine.spawn_cut(self, failure=error)

    def end_with(self, error: FairlaneError) -> None:
        """Give up: the scheduler forgets the request, the client gets the error."""
        self._close()
        if self.step is not Step.ENDED:
            self.step = Step.ENDED
            self._engine.report(self, Failed(request_id=self.request_id, is_retryable=False))
            self._engine.forget(self)
        self.call.fail(error)

    def _close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            if self.flow.is_upstream_over:
                handle.release()
            else:
                handle.abort()
        if self._slice_kv_tokens:
            self.call.held(self._slice_kv_tokens, self._engine.loop.time() - self._slice_started_s)
            self._slice_kv_tokens = 0
