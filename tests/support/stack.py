"""The real parts as processes on private ports: PostgreSQL, Valkey, model server, control plane, router.

Each part can be killed and started again on its own; the router's listening socket belongs to the test, as a
supervisor's would, so clients of a router that is being restarted wait instead of being refused.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.modelserver import ModelServer, model_server

from router_ext.ops import process, stack
from router_ext.ops.credentials import Credentials, read_credentials, write_credentials
from router_ext.ops.embedded import EmbeddedPostgres, EmbeddedValkey, free_port

READY_LIMIT_S = 60.0
MODEL = "model"
KV_TOKENS = 8_192
REPORTED = ("requests", "prompt_tokens", "output_tokens")


class Stack:
    """A running stack. ``keys``: tenant key by slug; ``tenant_ids``: public id by slug."""

    def __init__(
        self,
        folder: Path,
        postgres: EmbeddedPostgres,
        valkey: EmbeddedValkey,
        redis_url: str,
        models: list[ModelServer],
        console_port: int,
    ) -> None:
        environ = dict(os.environ)
        environ |= {
            "FAIRLANE_DIR": str(folder / "state"),
            "FAIRLANE_BACKENDS": ",".join(model.base for model in models),
        }
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        environ["FAIRLANE_ROUTER_PORT"] = str(self.listener.getsockname()[1])
        environ["FAIRLANE_CONSOLE_PORT"] = str(console_port)
        self.environ = environ
        self.settings = stack.read_settings(environ)
        self.folders = stack.Folders(self.settings.directory)
        self.folders.prepare()
        self.postgres = postgres
        self.valkey = valkey
        self.models = models
        self.router_variables: dict[str, str] = {}
        self.redis_url = redis_url
        self.keys: dict[str, str] = {}
        self.tenant_ids: dict[str, str] = {}
        self._console: subprocess.Popen[bytes] | None = None
        self._router: subprocess.Popen[bytes] | None = None
        self._worker: subprocess.Popen[bytes] | None = None

    @property
    def model(self) -> ModelServer:
        """The first model server."""
        return self.models[0]

    @property
    def url(self) -> str:
        return self.settings.router_url

    def prepare(self) -> None:
        """Migrate, and lay down operator, tenants, keys and pool."""
        self._django("migrate", "--noinput")
        self._django("bootstrap_operator", "--json")
        backends = [word for model in self.models for word in ("--backend-url", model.base)]
        stated = (*backends, "--kv-tokens", str(KV_TOKENS), "--block-size", "16")
        seeded = json.loads(self._django("seed_demo", "--pool", MODEL, *stated))
        self.keys, self.tenant_ids = seeded["tenants"], seeded["tenant_ids"]
        write_credentials(
            self.settings.directory / "credentials.json",
            Credentials(
                router_url=self.url,
                console_url=self.settings.console_url,
                pool=MODEL,
                operator_email=seeded["operator_email"],
                operator_token=seeded["operator_token"],
                tenants=self.keys,
            ),
        )
        self.folders.secret("router_token").write_text(seeded["router_token"])

    def _django_environment(self) -> Mapping[str, str]:
        return stack.controlplane_environment(
            self.settings,
            self.folders,
            self.environ,
            database_url=self.postgres.recorded_url(),
            redis_url=self.redis_url,
        )

    def _django(self, *words: str) -> str:
        status, out, err = process.run(stack.django_command(*words), env=self._django_environment())
        assert status == 0, f"{words[0]}: {err}"
        return out.strip().splitlines()[-1] if out.strip() else ""

    def start_console(self) -> None:
        self._console = self._start("console", stack.console_command(), self._django_environment())
        self._wait_ready("console", self._console, f"{self.settings.console_url}/readyz")

    def kill_console(self) -> None:
        """SIGKILL to gunicorn and its workers, in whatever they were doing."""
        assert self._console is not None
        process.kill_session(self._console)
        self._console.wait()

    def start_worker(self) -> None:
        """The Celery worker of short tasks. It is not waited for."""
        self._worker = self._start("worker", stack.worker_command(), self._django_environment())

    def kill_worker(self) -> None:
        assert self._worker is not None
        process.kill_session(self._worker)
        self._worker.wait()

    @contextlib.contextmanager
    def trainer(self, **variables: str) -> Iterator[None]:
        """The worker that runs training jobs, with further variables."""
        child = self._start("trainer", stack.trainer_command(), {**self._django_environment(), **variables})
        try:
            yield
        finally:
            process.kill_session(child)
            child.wait()

    def start_router(self) -> None:
        """Start the router. Call it from the main thread: children end with the thread that started them."""
        descriptor = self.listener.fileno()
        env = stack.router_environment(
            self.settings, self.folders, self.environ, listen_fd=descriptor, redis_url=self.redis_url
        )
        env |= self.router_variables
        self._router = self._start("router", stack.router_command(), env, pass_fds=(descriptor,))

    def wait_router(self) -> None:
        """Wait until the router serves."""
        assert self._router is not None
        self._wait_ready("router", self._router, f"{self.url}/health")

    def kill_router(self) -> None:
        """SIGKILL, as the kernel's memory killer would."""
        assert self._router is not None
        self._router.kill()
        assert self._router.wait() == -signal.SIGKILL

    def drain_router(self) -> None:
        """SIGTERM, and wait for its end; the running streams have theirs before."""
        assert self._router is not None
        self._router.terminate()
        assert self._router.wait(60) == 0

    def report(self) -> dict[str, Counter[str]]:
        """The usage report of the last days: ``REPORTED`` by tenant id. JSON and CSV agree."""
        path = f"{self.settings.console_url}/api/v1/usage/report?format="
        token = read_credentials(self.settings.directory / "credentials.json").operator_token
        found: list[dict[str, Counter[str]]] = []
        for kind in ("json", "csv"):
            request = urllib.request.Request(path + kind, headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=10) as answer:
                text = answer.read().decode()
            rows = json.loads(text)["rows"] if kind == "json" else csv.DictReader(io.StringIO(text))
            sums: dict[str, Counter[str]] = defaultdict(Counter)
            for row in rows:
                sums[row["tenant"]].update({name: int(row[name]) for name in REPORTED})
            found.append(dict(sums))
        assert found[0] == found[1], "the export says something else than the report"
        return found[0]

    def stop(self) -> None:
        if self._worker is not None:
            self.kill_worker()
        if self._router is not None:
            process.stop(self._router, grace_s=15.0)
        if self._console is not None:
            process.kill_session(self._console)  # an orderly end waits for the long polls it holds
            self._console.wait()
        self.listener.close()

    def _start(
        self, name: str, command: Sequence[str], env: Mapping[str, str], *, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        return process.spawn(command, log=self.folders.log(name), env=env, pass_fds=pass_fds)

    def _wait_ready(self, name: str, child: subprocess.Popen[bytes], url: str) -> None:
        def ready_or_dead() -> bool:
            return child.poll() is not None or _answers(url)

        is_ready = process.wait_until(ready_or_dead, limit_s=READY_LIMIT_S) and child.poll() is None
        assert is_ready, f"{name} is not ready:\n{process.tail(self.folders.log(name), 40)}"


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


@contextlib.contextmanager
def running_stack(
    folder: Path,
    *model_flags: str,
    n_models: int = 1,
    router_variables: Mapping[str, str] | None = None,
    console_port: int | None = None,
) -> Iterator[Stack]:
    """Everything started and ready; ``model_flags`` are flags of the model servers (model engine)."""
    with contextlib.ExitStack() as exits:
        postgres = EmbeddedPostgres(folder / "postgres")
        exits.callback(postgres.stop)
        postgres.start()
        valkey = EmbeddedValkey(folder / "valkey")
        exits.callback(valkey.stop)
        redis_url = valkey.start()
        flags = ("--max-batch-total-tokens", str(KV_TOKENS), *model_flags)
        models = [exits.enter_context(model_server(*flags)) for _ in range(n_models)]
        running = Stack(folder, postgres, valkey, redis_url, models, console_port or free_port())
        running.router_variables |= router_variables or {}
        exits.callback(running.stop)
        running.prepare()
        running.start_console()
        running.start_router()
        running.wait_router()
        yield running


def usage_rows(url: str) -> list[dict[str, Any]]:
    """Every row of the control plane's books."""
    import psycopg
    from psycopg.rows import dict_row

    with psycopg.connect(url, row_factory=dict_row) as connection:
        return connection.execute(
            "SELECT event, request, tenant, dialect, outcome, prompt_tokens, output_tokens FROM usage_event"
        ).fetchall()
