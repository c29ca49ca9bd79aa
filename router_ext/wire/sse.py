"""Server-sent events, incrementally: bytes in any chunking in, payloads of complete events out.

What a TGI server sends is always ``data: <one line of JSON>\\n\\n`` and, every 15 idle seconds, the comment
``:\\n\\n`` (``data:`` without a space before TGI 2.1). The parser takes everything the standard allows besides:
CRLF and CR line ends, several ``data`` lines (joined by a newline), other fields (ignored), comments (counted).

    parser = SseParser()
    for chunk in upstream:
        for payload in parser.feed(chunk):
            ...
    parser.has_partial_event      # True: the stream was cut inside an event

Source: WHATWG HTML, "Server-sent events"; framing of axum 0.7.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 8_000_000
"""Bound of one unfinished event. TGI's largest is the final one, with the whole text; zero would refuse everything."""


class SseError(ValueError):
    """The peer does not speak server-sent events, or an event passed the bound."""


class SseParser:
    """Incremental parser. Cost: one scan per byte, no copy beyond the payload for a chunk that holds whole events."""

    __slots__ = ("_data", "_max_bytes", "_parts", "_pending_bytes", "_skip_lf", "comments")

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._parts: list[bytes] = []  # of an unfinished line; joined once, so that tiny chunks stay linear
        self._data: list[bytes] = []  # data lines of an unfinished event
        self._pending_bytes = 0
        self._max_bytes = max_event_bytes
        self._skip_lf = False
        self.comments = 0

    @property
    def has_partial_event(self) -> bool:
        """Bytes of an event that has not ended are waiting."""
        return bool(self._parts or self._data)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Payloads of the events that ``chunk`` completes, in order.

        Raises:
            SseError: one event is larger than the bound.
        """
        # Nearly every chunk of a TGI server is one event or, read late, a few; anything else takes the general way.
        if (
            chunk[-2:] == b"\n\n"
            and chunk[:6] == b"data: "
            and b"\r" not in chunk
            and not self._parts
            and not self._data
        ):
            if chunk.find(b"\n") == len(chunk) - 2:
                self._skip_lf = False
                return [chunk[6:-2]]
            payloads = chunk[6:-2].split(b"\n\ndata: ")
            if chunk.count(b"\n") == 2 * len(payloads):
                self._skip_lf = False
                return payloads
        return self._feed(chunk)

    def _feed(self, chunk: bytes) -> list[bytes]:
        if self._skip_lf and chunk:
            if chunk[:1] == b"\n":
                chunk = chunk[1:]
            self._skip_lf = False
        if b"\r" in chunk:
            # A CR at the very end may be the first half of a CRLF: take it as the line end, drop an LF that follows.
            self._skip_lf = chunk[-1:] == b"\r"
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        out: list[bytes] = []
        *lines, rest = chunk.split(b"\n")
        if lines and self._parts:
            self._parts.append(lines[0])
            lines[0] = b"".join(self._parts)
            self._parts = []
            self._pending_bytes = sum(map(len, self._data))
        for line in lines:
            self._line(line, out)
        if rest:
            self._parts.append(rest)
            self._pending_bytes += len(rest)
        # Events that are complete are delivered first; an endless one is refused with the next bytes of it.
        if self._pending_bytes > self._max_bytes and not out:
            raise SseError(f"an event is larger than {self._max_bytes} bytes")
        return out

    def _line(self, line: bytes, out: list[bytes]) -> None:
        if not line:
            if self._data:
                out.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
                self._pending_bytes = 0
        elif line[:5] == b"data:":
            value = line[6:] if line[5:6] == b" " else line[5:]
            self._data.append(value)
            self._pending_bytes += len(value)
        elif line == b"data":
            self._data.append(b"")
        elif line[:1] == b":":
            self.comments += 1
