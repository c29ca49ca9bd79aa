"""Books of a router that was replaced: kept apart while it lives, taken over exactly once when it has ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from router_ext.errors import SettingsError
from router_ext.sync.generations import adopt_books, is_alive, leaving_folder, leaving_folders
from router_ext.sync.inflight import OUTPUT_TOKENS, RequestStart
from router_ext.sync.ledger import Ledger, now_us
from router_ext.wire.controlplane import UsageEvent

Start = Callable[..., RequestStart]

HOLD = """
import sys, pathlib
from router_ext.sync.ledger import Ledger
ledger = Ledger.open(pathlib.Path(sys.argv[1]), now_us=1)
ledger.move(pathlib.Path(sys.argv[2]))
print("moved", flush=True)
sys.stdin.read()
"""


def finish(ledger: Ledger, start: RequestStart, tokens: int) -> None:
    slot = ledger.begin(start)
    slot.words[OUTPUT_TOKENS] = tokens
    ledger.finish(slot, outcome="completed", ended_at_us=now_us())


def events_in(ledger: Ledger) -> list[tuple[str, str, int]]:
    batch = ledger.read_batch(max_events=100)
    events = [msgspec.json.decode(each, type=UsageEvent) for each in (batch.payloads if batch else ())]
    return [(event.event, event.outcome, event.output_tokens) for event in events]


async def test_books_go_on_where_they_were_moved_and_are_adopted_once(tmp_path: Path, start: Start) -> None:
    old = Ledger.open(tmp_path, now_us=1)
    finish(old, start(1), 11)
    running = old.begin(start(2))
    running.words[OUTPUT_TOKENS] = 22
    old.move(leaving_folder(tmp_path))
    new = Ledger.open(tmp_path, now_us=1)
    assert new.recovered == []
    finish(new, start(3), 33)
    finish(old, start(4), 44)
    running.words[OUTPUT_TOKENS] = 23
    old.close()  # with one that runs: as a kill leaves it

    taken: list[bytes] = []
    new.on_adopted = taken.append
    assert await adopt_books(new, tmp_path) == 3
    assert sorted(msgspec.json.decode(each)["output_tokens"] for each in taken) == [11, 23, 44]
    expected = [
        ("evt_00000001", "completed", 11),
        ("evt_00000002", "aborted", 23),
        ("evt_00000003", "completed", 33),
        ("evt_00000004", "completed", 44),
    ]
    assert sorted(events_in(new)) == expected
    assert leaving_folders(tmp_path) == []
    assert await adopt_books(new, tmp_path) == 0
    new.close()


async def test_what_was_delivered_is_not_adopted_and_what_is_damaged_is_kept(tmp_path: Path, start: Start) -> None:
    old = Ledger.open(tmp_path, now_us=1)
    old.move(leaving_folder(tmp_path))
    for number in (1, 2):
        finish(old, start(number), number)
    batch = old.read_batch(max_events=1)
    assert batch is not None
    old.quarantine(batch.payloads[0])
    old.ack(batch)
    # While it lives only its own process may go on with the rest; the last acknowledgement counts there alone.
    left = old.read_batch()
    assert left is not None
    old.ack(left)
    old.close()
    new = Ledger.open(tmp_path, now_us=1)
    assert await adopt_books(new, tmp_path) == 0
    assert [path.name for path in (tmp_path / "spool" / "damaged").iterdir()] != []
    new.close()


async def test_a_full_spool_leaves_the_rest_for_later(tmp_path: Path, start: Start) -> None:
    old = Ledger.open(tmp_path, now_us=1)
    old.move(leaving_folder(tmp_path))
    for number in range(1, 41):
        finish(old, start(number), number)
    old.close()
    new = Ledger.open(tmp_path, now_us=1, max_spool_bytes=8_192)
    seen: list[str] = []
    adopting = asyncio.create_task(adopt_books(new, tmp_path))
    while not adopting.done() or new.pending_events:
        await asyncio.sleep(0.01)
        while batch := new.read_batch():
            seen += [msgspec.json.decode(each, type=UsageEvent).event for each in batch.payloads]
            new.ack(batch)
    new.close()
    assert sorted(seen) == [f"evt_{number:08d}" for number in range(1, 41)]
    assert leaving_folders(tmp_path) == []


async def test_books_of_a_living_process_are_left_alone(tmp_path: Path) -> None:
    folder = leaving_folder(tmp_path)
    with subprocess.Popen(  # noqa: ASYNC220 - nothing else runs in this loop
        [sys.executable, "-c", HOLD, str(tmp_path), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"moved\n"
        with pytest.raises(SettingsError, match="another router process"):
            Ledger.open(folder, now_us=1, lock_wait_s=0.0)
        assert is_alive(folder)
        new = Ledger.open(tmp_path, now_us=1, lock_wait_s=0.0)
        assert await adopt_books(new, tmp_path) == 0
        assert folder.exists()
        process.kill()
        process.wait()
        assert not is_alive(folder)
        assert await adopt_books(new, tmp_path) == 0
        assert not folder.exists()
        new.close()
