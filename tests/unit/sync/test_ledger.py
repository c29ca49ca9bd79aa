from __future__ import annotations

import asyncio
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from router_ext.errors import LedgerFull
from router_ext.sync.inflight import OUTPUT_TOKENS, InflightTable, RequestStart
from router_ext.sync.ledger import Ledger, new_event_id
from router_ext.sync.spool import Spool
from router_ext.wire.controlplane import UsageEvent

Start = Callable[..., RequestStart]


def events_of(ledger: Ledger) -> list[UsageEvent]:
    found: list[UsageEvent] = []
    while (batch := ledger.read_batch()) is not None:
        found += [msgspec.json.decode(payload, type=UsageEvent) for payload in batch.payloads]
        ledger.ack(batch)
    return found


async def test_a_finished_request_is_in_the_spool_and_nowhere_else(ledger: Ledger, start: Start) -> None:
    slot = ledger.begin(start(1))
    slot.words[OUTPUT_TOKENS] = 12
    event = ledger.finish(slot, outcome="completed", ended_at_us=2_000_000_000_000_000, backends=["bke_1"])
    assert event.output_tokens == 12
    assert not slot.is_open
    assert ledger.running == 0
    assert events_of(ledger) == [event]


async def test_a_slot_ends_once(ledger: Ledger, start: Start) -> None:
    slot = ledger.begin(start(1))
    with pytest.raises(ValueError, match="none of"):
        ledger.finish(slot, outcome="vanished", ended_at_us=1)
    assert slot.is_open
    ledger.discard(slot)
    with pytest.raises(ValueError, match="ended before"):
        ledger.finish(slot, outcome="completed", ended_at_us=1)
    with pytest.raises(ValueError, match="ended before"):
        ledger.discard(slot)
    assert events_of(ledger) == []


async def test_a_kill_between_spooling_and_freeing_the_slot_books_once(tmp_path: Path, start: Start) -> None:
    """What such a kill leaves: the event in the spool, and its record still open."""
    table = InflightTable(tmp_path / "inflight.bin")
    slot = table.begin(start(1))
    slot.words[OUTPUT_TOKENS] = 4
    spool = Spool(tmp_path / "spool")
    event = slot.event(outcome="completed", ended_at_us=1_800_000_000_000_000)
    spool.append(msgspec.json.encode(event))
    other = table.begin(start(2))
    other.words[OUTPUT_TOKENS] = 1
    table.close()

    ledger = Ledger.open(tmp_path, now_us=1)
    assert [recovered.event for recovered in ledger.recovered] == ["evt_00000002"]
    assert [(e.event, e.outcome, e.output_tokens) for e in events_of(ledger)] == [
        ("evt_00000001", "completed", 4),
        ("evt_00000002", "aborted", 1),
    ]
    assert ledger.running == 0
    ledger.close()
    again = Ledger.open(tmp_path, now_us=1)
    assert again.recovered == []
    again.close()


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


async def test_a_full_disk_keeps_every_ended_request_and_then_refuses_new_ones(tmp_path: Path, start: Start) -> None:
    ledger = Ledger.open(tmp_path, now_us=1, max_overflow_events=5)
    ends = []
    with largest_file(1_000):
        for number in range(50):
            try:
                slot = ledger.begin(start(number))
            except LedgerFull as error:
                refusal = error
                break
            slot.words[OUTPUT_TOKENS] = number + 1
            ends.append(ledger.finish(slot, outcome="completed", ended_at_us=1_800_000_000_000_000))
        assert refusal.status_openai == 503
        assert str(tmp_path) not in refusal.message
        assert ledger.overflow_events == 5
        assert ledger.pending_events == len(ends) < 50
    ledger.retry_overflow()
    assert ledger.overflow_events == 0
    assert events_of(ledger) == ends
    ledger.discard(ledger.begin(start(99)))
    ledger.close()


async def test_events_a_full_disk_kept_in_memory_survive_a_kill_with_their_outcome(
    tmp_path: Path, start: Start
) -> None:
    ledger = Ledger.open(tmp_path, now_us=1)
    with largest_file(10):
        slot = ledger.begin(start(1))
        slot.words[OUTPUT_TOKENS] = 8
        ledger.finish(slot, outcome="cancelled", ended_at_us=1_800_000_000_000_000)
        assert ledger.overflow_events == 1
    # The predecessor is not closed: the lock is per process, so this process may open its folder again.
    successor = Ledger.open(tmp_path, now_us=1)
    [event] = events_of(successor)
    assert (event.outcome, event.output_tokens, event.ended_at_us) == ("cancelled", 8, 1_800_000_000_000_000)
    assert event.error_code is None
    successor.close()


async def test_order_is_kept_while_the_overflow_drains(tmp_path: Path, start: Start) -> None:
    ledger = Ledger.open(tmp_path, now_us=1, max_spool_bytes=3_000)
    ends = []
    for number in range(12):
        slot = ledger.begin(start(number))
        slot.words[OUTPUT_TOKENS] = 1
        ends.append(ledger.finish(slot, outcome="completed", ended_at_us=1_800_000_000_000_000).event)
    assert ledger.overflow_events > 0
    assert [event.event for event in events_of(ledger)] == ends
    ledger.close()


def test_two_processes_never_share_a_folder(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path, now_us=1)
    code = (
        "import sys; from pathlib import Path; from router_ext.errors import SettingsError\n"
        "from router_ext.sync.spool import FolderLock\n"
        "try: FolderLock(Path(sys.argv[1]), wait_s=0.1)\n"
        "except SettingsError as error: print(error.message)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "router.lock")]
    assert "another router process" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ledger.close()
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""


async def test_waiting_for_events_ends_when_one_is_booked(
    ledger: Ledger, book: Callable[[int, int], UsageEvent]
) -> None:
    waiter = asyncio.ensure_future(ledger.wait_pending())
    await asyncio.sleep(0)
    assert not waiter.done()
    book(1, 3)
    await asyncio.wait_for(waiter, 5)


async def test_upkeep_leaves_a_sign_of_life_and_moves_the_overflow(tmp_path: Path, start: Start) -> None:
    ledger = Ledger.open(tmp_path, now_us=1)
    with largest_file(10):
        slot = ledger.begin(start(1))
        slot.words[OUTPUT_TOKENS] = 8
        ledger.finish(slot, outcome="completed", ended_at_us=1_800_000_000_000_000)
    upkeep = asyncio.create_task(ledger.run())
    await asyncio.wait_for(ledger.wait_pending(), 5)
    upkeep.cancel()
    await asyncio.gather(upkeep, return_exceptions=True)
    assert ledger.overflow_events == 0
    ledger.close()
    assert InflightTable(tmp_path / "inflight.bin").alive_at_us > 1_600_000_000_000_000


def test_event_ids_are_unique_and_sort_by_time() -> None:
    ids = [new_event_id(1_700_000_000_000_000 + i) for i in range(1_000)]
    assert ids == sorted(ids)
    assert len({new_event_id(5) for _ in range(1_000)}) == 1_000
