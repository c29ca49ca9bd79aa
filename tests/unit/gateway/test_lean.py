"""The stand-ins behave as what they stand for."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from router_ext.gateway.lean import Line, Signal


@pytest.mark.parametrize("make", [Signal, asyncio.Event], ids=["own", "asyncio"])
async def test_who_waits_goes_when_it_is_set_and_a_cancelled_one_takes_nobody_along(
    make: type[Signal] | type[asyncio.Event],
) -> None:
    signal = make()
    waiting = [asyncio.create_task(signal.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, False, False]
    assert waiting[0].cancelled()
    signal.set()
    assert await asyncio.gather(*waiting[1:]) == [True, True]
    assert signal.is_set()
    assert await signal.wait()
    signal.clear()
    again = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    assert not again.done()
    signal.set()
    signal.clear()
    assert await again, "it was set while it waited"


async def test_all_waiters_cancelled_leave_it_usable() -> None:
    signal = Signal()
    for _ in range(2):
        task = asyncio.create_task(signal.wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    signal.set()
    assert await signal.wait()


def test_a_line_gives_first_who_came_first() -> None:
    line, plain = Line(), deque[int]()
    for number in range(5):
        line.appendleft(number)
        plain.appendleft(number)
    assert [line.pop() for _ in range(5)] == [plain.pop() for _ in range(5)] == list(range(5))
    assert not line
