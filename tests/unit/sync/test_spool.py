from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from router_ext.errors import LedgerFull
from router_ext.sync.spool import Spool

EVENTS = [b'{"event":"evt_%d","text":"%s"}' % (i, b"x" * (7 * i % 23)) for i in range(6)]


def drain(spool: Spool, **limits: int) -> list[bytes]:
    """Everything pending, acknowledged batch by batch."""
    found: list[bytes] = []
    while (batch := spool.read_batch(**limits)) is not None:
        found += batch.payloads
        spool.ack(batch)
    return found


def forget(spool: Spool) -> None:
    """Leave a spool as a killed process does: nothing written, nothing synced, the file closed by the kernel."""
    os.close(spool._fd)


def segment_of(directory: Path, events: list[bytes]) -> bytes:
    spool = Spool(directory)
    for event in events:
        spool.append(event)
    forget(spool)
    [path] = directory.glob("*.seg")
    return path.read_bytes()


def test_events_come_back_in_order_and_as_the_same_bytes(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for event in EVENTS:
        spool.append(event)
    assert spool.pending_events == len(EVENTS)
    assert drain(spool, max_events=4) == EVENTS
    assert spool.pending_events == 0
    assert spool.read_batch() is None


def test_a_batch_is_read_again_until_acknowledged(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for event in EVENTS:
        spool.append(event)
    first = spool.read_batch(max_events=2)
    again = spool.read_batch(max_events=2)
    assert first is not None
    assert first == again
    spool.ack(first)
    with pytest.raises(ValueError, match="acknowledged next"):
        spool.ack(first)
    assert drain(spool) == EVENTS[2:]


def test_a_batch_is_bounded_by_bytes_but_never_empty(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    events = [b"a" * 400_000, b"b" * 100, b"c" * 100]
    for event in events:
        spool.append(event)
    batch = spool.read_batch(max_bytes=150)
    assert batch is not None
    assert batch.payloads == events[:1]
    spool.ack(batch)
    batch = spool.read_batch(max_bytes=150)
    assert batch is not None
    assert batch.payloads == events[1:2]


def test_a_tail_torn_at_any_byte_loses_only_the_torn_event(tmp_path: Path) -> None:
    whole = segment_of(tmp_path / "whole", EVENTS)
    ends = [len(segment_of(tmp_path / f"prefix{n}", EVENTS[:n])) for n in range(len(EVENTS) + 1)]
    assert ends[-1] == len(whole)
    for cut in range(len(whole)):
        directory = tmp_path / f"cut{cut}"
        directory.mkdir()
        (directory / "0000000000000001.seg").write_bytes(whole[:cut])
        n_whole = sum(end <= cut for end in ends[1:])
        spool = Spool(directory)
        assert spool.pending_events == n_whole
        spool.append(b'{"event":"after"}')
        forget(spool)
        spool = Spool(directory)
        assert list(spool.payloads()) == [*EVENTS[:n_whole], b'{"event":"after"}'], cut
        forget(spool)


def test_a_tail_of_zeros_after_a_power_cut_is_cut_off(tmp_path: Path) -> None:
    whole = segment_of(tmp_path / "whole", EVENTS)
    directory = tmp_path / "spool"
    directory.mkdir()
    (directory / "0000000000000001.seg").write_bytes(whole + bytes(5_000))
    spool = Spool(directory)
    assert spool.torn_bytes == 5_000
    assert not (directory / "damaged").exists()
    assert drain(spool) == EVENTS


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_a_damaged_byte_loses_only_its_own_event_and_its_bytes_are_kept(tmp_path: Path, flip: int) -> None:
    whole = segment_of(tmp_path / "whole", EVENTS)
    ends = [len(segment_of(tmp_path / f"prefix{n}", EVENTS[:n])) for n in range(len(EVENTS) + 1)]
    following = segment_of(tmp_path / "following", [b'{"event":"n"}'])
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= flip
        directory = tmp_path / f"flip{position}"
        directory.mkdir()
        (directory / "0000000000000001.seg").write_bytes(damaged)
        # Not the newest segment, so that the damage is not taken for a torn tail.
        (directory / "0000000000000002.seg").write_bytes(following)
        hit = next((n for n in range(len(EVENTS)) if ends[n] <= position < ends[n + 1]), None)
        expected = [event for n, event in enumerate(EVENTS) if n != hit] + [b'{"event":"n"}']
        spool = Spool(directory)
        assert spool.pending_events == len(expected)
        assert drain(spool) == expected, position
        kept = b"".join(path.read_bytes() for path in sorted((directory / "damaged").iterdir()))
        assert spool.damaged_bytes == len(kept)
        assert bytes(damaged[position : position + 1]) in kept
        forget(spool)


def test_acknowledged_segments_are_removed_and_the_rest_survives_a_restart(tmp_path: Path) -> None:
    events = [b'{"event":"%04d"}' % i + b" " * 84 for i in range(100)]
    spool = Spool(tmp_path, segment_bytes=1_000)
    for event in events:
        spool.append(event)
    assert len(list(tmp_path.glob("*.seg"))) > 10
    done: list[bytes] = []
    while len(done) < 50:
        batch = spool.read_batch(max_events=3)
        assert batch is not None
        done += batch.payloads
        spool.ack(batch)
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*.seg"))
    assert spool.total_bytes == on_disk
    assert on_disk < 60 * 112
    forget(spool)
    reopened = Spool(tmp_path, segment_bytes=1_000)
    rest = drain(reopened)
    assert rest[-50:] == events[50:]
    assert len(rest) < 50 + 9  # at most the acknowledged part of one segment comes again
    assert events[-len(rest) :] == rest


def test_a_wholly_acknowledged_spool_takes_no_space_and_goes_on(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for i in range(200):
        spool.append(b"%04d" % i + b"y" * 996)
    drain(spool)
    assert spool.total_bytes < 100
    spool.append(b"next")
    assert drain(spool) == [b"next"]
    spool.close()
    assert not list(tmp_path.glob("*.seg"))


def test_the_bound_refuses_and_an_acknowledgement_makes_room(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=5_000, segment_bytes=1_000)
    n_taken = 0
    while spool.total_bytes + 112 <= 5_000:
        spool.append(b"z" * 100)
        n_taken += 1
    with pytest.raises(LedgerFull, match="bound is 5000"):
        spool.append(b"z" * 100)
    assert spool.total_bytes <= 5_000
    assert spool.pending_events == n_taken
    batch = spool.read_batch(max_events=20)
    assert batch is not None
    spool.ack(batch)
    spool.append(b"room again")
    assert drain(spool)[-1] == b"room again"


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """The kernel writes no file beyond this size: a short write first, then EFBIG, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


def test_a_full_disk_refuses_whole_events_and_leaves_no_part_of_one(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    n_taken = 0
    with largest_file(1_234):
        for _ in range(100):
            try:
                spool.append(b"w" * 100)
            except LedgerFull:
                break
            n_taken += 1
        with pytest.raises(LedgerFull, match="cannot write"):
            spool.append(b"w" * 100)
    assert n_taken == (1_234 - 8) // 112
    spool.append(b"after")
    reopened = Spool(tmp_path)
    assert drain(reopened) == [b"w" * 100] * n_taken + [b"after"]
    assert reopened.torn_bytes == reopened.damaged_bytes == 0


def test_syncing_in_a_thread_while_appending_and_rotating_loses_nothing(tmp_path: Path) -> None:
    spool = Spool(tmp_path, segment_bytes=2_000)
    stop = threading.Event()

    def sync() -> None:
        while not stop.is_set():
            spool.sync()

    thread = threading.Thread(target=sync)
    thread.start()
    events = [b"%06d" % i for i in range(2_000)]
    for event in events:
        spool.append(event)
    stop.set()
    thread.join()
    assert drain(spool) == events
    spool.close()


KILLED_WRITER = """
import sys
from pathlib import Path
from router_ext.sync.spool import Spool
spool = Spool(Path(sys.argv[1]), segment_bytes=20_000)
n = 0
while True:
    spool.append(b'{"event":"%09d"}' % n)
    n += 1
    sys.stdout.buffer.write(b"x")
    sys.stdout.buffer.flush()
"""


def test_events_appended_before_a_real_kill_are_all_there(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", KILLED_WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    n_told = len(writer.stdout.read(3_000))
    writer.kill()
    n_told += len(writer.stdout.read())
    writer.wait()
    writer.stdout.close()
    found = drain(Spool(tmp_path))
    assert found == [b'{"event":"%09d"}' % n for n in range(len(found))]
    assert n_told <= len(found) <= n_told + 1
