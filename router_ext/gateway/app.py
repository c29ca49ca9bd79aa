"""The data plane as one raw ASGI application: TGI's API and OpenAI's, by key.

Of TGI's paths only ``/vertex`` is not served: it is a list of requests, of which every failure is told as one and the
same. Unknown paths are 404 in the dialect of their prefix.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlencode

import orjson

from router_ext.core.events import RequestSpec
from router_ext.core.ids import RequestId, TenantId, TierName
from router_ext.errors import BodyTooLarge, FairlaneError, LimitExceeded, NoBackend, RequestRefused
from router_ext.gateway.agents import AGENT_HEADER, COST_HEADER, INTERACTION_HEADER, DeclaredAgent, declared_agent
from router_ext.gateway.auth import TIER_HEADER, Identity, tenant_disabled
from router_ext.gateway.bodies import SAGEMAKER_PATH, Body
from router_ext.gateway.call import CLIENT_CLOSED, Call
from router_ext.gateway.chats import decode_chat
from router_ext.gateway.continuation import Continuation
from router_ext.gateway.dialects import decode_body, decode_tokenize, dialect_of, error_response, read_body
from router_ext.gateway.engine import PoolEngine
from router_ext.gateway.exchange import EXTENSION, Exchange
from router_ext.gateway.foresight import Foresight
from router_ext.gateway.generation import Dialect, ModelLimits, ResumeClass
from router_ext.gateway.guarding import Judged
from router_ext.gateway.lifespan import Router, draining
from router_ext.gateway.measure import LARGE_BYTES, Measured, measure
from router_ext.gateway.openapi import DOCUMENT_PATH, document
from router_ext.gateway.own_view import refused_view
from router_ext.gateway.peers import Peer, Peers
from router_ext.gateway.recent import Recent
from router_ext.gateway.refusals import refusal_of
from router_ext.gateway.refused import Refusals, Refused, shortened, texts
from router_ext.gateway.relay import WholeGeneration
from router_ext.gateway.slices import TextGeneration
from router_ext.gateway.streams import Client, Response
from router_ext.obs.logs import get_logger, has_request_lines, request_ended
from router_ext.obs.metrics import CONTENT_TYPE
from router_ext.obs.tracing import Trace, Value
from router_ext.sync.inflight import InflightSlot, RequestStart
from router_ext.sync.ledger import new_event_id, now_us
from router_ext.wire.headers import JSON, Headers
from router_ext.wire.tgi import decode_error, encode_tokenize

Handler = Callable[["Request"], Awaitable[Response | None]]

MAX_ID_CHARACTERS = 128

OWN_REQUESTS_PATH = "/v1/requests/"
USAGE_PATH = "/v1/usage"
_MAX_PARAMETERS = 20
_REPORT_PARAMETERS = frozenset(
    ("from", "to", "tz", "group_by", "tenant", "key", "pool", "model", "tier", "limit", "cursor")
)

_log = get_logger(__name__)


class Request:
    """One HTTP request, as the handlers see it."""

    __slots__ = (
        "_first",
        "arrived_s",
        "arrived_us",
        "body_bytes",
        "demotion",
        "exchange",
        "headers",
        "limit_headers",
        "model",
        "path",
        "peer",
        "query",
        "receive",
        "recent",
        "refusals",
        "request_id",
        "tenant",
        "tier",
        "trace",
    )

    def __init__(self, scope: Any, receive: Callable[[], Awaitable[Any]], peers: Peers) -> None:
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._first = dict(reversed(self.headers))
        self.exchange: Exchange = scope["extensions"][EXTENSION]
        self.peer: Peer = peers.of(scope, self.headers)
        self.receive = receive
        self.body_bytes = 0
        self.arrived_s = asyncio.get_running_loop().time()
        self.arrived_us = now_us()
        self.limit_headers: Callable[[], Headers] = list
        self.request_id = _request_id(self.header(b"x-request-id"))
        self.tier: TierName | None = None
        self.model = ""
        self.tenant: TenantId | None = None
        self.trace: Trace | None = None
        self.refusals: Refusals | None = None
        self.recent: Recent | None = None
        self.demotion: str | None = None

    def header(self, name: bytes) -> str | None:
        """First value of a header (lower-case name)."""
        value = self._first.get(name)
        return None if value is None else value.decode("latin-1")

    async def body(self) -> bytes | None:
        """The whole body; None if the client left before its end.

        Raises:
            BodyTooLarge: over the limit; nothing of it was kept.
        """
        parts: list[bytes] = []
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message["body"])
            self.body_bytes += len(message["body"])
            if not message["more_body"]:
                break
        if self.exchange.is_body_too_large:
            raise BodyTooLarge("The request body is larger than this router takes.")
        return parts[0] if len(parts) == 1 else b"".join(parts)


class App:
    """Routes, and the way of a generation request from bytes to the engine."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._peers = Peers(router.settings.trusted_proxies)
        generate: dict[str, Handler] = {"POST": self._generate}
        self._routes: dict[str, dict[str, Handler]] = {
            "/": {"POST": self._generate, "GET": self._health},
            "/generate": generate,
            "/generate_stream": generate,
            "/v1/chat/completions": generate,
            "/v1/completions": generate,
            "/v1/responses": generate,
            SAGEMAKER_PATH: generate,
            "/tokenize": {"POST": self._tokenize},
            "/chat_tokenize": {"POST": self._chat_tokenize},
            "/info": {"GET": self._info},
            "/v1/models": {"GET": self._models},
            USAGE_PATH: {"GET": self._usage},
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health},
            "/livez": {"GET": self._live},
            "/readyz": {"GET": self._ready},
            "/metrics": {"GET": self._metrics},
            DOCUMENT_PATH: {"GET": self._document},
        }

        self._own_requests: dict[str, Handler] = {"GET": self._explain}

    @property
    def methods(self) -> dict[str, set[str]]:
        """What is served: paths as the OpenAPI document writes them, each with its methods."""
        fixed = {path: set(handlers) for path, handlers in self._routes.items()}
        return {**fixed, OWN_REQUESTS_PATH + "{id}": set(self._own_requests)}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive, self._peers)
        self._router.last_request_s = request.arrived_s
        dialect = dialect_of(request.path)
        methods = self._routes.get(request.path) or (
            self._own_requests if request.path.startswith(OWN_REQUESTS_PATH) else None
        )
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        try:
            if methods is None:
                raise NotFound(f"There is nothing at {request.path[:200]}.")
            handler = methods.get(method)
            if handler is None:
                response: Response | None = _wrong_method(methods, dialect)
            else:
                response = await handler(request)
        except FairlaneError as error:
            self._router.metrics.count_refusal(error.code, model=request.model, tier=request.tier or "")
            if request.recent is not None:
                request.recent.refused(error.code, request.arrived_us)
            self._refused(request, error, dialect)
            response = _refusal(error, dialect, request)
        except asyncio.CancelledError:
            if not request.exchange.is_gone:
                raise
            # The client left while its request was being measured.
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            self._left(request)
            return
        except Exception:  # contained to its request
            _log.exception("request.failed", path=request.path)
            if request.exchange.is_open:
                request.exchange.abort()
                return
            failed = FairlaneError("The router failed to serve this request.")
            self._refused(request, failed, dialect)
            response = _refusal(failed, dialect, request)
        if response is not None and not request.exchange.is_gone:
            await request.exchange.answer(
                response.status,
                response.headers,
                response.body,
                is_head=scope["method"] == "HEAD",
                is_last=self._router.is_leaving,
            )

    # --- generation -------------------------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Response | None:
        router = self._router
        identity = self._identify(request)
        # Strangers make no spans.
        request.trace = router.tracing.begin(request.headers, path=request.path, arrived_us=request.arrived_us)
        request.limit_headers = partial(router.limits.headers, identity)
        request.refusals = router.refusals
        if router.is_draining:
            raise draining()
        router.active += 1
        try:
            client = await self._admit(request, identity)
            if client is None:
                self._left(request)
                return None
            return await client.done
        finally:
            router.request_ended()

    async def _admit(self, request: Request, identity: Identity) -> Client | None:
        """From bytes to the queue; None if the client left. What the body was read into ends with this call."""
        router = self._router
        raw = await request.body()
        if raw is None:
            return None
        body = read_body(request.path, request.header(b"content-type"), raw, max_bytes=router.settings.body_limit_bytes)
        engine = self._engine(body.model, identity)
        request.model, request.recent = engine.name, engine.books.recent
        request.refusals = engine.books.explanations.refusals
        tier, demotion = router.limits.tier(identity, identity.tier(request.header(TIER_HEADER)), request.arrived_us)
        request.tier, request.demotion = tier, demotion
        agent = declared_agent(
            identity.tenant,
            request.header(AGENT_HEADER) or request.header(INTERACTION_HEADER),
            request.header(COST_HEADER),
        )
        with _watched(request.exchange):
            limits = await engine.model.known_limits(identity.tenant)
            generation = decode_body(body, limits)
            judged = await router.guarding.judge(engine, identity.tenant, tier, generation)
            generation = judged.generation
            foresight = router.predictions.ask(engine, identity, generation)
            measured = await measure(engine, identity.tenant, generation, limits)
            await foresight.settled()
            event = new_event_id(request.arrived_us)
            counting = router.limits.admit(
                identity,
                event,
                _predicted_cost(measured, foresight, generation.num_sequences),
                request.arrived_us,
                partial(engine.scheduler.drain_estimate, identity.tenant),
            )
            if counting is not None:
                await counting
        try:
            if request.exchange.is_gone:
                router.limits.end(event, None)
                return None
            if router.engines.get(engine.record.pool) is not engine:
                raise NoBackend("This model is not served any more.", code="model_removed")
            if not engine.takes(identity.tenant):
                raise tenant_disabled()
            return self._begin(
                request, engine, identity, tier, agent, judged, measured, limits, foresight, event, demotion
            )
        except BaseException:
            router.limits.end(event, None)
            raise

    def _begin(
        self,
        request: Request,
        engine: PoolEngine,
        identity: Identity,
        tier: TierName,
        agent: DeclaredAgent,
        judged: Judged,
        measured: Measured,
        limits: ModelLimits,
        foresight: Foresight,
        event: str,
        demotion: str | None,
    ) -> Client:
        """Open the books and hand the request to the engine. Everything from here on is callbacks."""
        router = self._router
        caps = [prompt.lengths.max_new_tokens for prompt in measured.prompts]
        slot = router.ledger.begin(
            RequestStart(
                event=event,
                request=request.request_id,
                router=router.settings.id,
                tenant=identity.tenant,
                key=identity.key,
                pool=engine.record.pool,
                model=engine.name,
                tier=tier,
                dialect=judged.generation.dialect,
                arrived_at_us=request.arrived_us,
                max_new_tokens=max(caps),
                predicted_tokens=foresight.answers[0].median,
                predictor=engine.predictor_digest,
                prediction=foresight.record(has_features=False),
            )
        )
        try:
            return self._submit(
                request, engine, identity, tier, agent, judged, measured, limits, slot, foresight, demotion
            )
        except BaseException:
            # Nothing of it was queued: it is not in the books.
            if slot.is_open:
                router.ledger.discard(slot)
            raise

    def _submit(
        self,
        request: Request,
        engine: PoolEngine,
        identity: Identity,
        tier: TierName,
        agent: DeclaredAgent,
        judged: Judged,
        measured: Measured,
        limits: ModelLimits,
        slot: InflightSlot,
        foresight: Foresight,
        demotion: str | None,
    ) -> Client:
        event = slot.start.event
        generation = judged.generation
        client = Client(request.exchange, stall_limit_s=self._router.settings.stall_limit_s, peer=request.peer)
        call = Call(
            engine,
            request=generation,
            identity=identity,
            tier=tier,
            client=client,
            slot=slot,
            arrived_s=request.arrived_s,
            validated_s=engine.loop.time(),
            prompt_tokens=sum(prompt.lengths.prompt_tokens for prompt in measured.prompts),
            predicted_tokens=slot.start.predicted_tokens,
            characters=measured.characters,
            foresight=foresight,
            trace=request.trace,
            limit_headers=request.limit_headers,
            demotion=demotion,
        )
        generations: list[TextGeneration | WholeGeneration] = []
        is_watched = engine.suspects.is_watched(identity.tenant)
        for index, (prompt, foreseen) in enumerate(zip(measured.prompts, foresight.answers, strict=True)):
            max_new_tokens = prompt.lengths.max_new_tokens
            flow = None
            if measured.passthrough is None:
                max_new_tokens = engine.fitting_new_tokens(prompt.lengths.prompt_tokens, max_new_tokens)
                flow = Continuation.for_request(
                    generation,
                    max_new_tokens=max_new_tokens,
                    limits=limits,
                    base_seed=secrets.randbits(64),
                    prompt=prompt.text,
                    prompt_index=index,
                    prompt_tokens=prompt.lengths.prompt_tokens,
                    eos_ids=engine.model.eos_ids,
                    eos_is_complete=bool(engine.model.tokenizer and engine.model.tokenizer.eos_ids),
                    added_ids=engine.model.tokenizer.added_ids if engine.model.tokenizer else frozenset(),
                    resume_class=measured.resume_class,
                    is_resumable=engine.model.is_resumable,
                    reads_images=engine.model.reads_images,
                )
            spec = RequestSpec(
                request_id=RequestId(event if index == 0 else f"{event}-{index}"),
                tenant=identity.tenant,
                key=identity.key,
                tier=tier,
                prompt_tokens=prompt.lengths.prompt_tokens,
                max_new_tokens=max_new_tokens,
                predicted_output_tokens=None,
                slice_tokens=None,
                quantiles=foreseen.distribution,
                is_sliceable=flow is not None and flow.is_sliceable,
                num_sequences=generation.num_sequences if flow is None else 1,
                prefix=prompt.prefix,
                agent_id=agent.agent,
                agent_cost=agent.cost,
                grammar=judged.digest,
                stall_s=judged.stall_s,
                is_suspect=is_watched,
                prompt_bytes=-(-request.body_bytes // len(measured.prompts)),
            )
            if flow is None:
                assert measured.passthrough is not None
                generations.append(WholeGeneration(engine, call, spec=spec, passthrough=measured.passthrough))
            else:
                generations.append(TextGeneration(engine, call, spec=spec, flow=flow, index=index))
        if engine.suspects.has_refused:
            for each in generations:
                engine.suspects.check(each.digest())
        call.begin(generations)
        engine.submit(call, generations)
        if slot.is_open:  # else it was refused
            foresight.count()
            self._count_unresumable(engine, measured, generations)
        return client

    def _count_unresumable(
        self, engine: PoolEngine, measured: Measured, generations: Sequence[TextGeneration | WholeGeneration]
    ) -> None:
        reason = None
        if measured.passthrough is not None:
            reason = measured.passthrough.reason
        elif not engine.model.is_resumable:
            reason = "model"
        elif any(each.resume_class is ResumeClass.NEVER for each in generations):
            reason = "limits"
        if reason is not None:
            self._router.metrics.unresumable.labels(engine.name, reason).inc()

    def _refused(self, request: Request, error: FairlaneError, dialect: Dialect) -> None:
        """The end of a request that never became a call, in log and trace."""
        status = error.status_openai if dialect.is_openai else error.status_native
        if request.refusals is not None and request.tenant is not None:
            request.refusals.remember(
                Refused(
                    request=request.request_id,
                    event=None,
                    tenant=request.tenant,
                    tier=request.tier,
                    tier_reason=request.demotion,
                    arrived_at_us=request.arrived_us,
                    code=error.code,
                    status=status,
                    message=shortened(error.message),
                    retry_after_s=error.retry_after_s,
                    limits=texts(request.limit_headers()),
                    total_s=asyncio.get_running_loop().time() - request.arrived_s,
                )
            )
        self._ended_early(request, outcome="refused", status=status, code=error.code)

    def _left(self, request: Request) -> None:
        """Its client went away before it was queued."""
        self._ended_early(request, outcome="cancelled", status=CLIENT_CLOSED, code=None)

    def _ended_early(self, request: Request, *, outcome: str, status: int, code: str | None) -> None:
        trace = request.trace
        if trace is not None and trace.is_recording:
            attributes: dict[str, Value | list[str]] = {
                "http.response.status_code": status,
                "fairlane.request": request.request_id,
                "fairlane.tenant": request.tenant or "",
            }
            trace.end(attributes, error=code or outcome)
        if has_request_lines():
            request_ended(
                {
                    "request": request.request_id,
                    "trace": None if trace is None else trace.trace_id,
                    "client": request.peer.address,
                    "proto": request.peer.proto,
                    "tenant": request.tenant,
                    "model": request.model,
                    "tier": request.tier,
                    "outcome": outcome,
                    "status": status,
                    "code": code,
                    "duration_ms": round((asyncio.get_running_loop().time() - request.arrived_s) * 1_000, 3),
                }
            )

    def _identify(self, request: Request) -> Identity:
        directory = self._router.directory
        if directory is None:
            raise NotReady("The router has no configuration yet.", retry_after_s=2.0)
        identity = directory.keys.authenticate(request.headers, now_us=request.arrived_us)
        request.tenant = identity.tenant
        return identity

    def _engine(self, model: str | None, identity: Identity) -> PoolEngine:
        directory = self._router.directory
        assert directory is not None
        return self._router.engines[directory.resolve(model, identity).pool]

    # --- other calls of TGI's API -------------------------------------------------------------------------------------

    async def _tokenize(self, request: Request) -> Response | None:
        return await self._count(request, lambda body, _: encode_tokenize(decode_tokenize(body)), "/tokenize")

    async def _chat_tokenize(self, request: Request) -> Response | None:
        def question(body: Body, limits: ModelLimits) -> bytes:
            chat = decode_chat(body, limits).chat
            assert chat is not None
            return orjson.dumps(chat)

        return await self._count(request, question, "/chat_tokenize")

    async def _count(
        self, request: Request, question_of: Callable[[Body, ModelLimits], bytes], path: str
    ) -> Response | None:
        """Relay a question to a backend's tokenizer threads, large texts one at a time, as those of prompts."""
        router = self._router
        identity = self._identify(request)
        if router.is_draining:
            raise draining()
        router.active += 1
        try:
            raw = await request.body()
            if raw is None:
                return None
            limit = router.settings.body_limit_bytes
            body = read_body(request.path, request.header(b"content-type"), raw, max_bytes=limit)
            name = body.data.get("model") if path == "/chat_tokenize" else None
            engine = self._engine(name if isinstance(name, str) else None, identity)
            model = engine.model
            if not engine.backends.up:
                raise model.no_backend()
            question = question_of(body, model.limits())
            with _watched(request.exchange):
                is_large = len(raw) > LARGE_BYTES
                async with model.large_text(identity.tenant, is_large=is_large):
                    _, reply = await model.ask(
                        lambda client: client.call("POST", path, question), tenant=identity.tenant, takes_long=is_large
                    )
        finally:
            router.request_ended()
        if reply.status != 200:
            raise refusal_of(decode_error(reply.status, reply.body))
        return Response(status=200, headers=[JSON], body=reply.body)

    async def _info(self, request: Request) -> Response:
        engine = self._engine(None, self._identify(request))
        members = engine.backends.up or [m for m in engine.backends.members.values() if m.info is not None]
        known = [member for member in members if member.info is not None]
        if not known:
            raise engine.model.no_backend()
        largest = max(known, key=lambda member: member.info.max_total_tokens if member.info else 0)
        return Response(status=200, headers=[JSON], body=largest.info_body)

    async def _models(self, request: Request) -> Response:
        # Every key may use every pool by its name; its own default is what it gets without one.
        self._identify(request)
        data = [
            {"id": engine.name, "object": "model", "created": 0, "owned_by": engine.model.model_id}
            for engine in self._router.engines.values()
        ]
        return Response(status=200, headers=[JSON], body=orjson.dumps({"object": "list", "data": data}))

    async def _explain(self, request: Request) -> Response:
        """What became of a request of the caller's own tenant; of others' there is no more to learn than of none."""
        identity = self._identify(request)
        wanted = request.path.removeprefix(OWN_REQUESTS_PATH)
        engines = self._router.engines.values()
        found = [each for engine in engines for each in engine.explain_own(wanted, identity.tenant)]
        # What was refused before its pool was known.
        unplaced = self._router.refusals.find(wanted, identity.tenant)
        found += [{"model": None, **refused_view(each)} for each in unplaced]
        if not found:
            raise NotFound("There is no such request here, or it has ended too long ago.", code="request_not_found")
        found.sort(key=lambda each: str(each["arrived_at"]), reverse=True)
        return Response(status=200, headers=[JSON], body=orjson.dumps({"id": wanted, "requests": found}))

    async def _usage(self, request: Request) -> Response:
        """The usage report of the caller's tenant, which the control plane keeps."""
        identity = self._identify(request)
        if not self._router.has_control_plane:
            raise NotFound("This router keeps no books: it has no control plane.", code="usage_not_kept")
        try:
            given = parse_qsl(request.query.decode("latin-1"), keep_blank_values=True, max_num_fields=_MAX_PARAMETERS)
        except ValueError:
            raise RequestRefused(f"More than {_MAX_PARAMETERS} parameters.") from None
        query = urlencode([(name, value) for name, value in given if name in _REPORT_PARAMETERS])
        answer = await self._router.tenant_usage(identity.key, query)
        if answer is None or answer.status in (401, 403) or answer.status >= 500:
            raise NoReport("The usage report is not available at present.", retry_after_s=5.0)
        if answer.status == 200:
            return Response(status=200, headers=[JSON], body=answer.body)
        problem = orjson.loads(answer.body)
        if answer.status == 429:
            raise LimitExceeded(str(problem["detail"]), retry_after_s=float(answer.headers.get("retry-after", "60")))
        raise (NotFound if answer.status == 404 else RequestRefused)(str(problem["detail"]))

    # --- health and metrics -------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        if self._router.is_ready:
            return Response(status=200, headers=[], body=b"")
        return Response(status=503, headers=[JSON], body=_UNHEALTHY)

    async def _live(self, request: Request) -> Response:
        return Response(status=200, headers=[_TEXT], body=b"alive\n")

    async def _ready(self, request: Request) -> Response:
        router = self._router
        if router.is_ready:
            return Response(status=200, headers=[_TEXT], body=b"ready\n")
        return Response(status=503, headers=[_TEXT], body=router.why_not_ready().encode() + b"\n")

    async def _document(self, request: Request) -> Response:
        return Response(status=200, headers=[JSON], body=orjson.dumps(document()))

    async def _metrics(self, request: Request) -> Response:
        return Response(status=200, headers=[(b"content-type", CONTENT_TYPE)], body=self._router.metrics.page())


class NotFound(RequestRefused):
    """No route."""

    status_openai = status_native = 404
    code = "not_found"


class NoReport(FairlaneError):
    """The control plane, which keeps the books, gives no answer."""

    status_openai = status_native = 503
    code = "usage_unavailable"
    native_type = "overloaded"


class NotReady(FairlaneError):
    """No configuration has been applied."""

    status_openai = status_native = 503
    code = "no_configuration"
    native_type = "overloaded"


_TEXT = (b"content-type", b"text/plain; charset=utf-8")
_UNHEALTHY = b'{"error":"unhealthy","error_type":"healthcheck"}'


def _request_id(given: str | None) -> str:
    if given and len(given) <= MAX_ID_CHARACTERS and given.isascii() and given.isprintable():
        return given
    return "req_" + secrets.token_hex(12)


def _refusal(error: FairlaneError, dialect: Dialect, request: Request) -> Response:
    extra = [(b"x-request-id", request.request_id.encode()), *request.limit_headers()]
    if request.tier is not None:
        extra.append((b"x-fairlane-tier", request.tier.encode("latin-1", "replace")))
    status, headers, body = error_response(error, dialect, extra=extra)
    return Response(status=status, headers=headers, body=body)


def _predicted_cost(measured: Measured, foresight: Foresight, num_sequences: int) -> int:
    """Prompt tokens and those its answers will probably have, which their caps bound, each of ``best_of``."""
    cost = 0
    for prompt, foreseen in zip(measured.prompts, foresight.answers, strict=True):
        lengths = prompt.lengths
        predicted = foreseen.fallback.median if foreseen.quantiles is None else foreseen.quantiles[3]
        cost += lengths.prompt_tokens + min(predicted, lengths.max_new_tokens) * num_sequences
    return cost


def _wrong_method(methods: Iterable[str], dialect: Dialect) -> Response:
    allowed = {*methods, "HEAD"} if "GET" in methods else set(methods)
    return Response(status=405, headers=[(b"allow", ", ".join(sorted(allowed)).encode())], body=b"")


@contextlib.contextmanager
def _watched(exchange: Exchange) -> Iterator[None]:
    """Cancel the task that runs the block as soon as its client leaves."""
    task = asyncio.current_task()
    assert task is not None
    exchange.on_gone = partial(_cancel, task)
    try:
        yield
    finally:
        exchange.on_gone = None


def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()


async def send_response(send: Any, response: Response) -> None:
    """Send a whole answer by plain ASGI."""
    headers = [*response.headers, (b"content-length", b"%d" % len(response.body))]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})
