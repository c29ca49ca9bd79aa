"""Saved counters: whole or not at all, and never a reason not to start."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from router_ext.sync import counters as module
from router_ext.sync.counters import CountersFile

POOLS = {"pol_a": {"version": 1, "tenants": {"ten_1": {"ahead": 12.5}}}, "pol_b": {"version": 1, "tenants": {}}}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "counters.json"
    CountersFile(path).write(POOLS)
    found = CountersFile(path)
    assert found.pools == POOLS
    assert found.take("pol_a") == POOLS["pol_a"]
    assert found.take("pol_a") is None


def test_there_may_be_nothing_yet(tmp_path: Path) -> None:
    assert CountersFile(tmp_path / "none" / "counters.json").pools == {}


def test_what_nobody_has_taken_is_kept(tmp_path: Path) -> None:
    """A router that dies before its control plane has answered."""
    path = tmp_path / "counters.json"
    CountersFile(path).write(POOLS)
    second = CountersFile(path)
    assert second.take("pol_b") is not None
    second.write({})
    assert CountersFile(path).pools == {"pol_a": POOLS["pol_a"]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[1]",
        b"\xff\xfe",
        b'{"version":1}',
        b'{"version":2,"pools":{}}',
        b'{"version":1,"pools":[]}',
        b'{"version":1,"pools":{"pol_a":NaN}}',
        b'{"version":1,"pools":{"pol_a":' + b"[" * 200_000,
        b'{"version":1,"pools":{"pol_a":{"version":1,"tenants":{"ten_1":{"ahe',
    ],
    ids=["empty", "torn", "null", "list", "binary", "no pools", "version", "shape", "nan", "deep", "cut"],
)
def test_a_damaged_file_is_reported_and_ignored(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "counters.json"
    path.write_bytes(content)
    with capture_logs() as logs:
        found = CountersFile(path)
    assert found.pools == {}
    assert [entry["event"] for entry in logs] == ["counters.unreadable"]
    found.write(POOLS)
    assert CountersFile(path).pools == POOLS


def test_a_huge_file_and_a_folder_are_reported_and_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "counters.json"
    CountersFile(path).write(POOLS)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 10)
    assert CountersFile(path).pools == {}
    assert CountersFile(tmp_path).pools == {}


def test_a_disk_that_takes_nothing_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    counters = CountersFile(tmp_path / "file" / "counters.json")
    with capture_logs() as logs:
        counters.write(POOLS)
    assert [entry["event"] for entry in logs] == ["counters.not_saved"]


def test_a_write_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "counters.json"
    counters = CountersFile(path)
    counters.write(POOLS)
    before = path.read_bytes()

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", full)
        counters.write({"pol_a": {}})
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["counters.json"]
    counters.write({"pol_a": {}})
    assert CountersFile(path).pools == {"pol_a": {}}


def test_nothing_changed_is_nothing_written(tmp_path: Path) -> None:
    path = tmp_path / "counters.json"
    counters = CountersFile(path)
    counters.write(POOLS)
    inode = path.stat().st_ino
    counters.write(dict(POOLS))
    assert path.stat().st_ino == inode


def test_a_late_writer_does_not_undo_the_last_state(tmp_path: Path) -> None:
    """A worker thread's write may still be on its way when the process ends."""
    path = tmp_path / "counters.json"
    counters = CountersFile(path)
    counters.write(POOLS, is_last=True)
    thread = threading.Thread(target=counters.write, args=({"pol_a": {}},))
    thread.start()
    thread.join()
    assert CountersFile(path).pools == POOLS
