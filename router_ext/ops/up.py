"""``fairlane up``: the whole of Fairlane on this machine, until Ctrl-C.

Order: lock, ports, leftovers of a killed start, then model server (it loads while the rest comes up), PostgreSQL,
Valkey, migrations, first operator and demo tenants, console, worker, beat, router. The stop goes the other way: the
router drains first, while the books can still be delivered; PostgreSQL goes last.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from router_ext.errors import SettingsError
from router_ext.ops import process, stack
from router_ext.ops.credentials import Credentials, read_credentials, write_credentials
from router_ext.ops.embedded import EmbeddedPostgres, EmbeddedValkey, write_private
from router_ext.ops.router_service import RouterService, listening, restarts_on_signal, supervising
from router_ext.ops.supervisor import (
    Embedded,
    Service,
    StartFailed,
    Supervisor,
    answers,
    ignoring_signals,
    interrupt_on_signals,
)

_GRACE_S = 25.0

_QUESTION = {
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "max_tokens": 60,
    "temperature": 0,
    "stream": True,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, help="state folder (else FAIRLANE_DIR, else .fairlane)")
    parser.add_argument("--router-port", type=int, help="else FAIRLANE_ROUTER_PORT, else 8080")
    parser.add_argument("--console-port", type=int, help="else FAIRLANE_CONSOLE_PORT, else 8000")
    parser.add_argument("--model-port", type=int, help="else FAIRLANE_MODEL_PORT, else 3000")


def run(args: argparse.Namespace) -> int:
    environ = dict(os.environ)
    for name in ("dir", "router_port", "console_port", "model_port"):
        value = getattr(args, name)
        if value is not None:
            environ[f"FAIRLANE_{name.upper()}"] = str(value)
    settings = stack.read_settings(environ)
    os.umask(0o077)  # whatever a process writes below the state folder is nobody else's business
    with interrupt_on_signals():
        Up(settings, environ, Console(highlight=False)).run()
    return 0


class Up:
    """One run of the embedded stack."""

    def __init__(self, settings: stack.StackSettings, environ: dict[str, str], console: Console) -> None:
        self.settings = settings
        self.environ = environ
        self.console = console
        self.folders = stack.Folders(settings.directory)
        self._router: RouterService | None = None
        self.supervisor = Supervisor(settings.directory / "run.json", self._say)

    def run(self) -> None:
        """Start everything, look after it until interrupted, stop everything.

        Raises:
            FairlaneError: the start failed; whatever had been started is stopped again.
        """
        began = time.monotonic()
        with contextlib.ExitStack() as exits:
            self.folders.prepare()
            was_asked = exits.enter_context(restarts_on_signal())
            exits.enter_context(_lock(self.folders.root))
            exits.enter_context(supervising(self.folders.root / "router"))
            self.supervisor.end_leftovers()
            stack.refuse_busy_ports(self.settings)
            demo = stack.demo_options(self.settings, self.folders)
            exits.callback(self._stop)
            try:
                credentials, password = self._start(exits, demo)
                self._print_summary(credentials, password, time.monotonic() - began)
                self.supervisor.also.append(partial(self._look_at_router, was_asked))
                self.supervisor.watch()
            except KeyboardInterrupt:
                self.console.print()

    # --- start ---

    def _start(self, exits: contextlib.ExitStack, demo: list[str]) -> tuple[Credentials, str | None]:
        """Bring everything up; returns the credentials, and the operator's password if it was made just now."""
        settings, folders = self.settings, self.folders
        listener = exits.enter_context(listening(settings.router_host, settings.router_port))
        admin_port = exits.enter_context(_held_port(settings.admin_port))
        model = None
        if not settings.backends:
            model = self._service("model server", stack.model_command(settings, folders), self._base_environment())
            model.ready, model.ready_limit_s = answers(f"{settings.model_url}/health"), 300.0
            self.supervisor.start(model)
        postgres = None if settings.database_url else EmbeddedPostgres(folders.root / "postgres")
        django = stack.controlplane_environment(
            settings,
            folders,
            self.environ,
            database_url=settings.database_url or self._embedded(postgres),
            redis_url=settings.redis_url or self._embedded(EmbeddedValkey(folders.root / "valkey")),
        )
        with self._step("database schema"):
            role = {} if postgres is None else {"FAIRLANE_DB_APPLICATION_ROLE": stack.APPLICATION_ROLE}
            self._django(django | role, "migrate", "--noinput", "--verbosity", "1")
        if postgres is not None:
            django["DATABASE_URL"] = postgres.url_of(stack.APPLICATION_ROLE)
        with self._step("operator, demo tenants and keys"):
            credentials, password = self._bootstrap(django, demo, admin_port)
        console = self._service("console", stack.console_command(), django)
        console.ready = answers(f"{settings.console_url}/readyz")
        worker = self._service("worker", stack.worker_command(), django)
        trainer = self._service("trainer", stack.trainer_command(), django)
        beat = self._service("beat", stack.beat_command(), django)
        for service in (console, worker, trainer, beat):
            self.supervisor.start(service)
        with self._step(f"console on {settings.console_url}"):
            console.wait_ready()
        if model is not None:
            with self._step(f"model server on {settings.model_url}"):
                model.wait_ready()
        environment = stack.router_environment(
            settings,
            folders,
            self.environ,
            listen_fd=listener.fileno(),
            redis_url=django["REDIS_URL"],
            admin_port=admin_port,
        )
        router = RouterService(
            name="router",
            command=stack.router_command(),
            env=environment,
            log=folders.log("router"),
            grace_s=_GRACE_S,
            pass_fds=(listener.fileno(),),
            ready=answers(f"{settings.router_url}/health"),
            folder=folders.root / "router",
            say=self._say,
        )
        self.supervisor.start(router)
        self._router = router
        with self._step(f"router on {settings.router_url}"):
            router.wait_ready()
        return credentials, password

    def _service(self, name: str, command: list[str], env: dict[str, str]) -> Service:
        log = self.folders.log(name.replace(" ", "-"))
        return Service(name=name, command=command, env=env, log=log, grace_s=_GRACE_S)

    def _base_environment(self) -> dict[str, str]:
        return stack.base_environment(self.environ)

    def _embedded(self, server: EmbeddedPostgres | EmbeddedValkey | None) -> str:
        assert server is not None
        with self._step(server.name):
            self.supervisor.start(Embedded(server))
        return server.url

    def _django(self, env: dict[str, str], *words: str, given: str = "") -> str:
        """Run a management command; returns its stdout. Its stderr goes to the log of the set-up."""
        status, out, err = process.run(stack.django_command(*words), env=env, given=given)
        with self.folders.log("setup").open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {words[0]}: status {status}\n{err}")
        if status != 0:
            raise StartFailed(f"{words[0]} ended with status {status}:\n{err.strip()[-2_000:]}")
        return out

    def _bootstrap(self, env: dict[str, str], demo: list[str], admin_port: int) -> tuple[Credentials, str | None]:
        """First operator, demo tenants, keys and credentials; what is still good stays as it is."""
        operator = json.loads(self._django(env, "bootstrap_operator", stack.OPERATOR_EMAIL, "--json"))
        token_file = self.folders.secret("router_token")
        held: dict[str, Any] = {}
        with contextlib.suppress(SettingsError):
            before = read_credentials(self.folders.credentials)
            held = {"tenants": before.tenants, "operator_token": before.operator_token}
        with contextlib.suppress(FileNotFoundError):
            held["router_token"] = token_file.read_text()
        seeded = json.loads(self._django(env, "seed_demo", *demo, "--held", "-", given=json.dumps(held)))
        write_private(token_file, seeded["router_token"])
        credentials = Credentials(
            router_url=self.settings.router_url,
            console_url=self.settings.console_url,
            pool=seeded["pool"],
            operator_email=seeded["operator_email"],
            operator_token=seeded["operator_token"],
            tenants=seeded["tenants"],
            admin_url=f"http://127.0.0.1:{admin_port}",
        )
        write_credentials(self.folders.credentials, credentials)
        return credentials, operator["password"]

    def _look_at_router(self, was_asked: Callable[[], bool]) -> None:
        router = self._router
        if router is not None:
            if was_asked():
                router.replace()
            router.look()

    # --- stop ---

    def _stop(self) -> None:
        with ignoring_signals():
            self.supervisor.stop()

    # --- what the user sees ---

    def _say(self, line: str) -> None:
        self.console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {escape(line)}", soft_wrap=True)

    @contextlib.contextmanager
    def _step(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        with self.console.status(f"starting {what} ..."):
            yield
        self.console.print(f"[green]ready[/green]  {what} [dim]({time.monotonic() - began:.1f} s)[/dim]")

    def _print_summary(self, credentials: Credentials, password: str | None, seconds: float) -> None:
        tenant, key = next(iter(credentials.tenants.items()))
        rows = [
            ("router", credentials.router_url),
            ("console", credentials.console_url),
            ("operator", credentials.operator_email),
            ("password", f"{password}  (once only: the first sign-in asks for your own)" if password else None),
            (f"key of {tenant}", key),
            ("all keys", str(self.folders.credentials)),
            ("without TLS", stack.reach(self.settings)),
            ("live view", "fairlane top"),
            ("logs", str(self.folders.root / "logs")),
        ]
        curl = [
            f"curl -N {credentials.router_url}/v1/chat/completions",
            f"-H 'Authorization: Bearer {key}'",
            "-H 'Content-Type: application/json'",
            f"-d '{json.dumps(_QUESTION)}'",
        ]
        self.console.print(f"\n[bold]Fairlane is ready[/bold] [dim]({seconds:.1f} s)[/dim]\n")
        for name, value in rows:
            if value is not None:
                self.console.print(f"  {name:<15} {escape(value)}", soft_wrap=True)
        # On one line: it is there to be copied.
        self.console.print(f"\n  {escape(' '.join(curl))}\n", soft_wrap=True)
        self.console.print("  Ctrl-C stops everything.\n")


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One ``up`` per state folder; the kernel frees the lock when the process ends, however it ends."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 20, 0).decode().strip() or "unknown"
            raise SettingsError(f"{folder} is in use: `fairlane up` runs already (process {holder})") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _held_port(port: int) -> Iterator[int]:
    """A port of this machine that nobody else gets (0: a free one); the router may listen there: we do not."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", port))
        yield holder.getsockname()[1]
