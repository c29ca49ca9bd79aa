"""Following by deltas: what comes, what is kept on disk, and what is done about a delta that fits nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router_ext.errors import SnapshotRefused
from router_ext.sync import saved_snapshot
from router_ext.sync.config_client import ConfigClient
from router_ext.sync.saved_snapshot import SavedSnapshot
from router_ext.wire.controlplane import ConfigSnapshot, TenantRecord, snapshot_digest
from router_ext.wire.deltas import difference
from tests.unit.sync.test_config_client import Engine, MakeSnapshot, engine, make_client, running, until

__all__ = ["engine", "make_client"]


@pytest.fixture
def revision(make_snapshot: MakeSnapshot) -> Callable[..., ConfigSnapshot]:
    """Revision ``number``, in which the first tenant has that weight."""

    def make(number: int, n_keys: int = 2) -> ConfigSnapshot:
        base = make_snapshot(number, n_keys=n_keys)
        tenants = [msgspec.structs.replace(base.tenants[0], weight=float(number)), *base.tenants[1:]]
        blank = msgspec.structs.replace(base, tenants=tenants, digest="")
        return msgspec.structs.replace(blank, digest=snapshot_digest(blank))

    return make


async def test_a_revision_that_follows_comes_as_a_delta_and_survives_a_restart(
    control_plane: Any,
    engine: Engine,
    make_client: Callable[[], ConfigClient],
    revision: Callable[..., ConfigSnapshot],
    tmp_path: Path,
) -> None:
    control_plane.revisions = []
    client = make_client()
    async with running(client):
        await control_plane.publish(revision(1))
        await until(lambda: client.applied_revision == 1)
        assert client.snapshot is not None
        kept = client.snapshot.keys[0]
        for number in (2, 3):
            await control_plane.publish(revision(number))
            await until(lambda number=number: client.applied_revision == number)
        assert client.snapshot == revision(3)
        assert client.snapshot.keys[0] is kept
        await until(lambda: SavedSnapshot(tmp_path).read().revision == 3)
    assert control_plane.answers == ["whole", "delta", "delta"]
    again = make_client()
    assert await again.load_saved()
    assert again.snapshot == revision(3)
    assert engine.applied == [1, 2, 3, 3]
    async with running(again):  # and goes on from there
        await control_plane.publish(revision(4, n_keys=3))
        await until(lambda: again.snapshot == revision(4, n_keys=3))
        await until(lambda: SavedSnapshot(tmp_path).read().revision == 4)
    assert control_plane.answers[-1] == "delta"


@pytest.mark.parametrize("fault", ["damaged", "gap"])
async def test_a_delta_that_leads_nowhere_is_made_up_for_by_the_whole(
    control_plane: Any,
    make_client: Callable[[], ConfigClient],
    revision: Callable[..., ConfigSnapshot],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    control_plane.revisions = []
    client = make_client()
    async with running(client):
        await control_plane.publish(revision(1))
        await until(lambda: client.applied_revision == 1)
        if fault == "damaged":
            control_plane.damage_next = True
        else:
            whole_way = control_plane._deltas_since
            monkeypatch.setattr(control_plane, "_deltas_since", lambda base: whole_way(base)[1:])
            control_plane.revisions.append(msgspec.json.encode(revision(2), order="deterministic"))
        await control_plane.publish(revision(3))
        await until(lambda: client.snapshot == revision(3))
        assert client.refused_revision is None
        monkeypatch.undo()
        await control_plane.publish(revision(4))
        await until(lambda: client.snapshot == revision(4))
    assert control_plane.answers == ["whole", "delta", "whole", "delta"]


async def test_after_a_refused_delta_the_next_one_goes_from_what_is_in_force(
    control_plane: Any, engine: Engine, make_client: Callable[[], ConfigClient], revision: Callable[..., ConfigSnapshot]
) -> None:
    control_plane.revisions = []
    engine.refuse = {2: SnapshotRefused("no")}
    client = make_client()
    async with running(client):
        await control_plane.publish(revision(1))
        await until(lambda: client.applied_revision == 1)
        await control_plane.publish(revision(2))
        await until(lambda: client.refused_revision == 2)
        await control_plane.wait_for(lambda: control_plane.polls[-1] == f'"{revision(2).digest}"')
        await control_plane.publish(revision(3))
        await until(lambda: client.snapshot == revision(3))
        assert client.refused_revision is None
    assert control_plane.answers == ["whole", "delta", "delta"]


async def test_an_older_control_plane_sends_the_whole_and_unchanged_records_stay(
    control_plane: Any, make_client: Callable[[], ConfigClient], revision: Callable[..., ConfigSnapshot]
) -> None:
    client = make_client()
    async with running(client):
        await control_plane.publish(revision(1))
        await until(lambda: client.applied_revision == 1)
        assert client.snapshot is not None
        before: list[TenantRecord] = client.snapshot.tenants
        await control_plane.publish(revision(2))
        await until(lambda: client.applied_revision == 2)
        assert [a is b for a, b in zip(before, client.snapshot.tenants, strict=True)] == [False, True, True]
    assert control_plane.answers == ["whole", "whole"]


def saved_chain(folder: Path, revision: Callable[..., ConfigSnapshot]) -> SavedSnapshot:
    bodies = [msgspec.json.encode(revision(number), order="deterministic") for number in (1, 2, 3)]
    saved = SavedSnapshot(folder)
    saved.write(bodies[0])
    for old, new in ((bodies[0], bodies[1]), (bodies[1], bodies[2])):
        saved.append([msgspec.json.encode(difference(old, new), order="deterministic")])
    return saved


def test_a_copy_cut_anywhere_is_one_of_its_revisions(tmp_path: Path, revision: Callable[..., ConfigSnapshot]) -> None:
    saved_chain(tmp_path, revision)
    lines = (tmp_path / "snapshot.deltas").read_bytes()
    seen = []
    for length in range(len(lines) + 1):
        (tmp_path / "snapshot.deltas").write_bytes(lines[:length])
        seen.append(SavedSnapshot(tmp_path).read().revision)
    assert seen == sorted(seen)
    assert set(seen) == {1, 2, 3}


def test_what_is_added_after_a_torn_line_is_found_again(
    tmp_path: Path, revision: Callable[..., ConfigSnapshot]
) -> None:
    saved_chain(tmp_path, revision)
    path = tmp_path / "snapshot.deltas"
    path.write_bytes(path.read_bytes()[:-7])
    saved = SavedSnapshot(tmp_path)
    assert saved.read().revision == 2
    old, new = (msgspec.json.encode(revision(number), order="deterministic") for number in (2, 4))
    saved.append([msgspec.json.encode(difference(old, new), order="deterministic")])
    assert SavedSnapshot(tmp_path).read() == revision(4)


def test_deltas_of_an_older_whole_are_not_used(tmp_path: Path, revision: Callable[..., ConfigSnapshot]) -> None:
    saved_chain(tmp_path, revision)
    lines = (tmp_path / "snapshot.deltas").read_bytes()
    newer = msgspec.json.encode(revision(2), order="deterministic")
    SavedSnapshot(tmp_path).write(newer)
    assert not (tmp_path / "snapshot.deltas").exists()
    # Killed between the two: the whole is there, and the lines that went to another revision 3 still are.
    (tmp_path / "snapshot.deltas").write_bytes(lines)
    assert SavedSnapshot(tmp_path).read() == revision(2)


def test_what_the_disk_did_not_take_is_added_with_the_next(
    tmp_path: Path, revision: Callable[..., ConfigSnapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [msgspec.json.encode(revision(number), order="deterministic") for number in (1, 2, 3)]
    saved = SavedSnapshot(tmp_path)
    saved.write(bodies[0])

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saved_snapshot.os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            saved.append([msgspec.json.encode(difference(bodies[0], bodies[1]), order="deterministic")])
    saved.append([msgspec.json.encode(difference(bodies[1], bodies[2]), order="deterministic")])
    assert SavedSnapshot(tmp_path).read() == revision(3)
