"""Heads, bodies and targets that two servers in a row could read in two ways: refused, on real sockets.

Whatever the server answers, it serves one request at most of what an attacker sends as one, and says nothing twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.scripted import World, running

from tests.unit.gateway.test_server import read_all, serving

HOST = b"host: a\r\n"
CLOSE = b"connection: close\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"


async def tell(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the method, the path and the body it was given."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        if not message["more_body"]:
            break
    out = json.dumps([scope["method"], scope["path"], body.decode()]).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(out))]})
    await send({"type": "http.response.body", "body": out})


async def talk(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await read_all(reader)
    finally:
        writer.close()


def post(*lines: bytes, body: bytes = b"") -> bytes:
    return b"POST /x HTTP/1.1\r\n" + HOST + b"".join(lines) + b"\r\n" + body


def length(value: bytes) -> bytes:
    return b"content-length: " + value + b"\r\n"


NEXT = b"GET /smuggled HTTP/1.1\r\nhost: a\r\n\r\n"

AMBIGUOUS = {
    "length and chunks": post(length(b"3"), CHUNKED, body=b"0\r\n\r\n" + NEXT),
    "chunks and length": post(CHUNKED, length(b"3"), body=b"0\r\n\r\n" + NEXT),
    "two lengths": post(length(b"3"), length(b"4"), body=b"abcd"),
    "the same length twice": post(length(b"3"), length(b"3"), body=b"abc"),
    "a list of lengths": post(length(b"3, 3"), body=b"abc"),
    "a signed length": post(length(b"+3"), body=b"abc"),
    "a negative length": post(length(b"-1"), body=b"abc"),
    "a hexadecimal length": post(length(b"0x3"), body=b"abc"),
    "a length with a space": post(length(b"3 0"), body=b"abc"),
    "an empty length": post(length(b""), body=b"abc"),
    "an endless length": post(length(b"9" * 30), body=b"abc"),
    "a space before the colon": post(b"content-length : 3\r\n", body=b"abc"),
    "an unknown encoding": post(b"transfer-encoding: xchunked\r\n", body=b"0\r\n\r\n" + NEXT),
    "an encoding before chunks": post(b"transfer-encoding: gzip, chunked\r\n", body=b"0\r\n\r\n" + NEXT),
    "an encoding behind chunks": post(b"transfer-encoding: chunked, identity\r\n", body=b"0\r\n\r\n" + NEXT),
    "chunks twice": post(CHUNKED, CHUNKED, body=b"0\r\n\r\n" + NEXT),
    "an encoding behind a control character": post(b"transfer-encoding: \x0bchunked\r\n", body=b"0\r\n\r\n" + NEXT),
    "chunks in HTTP/1.0": b"POST /x HTTP/1.0\r\n" + HOST + CHUNKED + b"\r\n0\r\n\r\n" + NEXT,
    "a negative chunk": post(CHUNKED, body=b"-3\r\nabc\r\n0\r\n\r\n" + NEXT),
    "a chunk of 0x": post(CHUNKED, body=b"0x3\r\nabc\r\n0\r\n\r\n" + NEXT),
    "an endless chunk": post(CHUNKED, body=b"f" * 17 + b"\r\nabc\r\n0\r\n\r\n"),
    "a chunk without its end": post(CHUNKED, body=b"3\r\nabcX0\r\n\r\n" + NEXT),
    "a chunk behind a bare line feed": post(CHUNKED, body=b"3\nabc\r\n0\r\n\r\n" + NEXT),
    "a folded header": post(b"x: y\r\n z\r\n", length(b"0")),
    "a folded encoding": post(b"transfer-encoding:\r\n chunked\r\n", body=b"0\r\n\r\n" + NEXT),
    "bare line feeds": b"GET /x HTTP/1.1\nhost: a\n\n",
    "one bare line feed": b"GET /x HTTP/1.1\r\nhost: a\nx: y\r\n\r\n",
    "a bare carriage return": b"GET /x HTTP/1.1\r\nhost: a\rx: y\r\n\r\n",
    "a zero byte": b"GET /x HTTP/1.1\r\nhost: a\r\nx: a\x00b\r\n\r\n",
    "a header that begins with a space": b"GET /x HTTP/1.1\r\n host: a\r\n\r\n",
    "no host": b"GET /x HTTP/1.1\r\n\r\n",
    "an empty host": b"GET /x HTTP/1.1\r\nhost: \r\n\r\n",
    "two hosts": b"GET /x HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "a host with a path": b"GET /x HTTP/1.1\r\nhost: a/b@c\r\n\r\n",
    "another server's target": b"GET http://backend:3000/info HTTP/1.1\r\n" + HOST + b"\r\n",
    "a tunnel": b"CONNECT backend:3000 HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target without a slash": b"GET info HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target with a tab": b"GET /in\tfo HTTP/1.1\r\n" + HOST + b"\r\n",
    "HTTP/0.9": b"GET /x\r\n\r\n",
    "HTTP/2 by prior knowledge": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a version that is none": b"GET /x HTTP/9.9\r\n" + HOST + b"\r\n",
    "a method in lower case": b"get /x HTTP/1.1\r\n" + HOST + b"\r\n",
    "TLS on a plain port": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_what_can_be_read_in_two_ways_is_refused_once(name: str) -> None:
    async with serving(tell) as (port, _):
        answer = await talk(port, AMBIGUOUS[name])
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer
    assert b"smuggled" not in answer


@pytest.mark.parametrize("trailer", [b"x: " + b"y" * 200_000 + b"\r\n", b"x: y\r\n" * 200])
async def test_trailers_are_bounded_like_headers(trailer: bytes) -> None:
    async with serving(tell) as (port, _):
        answer = await talk(port, post(CLOSE, CHUNKED, body=b"3\r\nabc\r\n0\r\n" + trailer + b"\r\n"))
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_a_trailer_is_no_header() -> None:
    """What comes behind the body was not there when the request was judged."""
    async with serving(tell) as (port, _):
        body = b"3;ext=1\r\nabc\r\n0\r\nauthorization: Bearer x\r\n\r\n"
        answer = await talk(port, post(CLOSE, CHUNKED, body=body))
    assert answer.endswith(b'["POST", "/x", "abc"]')


async def test_a_body_of_nothing_but_framing_is_cut() -> None:
    async with serving(tell, header_limit_bytes=1_024) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(CHUNKED, body=b"3;"))
        for _ in range(40):
            writer.write(b"a" * 1_000)
            await writer.drain()
            await asyncio.sleep(0)
        assert (await read_all(reader)).startswith(b"HTTP/1.1 400 ")
        writer.close()


async def test_chunks_of_one_byte_are_a_body() -> None:
    body = b"".join(b"1\r\n%c\r\n" % (97 + n % 26) for n in range(5_000)) + b"0\r\n\r\n"
    async with serving(tell, header_limit_bytes=1_024) as (port, _):
        answer = await talk(port, post(CLOSE, CHUNKED, body=body))
    assert answer.startswith(b"HTTP/1.1 200 ")


# --- the whole router behind the server ---------------------------------------------------------------------------


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[tuple[World, int]]:
    async with running(tmp_path) as made, serving(made.app) as (port, _):
        yield made, port


async def ask(
    world: World, port: int, target: bytes, *headers: bytes, method: bytes = b"GET", body: bytes = b""
) -> bytes:
    lines = b"authorization: Bearer %b\r\n" % world.key.encode() + b"".join(line + b"\r\n" for line in headers)
    if body:
        lines += b"content-type: application/json\r\n" + length(b"%d" % len(body))
    return await talk(port, method + b" " + target + b" HTTP/1.1\r\n" + HOST + CLOSE + lines + b"\r\n" + body)


GENERATE = json.dumps({"inputs": "a b c", "parameters": {"max_new_tokens": 5}}).encode()

TRICKS = [
    b"/generate/../metrics",
    b"/generate/..;/metrics",
    b"/generate/%2e%2e/metrics",
    b"/generate%2f..%2fmetrics",
    b"//metrics",
    b"//generate",
    b"/generate;a=b",
    b"/generate/",
    b"/generate/.",
    b"/./generate",
    b"/generate\\..\\metrics",
    b"/generate%00",
    b"/generate%0d%0ax-fairlane-tier:%20interactive",
    b"/GENERATE",
    b"/v1/../generate",
    b"/health%3f",
    b"/admin",
    b"/debug/pools",
    b"/requests",
]


async def test_a_path_is_one_of_the_list_or_nothing(world: tuple[World, int]) -> None:
    made, port = world
    asked = len(made.client.requests)
    for target, (method, body) in product(TRICKS, ((b"GET", b""), (b"POST", GENERATE))):
        answer = await ask(made, port, target, method=method, body=body)
        assert answer.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 ")), answer
        assert b"\r\nx-fairlane-tier: interactive" not in answer
    paths = {path for path, _ in made.client.requests[asked:]}
    assert paths <= {"/health", "/metrics", "/info"}, "the watch asks these, with or without requests"


async def test_a_backends_path_is_never_the_clients(world: tuple[World, int]) -> None:
    made, port = world
    asked = len(made.client.requests)
    for target in (b"/generate?x=/../info", b"/generate#/../info", b"/generate?stream=true"):
        answer = await ask(made, port, target, method=b"POST", body=GENERATE)
        assert answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 404 ", b"HTTP/1.1 400 "))
    assert {path for path, _ in made.client.requests[asked:]} <= {
        "/generate_stream", "/tokenize", "/health", "/metrics", "/info",
    }  # fmt: skip


async def test_other_methods_do_nothing(world: tuple[World, int]) -> None:
    made, port = world
    for method, target in product((b"OPTIONS", b"TRACE", b"PUT", b"DELETE", b"PATCH"), (b"*", b"/generate")):
        answer = await ask(made, port, target, method=method)
        assert answer.split(b" ", 2)[1] in (b"400", b"404", b"405")
        assert made.key.encode() not in answer, "TRACE repeats nothing"


SPOOFED = [
    b"x-fairlane-tenant: ten_bob",
    b"x-fairlane-tier: interactive",
    b"x-tenant-id: ten_bob",
    b"x-llm-d-inference-fairness-id: ten_bob",
    b"x-gateway-inference-fairness-id: ten_bob",
    b"x-llm-d-inference-objective: interactive",
    b"x-llm-d-slo-ttft-ms: 1",
    b"x-dynamo-request-priority: 100",
    b"x-user-id: bob",
    b"x-session-id: bob",
    b"x-ai-eg-model: other",
    b"x-forwarded-for: 127.0.0.1",
    b"x-real-ip: 127.0.0.1",
    b"forwarded: for=127.0.0.1",
    b"x-original-url: /metrics",
    b"x-rewrite-url: /metrics",
    b"x-http-method-override: GET",
    b"baggage: tenant=ten_bob,tier=interactive",
    b"x-compute-type: gpu",
]


async def test_identity_comes_from_the_key_alone(world: tuple[World, int]) -> None:
    """All of them at once: the request is the tenant's own in its own tier, and its backend is told none of it."""
    made, port = world
    answer = await ask(made, port, b"/generate", *SPOOFED, method=b"POST", body=GENERATE)
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    assert b"x-fairlane-tier: standard" in answer
    (tenant,) = [t for t in made.router.engines["pol_main"].stats().tenants if t.output_tokens_total]
    assert tenant.tenant == "ten_alice"
    (sent,) = [body for path, body in made.client.requests if path == "/generate_stream"]
    assert not any(word in sent for word in (b"bob", b"interactive", b"fairlane", b"127.0.0.1"))


async def test_a_second_key_in_the_other_header_has_no_effect(world: tuple[World, int]) -> None:
    made, port = world
    other = b"x-api-key: " + made.setup.key("bob").encode()
    answer = await ask(made, port, b"/generate", other, method=b"POST", body=GENERATE)
    assert answer.startswith(b"HTTP/1.1 200 ")
    (tenant,) = [t for t in made.router.engines["pol_main"].stats().tenants if t.output_tokens_total]
    assert tenant.tenant == "ten_alice"
