"""The schedulers' service counters on disk, so that a restart does not forget who is ahead of whom.

    {"version": 1, "pools": {pool id: what its Scheduler.save() gave}}

Written every few seconds and at the end, replaced as a whole (write, fsync, rename): after a kill or a power cut the
file holds one of the two last states. What is older than the last save is service delivered since. A file that cannot
be read is reported and counts as none; what a pool's entry says is judged by ``Scheduler.restore``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

from router_ext.sync.snapshot_file import write_atomically

log = structlog.get_logger(__name__)

SAVE_INTERVAL_S = 2.0
"""A kill forgets so much of what was delivered; one fsync in a worker thread costs nobody anything."""

MAX_FILE_BYTES = 64 << 20
"""Sixty pools with as many tenants and keys as are saved at most."""

_VERSION = 1


class _File(msgspec.Struct, frozen=True):
    version: int
    pools: dict[str, Any]


class CountersFile:
    """Saved counters by pool.

    Attributes:
        pools: entries read at the start and not taken yet. They are written again until they are, so that a router
            that dies before its first configuration loses nothing.
    """

    def __init__(self, path: Path) -> None:
        """Read ``path``; never raises for what it finds there."""
        self._path = path
        self._written = b""
        self._lock = threading.Lock()
        self._is_closed = False
        self.pools: dict[str, Any] = {}
        try:
            size = path.stat().st_size
            if size > MAX_FILE_BYTES:
                raise ValueError(f"{size} bytes")
            found = msgspec.json.decode(path.read_bytes(), type=_File)
            if found.version != _VERSION:
                raise ValueError(f"version {found.version}")
            self.pools = found.pools
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            log.error("counters.unreadable", path=str(path), reason=str(error))

    def take(self, pool: str) -> Any | None:
        """The entry of a pool that begins; None if there is none."""
        return self.pools.pop(pool, None)

    def write(self, pools: Mapping[str, Any], *, is_last: bool = False) -> None:
        """Replace the file if anything has changed. Blocks; a disk that does not take it is reported.

        Any thread may call it. What is still on its way when the last state was written comes too late and is dropped.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = is_last
            data = msgspec.json.encode(_File(_VERSION, {**self.pools, **pools}))
            if data == self._written:
                return
            try:
                write_atomically(self._path, data)
            except OSError as error:
                log.error("counters.not_saved", path=str(self._path), reason=error.strerror)
            else:
                self._written = data

    def close(self) -> None:
        """Write nothing more: the file is another process's. Waits for a write that is under way."""
        with self._lock:
            self._is_closed = True

    async def run(self, save: Callable[[], Mapping[str, Any]]) -> None:
        """Write what ``save`` gives, every few seconds until cancelled or closed."""
        while not self._is_closed:
            await asyncio.sleep(SAVE_INTERVAL_S)
            await asyncio.to_thread(self.write, save())
