"""Ended requests on disk until the control plane has them: append-only segments of checksummed frames.

    spool/0000000000000001.seg   = "FLSPOOL1" | frame | frame | ...
    frame                        = magic u32 | payload length u32 | crc32(length, payload) u32 | payload (JSON)

Durability: ``append`` is one ``write(2)``; the page cache alone survives ``kill -9``. ``sync`` (called once a second
from a worker thread) makes it survive a power cut, so at most the last second is at risk there. Removal is by whole
segments once everything in them is acknowledged; after a restart the rest of a partly acknowledged segment is
delivered again (the receiver knows events by id).

Damage: at open a torn tail is cut off, and a damaged region in the middle is skipped by looking for the next frame that
checks. What is cut or skipped is kept in ``spool/damaged/`` and counted, never deleted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from router_ext.errors import LedgerFull, SettingsError

_MAGIC = b"FLSPOOL1"
_FRAME_MAGIC = b"\xf1\xfeEV"
_FRAME = struct.Struct("<4sII")
_LENGTH = struct.Struct("<I")
MAX_PAYLOAD_BYTES = 1 << 20
SEGMENT_BYTES = 2 << 20
MAX_BYTES = 1 << 30
_RECYCLE_BYTES = 64 << 10  # an acknowledged active segment is emptied from here on, so that little is sent again
_READ_BYTES = 256 << 10
LOCK_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Damage:
    """A region of a segment that holds no readable frame. Units: bytes from the start of the file."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class SpoolBatch:
    """The oldest events not acknowledged, as the bytes they were appended with.

    ``serial`` counts acknowledgements; ``end`` is the reader's place in the oldest segment after this batch.
    """

    payloads: list[bytes]
    serial: int
    end: int


@dataclass(slots=True)
class _Segment:
    number: int
    path: Path
    size: int
    n_events: int


def scan(data: bytes) -> Iterator[tuple[int, bytes] | Damage]:
    """Frames of a segment as ``(end offset, payload)`` in order, damaged regions between them as ``Damage``.

    ``data`` is a whole segment, or a part of one that starts at a frame.
    """
    position = len(_MAGIC) if data.startswith(_MAGIC) else 0
    size = len(data)
    while position < size:
        payload = _frame_at(data, position)
        if payload is not None:
            position += _FRAME.size + len(payload)
            yield position, payload
            continue
        begin = position
        position = data.find(_FRAME_MAGIC, position + 1)
        while position >= 0 and _frame_at(data, position) is None:
            position = data.find(_FRAME_MAGIC, position + 1)
        if position < 0:
            position = size
        yield Damage(begin, position)


def _frame_at(data: bytes, position: int) -> bytes | None:
    begin = position + _FRAME.size
    if begin > len(data):
        return None
    magic, length, crc = _FRAME.unpack_from(data, position)
    if magic != _FRAME_MAGIC or length > MAX_PAYLOAD_BYTES or begin + length > len(data):
        return None
    payload = data[begin : begin + length]
    return payload if _crc(payload) == crc else None


def _take(data: bytes, *, max_events: int, max_bytes: int) -> tuple[list[bytes], int]:
    """The first events of ``data`` and the offset after them."""
    payloads: list[bytes] = []
    n_bytes = 0
    end = 0
    for item in scan(data):
        if isinstance(item, Damage):
            continue
        offset, payload = item
        if payloads and (len(payloads) == max_events or n_bytes + len(payload) > max_bytes):
            break
        payloads.append(payload)
        n_bytes += len(payload)
        end = offset
    return payloads, end


def _crc(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_LENGTH.pack(len(payload))))


class FolderLock:
    """Exclusive use of a folder by one process; the kernel gives it back when the process ends, however it ends."""

    def __init__(self, path: Path, *, wait_s: float = LOCK_WAIT_S) -> None:
        """Take the lock, waiting a little for a predecessor that is being torn down.

        Raises:
            SettingsError: another process keeps it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        limit = time.monotonic() + wait_s
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if time.monotonic() >= limit:
                    os.close(self._fd)
                    raise SettingsError(f"another router process uses {path.parent}") from error
                time.sleep(0.02)
            else:
                return

    def move(self, path: Path) -> None:
        """Lock another folder instead: the lock is the file's, and goes with it."""
        os.replace(self._path, path)
        self._path = path

    def close(self) -> None:
        """Give it back."""
        os.close(self._fd)


class Spool:
    """A durable queue of byte strings, at least once. One process; all methods but ``sync`` from one thread.

    Attributes:
        damaged_bytes: bytes cut or skipped since open (kept in ``damaged/``), apart from torn tails.
        torn_bytes: bytes of a torn tail cut at open: the one write a crash interrupted.
    """

    def __init__(self, directory: Path, *, max_bytes: int = MAX_BYTES, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Open the folder, repairing what a crash left.

        Cost: reads every segment once (about 0.5 GB/s), to count and to check.
        """
        self.directory = directory
        self.max_bytes = max_bytes
        self.segment_bytes = min(segment_bytes, max_bytes // 4)  # an acknowledgement frees a good part of the bound
        self.damaged_bytes = 0
        self.torn_bytes = 0
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._segments: deque[_Segment] = deque()
        self._fd = -1
        self._total_bytes = 0
        self._n_pending = 0
        self._read_offset = 0
        self._read_count = 0  # events of the oldest segment that are acknowledged
        self._n_acks = 0
        self._is_broken = False  # the active segment could not be cut back after a failed write
        self._lock = threading.Lock()
        self._unsynced: list[int] = []
        self._is_dirty = False
        self._open_segments()

    # --- opening ---------------------------------------------------------------------------------------------------

    def _open_segments(self) -> None:
        paths = sorted(self.directory.glob(f"{'[0-9]' * 16}.seg"))
        last_number = 0
        for path in paths:
            last_number = int(path.stem)
            segment = self._check(path, last_number, is_last=path is paths[-1])
            if segment.n_events:
                self._segments.append(segment)
                self._total_bytes += segment.size
                self._n_pending += segment.n_events
            else:
                path.unlink()
        if self._segments and self._segments[-1].number == last_number:
            self._fd = os.open(self._segments[-1].path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self._is_dirty = True  # its tail may be in the page cache only
        else:
            self._start_segment(last_number + 1)

    def _check(self, path: Path, number: int, *, is_last: bool) -> _Segment:
        data = path.read_bytes()
        n_events = 0
        end = 0
        damages: list[Damage] = []
        for item in scan(data):
            if isinstance(item, Damage):
                damages.append(item)
            else:
                end, _ = item
                n_events += 1
        for damage in damages:
            lost = data[damage.begin : damage.end]
            is_tail = is_last and damage.end == len(data)
            if is_tail:
                self.torn_bytes += len(lost)
            else:
                self.damaged_bytes += len(lost)
            if lost.strip(b"\0"):  # a power cut may leave a tail of zeros
                self.quarantine(f"{path.stem}-{damage.begin}.bin", lost)
        if is_last and end < len(data):
            with path.open("r+b") as file:
                file.truncate(end)
            return _Segment(number, path, end, n_events)
        return _Segment(number, path, len(data), n_events)

    def quarantine(self, name: str, data: bytes) -> Path:
        """Keep bytes that can go nowhere else in ``damaged/`` for the operator."""
        folder = self.directory / "damaged"
        folder.mkdir(exist_ok=True, mode=0o700)
        path = folder / name
        path.write_bytes(data)
        return path

    def _start_segment(self, number: int) -> None:
        path = self.directory / f"{number:016d}.seg"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                if os.write(fd, _MAGIC) != len(_MAGIC):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.close(fd)
                path.unlink()
                raise
        except OSError as error:
            raise LedgerFull(f"the usage spool cannot write to {self.directory}: {error.strerror}") from error
        with self._lock:
            if self._fd >= 0:
                self._unsynced.append(self._fd)
            self._fd = fd
            self._is_dirty = True
        self._segments.append(_Segment(number, path, len(_MAGIC), 0))
        self._total_bytes += len(_MAGIC)

    # --- writing ---------------------------------------------------------------------------------------------------

    @property
    def pending_events(self) -> int:
        """Events not acknowledged yet."""
        return self._n_pending

    @property
    def total_bytes(self) -> int:
        """Disk taken by segments; ``max_bytes`` bounds it."""
        return self._total_bytes

    def has_room(self, num_bytes: int, num_events: int) -> bool:
        """Whether payloads of so many bytes keep within ``max_bytes``; the disk may know better."""
        overhead = num_events * _FRAME.size + len(_MAGIC)
        return self._total_bytes + num_bytes + overhead <= self.max_bytes

    def append(self, payload: bytes) -> None:
        """Write one event; it survives the process when this returns.

        Cost: one ``write(2)`` of the payload and 12 bytes, some 3 us.

        Raises:
            LedgerFull: the bound or the disk is reached; nothing of the event is left in the spool.
            ValueError: larger than ``MAX_PAYLOAD_BYTES``.
        """
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"an event of {len(payload)} bytes is over the limit of {MAX_PAYLOAD_BYTES}")
        frame = _FRAME.pack(_FRAME_MAGIC, len(payload), _crc(payload)) + payload
        if self._total_bytes + len(frame) > self.max_bytes:
            self._empty_if_done()
        if self._total_bytes + len(frame) > self.max_bytes:
            raise LedgerFull(f"the usage spool holds {self._total_bytes} bytes, its bound is {self.max_bytes}")
        active = self._segments[-1]
        if self._is_broken or (active.n_events and active.size + len(frame) > self.segment_bytes):
            self._start_segment(active.number + 1)
            self._is_broken = False
            active = self._segments[-1]
        try:
            written = os.write(self._fd, frame)
            reason = None if written == len(frame) else "the disk is full"
        except OSError as error:
            reason = str(error.strerror)
        if reason is not None:
            self._cut_back(active)
            self._empty_if_done()
            raise LedgerFull(f"the usage spool cannot write to {self.directory}: {reason}")
        active.size += len(frame)
        active.n_events += 1
        self._total_bytes += len(frame)
        self._n_pending += 1
        self._is_dirty = True

    def _cut_back(self, active: _Segment) -> None:
        try:
            os.ftruncate(self._fd, active.size)
        except OSError:
            self._is_broken = True  # readers skip the part frame; the next event goes to another segment

    def sync(self) -> None:
        """Make everything appended before this call survive a power cut. Blocks; may run in another thread.

        Raises:
            OSError: the disk refuses; the segments stay marked as not synced.
        """
        with self._lock:
            if not self._is_dirty or self._fd < 0:
                return
            closing, self._unsynced = self._unsynced, []
            active = os.dup(self._fd)
            self._is_dirty = False
        try:
            for fd in (*closing, active):
                os.fdatasync(fd)
        except OSError:
            self._is_dirty = True
            raise
        finally:
            for fd in (*closing, active):
                os.close(fd)
        folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    # --- reading ---------------------------------------------------------------------------------------------------

    def read_batch(self, *, max_events: int = 256, max_bytes: int = 1 << 20) -> SpoolBatch | None:
        """The oldest events not acknowledged, None if there are none. Reads one segment at most.

        The same events come again until ``ack``. At least one event is returned, whatever ``max_bytes``.
        """
        while self._n_pending:
            segment = self._segments[0]
            length = _READ_BYTES
            while True:
                data = self._read(segment, length)
                payloads, end = _take(data, max_events=max_events, max_bytes=max_bytes)
                if payloads:
                    return SpoolBatch(payloads, self._n_acks, self._read_offset + end)
                if len(data) < length:
                    break
                length *= 4
            self._give_up(segment, data)
        return None

    def oldest(self) -> bytes | None:
        """The oldest event not acknowledged; None if there is none, or it cannot be read. Changes nothing."""
        if not self._n_pending:
            return None
        try:
            data = self._read(self._segments[0], MAX_PAYLOAD_BYTES + _READ_BYTES)
        except OSError:
            return None
        payloads, _ = _take(data, max_events=1, max_bytes=MAX_PAYLOAD_BYTES)
        return payloads[0] if payloads else None

    def _read(self, segment: _Segment, length: int) -> bytes:
        with segment.path.open("rb") as file:
            file.seek(self._read_offset)
            return file.read(min(segment.size - self._read_offset, length))

    def _give_up(self, segment: _Segment, data: bytes) -> None:
        """Nothing readable is left where ``open`` counted events: the disk changed under us. Keep the bytes."""
        self.damaged_bytes += len(data)
        self.quarantine(f"{segment.path.stem}-{self._read_offset}.bin", data)
        self._n_pending -= segment.n_events - self._read_count
        self._read_count = segment.n_events
        self._finish_oldest(segment)

    def ack(self, batch: SpoolBatch) -> None:
        """The receiver has these events for good; segments that are done with are removed.

        Raises:
            ValueError: this batch is not the one to be acknowledged next.
        """
        if batch.serial != self._n_acks:
            raise ValueError(f"batch {batch.serial} is not the one to be acknowledged next ({self._n_acks})")
        segment = self._segments[0]
        self._n_acks += 1
        self._read_offset = batch.end
        self._read_count += len(batch.payloads)
        self._n_pending -= len(batch.payloads)
        if self._read_count >= segment.n_events:
            self._finish_oldest(segment)

    def _finish_oldest(self, segment: _Segment) -> None:
        if len(self._segments) > 1:
            self._drop_oldest()
        elif segment.size >= _RECYCLE_BYTES:
            self._empty_if_done()

    def _empty_if_done(self) -> None:
        """Give back the space of the active segment if everything in the spool is acknowledged."""
        active = self._segments[-1]
        if self._n_pending or self._is_broken or not active.n_events:
            return
        os.ftruncate(self._fd, len(_MAGIC))
        self._total_bytes -= active.size - len(_MAGIC)
        active.size, active.n_events = len(_MAGIC), 0
        self._read_offset = self._read_count = 0

    def _drop_oldest(self) -> None:
        segment = self._segments.popleft()
        segment.path.unlink()
        self._total_bytes -= segment.size
        self._read_offset = 0
        self._read_count = 0

    def move(self, directory: Path) -> None:
        """Go on in another folder of the same file system."""
        os.replace(self.directory, directory)
        self.directory = directory
        for segment in self._segments:
            segment.path = directory / segment.path.name

    def payloads(self) -> Iterator[bytes]:
        """Every event on disk, acknowledged or not, oldest first."""
        for segment in list(self._segments):
            for item in scan(segment.path.read_bytes()):
                if not isinstance(item, Damage):
                    yield item[1]

    def close(self) -> None:
        """Sync and close; a spool that is wholly acknowledged leaves no segment behind."""
        self.sync()
        with self._lock:
            os.close(self._fd)
            self._fd = -1
        if not self._n_pending:
            while self._segments:
                self._drop_oldest()
