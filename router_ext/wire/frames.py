"""Messages of the router's own processes on a stream socket: a length of four bytes, then the payload."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct(">I")

MAX_FRAME_BYTES = 8 << 20
"""A longer message is a stream out of step."""


def frame(payload: bytes) -> bytes:
    """The payload with its length."""
    return _LENGTH.pack(len(payload)) + payload


class Frames:
    """Payloads out of a byte stream, however it is cut."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Payloads that are complete by now.

        Raises:
            ValueError: the stream is out of step.
        """
        held = self._data
        held += data
        at = 0
        while len(held) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(held, at)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = at + _LENGTH.size + length
            if len(held) < end:
                break
            yield bytes(held[at + _LENGTH.size : end])
            at = end
        del held[:at]
