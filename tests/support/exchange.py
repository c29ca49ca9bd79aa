"""HTTP on a bare socket, so that tests see the bytes, the order of headers and the moment of every piece."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

LIMIT_S = 60.0


class Wire:
    """One connection to a server. Use as a context; ``close`` is an ordinary close, ``abort`` a reset."""

    def __init__(self, port: int, *, limit_s: float = LIMIT_S) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=limit_s)
        self._buffer = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None) -> None:
        """Send a request; a body that is not bytes goes as JSON."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = {"Host": "tgi", **({"Content-Type": "application/json"} if body is not None else {}), **(headers or {})}
        if body is not None:
            lines["Content-Length"] = str(len(data))
        head = "".join(f"{k}: {v}\r\n" for k, v in lines.items())
        self.socket.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)

    def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers (names in lower case) of the next answer."""
        raw = self._until(b"\r\n\r\n").decode("latin-1")
        first, *lines = raw.removesuffix("\r\n\r\n").split("\r\n")
        pairs = (line.split(": ", 1) for line in lines)
        return int(first.split(" ")[1]), {name.lower(): value for name, value in pairs}

    def chunks(self) -> Iterator[bytes]:
        """The pieces of a chunked body."""
        while size := int(self._until(b"\r\n"), 16):
            yield self._exactly(size)
            self._exactly(2)
        self._exactly(2)

    def body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            return b"".join(self.chunks())
        return self._exactly(int(headers.get("content-length", "0")))

    def rest(self) -> bytes:
        """Everything until the server closes."""
        data, self._buffer = self._buffer, b""
        try:
            while more := self.socket.recv(65536):
                data += more
        except ConnectionResetError:
            pass
        return data

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            self._more()
        at = self._buffer.index(mark) + len(mark)
        found, self._buffer = self._buffer[:at], self._buffer[at:]
        return found

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._more()
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    def _more(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError(f"the server closed after {self._buffer[-200:]!r}")
        self._buffer += data


def call(
    port: int, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own."""
    with Wire(port) as wire:
        wire.send(method, path, body, headers=headers)
        status, found = wire.head()
        return status, found, b"" if method == "HEAD" else wire.body(found)


def events(body: bytes) -> list[Any]:
    """JSON of each ``data:`` event; ``[DONE]`` stays text; comments are left out."""
    parts = [part for part in body.decode().split("\n\n") if part.startswith("data: ")]
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


def gauges(port: int) -> dict[str, float]:
    """``/metrics`` without histograms: name with labels -> value."""
    _, _, page = call(port, "GET", "/metrics")
    lines = (line for line in page.decode().splitlines() if line and not line.startswith("#") and "_bucket" not in line)
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
