"""Running something that must clean up behind itself, whatever ends it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rich.console import Console

T = TypeVar("T")


def run_stoppable(play: Callable[[], Awaitable[T]], console: Console, words: str) -> T:
    """Run ``play``; SIGINT, SIGTERM and SIGHUP say ``words`` and cancel it once.

    A second signal is ignored: it would cut short what the first one asks for.

    Raises:
        asyncio.CancelledError: it was stopped, and has cleaned up.
    """

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        stops = 0

        def stop() -> None:
            nonlocal stops
            stops += 1
            if stops == 1:
                console.print(words)
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        return await play()

    return asyncio.run(main())
