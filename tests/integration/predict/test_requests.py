"""Predictions on the way of a request: used, late, absurd or missing, and what the books say of each.

The router runs in this process on a scripted backend, the worker is a child process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.prediction_workers import ABSURD
from support.scripted import Peer, World, running, stream

from router_ext.backends.fake import Ending
from router_ext.core.ids import RequestId
from router_ext.gateway.foresight import Predictions
from router_ext.predict import client as clients
from router_ext.predict.baseline import LengthSample, build_baseline
from router_ext.predict.client import PredictionClient
from router_ext.wire.controlplane import ArtifactRecord, PredictionRecord, UsageEvent

SUPPORT = str(Path(__file__).parents[2])
PROMPT = "a prompt that must not be found anywhere"
BODY = {"inputs": PROMPT, "parameters": {"max_new_tokens": 5, "details": True}}
PLAIN = [10, 20, 30, 40, 50, 60, 70]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.005)


class Said:
    """A log that keeps the names of its events."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def info(self, event: str, **fields: Any) -> None:
        self.events.append(event)


class Foretold:
    """A world whose router asks a worker of some kind, and what its books say."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self.engine = world.router.engines["pol_main"]
        self.predictions: Predictions = world.router.predictions
        self.folder = folder

    async def promote(self, data: bytes = b"model") -> str:
        """Put an artifact into the router's folder and publish it."""
        digest = hashlib.sha256(data).hexdigest()
        self.folder.mkdir(exist_ok=True)
        (self.folder / digest).write_bytes(data)
        record = ArtifactRecord(artifact="art", digest=digest, kind="mixture")
        await self.publish(record)
        await self.world.router.load_artifact("pol_main", record, data)
        return digest

    async def publish(self, record: ArtifactRecord | None) -> None:
        snapshot = self.world.setup.snapshot()
        pools = [msgspec.structs.replace(snapshot.pools[0], length_model=record)]
        await self.world.router.apply(msgspec.structs.replace(snapshot, pools=pools))

    async def ask(self, body: dict[str, Any] | None = None, path: str = "/generate_stream") -> UsageEvent:
        await Peer(self.world, path, body or BODY).wait()
        return self.booked()

    def booked(self) -> UsageEvent:
        """The event of the request that ended last."""
        batch = self.world.router.ledger.read_batch()
        assert batch is not None
        self.world.router.ledger.ack(batch)
        return msgspec.json.decode(batch.payloads[-1], type=UsageEvent)

    async def prediction(self, **fields: Any) -> PredictionRecord:
        event = await self.ask(**fields)
        assert event.prediction is not None
        return event.prediction


@contextlib.asynccontextmanager
async def foretold(tmp_path: Path, kind: str = "plain", *, limit_s: float = 5.0) -> AsyncIterator[Foretold]:
    """Requests wait up to ``limit_s``: in most tests for as long as it takes, however busy the machine is."""
    async with running(tmp_path) as world:
        router = world.router
        code = f"import sys; sys.path.insert(0, {SUPPORT!r}); from support.prediction_workers import main; main()"
        command = [sys.executable, "-c", code, kind, "--dir", str(tmp_path / "state"), "--fd"]
        client = router.predictions.client = PredictionClient(command, router.predictions, limit_s=limit_s)
        router.predictions._settings = router.settings.model_copy(update={"prediction_limit_s": limit_s})
        router.listening()
        await until(lambda: client.is_up)
        yield Foretold(world, tmp_path / "state" / "artifacts")


async def test_a_model_s_answer_is_what_the_scheduler_and_the_books_are_told(tmp_path: Path) -> None:
    async with foretold(tmp_path) as told:
        digest = await told.promote()
        await until(lambda: told.engine.foresight.digest == digest)
        event = await told.ask()
        assert event.predicted_tokens == 40
        record = event.prediction
        assert record is not None
        assert (record.quantiles, record.source, record.runaway) == (PLAIN, "model", 0.01)
        assert (record.length_model, record.fallback, record.fallback_reason) == (digest, None, None)
        assert record.features is not None
        assert record.features.split()[0] == str(len(PROMPT)).encode()
        assert record.feature_version == 1
        (pool,) = told.world.router.heartbeat().pools
        assert pool.length_model_digest == digest
        assert (pool.predictions_total, pool.prediction_fallbacks_total) == ({"model": 1}, {})
        page = told.world.router.metrics.page().decode()
        assert 'fairlane_predictions_total{model="main",source="model"} 1.0' in page
        assert "fairlane_prediction_seconds_count 1.0" in page
        assert 'fairlane_prediction_model_refused{model="main"} 0.0' in page


async def test_the_worker_is_told_how_a_request_is_sampled(tmp_path: Path) -> None:
    async with foretold(tmp_path) as told:
        digest = await told.promote()
        await until(lambda: told.engine.foresight.digest == digest)
        for more, stated in (({}, b"None None"), ({"top_k": 7, "typical_p": 0.5}, b"7 0.5")):
            record = await told.prediction(body={**BODY, "parameters": {**BODY["parameters"], **more}})
            assert record.features is not None
            assert record.features.endswith(stated)


async def test_the_scheduler_expects_by_the_distribution(tmp_path: Path) -> None:
    async with foretold(tmp_path) as told:
        digest = await told.promote()
        await until(lambda: told.engine.foresight.digest == digest)
        told.world.generation = stream(3, ending=Ending.HANG)
        peer = Peer(told.world, "/generate_stream", BODY | {"parameters": {"max_new_tokens": 500}})
        await until(lambda: bool(told.engine.calls))
        (call,) = told.engine.calls
        event = call.slot.start.event
        picture = told.engine.scheduler.snapshot()["requests"]
        assert [(r["request"], r["predicted_output_tokens"]) for r in picture] == [(RequestId(event), 40)]
        # What survives a kill says what was predicted, without the features.
        assert call.slot.start.prediction is not None
        assert call.slot.start.prediction.quantiles == PLAIN
        assert call.slot.start.prediction.features is None
        peer.exchange.connection_lost()
        await peer.wait()


@pytest.mark.parametrize("kind", [*ABSURD, "certain"])
async def test_absurd_answers_never_reach_the_scheduler(kind: str, tmp_path: Path) -> None:
    async with foretold(tmp_path, kind) as told:
        digest = await told.promote()
        await until(lambda: told.engine.foresight.digest == digest)
        rows = [LengthSample("key_x", "ten_alice", "pol_main", 77, True)] * 30
        data = build_baseline(rows, built_at_us=1)
        fallback = ArtifactRecord(artifact="art_1", digest="d1", kind="baseline")
        await told.world.router.load_artifact("pol_main", fallback, data)
        event = await told.ask()
        record = event.prediction
        assert record is not None
        assert (record.source, record.fallback_reason, record.quantiles) == ("tenant", "absurd", [77] * 7)
        assert record.runaway is None
        assert event.predicted_tokens == 77
        assert told.engine.foresight.fallbacks == {"absurd": 1}


async def test_an_answer_that_comes_too_late_is_not_used_but_its_features_are_booked(tmp_path: Path) -> None:
    async with foretold(tmp_path, "slow", limit_s=0.005) as told:
        digest = await told.promote()
        await until(lambda: told.engine.foresight.digest == digest)
        told.world.generation = stream(3, ending=Ending.HANG)
        peer = Peer(told.world, "/generate_stream", BODY)
        await until(lambda: bool(told.engine.calls))
        (call,) = told.engine.calls
        assert call.foresight.answers[0].reason == "late"
        client = told.predictions.client
        assert client is not None
        await until(lambda: client.outstanding == 0)
        peer.exchange.connection_lost()
        await peer.wait()
        batch = told.world.router.ledger.read_batch()
        assert batch is not None
        record = msgspec.json.decode(batch.payloads[-1], type=UsageEvent).prediction
        assert record is not None
        assert (record.source, record.fallback_reason, record.length_model) == ("default", "late", digest)
        assert record.features is not None


async def test_without_its_worker_a_pool_falls_back_and_then_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "_FIRST_DELAY_S", 1.0)
    async with foretold(tmp_path) as told:
        loaded: list[str] = []
        monkeypatch.setattr("router_ext.gateway.foresight._log", Said(loaded))
        digest = await told.promote()
        await until(lambda: told.engine.foresight.digest == digest)
        client = told.predictions.client
        assert client is not None
        os.kill(client.pid or 0, signal.SIGKILL)
        await until(lambda: not client.is_up)
        record = await told.prediction()
        assert (record.source, record.fallback_reason, record.features) == ("default", "down", None)
        await until(lambda: client.is_up)
        await until(lambda: loaded.count("predictor.model_in_force") == 2)
        assert (await told.prediction()).length_model == digest


async def test_a_model_that_is_refused_leaves_the_one_before(tmp_path: Path) -> None:
    async with foretold(tmp_path) as told:
        digest = await told.promote()
        await until(lambda: told.engine.foresight.digest == digest)
        await told.promote(b"something else")
        await until(lambda: told.engine.foresight.refused is not None)
        assert told.engine.foresight.digest == digest
        assert (await told.prediction()).length_model == digest
        (pool,) = told.world.router.heartbeat().pools
        assert (pool.length_model_digest, pool.length_model_refused) == (digest, "this is no model")
        state = told.predictions.state()
        assert state["worker"]["state"] == "up"
        assert state["pools"]["main"]["refused"] == "this is no model"


async def test_a_model_taken_out_of_the_configuration_answers_no_more(tmp_path: Path) -> None:
    async with foretold(tmp_path) as told:
        digest = await told.promote()
        await until(lambda: told.engine.foresight.digest == digest)
        await told.publish(None)
        assert told.engine.foresight.digest is None
        assert (await told.prediction()).length_model is None


async def test_without_a_model_features_are_booked_all_the_same(tmp_path: Path) -> None:
    async with foretold(tmp_path, "nan") as told:
        # The request does not wait for what the worker says, and runs for long enough to have it in its books.
        told.world.generation = stream(3, ending=Ending.HANG)
        peer = Peer(told.world, "/generate_stream", BODY)
        client = told.predictions.client
        assert client is not None
        await until(lambda: client.outstanding == 0 and b"t3" in peer.data)
        peer.exchange.connection_lost()
        await peer.wait()
        record = told.booked().prediction
        assert record is not None
        assert (record.source, record.fallback_reason, record.quantiles) == ("default", None, None)
        assert record.features is not None
        assert told.engine.foresight.fallbacks == {}


async def test_features_are_not_booked_where_nobody_wants_them(tmp_path: Path) -> None:
    async with foretold(tmp_path) as told:
        settings = told.world.router.settings.model_copy(update={"collect_features": False})
        told.predictions._settings = settings
        record = await told.prediction()
        assert record.features is None


async def test_of_several_prompts_each_is_predicted_and_none_is_learned_from(tmp_path: Path) -> None:
    """Their lengths are booked as one sum."""
    async with foretold(tmp_path) as told:
        digest = await told.promote()
        await until(lambda: told.engine.foresight.digest == digest)
        body = {"model": "main", "prompt": ["one", "two", "three"], "max_tokens": 5}
        record = await told.prediction(body=body, path="/v1/completions")
        assert record.features is None
        assert record.quantiles == PLAIN
        assert told.engine.foresight.by_source == {"model": 3}


async def test_what_is_refused_is_not_counted(tmp_path: Path) -> None:
    async with foretold(tmp_path) as told:
        tenants = told.world.setup.tenants
        for name in tenants:
            tenants[name] = msgspec.structs.replace(tenants[name], max_queued=1)
        await told.world.router.apply(told.world.setup.snapshot())
        told.world.generation = stream(3, ending=Ending.HANG)
        body = BODY | {"parameters": {"max_new_tokens": 1_000}}
        peers = [Peer(told.world, "/generate_stream", body) for _ in range(30)]
        await until(lambda: told.world.router.ledger.running + sum(peer.status == 429 for peer in peers) == 30)
        n_refused = sum(peer.status == 429 for peer in peers)
        assert 0 < n_refused < 30
        assert sum(told.engine.foresight.by_source.values()) == 30 - n_refused
        for peer in peers:
            peer.exchange.connection_lost()
            await peer.wait()


async def test_the_worker_hears_of_every_end(tmp_path: Path) -> None:
    async with foretold(tmp_path) as told:
        digest = await told.promote()
        await until(lambda: told.engine.foresight.digest == digest)
        for expected in range(3):
            record = await told.prediction()
            assert record.features is not None
            assert int(record.features.split()[1]) == expected


async def test_a_client_that_leaves_during_the_wait_leaves_nothing_behind(tmp_path: Path) -> None:
    async with foretold(tmp_path, "slow") as told:
        digest = await told.promote()
        await until(lambda: told.engine.foresight.digest == digest)
        client = told.predictions.client
        assert client is not None
        for _ in range(10):
            peer = Peer(told.world, "/generate_stream", BODY)
            await until(lambda: client.outstanding > 0)
            peer.exchange.connection_lost()
            await peer.wait()
            await until(lambda: client.outstanding == 0)
        assert told.world.router.active == 0
        assert not told.engine.calls
        assert told.world.router.ledger.running == 0
        assert client.restarts == 0


def contents(folder: Path) -> list[tuple[str, bytes]]:
    return [(str(path), path.read_bytes()) for path in folder.rglob("*") if path.is_file()]


async def test_no_prompt_is_written_anywhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with foretold(tmp_path) as told:
        await told.promote()
        await Peer(told.world, "/generate_stream", BODY).wait()
    files = contents(tmp_path)
    assert any(b"features" in data for name, data in files if "spool" in name)
    assert not [name for name, data in files if PROMPT.encode() in data]
    written = capfd.readouterr()
    assert PROMPT not in written.out + written.err
    assert json.dumps(PROMPT) not in written.out
