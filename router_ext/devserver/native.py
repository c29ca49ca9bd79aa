"""TGI's own endpoints: ``/generate``, ``/generate_stream`` and POST ``/``."""

from __future__ import annotations

from typing import Any

import orjson

from router_ext.devserver import schemas
from router_ext.devserver.admission import Admission
from router_ext.devserver.endpoint import JSON, Identity, read_body, start_stream, timing_headers
from router_ext.devserver.generation import GenerationFailed
from router_ext.devserver.http import Exchange
from router_ext.devserver.sinks import StreamSink
from router_ext.devserver.validation import check_best_of, check_stream


class NativeEndpoints:
    """Each public method answers one exchange."""

    def __init__(self, admission: Admission, identity: Identity) -> None:
        self._admission = admission
        self._identity = identity

    async def compat(self, exchange: Exchange) -> None:
        await self.compat_body(exchange, read_body(exchange, schemas.COMPAT))

    async def compat_body(self, exchange: Exchange, body: dict[str, Any]) -> None:
        if body["parameters"]["return_full_text"] is None:
            body["parameters"]["return_full_text"] = True  # the model has no pipeline tag
        if body["stream"]:
            await self._stream(exchange, body)
        else:
            await self._answer(exchange, body, in_array=True)

    async def generate(self, exchange: Exchange) -> None:
        await self._answer(exchange, read_body(exchange, schemas.GENERATE), in_array=False)

    async def generate_stream(self, exchange: Exchange) -> None:
        await self._stream(exchange, read_body(exchange, schemas.GENERATE))

    async def _answer(self, exchange: Exchange, body: dict[str, Any], *, in_array: bool) -> None:
        self._admission.metrics.count("tgi_request_count")
        inputs, parameters = body["inputs"], body["parameters"]
        count = parameters["best_of"] or 1
        if count > 1:
            check_best_of(count, self._admission.limits)
        found = await self._admission.collect(exchange, [inputs] * count, parameters, add_special_tokens=True)
        best = max(range(count), key=lambda i: found[i].mean_logprob) if count > 1 else 0
        chosen = found.pop(best)
        prefix = inputs if parameters["return_full_text"] else ""
        text = orjson.dumps(prefix + chosen.ending.generated_text)
        answer = b'{"generated_text":%b' % text
        if parameters["details"] or parameters["decoder_input_details"]:
            others = b""
            if count > 1:
                others = b',"best_of_sequences":[%b]' % b",".join(
                    b'{"generated_text":%b,%b%b}'
                    % (orjson.dumps(prefix + o.ending.generated_text), o.details_json(), o.top_tokens_json())
                    for o in found
                )
            answer += b',"details":{%b%b%b}' % (chosen.details_json(), others, chosen.top_tokens_json())
        answer += b"}"
        headers = [*JSON, *timing_headers(exchange, self._identity, [chosen], len(inputs), has_compute_time=True)]
        exchange.respond(200, headers, b"[%b]" % answer if in_array else answer)

    async def _stream(self, exchange: Exchange, body: dict[str, Any]) -> None:
        self._admission.metrics.count("tgi_request_count")
        inputs, parameters = body["inputs"], body["parameters"]
        prefix = inputs if parameters["return_full_text"] else ""
        sink = StreamSink(exchange, details=parameters["details"], prefix=prefix)
        start_stream(exchange, self._identity, len(inputs))
        try:
            check_stream(parameters)
            await self._admission.begin(exchange, inputs, parameters, sink, add_special_tokens=True)
        except GenerationFailed as e:
            sink.on_error(None, e)
