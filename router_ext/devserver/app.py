"""TGI's routes over one runner: what each endpoint checks, in which order, and what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import orjson

from router_ext.devserver import chat, schemas, serde
from router_ext.devserver.admission import Admission
from router_ext.devserver.chat import ChatTemplate
from router_ext.devserver.endpoint import JSON, TEXT, VERSION, BodyRefused, Identity, read_body
from router_ext.devserver.faults import Faults
from router_ext.devserver.generation import GenerationFailed
from router_ext.devserver.http import Exchange
from router_ext.devserver.json_reader import BodyError
from router_ext.devserver.native import NativeEndpoints
from router_ext.devserver.openai import OpenAIEndpoints
from router_ext.devserver.sinks import native_error

_Work = Coroutine[Any, Any, None]


@dataclass(frozen=True, slots=True)
class _Route:
    work: Callable[[Exchange], _Work]
    needs_key: bool = False


class App:
    """The HTTP application: routing, authorisation, CORS, errors, and the small pages."""

    def __init__(self, *, identity: Identity, admission: Admission, template: ChatTemplate, faults: Faults) -> None:
        self._identity = identity
        self._admission = admission
        self._limits = admission.limits
        self._codec = admission.codec
        self._metrics = admission.metrics
        self._faults = faults
        native = NativeEndpoints(admission, identity)
        openai = OpenAIEndpoints(admission, identity, template)
        self._native = native
        self._openai = openai
        self._tasks: set[asyncio.Task[None]] = set()
        self._routes: dict[str, dict[str, _Route]] = {
            "/": {"GET": _Route(self._health), "POST": _Route(native.compat, True)},
            "/health": {"GET": _Route(self._health)},
            "/ping": {"GET": _Route(self._health)},
            "/info": {"GET": _Route(self._info)},
            "/metrics": {"GET": _Route(self._metrics_page)},
            "/v1/models": {"GET": _Route(self._models)},
            "/generate": {"POST": _Route(native.generate, True)},
            "/generate_stream": {"POST": _Route(native.generate_stream, True)},
            "/tokenize": {"POST": _Route(self._tokenize, True)},
            "/chat_tokenize": {"POST": _Route(self._chat_tokenize)},
            "/v1/chat/completions": {"POST": _Route(openai.chat, True)},
            "/v1/completions": {"POST": _Route(openai.completions, True)},
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
            exchange.respond(e.status, JSON, native_error(e))
        except BodyError as e:
            exchange.respond(e.status, TEXT, e.text(bytes(exchange.body)).encode())
        except BodyRefused as e:
            exchange.respond(e.status, TEXT, e.text.encode())

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

    # -- Small pages ---------------------------------------------------------------------------------------------

    async def _health(self, exchange: Exchange) -> None:
        if self._faults.health_delay_s:
            await asyncio.sleep(self._faults.health_delay_s)
        if await self._admission.runner.health():
            exchange.respond(200, [])
        else:
            exchange.respond(503, JSON, b'{"error":"unhealthy","error_type":"healthcheck"}')

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
        exchange.respond(200, JSON, orjson.dumps(page))

    async def _models(self, exchange: Exchange) -> None:
        name = self._identity.model_id
        page = {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": name}]}
        exchange.respond(200, JSON, orjson.dumps(page))

    async def _metrics_page(self, exchange: Exchange) -> None:
        exchange.respond(200, TEXT, self._metrics.render().encode())

    async def _set_faults(self, exchange: Exchange) -> None:
        values = serde.parse(serde.anything, bytes(exchange.body))
        try:
            self._faults.update(values)
        except (ValueError, AttributeError) as e:
            exchange.respond(422, TEXT, str(e).encode())
        else:
            exchange.respond(200, [])

    async def _tokenize(self, exchange: Exchange) -> None:
        body = read_body(exchange, schemas.GENERATE)
        spans = await self._admission.in_worker(
            body["inputs"], lambda text: self._codec.spans(text, add_special_tokens=True)
        )
        exchange.respond(200, JSON, orjson.dumps(spans))

    async def _chat_tokenize(self, exchange: Exchange) -> None:
        self._metrics.count("tgi_request_count")
        body = read_body(exchange, schemas.CHAT)
        prompt, _ = self._openai.chat_prompt(body)
        spans = await self._admission.in_worker(prompt, lambda text: self._codec.spans(text, add_special_tokens=False))
        exchange.respond(200, JSON, orjson.dumps({"tokenize_response": spans, "templated_text": prompt}))

    # -- Clouds --------------------------------------------------------------------------------------------------

    async def _invocations(self, exchange: Exchange) -> None:
        kind, body = read_body(exchange, schemas.sagemaker)
        if kind == "generate":
            await self._native.compat_body(exchange, body)
        elif kind == "chat":
            await self._openai.chat_body(exchange, body)
        else:
            await self._openai.completion_body(exchange, body)

    async def _vertex(self, exchange: Exchange) -> None:
        self._metrics.count("tgi_request_count")
        instances = read_body(exchange, schemas.VERTEX)["instances"]
        if not instances:
            raise GenerationFailed(message="Input validation error", error_type="Input validation error", status=422)
        texts = []
        for kind, body in instances:
            self._metrics.count("tgi_request_count")
            if kind == "chat":
                prompt, tools = self._openai.chat_prompt(body)
                parameters, adds = chat.generate_parameters(body, tools), False
            else:
                prompt, adds = body["inputs"], True
                given = body["parameters"] or {"max_new_tokens": None, "seed": None}
                parameters = schemas.default_parameters() | {"details": True} | given
            try:
                (found,) = await self._admission.collect(exchange, [prompt], parameters, add_special_tokens=adds)
            except GenerationFailed as e:
                wrong = "Incomplete generation"
                raise GenerationFailed(message=wrong, error_type=wrong, status=500) from e
            texts.append(found.ending.generated_text)
        exchange.respond(200, JSON, orjson.dumps({"predictions": texts}))

    async def close(self) -> None:
        """End what is still running."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._admission.close()
