"""Settings, folders and process environments of the embedded stack."""

from __future__ import annotations

import io
import re
import socket
from pathlib import Path

import pytest
from rich.console import Console

from router_ext.errors import SettingsError
from router_ext.ops import stack
from router_ext.ops.credentials import Credentials
from router_ext.ops.up import Up
from router_ext.settings import load_router_settings


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"FAIRLANE_DIR": str(tmp_path / "state"), "PATH": "/usr/bin", "SECRET_OF_THE_SHELL": "x"}


def test_ports_and_folder_come_from_variables(environ: dict[str, str], tmp_path: Path) -> None:
    settings = stack.read_settings(environ | {"FAIRLANE_ROUTER_PORT": "18080", "FAIRLANE_CONSOLE_PORT": "18000"})
    assert (settings.router_port, settings.console_port, settings.model_port) == (18080, 18000, 3000)
    assert settings.directory == tmp_path / "state"
    assert (settings.database_url, settings.redis_url, settings.backends) == (None, None, ())
    assert settings.backend_urls == ("http://127.0.0.1:3000",)


def test_named_servers_replace_the_embedded_ones(environ: dict[str, str]) -> None:
    named = {
        "DATABASE_URL": "postgresql://db/x",
        "REDIS_URL": "redis://r",
        "FAIRLANE_BACKENDS": "http://a:80/, https://b",
    }
    settings = stack.read_settings(environ | named)
    assert (settings.database_url, settings.redis_url) == ("postgresql://db/x", "redis://r")
    assert settings.backend_urls == ("http://a:80", "https://b")


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("FAIRLANE_ROUTER_PORT", "http", "FAIRLANE_ROUTER_PORT: 'http' is no port"),
        ("FAIRLANE_MODEL_PORT", "70000", "FAIRLANE_MODEL_PORT: '70000' is no port"),
        ("FAIRLANE_CONSOLE_PORT", "8080", "need different ports"),
        ("FAIRLANE_BACKENDS", "gpu-1:80", "FAIRLANE_BACKENDS: 'gpu-1:80'"),
        ("FAIRLANE_ROUTER_TLS_KEY_FILE", "key.pem", "FAIRLANE_ROUTER_TLS_KEY_FILE: not for `fairlane up`"),
    ],
)
def test_wrong_setting_is_named_with_its_value(environ: dict[str, str], variable: str, value: str, text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        stack.read_settings(environ | {variable: value})


def test_busy_ports_are_named_all_at_once(environ: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        busy = {
            "FAIRLANE_ROUTER_PORT": str(one.getsockname()[1]),
            "FAIRLANE_MODEL_PORT": str(other.getsockname()[1]),
        }
        settings = stack.read_settings(environ | busy | {"FAIRLANE_CONSOLE_PORT": "1"})
        with pytest.raises(SettingsError) as refused:
            stack.refuse_busy_ports(settings)
    for variable, port in busy.items():
        assert f"port {port} " in str(refused.value)
        assert variable in str(refused.value)


def test_model_port_is_not_looked_at_when_backends_are_named(environ: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as a, socket.socket() as b:
        a.bind(("127.0.0.1", 0))
        b.bind(("127.0.0.1", 0))
        ports = [str(free.getsockname()[1]) for free in (a, b)]
        a.close()
        b.close()
        named = {
            "FAIRLANE_ROUTER_PORT": ports[0],
            "FAIRLANE_CONSOLE_PORT": ports[1],
            "FAIRLANE_MODEL_PORT": str(listener.getsockname()[1]),
        }
        stack.refuse_busy_ports(stack.read_settings(environ | named | {"FAIRLANE_BACKENDS": "http://gpu:80"}))


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ({}, "this machine only"),
        ({"FAIRLANE_CONSOLE_HOST": "::1", "FAIRLANE_ROUTER_HOST": "localhost"}, "this machine only"),
        ({"FAIRLANE_ROUTER_HOST": "0.0.0.0"}, "router can be reached from OTHER MACHINES"),
        ({"FAIRLANE_CONSOLE_HOST": "fairlane.example"}, "console can be reached"),
        ({"FAIRLANE_CONSOLE_HOST": "::", "FAIRLANE_ROUTER_HOST": "10.0.0.1"}, "router and console can be"),
    ],
)
def test_who_can_reach_it_without_tls_is_said_at_the_start(
    environ: dict[str, str], hosts: dict[str, str], said: str
) -> None:
    settings = stack.read_settings(environ | hosts)
    shown = io.StringIO()
    credentials = Credentials(
        router_url="", console_url="", pool="", operator_email="", operator_token="", tenants={"one": "flk_1"}
    )
    Up(settings, {}, Console(file=shown))._print_summary(credentials, None, 1.0)
    assert re.search(rf"without TLS .*{said}", shown.getvalue())
    # The console knows that it is so, however it is reached.
    folders = stack.Folders(settings.directory)
    given = stack.controlplane_environment(settings, folders, {}, database_url="", redis_url="")
    assert given["FAIRLANE_INSECURE_HTTP"] == "1"


def test_secrets_are_made_once_and_closed_to_others(environ: dict[str, str]) -> None:
    folders = stack.Folders(stack.read_settings(environ).directory)
    folders.prepare()
    first = {path.name: path.read_text() for path in (folders.root / "secrets").iterdir()}
    assert set(first) == {"secret_key", "key_pepper", "admin_token"}
    assert len(bytes.fromhex(first["key_pepper"])) == 32
    folders.prepare()
    assert {path.name: path.read_text() for path in (folders.root / "secrets").iterdir()} == first
    assert [p for p in folders.root.rglob("*") if p.stat().st_mode & 0o077] == []
    assert folders.root.stat().st_mode & 0o077 == 0


def test_router_accepts_the_environment_it_is_given(environ: dict[str, str]) -> None:
    settings = stack.read_settings(environ | {"FAIRLANE_ROUTER_PORT": "18080", "FAIRLANE_CONSOLE_PORT": "18000"})
    folders = stack.Folders(settings.directory)
    folders.prepare()
    folders.secret("router_token").write_text("flr_x")
    given = stack.router_environment(settings, folders, environ, listen_fd=7, redis_url="redis://:pw@127.0.0.1:1/0")
    effective, _ = load_router_settings(given)
    assert (effective.port, effective.listen_fd) == (18080, 7)
    assert effective.controlplane_url == "http://127.0.0.1:18000"
    assert effective.dir == settings.directory / "router"
    assert effective.redis_url is not None
    assert effective.redis_url.get_secret_value() == "redis://:pw@127.0.0.1:1/0"


def test_settings_of_the_router_reach_it_and_change_nothing_of_the_stack(environ: dict[str, str]) -> None:
    settings = stack.read_settings(environ)
    folders = stack.Folders(settings.directory)
    folders.prepare()
    folders.secret("router_token").write_text("flr_x")
    named = {"STALL_LIMIT_S": "7", "TRUSTED_PROXIES": "10.0.0.0/8", "DIR": "/x", "LISTEN_FD": "3", "TOKEN": "flr_y"}
    shell = environ | {f"FAIRLANE_ROUTER_{name}": value for name, value in named.items()}
    given = stack.router_environment(settings, folders, shell, listen_fd=7, redis_url="redis://:pw@127.0.0.1:1/0")
    effective, _ = load_router_settings(given)
    assert effective.stall_limit_s == 7
    assert effective.trusted_proxies == "10.0.0.0/8"
    assert (effective.dir, effective.listen_fd) == (settings.directory / "router", 7)
    assert effective.token is not None
    assert effective.token.get_secret_value() == "flr_x"


def test_processes_get_only_what_they_need(environ: dict[str, str]) -> None:
    settings = stack.read_settings(environ)
    folders = stack.Folders(settings.directory)
    router = stack.router_environment(settings, folders, environ, listen_fd=7, redis_url="redis://:pw@127.0.0.1:1/0")
    django = stack.controlplane_environment(settings, folders, environ, database_url="postgresql://x", redis_url="r")
    model = stack.base_environment(environ)
    assert all("SECRET_OF_THE_SHELL" not in env for env in (router, django, model))
    assert "DATABASE_URL" not in router
    assert "FAIRLANE_SECRET_KEY_FILE" not in router
    assert not any("TOKEN" in name or "PEPPER" in name for name in model)


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8080"), ("0.0.0.0", "http://127.0.0.1:8080"), ("::", "http://[::1]:8080")],
)
def test_address_shown_for_a_wildcard_is_one_that_works(environ: dict[str, str], host: str, url: str) -> None:
    assert stack.read_settings(environ | {"FAIRLANE_ROUTER_HOST": host}).router_url == url


def test_the_router_gets_its_port_for_operators(environ: dict[str, str]) -> None:
    settings = stack.read_settings(environ | {"FAIRLANE_ADMIN_PORT": "18081"})
    assert settings.admin_port == 18081
    assert stack.read_settings(environ).admin_port == 0
    folders = stack.Folders(settings.directory)
    folders.prepare()
    folders.secret("router_token").write_text("token")
    given = stack.router_environment(settings, folders, environ, listen_fd=7, redis_url="redis://r", admin_port=18081)
    router, _ = load_router_settings({name: value for name, value in given.items() if name.startswith("FAIRLANE_")})
    assert router.admin_port == 18081
    assert router.admin_token is not None
    assert router.admin_token.get_secret_value() == folders.secret("admin_token").read_text()
    with pytest.raises(SettingsError, match="need different ports"):
        stack.read_settings(environ | {"FAIRLANE_ADMIN_PORT": "8080"})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        named = {"FAIRLANE_ADMIN_PORT": port, "FAIRLANE_ROUTER_PORT": "1", "FAIRLANE_CONSOLE_PORT": "2"}
        with pytest.raises(SettingsError, match=f"port {port} .*FAIRLANE_ADMIN_PORT"):
            stack.refuse_busy_ports(stack.read_settings(environ | named))
