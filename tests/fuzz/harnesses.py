"""Readers of bytes from outside: whatever comes, a result or the documented refusal, however the bytes are cut.

One function per reader. Each takes bytes, raises ``AssertionError`` (or lets an undocumented exception through) when
the reader does not keep its word, and returns nothing. Three runners share them: ``test_fuzz.py`` over the seeds and
by hypothesis, ``run.py`` with atheris.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from router_ext.backends.tgi import TgiBackend, _Connection, _Exchange
from router_ext.errors import (
    LedgerFull,
    NotAuthenticated,
    RequestRefused,
    SettingsError,
    SnapshotRefused,
    UpstreamFailed,
)
from router_ext.gateway.agents import declared_agent
from router_ext.gateway.app import _request_id
from router_ext.gateway.auth import KeyRing, TenantDisabled, presented_key
from router_ext.gateway.continuation import Continuation, Phase
from router_ext.gateway.dialects import decode_request, decode_tokenize, dialect_of, error_response, read_body
from router_ext.gateway.encoders import AnswerContext, encoder_for
from router_ext.gateway.generation import GenerationRequest, ModelLimits
from router_ext.gateway.passthrough import read_body_answer, relay_for
from router_ext.gateway.refusals import refusal_of
from router_ext.gateway.server import protocol_class
from router_ext.obs.tracing import Trace, read_parent
from router_ext.settings import RouterSettings
from router_ext.sync.inflight import HEADER_BYTES, InflightTable
from router_ext.sync.ledger import Ledger
from router_ext.sync.quota import QuotaBook
from router_ext.sync.snapshot_file import decode_snapshot
from router_ext.sync.spool import Spool
from router_ext.wire.controlplane import (
    ConfigSnapshot,
    KeyRecord,
    SnapshotDeltas,
    TenantRecord,
    Totals,
    parse_key,
    snapshot_digest,
)
from router_ext.wire.decoding import NotDecoded
from router_ext.wire.deltas import decode_deltas, difference, follow
from router_ext.wire.frames import MAX_FRAME_BYTES, Frames, frame
from router_ext.wire.metrics_text import parse_gauges
from router_ext.wire.sse import SseError, SseParser
from router_ext.wire.tgi import (
    BadUpstreamAnswer,
    decode_chat_tokenize,
    decode_error,
    decode_event,
    decode_info,
)
from router_ext.wire.tgi import decode_tokenize as decode_tokens

LIMITS = ModelLimits(model_id="m", max_input_tokens=200, max_total_tokens=300)
IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where files are made: what is tested reads and writes them, and syncs, thousands of times."""
NOW_US = 1_796_000_000_000_000
GENERATION_PATHS = ("/", "/generate", "/generate_stream", "/v1/chat/completions", "/v1/completions", "/v1/responses")
CONTEXT = AnswerContext(model_id="m", system_fingerprint="3-native", created=1)


def pieces(data: bytes) -> Iterator[bytes]:
    """``data`` cut at places that depend on it alone, down to single bytes."""
    at = 0
    while at < len(data):
        step = 1 + (data[at] * 7 + at) % 13
        yield data[at : at + step]
        at += step


# --- streams: cut anyhow, the same comes out ------------------------------------------------------------------------


def sse(data: bytes) -> None:
    def read(chunks: Iterator[bytes] | Sequence[bytes], bound: int) -> tuple[list[bytes], int, bool] | None:
        parser = SseParser(bound)
        events: list[bytes] = []
        try:
            for chunk in chunks:
                events += parser.feed(chunk)
        except SseError:
            return None
        return events, parser.comments, parser.has_partial_event

    whole = read([data], 1 << 20)
    assert whole is not None
    assert whole == read(pieces(data), 1 << 20) == read([bytes([byte]) for byte in data], 1 << 20)
    read(pieces(data), 16)


def frames(data: bytes) -> None:
    def read(chunks: Iterator[bytes] | Sequence[bytes]) -> tuple[list[bytes], bool]:
        reader, found = Frames(), []
        try:
            for chunk in chunks:
                found += reader.feed(chunk)
        except ValueError:
            return found, False
        return found, True

    whole = read([data])
    assert whole == read(pieces(data)) == read([bytes([byte]) for byte in data])
    assert all(len(payload) <= MAX_FRAME_BYTES for payload in whole[0])
    assert data.startswith(b"".join(map(frame, whole[0])))


# --- a backend's answers --------------------------------------------------------------------------------------------


def tgi_records(data: bytes) -> None:
    for decode in (decode_event, decode_tokens, decode_chat_tokenize, decode_info):
        with contextlib.suppress(BadUpstreamAnswer):
            decode(data)
    for status in (422, 424, 429, 500, 404):
        error_response(refusal_of(decode_error(status, data)), dialect_of("/generate"))


def metrics_text(data: bytes) -> None:
    for value in vars_of(parse_gauges(data)):
        assert value is None or isinstance(value, int)


def vars_of(record: Any) -> Iterator[Any]:
    return (getattr(record, name) for name in record.__dataclass_fields__)


@cache
def requests(*, is_stream: bool, is_whole: bool) -> tuple[GenerationRequest, ...]:
    """One of each dialect; ``is_whole``: of those that are passed through."""
    grammar = {"type": "json", "value": {"properties": {}}} if is_whole else None
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "stream": is_stream, "response_format": grammar}
    response = {"model": "mine", "input": "Hi", "stream": is_stream, "include": ["message.output_text.logprobs"]}
    bodies = [
        ("/generate_stream" if is_stream else "/generate", {"inputs": "Hi", "parameters": {"grammar": grammar}}),
        ("/v1/chat/completions", {**chat, "model": "mine"}),
        ("/v1/responses", {**response, "tools": [tool] if is_whole else []}),
    ]
    if not is_whole:
        bodies.append(("/v1/completions", {"prompt": "Hi", "stream": is_stream}))
    return tuple(decode_request(path, "application/json", json.dumps(body).encode(), LIMITS) for path, body in bodies)


def relayed_streams(data: bytes) -> None:
    payloads = SseParser().feed(data + b"\n\n")
    for request in requests(is_stream=True, is_whole=True):
        relay = relay_for(request)
        try:
            for payload in payloads:
                relay.feed(payload)
        except BadUpstreamAnswer:
            pass
        assert 0 <= relay.output_tokens < 1 << 64
        assert 0 <= relay.prompt_tokens < 1 << 64
        if relay.error is not None:
            refusal_of(relay.error)
        relay.failed(UpstreamFailed("no"))


def relayed_bodies(data: bytes) -> None:
    first, _, rest = data.partition(b"\n")
    for headers in ([], [(b"x-prompt-tokens", first), (b"x-generated-tokens", first)]):
        for request in requests(is_stream=False, is_whole=True):
            try:
                answer = read_body_answer(request, 200, headers, rest if headers else data)
            except BadUpstreamAnswer:
                continue
            assert 0 <= answer.output_tokens < 1 << 64
            assert 0 <= answer.prompt_tokens < 1 << 64


def continued_streams(data: bytes) -> None:
    payloads = SseParser().feed(data + b"\n\n")
    for is_stream in (True, False):
        for request in requests(is_stream=is_stream, is_whole=False):
            flow = Continuation.for_request(request, max_new_tokens=8, limits=LIMITS, base_seed=1, prompt="Hi")
            encoder = encoder_for(request, CONTEXT)
            flow.next_slice(8)
            for payload in payloads:
                shown = flow.feed(payload)
                if flow.phase is not Phase.RUNNING:
                    break
                encoder.tokens(shown)
            assert flow.received_tokens <= len(payloads)
            assert (flow.prompt_tokens or 0) >= 0
            if flow.phase is Phase.DONE:
                assert flow.completion is not None
                encoder.finish(shown, flow.completion)
                encoder.end()
            elif flow.phase is Phase.BROKEN:
                assert flow.error is not None
                encoder.failed(refusal_of(flow.error))


class _Wire(asyncio.Transport):
    """The other side of a protocol, in memory: keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        return

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        return

    resume_reading = pause_reading

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        return

    def get_write_buffer_size(self) -> int:
        return 0


class _Sink:
    """What an exchange told: statuses, headers, the body's bytes, its end once."""

    def __init__(self) -> None:
        self.heads: list[tuple[int, Any]] = []
        self.body = b""
        self.ends: list[str | None] = []

    def on_head(self, status: int, headers: Any) -> None:
        self.heads.append((status, headers))

    def on_data(self, data: bytes) -> None:
        assert not self.ends
        self.body += data

    def on_end(self, error: UpstreamFailed | None) -> None:
        self.ends.append(None if error is None else type(error).__name__)


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


def http_answers(data: bytes) -> None:
    async def read(chunks: Sequence[bytes]) -> tuple[Any, ...]:
        client = TgiBackend("http://127.0.0.1:1")
        sink = _Sink()
        exchange = _Exchange(client, b"GET / HTTP/1.1\r\n\r\n", sink)
        connection = _Connection(client, exchange)
        connection.connection_made(_Wire())
        for chunk in chunks:
            connection.data_received(chunk)
        connection.connection_lost(None)
        await client.close()
        assert len(sink.heads) <= 1
        assert len(sink.ends) == 1, "an exchange ends once"
        return sink.heads, sink.body, sink.ends

    whole = _runner().run(read([data]))
    cut = _runner().run(read(list(pieces(data))))
    assert whole[0] == cut[0]
    if whole[2] == [None]:
        # Bytes behind a complete answer are nonsense in the same read, and nobody's in a later one.
        assert cut == whole
    assert cut[1].startswith(whole[1]) or whole[1].startswith(cut[1])


# --- a client's requests --------------------------------------------------------------------------------------------


def bodies(data: bytes) -> None:
    for path in (*GENERATION_PATHS, "/invocations"):
        try:
            request = decode_request(path, "application/json", data, LIMITS)
            if request.passthrough is not None:
                json.loads(request.passthrough.body)
            json.dumps(request.parameters)
        except RequestRefused as error:
            status, _, body = error_response(error, dialect_of(path))
            assert 400 <= status < 500
            json.loads(body)
    with contextlib.suppress(RequestRefused):
        decode_tokenize(read_body("/tokenize", "application/json", data))
    with contextlib.suppress(RequestRefused):
        read_body("/generate", data.decode("latin-1"), b"{}")


@cache
def _ring() -> tuple[KeyRing, str, str]:
    """Keys, one of them as text, and another text with the same public id and a checksum that fits."""
    from support.routers import Setup

    setup = Setup(backends=[])
    text = setup.key("alpha")
    forged = text[:17] + "A" * 40
    return KeyRing(setup.snapshot(), {1: setup.pepper}), text, forged + f"{zlib.crc32(forged.encode()):08x}"


def headers(data: bytes) -> None:
    ring, key, forged = _ring()
    pairs = [(name.lower(), value) for name, _, value in (line.partition(b": ") for line in data.split(b"\r\n"))]
    pairs = [(n, v.replace(b"KEY", key.encode()).replace(b"FORGED", forged.encode())) for n, v in pairs]
    found = presented_key(pairs)
    assert found is None or found.isascii()
    try:
        identity = ring.authenticate(pairs, now_us=1)
    except (NotAuthenticated, TenantDisabled):
        pass
    else:
        assert found == key, "nothing but the whole key lets in"
        with contextlib.suppress(RequestRefused):
            identity.tier(data.decode("latin-1"))
    parent = read_parent(pairs)
    if parent is not None:
        lines = Trace(parent.trace_id, parent.span_id, parent.flags, parent.state).upstream_headers
        assert re.fullmatch(
            rb"traceparent: 00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\r\n(tracestate: [ -~]+\r\n)?", lines
        )
    for _, value in pairs:
        text = value.decode("latin-1")
        parse_key(text)
        assert re.fullmatch(r"[ -~]{1,128}", _request_id(text))
        with contextlib.suppress(RequestRefused):
            agent = declared_agent("ten_a", text, text)  # type: ignore[arg-type]  # a plain text here
            assert agent.cost is None or agent.cost > 0


def http_requests(data: bytes) -> None:
    settings = _settings()
    served: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        served.append(scope["path"])
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def talk(chunks: Sequence[bytes]) -> bytes:
        import uvicorn
        from uvicorn.server import ServerState

        config = uvicorn.Config(app, http="httptools", lifespan="off", log_config=None, server_header=False)
        config.load()
        protocol: Any = protocol_class(settings)(config, ServerState(), {})  # type: ignore[call-arg]  # uvicorn's
        wire = _Wire()
        protocol.connection_made(wire)
        for chunk in chunks:
            if wire.is_closed:
                break
            protocol.data_received(chunk)
        for _ in range(12):
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        for _ in range(4):
            await asyncio.sleep(0)
        return wire.written

    for chunks in ([data], list(pieces(data))):
        answer = _runner().run(talk(chunks))
        assert not answer or re.match(rb"HTTP/1\.1 [1-5][0-9][0-9] ", answer)


@cache
def _settings() -> RouterSettings:
    return RouterSettings(key_pepper="ab" * 32, controlplane_url="", port=0, dir=Path("unused"))


# --- files and the control plane ------------------------------------------------------------------------------------


def snapshots(data: bytes) -> None:
    with contextlib.suppress(SnapshotRefused):
        snapshot = decode_snapshot(data)
        KeyRing(snapshot, {1: b"0" * 32})


def deltas(data: bytes) -> None:
    before = decode_snapshot(_snapshot())
    with contextlib.suppress(SnapshotRefused):
        steps = [delta for delta, _ in decode_deltas(data)]
        after = follow(before, steps)
        assert after.digest == (steps[-1].digest if steps else before.digest)


def quotas(data: bytes) -> None:
    """Lines: spooled events, then what the control plane says of totals."""
    *payloads, last = data.split(b"\n")
    book = QuotaBook()
    book.load(payloads)
    book.acked(payloads, 5)
    with contextlib.suppress(ValueError, *NotDecoded):
        book.apply(msgspec.json.decode(last, type=Totals))
    used = book.used("ten_a", book.today(NOW_US))
    assert all(isinstance(tokens, int) for tokens in used)


def spools(data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        spool_folder = Path(folder) / "spool"
        spool_folder.mkdir()
        (spool_folder / "0000000000000001.seg").write_bytes(data)
        spool = Spool(spool_folder)
        n_events = spool.pending_events
        spool.append(b"next")
        found = []
        while (batch := spool.read_batch(max_events=3)) is not None:
            found += batch.payloads
            spool.ack(batch)
        assert len(found) == n_events + 1
        assert found[-1] == b"next"
        assert spool.pending_events == 0
        spool.close()


def ledgers(data: bytes) -> None:
    """The first half is a segment, the second the table of running requests behind a good header."""
    half = len(data) // 2
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        home = Path(folder)
        table = InflightTable(home / "inflight.bin")
        table.touch(5)
        table.close()
        with (home / "inflight.bin").open("r+b") as file:
            if data[:1] == b"H":  # over the header too
                file.write(data[half:])
            else:
                file.seek(HEADER_BYTES)
                file.write(data[half : half + 65_536])
        (home / "spool").mkdir()
        (home / "spool" / "0000000000000001.seg").write_bytes(data[:half])
        try:
            ledger = Ledger.open(home, now_us=10)
        except (SettingsError, LedgerFull):
            return
        n_events = ledger.pending_events
        seen = 0
        while (batch := ledger.read_batch()) is not None:
            assert ledger.lag_s(10) >= 0.0
            for payload in batch.payloads:
                ledger.quarantine(payload)
            seen += len(batch.payloads)
            ledger.ack(batch)
        assert seen == n_events
        assert ledger.running == ledger.overflow_events == 0
        ledger.close()


# --- all of them, with what they begin from -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Harness:
    """``seeds``: inputs that are understood, or nearly; those that once broke the reader stay here."""

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]


_TOKEN = b'{"index":1,"token":{"id":5,"text":" a","logprob":-0.5,"special":false},"generated_text":null,"details":null}'
_LAST = (
    b'{"index":2,"token":{"id":0,"text":"","logprob":null,"special":true},"generated_text":" a",'
    b'"details":{"finish_reason":"eos_token","generated_tokens":2,"input_length":3,"seed":7}}'
)
_CHUNK = (
    b'{"object":"chat.completion.chunk","id":"","created":1,"model":"m","system_fingerprint":"3","choices":[{"index":0,'
    b'"delta":{"role":"assistant","content":"a"},"logprobs":{"content":[{"token":"a","logprob":-1.0,"top_logprobs":'
    b'[{"token":"a","logprob":-1.0}]}]},"finish_reason":null}]}'
)
_CALL = (
    b'{"created":1,"model":"m","choices":[{"delta":{"role":"assistant","tool_calls":[{"index":0,"id":"0","type":'
    b'"function","function":{"name":"f","arguments":"{}"}}]},"finish_reason":"stop"}]}'
)
_USAGE = b'{"model":"m","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}'
_DEEP = b'{"x":' + b"[" * 5_000 + b"]" * 5_000 + b"}"


def _sse(*payloads: bytes) -> bytes:
    return b"".join(b"data: " + payload + b"\n\n" for payload in payloads)


def _snapshot() -> bytes:
    blank = ConfigSnapshot(
        revision=1,
        published_at_us=1,
        pools=[],
        tiers=[],
        tenants=[TenantRecord(tenant="ten_a", name="a")],
        keys=[
            KeyRecord(
                key="key_a", public_id="0" * 12, digest="0" * 64, pepper_version=1, tenant="ten_a", default_pool="m"
            )
        ],
    )
    return msgspec.json.encode(msgspec.structs.replace(blank, digest=snapshot_digest(blank)))


def _delta() -> bytes:
    before = decode_snapshot(_snapshot())
    blank = msgspec.structs.replace(
        before, revision=2, digest="", tenants=[*before.tenants, TenantRecord(tenant="ten_b", name="b")]
    )
    after = msgspec.structs.replace(blank, digest=snapshot_digest(blank))
    return msgspec.json.encode(SnapshotDeltas(deltas=[difference(_snapshot(), msgspec.json.encode(after))]))


def _segment() -> bytes:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        spool = Spool(Path(folder))
        for payload in (b'{"event":"evt_1"}', b"no JSON", b"\xff", _DEEP[:400]):
            spool.append(payload)
        data = next(Path(folder).glob("*.seg")).read_bytes()
        spool.close()
        return data


HARNESSES: dict[str, Harness] = {
    "sse": Harness(
        sse,
        (
            *(_sse(b"a", b"b"), b"data: a\r\n\r\ndata:b\rdata: c\r\r:\n\n", b"data\n\nevent: x\n"),
            *(b"data: a\r\ndata: b\r\n\r\n", b"\r"),
        ),
    ),
    "frames": Harness(frames, (frame(b"a") + frame(b"") + frame(b"bcd"), b"\xff\xff\xff\xff", b"\0\0\0")),
    "tgi_records": Harness(
        tgi_records,
        (
            *(_TOKEN, _LAST, _DEEP, b'{"error":"Request failed during generation: x","error_type":"generation"}'),
            b'[{"id":1,"text":"a","start":0,"stop":1}]',
            b'{"tokenize_response":[{"id":1,"text":"a","start":0,"stop":1}],"templated_text":"a"}',
            b'{"model_id":"m","max_input_tokens":9,"max_total_tokens":10,"version":"3"}',
            b'{"error":{"message":"Input validation error: x","http_status_code":422}}',
            b'{"token":{"id":1,"text":"\xff"}}',
        ),
    ),
    "metrics_text": Harness(
        metrics_text,
        (
            b'# TYPE tgi_queue_size gauge\ntgi_queue_size 3\ntgi_request_count{a="}"} 2 1700\ntgi_request_count 1e3\n',
            b"tgi_queue_size 1e308\ntgi_queue_size 1e308\n",
            b"tgi_queue_size NaN\ntgi_batch_current_size -inf",
        ),
    ),
    "relayed_streams": Harness(
        relayed_streams,
        (
            *(_sse(_TOKEN, _LAST), _sse(_CHUNK, _USAGE, b"[DONE]"), _sse(_CALL, _USAGE, b"[DONE]"), _sse(_DEEP)),
            _sse(b'{"choices":"x"}', b'{"usage":[]}', b'{"usage":{"completion_tokens":"a"}}'),
            _sse(b'{"usage":{"completion_tokens":36893488147419103232}}'),
            _sse(_CALL, b"[DONE]", _CALL),
            _sse(b'{"choices":[{"delta":{"tool_calls":{"index":null,"function":{"arguments":{"a":1}}}}}]}'),
            _sse(_LAST.replace(b'"details":', b'"details": ')),
            _sse(_LAST.replace(b'"details":', b'"x":"\xff","details": ')),
        ),
    ),
    "relayed_bodies": Harness(
        relayed_bodies,
        (
            b'5\n[{"generated_text":"a","details":{"finish_reason":"length","generated_tokens":2,"best_of_sequences":[{}]}}]',
            b'{"model":"m","created":1,"choices":[{"message":{"role":"assistant","content":"a"},"finish_reason":"stop"}],'
            b'"usage":{"prompt_tokens":3,"completion_tokens":2}}',
            b'{"choices":[{"message":{"tool_calls":[{"function":{"name":"f","arguments":{"a":1}}}]}}]}',
            b'{"choices":[{"message":{"tool_calls":[{"function":{"arguments":{"a":36893488147419103232}}}]}}]}',
            *(b"[]", _DEEP, b"9" * 5_000 + b"\n{}", b'{"choices":{"0":1},"usage":7}'),
        ),
    ),
    "continued_streams": Harness(
        continued_streams,
        (
            *(_sse(_TOKEN, _LAST), _sse(_TOKEN) * 9, _sse(_TOKEN, b'{"error":"x","error_type":"validation"}')),
            *(_sse(_DEEP), _sse(_LAST.replace(b'"seed":7', b'"seed":36893488147419103232'))),
            _sse(_LAST.replace(b'"generated_tokens":2', b'"generated_tokens":-2')),
        ),
    ),
    "http_answers": Harness(
        http_answers,
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 422 No\r\ncontent-length: 0\r\n\r\n",
            b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nab",
            b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
        ),
    ),
    "bodies": Harness(
        bodies,
        (
            b'{"inputs":"Hi","stream":true,"parameters":{"temperature":0.5,"stop":"a","seed":1,"grammar":null,"best_of":1}}',
            b'{"prompt":["a","b"],"max_tokens":3,"top_p":1.0,"suffix":null}',
            b'{"messages":[{"role":"user","content":[{"type":"text","text":"a"}]}],"tools":[{"type":"function","function":'
            b'{"name":"f","parameters":{"$defs":{"a":{"type":"string"}},"$ref":"#/$defs/a"}}}],"tool_choice":"auto"}',
            b'{"messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_object","value":{"properties":{}}},'
            b'"stream_options":{"include_usage":true},"presence_penalty":1e308}',
            b'{"input":[{"role":"user","content":[{"type":"input_text","text":"a"}]},{"type":"function_call","call_id":"1",'
            b'"name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"1","output":"x"}],'
            b'"text":{"format":{"type":"json_schema","name":"n","schema":{"properties":{}}}},"include":[]}',
            b'{"inputs":"a","parameters":{"grammar":{"type":"json","value":"{\\"properties\\":{}}"},"top_k":99999999999999999999}}',
            _DEEP,
        ),
    ),
    "headers": Harness(
        headers,
        (
            b"authorization: Bearer KEY\r\nx-request-id: a b",
            b"x-api-key: KEY\r\nx-fairlane-agent-cost: 1e5",
            b"authorization: Bearer KEY\r\nauthorization: Bearer KEY",
            b"authorization: Bearer FORGED",
            b"traceparent: 00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01\r\ntracestate: x=1",
            b"authorization: basic \xff\r\nx: nan\r\ny: 1_0",
        ),
    ),
    "http_requests": Harness(
        http_requests,
        (
            b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n",
            b"POST /x?y=%ff HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nokGET / HTTP/1.1\r\nhost: a\r\n\r\n",
            b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
            b"GET /\xc3\xa9 HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
            b"GET http://b/x HTTP/1.1\r\nhost: a\r\n\r\n",
            b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
        ),
    ),
    "snapshots": Harness(snapshots, (_snapshot(), _DEEP, b'{"revision":1}')),
    "deltas": Harness(deltas, (_delta(), _DEEP, b'{"deltas":[]}', b'{"deltas":[' + _DEEP + b"]}")),
    "quotas": Harness(
        quotas,
        (
            b'{"tenant":"ten_a","key":"k","arrived_at_us":1,"prompt_tokens":3}\n'
            b'{"as_of_us":9,"day":"2026-11-30","totals":[{"scope":"ten_a","day_tokens":1,"month_tokens":2}]}',
            b'{"tenant":"ten_a","key":"k","arrived_at_us":36893488147419103232,"output_tokens":-1}\n{"day":"x"}',
            *(_DEEP + b"\n" + _DEEP, b""),
        ),
    ),
    "spools": Harness(spools, (_segment(), b"FLSPOOL1", b"")),
    "ledgers": Harness(ledgers, (_segment() * 2, b"H" + b"\0" * 99, b"")),
}
