"""A router process that notes every time its event loop stood still.

``python -m router_ext.ops.configbench.watched FILE``: the router as ``fairlane router`` runs it, and beside it a task
that wakes each millisecond. Lines of ``FILE``: instant (s, CLOCK_MONOTONIC), by how much later than
asked for (ms), and processor time that the process used meanwhile (ms): what is beyond that, others took.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import uvloop

from router_ext.gateway.command import serve
from router_ext.gateway.server import listen
from router_ext.obs import logs
from router_ext.settings import load_router_settings

TICK_S = 0.001
_NOTED_S = 0.001


async def _watch(path: Path) -> None:
    with path.open("w", buffering=1) as file:
        last, used = time.monotonic(), time.process_time()
        while True:
            await asyncio.sleep(TICK_S)
            now, spent = time.monotonic(), time.process_time()
            if (late := now - last - TICK_S) > _NOTED_S:
                file.write(f"{now:.6f} {late * 1_000:.3f} {(spent - used) * 1_000:.3f}\n")
            last, used = now, spent


async def _run(path: Path) -> None:
    settings, _ = load_router_settings()
    logs.configure(level=settings.log_level, router=settings.id)
    watching = asyncio.create_task(_watch(path))
    try:
        await serve(settings, listen(settings, host=settings.host, port=settings.port))
    finally:
        watching.cancel()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(Path(sys.argv[1])))
