"""Something between a router and a model server that breaks streams, as a network or a dying server does."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from support.exchange import Wire

_HOP = {"content-length", "transfer-encoding", "connection", "date"}


class Cutter(ThreadingHTTPServer):
    """Passes everything on, but closes streams of ``/generate_stream`` somewhere between two tokens or inside one.

    Attributes:
        longest: a stream is cut after 1 to ``longest`` tokens; 0 lets all pass. cuts: how many were cut.
    """

    daemon_threads = True

    def __init__(self, origin_port: int, *, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.origin_port = origin_port
        self.longest = 0
        self.cuts = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def next_cut(self) -> tuple[int, float]:
        """(tokens that pass, part of the next one that passes too) of the next stream."""
        with self._lock:
            if not self.longest:
                return 1 << 30, 0.0
            return self._random.randint(1, self.longest), self._random.choice((0.0, 0.0, self._random.random()))

    def count_cut(self) -> None:
        with self._lock:
            self.cuts += 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Cutter
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        self._pass_on(self.rfile.read(int(self.headers["content-length"])))

    def _pass_on(self, body: bytes | None) -> None:
        with contextlib.suppress(ConnectionError), Wire(self.server.origin_port) as origin:
            origin.send(self.command, self.path, body)
            status, headers = origin.head()
            self.send_response_only(status)
            for name, value in headers.items():
                if name not in _HOP:
                    self.send_header(name, value)
            if self.path != "/generate_stream":
                data = origin.body(headers)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                return
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            pieces = origin.chunks() if headers.get("transfer-encoding") == "chunked" else iter([origin.body(headers)])
            self._stream(pieces)

    def _stream(self, pieces: Iterator[bytes]) -> None:
        tokens, part = self.server.next_cut()
        data = b""
        for piece in pieces:
            data += piece
            while b"\n\n" in data:
                event, _, data = data.partition(b"\n\n")
                event += b"\n\n"
                if tokens == 0:
                    self._write(event[: int(len(event) * part)])
                    self.server.count_cut()
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                tokens -= 1
                self._write(event)
        self.wfile.write(b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        if data:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


@contextlib.contextmanager
def cutter(origin_port: int, *, seed: int = 6) -> Iterator[Cutter]:
    """Run one in front of a model server, in threads."""
    with Cutter(origin_port, seed=seed) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
