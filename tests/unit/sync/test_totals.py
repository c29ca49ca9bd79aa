"""Totals of quotas are pulled, continued and asked for whole; usage and totals never cross."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from support.published import TOKEN, ControlPlane

from router_ext.sync.ledger import Ledger
from router_ext.sync.link import ControlPlaneLink
from router_ext.sync.quota import QuotaBook
from router_ext.sync.session import ControlPlaneSession
from router_ext.sync.totals import TotalsClient
from router_ext.wire.controlplane import Heartbeat, TotalRecord, Totals, UsageEvent

DAY = "2023-11-14"
"""That of the ledger's test events."""
DAY_NUMBER = 19_675


def totals(as_of_us: int, tokens: int, *, is_whole: bool = True, live: int = 1) -> Totals:
    records = [TotalRecord(scope="ten_1", day_tokens=tokens, month_tokens=tokens)]
    return Totals(as_of_us=as_of_us, day=DAY, is_whole=is_whole, live_routers=live, totals=records)


async def test_it_asks_for_all_at_first_and_for_changes_then(
    control_plane: ControlPlane, session: ControlPlaneSession
) -> None:
    book = QuotaBook()
    client = TotalsClient(session, book, turn=asyncio.Lock())
    assert client.age_s is None
    assert not await client.pull()
    assert client.last_error is not None
    control_plane.totals = totals(50, 7, live=3)
    assert await client.pull()
    assert (client.last_error, book.live_routers, book.used("ten_1", DAY_NUMBER)) == (None, 3, (7, 7))
    assert client.age_s is not None
    control_plane.totals = totals(60, 9, is_whole=False)
    assert await client.pull()
    assert book.used("ten_1", DAY_NUMBER) == (9, 9)
    client.notify(is_whole=True)
    assert await client.pull()
    assert control_plane.asked_since == [0, 0, 50, 0]
    # A failed question for all is repeated as one.
    await control_plane.stop()
    client.notify(is_whole=True)
    assert not await client.pull()
    await control_plane.start()
    assert await client.pull()
    assert control_plane.asked_since[-1] == 0
    assert book.used("ten_1", DAY_NUMBER) == (9, 9)


async def test_answers_of_any_size_are_the_same(control_plane: ControlPlane, session: ControlPlaneSession) -> None:
    book = QuotaBook()
    client = TotalsClient(session, book, turn=asyncio.Lock())
    for tokens in (7, 9):
        records = [TotalRecord(scope=f"key_{n}", day_tokens=n, month_tokens=n + tokens) for n in range(5_000)]
        control_plane.totals = Totals(as_of_us=tokens, day=DAY, live_routers=2, totals=records)
        client.notify(is_whole=True)
        assert await client.pull()
        for number in (0, 1, 4_999):
            assert book.used(f"key_{number}", DAY_NUMBER) == (number, number + tokens)
        assert not book._replaced
    records = [TotalRecord(scope=f"key_{n}", day_tokens=1, month_tokens=1) for n in range(3_000)]
    control_plane.totals = Totals(as_of_us=10, day=DAY, is_whole=False, totals=records)
    assert await client.pull()
    assert book.used("key_2999", DAY_NUMBER) == (1, 1)
    assert book.used("key_3000", DAY_NUMBER) == (3_000, 3_009)


async def test_changes_of_another_day_are_not_taken_for_all(
    control_plane: ControlPlane, session: ControlPlaneSession
) -> None:
    book = QuotaBook()
    client = TotalsClient(session, book, turn=asyncio.Lock())
    control_plane.totals = totals(50, 7)
    assert await client.pull()
    control_plane.totals = Totals(as_of_us=60, day="2023-11-15", is_whole=False)
    assert not await client.pull()
    assert await client.pull() is False
    assert control_plane.asked_since == [0, 50, 0]
    assert book.as_of_us == 50


@pytest.fixture
async def linked(control_plane: ControlPlane, ledger: Ledger, tmp_path: Path) -> AsyncIterator[tuple[Any, QuotaBook]]:
    book = QuotaBook()
    ledger.on_end = lambda _, event: None if event is None else book.booked(event)
    link = ControlPlaneLink(
        url=control_plane.url, token=TOKEN, directory=tmp_path / "link", router="rtr_test", ledger=ledger,
        apply=lambda _: None, quotas=book,
        build_heartbeat=lambda: Heartbeat(
            router="rtr_test", version="0", address="", applied_revision=0, applied_at_us=0
        ),
    )  # fmt: skip
    yield link, book
    await link.close()


async def test_events_are_counted_once_on_their_way_to_the_totals(
    control_plane: ControlPlane, ledger: Ledger, book: Callable[[int, int], UsageEvent], linked: Any
) -> None:
    link, quotas = linked
    for number in (1, 4, 7):
        book(number, 5)
    assert quotas.used("ten_1", DAY_NUMBER) == (45, 45)
    control_plane.booked_at_us = 100
    assert await link.usage.send_one()
    assert ledger.pending_events == 0
    assert quotas.used("ten_1", DAY_NUMBER) == (45, 45)
    control_plane.totals = totals(99, 0)
    assert await link.totals.pull()
    assert quotas.used("ten_1", DAY_NUMBER) == (45, 45)
    control_plane.totals = totals(100, 45, is_whole=False)
    assert await link.totals.pull()
    assert quotas.used("ten_1", DAY_NUMBER) == (45, 45)
    assert not quotas._own.get("ten_1")


async def test_an_acknowledgment_that_got_lost_asks_for_new_totals_at_once(
    control_plane: ControlPlane, ledger: Ledger, book: Callable[[int, int], UsageEvent], linked: Any
) -> None:
    """Its events count twice from totals that have them on, until they are acknowledged again."""
    link, quotas = linked
    book(1, 5)
    control_plane.faults = ["lose_answer"]
    control_plane.booked_at_us = 100
    control_plane.totals = totals(101, 15)
    assert await link.totals.pull()
    task = asyncio.create_task(link.run())
    async with asyncio.timeout(10):
        while quotas.used("ten_1", DAY_NUMBER) != (15, 15) or ledger.pending_events:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert link.usage.n_known == 1


async def test_usage_and_totals_wait_for_each_other(control_plane: ControlPlane, ledger: Ledger, linked: Any) -> None:
    link, _ = linked
    async with link.totals._turn:
        task = asyncio.create_task(link.totals.run())
        await asyncio.sleep(0)
        assert control_plane.asked_since == []
    await control_plane.wait_for(lambda: len(control_plane.asked_since) == 1)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
