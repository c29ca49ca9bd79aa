"""How a process that carries out runs begins: before it has imported anything that schedules."""

from __future__ import annotations

import os
import signal

from router_ext import compiled


def prepare(core: str) -> None:
    """Run the core of the process that asks, and leave interrupts to it: Ctrl-C reaches all processes of a terminal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    compiled.activate({**os.environ, compiled.CORE_VARIABLE: core})
