from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router_ext.core.config import ConfigError
from router_ext.errors import ArtifactRefused, SnapshotRefused
from router_ext.sync.config_client import ConfigClient
from router_ext.sync.session import ControlPlaneSession
from router_ext.sync.snapshot_file import decode_snapshot
from router_ext.wire.controlplane import (
    ArtifactRecord,
    ConfigSnapshot,
    GroupRecord,
    KeyRecord,
    OwnCancellation,
    PoolRecord,
    TenantRecord,
    TierRecord,
    snapshot_digest,
)

MakeSnapshot = Callable[..., ConfigSnapshot]


class Engine:
    """Applies revisions, refusing those it is told to."""

    def __init__(self) -> None:
        self.applied: list[int] = []
        self.refuse: dict[int, Exception] = {}
        self.artifacts: list[tuple[str, str, bytes]] = []
        self.refuses_artifacts = False
        self.changed = asyncio.Condition()

    async def apply(self, snapshot: ConfigSnapshot) -> None:
        if snapshot.revision in self.refuse:
            raise self.refuse[snapshot.revision]
        self.applied.append(snapshot.revision)

    async def on_artifact(self, pool: str, record: ArtifactRecord, data: bytes) -> None:
        if self.refuses_artifacts:
            raise ArtifactRefused("foreign")
        self.artifacts.append((pool, record.digest, data))


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def make_client(session: ControlPlaneSession, engine: Engine, tmp_path: Path) -> Callable[[], ConfigClient]:
    def make() -> ConfigClient:
        return ConfigClient(
            session,
            tmp_path,
            apply=engine.apply,
            on_artifact=engine.on_artifact,
            long_poll_s=60,
            rng=random.Random(1),
        )

    return make


@asynccontextmanager
async def running(client: ConfigClient) -> AsyncIterator[None]:
    task = asyncio.create_task(client.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - conditions of several objects, none with an event of its own
            await asyncio.sleep(0.005)


async def test_revisions_are_applied_as_they_are_published(
    control_plane: Any, engine: Engine, make_client: Callable[[], ConfigClient], make_snapshot: MakeSnapshot
) -> None:
    client = make_client()
    async with running(client):
        await control_plane.publish(make_snapshot(1))
        await asyncio.wait_for(client.wait_ready(), 10)
        first = make_snapshot(1).digest
        await control_plane.wait_for(lambda: control_plane.polls[-1] == f'"{first}"')
        await control_plane.publish(make_snapshot(2))
        # The held poll is answered by the change, long before its 60 s are over.
        await until(lambda: engine.applied == [1, 2])
    assert client.applied_revision == 2
    assert client.snapshot == make_snapshot(2)
    assert client.applied_at_us > 0


async def test_a_control_plane_that_was_restored_from_a_backup_is_followed_back(
    control_plane: Any,
    engine: Engine,
    make_client: Callable[[], ConfigClient],
    make_snapshot: MakeSnapshot,
    tmp_path: Path,
) -> None:
    """Its newest revision is an older one, and numbers come again with other contents."""
    client, other = make_client(), make_snapshot(8, n_keys=5)
    async with running(client):
        await control_plane.publish(make_snapshot(9))
        await until(lambda: engine.applied == [9])
        await control_plane.publish(make_snapshot(7))
        await until(lambda: engine.applied == [9, 7])
        await control_plane.publish(other)
        await control_plane.publish(make_snapshot(9, n_keys=6))
        newest = make_snapshot(9, n_keys=6).digest
        await control_plane.wait_for(lambda: control_plane.polls[-1] == f'"{newest}"')
    assert client.snapshot == make_snapshot(9, n_keys=6)
    # The copy on disk went back as well.
    again = make_client()
    assert await again.load_saved()
    assert again.snapshot == client.snapshot


async def test_a_poll_without_news_ends_in_304_and_changes_nothing(
    control_plane: Any, engine: Engine, session: ControlPlaneSession, tmp_path: Path, make_snapshot: MakeSnapshot
) -> None:
    client = ConfigClient(session, tmp_path, apply=engine.apply, long_poll_s=0)
    await control_plane.publish(make_snapshot(1))
    assert await client.poll()
    assert not await client.poll()
    assert not await client.poll()
    assert engine.applied == [1]
    assert control_plane.polls == [None, control_plane.etag, control_plane.etag]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SnapshotRefused("backend bke_1: kv_tokens 1 is less than two blocks"), "kv_tokens 1"),
        (ConfigError("pool 'model': unknown policy"), "unknown policy"),
        (KeyError("a defect"), "KeyError"),
    ],
)
async def test_a_refused_revision_leaves_the_last_good_one_and_is_reported(
    control_plane: Any,
    engine: Engine,
    make_client: Callable[[], ConfigClient],
    make_snapshot: MakeSnapshot,
    tmp_path: Path,
    error: Exception,
    reason: str,
) -> None:
    client = make_client()
    engine.refuse = {2: error}
    async with running(client):
        await control_plane.publish(make_snapshot(1))
        await until(lambda: client.applied_revision == 1)
        await control_plane.publish(make_snapshot(2))
        await until(lambda: client.refused_revision == 2)
        assert reason in str(client.refused_reason)
        assert client.applied_revision == 1
        # It is not asked for again until there is another one.
        refused = make_snapshot(2).digest
        await control_plane.wait_for(lambda: control_plane.polls[-1] == f'"{refused}"')
        await control_plane.publish(make_snapshot(3))
        await until(lambda: client.applied_revision == 3)
        assert client.refused_revision is None
        assert client.refused_reason is None
        await until(lambda: decode_snapshot((tmp_path / "snapshot.json").read_bytes()).revision == 3)
    assert engine.applied == [1, 3]


async def test_a_refused_revision_is_never_saved(
    control_plane: Any,
    engine: Engine,
    make_client: Callable[[], ConfigClient],
    make_snapshot: MakeSnapshot,
    tmp_path: Path,
) -> None:
    engine.refuse = {2: SnapshotRefused("no")}
    client = make_client()
    await control_plane.publish(make_snapshot(1))
    await client.poll()
    await control_plane.publish(make_snapshot(2))
    await client.poll()
    restarted = make_client()
    assert await restarted.load_saved()
    assert restarted.applied_revision == 1


async def test_a_snapshot_damaged_on_the_way_is_fetched_again(
    control_plane: Any, engine: Engine, make_client: Callable[[], ConfigClient], make_snapshot: MakeSnapshot
) -> None:
    client = make_client()
    control_plane.damage_next = True
    await control_plane.publish(make_snapshot(1))
    async with running(client):
        await until(lambda: client.applied_revision == 1)
    assert engine.applied == [1]
    assert client.snapshot is not None
    assert {tenant.weight for tenant in client.snapshot.tenants} == {1.0}
    assert client.refused_reason is None
    assert len(control_plane.polls) >= 2


async def test_a_router_starts_from_its_saved_copy_while_the_control_plane_is_down(
    control_plane: Any,
    engine: Engine,
    make_client: Callable[[], ConfigClient],
    make_snapshot: MakeSnapshot,
    tmp_path: Path,
) -> None:
    await control_plane.publish(make_snapshot(4))
    await make_client().poll()
    assert (tmp_path / "snapshot.json").stat().st_mode & 0o777 == 0o600
    await control_plane.stop()
    restarted = make_client()
    assert await restarted.load_saved()
    assert engine.applied == [4, 4]
    async with running(restarted):
        await until(lambda: restarted.last_error is not None)
        assert restarted.applied_revision == 4
        await control_plane.start()
        control_plane.polls.clear()
        await until(lambda: len(control_plane.polls) > 0)
        assert control_plane.polls[0] == control_plane.etag
        await control_plane.publish(make_snapshot(5))
        await until(lambda: restarted.applied_revision == 5 and restarted.last_error is None)
    assert engine.applied == [4, 4, 5]


async def test_a_disk_that_takes_no_copy_does_not_keep_a_revision_from_serving(
    control_plane: Any,
    engine: Engine,
    make_client: Callable[[], ConfigClient],
    make_snapshot: MakeSnapshot,
    tmp_path: Path,
) -> None:
    (tmp_path / "snapshot.json").mkdir()  # cannot be replaced by a file
    (tmp_path / ".snapshot.json.1-1.part").write_bytes(b"of a writer that was killed")
    client = make_client()
    assert not await client.load_saved()
    await control_plane.publish(make_snapshot(1))
    assert await client.poll()
    assert client.applied_revision == 1
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot.json"]  # noqa: ASYNC240 - nothing else runs


async def test_a_damaged_saved_copy_is_put_aside(
    control_plane: Any,
    engine: Engine,
    make_client: Callable[[], ConfigClient],
    make_snapshot: MakeSnapshot,
    tmp_path: Path,
) -> None:
    client = make_client()
    assert not await client.load_saved()
    body = msgspec.json.encode(make_snapshot(1), order="deterministic")
    for damaged in (b"", body[:-30], body.replace(b'"revision":1', b'"revision":7'), b"[]"):
        (tmp_path / "snapshot.json").write_bytes(damaged)
        assert not await client.load_saved()
        assert (tmp_path / "snapshot.refused.json").read_bytes() == damaged
        assert not (tmp_path / "snapshot.json").exists()
    assert engine.applied == []


async def test_fields_of_a_newer_control_plane_are_ignored_and_covered_by_the_digest(
    control_plane: Any, engine: Engine, make_client: Callable[[], ConfigClient], make_snapshot: MakeSnapshot
) -> None:
    plain = msgspec.to_builtins(make_snapshot(1))
    plain["tenants"][0]["quota_tokens"] = 5
    plain["digest"] = ""
    digest = hashlib.sha256(msgspec.json.encode(plain)).hexdigest()
    plain["digest"] = digest
    body = msgspec.json.encode(plain)
    assert decode_snapshot(body).revision == 1
    with pytest.raises(SnapshotRefused, match="digest"):
        decode_snapshot(body.replace(b'"quota_tokens":5', b'"quota_tokens":6'))


def test_no_changed_byte_of_a_snapshot_changes_what_is_applied(make_snapshot: MakeSnapshot) -> None:
    snapshot = make_snapshot(1)
    body = msgspec.json.encode(snapshot, order="deterministic")
    n_refused = 0
    for position in range(len(body)):
        changed = bytearray(body)
        changed[position] ^= 1 << position % 8
        try:
            decoded = decode_snapshot(bytes(changed))
        except SnapshotRefused:
            n_refused += 1
        else:  # the name of a field that holds its default: the content is the same
            assert decoded == snapshot
    assert n_refused > 0.7 * len(body)


async def test_a_body_in_another_order_is_checked_by_its_content(make_snapshot: MakeSnapshot) -> None:
    snapshot = make_snapshot(1)
    plain = msgspec.to_builtins(snapshot)
    body = msgspec.json.encode(dict(reversed(plain.items())))
    assert decode_snapshot(body) == snapshot


def test_no_field_of_a_snapshot_is_lost_when_it_is_decoded() -> None:
    blank = ConfigSnapshot(
        revision=7,
        published_at_us=8,
        pools=[PoolRecord(pool="pol_1", name="main")],
        tiers=[TierRecord(name="standard", rank=1)],
        tenants=[TenantRecord(tenant="ten_1", name="one")],
        keys=[KeyRecord(key="key_1", public_id="p", digest="d", pepper_version=1, tenant="ten_1", default_pool="main")],
        groups=[GroupRecord(group="research")],
        cancelled=["req_1"],
        own_cancelled=[OwnCancellation(tenant="ten_1", request="req_2")],
    )
    snapshot = msgspec.structs.replace(blank, digest=snapshot_digest(blank))
    assert all(getattr(snapshot, name) for name in ConfigSnapshot.__struct_fields__), "a field is told by none"
    assert decode_snapshot(msgspec.json.encode(snapshot, order="deterministic")) == snapshot
    assert snapshot_digest(snapshot) == snapshot.digest


async def test_the_event_loop_keeps_turning_while_a_large_snapshot_is_decoded(make_snapshot: MakeSnapshot) -> None:
    snapshot = make_snapshot(1, n_keys=20_000)
    body = msgspec.json.encode(snapshot, order="deterministic")
    decoding = asyncio.ensure_future(asyncio.to_thread(decode_snapshot, body))
    turns = 0
    while not decoding.done():
        turns += 1
        await asyncio.sleep(0)
    assert await decoding == snapshot
    assert turns > 100


# --- artifacts ---------------------------------------------------------------------------------------------------


def with_artifact(make_snapshot: MakeSnapshot, revision: int, data: bytes) -> ConfigSnapshot:
    record = ArtifactRecord(artifact="art_1", digest=hashlib.sha256(data).hexdigest(), kind="baseline")
    return make_snapshot(revision, pools=[PoolRecord(pool="pool_1", name="model", predictor=record)])


async def test_a_predictor_is_fetched_verified_and_handed_over_once(
    control_plane: Any, engine: Engine, make_client: Callable[[], ConfigClient], make_snapshot: MakeSnapshot
) -> None:
    one, two = b"predictor one", b"predictor two"
    control_plane.artifacts = {hashlib.sha256(data).hexdigest(): data for data in (one, two)}
    client = make_client()
    async with running(client):
        await control_plane.publish(with_artifact(make_snapshot, 1, one))
        await until(lambda: len(engine.artifacts) == 1)
        await control_plane.publish(with_artifact(make_snapshot, 2, one))
        await until(lambda: client.applied_revision == 2)
        await control_plane.publish(with_artifact(make_snapshot, 3, two))
        await until(lambda: len(engine.artifacts) == 2)
    assert [data for _, _, data in engine.artifacts] == [one, two]

    await control_plane.stop()
    restarted = make_client()
    assert await restarted.load_saved()
    async with running(restarted):  # from the folder, without a control plane
        await until(lambda: len(engine.artifacts) == 3)
    assert engine.artifacts[2][2] == two


async def test_an_artifact_with_another_content_than_its_digest_is_never_handed_over(
    control_plane: Any,
    engine: Engine,
    make_client: Callable[[], ConfigClient],
    make_snapshot: MakeSnapshot,
    tmp_path: Path,
) -> None:
    good = b"good artifact"
    digest = hashlib.sha256(good).hexdigest()
    control_plane.artifacts = {digest: b"evil artifact"}
    client = make_client()
    async with running(client):
        await control_plane.publish(with_artifact(make_snapshot, 1, good))
        await until(lambda: client.applied_revision == 1)
        # The folder's copy may rot as well; a good revision then fetches again.
        (tmp_path / "artifacts").mkdir(exist_ok=True)
        (tmp_path / "artifacts" / digest).write_bytes(b"rotten")
        control_plane.artifacts = {digest: good}
        await control_plane.publish(with_artifact(make_snapshot, 2, good))
        await until(lambda: client.applied_revision == 2)
    assert all(data == good for _, _, data in engine.artifacts)
    restarted = make_client()
    async with running(restarted):
        await until(lambda: any(data == good for _, _, data in engine.artifacts))
    assert (tmp_path / "artifacts" / digest).read_bytes() == good


async def test_a_missing_artifact_is_tried_again_while_the_revision_serves(
    control_plane: Any, engine: Engine, make_client: Callable[[], ConfigClient], make_snapshot: MakeSnapshot
) -> None:
    data = b"late artifact"
    client = make_client()
    async with running(client):
        await control_plane.publish(with_artifact(make_snapshot, 1, data))
        await until(lambda: client.applied_revision == 1)
        control_plane.artifacts = {hashlib.sha256(data).hexdigest(): data}
        await until(lambda: len(engine.artifacts) == 1)
