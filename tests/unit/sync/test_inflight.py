from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from router_ext.errors import LedgerFull
from router_ext.sync.inflight import (
    CHUNK_RECORDS,
    FIRST_DISPATCH_US,
    FIRST_TOKEN_US,
    HEADER_BYTES,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    RECOMPUTED_TOKENS,
    RECORD_BYTES,
    InflightTable,
    RequestStart,
)
from router_ext.sync.ledger import Ledger
from router_ext.wire.controlplane import UsageEvent

Start = Callable[..., RequestStart]


def test_a_record_left_open_is_booked_as_aborted_with_its_counters(tmp_path: Path, start: Start) -> None:
    table = InflightTable(tmp_path / "inflight.bin")
    slot = table.begin(start(7, max_new_tokens=64, predicted_tokens=50, predictor="art_1"))
    slot.words[FIRST_DISPATCH_US] = 1_700_000_000_100_000
    slot.words[FIRST_TOKEN_US] = 1_700_000_000_200_000
    slot.words[PROMPT_TOKENS] = 11
    slot.words[OUTPUT_TOKENS] = 5
    slot.words[RECOMPUTED_TOKENS] = 2
    table.touch(1_700_000_000_300_000)
    table.close()

    [(_, event)] = InflightTable(tmp_path / "inflight.bin").recover(now_us=1_700_000_009_000_000)
    assert event == UsageEvent(
        event="evt_00000007",
        request="req_00000007",
        router="rtr_test",
        tenant="ten_1",
        key="key_1",
        pool="pool_1",
        model="SmolLM2-135M-Instruct",
        tier="interactive",
        dialect="generate_stream",
        outcome="aborted",
        arrived_at_us=1_700_000_000_000_007,
        ended_at_us=1_700_000_000_300_000,
        first_dispatch_us=1_700_000_000_100_000,
        first_token_us=1_700_000_000_200_000,
        prompt_tokens=11,
        output_tokens=5,
        recomputed_tokens=2,
        max_new_tokens=64,
        predicted_tokens=50,
        predictor="art_1",
        error_code="router_killed",
    )


def test_a_request_that_used_no_backend_leaves_nothing(tmp_path: Path, start: Start) -> None:
    table = InflightTable(tmp_path / "inflight.bin")
    table.begin(start(1))
    table.close()
    assert InflightTable(tmp_path / "inflight.bin").recover(now_us=1) == []


def test_an_ended_slot_is_reused_from_zero_and_takes_no_late_store(tmp_path: Path, start: Start) -> None:
    table = InflightTable(tmp_path / "inflight.bin")
    slot = table.begin(start(1))
    index, words = slot.index, slot.words
    words[OUTPUT_TOKENS] = 9
    table.end(slot)
    with pytest.raises(ValueError, match="released"):
        words[OUTPUT_TOKENS] = 10
    with pytest.raises(ValueError, match="ended before"):
        table.end(slot)
    following = table.begin(start(2))
    assert following.index == index
    assert following.words[OUTPUT_TOKENS] == 0
    assert table.n_open == 1


def test_the_table_grows_and_refuses_beyond_its_bound(tmp_path: Path, start: Start) -> None:
    table = InflightTable(tmp_path / "inflight.bin", max_records=2 * CHUNK_RECORDS)
    slots = []
    for number in range(2 * CHUNK_RECORDS):
        slot = table.begin(start(number))
        slot.words[OUTPUT_TOKENS] = number + 1
        slots.append(slot)
    with pytest.raises(LedgerFull, match="2048"):
        table.begin(start(1))
    table.end(slots.pop(500))
    slots.append(table.begin(start(9_999)))
    slots[-1].words[OUTPUT_TOKENS] = 77
    table.close()
    found = {event.event: event.output_tokens for _, event in InflightTable(table.path).recover(now_us=1)}
    expected = {f"evt_{number:08d}": number + 1 for number in range(2 * CHUNK_RECORDS) if number != 500}
    assert found == expected | {"evt_00009999": 77}


def test_a_torn_start_record_is_counted_and_freed_and_spoils_no_other(tmp_path: Path, start: Start) -> None:
    table = InflightTable(tmp_path / "inflight.bin")
    for number in range(3):
        table.begin(start(number)).words[OUTPUT_TOKENS] = 1
    table.close()
    with table.path.open("r+b") as file:
        file.seek(HEADER_BYTES + RECORD_BYTES + 128 + 20)
        file.write(b"\xff")
    reopened = InflightTable(table.path)
    assert [event.event for _, event in reopened.recover(now_us=1)] == ["evt_00000000", "evt_00000002"]
    assert reopened.n_damaged == 1
    reopened.close()
    again = InflightTable(table.path)
    assert len(again.recover(now_us=1)) == 2
    assert again.n_damaged == 0


@pytest.mark.parametrize(
    "head", [b"GIF89a" + bytes(5000), b"FLINFLT1" + struct.pack("=II", 99, 1024) + bytes(5000), b"short"]
)
def test_a_foreign_file_is_moved_aside_not_read(tmp_path: Path, start: Start, head: bytes) -> None:
    path = tmp_path / "inflight.bin"
    path.write_bytes(head)
    table = InflightTable(path)
    assert table.replaced is not None
    assert table.replaced.read_bytes() == head
    assert table.recover(now_us=1) == []
    table.begin(start(1))


@pytest.mark.parametrize("size", [0, 100, HEADER_BYTES])
def test_a_file_whose_creation_was_cut_off_is_completed(tmp_path: Path, start: Start, size: int) -> None:
    path = tmp_path / "inflight.bin"
    path.write_bytes(bytes(size))
    table = InflightTable(path)
    table.begin(start(1)).words[OUTPUT_TOKENS] = 3
    table.close()
    reopened = InflightTable(path)
    assert reopened.replaced is None
    assert [event.output_tokens for _, event in reopened.recover(now_us=1)] == [3]


def test_long_texts_are_cut_in_the_record_but_identifiers_never(tmp_path: Path, start: Start) -> None:
    table = InflightTable(tmp_path / "inflight.bin")
    slot = table.begin(start(1, model="m" * 5_000, request="r" * 5_000))
    slot.words[OUTPUT_TOKENS] = 1
    assert slot.event(outcome="completed", ended_at_us=1).model == "m" * 5_000
    with pytest.raises(ValueError, match="896 bytes"):
        table.begin(start(2, tenant="t" * 5_000))
    table.close()
    [(_, event)] = InflightTable(table.path).recover(now_us=1)
    assert (event.event, event.tenant, event.model) == ("evt_00000001", "ten_1", "m" * 32)


ROUTER = """
import os, random, sys
from pathlib import Path
from router_ext.sync.inflight import FIRST_DISPATCH_US, OUTPUT_TOKENS, PROMPT_TOKENS, RequestStart
from router_ext.sync.ledger import Ledger, new_event_id, now_us

folder, seed, client = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
ledger = Ledger.open(folder, now_us=now_us())
running = []
number = 0
while True:
    while len(running) < 40:
        number += 1
        event = f"evt_{seed:04d}_{number:08d}"
        slot = ledger.begin(RequestStart(
            event=event, request=event, router="rtr_1", tenant=f"ten_{number % 3}", key="key_1", pool="p", model="m",
            tier="t", dialect="d", arrived_at_us=now_us()))
        slot.words[FIRST_DISPATCH_US] = now_us()
        slot.words[PROMPT_TOKENS] = 10
        running.append((slot, event, rng.randint(1, 40)))
    at = rng.randrange(len(running))
    slot, event, length = running[at]
    slot.words[OUTPUT_TOKENS] += 1
    os.write(client, f"{event}\\n".encode())  # the client's connection
    if slot.words[OUTPUT_TOKENS] == length:
        ledger.finish(slot, outcome="completed", ended_at_us=now_us(), finish_reason="eos_token")
        os.write(client, f"{event} end\\n".encode())
        del running[at]
"""


def test_a_killed_process_leaves_books_that_match_what_its_clients_received(tmp_path: Path) -> None:
    """Killed five times under load: ended requests exact, cut ones never below and at most one write above."""
    rng = random.Random(20261130)
    received: Counter[str] = Counter()
    ended: set[str] = set()
    n_cut = 0
    for seed in range(5):
        reading, writing = os.pipe()
        command = [sys.executable, "-c", ROUTER, str(tmp_path), str(seed), str(writing)]
        child = subprocess.Popen(command, pass_fds=[writing], stdout=subprocess.DEVNULL)
        os.close(writing)
        with os.fdopen(reading, "rb") as client:
            lines = client.read(rng.randint(100_000, 300_000))
            os.kill(child.pid, signal.SIGKILL)
            lines += client.read()
        assert child.wait() == -signal.SIGKILL
        for line in lines.decode().splitlines():
            event, _, is_end = line.partition(" ")
            if is_end:
                ended.add(event)
            else:
                received[event] += 1
    ledger = Ledger.open(tmp_path, now_us=1)
    booked: dict[str, UsageEvent] = {}
    while (batch := ledger.read_batch()) is not None:
        for payload in batch.payloads:
            event = msgspec.json.decode(payload, type=UsageEvent)
            assert event.event not in booked, "booked twice"
            booked[event.event] = event
        ledger.ack(batch)
    ledger.close()
    assert received.keys() <= booked.keys()
    assert ended <= booked.keys()
    for name, event in booked.items():
        if event.outcome == "completed":
            assert event.output_tokens == received[name]
        else:
            n_cut += 1
            assert event.outcome == "aborted"
            assert name not in ended
            assert received[name] <= event.output_tokens <= received[name] + 1
    assert len(ended) > 500
    assert n_cut > 5 * 35
