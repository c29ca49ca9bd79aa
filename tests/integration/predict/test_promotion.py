"""A length model from its promotion to the answers, over real HTTP, with a real worker process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
from support.length_models import artifact, prompt
from support.published import TOKEN, ControlPlane
from support.scripted import Peer, World

from router_ext.gateway.app import App
from router_ext.gateway.lifespan import Router
from router_ext.predict.client import PredictionClient
from router_ext.settings import RouterSettings
from router_ext.wire.controlplane import ArtifactRecord, PoolState, PredictionRecord, UsageEvent, snapshot_digest

SUPPORT = str(Path(__file__).parents[2])
PROMPT = "How many rivers are there?"
BODY = {"inputs": PROMPT, "parameters": {"max_new_tokens": 5, "details": True}}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.005)


class Promoting:
    """A control plane and a router that follows it."""

    def __init__(self, world: World, plane: ControlPlane) -> None:
        self.world = world
        self.plane = plane

    async def promote(self, data: bytes | None, *, digest: str | None = None) -> str:
        """Publish an artifact as the pool's length model; None: take it out."""
        record = None
        if data is not None:
            digest = digest or hashlib.sha256(data).hexdigest()
            self.plane.artifacts[digest] = data
            record = ArtifactRecord(artifact="art", digest=digest, kind="mixture")
        snapshot = self.world.setup.snapshot()
        pools = [msgspec.structs.replace(snapshot.pools[0], length_model=record)]
        snapshot = msgspec.structs.replace(snapshot, pools=pools, digest="")
        await self.plane.publish(msgspec.structs.replace(snapshot, digest=snapshot_digest(snapshot)))
        return digest or ""

    def heard(self) -> PoolState | None:
        """What the router said last of its pool."""
        return self.plane.heartbeats[-1].pools[0] if self.plane.heartbeats else None

    async def heard_of(self, condition: Callable[[PoolState], bool]) -> PoolState:
        await self.plane.wait_for(lambda: (pool := self.heard()) is not None and condition(pool), limit_s=20)
        pool = self.heard()
        assert pool is not None
        return pool

    async def prediction(self, text: str = PROMPT) -> PredictionRecord:
        known = len(self.plane.rows)
        body = {"inputs": text, "parameters": {"max_new_tokens": 2_000, "details": True}}
        await Peer(self.world, "/generate_stream", body).wait()
        await self.plane.wait_for(lambda: len(self.plane.rows) > known)
        event = max(self.plane.rows.values(), key=lambda event: event.arrived_at_us)
        assert event.prediction is not None
        return event.prediction


@contextlib.asynccontextmanager
async def promoting(tmp_path: Path, command: list[str] | None = None) -> AsyncIterator[Promoting]:
    plane, world = ControlPlane(), World()
    await plane.start()
    made = Promoting(world, plane)
    await made.promote(None)
    try:
        async with following(tmp_path, made, command):
            yield made
    finally:
        await plane.stop()


@contextlib.asynccontextmanager
async def following(tmp_path: Path, made: Promoting, command: list[str] | None) -> AsyncIterator[Router]:
    """A router on the control plane; without one it starts on what it has in its folder."""
    settings = RouterSettings(
        key_pepper=made.world.setup.pepper.hex(),
        dir=tmp_path / "state",
        controlplane_url=made.plane.url,
        token=TOKEN,
        prediction_limit_s=0.1,
    )
    router = Router(settings)
    router._make_client = made.world.make_client  # type: ignore[method-assign]
    if command is not None:
        folder = ["--dir", str(tmp_path / "state"), "--fd"]
        router.predictions.client = PredictionClient([*command, *folder], router.predictions, limit_s=0.1)
    async with router.running():
        router.listening()
        router._seated.set()  # nobody serves from this folder whom it would have to replace first
        made.world.router, made.world.app = router, App(router)
        await until(lambda: "pol_main" in router.engines)
        await router.engines["pol_main"].model.wait_up()
        client = router.predictions.client
        assert client is not None
        await until(lambda: client.is_up)
        yield router


def plain_worker() -> list[str]:
    code = f"import sys; sys.path.insert(0, {SUPPORT!r}); from support.prediction_workers import main; main()"
    return [sys.executable, "-c", code, "plain"]


async def test_from_promotion_to_refusal_to_the_worker_s_death_and_back(tmp_path: Path) -> None:
    async with promoting(tmp_path, plain_worker()) as made:
        assert (await made.prediction()).length_model is None

        started = time.monotonic()
        good = await made.promote(b"model one")
        await made.heard_of(lambda pool: pool.length_model_digest == good)
        assert time.monotonic() - started < 2.0
        record = await made.prediction()
        assert (record.source, record.length_model) == ("model", good)

        # Damaged on its way; then whole, but no model.
        damaged = hashlib.sha256(b"model two").hexdigest()
        await made.promote(b"model tw0", digest=damaged)
        pool = await made.heard_of(lambda pool: pool.length_model_refused is not None)
        assert pool.length_model_refused == f"what came as artifact {damaged[:12]} has another digest"
        await made.promote(b"something else")
        pool = await made.heard_of(lambda pool: pool.length_model_refused == "this is no model")
        assert pool.length_model_digest == good
        assert (await made.prediction()).length_model == good

        # The one before is wanted again: it is in force already, and nothing is left to complain about.
        await made.promote(b"model one")
        await made.heard_of(lambda pool: pool.length_model_refused is None and pool.length_model_digest == good)

        client = made.world.router.predictions.client
        assert client is not None
        os.kill(client.pid or 0, signal.SIGKILL)
        await until(lambda: not client.is_up)
        record = await made.prediction()
        assert (record.source, record.fallback_reason) == ("default", "down")
        await until(lambda: client.is_up)
        async with asyncio.timeout(20):
            while (await made.prediction()).source != "model":
                pass
        pool = await made.heard_of(lambda pool: pool.predictions_total.get("model", 0) >= 3)
        assert pool.prediction_fallbacks_total["down"] >= 1

        await made.promote(None)
        await made.heard_of(lambda pool: pool.length_model_digest is None)
        assert (await made.prediction()).length_model is None


async def test_a_trained_model_answers_within_two_seconds_of_its_promotion(tmp_path: Path) -> None:
    """The real worker and a real model, which is told from a damaged one and from another program's file."""
    data = await asyncio.to_thread(artifact)
    async with promoting(tmp_path) as made:
        record = await made.prediction(prompt("one sentence", 700))
        assert (record.source, record.length_model) == ("default", None)
        started = time.monotonic()
        good = await made.promote(data)
        await made.heard_of(lambda pool: pool.length_model_digest == good)
        assert time.monotonic() - started < 2.0
        short = await made.prediction(prompt("one sentence", 701))
        long = await made.prediction(prompt("a long essay", 701))
        assert (short.source, long.source, long.length_model) == ("model", "model", good)
        assert short.quantiles is not None
        assert long.quantiles is not None
        assert 2 * short.quantiles[3] < long.quantiles[3]

        await made.promote(data[:-100] + bytes(100))
        pool = await made.heard_of(lambda pool: pool.length_model_refused is not None)
        assert "damaged" in (pool.length_model_refused or "")
        assert (await made.prediction(prompt("one sentence", 702))).length_model == good

        client = made.world.router.predictions.client
        assert client is not None
        os.kill(client.pid or 0, signal.SIGKILL)
        await until(lambda: not client.is_up)
        assert (await made.prediction()).fallback_reason == "down"
        async with asyncio.timeout(20):
            while (await made.prediction()).length_model != good or not client.is_up:
                pass


async def test_a_router_that_starts_without_its_control_plane_has_the_model(tmp_path: Path) -> None:
    async with promoting(tmp_path, plain_worker()) as made:
        digest = await made.promote(b"model one")
        await made.heard_of(lambda pool: pool.length_model_digest == digest)
    async with following(tmp_path, made, plain_worker()) as router:
        await until(lambda: router.engines["pol_main"].foresight.digest == digest)
        await Peer(made.world, "/generate_stream", BODY).wait()
        batch = router.ledger.read_batch()
        assert batch is not None
        event = msgspec.json.decode(batch.payloads[-1], type=UsageEvent)
        assert event.prediction is not None
        assert event.prediction.length_model == digest
        assert json.dumps(PROMPT) not in batch.payloads[-1].decode()


async def test_a_router_that_wants_no_worker_says_so(tmp_path: Path) -> None:
    async with promoting(tmp_path, plain_worker()) as made:
        made.world.router.predictions.client = None
        await made.promote(b"model one")
        pool = await made.heard_of(lambda pool: pool.length_model_refused is not None)
        assert "FAIRLANE_ROUTER_PREDICTOR" in (pool.length_model_refused or "")
        assert (await made.prediction()).features is None
