"""gunicorn's configuration. Threads, not processes, carry the routers' long polls: a waiting one costs a stack only."""

import signal
from types import FrameType
from typing import Any

from controlplane.environment import read_environment

_environment = read_environment()

bind = f"{_environment.console_host}:{_environment.console_port}"
worker_class = "gthread"
workers = 1
threads = _environment.console_threads
graceful_timeout = 30
timeout = 60
keepalive = 30
accesslog = None


def post_worker_init(worker: Any) -> None:
    """Settle the garbage collector, and prepare for the end.

    On SIGTERM waiting routers get their 304 at once, instead of holding the worker for the rest of their poll.
    """
    from controlplane.common.collector import settle
    from controlplane.rollout.watch import watcher

    inherited = signal.getsignal(signal.SIGTERM)

    def stop(number: int, frame: FrameType | None) -> None:
        watcher.stop()
        if callable(inherited):
            inherited(number, frame)

    signal.signal(signal.SIGTERM, stop)
    settle()
