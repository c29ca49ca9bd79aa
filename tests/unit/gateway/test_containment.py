"""A defect, a strange backend or a bad configuration costs what it concerns, never the router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.routers import backend
from support.scripted import BODY, Peer, World, running, stream, until

from router_ext.backends.fake import Ending, Script
from router_ext.core.actions import Dispatch
from router_ext.core.events import Arrived, Finished, Progressed
from router_ext.core.ids import BackendId
from router_ext.errors import FairlaneError, SnapshotRefused
from router_ext.gateway.engine import PoolEngine
from router_ext.gateway.measure import measure
from router_ext.gateway.relay import WholeGeneration
from router_ext.gateway.slices import TextGeneration
from router_ext.sync.heartbeat import HeartbeatClient


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path) as made:
        yield made


def engine_of(world: World) -> PoolEngine:
    return world.router.engines["pol_main"]


async def add_backend(world: World, info: bytes, **fields: Any) -> None:
    """A second backend, which says ``info`` of itself."""

    plain = world.play

    def play(path: str, body: bytes) -> Script:
        return Script(pieces=(info,)) if path == "/info" else plain(path, body)

    world.setup.backends = [backend(1), backend(2, "two", **fields)]
    world.play = play  # type: ignore[method-assign]
    first = world.client
    await world.router.apply(world.setup.snapshot())
    world.play, world.client = plain, first  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "info",
    [
        b'{"model_id":"m","max_input_tokens":0,"max_total_tokens":4096}',
        b'{"model_id":"m","max_input_tokens":10,"max_total_tokens":1}',
        b'{"model_id":"m","max_input_tokens":10,"max_total_tokens":4096,"max_concurrent_requests":0}',
        b'{"model_id":"m","max_input_tokens":4095,"max_total_tokens":99999999999}',
        b'{"model_id":"m","max_input_tokens":10,"max_total_tokens":4096,"max_best_of":-1}',
    ],
)
async def test_a_backend_with_nonsense_limits_stays_out(world: World, info: bytes) -> None:
    await add_backend(world, info)
    members = engine_of(world).backends.members
    await until(lambda: "not understood" in members["bke_two"].detail)  # type: ignore[index]
    assert b"generated_text" in await Peer(world, "/generate_stream", BODY).wait()
    assert [member.backend for member in engine_of(world).backends.up] == ["bke_one"]


async def test_a_backend_whose_limits_do_not_fit_its_record_stays_out(world: World) -> None:
    """Each number alone is possible: 100 tokens are no two blocks of 1,024."""
    await add_backend(
        world, b'{"model_id":"m","max_input_tokens":50,"max_total_tokens":100}', kv_tokens=None, block_size=1_024
    )
    members = engine_of(world).backends.members
    await until(lambda: "two blocks" in members["bke_two"].detail)  # type: ignore[index]
    assert b"generated_text" in await Peer(world, "/generate_stream", BODY).wait()
    # What was refused is not kept: later snapshots are applied.
    world.setup.tenant("carol")
    await world.router.apply(world.setup.snapshot())


async def test_a_defect_of_the_watch_leaves_the_others_watched(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(world)
    monkeypatch.setattr(engine.backends, "_probe", None)
    await add_backend(world, b'{"model_id":"m","max_input_tokens":4095,"max_total_tokens":4096}')
    members = engine.backends.members
    await until(lambda: "TypeError" in members["bke_two"].detail)  # type: ignore[index]
    assert b"generated_text" in await Peer(world, "/generate_stream", BODY).wait()
    monkeypatch.undo()
    await until(lambda: len(engine.backends.up) == 2)


# --- defects ------------------------------------------------------------------------------------------------------


def nothing_is_left(world: World) -> None:
    engine = engine_of(world)
    stats = engine.stats()
    assert (stats.running, stats.queued, stats.backends[0].reserved_tokens) == (0, 0, 0)
    assert not engine.calls
    assert not engine._generations
    assert not world.client.streams
    assert world.router.ledger.running == 0
    assert engine.scheduler.audit() == []


class Once:
    """Raises the first time it is called with what fits, then does what it stands for."""

    def __init__(self, real: Any, fits: type | None = None) -> None:
        self._real = real
        self._fits = fits
        self.has_raised = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.has_raised and (self._fits is None or isinstance(args[0], self._fits)):
            self.has_raised = True
            raise RuntimeError("a defect")
        return self._real(*args, **kwargs)


@pytest.mark.parametrize("event", [Arrived, Progressed, Finished])
async def test_a_defect_of_the_scheduler_leaks_nothing(world: World, event: type) -> None:
    scheduler = engine_of(world).scheduler
    defect = scheduler.handle = Once(scheduler.handle, event)  # type: ignore[method-assign]
    await Peer(world, "/generate_stream", BODY).wait()
    assert defect.has_raised
    await until(lambda: engine_of(world).stats().backends[0].reserved_tokens == 0)
    nothing_is_left(world)
    assert b"generated_text" in await Peer(world, "/generate_stream", BODY).wait()


async def test_an_action_lost_in_a_defect_is_made_up_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler has decided to dispatch, and raises before it says so."""
    monkeypatch.setattr("router_ext.gateway.engine.RECONCILE_S", 0.01)
    engine = engine_of(world)
    world.setup.backends = [msgspec.structs.replace(world.setup.backends[0], is_cordoned=True)]
    await world.router.apply(world.setup.snapshot())
    peer = Peer(world, "/generate_stream", BODY)
    await until(lambda: engine.stats().queued == 1)
    real = engine.scheduler.handle

    def handle(event: Any, now: float) -> Any:
        actions = real(event, now)
        if any(isinstance(action, Dispatch) for action in actions):
            engine.scheduler.handle = real  # type: ignore[method-assign]
            raise RuntimeError("a defect")
        return actions

    engine.scheduler.handle = handle  # type: ignore[method-assign]
    world.setup.backends = [msgspec.structs.replace(world.setup.backends[0], is_cordoned=False)]
    await world.router.apply(world.setup.snapshot())
    assert b"generated_text" in await peer.wait()
    await until(lambda: engine.stats().backends[0].reserved_tokens == 0)
    nothing_is_left(world)


def broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a defect")


@pytest.mark.parametrize("kind", [TextGeneration, WholeGeneration])
@pytest.mark.parametrize("step", ["_open", "_on_head", "_on_data", "_on_end"])
async def test_a_defect_of_one_generation_leaks_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: type, step: str
) -> None:
    if step == "_on_end":
        world.generation = stream(3, ending=Ending.CUT)
    parameters: dict[str, Any] = {"max_new_tokens": 5, "details": True}
    if kind is WholeGeneration:
        parameters["grammar"] = {"type": "regex", "value": "[a-z]+"}
    with monkeypatch.context() as patched:
        patched.setattr(kind, step, broken)
        peer = Peer(world, "/generate_stream", {"inputs": "a b c", "parameters": parameters})
        answer = await peer.wait()
        assert peer.status == 500 or b"The router failed to serve this request." in answer
        await until(lambda: engine_of(world).stats().backends[0].reserved_tokens == 0)
        nothing_is_left(world)
    world.generation = stream(5)
    assert b"generated_text" in await Peer(world, "/generate_stream", BODY).wait()


async def test_a_defect_while_ending_cuts_the_client(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.generation = stream(3, ending=Ending.HANG)
    peers = [Peer(world, "/generate_stream", BODY) for _ in range(2)]
    await until(lambda: all(peer.data.count(b"data: ") == 3 for peer in peers))
    books = engine_of(world).books
    monkeypatch.setattr(books, "ended", Once(books.ended))
    engine_of(world).end_all(FairlaneError("The end."))
    answers = [await peer.wait() for peer in peers]
    assert sum(b"The end." in answer for answer in answers) == 1
    assert all(peer.is_closed for peer in peers)
    assert not engine_of(world).calls


# --- bad configurations -------------------------------------------------------------------------------------------


def bad_backend(**fields: Any) -> Any:
    return msgspec.structs.replace(backend(2, "two"), **fields)


BAD_BACKENDS = [
    ({"url": "http://127.0.0.1:99999"}, "99999"),
    ({"url": "http://127.0.0.1:abc"}, "abc"),
    ({"url": "http://[::1"}, r"\[::1"),
    ({"url": "http://:80"}, "no http"),
    ({"url": "http://a\x00b:80"}, "no http"),
    ({"url": "http://user:word@127.0.0.1:80"}, "credentials"),
    ({"api_key_name": "NOT_THERE"}, "FAIRLANE_BACKEND_KEY_NOT_THERE"),
]


@pytest.mark.parametrize(("fields", "reason"), BAD_BACKENDS)
@pytest.mark.parametrize("is_first_pool", [True, False])
async def test_a_backend_that_cannot_be_is_refused_whole(
    world: World, fields: dict[str, Any], reason: str, is_first_pool: bool
) -> None:
    del world.router._make_client  # the real one
    good = world.setup.snapshot()
    bad = [*good.pools[0].backends, bad_backend(**fields)]
    other = msgspec.structs.replace(good.pools[0], pool="pol_other", name="other", aliases=[])
    pools = [good.pools[0], other]
    pools[0 if is_first_pool else 1] = msgspec.structs.replace(pools[0 if is_first_pool else 1], backends=bad)
    tenants = [msgspec.structs.replace(tenant, weight=7.0) for tenant in good.tenants]
    before, engine = world.router.directory, engine_of(world)
    record, config = engine.record, engine.config
    with pytest.raises(SnapshotRefused, match=reason):
        await world.router.apply(msgspec.structs.replace(good, pools=pools, tenants=tenants))
    assert world.router.directory is before
    assert list(world.router.engines) == ["pol_main"]
    assert (engine.record, engine.config) == (record, config)
    assert list(engine.backends.members) == ["bke_one"]


async def test_what_fails_late_is_refused_whole(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first pool could be changed; the client of the second cannot be made."""
    good = world.setup.snapshot()
    other = msgspec.structs.replace(good.pools[0], pool="pol_other", name="other", aliases=[])
    changed = msgspec.structs.replace(good.pools[0], scheduling={"policy": "fifo"})
    engine = engine_of(world)
    monkeypatch.setattr(world.router, "_make_client", broken_client)
    with pytest.raises(SnapshotRefused, match="no such certificate"):
        await world.router.apply(msgspec.structs.replace(good, pools=[changed, other]))
    assert list(world.router.engines) == ["pol_main"]
    assert engine.config.policy == "slo-fair"


def broken_client(record: Any) -> Any:
    raise OSError("no such certificate")


async def test_limits_that_stopped_fitting_are_refused_whole(world: World) -> None:
    """With what the backend says of itself, and not only with what is guessed before it was asked."""
    engine = engine_of(world)
    record = engine.record
    # Two blocks of the guessed size fit into the guess, not into the 4,096 tokens of the backend.
    world.setup.backends = [msgspec.structs.replace(backend(1), kv_tokens=None, block_size=1_024)]
    await world.router.apply(world.setup.snapshot())
    engine.backends.members[BackendId("bke_one")].info.max_total_tokens = 100  # type: ignore[union-attr]
    world.setup.scheduling = {"policy": "fifo"}
    record = engine.record
    with pytest.raises(SnapshotRefused, match="two blocks"):
        await world.router.apply(world.setup.snapshot())
    assert engine.record is record
    assert engine.config.policy == "slo-fair"


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000, b'{"revision":1}'])
async def test_a_broken_snapshot_file_is_reported_and_the_last_good_one_serves(world: World, content: bytes) -> None:
    path = world.router.settings.snapshot_file
    assert path is not None
    path.write_bytes(content)
    await world.router._load_file()
    assert world.router._refused is not None
    assert b"generated_text" in await Peer(world, "/generate_stream", BODY).wait()


async def test_a_defect_in_applying_a_snapshot_file_does_not_end_the_router(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router_ext.gateway.lifespan.Directory", broken)
    await world.router._load_file()
    assert world.router._refused == (0, "could not be applied: RuntimeError")


# --- books --------------------------------------------------------------------------------------------------------


async def test_a_request_refused_at_the_last_moment_leaves_the_books_empty(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router_ext.gateway.app.RequestSpec", broken)
    peer = Peer(world, "/generate", BODY)
    await peer.wait()
    assert peer.status == 500
    nothing_is_left(world)
    assert world.router.ledger.pending_events == 0


@pytest.mark.parametrize("change", ["backend moved", "pool removed"])
async def test_a_configuration_that_comes_while_a_request_is_measured(
    world: World, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The limits it was measured by are those it began with; a pool that is gone refuses it."""
    engine = engine_of(world)

    async def slow(*args: Any) -> Any:
        measured = await measure(*args)
        if change == "pool removed":
            await world.router.apply(msgspec.structs.replace(world.setup.snapshot(), pools=[]))
        else:
            plain = world.play
            world.play = lambda path, body: Script(status=500)  # type: ignore[method-assign]
            world.setup.backends = [backend(7)]
            await world.router.apply(world.setup.snapshot())
            world.play = plain  # type: ignore[method-assign]
        return measured

    monkeypatch.setattr("router_ext.gateway.app.measure", slow)
    peer = Peer(world, "/generate", BODY)
    if change == "pool removed":
        await peer.wait()
        assert peer.status == 503
    else:
        await until(lambda: engine.stats().queued == 1)
        peer.exchange.connection_lost()
        await peer.wait()
    assert not engine.calls
    assert world.router.ledger.running == 0


async def test_a_heartbeat_that_cannot_be_built_is_left_out() -> None:
    client = HeartbeatClient(None, broken)  # type: ignore[arg-type]  # no session is needed for none
    assert await client.send() is False
    assert client.last_error == "RuntimeError while it was built"
