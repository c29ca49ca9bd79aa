"""A server that speaks as much of TGI as the router asks for, at an exact pace, and keeps the time of what it sees.

It generates nothing: tokens are numbered words. What a request wants of it stands in its prompt, as ``name=number``:

    rid=7               its name in ``/closes`` and in the log
    delay_ms=50         before the first token
    interval_us=20000   between tokens; 0: as fast as they are read
    fault=reset|hang... one of ``FAULTS``, once per name and server

``GET /closes`` lists the last generation of every connection that closed: name, ``CLOCK_MONOTONIC`` in ns, tokens sent.
With ``--stamps`` a token's text is the instant of its writing, `` T<ns>``, as the compiled load generator reads it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import time
import zlib
from collections import deque
from typing import Any, cast

import httptools
import orjson
import uvloop

FAULTS = ("reset", "overloaded", "cut", "garbage")
"""Before the head: a reset, a 429. After three tokens: a reset, and bytes that are no event."""

_CUT_AFTER = 3
_TICK_S = 0.001
_BURST = 64
"""Events of an unthrottled stream per loop turn."""

_DIRECTION = re.compile(r"\b(rid|delay_ms|interval_us|fault)[=-](\w+)")
_PIECE = re.compile(r" ?[^ ]+| +")
_WORDS = [f" w{number}" for number in range(1_000)]

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"x-compute-type: bench\r\ntransfer-encoding: chunked\r\n\r\n"
)
_EVENT = b'data:{"index":%d,"token":{"id":%d,"text":"%b","logprob":-0.25,"special":false},"generated_text":null,"details":null}\n\n'  # noqa: E501
_LAST = b'data:{"index":%d,"token":{"id":%d,"text":"%b","logprob":-0.25,"special":false},"generated_text":"%b","details":{"finish_reason":"length","generated_tokens":%d,"seed":null,"input_length":%d}}\n\n'  # noqa: E501


def token_id(text: str) -> int:
    """The same text is the same token, so that what was generated splits into the tokens it came as."""
    return 100 + zlib.crc32(text.encode()) % 30_000


def split(text: str) -> list[str]:
    """The texts of the tokens of ``text``."""
    return _PIECE.findall(text)


class Server:
    """What all connections share."""

    def __init__(self, *, interval_us: int, seats: int, has_stamps: bool, log: str | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.interval_us = interval_us
        self.has_stamps = has_stamps
        self.closes: list[tuple[str, int, int]] = []
        self.requests = 0
        self.open = 0
        self._faulted: set[str] = set()
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if log else None
        self.info = orjson.dumps(
            {
                "model_id": "fairlane/bench", "model_sha": None, "model_pipeline_tag": "text-generation",
                "max_concurrent_requests": seats, "max_best_of": 2, "max_stop_sequences": 4,
                "max_input_tokens": 100_000, "max_total_tokens": 200_000, "max_client_batch_size": 4,
                "validation_workers": 2, "router": "text-generation-router", "version": "3.3.6-bench",
            }
        )  # fmt: skip
        self._due: dict[int, list[Stream]] = {}
        self._tick = 0
        self._timer: asyncio.TimerHandle | None = None
        self._now = int(self.loop.time() / _TICK_S)

    def log(self, rid: str) -> None:
        """Write down that something of ``rid`` has come, before anything else is done with it."""
        if self._log is not None:
            os.write(self._log, b"%d %b\n" % (time.monotonic_ns(), rid.encode()))

    def has_fault(self, rid: str) -> bool:
        """Whether the fault that ``rid`` asks for is still to come."""
        if rid in self._faulted:
            return False
        self._faulted.add(rid)
        return True

    # --- pace: one timer for all streams ----------------------------------------------------------------------------

    def at(self, tick: int, stream: Stream) -> None:
        """Let a stream go on at a tick."""
        if self._timer is None:
            # Everything up to now has been served.
            self._now = max(self._now, int(self.loop.time() / _TICK_S))
            self._timer = self.loop.call_at((self._now + 1) * _TICK_S, self._turn)
        self._due.setdefault(max(tick, self._now + 1), []).append(stream)

    def _turn(self) -> None:
        until = int(self.loop.time() / _TICK_S + 0.5)
        while self._now < until:
            self._now += 1
            for stream in self._due.pop(self._now, ()):
                stream.step(self._now)
        self._timer = self.loop.call_at((self._now + 1) * _TICK_S, self._turn) if self._due else None

    @property
    def now(self) -> float:
        """In ticks, with its fraction."""
        return self.loop.time() / _TICK_S


class Stream:
    """One generation."""

    __slots__ = (
        "_connection", "_due", "_fault", "_input_tokens", "_interval", "_is_whole", "_sent", "_texts", "_total", "rid",
    )  # fmt: skip

    def __init__(self, connection: Connection, body: Any, *, is_whole: bool) -> None:
        server = connection.server
        prompt = body["inputs"]
        directions = dict(_DIRECTION.findall(prompt[:200]))
        self.rid: str = directions.get("rid", "")
        self._connection = connection
        self._is_whole = is_whole
        self._total = int((body.get("parameters") or {}).get("max_new_tokens") or 100)
        self._interval = int(directions.get("interval_us", server.interval_us)) / 1_000
        self._input_tokens = len(split(prompt))
        self._sent = 0
        self._texts: list[str] = []
        fault = directions.get("fault", "")
        self._fault = fault if fault in FAULTS and server.has_fault(self.rid) else ""
        self._due = server.now + int(directions.get("delay_ms", 0))

    def begin(self) -> None:
        """Write the head, and the first token when it is due."""
        connection = self._connection
        connection.server.requests += 1
        connection.server.log(self.rid)
        if self._fault == "reset":
            connection.reset()
        elif self._fault == "overloaded":
            connection.answer(429, b'{"error":"Model is overloaded","error_type":"overloaded"}')
        else:
            connection.server.open += 1
            if not self._is_whole:
                connection.write(_HEAD)
            if self._due > connection.server.now:
                connection.server.at(int(self._due), self)
            else:
                self.step(0)

    def step(self, tick: int) -> None:
        """Write what is due."""
        connection = self._connection
        if connection.stream is not self or connection.is_paused:
            return
        if self._is_whole:
            texts = [self._text() for _ in range(self._total)]
            connection.end_stream()
            connection.answer(200, orjson.dumps({"generated_text": "".join(texts)}))
            return
        for _ in range(1 if self._interval else _BURST):
            if self._fault and self._sent == _CUT_AFTER:
                if self._fault == "cut":
                    connection.end_stream()
                    connection.reset()
                    return
                connection.write(b"9\r\ndata:{]\n\n\r\n")
                self._fault = ""
            connection.write(self._event())
            if self._sent == self._total:
                connection.end_stream()
                connection.write(b"0\r\n\r\n")
                return
            if connection.is_paused:
                return
        if self._interval:
            self._due += self._interval
            connection.server.at(int(self._due), self)
        else:
            connection.server.loop.call_soon(self.step, 0)

    def _text(self) -> str:
        self._sent += 1
        return f" T{time.monotonic_ns()}" if self._connection.server.has_stamps else _WORDS[self._sent % 1_000]

    def _event(self) -> bytes:
        text = self._text()
        raw, token = text.encode(), token_id(text)
        self._texts.append(text)
        if self._sent < self._total:
            data = _EVENT % (self._sent, token, raw)
        else:
            whole = "".join(self._texts).encode()
            data = _LAST % (self._sent, token, raw, whole, self._sent, self._input_tokens)
        return b"%x\r\n%b\r\n" % (len(data), data)

    @property
    def sent(self) -> int:
        """Tokens written."""
        return self._sent


class Connection(asyncio.Protocol):
    """One client, that is: the router."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.stream: Stream | None = None
        self.is_paused = False
        self._last: Stream | None = None
        self._parser: Any = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._waiting: deque[tuple[bytes, bytes]] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._last is not None:
            self.server.closes.append((self._last.rid, time.monotonic_ns(), self._last.sent))
        if self.stream is not None:
            self.end_stream()

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        if self.stream is not None:
            self.server.loop.call_soon(self.stream.step, 0)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def on_message_begin(self) -> None:
        self._url, self._body = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._waiting.append((self._url, b"".join(self._body)))
        self._next()

    def _next(self) -> None:
        while self._waiting and self.stream is None:
            url, body = self._waiting.popleft()
            self._serve(url.partition(b"?")[0], body)

    def _serve(self, path: bytes, body: bytes) -> None:
        server = self.server
        if path in (b"/generate_stream", b"/generate"):
            self.stream = self._last = Stream(self, orjson.loads(body), is_whole=path == b"/generate")
            self.stream.begin()
        elif path == b"/tokenize":
            prompt = orjson.loads(body)["inputs"]
            if rid := dict(_DIRECTION.findall(prompt[:200])).get("rid"):
                server.log(rid)
            pieces = split(prompt)
            self.answer(200, orjson.dumps([{"id": token_id(p), "text": p, "start": 0, "stop": 0} for p in pieces]))
        elif path == b"/info":
            self.answer(200, server.info)
        elif path in (b"/health", b"/metrics"):
            self.answer(200, b"")
        elif path == b"/closes":
            self.answer(200, orjson.dumps(server.closes))
        elif path == b"/stats":
            self.answer(200, orjson.dumps({"requests": server.requests, "open": server.open}))
        else:
            self.answer(404, b"{}")

    def write(self, data: bytes) -> None:
        """Part of a stream."""
        self._transport.write(data)

    def answer(self, status: int, body: bytes) -> None:
        """A whole answer."""
        self.stream = None
        self._transport.write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (status, len(body), body)
        )

    def end_stream(self) -> None:
        """The generation is over; what was pipelined behind it comes next."""
        self.stream = None
        self.server.open -= 1
        if self._waiting:
            self.server.loop.call_soon(self._next)

    def reset(self) -> None:
        """Close without an end."""
        self.stream = None
        self._transport.abort()


async def serve(args: argparse.Namespace) -> None:
    """Until the process is ended."""
    server = Server(interval_us=args.interval_us, seats=args.seats, has_stamps=args.stamps, log=args.log)
    listening = await server.loop.create_server(lambda: Connection(server), "127.0.0.1", args.port, backlog=4_096)
    async with listening:
        await listening.serve_forever()


def main() -> None:
    """``python -m router_ext.ops.gatewaybench.pacer``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--interval-us", type=int, default=0)
    parser.add_argument("--seats", type=int, default=100_000)
    parser.add_argument("--stamps", action="store_true")
    parser.add_argument("--log")
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
