"""The only reader of the environment: frozen settings of the router, each with the place it came from.

Every field names its variable; a secret may instead come from a file named by ``<VARIABLE>_FILE``. A variable that
begins with ``FAIRLANE_ROUTER_`` and is not listed here is refused, so that a misspelt limit never passes silently.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

import router_ext
from router_ext.errors import SettingsError
from router_ext.wire.controlplane import parse_peppers

PREFIX = "FAIRLANE_ROUTER_"
BACKEND_KEY_PREFIX = "FAIRLANE_BACKEND_KEY_"
"""``FAIRLANE_BACKEND_KEY_<NAME>[_FILE]``: the secret a backend record calls ``api_key_name: <NAME>``."""

_SHARED = {
    "controlplane_url": "FAIRLANE_CONTROLPLANE_URL",
    "key_pepper": "FAIRLANE_KEY_PEPPER",
    "admin_token": "FAIRLANE_ADMIN_TOKEN",
    "admin_port": "FAIRLANE_ADMIN_PORT",
    "otlp_endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT",
    "otlp_traces_endpoint": "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
}
"""Fields whose variable lacks the router's prefix because other programs read it as well."""


def _default_id() -> str:
    return "rtr_" + re.sub(r"[^0-9A-Za-z.-]", "-", socket.gethostname())


class RouterSettings(BaseSettings):
    """Effective settings of one router process.

    Units: seconds and bytes by suffix. ``key_pepper`` is as ``parse_peppers`` takes it.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid")
    secret_fields: ClassVar[frozenset[str]] = frozenset({"token", "key_pepper", "admin_token", "redis_url"})

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65_535)
    listen_fd: int | None = Field(default=None, ge=3, description="listening socket handed down by a supervisor")
    take_over: bool = Field(default=False, description="replace the router that serves from the same folder")
    take_over_limit_s: float = Field(
        default=60.0, gt=0, le=3_600, description="give up to replace it if not ready to serve by then"
    )
    leave_limit_s: float = Field(
        default=600.0, ge=0, le=86_400, description="how long running streams may go on in a router that was replaced"
    )
    ready_fd: int | None = Field(
        default=None, ge=3, description="a supervisor's pipe: a line is written once it serves"
    )
    id: str = Field(default_factory=_default_id, pattern=r"^[0-9A-Za-z_.-]{1,80}$")
    dir: Path = Path(".fairlane/router")
    token: SecretStr | None = Field(default=None, description="the router's credential at the control plane")
    controlplane_url: str = "http://127.0.0.1:8000"
    snapshot_file: Path | None = Field(default=None, description="serve this snapshot, without a control plane")
    key_pepper: SecretStr
    admin_token: SecretStr | None = None
    admin_port: int | None = Field(default=None, ge=0, le=65_535)
    admin_host: str = "127.0.0.1"

    tls_cert_file: Path | None = Field(default=None, description="certificate chain (PEM) of the port for clients")
    tls_key_file: Path | None = Field(default=None, description="its key (PEM), without a password")
    trusted_proxies: str = Field(
        default="",
        description="networks (CIDR, separated by commas) whose X-Forwarded-For and -Proto are believed; empty: none",
    )

    body_limit_bytes: int = Field(default=2_000_000, ge=1_000, le=1_000_000_000, description="TGI's own default")
    header_limit_bytes: int = Field(default=32_768, ge=1_024, le=1_000_000)
    header_limit_count: int = Field(default=100, ge=8, le=10_000)
    header_timeout_s: float = Field(default=10.0, gt=0, le=600)
    body_idle_timeout_s: float = Field(default=30.0, gt=0, le=600)
    keep_alive_s: float = Field(default=60.0, gt=0, le=3_600)
    stall_limit_s: float = Field(
        default=30.0, gt=0, le=3_600, description="a client that reads nothing for so long is cut"
    )
    drain_limit_s: float = Field(
        default=60.0, ge=0, le=3_600, description="how long running streams may go on after SIGTERM"
    )
    request_limit_s: float = Field(
        default=3_600.0, gt=0, le=86_400, description="longest life of one request, queue included"
    )

    connect_timeout_s: float = Field(default=5.0, gt=0, le=120)
    unary_timeout_s: float = Field(default=30.0, gt=0, le=600, description="tokenising and other short upstream calls")
    upstream_idle_s: float = Field(
        default=60.0, gt=0, le=3_600, description="a stream without a byte for so long is dead; TGI pings every 15 s"
    )
    health_interval_s: float = Field(default=1.0, gt=0, le=60)
    health_timeout_s: float = Field(
        default=10.0, gt=0, le=120, description="one health answer may wait for a model step"
    )
    health_failures: int = Field(default=3, ge=1, le=100, description="failed checks in a row that make a backend down")
    retry_limit: int = Field(
        default=2,
        ge=0,
        le=10,
        description="failures in a row without a token that a request may survive; 0: none",
    )
    retry_ratio: float = Field(
        default=0.2, ge=0, le=1, description="retries of a pool, as a share of its other dispatches in ten seconds"
    )
    retry_floor: int = Field(default=20, ge=0, le=10_000, description="retries of a pool in ten seconds in any case")
    breaker_max_wait_s: float = Field(
        default=15.0, ge=0, le=300, description="longest wait before a backend that keeps failing is tried again"
    )
    predictor: bool = Field(default=True, description="run the worker process that predicts output lengths")
    prediction_limit_s: float = Field(
        default=0.005, gt=0, le=0.1, description="a request waits no longer for its prediction, counted from its body"
    )
    redis_url: SecretStr | None = Field(
        default=None, description="Valkey in which routers share their counters per minute; unset: each has its share"
    )
    redis_timeout_s: float = Field(
        default=0.005, gt=0, le=0.1, description="a request waits no longer for it, and is judged by the share then"
    )
    collect_features: bool = Field(default=True, description="book hashed features of prompts, never text, to train on")
    log_level: str = Field(default="info", pattern=r"^(debug|info|warning|error)$")
    request_log: bool = Field(default=True, description="one line per ended request, at level info")
    otlp_endpoint: str | None = Field(default=None, description="collector of traces (OTLP over HTTP)")
    otlp_traces_endpoint: str | None = Field(default=None, description="the same, whole address; goes before the other")
    tracing: bool = Field(default=True, description="false: no spans, whatever the two above say")

    @field_validator("key_pepper")
    @classmethod
    def _check_pepper(cls, value: SecretStr) -> SecretStr:
        parse_peppers(value.get_secret_value())
        return value

    @field_validator("redis_url")
    @classmethod
    def _check_redis(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.match(r"(rediss?|unix)://[^\s]+", value.get_secret_value()):
            raise ValueError("must be a redis://, rediss:// or unix:// address")
        return value

    @field_validator("controlplane_url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        if value and not re.match(r"https?://[^/\s]+", value):
            raise ValueError("must be an http:// or https:// address, or empty")
        return value.rstrip("/")

    @property
    def has_tracing(self) -> bool:
        """Spans are made and sent."""
        return self.tracing and bool(self.otlp_endpoint or self.otlp_traces_endpoint)

    @property
    def traces_endpoint(self) -> str:
        """Where spans go, if any do."""
        return self.otlp_traces_endpoint or (self.otlp_endpoint or "").rstrip("/") + "/v1/traces"

    @field_validator("trusted_proxies")
    @classmethod
    def _check_networks(cls, value: str) -> str:
        parse_networks(value)
        return value

    @property
    def peppers(self) -> dict[int, bytes]:
        """Pepper by version."""
        return parse_peppers(self.key_pepper.get_secret_value())

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


class _EnvironmentSource:
    """Reads each field's variable or its ``_FILE``, and remembers which."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.origins: dict[str, str] = {}

    def values(self) -> dict[str, Any]:
        known: set[str] = set()
        values: dict[str, Any] = {}
        for name in RouterSettings.model_fields:
            variable = variable_of(name)
            known |= {variable, variable + "_FILE"} if name in RouterSettings.secret_fields else {variable}
            found = self._read(name, variable)
            if found is not None:
                values[name] = found
        unknown = sorted(key for key in self.environ if key.startswith(PREFIX) and key not in known)
        if unknown:
            raise SettingsError(f"unknown variable {', '.join(unknown)} (known: {', '.join(sorted(known))})")
        return values

    def _read(self, name: str, variable: str) -> str | None:
        direct = self.environ.get(variable)
        path = self.environ.get(variable + "_FILE") if name in RouterSettings.secret_fields else None
        if direct is not None and path is not None:
            raise SettingsError(f"{variable} and {variable}_FILE are both set; keep one")
        if path is not None:
            self.origins[name] = f"file {path} ({variable}_FILE)"
            return read_secret_file(path, variable + "_FILE")
        if direct is not None:
            self.origins[name] = f"environment ({variable})"
            # An empty variable is how container files switch an optional value off.
            return direct if direct != "" or name == "controlplane_url" else None
        return None


def read_secret_file(path: str, variable: str) -> str:
    """Content of a secret's file without the line end an editor leaves.

    Raises:
        SettingsError: naming the variable, never the content.
    """
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{variable}: cannot read {path}: {error}") from None


def read_peppers(environ: Mapping[str, str] | None = None) -> dict[int, bytes] | None:
    """The file of peppers as it is now; None if they did not come from a file.

    Raises:
        SettingsError: unreadable, or no peppers; never showing its content.
    """
    variable = variable_of("key_pepper") + "_FILE"
    path = (os.environ if environ is None else environ).get(variable)
    if path is None:
        return None
    try:
        return parse_peppers(read_secret_file(path, variable))
    except ValueError as error:
        raise SettingsError(f"{variable}: {error}") from None


def variable_of(name: str) -> str:
    """Environment variable of a field."""
    return _SHARED.get(name, PREFIX + name.upper())


def parse_networks(text: str) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Networks from ``10.0.0.0/8, ::1``; one address is a network of itself."""
    return [ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip()]


def load_router_settings(
    environ: Mapping[str, str] | None = None, **overrides: Any
) -> tuple[RouterSettings, dict[str, str]]:
    """Read and validate everything.

    Args:
        environ: variables, the process's own by default.
        overrides: values of command line options by field name; they win. None means "not given".

    Returns:
        the settings, and for each field the place its value came from.

    Raises:
        SettingsError: naming variable, value and accepted range (never a secret's value).
    """
    source = _EnvironmentSource(os.environ if environ is None else environ)
    values = source.values()
    for name, value in overrides.items():
        if value is not None:
            values[name] = value
            source.origins[name] = f"option --{name.replace('_', '-')}"
    try:
        settings = RouterSettings(**values)
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(item) for item in error.errors())) from None
    if settings.snapshot_file is None and settings.controlplane_url and settings.token is None:
        raise SettingsError(f"{variable_of('token')} (or _FILE) is required to speak to {settings.controlplane_url}")
    if (settings.admin_port is None) != (settings.admin_token is None):
        raise SettingsError(f"{variable_of('admin_port')} and {variable_of('admin_token')} come together")
    if (settings.tls_cert_file is None) != (settings.tls_key_file is None):
        raise SettingsError(f"{variable_of('tls_cert_file')} and {variable_of('tls_key_file')} come together")
    return settings, {name: source.origins.get(name, "default") for name in RouterSettings.model_fields}


def _explain(item: Any) -> str:
    name = str(item["loc"][0]) if item["loc"] else "settings"
    where = variable_of(name)
    if item["type"] == "missing":
        return f"{where} is required (or {where}_FILE)"
    if name in RouterSettings.secret_fields:
        return f"{where}: {item['msg']}"
    return f"{where}: {item['msg']}, not {item['input']!r}"


def load_backend_key(name: str, environ: Mapping[str, str] | None = None) -> str:
    """The secret a backend record names, from ``FAIRLANE_BACKEND_KEY_<NAME>`` or its ``_FILE``.

    Raises:
        SettingsError: unset, unreadable, or nothing a header can carry; naming the variable, never the content.
    """
    environ = os.environ if environ is None else environ
    variable = BACKEND_KEY_PREFIX + re.sub(r"[^0-9A-Z]", "_", name.upper())
    path = environ.get(variable + "_FILE")
    key = read_secret_file(path, variable + "_FILE") if path else environ.get(variable)
    if not key:
        raise SettingsError(f"{variable} (or {variable}_FILE) is not set")
    if not key.isascii() or not key.isprintable():
        raise SettingsError(f"{variable}: a key is one line of printable ASCII characters")
    return key


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """For a child process of the router: its own environment, less its secrets, with this very package to be found."""
    kept = {name: value for name, value in environ.items() if not name.startswith("FAIRLANE_")}
    here = str(Path(router_ext.__file__).parents[1])
    kept["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [environ.get("PYTHONPATH")])])
    return kept
