"""Stand-ins for what uvicorn keeps for every connection: a deque takes 0.7 kB before anything is in it.

An ``asyncio.Event`` has one for its waiters, a connection two events and a deque of its own; thousands of open streams
use none of them.
"""

from __future__ import annotations

import asyncio
from typing import Any


class Signal:
    """An ``asyncio.Event`` whose waiters share one future, made when somebody waits."""

    __slots__ = ("_is_set", "_waiters")

    def __init__(self, *, is_set: bool = False) -> None:
        self._is_set = is_set
        self._waiters: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        """Whether ``wait`` returns at once."""
        return self._is_set

    def set(self) -> None:
        """Let go who waits, and whoever comes before ``clear``."""
        self._is_set = True
        waiters, self._waiters = self._waiters, None
        if waiters is not None and not waiters.done():
            waiters.set_result(None)

    def clear(self) -> None:
        """Let the next one wait."""
        self._is_set = False

    async def wait(self) -> bool:
        """Until it is set. A waiter that is cancelled leaves the others waiting."""
        if not self._is_set:
            if self._waiters is None:
                self._waiters = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._waiters)
        return True


class Line(list[Any]):
    """A deque of the few requests that wait behind another on their connection."""

    __slots__ = ()

    def appendleft(self, item: Any) -> None:
        """Behind all others: ``pop`` gives it last."""
        self.insert(0, item)
