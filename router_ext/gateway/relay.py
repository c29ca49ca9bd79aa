"""One request that goes whole through TGI's matching endpoint: grammar, tools, best_of and the like.

Its bytes are relayed as they are, its tokens counted. It can be tried again only while nothing of it was shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from router_ext.backends.base import Headers, StreamHandle
from router_ext.core.actions import Dispatch
from router_ext.core.events import Failed, Finished, PromptMeasured, RequestSpec
from router_ext.errors import FairlaneError, UpstreamFailed
from router_ext.gateway.call import Call
from router_ext.gateway.generation import PassThrough, ResumeClass
from router_ext.gateway.passthrough import StreamRelay, read_body_answer, relayed_headers
from router_ext.gateway.refusals import refusal_of
from router_ext.gateway.slices import MAX_ERROR_BYTES, Step
from router_ext.gateway.streams import Response
from router_ext.wire.sse import SseError, SseParser
from router_ext.wire.tgi import BadUpstreamAnswer, ErrorKind, UpstreamError, decode_error

if TYPE_CHECKING:
    from router_ext.gateway.engine import PoolEngine
    from router_ext.gateway.model import Member

MAX_BODY_BYTES = 64_000_000
"""Bound of one whole answer."""


class WholeGeneration:
    """Implements ``Generation`` for a passed-through request and receives its backend's answer."""

    __slots__ = (
        "_body",
        "_engine",
        "_failures",
        "_handle",
        "_headers",
        "_kv_tokens",
        "_parser",
        "_passthrough",
        "_relay",
        "_started_s",
        "_status",
        "call",
        "member",
        "request_id",
        "spec",
        "step",
    )

    def __init__(self, engine: PoolEngine, call: Call, *, spec: RequestSpec, passthrough: PassThrough) -> None:
        self._engine = engine
        self._passthrough = passthrough
        self.call = call
        self.spec = spec
        self.request_id = spec.request_id
        self.step = Step.QUEUED
        self.member: Member | None = None
        self._handle: StreamHandle | None = None
        self._failures = 0
        self._kv_tokens = 0
        self._started_s = 0.0
        self._reset()
        call.resume_class = ResumeClass.NEVER

    def _reset(self) -> None:
        self._status = 0
        self._headers: Headers = ()
        self._body = bytearray()
        self._parser = SseParser()
        self._relay = StreamRelay(self.call.request)

    # --- from the engine --------------------------------------------------------------------------------------------

    def dispatch(self, action: Dispatch, member: Member) -> None:
        """Send the whole request."""
        self._reset()
        self.member = member
        self.step = Step.RUNNING
        self._started_s = self._engine.loop.time()
        spec = self.spec
        self._kv_tokens = (spec.prompt_tokens + min(spec.max_new_tokens, 1_024) - 1) * spec.num_sequences
        self.call.dispatched(member.backend, resumed_prompt_tokens=0, reason=action.reason)
        self._handle = member.client.open_stream(self._passthrough.path, self._passthrough.body, self)
        if self.call.client.is_paused:
            self._handle.pause_reading()

    def cancel(self) -> None:
        step, self.step = self.step, Step.ENDED
        self._close()
        if step is not Step.ENDED:
            self._engine.cancelled(self)

    def expired(self, error: FairlaneError) -> None:
        self.step = Step.ENDED
        self.call.fail(error, outcome="expired")

    def refused(self, error: FairlaneError) -> None:
        self.step = Step.ENDED
        self.call.refuse(error)

    def undispatched(self) -> None:
        """The backend chosen is gone from the configuration: queue again, nothing was sent."""
        self._engine.report(
            self,
            Failed(request_id=self.request_id, is_retryable=True, next_prompt_tokens=self.spec.prompt_tokens),
        )

    def pause(self) -> None:
        if self._handle is not None:
            self._handle.pause_reading()

    def resume(self) -> None:
        if self._handle is not None:
            self._handle.resume_reading()

    # --- from the backend -------------------------------------------------------------------------------------------

    def on_head(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers
        self.call.upstream_s = self._engine.loop.time()

    def on_data(self, data: bytes) -> None:
        call = self.call
        if self._status != 200 or not call.request.is_stream:
            self._body += data
            if len(self._body) > (MAX_BODY_BYTES if self._status == 200 else MAX_ERROR_BYTES):
                self._broken(UpstreamFailed("The backend's answer is too large"))
            return
        relay = self._relay
        before = relay.output_tokens
        parts: list[bytes] = []
        nonsense: Exception | None = None
        try:
            for payload in self._parser.feed(data):
                parts.append(relay.feed(payload))  # noqa: PERF401 - what came before nonsense still counts
        except (BadUpstreamAnswer, SseError) as error:
            nonsense = error
        out = b"".join(parts)
        arrived = relay.output_tokens - before
        if arrived > 0:
            self._engine.progressed(self, arrived)
        if relay.prompt_tokens:
            call.prompt_tokens = relay.prompt_tokens
        if arrived or out:
            call.shown(arrived)
        if out:
            if not call.client.has_begun:
                call.client.begin([*relayed_headers(self._headers), *self._engine.answer_headers(call)])
            call.client.write(out)
        if nonsense is not None:
            self._broken(UpstreamFailed(f"The backend sent something that is not a stream of TGI ({nonsense})"))
        elif relay.error is not None:
            self._refused_upstream(relay.error)

    def on_end(self, error: UpstreamFailed | None) -> None:
        self._handle = None
        if self.step is not Step.RUNNING:
            return
        if error is not None:
            self._broken(error)
        elif self._status != 200:
            self._refused_upstream(decode_error(self._status, bytes(self._body)))
        elif self.call.request.is_stream:
            if self._relay.is_complete:
                self._complete(None)
            else:
                self._broken(UpstreamFailed("The backend ended the stream without its final event"))
        else:
            self._read_body()

    def _read_body(self) -> None:
        call = self.call
        try:
            answer = read_body_answer(call.request, self._status, self._headers, bytes(self._body))
        except BadUpstreamAnswer as error:
            self._broken(UpstreamFailed(f"The backend sent something that is not an answer of TGI ({error})"))
            return
        self._engine.progressed(self, answer.output_tokens)
        call.counted_by_backend(answer.prompt_tokens or call.prompt_tokens, answer.output_tokens)
        call.finish_reason = answer.finish_reason
        headers = [*answer.headers, *self._engine.answer_headers(call)]
        self._complete(Response(status=200, headers=headers, body=answer.body))

    # --- ends -------------------------------------------------------------------------------------------------------

    def _complete(self, response: Response | None) -> None:
        call, engine = self.call, self._engine
        self.step = Step.ENDED
        self._close()
        if response is None:
            call.finish_reason = self._relay.finish_reason
            if self._relay.is_exact:
                call.counted_by_backend(self._relay.prompt_tokens, self._relay.output_tokens)
        if call.prompt_tokens != self.spec.prompt_tokens:
            engine.report(self, PromptMeasured(request_id=self.request_id, prompt_tokens=call.prompt_tokens))
        call.relayed(response, outcome="completed", code=None)
        engine.report(self, Finished(request_id=self.request_id))
        engine.forget(self)

    def _refused_upstream(self, error: UpstreamError) -> None:
        self._broken(refusal_of(error), is_final=error.kind is ErrorKind.VALIDATION)

    def _broken(self, error: FairlaneError, *, is_final: bool = False) -> None:
        engine, member, call = self._engine, self.member, self.call
        assert member is not None
        self._close()
        if not is_final:
            self._failures += 1
            engine.upstream_failed(member, error)
        if is_final or call.client.has_begun or self._failures > engine.settings.retry_limit:
            self.end_with(error)
            return
        self.step = Step.QUEUED
        engine.report(
            self,
            Failed(request_id=self.request_id, is_retryable=True, next_prompt_tokens=self.spec.prompt_tokens),
        )

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
            handle.abort()
        if self._kv_tokens:
            self.call.held(self._kv_tokens, self._engine.loop.time() - self._started_s)
            self._kv_tokens = 0
