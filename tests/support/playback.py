"""A TGI that answers generation requests with recorded bytes, and everything else by asking a model server."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.recorded_tgi import FOLDER

_GENERATION = ("/", "/generate", "/generate_stream", "/v1/chat/completions", "/v1/completions")
_HOP = {"content-length", "transfer-encoding", "connection", "date"}


def recorded(file: str) -> dict[str, dict[str, Any]]:
    """Exchanges of one recording by name."""
    lines = (FOLDER / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()
    return {exchange["name"]: exchange for exchange in map(json.loads, lines)}


class Playback(ThreadingHTTPServer):
    """Attributes: ``exchange`` is what the next generation gets; ``asked`` what was asked, as (path, body)."""

    daemon_threads = True

    def __init__(self, origin: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.origin = origin
        self.exchange: dict[str, Any] = {}
        self.asked: list[tuple[str, Any]] = []

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Playback

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_GET(self) -> None:
        self._ask_origin(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path not in _GENERATION:
            self._ask_origin(body)
            return
        self.server.asked.append((self.path, json.loads(body)))
        response = self.server.exchange["response"]
        self.send_response_only(int(str(response["status"]).split(" ")[1]))
        for name, value in response["headers"]:
            if name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for _, piece in response["body"]:
            data = piece.encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")

    def _ask_origin(self, body: bytes | None) -> None:
        headers = {} if body is None else {"content-type": "application/json"}
        request = urllib.request.Request(self.server.origin + self.path, data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            data = answer.read()
        self.send_response_only(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def playback(origin: str) -> Iterator[Playback]:
    """Run one in a thread; ``origin`` is the address of a model server."""
    with Playback(origin) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
