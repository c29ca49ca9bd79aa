"""Running requests in a memory-mapped file that outlives the process.

    file   = header page (4096 bytes) | chunk | chunk | ...         chunk = 1024 records of 1024 bytes
    record = 16 words (u64, native order) | start record (msgpack, up to 896 bytes)

A store into a shared mapping is in the page cache at once, so ``kill -9`` loses none of it (a power cut may: the table
is never fsynced, because writing back a hot page can stall the next store). Words are aligned, so no word is ever torn;
the start record is guarded by length and crc32, and the state word is written last at ``begin``. Chunks are
allocated on disk before they are mapped, so that a full disk refuses new requests instead of raising SIGBUS.

Cost: ``slot.words[OUTPUT_TOKENS] = n`` is one item assignment of a memoryview (0.03 to 0.05 us).
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from pathlib import Path

import msgspec

from router_ext.errors import LedgerFull
from router_ext.wire.controlplane import MomentRecord, PredictionRecord, ReasonRecord, UsageEvent
from router_ext.wire.decoding import NotDecoded

STATE, GUARD = 0, 1
OUTPUT_TOKENS = 2
"""Tokens handed to the client's connection so far (EOS included); stored before their bytes are written."""
PROMPT_TOKENS = 3
RECOMPUTED_TOKENS = 4
"""Tokens generated and dropped, or processed again after a preemption, so far."""
FIRST_DISPATCH_US = 5
"""Instant of the first dispatch; once it (or a counter) is set, a kill leaves an ``aborted`` event."""
FIRST_TOKEN_US = 6
SEGMENTS = 7
PREEMPTIONS = 8
RESUMED_PREFILL_TOKENS = 9
KV_TOKEN_US = 10
"""Integral of held KV tokens over time, in token-microseconds."""
ENDED_AT_US, OUTCOME, TOKEN_SOURCE = 11, 12, 13
N_WORDS = 16

TOKEN_SOURCES = ("counted", "backend", "estimated")
"""What ``TOKEN_SOURCE`` says."""

OUTCOMES = ("", "completed", "cancelled", "failed", "aborted", "expired")

_MAGIC = b"FLINFLT1"
_VERSION = 1
_HEADER = struct.Struct("=8sIIQ")  # magic, version, record bytes, last instant the process was seen alive
_ALIVE_WORD = 2
HEADER_BYTES = 4096
RECORD_BYTES = 1024
CHUNK_RECORDS = 1024
_CHUNK_BYTES = RECORD_BYTES * CHUNK_RECORDS
_RECORD_WORDS = RECORD_BYTES // 8
_START_OFFSET = N_WORDS * 8
MAX_START_BYTES = RECORD_BYTES - _START_OFFSET
_FREE, _OPEN, _SEALED = 0, 0x6F70656E6F70656E, 0x7365616C7365616C
_ZEROS = memoryview(bytes(8 * (N_WORDS - OUTPUT_TOKENS))).cast("Q")


class RequestStart(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What is known of a request when it begins; fields as in ``UsageEvent``.

    Fields may be added at the end with a default, never reordered (the encoding goes by position).
    """

    event: str
    request: str
    router: str
    tenant: str
    key: str
    pool: str
    model: str
    tier: str
    dialect: str
    arrived_at_us: int
    max_new_tokens: int | None = None
    predicted_tokens: int | None = None
    predictor: str | None = None
    prediction: PredictionRecord | None = None
    """Without features, which are too large for a record; an event that ends undisturbed has them."""


class InflightSlot:
    """One running request: its start record and its live words.

    ``words`` takes item assignments by the constants of this module. It is released when the slot ends; a store
    afterwards raises ``ValueError`` instead of spoiling the next request's record.
    """

    __slots__ = ("index", "start", "words")

    def __init__(self, index: int, start: RequestStart, words: memoryview[int]) -> None:
        self.index = index
        self.start = start
        self.words = words

    @property
    def is_open(self) -> bool:
        """False once ``finish``, ``discard`` or ``end`` took it."""
        return self.index >= 0

    def event(
        self,
        *,
        outcome: str,
        ended_at_us: int,
        finish_reason: str | None = None,
        resume_class: str | None = None,
        backends: list[str] | None = None,
        error_code: str | None = None,
        explanation: list[str] | None = None,
        reasons: list[ReasonRecord] | None = None,
        timeline: list[MomentRecord] | None = None,
        prediction: PredictionRecord | None = None,
    ) -> UsageEvent:
        """The usage event of this request as its words stand."""
        start = self.start
        words = self.words
        return UsageEvent(
            event=start.event,
            request=start.request,
            router=start.router,
            tenant=start.tenant,
            key=start.key,
            pool=start.pool,
            model=start.model,
            tier=start.tier,
            dialect=start.dialect,
            outcome=outcome,
            arrived_at_us=start.arrived_at_us,
            ended_at_us=max(ended_at_us, start.arrived_at_us),
            first_dispatch_us=words[FIRST_DISPATCH_US] or None,
            first_token_us=words[FIRST_TOKEN_US] or None,
            prompt_tokens=words[PROMPT_TOKENS],
            output_tokens=words[OUTPUT_TOKENS],
            token_source=TOKEN_SOURCES[words[TOKEN_SOURCE]] if words[TOKEN_SOURCE] < len(TOKEN_SOURCES) else "counted",
            segments=words[SEGMENTS],
            preemptions=words[PREEMPTIONS],
            recomputed_tokens=words[RECOMPUTED_TOKENS],
            resumed_prefill_tokens=words[RESUMED_PREFILL_TOKENS],
            kv_token_seconds=words[KV_TOKEN_US] / 1e6,
            max_new_tokens=start.max_new_tokens,
            predicted_tokens=start.predicted_tokens,
            predictor=start.predictor,
            finish_reason=finish_reason,
            resume_class=resume_class,
            backends=backends or [],
            error_code=error_code,
            explanation=explanation or [],
            reasons=reasons or [],
            timeline=timeline or [],
            prediction=prediction or start.prediction,
        )


class InflightTable:
    """The file of running requests. One process at a time (see ``ledger``), one thread.

    Attributes:
        n_damaged: records found open at ``recover`` whose start record fails its checksum; they cannot be booked.
        replaced: where an unreadable or foreign file was moved at open, None if there was none.
    """

    def __init__(self, path: Path, *, max_records: int = 65_536) -> None:
        """Map ``path``, creating it if missing. ``max_records`` bounds growth (64 MiB at the default)."""
        self.path = path
        self.max_records = max_records
        self.n_damaged = 0
        self.replaced: Path | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RequestStart)
        self._maps: list[mmap.mmap] = []
        self._words: list[memoryview[int]] = []
        self._bytes: list[memoryview[int]] = []
        self._free: list[int] = []
        self._n_open = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not self._is_ours():
            self.replaced = path.with_suffix(f"{path.suffix}.unreadable")
            os.replace(path, self.replaced)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._fd).st_size < HEADER_BYTES:
            self._allocate(0, HEADER_BYTES)
            os.pwrite(self._fd, _HEADER.pack(_MAGIC, _VERSION, RECORD_BYTES, 0), 0)
        self._header_map = mmap.mmap(self._fd, HEADER_BYTES)
        self._header = memoryview(self._header_map).cast("Q")
        n_chunks = (os.fstat(self._fd).st_size - HEADER_BYTES) // _CHUNK_BYTES
        for _ in range(n_chunks):
            self._map_chunk()
        if not n_chunks:
            self._grow()

    def _is_ours(self) -> bool:
        with self.path.open("rb") as file:
            head = file.read(_HEADER.size)
        if not head.strip(b"\0"):
            return True  # killed while creating it: no record was ever in it
        if len(head) < _HEADER.size:
            return False
        magic, version, record_bytes, _ = _HEADER.unpack(head)
        return bool(magic == _MAGIC and version == _VERSION and record_bytes == RECORD_BYTES)

    def _allocate(self, offset: int, length: int) -> None:
        try:
            os.posix_fallocate(self._fd, offset, length)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise LedgerFull(f"no room for running requests in {self.path}: {reason}") from error

    def _map_chunk(self) -> None:
        offset = HEADER_BYTES + len(self._maps) * _CHUNK_BYTES
        mapped = mmap.mmap(self._fd, _CHUNK_BYTES, offset=offset)
        first = len(self._maps) * CHUNK_RECORDS
        words = memoryview(mapped).cast("Q")
        self._maps.append(mapped)
        self._bytes.append(memoryview(mapped))
        self._words.append(words)
        free = [first + i for i in range(CHUNK_RECORDS) if words[i * _RECORD_WORDS] == _FREE]
        free.reverse()
        self._free[:0] = free  # low slots first: few hot pages

    def _grow(self) -> None:
        if (len(self._maps) + 1) * CHUNK_RECORDS > max(self.max_records, CHUNK_RECORDS):
            raise LedgerFull(f"{self._n_open} requests are running, the table holds {self.max_records}")
        self._allocate(HEADER_BYTES + len(self._maps) * _CHUNK_BYTES, _CHUNK_BYTES)
        self._map_chunk()

    @property
    def n_open(self) -> int:
        """Slots begun and not ended by this process."""
        return self._n_open

    @property
    def alive_at_us(self) -> int:
        """The last instant given to ``touch`` by this process or its predecessor; 0 if never."""
        return self._header[_ALIVE_WORD]

    def touch(self, now_us: int) -> None:
        """Note that the process is alive: the end time of requests that a kill would cut."""
        self._header[_ALIVE_WORD] = now_us

    def begin(self, start: RequestStart) -> InflightSlot:
        """Open a record.

        Raises:
            LedgerFull: no room on disk, or ``max_records`` are running.
            ValueError: the identifiers do not fit into a record.
        """
        payload = self._encoder.encode(start)
        if len(payload) > MAX_START_BYTES:
            payload = self._encode_shortened(start)
        if not self._free:
            self._grow()
        index = self._free.pop()
        words = self._view(index)
        chunk, position = divmod(index, CHUNK_RECORDS)
        offset = position * RECORD_BYTES + _START_OFFSET
        self._bytes[chunk][offset : offset + len(payload)] = payload
        words[GUARD] = len(payload) << 32 | zlib.crc32(payload)
        words[OUTPUT_TOKENS:] = _ZEROS
        words[STATE] = _OPEN
        self._n_open += 1
        return InflightSlot(index, start, words)

    def _encode_shortened(self, start: RequestStart) -> bytes:
        """Only texts that name nothing in the books are cut; the event of an undisturbed end has them whole."""
        short = msgspec.structs.replace(
            start,
            request=start.request[:32],
            model=start.model[:32],
            predictor=start.predictor and start.predictor[:32],
            prediction=None,
        )
        payload = self._encoder.encode(short)
        if len(payload) > MAX_START_BYTES:
            raise ValueError(f"a start record takes {MAX_START_BYTES} bytes, this one has {len(payload)}")
        return payload

    def _view(self, index: int) -> memoryview[int]:
        chunk, position = divmod(index, CHUNK_RECORDS)
        first = position * _RECORD_WORDS
        return self._words[chunk][first : first + N_WORDS]

    def seal(self, slot: InflightSlot, *, outcome: str, ended_at_us: int) -> None:
        """Write the end into the record of an event that cannot be spooled yet; a kill will not make it aborted."""
        words = slot.words
        words[ENDED_AT_US] = ended_at_us
        words[OUTCOME] = OUTCOMES.index(outcome)
        words[STATE] = _SEALED

    def end(self, slot: InflightSlot) -> None:
        """Free the record. Call it after the event is in the spool, in the same turn.

        Raises:
            ValueError: the slot has ended before.
        """
        index = slot.index
        if index < 0:
            raise ValueError(f"slot of {slot.start.event} has ended before")
        slot.words[STATE] = _FREE
        slot.words.release()
        slot.index = -1
        self._free.append(index)
        self._n_open -= 1

    def move(self, path: Path) -> None:
        """Go on under another name on the same file system; the mapping stays."""
        os.replace(self.path, path)
        self.path = path

    def recover(self, *, now_us: int) -> list[tuple[InflightSlot, UsageEvent]]:
        """Records that a killed predecessor left open, with the event to book for each. Call before any ``begin``.

        The event has outcome ``aborted`` (or the sealed one) and ends at the last sign of life. A record whose
        request never used a backend yields nothing and is freed. ``end`` every slot once its event is booked.
        """
        found: list[tuple[InflightSlot, UsageEvent]] = []
        died_at_us = self.alive_at_us or now_us
        for index in range(len(self._maps) * CHUNK_RECORDS):
            words = self._view(index)
            state = words[STATE]
            if state == _FREE:
                continue
            start = self._read_start(index, words) if state in (_OPEN, _SEALED) else None
            if start is None:
                self.n_damaged += 1
            elif any(words[OUTPUT_TOKENS:N_WORDS]):
                slot = InflightSlot(index, start, words)
                self._n_open += 1
                outcome = OUTCOMES[words[OUTCOME]] if 0 < words[OUTCOME] < len(OUTCOMES) else "aborted"
                ended_at_us = words[ENDED_AT_US] or max(died_at_us, words[FIRST_TOKEN_US], words[FIRST_DISPATCH_US])
                error_code = "router_killed" if outcome == "aborted" else None
                found.append((slot, slot.event(outcome=outcome, ended_at_us=ended_at_us, error_code=error_code)))
                continue
            words[STATE] = _FREE
            words.release()
            self._free.append(index)
        return found

    def _read_start(self, index: int, words: memoryview[int]) -> RequestStart | None:
        length, crc = words[GUARD] >> 32, words[GUARD] & 0xFFFFFFFF
        if length > MAX_START_BYTES:
            return None
        chunk, position = divmod(index, CHUNK_RECORDS)
        offset = position * RECORD_BYTES + _START_OFFSET
        payload = bytes(self._bytes[chunk][offset : offset + length])
        if zlib.crc32(payload) != crc:
            return None
        try:
            return self._decoder.decode(payload)
        except NotDecoded:
            return None

    def close(self) -> None:
        """Unmap and close. Records still open stay open on disk; the next ``recover`` books them."""
        self._header.release()
        for view in (*self._words, *self._bytes):
            view.release()
        for mapped in (self._header_map, *self._maps):
            try:
                mapped.close()
            except BufferError:
                continue  # a slot still holds its words; the mapping goes with it
        os.close(self._fd)
