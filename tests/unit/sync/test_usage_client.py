from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router_ext.sync.ledger import Ledger
from router_ext.sync.session import Backoff, ControlPlaneSession
from router_ext.sync.usage_client import UsageClient
from router_ext.wire.controlplane import UsageEvent

Book = Callable[[int, int], UsageEvent]


@pytest.fixture
def client(session: ControlPlaneSession, ledger: Ledger) -> UsageClient:
    backoff = Backoff(first_s=0.02, limit_s=0.04, rng=random.Random(1))
    return UsageClient(session, ledger, router="rtr_test", backoff=backoff)


@asynccontextmanager
async def running(client: UsageClient) -> AsyncIterator[None]:
    task = asyncio.create_task(client.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def delivered(control_plane: Any, ledger: Ledger, events: list[UsageEvent]) -> None:
    """Every event is in the control plane's books, exactly as it was booked, and the spool knows."""
    async with asyncio.timeout(20):
        while ledger.pending_events:  # noqa: ASYNC110 - nothing signals an empty spool
            await asyncio.sleep(0.01)
    assert sorted(control_plane.rows.values(), key=lambda event: event.event) == events


async def test_events_booked_while_it_runs_arrive(
    control_plane: Any, ledger: Ledger, book: Book, client: UsageClient
) -> None:
    async with running(client):
        events = [book(number, number) for number in range(1, 301)]
        await control_plane.wait_for(lambda: len(control_plane.rows) == 300)
        events += [book(number, number) for number in range(301, 310)]
        await delivered(control_plane, ledger, events)
    assert client.n_sent == 309
    assert client.n_known == client.n_failures == 0
    assert client.last_error is None


@pytest.mark.parametrize("fault", ["drop", "lose_answer", "short", 500, 503, 429, 401])
async def test_after_any_fault_every_event_is_there_once(
    control_plane: Any, ledger: Ledger, book: Book, client: UsageClient, fault: str | int
) -> None:
    events = [book(number, 5) for number in range(1, 20)]
    control_plane.faults = [fault, fault]
    async with running(client):
        await delivered(control_plane, ledger, events)
    assert client.n_failures == 2
    assert client.n_sent + client.n_known == 19
    first, second, third = control_plane.bodies
    assert first == second == third, "a batch is sent again byte for byte"


async def test_an_answer_lost_after_booking_is_told_apart_as_known(
    control_plane: Any, ledger: Ledger, book: Book, client: UsageClient
) -> None:
    events = [book(number, 5) for number in range(1, 8)]
    control_plane.faults = ["lose_answer"]
    assert await client.send_one()
    await delivered(control_plane, ledger, events)
    assert (client.n_sent, client.n_known) == (0, 7)


async def test_a_random_course_of_faults_and_stops_keeps_the_books_exact(
    control_plane: Any, ledger: Ledger, book: Book, client: UsageClient
) -> None:
    rng = random.Random(20261130)
    events: list[UsageEvent] = []
    async with running(client):
        for number in range(1, 200):
            events.append(book(number, rng.randint(1, 50)))
            if rng.random() < 0.1:
                control_plane.faults.append(rng.choice(["drop", "lose_answer", "short", 500]))
            if number in (60, 120):
                await control_plane.stop()
                await asyncio.sleep(0)
                await control_plane.start()
            await asyncio.sleep(0.001)
        control_plane.faults.clear()
        await delivered(control_plane, ledger, events)


@pytest.mark.parametrize("status", [400, 422, 500])
async def test_one_event_the_control_plane_fails_on_is_set_aside_and_the_others_arrive(
    control_plane: Any, ledger: Ledger, book: Book, client: UsageClient, tmp_path: Any, status: int
) -> None:
    events = [book(number, 5) for number in range(1, 12)]
    control_plane.poison = {"evt_00000007"}
    control_plane.poison_status = status
    assert await client.send_one()
    await delivered(control_plane, ledger, [event for event in events if event.event != "evt_00000007"])
    assert client.n_set_aside == 1
    [kept] = (tmp_path / "router" / "spool" / "damaged").iterdir()
    assert b'"event":"evt_00000007"' in kept.read_bytes()


async def test_a_control_plane_that_refuses_everything_makes_nothing_be_set_aside(
    control_plane: Any, ledger: Ledger, book: Book, client: UsageClient, tmp_path: Any
) -> None:
    events = [book(number, 5) for number in range(1, 4)]
    control_plane.refuses_everything = True
    async with running(client):
        await control_plane.wait_for(lambda: len(control_plane.bodies) >= 8)
        assert ledger.pending_events == 3
        control_plane.refuses_everything = False
        await delivered(control_plane, ledger, events)
    assert client.n_set_aside == 0
    assert not (tmp_path / "router" / "spool" / "damaged").exists()


async def test_a_wrong_token_delivers_nothing_and_keeps_everything(
    control_plane: Any, ledger: Ledger, book: Book
) -> None:
    book(1, 5)
    session = ControlPlaneSession(control_plane.url, "wrong")
    client = UsageClient(session, ledger, router="rtr_test")
    await client.flush(limit_s=0.3)
    assert ledger.pending_events == 1
    assert client.last_error is not None
    assert "401" in client.last_error
    assert "wrong" not in client.last_error
    await session.close()


async def test_flush_sends_what_is_pending(control_plane: Any, ledger: Ledger, book: Book, client: UsageClient) -> None:
    events = [book(number, 5) for number in range(1, 600)]
    await client.flush(limit_s=10)
    assert ledger.pending_events == 0
    await delivered(control_plane, ledger, events)


def test_backoff_doubles_up_to_its_limit_with_jitter_and_obeys_the_other_side() -> None:
    backoff = Backoff(first_s=0.2, limit_s=10.0, rng=random.Random(3))
    delays = [backoff.next_s() for _ in range(12)]
    for n, delay in enumerate(delays):
        whole = min(10.0, 0.2 * 2**n)
        assert whole / 2 <= delay <= whole
    assert len(set(delays)) == 12
    assert backoff.next_s(60.0) == 60.0
    backoff.reset()
    assert backoff.next_s() <= 0.2
