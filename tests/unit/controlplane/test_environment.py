"""The environment is validated whole, without defaults for secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from controlplane.environment import read_environment

GOOD = {
    "DATABASE_URL": "postgresql://fairlane@/books?host=/run/pg",
    "REDIS_URL": "redis://localhost:6379/0",
    "FAIRLANE_SECRET_KEY": "s",
    "FAIRLANE_KEY_PEPPER": "ab" * 32,
}


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("FAIRLANE_SECRET_KEY_FILE", "FAIRLANE_KEY_PEPPER_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize("name", ["DATABASE_URL", "REDIS_URL", "FAIRLANE_SECRET_KEY", "FAIRLANE_KEY_PEPPER"])
def test_a_missing_variable_is_named(environ: pytest.MonkeyPatch, name: str) -> None:
    environ.delenv(name)
    with pytest.raises(ImproperlyConfigured, match=name):
        read_environment()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", "sqlite:///books.db"),
        ("DATABASE_URL", "postgresql://host"),
        ("REDIS_URL", "amqp://localhost"),
        ("FAIRLANE_KEY_PEPPER", "ab" * 31),
        ("FAIRLANE_KEY_PEPPER", "zz" * 32),
        ("FAIRLANE_CONSOLE_PORT", "70000"),
        ("FAIRLANE_LOG_LEVEL", "LOUD"),
    ],
)
def test_a_wrong_value_is_refused_without_showing_it(environ: pytest.MonkeyPatch, name: str, value: str) -> None:
    environ.setenv(name, value)
    with pytest.raises(ImproperlyConfigured, match=name) as caught:
        read_environment()
    if name == "FAIRLANE_KEY_PEPPER":
        assert value not in str(caught.value)


def test_secrets_may_come_from_files(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in (("FAIRLANE_SECRET_KEY", "from a file\n"), ("FAIRLANE_KEY_PEPPER", "cd" * 32 + "\n")):
        environ.delenv(name)
        file = tmp_path / name
        file.write_text(text)
        environ.setenv(f"{name}_FILE", str(file))
    environment = read_environment()
    assert environment.secret() == "from a file"
    assert environment.peppers() == {1: bytes.fromhex("cd" * 32)}


def test_new_digests_are_made_under_the_newest_pepper_or_the_one_named(environ: pytest.MonkeyPatch) -> None:
    environ.setenv("FAIRLANE_KEY_PEPPER", f"{'ab' * 32},2:{'cd' * 32}")
    assert read_environment().peppers() == {1: b"\xab" * 32, 2: b"\xcd" * 32}
    assert read_environment().pepper_version() == 2
    environ.setenv("FAIRLANE_KEY_PEPPER_VERSION", "1")
    assert read_environment().pepper_version() == 1
    environ.setenv("FAIRLANE_KEY_PEPPER_VERSION", "3")
    with pytest.raises(ImproperlyConfigured, match=r"VERSION is 3, but .* no pepper of that version, only 1, 2"):
        read_environment()


def test_an_unreadable_secret_file_is_named(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ.delenv("FAIRLANE_SECRET_KEY")
    environ.setenv("FAIRLANE_SECRET_KEY_FILE", str(tmp_path / "missing"))
    with pytest.raises(ImproperlyConfigured, match="missing"):
        read_environment()


def test_a_socket_address_keeps_its_options(environ: pytest.MonkeyPatch) -> None:
    environ.setenv("DATABASE_URL", "postgresql://u:p%40ss@/books?host=/run/pg&sslmode=disable")
    database = read_environment().database()
    assert (database["HOST"], database["NAME"], database["USER"], database["PASSWORD"]) == (
        "/run/pg", "books", "u", "p@ss",
    )  # fmt: skip
    assert database["OPTIONS"]["sslmode"] == "disable"


def test_group_roles_are_read_and_refused(environ: pytest.MonkeyPatch) -> None:
    environ.setenv("FAIRLANE_OIDC_GROUP_ROLES", "cn=ops=operator, team a=tenant_admin:team-a")
    assert read_environment().group_roles() == {"cn=ops": "operator", "team a": "tenant_admin:team-a"}
    for wrong in ("ops", "=owner", "ops=king", "ops=owner:team-a", "team=tenant_admin"):
        environ.setenv("FAIRLANE_OIDC_GROUP_ROLES", wrong)
        with pytest.raises(ImproperlyConfigured, match="GROUP_ROLES"):
            read_environment()


def test_an_issuer_needs_its_client(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ.setenv("FAIRLANE_OIDC_ISSUER", "https://sso.example.test")
    with pytest.raises(ImproperlyConfigured, match="OIDC_CLIENT_ID"):
        read_environment()
    (tmp_path / "secret").write_text("the secret\n")
    environ.setenv("FAIRLANE_OIDC_CLIENT_ID", "fairlane")
    environ.setenv("FAIRLANE_OIDC_CLIENT_SECRET_FILE", str(tmp_path / "secret"))
    assert read_environment().oidc_secret() == "the secret"
