"""One request that goes whole through TGI's matching endpoint: grammar, tools, best_of and the like.

Its bytes are relayed as they are, its tokens counted. It can be tried again only while nothing of it was shown.
"""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

import orjson

from router_ext.backends.base import Headers
from router_ext.core.actions import Dispatch
from router_ext.core.events import Finished, PromptMeasured, RequestSpec
from router_ext.errors import FairlaneError, UpstreamFailed
from router_ext.gateway.call import Call
from router_ext.gateway.generation import PassThrough, ResumeClass
from router_ext.gateway.measure import answer_tokens
from router_ext.gateway.passthrough import read_body_answer, relay_for, relayed_headers
from router_ext.gateway.streams import Response
from router_ext.gateway.upstream import MAX_ERROR_BYTES, Opening, Step, UpstreamGeneration
from router_ext.wire.sse import SseError, SseParser
from router_ext.wire.tgi import BadUpstreamAnswer, decode_error

if TYPE_CHECKING:
    from router_ext.gateway.engine import PoolEngine

MAX_BODY_BYTES = 64_000_000
"""Bound of one whole answer."""


class WholeGeneration(UpstreamGeneration):
    """A passed-through request."""

    __slots__ = (
        "_arrived_tokens",
        "_body",
        "_booked_tokens",
        "_headers",
        "_parser",
        "_passthrough",
        "_relay",
        "_status",
    )

    def __init__(self, engine: PoolEngine, call: Call, *, spec: RequestSpec, passthrough: PassThrough) -> None:
        super().__init__(engine, call, spec=spec)
        self._passthrough = passthrough
        self._reset()

    def _reset(self) -> None:
        self._status = 0
        self._arrived_tokens = 0
        self._booked_tokens = 0
        self._headers: Headers = ()
        self._body = bytearray()
        self._parser = SseParser()
        self._relay = relay_for(self.call.request)
        self.call.write_failure = self._relay.failed

    @property
    def next_prompt_tokens(self) -> int:
        return self.spec.prompt_tokens

    @property
    def resume_class(self) -> ResumeClass:
        return ResumeClass.NEVER

    @property
    def has_spoken(self) -> bool:
        return self._arrived_tokens > 0

    def digest(self) -> str:
        passthrough = self._passthrough
        data = {name: value for name, value in passthrough.data.items() if name != "seed"}
        if isinstance(parameters := data.get("parameters"), dict):
            data["parameters"] = {name: value for name, value in parameters.items() if name != "seed"}
        return blake2b(passthrough.path.encode() + b"\0" + orjson.dumps(data), digest_size=16).hexdigest()

    def _open(self, action: Dispatch) -> Opening:
        self._reset()
        spec = self.spec
        kv_tokens = (spec.prompt_tokens + min(spec.max_new_tokens, 1_024) - 1) * spec.num_sequences
        return Opening(self._passthrough.path, self._passthrough.body, kv_tokens)

    # --- from the backend -------------------------------------------------------------------------------------------

    def _on_head(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers
        self.call.upstream_s = self._engine.loop.time()

    def _on_data(self, data: bytes) -> None:
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
            self._arrived_tokens += arrived
            self._engine.progressed(self, arrived)
        if relay.prompt_tokens:
            call.prompt_tokens = relay.prompt_tokens
        if out:
            # What is not handed on is not booked: a retry would bring it again.
            call.shown(relay.output_tokens - self._booked_tokens)
            self._booked_tokens = relay.output_tokens
            if not call.client.has_begun:
                call.client.begin([*relayed_headers(self._headers), *self._engine.answer_headers(call)])
            call.client.write(out)
        if nonsense is not None:
            self._broken(UpstreamFailed(f"The backend sent something that is not a stream of TGI ({nonsense})"))
        elif relay.error is not None:
            self._refused_upstream(relay.error)

    def _on_end(self, error: UpstreamFailed | None) -> None:
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
            answer = read_body_answer(
                call.request,
                self._status,
                self._headers,
                bytes(self._body),
                prompt_tokens=call.prompt_tokens,
                count=partial(answer_tokens, self._engine.model.tokenizer),
            )
        except BadUpstreamAnswer as error:
            self._broken(UpstreamFailed(f"The backend sent something that is not an answer of TGI ({error})"))
            return
        self._engine.progressed(self, answer.output_tokens)
        call.counted(answer.prompt_tokens or call.prompt_tokens, answer.output_tokens, answer.token_source)
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
                call.counted(self._relay.prompt_tokens or call.prompt_tokens, self._relay.output_tokens)
        if call.prompt_tokens != self.spec.prompt_tokens:
            engine.report(self, PromptMeasured(request_id=self.request_id, prompt_tokens=call.prompt_tokens))
        call.relayed(response, outcome="completed", code=None)
        engine.report(self, Finished(request_id=self.request_id))
        engine.forget(self)

    def _go_on(self, error: FairlaneError) -> bool:
        if self.call.client.has_begun:
            return False
        if self._arrived_tokens:
            self.call.recomputed(self._arrived_tokens)
        self._report_failed(dropped_tokens=self._arrived_tokens)
        return True
