"""The environment of the control plane: read once, validated fully, frozen. Nothing else reads variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from django.core.exceptions import ImproperlyConfigured
from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict
from pydantic import AliasChoices, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from router_ext.wire.controlplane import parse_peppers


class Environment(BaseSettings):
    """Variables of the control plane; a ``_FILE`` suffix reads a secret from a file.

    ``FAIRLANE_INSECURE_HTTP``: the site is reached without TLS, on this machine only; otherwise cookies are for TLS
    only, HSTS is sent, plain requests are redirected, and owners and operators need a second factor.
    ``FAIRLANE_KEY_PEPPER``: ``HEX`` or ``1:HEX,2:HEX``, as routers have it; ``_VERSION``: of new digests, if it is not
    to be the newest.
    ``FAIRLANE_DB_APPLICATION_ROLE``, ``_PASSWORD``: for migrations alone: the role the program runs as gets what they
    make, and this password; the audit log gets a role of its own.
    ``FAIRLANE_OIDC_ISSUER``, ``_CLIENT_ID``, ``_CLIENT_SECRET``: sign-in elsewhere; ``_GROUP_ROLES`` maps groups of the
    claim ``_GROUPS_CLAIM`` to roles.
    ``FAIRLANE_DB_POOL_SIZE``: connections per process; a waiting long poll holds none of them.
    ``FAIRLANE_TRAINING_MIN_SAMPLES``: samples without which no length model is trained.
    ``FAIRLANE_TRAINING_MEMORY_MB``: what the process that trains may allocate; above it the job fails.
    ``FAIRLANE_TRAINING_LIMIT_S``: seconds after which a training run is ended.
    """

    model_config = SettingsConfigDict(env_prefix="FAIRLANE_", frozen=True, extra="ignore")

    database_url: str = Field(validation_alias=AliasChoices("DATABASE_URL"))
    database_url_file: Path | None = Field(default=None, validation_alias=AliasChoices("DATABASE_URL_FILE"))
    redis_url: str = Field(validation_alias=AliasChoices("REDIS_URL"))
    redis_url_file: Path | None = Field(default=None, validation_alias=AliasChoices("REDIS_URL_FILE"))
    secret_key: SecretStr | None = None
    secret_key_file: Path | None = None
    key_pepper: SecretStr | None = None
    key_pepper_file: Path | None = None
    key_pepper_version: int | None = None
    console_host: str = "127.0.0.1"
    console_port: int = Field(default=8000, ge=1, le=65_535)
    allowed_hosts: str = "127.0.0.1,localhost,[::1]"
    trusted_origins: str = ""
    insecure_http: bool = False
    db_application_role: str = Field(default="", max_length=63)
    db_application_password: SecretStr | None = None
    db_application_password_file: Path | None = None
    db_pool_size: int = Field(default=16, ge=1, le=1_000)
    console_threads: int = Field(default=64, ge=2, le=1_000)
    beat_schedule_file: Path = Path(".fairlane/celerybeat-schedule")
    training_min_samples: int = Field(default=2_000, ge=500, le=1_000_000)
    training_memory_mb: int = Field(default=4_096, ge=512, le=1_048_576)
    training_limit_s: int = Field(default=1_800, ge=60, le=86_400)
    oidc_issuer: str = ""
    oidc_client_id: str = ""
    oidc_client_secret: SecretStr | None = None
    oidc_client_secret_file: Path | None = None
    oidc_name: str = "single sign-on"
    oidc_scopes: str = "openid email profile"
    oidc_groups_claim: str = "groups"
    oidc_group_roles: str = ""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"

    @model_validator(mode="before")
    @classmethod
    def _read_addresses(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Addresses carry passwords, so they may come from files as well."""
        read = {
            name: _secret(None, Path(values[f"{name}_FILE"]))
            for name in ("DATABASE_URL", "REDIS_URL")
            if name not in values and values.get(f"{name}_FILE")
        }
        return values | read

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.secret():
            raise ValueError("FAIRLANE_SECRET_KEY or FAIRLANE_SECRET_KEY_FILE must be set; there is no default")
        if self.pepper_version() not in self.peppers():
            raise ValueError(
                f"FAIRLANE_KEY_PEPPER_VERSION is {self.pepper_version()}, but FAIRLANE_KEY_PEPPER has no pepper of"
                f" that version, only {', '.join(map(str, sorted(self.peppers())))}"
            )
        self.group_roles()
        if self.oidc_issuer and not (self.oidc_client_id and self.oidc_secret()):
            raise ValueError(
                "FAIRLANE_OIDC_ISSUER needs FAIRLANE_OIDC_CLIENT_ID and FAIRLANE_OIDC_CLIENT_SECRET[_FILE]"
            )
        self.database()
        if not self.redis_url.startswith(("redis://", "rediss://")):
            raise ValueError("REDIS_URL must begin with redis:// or rediss:// (Valkey answers to both)")
        return self

    def secret(self) -> str:
        """Django's signing key."""
        return _secret(self.secret_key, self.secret_key_file)

    def peppers(self) -> dict[int, bytes]:
        """Keys of the HMAC over tenant keys and tokens, by version."""
        text = _secret(self.key_pepper, self.key_pepper_file)
        if not text:
            raise ValueError("FAIRLANE_KEY_PEPPER or FAIRLANE_KEY_PEPPER_FILE must be set; there is no default")
        try:
            return parse_peppers(text)
        except ValueError as error:
            raise ValueError(f"FAIRLANE_KEY_PEPPER: {error}") from None

    def pepper_version(self) -> int:
        """The one that new digests are made under: the newest, unless another is named."""
        return max(self.peppers()) if self.key_pepper_version is None else self.key_pepper_version

    def application_password(self) -> str:
        """Of the program's role; "" leaves it as it is."""
        return _secret(self.db_application_password, self.db_application_password_file)

    def oidc_secret(self) -> str:
        return _secret(self.oidc_client_secret, self.oidc_client_secret_file)

    def group_roles(self) -> dict[str, str]:
        """Role by group, for roles of a tenant with its short name: ``ops=operator, team-a=tenant_admin:team-a``."""
        roles = ("owner", "operator", "viewer", "tenant_admin", "tenant_member")
        found = {}
        for part in filter(None, (each.strip() for each in self.oidc_group_roles.split(","))):
            group, _, given = part.rpartition("=")
            role, _, slug = given.partition(":")
            if not group or role not in roles or bool(slug) != role.startswith("tenant_"):
                raise ValueError(f"FAIRLANE_OIDC_GROUP_ROLES: {part!r} is not GROUP=ROLE or GROUP=TENANT_ROLE:TENANT")
            found[group] = given
        return found

    def hosts(self) -> list[str]:
        named = [h.strip() for h in self.allowed_hosts.split(",") if h.strip()]
        return [*named, self.console_host] if self.console_host not in (*named, "0.0.0.0", "::") else named

    def database(self) -> dict[str, Any]:
        """``DATABASES["default"]`` of a ``postgresql://`` address, unix sockets and options included."""
        if not self.database_url.startswith(("postgresql://", "postgres://")):
            raise ValueError("DATABASE_URL must be a postgresql:// address; no other database is supported")
        try:
            parts = {k: v for k, v in conninfo_to_dict(self.database_url).items() if v is not None}
        except ProgrammingError as error:
            raise ValueError(f"DATABASE_URL: {error}") from None
        if not parts.get("dbname"):
            raise ValueError("DATABASE_URL names no database")
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": str(parts.pop("dbname")),
            "USER": str(parts.pop("user", "")),
            "PASSWORD": str(parts.pop("password", "")),
            "HOST": str(parts.pop("host", "")),
            "PORT": str(parts.pop("port", "")),
            "CONN_MAX_AGE": 0,
            # A pooled connection that died with its server is replaced instead of failing a request.
            "CONN_HEALTH_CHECKS": True,
            "OPTIONS": {
                **parts,
                "connect_timeout": 5,
                "pool": {"min_size": 0, "max_size": self.db_pool_size, "timeout": 5.0, "max_idle": 60.0},
            },
        }


def _secret(value: SecretStr | None, path: Path | None) -> str:
    if value is not None:
        return value.get_secret_value().strip()
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"cannot read the secret file {path}: {error.strerror}") from None


def read_environment() -> Environment:
    """The validated environment.

    Raises:
        ImproperlyConfigured: naming every variable that is missing or wrong, never a secret's value.
    """
    try:
        return Environment()  # type: ignore[call-arg] # the fields come from the environment
    except ValidationError as error:
        lines = []
        for item in error.errors(include_input=False, include_url=False):
            name = "_".join(str(p) for p in item["loc"]).upper()
            if name and name not in ("DATABASE_URL", "REDIS_URL"):
                name = f"FAIRLANE_{name}"
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{name}: {message}" if name else message)
        raise ImproperlyConfigured("; ".join(lines)) from None
