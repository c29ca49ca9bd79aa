"""The file in which a prediction worker keeps what it has learned: one blob with a checksum, replaced as a whole.

Only its owner may read it: it holds the key of the signatures beside them; who has both can test guesses of prompts.

What is written comes in slices, so that who makes them can do something else in between; a thread brings them to the
disk meanwhile, however slow that is.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import struct
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from router_ext.predict.notes import Notes

SAVE_INTERVAL_S = 30.0
"""A kill forgets so much of what was learned."""

MAX_STATE_BYTES = 64 << 20

_MAGIC = b"FLPRED02"
_HEADER_BYTES = len(_MAGIC) + 32
_LENGTH = struct.Struct("<I")


class StateFile:
    """``magic | sha256 of the rest | rest``, the rest being ``length | slice`` again and again.

    Nothing here raises for what a disk holds or refuses.
    """

    def __init__(self, path: Path, notes: Notes) -> None:
        self._path = path
        self._notes = notes

    def read(self) -> list[bytes] | None:
        """What was written last; None if there is nothing, or nothing whole (which the log says)."""
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_STATE_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._notes.error("predictor.state_unreadable", path=str(self._path), reason=error.strerror)
            return None
        head, rest = data[:_HEADER_BYTES], data[_HEADER_BYTES:]
        if len(data) <= MAX_STATE_BYTES and head == _MAGIC + hashlib.sha256(rest).digest():
            with contextlib.suppress(struct.error):
                return list(_slices(rest))
        self._notes.error("predictor.state_damaged", path=str(self._path), bytes=len(data))
        return None

    def write(self, slices: Iterable[bytes]) -> None:
        """Replace it: write, fsync, rename."""
        part = self._path.with_suffix(".part")
        found = hashlib.sha256()
        try:
            # One that a killed process left may have other rights.
            part.unlink(missing_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(bytes(_HEADER_BYTES))
                for each in slices:
                    for data in (_LENGTH.pack(len(each)), each):
                        found.update(data)
                        file.write(data)
                file.seek(0)
                file.write(_MAGIC + found.digest())
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._path)
        except OSError as error:
            self._notes.error("predictor.state_not_saved", path=str(self._path), reason=error.strerror)
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


def _slices(rest: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(rest):
        (length,) = _LENGTH.unpack_from(rest, at)
        at += _LENGTH.size + length
        yield rest[at - length : at]


class Saving:
    """One writing of the file, slice by slice: ``step`` takes the next one, a thread writes it.

    Attributes:
        is_taken: there are no more slices.
    """

    def __init__(self, file: StateFile, slices: Iterator[bytes]) -> None:
        self.is_taken = False
        self._slices = slices
        self._taken: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=file.write, args=(iter(self._taken.get, None),), name="saving", daemon=True
        )
        self._thread.start()

    def step(self) -> None:
        """Take one slice more, if there is one."""
        if not self.is_taken:
            taken = next(self._slices, None)
            self._taken.put(taken)
            self.is_taken = taken is None

    @property
    def is_written(self) -> bool:
        """Nothing is left to be done."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Take what is left and wait until it is on the disk."""
        while not self.is_taken:
            self.step()
        self._thread.join()
