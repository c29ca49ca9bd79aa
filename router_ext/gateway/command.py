"""``fairlane router``: one router process on uvloop."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import ssl

import uvloop

from router_ext import __version__, compiled
from router_ext.gateway.admin import AdminApp
from router_ext.gateway.app import App
from router_ext.gateway.certificate import follow_certificate
from router_ext.gateway.handover import HandoverFailed
from router_ext.gateway.lifespan import Router
from router_ext.gateway.server import RouterServer, listen, make_server, tls_context
from router_ext.gateway.succession import Greeting, greet
from router_ext.obs import collector, logs
from router_ext.settings import RouterSettings, load_router_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", help="address to listen on (FAIRLANE_ROUTER_HOST)")
    parser.add_argument("--port", type=int, help="port to listen on (FAIRLANE_ROUTER_PORT)")
    parser.add_argument("--dir", help="folder for snapshot, spool and counters (FAIRLANE_ROUTER_DIR)")
    parser.add_argument("--snapshot-file", help="serve this snapshot, without a control plane")
    parser.add_argument(
        "--take-over",
        action="store_true",
        default=None,
        help="replace the router that serves from this folder, without a failed request",
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="least level of the log")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, then drain. 0: everything ended in order."""
    settings, _ = load_router_settings(
        host=args.host,
        port=args.port,
        dir=args.dir,
        snapshot_file=args.snapshot_file,
        take_over=args.take_over,
        log_level=args.log_level,
    )
    logs.configure(level=settings.log_level, router=settings.id, has_requests=settings.request_log)
    greeting = greet(settings.dir, is_replacing=settings.take_over)
    given = greeting.listener if greeting is not None and settings.listen_fd is None else None
    listener = listen(settings, host=settings.host, port=settings.port, given=given)
    admin = None
    if settings.admin_port is not None:
        given = None if greeting is None else greeting.admin
        admin = listen(settings, host=settings.admin_host, port=settings.admin_port, given=given)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, listener, admin, greeting))
    return 0


async def serve(
    settings: RouterSettings,
    listener: socket.socket,
    admin: socket.socket | None = None,
    greeting: Greeting | None = None,
) -> None:
    """Run one router on sockets that are bound already.

    Raises:
        HandoverFailed: the router that was to be replaced (``greeting``) goes on instead.
    """
    log = logs.get_logger(__name__)
    # Whatever may fail comes before another router is told to leave.
    tls = tls_context(settings)
    router = Router(settings, greeting=greeting, sockets=[listener, *([admin] if admin is not None else [])])
    failure: HandoverFailed | None = None
    async with router.running():
        try:
            await router.take_over()
        except HandoverFailed as error:
            # Raised once everything is closed.
            failure = error
        else:
            await _serve(router, listener, admin, tls)
    if failure is not None:
        raise failure
    log.info("router.stopped")


async def _serve(
    router: Router, listener: socket.socket, admin: socket.socket | None, tls: ssl.SSLContext | None
) -> None:
    settings = router.settings
    log = logs.get_logger(__name__)
    servers: list[RouterServer] = []

    def finish() -> None:
        for each in servers:
            each.finish()

    server = make_server(App(router), settings, on_drain=lambda: router.begin_drain(finish), tls=tls)
    servers.append(server)

    def leave() -> None:
        for each in servers:
            each.stop_accepting()
        router.begin_leave(finish, lambda: server.num_connections)

    router.on_left = leave
    async with asyncio.TaskGroup() as tasks:
        if admin is not None and settings.admin_token is not None:
            token = settings.admin_token.get_secret_value()
            admin_server = make_server(AdminApp(router, token), settings)
            servers.append(admin_server)
            tasks.create_task(admin_server.serve(sockets=[admin]))
        watch = None if tls is None else tasks.create_task(follow_certificate(tls, settings))
        with collector.tuned():
            host, port = listener.getsockname()[:2]
            router.listening()
            log.info("router.listening", host=host, port=port, version=__version__, core=compiled.running())
            if why := compiled.why_source(os.environ):
                log.info("core.interpreted", why=why)
            if settings.ready_fd is not None:
                os.write(settings.ready_fd, b"serving\n")
                os.close(settings.ready_fd)
            await server.serve(sockets=[listener])
        if watch is not None:
            watch.cancel()
        finish()
