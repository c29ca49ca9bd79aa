"""Trace context on its way through the router, and spans as a real collector receives them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from structlog.testing import capture_logs
from support.preempting import ForcedCuts, ModelWorld
from support.scripted import BODY, Peer, World, running, stream, until

from router_ext.backends.fake import Ending
from router_ext.core.request import Request
from router_ext.errors import SettingsError
from router_ext.gateway.lifespan import make_tracing
from router_ext.obs import otel
from router_ext.obs.tracing import PassedOn, Trace, read_parent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
SENT = {"traceparent": PARENT, "tracestate": "vendor=a,other=b"}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path) as opened:
        yield opened


def upstream(world: World) -> list[dict[str, str]]:
    """Further headers of each stream that was opened at the backend."""
    lines = [sent.decode().splitlines() for sent in world.client.headers]
    return [dict(line.split(": ", 1) for line in each) for each in lines]


# --- context ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "",
        "garbage",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-zz",
        f"0٠-{TRACE}-{SPAN}-01".encode().decode("latin-1"),
        f"00-{TRACE}-{SPAN}-01\x00",
    ],
)
async def test_a_malformed_context_is_no_context(world: World, value: str) -> None:
    assert read_parent([(b"traceparent", value.encode("latin-1"))]) is None
    peer = Peer(world, "/generate_stream", BODY, headers={"traceparent": value, "tracestate": "vendor=a"})
    assert (await peer.wait()).count(b"data: ") == 5
    assert upstream(world) == [{}]


def test_what_is_taken_of_a_context() -> None:
    one = (b"traceparent", PARENT.encode())
    parent = read_parent([one, (b"tracestate", b"a=1"), (b"tracestate", b"b=2")])
    assert parent is not None
    assert (parent.trace_id, parent.span_id, parent.flags, parent.state) == (TRACE, SPAN, 1, "a=1,b=2")
    assert read_parent([one, one]) is None
    later = read_parent([(b"traceparent", f"01-{TRACE}-{SPAN}-03-more".encode())])
    assert later is not None
    for state in (b"x" * 513, b"a=\xff", b"a=\x01"):
        kept = read_parent([one, (b"tracestate", state)])
        assert kept is not None
        assert kept.state == ""


async def test_the_backend_gets_the_trace_under_a_new_span(world: World) -> None:
    first = Peer(world, "/generate_stream", BODY, headers=SENT)
    await first.wait()
    await Peer(world, "/generate_stream", BODY, headers=SENT).wait()
    await Peer(world, "/generate_stream", BODY).wait()
    one, two, none = upstream(world)
    assert none == {}
    assert one["tracestate"] == two["tracestate"] == SENT["tracestate"]
    parents = [each["traceparent"].split("-") for each in (one, two)]
    assert [[version, trace, flags] for version, trace, _, flags in parents] == [["00", TRACE, "01"]] * 2
    assert len({SPAN, parents[0][2], parents[1][2]}) == 3


async def test_a_broken_stream_is_logged_with_request_and_trace(world: World) -> None:
    world.generation = stream(2, ending=Ending.CUT)
    with capture_logs() as lines:
        await Peer(world, "/generate_stream", BODY, headers={**SENT, "x-request-id": "mine"}).wait()
    broken = [line for line in lines if line["event"] == "upstream.failed"]
    assert broken
    assert {(line["request"], line["trace"]) for line in broken} == {("mine", TRACE)}


async def test_nothing_happens_per_token(world: World) -> None:
    """As many events for two tokens as for two hundred."""
    events: list[str] = []

    class Told(Trace):
        def event(self, name: str, attributes: Mapping[str, Any] | None = None) -> None:
            events.append(name)

    class Telling(PassedOn):
        def begin(self, headers: Any, *, path: str, arrived_us: int) -> Trace:
            return Told(TRACE, SPAN, 1, "")

    world.router.tracing = Telling()
    for count in (2, 200):
        events.clear()
        world.generation = stream(count)
        await Peer(world, "/generate_stream", {"inputs": "a b c", "parameters": {"max_new_tokens": count}}).wait()
        assert events == ["enqueued", "dispatched", "first_token"]


# --- spans -----------------------------------------------------------------------------------------------------------


class Collector:
    """An OTLP/HTTP collector on a socket of its own."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.endpoint = ""

    async def take(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/x-protobuf"
        message = ExportTraceServiceRequest.FromString(await request.read())
        for each in message.resource_spans:
            self.resources.append(values(each.resource.attributes))
            for scope in each.scope_spans:
                self.spans += scope.spans
        return web.Response(content_type="application/x-protobuf")


def values(attributes: Any) -> dict[str, Any]:
    found = {}
    for pair in attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return found


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", made.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    try:
        yield made
    finally:
        await runner.cleanup()


async def test_a_request_is_a_span_of_its_client_s_trace(tmp_path: Path, collector: Collector) -> None:
    async with running(tmp_path, id="rtr_traced", otlp_endpoint=collector.endpoint) as world:
        head = {**SENT, "x-request-id": "mine"}
        await Peer(world, "/generate_stream", {**BODY, "inputs": "canary prompt"}, headers=head).wait()
        await Peer(world, "/generate", BODY, headers={"traceparent": "garbage"}).wait()
        await Peer(world, "/generate", BODY, key="sk-fl-wrong").wait()
        await Peer(world, "/generate", {"inputs": ""}).wait()
        world.generation = stream(2, ending=Ending.HANG)
        gone = Peer(world, "/generate_stream", BODY)
        await until(lambda: gone.data.count(b"data: ") == 2)
        gone.exchange.connection_lost()
        await gone.wait()
        sent = upstream(world)
    spans = collector.spans
    assert [span.name for span in spans] == ["text_completion main"] * 2 + ["POST /generate", "text_completion main"]
    assert {span.kind for span in spans} == {Span.SPAN_KIND_SERVER}
    assert collector.resources[0]["service.name"] == "fairlane-router"
    assert collector.resources[0]["service.instance.id"] == "rtr_traced"
    mine, own, refused, left = spans
    assert (mine.trace_id.hex(), mine.parent_span_id.hex()) == (TRACE, SPAN)
    assert sent[0] == {"traceparent": f"00-{TRACE}-{mine.span_id.hex()}-01", "tracestate": SENT["tracestate"]}
    assert own.parent_span_id == b""
    assert sent[1]["traceparent"].startswith(f"00-{own.trace_id.hex()}-{own.span_id.hex()}-0")
    assert [event.name for event in mine.events] == ["enqueued", "dispatched", "first_token"]
    told = values(mine.attributes)
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.request.model"] == "main"
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (3, 5)
    assert (told["fairlane.request"], told["fairlane.tenant"], told["fairlane.tier"]) == (
        "mine",
        "ten_alice",
        "standard",
    )
    assert 0 < mine.start_time_unix_nano < mine.end_time_unix_nano
    assert mine.status.code == Status.STATUS_CODE_UNSET
    codes = [(values(span.attributes)["error.type"], span.status.code) for span in (refused, left)]
    assert codes == [("invalid_parameter", Status.STATUS_CODE_ERROR), ("cancelled", Status.STATUS_CODE_ERROR)]
    assert values(left.attributes)["http.response.status_code"] == 499
    everything = b"".join(span.SerializeToString() for span in spans)
    assert b"canary" not in everything
    assert world.key.encode() not in everything


async def test_preempted_and_resumed(tmp_path: Path, tokenizer_path: Path, collector: Collector) -> None:
    async with running(
        tmp_path, ModelWorld(tokenizer_path), otlp_traces_endpoint=f"{collector.endpoint}v1/traces"
    ) as world:
        done: set[str] = set()

        def once(request: Request) -> bool:
            is_due = request.output_tokens >= 5 and request.request_id not in done
            done.update([request.request_id] * is_due)
            return is_due

        ForcedCuts(world.router.engines["pol_main"], once)
        await Peer(world, "/generate", {"inputs": "a b c", "parameters": {"max_new_tokens": 20}}).wait()
    (span,) = collector.spans
    assert [e.name for e in span.events] == ["enqueued", "dispatched", "first_token", "preempted", "resumed"]
    assert values(span.attributes)["fairlane.preemptions"] == 1


async def test_an_unsampled_trace_is_handed_on_and_not_recorded(tmp_path: Path, collector: Collector) -> None:
    async with running(tmp_path, otlp_endpoint=collector.endpoint) as world:
        await Peer(world, "/generate", BODY, headers={"traceparent": PARENT[:-2] + "00"}).wait()
        (sent,) = upstream(world)
    assert sent["traceparent"].startswith(f"00-{TRACE}-")
    assert sent["traceparent"].endswith("-00")
    assert collector.spans == []


async def test_a_collector_that_is_away_costs_spans_only(
    tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(otel, "FLUSH_S", 0.05)
    async with running(tmp_path, otlp_endpoint=f"http://127.0.0.1:{unused_tcp_port}") as world:
        peer = Peer(world, "/generate_stream", BODY)
        assert (await peer.wait()).count(b"data: ") == 5


async def test_off_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as world:
        settings = world.router.settings
        assert isinstance(world.router.tracing, PassedOn)
    named = settings.model_copy(update={"otlp_endpoint": "http://127.0.0.1:1"})
    assert isinstance(make_tracing(named.model_copy(update={"tracing": False})), PassedOn)
    monkeypatch.setitem(sys.modules, "router_ext.obs.otel", None)
    with pytest.raises(SettingsError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT is set, which needs fairlane\[tracing\]"):
        make_tracing(named)


def test_the_router_does_not_load_the_sdk_unasked() -> None:
    program = "import sys, router_ext.gateway.command; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
