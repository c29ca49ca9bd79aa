"""A control plane of its own for measurements: private servers, ports nobody uses, everything below one folder."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from router_ext.errors import FairlaneError
from router_ext.ops import process, stack
from router_ext.ops.embedded import EmbeddedPostgres, EmbeddedValkey, free_port, write_private
from router_ext.ops.measures import descendants, resident_bytes
from router_ext.ops.supervisor import Service, answers

_GRACE_S = 20.0
_SHARED_BUFFERS = "256MB"
"""What a database of this size is given; the embedded stack's 64 MB are for a laptop."""


class UsageBenchFailed(FairlaneError):
    """Something of the installation did not start, or did not answer as it should."""


class Installation:
    """A folder with a database, whose programs run as long as their context managers.

    Attributes:
        was_there: the database was filled by an earlier run.
    """

    def __init__(self, folder: Path) -> None:
        self.folders = stack.Folders(folder)
        self.folders.prepare()
        self._filled = folder / "filled.json"
        self.was_there = self._filled.exists()
        self._settings = stack.StackSettings(
            directory=folder,
            router_host="127.0.0.1",
            router_port=free_port(),
            console_host="127.0.0.1",
            console_port=free_port(),
            model_port=free_port(),
            admin_port=0,
            database_url=None,
            redis_url=None,
            backends=(),
        )
        self._environment: dict[str, str] = {}
        self._redis_url = ""

    @property
    def url(self) -> str:
        """Of the control plane, while it ``serves``."""
        return self._settings.console_url

    @contextlib.contextmanager
    def database(self) -> Iterator[None]:
        """PostgreSQL and Valkey, with the schema and an owner."""
        root = self.folders.root
        postgres = EmbeddedPostgres(root / "postgres", parameters={"shared_buffers": _SHARED_BUFFERS})
        with postgres, EmbeddedValkey(root / "valkey") as self._redis_url:
            self._environment = stack.controlplane_environment(
                self._settings, self.folders, os.environ, database_url=postgres.url, redis_url=self._redis_url
            ) | {"FAIRLANE_LOG_LEVEL": "CRITICAL"}
            role = {"FAIRLANE_DB_APPLICATION_ROLE": stack.APPLICATION_ROLE}
            self._django("migrate", "--noinput", "--verbosity", "0", more=role)
            self._environment["DATABASE_URL"] = postgres.url_of(stack.APPLICATION_ROLE)
            if not self.was_there:
                self._django("bootstrap_operator", stack.OPERATOR_EMAIL)
            yield

    def step(self, *words: str, given: str = "") -> dict[str, object]:
        """Run ``manage.py bench_usage`` with these words, its progress on our stderr; returns what it printed."""
        found: dict[str, object] = json.loads(self._django("bench_usage", *words, given=given))
        return found

    def remember(self, filled: dict[str, object]) -> None:
        """Keep what filling said, secrets included, for later runs in this folder."""
        write_private(self._filled, json.dumps(filled))

    def remembered(self) -> dict[str, object]:
        """What filling said."""
        found: dict[str, object] = json.loads(self._filled.read_text())
        return found

    def _django(self, *words: str, given: str = "", more: dict[str, str] | None = None) -> str:
        status, out, err = process.run(
            stack.django_command(*words),
            env=self._environment | (more or {}),
            given=given,
            keeps_errors=words[0] != "bench_usage",
        )
        if status != 0:
            raise UsageBenchFailed(f"{words[0]} ended with status {status} {err.strip()[-2_000:]}")
        return out

    @contextlib.contextmanager
    def serving(self) -> Iterator[Service]:
        """The control plane under gunicorn, as ``fairlane up`` starts it."""
        console = Service(
            name="console",
            command=stack.console_command(),
            env=self._environment,
            log=self.folders.log("console"),
            grace_s=_GRACE_S,
            ready=answers(f"{self.url}/readyz"),
        )
        with _running(console):
            yield console

    @contextlib.contextmanager
    def routers(self, tokens: list[str]) -> Iterator[list[str]]:
        """A router by each token, without a prediction worker; their names."""
        names = [f"measured-{number}" for number in range(1, len(tokens) + 1)]
        with contextlib.ExitStack() as running:
            for name, token in zip(names, tokens, strict=True):
                port, folder = free_port(), self.folders.root / name
                environment = stack.base_environment(os.environ) | {
                    "FAIRLANE_ROUTER_ID": name,
                    "FAIRLANE_ROUTER_PORT": str(port),
                    "FAIRLANE_ROUTER_DIR": str(folder),
                    "FAIRLANE_ROUTER_TOKEN": token,
                    "FAIRLANE_ROUTER_PREDICTOR": "false",
                    "FAIRLANE_ROUTER_REDIS_URL": self._redis_url,
                    "FAIRLANE_CONTROLPLANE_URL": self.url,
                    "FAIRLANE_KEY_PEPPER_FILE": str(self.folders.secret("key_pepper")),
                }
                router = Service(
                    name=name,
                    command=stack.router_command(),
                    env=environment,
                    log=self.folders.log(name),
                    grace_s=_GRACE_S,
                )
                running.enter_context(_running(router))
            yield names


def serving_process(service: Service) -> int:
    """The process that answers: of gunicorn's the one with most memory."""
    assert service.pid is not None
    return max(descendants(service.pid), key=resident_bytes)


@contextlib.contextmanager
def _running(service: Service) -> Iterator[None]:
    service.start()
    try:
        service.wait_ready()
        yield
    finally:
        service.stop()
