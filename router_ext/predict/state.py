"""The file in which a prediction worker keeps what it has learned: one blob with a checksum, replaced as a whole.

Only its owner may read it: it holds the key of the signatures beside them; who has both can test guesses of prompts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from router_ext.predict.notes import Notes

SAVE_INTERVAL_S = 30.0
"""A kill forgets so much of what was learned."""

MAX_STATE_BYTES = 64 << 20

_MAGIC = b"FLPRED01"
_HEADER_BYTES = len(_MAGIC) + 32


class StateFile:
    """``magic | sha256 of the rest | rest``. Nothing here raises for what a disk holds or refuses."""

    def __init__(self, path: Path, notes: Notes) -> None:
        self._path = path
        self._notes = notes

    def read(self) -> bytes | None:
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
        if len(data) > MAX_STATE_BYTES or head != _MAGIC + hashlib.sha256(rest).digest():
            self._notes.error("predictor.state_damaged", path=str(self._path), bytes=len(data))
            return None
        return rest

    def write(self, rest: bytes) -> None:
        """Replace it: write, fsync, rename."""
        part = self._path.with_suffix(".part")
        try:
            # One that a killed process left may have other rights.
            part.unlink(missing_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(rest).digest())
                file.write(rest)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._path)
        except OSError as error:
            self._notes.error("predictor.state_not_saved", path=str(self._path), reason=error.strerror)
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
