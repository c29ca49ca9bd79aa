"""A TGI server in the test's own process whose streams go on only when the test says so."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

from router_ext.backends.fake import Script


class UpstreamStream:
    """One generation it was asked for.

    Attributes:
        is_closed: set once the router has closed the connection.
    """

    def __init__(self, body: bytes, writer: asyncio.StreamWriter, number: int) -> None:
        self.body = json.loads(body)
        self.connection = number
        self.is_closed = asyncio.Event()
        self.sent = 0
        self._writer = writer

    def head(self) -> None:
        """Say that the answer begins."""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._writer.write(head)

    def token(self, *, is_last: bool = False, count: int = 0) -> None:
        """One more event; the last one with the details."""
        if not self.sent:
            self.head()
        self.sent += 1
        event = {
            "index": self.sent,
            "token": {"id": 100 + self.sent, "text": f" t{self.sent}", "logprob": -0.5, "special": False},
            "generated_text": "".join(f" t{n}" for n in range(1, self.sent + 1)) if is_last else None,
            "details": {"finish_reason": "length", "generated_tokens": self.sent, "seed": None, "input_length": 3}
            if is_last
            else None,
        }
        data = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
        self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        if is_last:
            self._writer.write(b"0\r\n\r\n")


class Upstream:
    """Short calls are answered by ``play``; a generation is put into ``streams``, for the test to go on with."""

    def __init__(self, play: Callable[[str, bytes], Script]) -> None:
        self.port = 0
        self.streams: list[UpstreamStream] = []
        self.held: list[str] = []
        """Paths asked while ``is_held`` held them."""
        self.is_held: Callable[[str, bytes], bool] = lambda path, body: False
        self._play = play
        self._num_connections = 0

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Upstream]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        number = self._num_connections
        stream: UpstreamStream | None = None
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].decode()
                size = next(
                    (int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0
                )
                body = await reader.readexactly(size)
                if path == "/generate_stream":
                    stream = UpstreamStream(body, writer, number)
                    self.streams.append(stream)
                elif self.is_held(path, body):
                    self.held.append(path)
                else:
                    script = self._play(path, body)
                    data = b"".join(script.pieces)
                    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (script.status, len(data), data))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            if stream is not None:
                stream.is_closed.set()
            writer.close()
