"""The control plane's reports equal what clients received, whatever dies meanwhile.

The fault script kills and restarts real processes under load, in an order its seed decides:

    pytest -m slow tests/integration/ledger --seeds 1,2,3
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from celery import Celery
from support.lossy import LossyLink
from support.metered import Load, Report, Rows, check_report, check_rows, known_requests, settled_rows
from support.modelserver import model_server
from support.stack import KV_TOKENS, Stack, running_stack

from router_ext.ops.embedded import free_port

FLAGS = ("--sim-step-ms", "20", "--sim-mean-tokens", "40", "--max-total-tokens", "512")
SEEDS = (1, 2)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        given = metafunc.config.getoption("--seeds")
        metafunc.parametrize("seed", [int(each) for each in given.split(",")] if given else SEEDS)


class World:
    """A stack with two backends, and the faults it can be put to. Each leaves everything running again."""

    def __init__(self, stack: Stack, link: LossyLink, exits: contextlib.ExitStack) -> None:
        self.stack = stack
        self.link = link
        self._exits = exits
        self.rng = random.Random(0)

    async def kill_router(self, load: Load) -> None:
        await load.wait_for(lambda: load.streaming() >= 4)
        await asyncio.to_thread(self.stack.kill_router)
        await self._start_router()

    async def drain_router(self, load: Load) -> None:
        await load.wait_for(lambda: load.streaming() >= 4)
        await asyncio.to_thread(self.stack.drain_router)
        await self._start_router()

    async def _start_router(self) -> None:
        self.stack.start_router()
        await asyncio.to_thread(self.stack.wait_router)

    async def kill_postgresql(self, load: Load) -> None:
        process = self.stack.postgres.process
        assert process is not None
        process.kill()
        await asyncio.to_thread(process.wait)
        await progress(load, 25)
        self.stack.postgres.start()

    async def kill_router_without_postgresql(self, load: Load) -> None:
        """It starts from its saved configuration; what it booked before waits in its spool."""
        process = self.stack.postgres.process
        assert process is not None
        process.kill()
        await asyncio.to_thread(process.wait)
        await progress(load, 10)
        await self.kill_router(load)
        await progress(load, 10)
        self.stack.postgres.start()

    async def kill_valkey(self, load: Load) -> None:
        process = self.stack.valkey.process
        assert process is not None
        process.kill()
        await asyncio.to_thread(process.wait)
        await progress(load, 10)
        self.stack.valkey.start()

    async def kill_worker(self, load: Load) -> None:
        with Celery(broker=self.stack.redis_url) as sender:
            for task in ("roll_up_minutes", "roll_up", "make_partitions"):
                sender.send_task(f"controlplane.usage.tasks.{task}", queue="default")
        await progress(load, 5)
        await asyncio.to_thread(self.stack.kill_worker)
        self.stack.start_worker()

    async def kill_console(self, load: Load) -> None:
        """Again and again while batches come in: between a commit and its answer, too."""
        for _ in range(3):
            await progress(load, 3)
            await asyncio.to_thread(self.stack.kill_console)
            self.stack.start_console()

    async def lose_acknowledgements(self, load: Load) -> None:
        wanted = self.link.n_lost + 3
        self.link.lose(3)
        await load.wait_for(lambda: self.link.n_lost >= wanted)

    async def kill_backend(self, load: Load) -> None:
        place = self.rng.randrange(len(self.stack.models))
        old = self.stack.models[place]
        await load.wait_for(lambda: load.streaming() >= 4)
        old.process.kill()
        await asyncio.to_thread(old.process.wait)
        await progress(load, 10)
        flags = ("--max-batch-total-tokens", str(KV_TOKENS), *FLAGS)
        again = model_server(*flags, port=old.port)
        self.stack.models[place] = await asyncio.to_thread(self._exits.enter_context, again)

    async def hang_backend(self, load: Load) -> None:
        process = self.rng.choice(self.stack.models).process
        process.send_signal(signal.SIGSTOP)
        try:
            await progress(load, 20)
        finally:
            process.send_signal(signal.SIGCONT)

    @property
    def whole_script(self) -> list[Callable[[Load], Awaitable[None]]]:
        return [
            self.kill_router,
            self.drain_router,
            self.kill_postgresql,
            self.kill_router_without_postgresql,
            self.kill_valkey,
            self.kill_worker,
            self.kill_console,
            self.lose_acknowledgements,
            self.kill_backend,
            self.hang_backend,
        ]


async def progress(load: Load, n_requests: int) -> None:
    """Until so many more requests have come to their end: whatever is down, the router serves on."""
    n_completed = load.completed()
    await load.wait_for(lambda: load.completed() >= n_completed + n_requests, limit_s=60.0)


@contextlib.asynccontextmanager
async def exact_books(world: World, load: Load) -> AsyncIterator[None]:
    """Load during the block; afterwards rows and report are what the clients counted."""
    stack = world.stack
    before, report_before = await known_requests(stack), await asyncio.to_thread(stack.report)
    async with load.running():
        await progress(load, 10)
        yield
        await progress(load, 10)
    rows = await settled_rows(stack, load, before)
    check_rows(stack, load, rows)
    report = await asyncio.to_thread(stack.report)
    check_report(stack, load, rows, report_before, report)
    check_the_check(stack, load, rows, report_before, report)


def check_the_check(stack: Stack, load: Load, rows: Rows, before: Report, report: Report) -> None:
    """One request or prompt token too few or too many, or the tokens of one stream doubled or lost, is seen."""
    most = sum(one.asked_tokens for one in load.received)
    for tenant in stack.tenant_ids.values():
        for name, change in [("requests", -1), ("requests", 1), ("prompt_tokens", -1), ("prompt_tokens", 1)]:
            wrong = {**report, tenant: Counter(report[tenant])}
            wrong[tenant][name] += change
            with pytest.raises(AssertionError):
                check_report(stack, load, rows, before, wrong)
        wrong = {**report, tenant: report[tenant] + Counter({"output_tokens": most})}
        with pytest.raises(AssertionError):
            check_report(stack, load, rows, before, wrong)
    request = next(one.request for one in load.received if one.is_complete)
    assert request is not None
    for tokens in (rows[request]["output_tokens"] * 2, 0):
        with pytest.raises(AssertionError):
            check_rows(stack, load, {**rows, request: {**rows[request], "output_tokens": tokens}})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    link, port = LossyLink(), free_port()
    variables = {
        "FAIRLANE_CONTROLPLANE_URL": f"http://127.0.0.1:{port}",
        "FAIRLANE_ROUTER_UPSTREAM_IDLE_S": "2",
        "FAIRLANE_ROUTER_HEALTH_TIMEOUT_S": "2",
    }
    with contextlib.ExitStack() as exits:
        console = free_port()
        exits.enter_context(link.running(port, console))
        folder = tmp_path_factory.mktemp("stack")
        stack = exits.enter_context(
            running_stack(folder, *FLAGS, n_models=2, router_variables=variables, console_port=console)
        )
        yield World(stack, link, exits)


async def test_the_books_are_exact_after_the_worst_of_the_script(world: World) -> None:
    """A router killed while PostgreSQL is, and acknowledgements that never arrive."""
    load = Load(world.stack, seed=3, n_clients=8, share_leaving=0.1)
    async with exact_books(world, load):
        await world.kill_router_without_postgresql(load)
        await world.lose_acknowledgements(load)
    assert sum(one.status == 200 and not one.is_complete and not one.has_left for one in load.received) >= 4


@pytest.mark.slow  # the whole script takes one to two minutes a seed
@pytest.mark.timeout(600)
async def test_the_books_are_exact_after_the_whole_script(world: World, seed: int) -> None:
    world.rng.seed(seed)
    world.stack.start_worker()
    steps = world.whole_script
    world.rng.shuffle(steps)
    load = Load(world.stack, seed=seed, n_clients=10, share_leaving=0.15)
    async with exact_books(world, load):
        for step in steps:
            await step(load)
            await progress(load, 10)
    world.stack.kill_worker()
