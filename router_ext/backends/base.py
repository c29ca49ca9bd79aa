"""What the router asks of a backend: a byte stream that can be stopped, and short calls with a limit.

A stream is driven by callbacks on the event loop's thread, never by a task per token. The order is fixed:

    open_stream -> on_head -> on_data* -> on_end(None | UpstreamFailed)

``on_end`` comes exactly once, unless ``abort`` was called first; after ``abort`` nothing comes. A body that stops
before its declared end is a failure, never a clean end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router_ext.errors import UpstreamFailed

Headers = Sequence[tuple[bytes, bytes]]
"""Names in lower case, in the order received."""


class BackendUnreachable(UpstreamFailed):
    """No connection, or it broke before a byte of the answer: the backend itself is in doubt."""


class BackendRefused(BackendUnreachable):
    """No connection: it never saw the request."""


class BackendClosed(UpstreamFailed):
    """The answer had begun, and its connection closed before its end."""


class BackendTimeout(UpstreamFailed):
    """Connected, and then nothing for too long."""

    code = "timeout"
    status_openai = status_native = 504


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete short answer."""

    status: int
    headers: Headers
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        """First value of a header (lower-case name)."""
        return next((value for key, value in self.headers if key == name), None)


class StreamSink(Protocol):
    """Receives one upstream answer."""

    def on_head(self, status: int, headers: Headers) -> None:
        """Status line and headers are complete."""

    def on_data(self, data: bytes) -> None:
        """Body bytes as they came in one read, chunk framing removed."""

    def on_end(self, error: UpstreamFailed | None) -> None:
        """The answer is complete (None) or broken."""


class StreamHandle(Protocol):
    """One running upstream stream."""

    def abort(self) -> None:
        """Close the socket at once; no callback follows. Calling it again does nothing."""

    def release(self) -> None:
        """What the answer says is known already: no callback follows, and its connection may end in its own time."""

    def pause_reading(self) -> None:
        """Stop taking bytes; the backend's own buffers fill."""

    def resume_reading(self) -> None:
        """Go on taking bytes."""


class Backend(Protocol):
    """One TGI server."""

    def open_stream(self, path: str, body: bytes, sink: StreamSink, headers: bytes = b"") -> StreamHandle:
        """POST ``body`` (JSON) to ``path`` and feed the answer to ``sink``; returns at once, on the loop's thread.

        ``headers``: further header lines, each with its line end.
        """
        ...

    async def call(self, method: str, path: str, body: bytes = b"", *, timeout_s: float | None = None) -> Reply:
        """One short exchange.

        Raises:
            UpstreamFailed: no connection, a broken answer, or nothing within ``timeout_s``.
        """
        ...

    async def close(self) -> None:
        """Abort every stream and short call."""
        ...
