"""A router is replaced under load, several times: no request fails, one scheduler decides, the books are exact."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.modelserver import ModelServer, model_server
from support.routers import RouterProcess, Setup, backend, router

from router_ext.ops.restart_router import RestartFailed, restart
from router_ext.wire.controlplane import LimitsRecord

KV_TOKENS = 4_096
LONG_WAIT = 25
"""Looks in a row at a queue inside the server. On a busy machine there may be ten at which somebody waits for the next
step; whoever waits for KV waits for the end of a stream, and then the next one does."""

STREAM = {"inputs": "Tell me a story", "parameters": {"max_new_tokens": 300}}
SHORT = {"inputs": "Hi", "parameters": {"max_new_tokens": 5}}


@pytest.fixture(scope="module")
def small_server() -> Iterator[ModelServer]:
    """Answers never end by themselves. It has exactly the KV that the router is told."""
    with server_with(step_ms=2) as running:
        yield running


@pytest.fixture(scope="module")
def slow_server() -> Iterator[ModelServer]:
    """The same, so slow that an answer outlasts the start of a router."""
    with server_with(step_ms=15) as running:
        yield running


@contextlib.contextmanager
def server_with(*, step_ms: int) -> Iterator[ModelServer]:
    flags = ("--sim-step-ms", str(step_ms), "--sim-mean-tokens", "0", "--max-total-tokens", "2048")
    # Who has room is admitted at the next step: what waits longer waits for KV.
    eager = ("--waiting-served-ratio", "0", "--max-waiting-tokens", "0")
    with model_server(*flags, *eager, "--max-batch-total-tokens", str(KV_TOKENS)) as running:
        yield running


class Load:
    """Clients of two tenants: streams that fill the server and queue, and short requests, kept alive or not."""

    def __init__(self, running: RouterProcess, keys: list[str], server: ModelServer) -> None:
        self.running, self.keys, self.server = running, keys, server
        self.tokens: dict[str, int] = {}
        self.failures: list[str] = []
        self.longest_wait = 0
        self.is_over = False

    async def stream(self, session: aiohttp.ClientSession, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        async with session.post(f"{self.running.base}/generate_stream", json=STREAM, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            lines = [line async for line in answer.content if line.startswith(b"data:")]
            last = json.loads(lines[-1][5:])
            assert last.get("generated_text"), lines[-1]
            assert len(lines) == 300
            self.tokens[answer.headers["x-request-id"]] = len(lines)

    async def short(self, session: aiohttp.ClientSession, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        async with session.post(f"{self.running.base}/generate", json=SHORT, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
            self.tokens[answer.headers["x-request-id"]] = 5

    async def client(self, kind: Any, key: str, *, keeps: bool) -> None:
        connector = aiohttp.TCPConnector(force_close=not keeps)
        async with aiohttp.ClientSession(connector=connector) as session:
            while not self.is_over:
                try:
                    await kind(session, key)
                except Exception as error:  # every one is counted
                    self.failures.append(f"{kind.__name__}: {type(error).__name__} {error}")

    async def watch(self) -> None:
        """Looks in a row at which somebody waited inside the server: nobody does if it is sent what its KV holds."""
        looks = 0
        async with aiohttp.ClientSession() as session:
            while not self.is_over:
                async with session.get(f"{self.server.base}/metrics") as answer:
                    for line in (await answer.text()).splitlines():
                        if line.startswith("tgi_queue_size "):
                            looks = looks + 1 if float(line.split()[1]) else 0
                            self.longest_wait = max(self.longest_wait, looks)
                await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def going(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            for number in range(24):
                tasks.create_task(self.client(self.stream, self.keys[number % 2], keeps=False))
            for number in range(6):
                tasks.create_task(self.client(self.short, self.keys[number % 2], keeps=number < 3))
            tasks.create_task(self.watch())
            try:
                yield
            finally:
                self.is_over = True


async def until(condition: Callable[[], object], running: RouterProcess, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, log_of(running)
        await asyncio.sleep(0.02)


def log_of(running: RouterProcess, size: int = 6_000) -> str:
    return running.log.read_text()[-size:]


def setup_of(server: ModelServer) -> tuple[Setup, list[str]]:
    setup = Setup(backends=[backend(server.port, kv_tokens=KV_TOKENS)])
    return setup, [setup.key("alice"), setup.key("bob")]


def leaving(running: RouterProcess) -> list[Path]:
    return list(running.directory.glob("leaving-*"))


async def replaced_under_load(server: ModelServer, times: int, between_s: float) -> None:
    setup, keys = setup_of(server)
    with router(setup, program="serve") as running:
        load = Load(running, keys, server)
        processes = set()
        async with load.going():
            await until(lambda: len(load.tokens) > 20 or load.failures, running)
            for _ in range(times):
                result = await asyncio.to_thread(restart, running.directory)
                processes.add(result["pid"])
                await asyncio.sleep(between_s)
        assert not load.failures, (load.failures[:5], log_of(running))
        assert load.longest_wait < LONG_WAIT
        assert len(processes) == times
        await until(lambda: not leaving(running), running)
        running.wait(running.is_idle)
        booked = [(event.request, event.output_tokens, event.outcome) for event in running.usage()]
        assert sorted(booked) == sorted((name, count, "completed") for name, count in load.tokens.items())


async def test_no_request_fails_while_the_router_is_replaced_three_times(small_server: ModelServer) -> None:
    await replaced_under_load(small_server, 3, 0.1)


@pytest.mark.slow  # a quarter of a minute of load
async def test_no_request_fails_while_the_router_is_replaced_again_and_again(small_server: ModelServer) -> None:
    await replaced_under_load(small_server, 10, 0.5)


class Streams:
    """Long streams, followed line by line."""

    def __init__(self, running: RouterProcess, key: str) -> None:
        self.running, self.key = running, key
        self.lines: list[list[bytes]] = []

    @contextlib.asynccontextmanager
    async def open(self, count: int, tokens: int) -> AsyncIterator[list[asyncio.Task[None]]]:
        async with aiohttp.ClientSession() as session:
            tasks = [asyncio.create_task(self.follow(session, tokens)) for _ in range(count)]
            try:
                yield tasks
            finally:
                for task in tasks:
                    task.cancel()

    async def follow(self, session: aiohttp.ClientSession, tokens: int) -> None:
        lines: list[bytes] = []
        self.lines.append(lines)
        body = {"inputs": "Tell me a story", "parameters": {"max_new_tokens": tokens}}
        headers = {"Authorization": f"Bearer {self.key}"}
        url = f"{self.running.base}/generate_stream"
        async with session.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200, (await answer.text(), log_of(self.running))
            async for line in answer.content:
                if line.startswith(b"data:"):
                    lines.append(line)  # noqa: PERF401 - what came before an end counts

    @property
    def counts(self) -> list[int]:
        return [len(lines) for lines in self.lines]


@contextlib.asynccontextmanager
async def replaced(running: RouterProcess, **variables: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A successor that has taken over."""
    count = running.log.read_text().count("handover.done")
    with running.successor(**variables) as process:
        await until(lambda: running.log.read_text().count("handover.done") > count, running)
        yield process


@pytest.mark.slow  # several routers one after the other
async def test_a_successor_that_does_not_get_ready_changes_nothing(slow_server: ModelServer) -> None:
    setup, keys = setup_of(slow_server)
    with router(setup) as running:
        streams = Streams(running, keys[0])
        async with streams.open(20, 600) as tasks:
            await until(lambda: sum(streams.counts) > 200, running)
            nothing = {"FAIRLANE_ROUTER_SNAPSHOT_FILE": "/nonexistent", "FAIRLANE_ROUTER_TAKE_OVER_LIMIT_S": "0.5"}
            with running.successor(**nothing) as process:
                assert await asyncio.to_thread(process.wait, 30) == 1
            assert "not ready within 0.5 s: pol_main not up here" in log_of(running)
            # The one that serves can still be replaced.
            async with replaced(running):
                await asyncio.gather(*tasks)
                assert streams.counts == [600] * 20
                await asyncio.to_thread(running.process.wait, 30)
                await until(lambda: not leaving(running), running)
                assert [event.output_tokens for event in running.usage()] == [600] * 20


@pytest.mark.slow  # several routers one after the other
async def test_requests_outlive_a_successor_that_is_killed(slow_server: ModelServer) -> None:
    """Running and waiting ones go on with the next router; nothing is lost, doubled or sent beyond the server's KV."""
    setup, keys = setup_of(slow_server)
    with router(setup) as running:
        streams = Streams(running, keys[0])
        load = Load(running, keys, slow_server)
        async with streams.open(20, 600) as tasks:
            watch = asyncio.create_task(load.watch())
            await until(lambda: sum(streams.counts) > 200, running)
            async with replaced(running) as successor:
                successor.kill()
                await asyncio.to_thread(successor.wait)
            async with replaced(running):
                await asyncio.gather(*tasks)
                assert streams.counts == [600] * 20
                load.is_over = True
                await watch
                assert load.longest_wait < LONG_WAIT
                await asyncio.to_thread(running.process.wait, 30)
                await until(lambda: not leaving(running), running)
                await until(running.is_idle, running)
                events = running.usage()
                assert [(e.output_tokens, e.outcome) for e in events] == [(600, "completed")] * 20
                assert len({event.event for event in events}) == 20


@pytest.mark.slow  # several routers one after the other
async def test_a_supervisor_goes_on_where_a_killed_successor_had_taken_over(slow_server: ModelServer) -> None:
    setup, keys = setup_of(slow_server)
    with router(setup, program="serve") as running:
        streams = Streams(running, keys[0])
        load = Load(running, keys, slow_server)
        async with streams.open(20, 600) as tasks:
            watch = asyncio.create_task(load.watch())
            await until(lambda: sum(streams.counts) > 200, running)
            result = await asyncio.to_thread(restart, running.directory)
            os.kill(result["pid"], signal.SIGKILL)
            # Meanwhile connections wait in the supervisor's socket.
            async with streams.open(1, 50) as late:
                await asyncio.gather(*tasks, *late)
            load.is_over = True
            await watch
        assert load.longest_wait < LONG_WAIT
        assert sorted(streams.counts) == [50, *[600] * 20]
        await until(lambda: not leaving(running), running)
        await until(running.is_idle, running)
        assert sorted(event.output_tokens for event in running.usage()) == [50, *[600] * 20]


@pytest.mark.slow  # several routers one after the other
async def test_the_command_says_why_the_router_was_not_replaced(slow_server: ModelServer) -> None:
    setup, keys = setup_of(slow_server)
    with router(setup, program="serve", environment={"FAIRLANE_ROUTER_TAKE_OVER_LIMIT_S": "0.5"}) as running:
        kept = running.snapshot_file.rename(running.snapshot_file.with_suffix(".kept"))
        with pytest.raises(RestartFailed, match="was not replaced, and serves on: it ended with status 1"):
            await asyncio.to_thread(restart, running.directory)
        streams = Streams(running, keys[0])
        async with streams.open(1, 20) as tasks:
            await asyncio.gather(*tasks)
        assert streams.counts == [20]
        kept.rename(running.snapshot_file)
        assert (await asyncio.to_thread(restart, running.directory))["ok"]
    with pytest.raises(RestartFailed, match="no supervisor runs a router in"):
        restart(running.directory)


@pytest.mark.slow  # several routers one after the other
async def test_a_router_that_is_killed_while_it_leaves_is_booked_by_its_successor(slow_server: ModelServer) -> None:
    setup, keys = setup_of(slow_server)
    with router(setup) as running:
        streams = Streams(running, keys[0])
        async with streams.open(20, 600) as tasks:
            await until(lambda: sum(streams.counts) > 200, running)
            async with replaced(running):
                running.process.kill()
                await asyncio.to_thread(running.process.wait)
                await asyncio.gather(*tasks, return_exceptions=True)
                await until(lambda: not leaving(running), running)
                await until(running.is_idle, running)
                # Those that waited had used nothing, and are in no books.
                got = sorted((count for count in streams.counts if count), reverse=True)
                booked = sorted((event.output_tokens for event in running.usage()), reverse=True)
                assert len(booked) >= len(got)
                assert all(0 <= more - shown <= 8 for more, shown in zip(booked, got, strict=False)), (booked, got)
                assert {event.outcome for event in running.usage()} == {"aborted"}
                # It serves: nothing is held for those that are gone.
                after = Streams(running, keys[1])
                async with after.open(1, 50) as more:
                    await asyncio.gather(*more)
                assert after.counts == [50]


@pytest.mark.slow  # two routers one after the other
async def test_nobody_gains_by_a_restart(slow_server: ModelServer) -> None:
    """One runs, the other waits for its KV: the lead that grows with every token goes over, and what is held too."""
    setup = Setup(backends=[backend(slow_server.port, kv_tokens=1_040)], scheduling={"max_preemptions": 0})
    keys = [setup.key("ahead"), setup.key("behind")]
    with router(setup) as running:
        ahead, behind = Streams(running, keys[0]), Streams(running, keys[1])
        async with ahead.open(1, 950) as first, behind.open(1, 100) as second:
            await until(lambda: sum(ahead.counts) + sum(behind.counts) > 100, running)
            await until(lambda: running.metric("fairlane_queue_length") == 1, running)
            before, held = counters_of(running), running.metric("fairlane_backend_reserved_tokens")
            async with replaced(running):
                await until(lambda: running.metric("fairlane_queue_length") == 1, running)
                after = counters_of(running)
                low, high = sorted(before, key=lambda name: before[name])
                assert after[high] - after[low] >= before[high] - before[low] > 0
                assert running.metric("fairlane_backend_reserved_tokens") == held
                for task in (*first, *second):
                    task.cancel()
                await until(running.is_idle, running)


@pytest.mark.slow  # three routers one after the other
async def test_limits_hold_across_restarts(slow_server: ModelServer) -> None:
    """What the routers before carry out counts as one of those at once, until it has ended however it does."""
    setup, _ = setup_of(slow_server)
    setup.tenant("carol", limits=LimitsRecord(concurrent=2))
    key = setup.key("carol")
    with router(setup) as running:
        streams = Streams(running, key)
        async with streams.open(2, 1_500) as tasks:
            await until(lambda: len(streams.counts) == 2 and min(streams.counts) > 10, running)
            async with replaced(running):
                assert held(running) == 2
                assert await ask(running, key) == 429
                tasks[0].cancel()
                await until(lambda: held(running) == 1, running)
                assert await ask(running, key) == 200
                async with replaced(running):
                    await until(lambda: held(running) == 1, running)
                    tasks[1].cancel()
                    await until(lambda: held(running) == 0, running)
                    await asyncio.to_thread(running.process.wait, 30)
        assert "successor_lost" not in running.log.read_text()


def held(running: RouterProcess) -> float:
    return running.metric("fairlane_limit_reservations")


async def ask(running: RouterProcess, key: str) -> int:
    """Status of a short request on a new connection."""
    headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
    async with aiohttp.ClientSession() as session:
        answer = await session.post(f"{running.base}/generate", json=SHORT, headers=headers)
        return answer.status


def counters_of(running: RouterProcess) -> dict[str, float]:
    """Service per weight above the floor, by tenant, as the scheduler has it."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{running.admin_port}/debug/pools",
        headers={"Authorization": f"Bearer {running.admin_token}"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return {tenant["tenant"]: tenant["counter"] for tenant in json.load(answer)["main"]["tenants"]}
