"""``fairlane serve``: a router with a supervisor of its own, for containers and services.

The supervisor owns the listening socket and starts the router on it; it starts a crashed one again (connections wait
meanwhile), and replaces it without a failed request on SIGUSR1, which ``fairlane restart-router`` sends. Settings are
the router's; its log goes to our own output.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from router_ext.gateway.command import add_arguments as add_arguments
from router_ext.ops.router_service import RouterService, listening, restarts_on_signal, supervising
from router_ext.ops.supervisor import Supervisor, ignoring_signals, interrupt_on_signals
from router_ext.settings import load_router_settings, variable_of

_MARGIN_S = 15.0


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP, then let the router drain."""
    given = {name: getattr(args, name) for name in ("host", "port", "dir", "snapshot_file", "log_level")}
    settings, _ = load_router_settings(**given)
    variables = {variable_of(name): str(value) for name, value in given.items() if value is not None}
    supervisor = Supervisor(None, _say)
    with (
        interrupt_on_signals(),
        restarts_on_signal() as was_asked,
        supervising(settings.dir),
        listening(settings.host, settings.port) as listener,
    ):
        router = RouterService(
            name="router",
            command=[sys.executable, "-m", "router_ext.cli", "router"],
            env={**os.environ, **variables, variable_of("listen_fd"): str(listener.fileno())},
            log=None,
            grace_s=settings.drain_limit_s + _MARGIN_S,
            pass_fds=(listener.fileno(),),
            folder=settings.dir,
            say=_say,
        )

        def look() -> None:
            if was_asked():
                router.replace()
            router.look()

        supervisor.also.append(look)
        try:
            supervisor.start(router)
            supervisor.watch()
        except KeyboardInterrupt:
            pass
        finally:
            with ignoring_signals():
                supervisor.stop()
    return 0


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
