"""The router's copy of its configuration on disk: a whole snapshot and the deltas that came after it.

``snapshot.json`` is replaced whole; ``snapshot.deltas`` grows by a line per delta until the next whole. Deltas name the
snapshot they go from, so whatever a crash leaves fits together or is not used: a torn line, and deltas of an older
whole, lead on from nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from router_ext.errors import SnapshotRefused
from router_ext.sync.snapshot_file import decode_snapshot, write_atomically
from router_ext.wire.controlplane import ConfigSnapshot, SnapshotDelta
from router_ext.wire.deltas import decode_delta, follow

_LEAST_DELTAS_BYTES = 1 << 20
"""So many bytes of deltas are kept beside a whole of any size."""


def read_with_deltas(path: Path) -> ConfigSnapshot:
    """A snapshot file, and what came after it if it is a router's copy.

    Raises:
        OSError, SnapshotRefused: as ``SavedSnapshot.read``.
    """
    return SavedSnapshot(path.parent, path.name).read()


class SavedSnapshot:
    """Reads and writes the copy. All methods block, and are called one at a time.

    Attributes:
        path: of the whole. deltas_path: of what came after it.
    """

    def __init__(self, directory: Path, name: str = "snapshot.json") -> None:
        self.path = directory / name
        self.deltas_path = self.path.with_suffix(".deltas")
        self._whole_bytes = 0
        self._good_bytes = 0
        self._pending: list[bytes] = []

    @property
    def is_long(self) -> bool:
        """Reading the deltas has become as dear as a whole would be: it is time for one."""
        return self._good_bytes > max(_LEAST_DELTAS_BYTES, self._whole_bytes // 2)

    def read(self) -> ConfigSnapshot:
        """The newest snapshot that is whole.

        Raises:
            FileNotFoundError: there is none.
            OSError: it cannot be read.
            SnapshotRefused: the whole is damaged.
        """
        body = self.path.read_bytes()
        snapshot = decode_snapshot(body)
        self._whole_bytes, self._good_bytes = len(body), 0
        try:
            lines = self.deltas_path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return snapshot
        steps: list[SnapshotDelta] = []
        at = snapshot.digest
        good = 0
        for line in lines:
            try:
                step = decode_delta(line.rstrip(b"\n"))
            except SnapshotRefused:
                break
            if step.base != at or not line.endswith(b"\n"):
                break
            steps.append(step)
            at = step.digest
            good += len(line)
        snapshot = follow(snapshot, steps)
        self._good_bytes = good
        return snapshot

    def write(self, body: bytes) -> None:
        """Replace everything by a whole snapshot.

        Raises:
            OSError: the disk does not take it; what was there is still there.
        """
        write_atomically(self.path, body)
        # Should it end here: what these lead on from is no longer there.
        self.deltas_path.unlink(missing_ok=True)
        self._whole_bytes, self._good_bytes = len(body), 0
        self._pending.clear()

    def append(self, raws: list[bytes]) -> None:
        """Add deltas, and those that an earlier call could not.

        Raises:
            OSError: the disk does not take them; they are tried again with the next.
        """
        self._pending += [raw + b"\n" for raw in raws]
        data = b"".join(self._pending)
        is_new = not self.deltas_path.exists()
        fd = os.open(self.deltas_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "r+b", buffering=0) as file:
            file.truncate(self._good_bytes)  # what was torn
            file.seek(self._good_bytes)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        if is_new:
            folder = os.open(self.deltas_path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        self._good_bytes += len(data)
        self._pending.clear()

    def set_aside(self) -> None:
        """Take a copy that cannot be used out of the way, and keep it for whoever looks for the reason."""
        os.replace(self.path, self.path.with_suffix(".refused.json"))
        self.deltas_path.unlink(missing_ok=True)
        self._whole_bytes = self._good_bytes = 0
