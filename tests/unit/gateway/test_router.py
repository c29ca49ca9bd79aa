"""One router in the process, on a scripted backend: snapshots, predictors, refusals, books."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.scripted import BODY, Peer, World, running, stream, until

from router_ext.backends.fake import Ending, Script
from router_ext.core.events import Finished
from router_ext.core.ids import TenantId
from router_ext.errors import ArtifactRefused, SnapshotRefused
from router_ext.predict.baseline import LengthSample, build_baseline
from router_ext.wire.controlplane import ArtifactRecord, ConfigSnapshot, GroupRecord


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path) as made:
        yield made


async def test_a_stream_is_forwarded_byte_for_byte(world: World) -> None:
    answer = await Peer(world, "/generate_stream", BODY).wait()
    assert answer.split(b"\r\n\r\n", 1)[1] == b"".join(world.generation.pieces)


async def test_every_byte_is_booked_before_it_is_written(world: World) -> None:
    """A kill at any write finds at least as many tokens in the books as the client has been given."""
    written: list[tuple[int, int]] = []
    peer = Peer(world, "/generate_stream", BODY)
    plain = peer.write

    def write(data: bytes) -> None:
        plain(data)
        (call,) = world.router.engines["pol_main"].calls or [None]
        if call is not None:
            written.append((peer.data.count(b"data: "), call.slot.words[2]))

    peer.write = write  # type: ignore[method-assign]
    await peer.wait()
    assert written
    assert all(booked >= given for given, booked in written)


async def test_a_predictor_is_loaded_and_used(world: World) -> None:
    engine = world.router.engines["pol_main"]
    rows = [LengthSample("key_x", "ten_alice", "pol_main", 40, True)] * 30
    data = build_baseline(rows, built_at_us=1)
    record = ArtifactRecord(artifact="art_1", digest="d1", kind="baseline")
    await world.router.load_artifact("pol_main", record, data)
    assert engine.predictor.predict("key_x", "ten_alice", "pol_main").median == 40
    await Peer(world, "/generate_stream", BODY).wait()
    batch = world.router.ledger.read_batch()
    assert batch is not None
    event = json.loads(batch.payloads[-1])
    assert (event["predicted_tokens"], event["predictor"]) == (40, "d1")
    with pytest.raises(ArtifactRefused):
        await world.router.load_artifact("pol_main", record, data[: len(data) // 2])
    with pytest.raises(ArtifactRefused):
        await world.router.load_artifact("pol_main", ArtifactRecord(artifact="a", digest="d2", kind="torch"), data)
    assert engine.predictor_digest == "d1"


def changed(world: World, **fields: Any) -> ConfigSnapshot:
    return msgspec.structs.replace(world.setup.snapshot(), **fields)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("scheduling", {"policy": "lottery"}, "unknown policy 'lottery'"),
        ("scheduling", {"w_output": -1}, "w_output"),
        ("aliases", ["other"], "two pools answer to 'other'"),
    ],
)
async def test_a_bad_snapshot_changes_nothing(world: World, field: str, value: Any, reason: str) -> None:
    good = world.setup.snapshot()
    other = msgspec.structs.replace(good.pools[0], pool="pol_other", name="other", aliases=[])
    pools = [msgspec.structs.replace(good.pools[0], **{field: value}), other]
    before = world.router.directory
    with pytest.raises(SnapshotRefused, match=reason):
        await world.router.apply(msgspec.structs.replace(good, pools=pools))
    assert world.router.directory is before
    assert list(world.router.engines) == ["pol_main"]
    assert (await Peer(world, "/generate_stream", BODY).wait()).count(b"data: ") == 5


async def test_a_group_of_tenants_is_taken_over_and_reported(world: World) -> None:
    world.setup.groups = [GroupRecord(group="research", weight=3.0)]
    world.setup.tenant("alice", group="research", weight=2.0)
    await world.router.apply(world.setup.snapshot())
    config = world.router.engines["pol_main"].scheduler.config
    assert {name: group.weight for name, group in config.groups.items()} == {"research": 3.0}
    assert config.tenants[TenantId("ten_alice")].group == "research"
    await Peer(world, "/generate_stream", BODY).wait()
    (pool,) = world.router.heartbeat().pools
    assert [(group.group, group.queued, group.running) for group in pool.groups] == [("research", 0, 0)]
    assert [tenant.group for tenant in pool.tenants if tenant.tenant == "ten_alice"] == ["research"]


async def test_a_group_that_nobody_published_is_refused(world: World) -> None:
    world.setup.tenant("alice", group="research")
    with pytest.raises(SnapshotRefused, match="unknown group 'research'"):
        await world.router.apply(world.setup.snapshot())


async def test_a_backend_without_an_address_is_refused(world: World) -> None:
    world.setup.backends = [msgspec.structs.replace(world.setup.backends[0], url="localhost:3000")]
    with pytest.raises(SnapshotRefused, match="is no http"):
        await world.router.apply(world.setup.snapshot())


async def test_a_pool_that_is_removed_ends_its_requests_with_a_reason(world: World) -> None:
    world.generation = stream(3, ending=Ending.HANG)
    peer = Peer(world, "/generate_stream", BODY)
    await until(lambda: peer.data.count(b"data: ") == 3)
    await world.router.apply(changed(world, pools=[]))
    answer = await peer.wait()
    assert b'"error":"This model is not served any more."' in answer
    assert not world.client.streams
    late = Peer(world, "/generate_stream", BODY)
    await late.wait()
    assert late.status == 404


async def test_a_stream_that_hangs_is_ended_by_the_clock(world: World) -> None:
    world.generation = stream(3, ending=Ending.HANG)
    peer = Peer(world, "/generate_stream", BODY)
    await until(lambda: peer.data.count(b"data: ") == 3)
    engine = world.router.engines["pol_main"]
    for call in engine.calls:
        call.arrived_s -= 10_000
    engine.end_overdue()
    assert b'"error":"The request took too long."' in await peer.wait()
    assert not world.client.streams
    assert engine.stats().running == 0


@pytest.mark.parametrize("moment", ["queued", "running", "cutting"])
async def test_a_client_that_leaves_frees_everything_in_the_same_turn(world: World, moment: str) -> None:
    engine = world.router.engines["pol_main"]
    if moment == "queued":
        world.setup.backends = [msgspec.structs.replace(world.setup.backends[0], is_cordoned=True)]
        await world.router.apply(world.setup.snapshot())
    elif moment == "cutting":
        world.setup.scheduling = {"max_slice_tokens": 5, "min_slice_tokens": 5}
        await world.router.apply(world.setup.snapshot())
        world.cut = Script(ending=Ending.HANG)
    world.generation = stream(5) if moment == "cutting" else stream(3, ending=Ending.HANG)
    body = {"inputs": "a b c", "parameters": {"max_new_tokens": 50}}
    peer = Peer(world, "/generate_stream", body)
    if moment == "queued":
        await until(lambda: engine.stats().queued == 1)
    elif moment == "running":
        await until(lambda: peer.data.count(b"data: ") == 3)
    else:
        await until(lambda: any(g.step.value == "cutting" for g in engine._generations.values()))
    peer.exchange.connection_lost()
    assert not world.client.streams
    assert not engine._generations
    assert not engine.calls
    assert (engine.stats().running, engine.stats().queued) == (0, 0)
    await peer.wait()


async def test_the_state_of_the_router_is_complete_and_lawful(world: World) -> None:
    peers = [Peer(world, "/generate_stream", BODY) for _ in range(20)]
    for peer in peers:
        assert (await peer.wait()).count(b"data: ") == 5
    engine = world.router.engines["pol_main"]
    assert engine.scheduler.audit() == []
    heartbeat = world.router.heartbeat()
    (pool,) = heartbeat.pools
    assert (pool.running, pool.policy, heartbeat.applied_revision) == (0, "slo-fair", 1)
    assert pool.tenants[0].output_tokens_total == 100
    assert pool.backends[0].state == "up"
    assert heartbeat.spool_events == 20
    page = world.router.metrics.page().decode()
    assert 'fairlane_output_tokens_total{model="main",tier="standard"} 100.0' in page
    assert "ten_alice" not in page


async def test_tokens_of_an_attempt_that_showed_nothing_are_not_booked_twice(world: World) -> None:
    """The first backend tells a count and breaks before a byte for the client; the second never tells one."""
    plain = world.play
    chunk = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"a"},"finish_reason":%s}]}\n\n'
    attempts = [
        Script(
            pieces=(b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}\n\n',), ending=Ending.CUT
        ),
        Script(pieces=(chunk % b"null", chunk % b'"stop"', b"data: [DONE]\n\n")),
    ]

    def play(path: str, body: bytes) -> Script:
        if path == "/chat_tokenize":
            return Script(pieces=(b'{"tokenize_response":[{"id":1,"text":"a"}],"templated_text":"a"}',))
        return attempts.pop(0) if path == "/v1/chat/completions" else plain(path, body)

    world.client._play = play
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "stream": True, "max_tokens": 9}
    assert (await Peer(world, "/v1/chat/completions", body).wait()).count(b'"content":"a"') == 2
    batch = world.router.ledger.read_batch()
    assert batch is not None
    event = json.loads(batch.payloads[-1])
    assert (event["outcome"], event["output_tokens"], event["recomputed_tokens"]) == ("completed", 2, 7)
    assert (
        world.router.engines["pol_main"].stats().tenants[0].output_tokens_total == 7
    )  # charged to the high-water mark


async def test_sums_of_tenants_that_left_are_forgotten(world: World) -> None:
    engine = world.router.engines["pol_main"]
    world.key = world.setup.key("bob")
    await world.router.apply(world.setup.snapshot())
    await Peer(world, "/generate_stream", BODY).wait()
    assert engine.books.tenant_tokens["ten_bob"] == [3, 5]
    good = world.setup.snapshot()
    await world.router.apply(
        msgspec.structs.replace(good, tenants=[tenant for tenant in good.tenants if tenant.name != "bob"])
    )
    assert "ten_bob" not in engine.books.tenant_tokens


async def test_models_are_those_that_a_key_can_use(world: World) -> None:
    good = world.setup.snapshot()
    other = msgspec.structs.replace(good.pools[0], pool="pol_other", name="other", aliases=[])
    await world.router.apply(msgspec.structs.replace(good, pools=[good.pools[0], other]))
    await until(lambda: all(engine.backends.up for engine in world.router.engines.values()))
    names = [model["id"] for model in json.loads(await Peer(world, "/v1/models", {}, method="GET").wait())["data"]]
    assert names == ["main", "other"]
    for name in names:
        body = {"model": name, "prompt": "a b c", "max_tokens": 5}
        peer = Peer(world, "/v1/completions", body)
        await peer.wait()
        assert peer.status == 200


def count_upstream(world: World) -> None:
    """The backend answers with as many tokens as it is asked for, and counts what it is sent."""
    plain = world.play

    def play(path: str, body: bytes) -> Script:
        if path not in ("/tokenize", "/generate_stream"):
            return plain(path, body)
        request = json.loads(body)
        ids = [1, 2, 3] + [100 + int(word[1:]) for word in request["inputs"].split() if word[0] == "t"]
        if path == "/tokenize":
            return Script(pieces=(json.dumps([{"id": each} for each in ids if request["inputs"]]).encode(),))
        told = b'"input_length":%d' % len(ids)
        pieces = stream(request["parameters"]["max_new_tokens"]).pieces
        return Script(pieces=tuple(piece.replace(b'"input_length":3', told) for piece in pieces))

    world.client._play = play


@pytest.mark.parametrize(("stop", "is_over"), [("t8 t1", False), ("t3 t4 t5 t6 t7 t8", True)])
async def test_the_scheduler_is_told_whether_the_backend_has_ended(world: World, stop: str, is_over: bool) -> None:
    """A stop string that spans two slices is seen by the router alone, which closes a stream that goes on."""
    world.setup.scheduling = {"max_slice_tokens": 8, "min_slice_tokens": 8}
    await world.router.apply(world.setup.snapshot())
    count_upstream(world)
    engine = world.router.engines["pol_main"]
    seen: list[Finished] = []
    real = engine.scheduler.handle

    def handle(event: Any, now: float) -> Any:
        if isinstance(event, Finished):
            seen.append(event)
        return real(event, now)

    engine.scheduler.handle = handle  # type: ignore[method-assign]
    body = {"inputs": "a b c", "parameters": {"max_new_tokens": 40, "stop": [stop], "details": True}}
    assert b'"finish_reason":"stop_sequence"' in await Peer(world, "/generate_stream", body).wait()
    assert [event.is_upstream_over for event in seen] == [is_over]


async def test_a_continuation_that_fills_the_largest_backend_ends_by_length(world: World) -> None:
    """The KV is smaller than what the model could hold; the scheduler would have to give the next slice up."""
    world.setup.backends = [msgspec.structs.replace(world.setup.backends[0], kv_tokens=64)]
    world.setup.scheduling = {"max_slice_tokens": 8, "min_slice_tokens": 8}
    await world.router.apply(world.setup.snapshot())
    count_upstream(world)
    answer = await Peer(
        world, "/generate_stream", {**BODY, "parameters": {"max_new_tokens": 4_000, "details": True}}
    ).wait()
    assert b'"finish_reason":"length"' in answer
    assert b'"error"' not in answer
    batch = world.router.ledger.read_batch()
    assert batch is not None
    event = json.loads(batch.payloads[-1])
    assert event["outcome"] == "completed"
    assert event["output_tokens"] == 46
