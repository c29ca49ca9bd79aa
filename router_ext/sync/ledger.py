"""The books of one router: running requests in a table, ended ones in a spool, and the order between the two.

An event is appended to the spool first and its slot freed afterwards, in the same synchronous call. A kill in between
leaves both; ``Ledger.open`` finds the event id in the spool and frees the slot, so nothing is lost and nothing doubled.

When the disk is full the ended request stays in the table (sealed with its outcome, so that it survives a kill) and its
event in bounded memory; both are retried until the spool takes them. When that bound is reached ``begin`` raises
``LedgerFull``: no request is served that could not be booked.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import structlog

from router_ext.errors import LedgerFull
from router_ext.sync.inflight import OUTCOMES, InflightSlot, InflightTable, RequestStart
from router_ext.sync.spool import LOCK_WAIT_S, MAX_BYTES, FolderLock, Spool, SpoolBatch
from router_ext.wire.controlplane import MomentRecord, PredictionRecord, ReasonRecord, UsageEvent
from router_ext.wire.decoding import NotDecoded

log = structlog.get_logger(__name__)

SYNC_INTERVAL_S = 1.0
"""Group fsync: what a power cut (not a kill) may cost."""
_TICK_S = 0.2
MAX_OVERFLOW_EVENTS = 4_096


def now_us() -> int:
    """Microseconds since the Unix epoch."""
    return time.time_ns() // 1_000


def new_event_id(at_us: int) -> str:
    """A unique event id that sorts by its instant: ``evt_`` + 14 hex digits of time + 16 random ones."""
    return f"evt_{at_us:014x}{secrets.token_hex(8)}"


class _EventId(msgspec.Struct):
    event: str


class _EventEnd(msgspec.Struct):
    ended_at_us: int


def _event_id(payload: bytes) -> str:
    """Id of a spooled event; "" for a frame that checks and holds none (written by another program)."""
    try:
        return msgspec.json.decode(payload, type=_EventId).event
    except NotDecoded:
        return ""


class Ledger:
    """Begin, count and finish requests; read and acknowledge finished ones. Event loop's thread only.

    Attributes:
        directory: where the books are kept; ``move`` changes it.
        recovered: what ``open`` booked for requests that a killed predecessor left.
        n_finished: events booked since open (recovered ones apart).
        on_end: told of every slot that ends, in the turn in which it does: its event id, and the event that was
            booked or None if it was discarded.
        on_adopted: told of every event that ``append_from`` takes over.
    """

    def __init__(
        self, *, directory: Path, lock: FolderLock, table: InflightTable, spool: Spool, max_overflow_events: int
    ) -> None:
        self.directory = directory
        self.recovered: list[UsageEvent] = []
        self.n_finished = 0
        self.on_end: Callable[[str, UsageEvent | None], None] | None = None
        self.on_adopted: Callable[[bytes], None] | None = None
        self._lock = lock
        self._table = table
        self._spool = spool
        self._max_overflow_events = max_overflow_events
        self._overflow: deque[tuple[InflightSlot, bytes]] = deque()
        self._encode = msgspec.json.Encoder().encode
        self._appended = asyncio.Event()

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        now_us: int,
        max_spool_bytes: int = MAX_BYTES,
        max_running: int = 65_536,
        max_overflow_events: int = MAX_OVERFLOW_EVENTS,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> Ledger:
        """Open the router's folder and book what a killed predecessor left running.

        Raises:
            SettingsError: another process uses the folder.
            LedgerFull: the disk has no room to begin with.
        """
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FolderLock(directory / "router.lock", wait_s=lock_wait_s)
        spool = Spool(directory / "spool", max_bytes=max_spool_bytes)
        table = InflightTable(directory / "inflight.bin", max_records=max_running)
        ledger = cls(directory=directory, lock=lock, table=table, spool=spool, max_overflow_events=max_overflow_events)
        ledger._recover(now_us)
        table.touch(now_us)
        return ledger

    def _recover(self, at_us: int) -> None:
        left = self._table.recover(now_us=at_us)
        known: set[str] = set()
        if left:
            known = {_event_id(payload) for payload in self._spool.payloads()}
        for slot, event in left:
            if event.event in known:
                self._table.end(slot)
                continue
            self.recovered.append(event)
            self._book(slot, event)
        if self.recovered or self._table.n_damaged or self._table.replaced or self._spool.damaged_bytes:
            log.warning(
                "ledger.recovered",
                aborted=len(self.recovered),
                output_tokens=sum(event.output_tokens for event in self.recovered),
                damaged_records=self._table.n_damaged,
                damaged_bytes=self._spool.damaged_bytes,
                torn_bytes=self._spool.torn_bytes,
                replaced_table=str(self._table.replaced or ""),
            )

    # --- requests --------------------------------------------------------------------------------------------------

    def begin(self, start: RequestStart) -> InflightSlot:
        """Open the books for one request.

        Raises:
            LedgerFull: it could not be booked (disk and memory bounds reached); nothing may be served.
        """
        if len(self._overflow) >= self._max_overflow_events:
            raise LedgerFull("the router cannot keep its books at the moment")
        try:
            return self._table.begin(start)
        except LedgerFull as error:
            self._alarm("ledger.table_full", error.message)
            raise LedgerFull("the router cannot keep its books at the moment") from error

    def finish(
        self,
        slot: InflightSlot,
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
        """Book the request with the counters as they stand and free its slot. Never raises for a full disk.

        Raises:
            ValueError: the slot has ended before, or the outcome is none of ``inflight.OUTCOMES``.
        """
        if not slot.is_open:
            raise ValueError(f"slot of {slot.start.event} has ended before")
        if outcome not in OUTCOMES[1:]:
            raise ValueError(f"outcome {outcome!r} is none of {', '.join(OUTCOMES[1:])}")
        event = slot.event(
            outcome=outcome,
            ended_at_us=ended_at_us,
            finish_reason=finish_reason,
            resume_class=resume_class,
            backends=backends,
            error_code=error_code,
            explanation=explanation,
            reasons=reasons,
            timeline=timeline,
            prediction=prediction,
        )
        self._book(slot, event)
        self.n_finished += 1
        if self.on_end is not None:
            self.on_end(event.event, event)
        return event

    def discard(self, slot: InflightSlot) -> None:
        """Free the slot of a request that used no backend: it is not in the books."""
        self._table.end(slot)
        if self.on_end is not None:
            self.on_end(slot.start.event, None)

    def _book(self, slot: InflightSlot, event: UsageEvent) -> None:
        payload = self._encode(event)
        reason = ""
        if not self._overflow:
            try:
                self._spool.append(payload)
            except LedgerFull as error:
                reason = error.message
            else:
                self._table.end(slot)
                self._appended.set()
                return
        self._table.seal(slot, outcome=event.outcome, ended_at_us=event.ended_at_us)
        self._overflow.append((slot, payload))
        if len(self._overflow) == 1:
            self._alarm("ledger.spool_full", reason)

    def _alarm(self, event: str, reason: str) -> None:
        with contextlib.suppress(OSError):  # the log may be on the same full disk, and the books go first
            log.error(event, reason=reason, pending_events=self._spool.pending_events)

    def retry_overflow(self) -> None:
        """Move events that a full disk kept in memory into the spool, oldest first, as far as it takes them."""
        had_overflow = bool(self._overflow)
        while self._overflow:
            slot, payload = self._overflow[0]
            try:
                self._spool.append(payload)
            except LedgerFull:
                return
            self._table.end(slot)
            self._overflow.popleft()
            self._appended.set()
        if had_overflow:
            log.info("ledger.spool_recovered", pending_events=self._spool.pending_events)

    # --- reading ---------------------------------------------------------------------------------------------------

    @property
    def pending_events(self) -> int:
        """Ended requests the control plane has not acknowledged."""
        return self._spool.pending_events + len(self._overflow)

    @property
    def pending_bytes(self) -> int:
        """Disk taken by the spool."""
        return self._spool.total_bytes

    @property
    def overflow_events(self) -> int:
        """Ended requests the disk has not taken: not 0 is an alarm."""
        return len(self._overflow)

    @property
    def damaged_bytes(self) -> int:
        """Bytes of the spool that could not be read (kept in ``spool/damaged``): not 0 is an alarm."""
        return self._spool.damaged_bytes

    def lag_s(self, now_us: int) -> float:
        """Age of the oldest ended request that was not acknowledged; 0 if all were. Reads the start of one segment."""
        payload = self._spool.oldest()
        if payload is None and self._overflow:
            payload = self._overflow[0][1]
        if payload is None:
            return 0.0
        try:
            ended_at_us = msgspec.json.decode(payload, type=_EventEnd).ended_at_us
        except NotDecoded:
            return 0.0  # no event: the control plane refuses it, and it is set aside
        return max(0.0, (now_us - ended_at_us) / 1e6)

    @property
    def running(self) -> int:
        """Open slots, events in overflow included."""
        return self._table.n_open

    def read_batch(self, *, max_events: int = 256) -> SpoolBatch | None:
        """The oldest ended requests as bytes, None if there are none; the same ones until ``ack``."""
        return self._spool.read_batch(max_events=max_events)

    def unsent(self) -> Iterator[bytes]:
        """Every event on disk or waiting for room there, oldest first: before the first ``ack`` none is acknowledged.

        Cost: reads the whole spool.
        """
        yield from self._spool.payloads()
        yield from [payload for _, payload in self._overflow]

    def ack(self, batch: SpoolBatch) -> None:
        """The control plane has this batch for good."""
        self._spool.ack(batch)
        if self._overflow:
            self.retry_overflow()

    def quarantine(self, payload: bytes) -> Path:
        """Keep an event that the control plane will not take in ``spool/damaged`` for the operator."""
        name = _event_id(payload) or hashlib.sha256(payload).hexdigest()
        return self._spool.quarantine(f"refused-{re.sub(r'[^0-9A-Za-z_-]', '_', name[:80])}.json", payload)

    async def wait_pending(self) -> None:
        """Return as soon as there is something to send."""
        while not self._spool.pending_events:
            self._appended.clear()
            await self._appended.wait()

    # --- generations -----------------------------------------------------------------------------------------------

    def move(self, directory: Path) -> None:
        """Keep the books in another folder of the same file system from here on, lock and all.

        No request begins or ends meanwhile, so a kill between two of the renames leaves an event in one of the two
        folders and its record in the other only if both say the same.
        """
        directory.mkdir(exist_ok=True, mode=0o700)
        self._spool.move(directory / "spool")
        self._table.move(directory / "inflight.bin")
        # Last: whoever gets the lock of the folder left behind finds no books in it.
        self._lock.move(directory / "router.lock")
        self.directory = directory

    def append_from(self, left: Ledger) -> SpoolBatch | None:
        """Append the oldest events that another ledger has not delivered; None if there are none.

        They are to be acknowledged there after ``sync``.

        Raises:
            LedgerFull: not all of them are here.
        """
        batch = left.read_batch()
        if batch is not None and not self._spool.has_room(sum(map(len, batch.payloads)), len(batch.payloads)):
            # One after the other, lest the first ones are appended again with every try.
            batch = left.read_batch(max_events=1)
        for payload in batch.payloads if batch is not None else ():
            self._spool.append(payload)
            self._appended.set()
            if self.on_adopted is not None:
                self.on_adopted(payload)
        return batch

    def sync(self) -> None:
        """Make what was booked before this call survive a power cut. Blocks; any thread.

        Raises:
            OSError: the disk refuses.
        """
        self._spool.sync()

    # --- upkeep ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Signs of life, group fsync in a worker thread, retries of a full disk. Until cancelled."""
        synced_at = time.monotonic()
        while True:
            self._table.touch(now_us())
            self.retry_overflow()
            if time.monotonic() - synced_at >= SYNC_INTERVAL_S:
                try:
                    await asyncio.to_thread(self._spool.sync)
                except OSError as error:
                    log.error("ledger.fsync_failed", reason=error.strerror)
                synced_at = time.monotonic()
            await asyncio.sleep(_TICK_S)

    def close(self) -> None:
        """Sync and close. Requests still running stay in the table and are booked as aborted at the next open."""
        self.retry_overflow()
        self._table.close()
        self._spool.close()
        self._lock.close()
