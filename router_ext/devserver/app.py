"""TGI's routes over one runner: what each endpoint checks, in which order, and what it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson

from router_ext.devserver import chat, schemas, serde
from router_ext.devserver.chat import ChatTemplate
from router_ext.devserver.codec import Codec
from router_ext.devserver.faults import Faults
from router_ext.devserver.generation import Generation, GenerationFailed, Sink, Timing
from router_ext.devserver.http import Exchange, Headers
from router_ext.devserver.metrics import Metrics
from router_ext.devserver.runner import Runner
from router_ext.devserver.sinks import (
    ChatSink,
    Collected,
    Collector,
    CompletionSink,
    StreamSink,
    chat_logprob,
    native_error,
    usage_json,
)
from router_ext.devserver.validation import (
    Limits,
    ValidRequest,
    check_best_of,
    check_lengths,
    check_parameters,
    check_stream,
    validate,
)

VERSION = "3.3.6-dev0"
_JSON: Headers = [("content-type", "application/json")]
_TEXT: Headers = [("content-type", "text/plain; charset=utf-8")]
_INLINE_CHARACTERS = 8192  # longer prompts are tokenised by the validation workers, off the event loop
_Work = Coroutine[Any, Any, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What the server says about itself."""

    model_id: str
    compute_type: str = "cpu"
    api_key: str | None = None
    is_controllable: bool = False
    cors_origins: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        return f"{VERSION}-native"


@dataclass(frozen=True, slots=True)
class _Route:
    work: Callable[[Exchange], _Work]
    needs_key: bool = False


class _Refused(Exception):
    """A body refused before it is read as JSON; answered as plain text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class App:
    """The HTTP application. ``runner`` is set once it exists (it needs the application's callbacks)."""

    runner: Runner

    def __init__(
        self,
        *,
        identity: Identity,
        limits: Limits,
        codec: Codec,
        template: ChatTemplate,
        metrics: Metrics,
        faults: Faults,
        eos_ids: frozenset[int],
    ) -> None:
        self._identity = identity
        self._limits = limits
        self._codec = codec
        self._template = template
        self._metrics = metrics
        self._faults = faults
        self._eos_ids = eos_ids
        self._permits = limits.max_concurrent_requests
        self._workers = ThreadPoolExecutor(limits.validation_workers, thread_name_prefix="tokenizer")
        self._tasks: set[asyncio.Task[None]] = set()
        self._routes: dict[str, dict[str, _Route]] = {
            "/": {"GET": _Route(self._health), "POST": _Route(self._compat, True)},
            "/health": {"GET": _Route(self._health)},
            "/ping": {"GET": _Route(self._health)},
            "/info": {"GET": _Route(self._info)},
            "/metrics": {"GET": _Route(self._metrics_page)},
            "/v1/models": {"GET": _Route(self._models)},
            "/generate": {"POST": _Route(self._generate, True)},
            "/generate_stream": {"POST": _Route(self._generate_stream, True)},
            "/tokenize": {"POST": _Route(self._tokenize, True)},
            "/chat_tokenize": {"POST": _Route(self._chat_tokenize)},
            "/v1/chat/completions": {"POST": _Route(self._chat, True)},
            "/v1/completions": {"POST": _Route(self._completions, True)},
            "/invocations": {"POST": _Route(self._invocations, True)},
            "/vertex": {"POST": _Route(self._vertex, True)},
        }
        if identity.is_controllable:
            self._routes["/sim/faults"] = {"POST": _Route(self._set_faults)}

    # -- Handler of the connections ------------------------------------------------------------------------------

    def body_limit(self, method: str, path: str) -> int | None:
        return self._limits.payload_limit if method == "POST" and path in self._routes else None

    def handle(self, exchange: Exchange) -> None:
        methods = self._routes.get(exchange.path)
        if self._identity.cors_origins:
            exchange.allow_origin = self._allowed_origin(exchange.headers.get("origin", ""))
        if exchange.method == "OPTIONS":
            self._preflight(exchange, methods)
            return
        if methods is None:
            exchange.respond(404, [])
            return
        route = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if route is None:
            allow = ",".join(f"{m},HEAD" if m == "GET" else m for m in methods)
            exchange.respond(405, [], after_cors=[("allow", allow)])
            return
        if route.needs_key and not self._is_authorised(exchange):
            exchange.respond(401, [])
            return
        task = asyncio.get_running_loop().create_task(self._guarded(route.work, exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Callable[[Exchange], _Work], exchange: Exchange) -> None:
        try:
            await work(exchange)
        except GenerationFailed as e:
            exchange.respond(e.status, _JSON, native_error(e))
        except serde.BodyError as e:
            exchange.respond(e.status, _TEXT, e.text(bytes(exchange.body)).encode())
        except _Refused as e:
            exchange.respond(e.status, _TEXT, e.text.encode())

    def _allowed_origin(self, origin: str) -> bytes:
        if origin not in self._identity.cors_origins:
            return b""
        return b"access-control-allow-origin: %b\r\n" % origin.encode("latin-1")

    def _preflight(self, exchange: Exchange, methods: dict[str, _Route] | None) -> None:
        allow = [] if methods is None else [("allow", ",".join(methods))]
        exchange.respond(
            200,
            [],
            after_cors=[
                ("access-control-allow-methods", "GET,POST"),
                ("access-control-allow-headers", "content-type"),
                *allow,
            ],
        )

    def _is_authorised(self, exchange: Exchange) -> bool:
        key = self._identity.api_key
        return key is None or exchange.headers.get("authorization", "").lower() == f"bearer {key}".lower()

    def _body(self, exchange: Exchange, schema: serde.Schema) -> Any:
        """The body as ``schema`` reads it; content type, size and JSON are refused in axum's order.

        Raises:
            serde.BodyError: not JSON, or of the wrong shape.
            _Refused: the wrong content type, or too large.
        """
        kind = exchange.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise _Refused(415, "Expected request with `Content-Type: application/json`")
        if exchange.is_too_large:
            raise _Refused(413, "Failed to buffer the request body: length limit exceeded")
        return serde.parse(schema, bytes(exchange.body))

    # -- Small pages ---------------------------------------------------------------------------------------------

    async def _health(self, exchange: Exchange) -> None:
        if self._faults.health_delay_s:
            await asyncio.sleep(self._faults.health_delay_s)
        if await self.runner.health():
            exchange.respond(200, [])
        else:
            exchange.respond(503, _JSON, b'{"error":"unhealthy","error_type":"healthcheck"}')

    async def _info(self, exchange: Exchange) -> None:
        limits = self._limits
        page = {
            "model_id": self._identity.model_id,
            "model_sha": None,
            "model_pipeline_tag": None,
            "max_concurrent_requests": limits.max_concurrent_requests,
            "max_best_of": limits.max_best_of,
            "max_stop_sequences": limits.max_stop_sequences,
            "max_input_tokens": limits.max_input_tokens,
            "max_total_tokens": limits.max_total_tokens,
            "validation_workers": limits.validation_workers,
            "max_client_batch_size": limits.max_client_batch_size,
            "router": "text-generation-router",
            "version": VERSION,
            "sha": None,
            "docker_label": None,
        }
        exchange.respond(200, _JSON, orjson.dumps(page))

    async def _models(self, exchange: Exchange) -> None:
        name = self._identity.model_id
        page = {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": name}]}
        exchange.respond(200, _JSON, orjson.dumps(page))

    async def _metrics_page(self, exchange: Exchange) -> None:
        exchange.respond(200, _TEXT, self._metrics.render().encode())

    async def _set_faults(self, exchange: Exchange) -> None:
        values = serde.parse(serde.anything, bytes(exchange.body))
        try:
            self._faults.update(values)
        except (ValueError, AttributeError) as e:
            exchange.respond(422, _TEXT, str(e).encode())
        else:
            exchange.respond(200, [])

    async def _tokenize(self, exchange: Exchange) -> None:
        body = self._body(exchange, schemas.GENERATE)
        spans = await self._in_worker(body["inputs"], lambda text: self._codec.spans(text, add_special_tokens=True))
        exchange.respond(200, _JSON, orjson.dumps(spans))

    async def _chat_tokenize(self, exchange: Exchange) -> None:
        self._metrics.count("tgi_request_count")
        body = self._body(exchange, schemas.CHAT)
        prompt, _ = self._chat_prompt(body)
        spans = await self._in_worker(prompt, lambda text: self._codec.spans(text, add_special_tokens=False))
        exchange.respond(200, _JSON, orjson.dumps({"tokenize_response": spans, "templated_text": prompt}))

    # -- Generate ------------------------------------------------------------------------------------------------

    async def _compat(self, exchange: Exchange) -> None:
        await self._compat_body(exchange, self._body(exchange, schemas.COMPAT))

    async def _compat_body(self, exchange: Exchange, body: dict[str, Any]) -> None:
        if body["parameters"]["return_full_text"] is None:
            body["parameters"]["return_full_text"] = True  # the model has no pipeline tag
        if body["stream"]:
            await self._stream(exchange, body)
        else:
            await self._answer(exchange, body, in_array=True)

    async def _generate(self, exchange: Exchange) -> None:
        await self._answer(exchange, self._body(exchange, schemas.GENERATE), in_array=False)

    async def _generate_stream(self, exchange: Exchange) -> None:
        await self._stream(exchange, self._body(exchange, schemas.GENERATE))

    async def _answer(self, exchange: Exchange, body: dict[str, Any], *, in_array: bool) -> None:
        self._metrics.count("tgi_request_count")
        inputs, parameters = body["inputs"], body["parameters"]
        count = parameters["best_of"] or 1
        if count > 1:
            check_best_of(count, self._limits)
        found = await self._collect(exchange, [inputs] * count, parameters, add_special_tokens=True)
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
        headers = [*_JSON, *self._timing_headers(exchange, [chosen], len(inputs), has_compute_time=True)]
        exchange.respond(200, headers, b"[%b]" % answer if in_array else answer)

    async def _stream(self, exchange: Exchange, body: dict[str, Any]) -> None:
        self._metrics.count("tgi_request_count")
        inputs, parameters = body["inputs"], body["parameters"]
        prefix = inputs if parameters["return_full_text"] else ""
        sink = StreamSink(exchange, details=parameters["details"], prefix=prefix)
        self._start_stream(exchange, len(inputs))
        try:
            check_stream(parameters)
            await self._begin(exchange, inputs, parameters, sink, add_special_tokens=True)
        except GenerationFailed as e:
            sink.on_error(None, e)

    def _start_stream(self, exchange: Exchange, characters: int) -> None:
        exchange.start_stream(
            [
                ("content-type", "text/event-stream"),
                ("cache-control", "no-cache"),
                ("x-compute-type", self._identity.compute_type),
                ("x-compute-characters", str(characters)),
                ("x-accel-buffering", "no"),
            ]
        )

    # -- OpenAI --------------------------------------------------------------------------------------------------

    async def _chat(self, exchange: Exchange) -> None:
        await self._chat_body(exchange, self._body(exchange, schemas.CHAT))

    def _chat_prompt(self, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]] | None]:
        tools = chat.chosen_tools(body)
        tool_prompt = body["tool_prompt"] or chat.DEFAULT_TOOL_PROMPT
        try:
            return self._template.render(body["messages"], tools, tool_prompt), tools
        except GenerationFailed:
            self._metrics.count("tgi_request_failure", 'err="template"')
            raise

    async def _chat_body(self, exchange: Exchange, body: dict[str, Any]) -> None:
        self._metrics.count("tgi_request_count")
        prompt, tools = self._chat_prompt(body)
        parameters = chat.generate_parameters(body, tools)
        self._metrics.count("tgi_request_count")
        if body["stream"]:
            sink = ChatSink(
                exchange,
                self._codec,
                model=self._shown_model(body["model"]),
                fingerprint=self._identity.fingerprint,
                logprobs=bool(body["logprobs"]),
                include_usage=body["stream_options"].get("include_usage", False),
            )
            self._start_stream(exchange, len(prompt))
            try:
                await self._begin(exchange, prompt, parameters, sink, add_special_tokens=False)
            except GenerationFailed as e:
                sink.on_error(None, e)
            return
        (found,) = await self._collect(exchange, [prompt], parameters, add_special_tokens=False)
        ending = found.ending
        logprobs = {"content": [chat_logprob(self._codec, t) for t in found.tokens]} if body["logprobs"] else None
        page = {
            "object": "chat.completion",
            "id": "",
            "created": int(time.time()),
            "model": self._shown_model(body["model"]),
            "system_fingerprint": self._identity.fingerprint,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": ending.generated_text},
                    "logprobs": logprobs,
                    "finish_reason": "stop" if ending.finish_reason == "eos_token" else ending.finish_reason,
                }
            ],
            "usage": orjson.Fragment(usage_json(found.generation.input_length, ending.generated_tokens)),
        }
        headers = [*_JSON, *self._timing_headers(exchange, [found], len(prompt), has_compute_time=True)]
        exchange.respond(200, headers, orjson.dumps(page))

    def _shown_model(self, asked: str | None) -> str:
        return self._identity.model_id if asked in (None, "tgi") else str(asked)

    async def _completions(self, exchange: Exchange) -> None:
        await self._completion_body(exchange, self._body(exchange, schemas.COMPLETION))

    async def _completion_body(self, exchange: Exchange, body: dict[str, Any]) -> None:
        self._metrics.count("tgi_request_count")
        prompts: list[str] = body["prompt"]
        if body["suffix"] is not None:
            message = "Suffix is not supported and can be achieved by preprocessing the prompt."
            raise GenerationFailed(message=message, error_type="suffix not supported", status=422)
        limit = self._limits.max_client_batch_size
        if len(prompts) > limit:
            message = f"Number of prompts exceeds the maximum allowed batch size of {limit}"
            raise GenerationFailed(message=message, error_type="batch size exceeded", status=422)
        parameters = chat.completion_parameters(body)
        self._metrics.count("tgi_request_count", by=len(prompts))
        model = self._shown_model(body["model"])
        characters = sum(len(p) for p in prompts)
        if body["stream"]:
            sink = CompletionSink(exchange, model=model, fingerprint=self._identity.fingerprint, prompts=len(prompts))
            self._start_stream(exchange, characters)
            for index, prompt in enumerate(prompts):
                try:
                    await self._begin(
                        exchange, prompt, parameters, sink, add_special_tokens=True, completion_index=index
                    )
                except GenerationFailed as e:
                    sink.on_error(None, e)
            return
        # the token counts of the answer come from the prompt's details, so they are asked for
        parameters["decoder_input_details"] = False
        found = await self._collect(exchange, prompts, parameters, add_special_tokens=True, uses_prefix_cache=False)
        prompt_tokens = sum(f.generation.input_length for f in found)
        completion_tokens = sum(f.ending.generated_tokens for f in found)
        page = {
            "object": "text_completion",
            "id": "",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": self._identity.fingerprint,
            "choices": [
                {
                    "index": i,
                    "text": f.ending.generated_text,
                    "logprobs": None,
                    "finish_reason": "stop" if f.ending.finish_reason == "eos_token" else f.ending.finish_reason,
                }
                for i, f in enumerate(found)
            ],
            "usage": orjson.Fragment(usage_json(prompt_tokens, completion_tokens)),
        }
        headers = [*_JSON, *self._timing_headers(exchange, found, characters, has_compute_time=False)]
        exchange.respond(200, headers, orjson.dumps(page))

    # -- Clouds --------------------------------------------------------------------------------------------------

    async def _invocations(self, exchange: Exchange) -> None:
        kind, body = self._body(exchange, schemas.sagemaker)
        if kind == "generate":
            await self._compat_body(exchange, body)
        elif kind == "chat":
            await self._chat_body(exchange, body)
        else:
            await self._completion_body(exchange, body)

    async def _vertex(self, exchange: Exchange) -> None:
        self._metrics.count("tgi_request_count")
        instances = self._body(exchange, schemas.VERTEX)["instances"]
        if not instances:
            raise GenerationFailed(message="Input validation error", error_type="Input validation error", status=422)
        texts = []
        for kind, body in instances:
            if kind == "chat":
                prompt, tools = self._chat_prompt(body)
                parameters, adds = chat.generate_parameters(body, tools), False
            else:
                prompt, adds = body["inputs"], True
                given = body["parameters"] or {"max_new_tokens": None, "seed": None}
                parameters = schemas.default_parameters() | {"details": True} | given
            try:
                (found,) = await self._collect(exchange, [prompt], parameters, add_special_tokens=adds)
            except GenerationFailed as e:
                wrong = "Incomplete generation"
                raise GenerationFailed(message=wrong, error_type=wrong, status=500) from e
            texts.append(found.ending.generated_text)
        exchange.respond(200, _JSON, orjson.dumps({"predictions": texts}))

    # -- Generations ---------------------------------------------------------------------------------------------

    async def _begin(
        self,
        exchange: Exchange,
        inputs: str,
        parameters: dict[str, Any],
        sink: Sink,
        *,
        add_special_tokens: bool,
        completion_index: int | None = None,
        uses_prefix_cache: bool = True,
    ) -> Generation:
        """Take a permit, validate, queue. The permit is given back when the generation ends or its client leaves.

        Raises:
            GenerationFailed: overloaded or invalid; no permit is held then.
        """
        if self._permits <= 0:
            self._metrics.count("tgi_request_failure", 'err="overloaded"')
            raise GenerationFailed(message="Model is overloaded", error_type="overloaded", status=429)
        self._permits -= 1
        started = time.monotonic()
        try:
            request = await self._validated(inputs, parameters, add_special_tokens=add_special_tokens)
        except BaseException:
            self._permits += 1
            raise
        timing = Timing(arrived=exchange.arrived, validated=time.monotonic())
        self._metrics.observe("tgi_request_validation_duration", timing.validated - started)
        self._note_validated(request)
        generation = Generation(request, sink, self._codec, self._eos_ids, timing)
        if not uses_prefix_cache:
            generation.entry.prompt_ids = None
        if isinstance(sink, CompletionSink) and completion_index is not None:
            sink.add(generation, completion_index)
        self._watch(exchange, generation, is_detached=completion_index is not None)
        if not generation.is_closed:
            self.runner.submit(generation)
        return generation

    def _watch(self, exchange: Exchange, generation: Generation, *, is_detached: bool) -> None:
        """Close the generation when the client leaves; a streamed completion notices one token late and keeps its
        permit till then, because a task of its own forwards its tokens."""
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
            self._metrics.count("tgi_request_failure", 'err="dropped"')
        else:
            exchange.on_gone = gone

    def _release(self, generation: Generation) -> None:
        if generation.holds_permit:
            generation.holds_permit = False
            self._permits += 1

    async def _validated(self, inputs: str, parameters: dict[str, Any], *, add_special_tokens: bool) -> ValidRequest:
        try:
            check_parameters(inputs, parameters, self._limits)
            ids = await self._in_worker(
                inputs, lambda text: self._codec.encode(text, add_special_tokens=add_special_tokens)
            )
            return validate(inputs, parameters, ids, self._limits, add_special_tokens=add_special_tokens)
        except GenerationFailed as e:
            if e.error_type == "validation":
                self._metrics.count("tgi_request_failure", 'err="validation"')
            raise

    async def _in_worker(self, text: str, work: Callable[[str], Any]) -> Any:
        if len(text) <= _INLINE_CHARACTERS:
            return work(text)
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, text)

    def _note_validated(self, request: ValidRequest) -> None:
        self._metrics.observe("tgi_request_input_length", len(request.input_ids))
        self._metrics.observe("tgi_request_max_new_tokens", request.piece_tokens)

    def next_piece(self, generation: Generation) -> tuple[list[int], int] | None:
        """Ids and limit of the next 1024-token piece, or None if it does not fit any more."""
        request = generation.request
        ids = self._codec.encode(generation.fed_text, add_special_tokens=request.add_special_tokens)
        if request.truncate is not None:
            ids = ids[-request.truncate :]
        try:
            piece, _ = check_lengths(len(ids), request.max_new_tokens, self._limits)
        except GenerationFailed:
            return None
        self._metrics.observe("tgi_request_input_length", len(ids))
        self._metrics.observe("tgi_request_max_new_tokens", piece)
        return ids, piece

    def finished(self, generation: Generation) -> None:
        """The runner says that a generation has ended by itself."""
        self._release(generation)
        timing, metrics = generation.timing, self._metrics
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

    async def _collect(
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
                    await self._begin(
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
                if not generation.timing.ended:
                    generation.is_closed = generation.entry.is_closed = True
                    self._release(generation)
            raise

    def _timing_headers(
        self, exchange: Exchange, found: list[Collected], characters: int, *, has_compute_time: bool
    ) -> Headers:
        timings = [f.generation.timing for f in found]
        total = max(t.ended for t in timings) - exchange.arrived
        inference = sum(t.ended - t.batched for t in timings)
        tokens = sum(f.ending.generated_tokens for f in found)
        prompt = sum(f.generation.input_length for f in found)
        compute = [("x-compute-time", repr(round(total, 9)))] if has_compute_time else []
        milliseconds = {
            "x-total-time": total,
            "x-validation-time": sum(t.validated - t.arrived for t in timings),
            "x-queue-time": sum(t.batched - t.validated for t in timings),
            "x-inference-time": inference,
            "x-time-per-token": inference / tokens,
        }
        return [
            ("x-compute-type", self._identity.compute_type),
            *compute,
            ("x-compute-characters", str(characters)),
            *((name, str(int(seconds * 1000))) for name, seconds in milliseconds.items()),
            ("x-prompt-tokens", str(prompt)),
            ("x-generated-tokens", str(tokens)),
        ]

    async def close(self) -> None:
        """End what is still running."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._workers.shutdown(wait=False, cancel_futures=True)
