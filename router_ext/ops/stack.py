"""What the embedded stack consists of: its settings, its folders and secrets, each process's command and environment.

Nothing here starts anything; ``router_ext.ops.up`` does.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import secrets
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from router_ext import compiled
from router_ext.errors import SettingsError
from router_ext.ops.embedded import port_is_free, write_private

APPLICATION_ROLE = "fairlane_app"
"""Whom the control plane is in the embedded PostgreSQL. Migrations run as its superuser."""
OPERATOR_EMAIL = "operator@fairlane.local"

# Small on purpose: a flood of 500 to 700 token prompts fills this budget with a handful of requests.
MAX_TOTAL_TOKENS = 1_536
MAX_INPUT_TOKENS = MAX_TOTAL_TOKENS - 1  # TGI's own default; a smaller one would make long answers impossible to resume
KV_TOKENS = 4_096
PREFILL_TOKENS = 512
BLOCK_SIZE = 16

_PASSED_ON = (
    *compiled.VARIABLES,
    "PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "SSL_CERT_FILE",
    "OMP_NUM_THREADS",
)
_DRAIN_S = 10

_NOT_OF_UP = (
    "FAIRLANE_ROUTER_TLS_CERT_FILE",  # what it prints and calls is http://
    "FAIRLANE_ROUTER_TLS_KEY_FILE",
    "FAIRLANE_ROUTER_SNAPSHOT_FILE",  # its router serves what its control plane says
)
_OF_THE_STACK = tuple(f"FAIRLANE_ROUTER_{name}" for name in ("TOKEN", "REDIS_URL_FILE", "TAKE_OVER", "READY_FD"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """Settings of ``fairlane up``, from the environment. None means the embedded part, port 0 any free one."""

    directory: Path
    router_host: str
    router_port: int
    console_host: str
    console_port: int
    model_port: int
    admin_port: int
    database_url: str | None
    redis_url: str | None
    backends: tuple[str, ...]

    @property
    def router_url(self) -> str:
        return _url(self.router_host, self.router_port)

    @property
    def console_url(self) -> str:
        return _url(self.console_host, self.console_port)

    @property
    def model_url(self) -> str:
        return _url("127.0.0.1", self.model_port)

    @property
    def backend_urls(self) -> tuple[str, ...]:
        return self.backends or (self.model_url,)


def read_settings(environ: Mapping[str, str]) -> StackSettings:
    """Read and check the variables of ``fairlane up``.

    Raises:
        SettingsError: naming the variable, its value and what is accepted.
    """
    backends = tuple(
        part.strip().rstrip("/") for part in environ.get("FAIRLANE_BACKENDS", "").split(",") if part.strip()
    )
    for url in backends:
        if not url.startswith(("http://", "https://")):
            raise SettingsError(f"FAIRLANE_BACKENDS: {url!r} is no http:// or https:// address")
    if unfit := sorted(name for name in environ if name in _NOT_OF_UP):
        raise SettingsError(f"{', '.join(unfit)}: not for `fairlane up`; `fairlane serve` runs a router with it")
    settings = StackSettings(
        directory=Path(environ.get("FAIRLANE_DIR") or ".fairlane").absolute(),
        router_host=environ.get("FAIRLANE_ROUTER_HOST") or "127.0.0.1",
        router_port=_port(environ, "FAIRLANE_ROUTER_PORT", 8080),
        console_host=environ.get("FAIRLANE_CONSOLE_HOST") or "127.0.0.1",
        console_port=_port(environ, "FAIRLANE_CONSOLE_PORT", 8000),
        model_port=_port(environ, "FAIRLANE_MODEL_PORT", 3000),
        admin_port=_port(environ, "FAIRLANE_ADMIN_PORT", 0) if environ.get("FAIRLANE_ADMIN_PORT") else 0,
        database_url=environ.get("DATABASE_URL") or None,
        redis_url=environ.get("REDIS_URL") or None,
        backends=backends,
    )
    ports = [settings.router_port, settings.console_port, *([] if backends else [settings.model_port])]
    ports += [settings.admin_port] if settings.admin_port else []
    if len(set(ports)) != len(ports):
        raise SettingsError(f"router, console, model server and admin port need different ports, not {ports}")
    return settings


def reach(settings: StackSettings) -> str:
    """Who can reach what speaks plain HTTP (``FAIRLANE_INSECURE_HTTP``), for people who start the stack."""
    hosts = {"router": settings.router_host, "console": settings.console_host}
    open_ones = [name for name, host in hosts.items() if not _is_loopback(host)]
    if open_ones:
        return (
            f"{' and '.join(open_ones)} can be reached from OTHER MACHINES, where keys and passwords pass in the clear"
        )
    return "plain HTTP, for this machine only; no second factor is asked for"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def refuse_busy_ports(settings: StackSettings) -> None:
    """Raise before anything is started if another program listens where we must.

    Raises:
        SettingsError: every busy port, its purpose and the variable that moves it.
    """
    wanted = [
        ("router", "FAIRLANE_ROUTER_PORT", settings.router_host, settings.router_port),
        ("console", "FAIRLANE_CONSOLE_PORT", settings.console_host, settings.console_port),
    ]
    if not settings.backends:
        wanted.append(("model server", "FAIRLANE_MODEL_PORT", "127.0.0.1", settings.model_port))
    if settings.admin_port:
        wanted.append(("router for operators", "FAIRLANE_ADMIN_PORT", "127.0.0.1", settings.admin_port))
    busy = [
        f"port {port} of the {what} is taken by another program (set {variable} to another one)"
        for what, variable, host, port in wanted
        if not port_is_free(host, port)
    ]
    if busy:
        raise SettingsError("; ".join(busy))


@dataclass(frozen=True, slots=True)
class Folders:
    """Where everything lives below the state folder (docs/architecture.md)."""

    root: Path

    @property
    def credentials(self) -> Path:
        return self.root / "credentials.json"

    def secret(self, name: str) -> Path:
        return self.root / "secrets" / name

    def log(self, name: str) -> Path:
        return self.root / "logs" / f"{name}.log"

    def prepare(self) -> None:
        """Make the folders (0700) and, once, the secrets (0600)."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root.chmod(0o700)
        for name in ("secrets", "logs", "router", "model"):
            (self.root / name).mkdir(mode=0o700, exist_ok=True)
        for name, text in (
            ("secret_key", secrets.token_urlsafe(48)),
            ("key_pepper", secrets.token_hex(32)),
            ("admin_token", secrets.token_urlsafe(24)),
        ):
            path = self.secret(name)
            if not path.exists():
                write_private(path, text)


def base_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What every process gets; Fairlane's own variables and secrets are added by name where they are needed."""
    kept = {name: environ[name] for name in _PASSED_ON if name in environ}
    return kept | {"PYTHONUNBUFFERED": "1", "PATH": f"{Path(sys.executable).parent}:{environ.get('PATH', os.defpath)}"}


def model_command(settings: StackSettings, folders: Folders) -> list[str]:
    return [
        *_fairlane("devserver"),
        *("--engine", "torch", "--hostname", "127.0.0.1", "--port", str(settings.model_port)),
        *("--sim-data-dir", str(folders.root / "model"), "--graceful-termination-timeout", "5"),
        *("--sim-block-size", str(BLOCK_SIZE)),
        *("--max-input-tokens", str(MAX_INPUT_TOKENS), "--max-total-tokens", str(MAX_TOTAL_TOKENS)),
        *("--max-batch-total-tokens", str(KV_TOKENS), "--max-batch-prefill-tokens", str(PREFILL_TOKENS)),
    ]


def controlplane_environment(
    settings: StackSettings, folders: Folders, environ: Mapping[str, str], *, database_url: str, redis_url: str
) -> dict[str, str]:
    """For Django, gunicorn and Celery alike."""
    passed = {
        name: value
        for name, value in environ.items()
        if name in ("FAIRLANE_ALLOWED_HOSTS", "FAIRLANE_TRUSTED_ORIGINS") or name.startswith("FAIRLANE_TRAINING_")
    }
    return (
        base_environment(environ)
        | passed
        | {
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
            "DATABASE_URL": database_url,
            "REDIS_URL": redis_url,
            "FAIRLANE_SECRET_KEY_FILE": str(folders.secret("secret_key")),
            "FAIRLANE_KEY_PEPPER_FILE": str(folders.secret("key_pepper")),
            "FAIRLANE_CONSOLE_HOST": settings.console_host,
            "FAIRLANE_CONSOLE_PORT": str(settings.console_port),
            "FAIRLANE_INSECURE_HTTP": "1",
            "FAIRLANE_BEAT_SCHEDULE_FILE": str(folders.root / "celerybeat-schedule"),
        }
    )


def demo_options(settings: StackSettings, folders: Folders) -> list[str]:
    """Options of ``seed_demo``: the pool and what its servers hold.

    Raises:
        SettingsError: a server of ``FAIRLANE_BACKENDS`` does not answer, or serves another model than the first.
    """
    if not settings.backends:
        from router_ext.devserver.gguf_model import model_dir
        from router_ext.devserver.smollm import MODEL_ID

        return [
            *("--pool", MODEL_ID, "--alias", "smollm2", "--backend-url", settings.model_url),
            *("--kv-tokens", str(KV_TOKENS), "--block-size", str(BLOCK_SIZE)),
            *("--prefill-budget-tokens", str(PREFILL_TOKENS)),
            *("--tokenizer-path", str(model_dir(folders.root / "model") / "tokenizer.json")),
        ]
    models = {url: _model_of(url) for url in settings.backends}
    first = models[settings.backends[0]]
    for url, model in models.items():
        if model != first:
            raise SettingsError(f"FAIRLANE_BACKENDS: {url} serves {model}, the first one {first}: one pool, one model")
    return ["--pool", first, *(word for url in settings.backends for word in ("--backend-url", url))]


def _model_of(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/info", timeout=5.0) as answer:
            return str(json.loads(answer.read())["model_id"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"FAIRLANE_BACKENDS: {url}/info does not answer as TGI does: {error}") from None


def django_command(*words: str) -> list[str]:
    return [sys.executable, "-m", "django", *words]


def console_command() -> list[str]:
    """gunicorn. The router is stopped before it, so a long poll that is still open has nobody who waits for it."""
    options = ("--no-control-socket", "--graceful-timeout", "3")
    config = ("--config", "python:controlplane.gunicorn_conf")
    return [sys.executable, "-m", "gunicorn", *config, *options, "controlplane.wsgi"]


def worker_command() -> list[str]:
    """What has to be done soon and takes little: rollups, schedules, alarms."""
    return _celery_worker("default")


def trainer_command() -> list[str]:
    """Training, in a process that ends with its task: torch and its memory go with it.

    A run that is killed at an orderly stop, because it takes minutes, is taken up again by its lease.
    """
    return _celery_worker("training", "--max-tasks-per-child", "1", "--hostname", "trainer@%h")


def _celery_worker(queue: str, *options: str) -> list[str]:
    shared = ("--queues", queue, "--concurrency", "1", "--loglevel", "INFO", "--without-mingle", "--without-gossip")
    return [sys.executable, "-m", "celery", "--app", "controlplane.celery", "worker", *shared, *options]


def beat_command() -> list[str]:
    return [sys.executable, "-m", "celery", "--app", "controlplane.celery", "beat", "--loglevel", "INFO", "--pidfile="]


def router_command() -> list[str]:
    return _fairlane("router")


def router_environment(
    settings: StackSettings,
    folders: Folders,
    environ: Mapping[str, str],
    *,
    listen_fd: int,
    redis_url: str,
    admin_port: int | None = None,
) -> dict[str, str]:
    """``admin_port``: where the router listens for operators, if it does.

    The shell's settings of a router hold, beside those that make it part of this stack.
    """
    passed = {
        name: value
        for name, value in environ.items()
        if name.startswith(("FAIRLANE_ROUTER_", "FAIRLANE_BACKEND_KEY_", "OTEL_")) and name not in _OF_THE_STACK
    }
    if admin_port is not None:
        passed |= {
            "FAIRLANE_ADMIN_PORT": str(admin_port),
            "FAIRLANE_ADMIN_TOKEN_FILE": str(folders.secret("admin_token")),
        }
    return (
        base_environment(environ)
        | passed
        | {
            "FAIRLANE_ROUTER_HOST": settings.router_host,
            "FAIRLANE_ROUTER_PORT": str(settings.router_port),
            "FAIRLANE_ROUTER_LISTEN_FD": str(listen_fd),
            "FAIRLANE_ROUTER_DIR": str(folders.root / "router"),
            "FAIRLANE_ROUTER_DRAIN_LIMIT_S": str(_DRAIN_S),
            "FAIRLANE_ROUTER_REDIS_URL": redis_url,
            "FAIRLANE_ROUTER_TOKEN_FILE": str(folders.secret("router_token")),
            "FAIRLANE_CONTROLPLANE_URL": settings.console_url,
            "FAIRLANE_KEY_PEPPER_FILE": str(folders.secret("key_pepper")),
        }
    )


def _fairlane(command: str) -> list[str]:
    return [sys.executable, "-m", "router_ext.cli", command]


def _port(environ: Mapping[str, str], variable: str, default: int) -> int:
    text = environ.get(variable) or str(default)
    if not text.isdecimal() or not 1 <= int(text) <= 65_535:
        raise SettingsError(f"{variable}: {text!r} is no port (1 to 65535)")
    return int(text)


def _url(host: str, port: int) -> str:
    """Address for clients on this machine: the wildcard addresses are reached through loopback."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reachable}:{port}"
