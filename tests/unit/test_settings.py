"""The environment is read once, validated whole, and every value knows where it came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.routers import Setup, backend, write_snapshot

from router_ext import cli
from router_ext.errors import SettingsError
from router_ext.settings import RouterSettings, load_backend_key, load_router_settings, parse_peppers, variable_of

GOOD = {"FAIRLANE_KEY_PEPPER": "ab" * 32, "FAIRLANE_ROUTER_TOKEN": "t" * 20}


def test_defaults_and_origins() -> None:
    settings, origins = load_router_settings({**GOOD, "FAIRLANE_ROUTER_PORT": "9000"}, host="0.0.0.0")
    assert (settings.port, settings.host, settings.body_limit_bytes) == (9000, "0.0.0.0", 2_000_000)
    assert origins["port"] == "environment (FAIRLANE_ROUTER_PORT)"
    assert origins["host"] == "option --host"
    assert origins["body_limit_bytes"] == "default"


def test_secrets_come_from_files(tmp_path: Path) -> None:
    secret = tmp_path / "pepper"
    secret.write_text("cd" * 32 + "\n")
    environ = {"FAIRLANE_KEY_PEPPER_FILE": str(secret), "FAIRLANE_ROUTER_TOKEN": "x"}
    settings, origins = load_router_settings(environ)
    assert settings.peppers == {1: bytes.fromhex("cd" * 32)}
    assert origins["key_pepper"] == f"file {secret} (FAIRLANE_KEY_PEPPER_FILE)"
    assert "cd" * 32 not in repr(settings)
    key = tmp_path / "key"
    key.write_text("backend secret\n")
    assert load_backend_key("gpu-1", {"FAIRLANE_BACKEND_KEY_GPU_1_FILE": str(key)}) == "backend secret"
    with pytest.raises(SettingsError, match="FAIRLANE_BACKEND_KEY_GPU_2"):
        load_backend_key("gpu-2", {})
    for text in ("", "two\nlines", "schlüssel"):
        with pytest.raises(SettingsError, match="FAIRLANE_BACKEND_KEY_GPU_2"):
            load_backend_key("gpu-2", {"FAIRLANE_BACKEND_KEY_GPU_2": text})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"FAIRLANE_ROUTER_PROT": "1"}, "unknown variable FAIRLANE_ROUTER_PROT"),
        ({"FAIRLANE_ROUTER_PORT": "x"}, "FAIRLANE_ROUTER_PORT: .*, not 'x'"),
        ({"FAIRLANE_ROUTER_PORT": "70000"}, "less than or equal to 65535, not '70000'"),
        ({"FAIRLANE_KEY_PEPPER": "abcd"}, "FAIRLANE_KEY_PEPPER: .*2 bytes, at least 32"),
        ({"FAIRLANE_KEY_PEPPER": ""}, "FAIRLANE_KEY_PEPPER is required"),
        ({"FAIRLANE_ROUTER_TOKEN": ""}, "FAIRLANE_ROUTER_TOKEN .*is required to speak to"),
        ({"FAIRLANE_ROUTER_TOKEN_FILE": "/nowhere"}, "both set"),
        ({"FAIRLANE_ADMIN_PORT": "9"}, "come together"),
        ({"FAIRLANE_CONTROLPLANE_URL": "localhost:8000"}, "FAIRLANE_CONTROLPLANE_URL: "),
        ({"FAIRLANE_ROUTER_LOG_LEVEL": "loud"}, "FAIRLANE_ROUTER_LOG_LEVEL: .*'loud'"),
        ({"FAIRLANE_ROUTER_STALL_LIMIT_S": "-1"}, "FAIRLANE_ROUTER_STALL_LIMIT_S: .*, not '-1'"),
    ],
)
def test_bad_settings_are_refused_by_name(change: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        load_router_settings({**GOOD, **change})
    assert "ab" * 32 not in str(refused.value)


def test_a_missing_secret_file_is_named() -> None:
    environ = {"FAIRLANE_KEY_PEPPER_FILE": "/nowhere/pepper", "FAIRLANE_ROUTER_TOKEN": "x"}
    with pytest.raises(SettingsError, match="FAIRLANE_KEY_PEPPER_FILE: cannot read /nowhere/pepper"):
        load_router_settings(environ)


def test_peppers_have_versions() -> None:
    assert parse_peppers(f"1:{'ab' * 32},2:{'cd' * 40}") == {1: b"\xab" * 32, 2: b"\xcd" * 40}
    with pytest.raises(ValueError, match="hexadecimal"):
        parse_peppers("not hex")
    assert parse_peppers(f"{'ab' * 32},2:{'cd' * 32}").keys() == {1, 2}
    for wrong, why in (
        (f"1:{'ab' * 32},1:{'cd' * 32}", "twice"), (f"0:{'ab' * 32}", "from 1 to"),
        ("2:abcd", "2 bytes"), ("", "bytes"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            parse_peppers(wrong)


def test_check_config_shows_values_and_origins_but_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, value in {**GOOD, "FAIRLANE_ROUTER_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["check-config", "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    rows = {row["name"]: row for row in found["settings"]}
    assert found["is_good"] is True
    assert rows["port"]["value"] == 8080
    assert rows["key_pepper"]["value"] == "set (64 characters)"
    assert rows["dir"]["from"] == "environment (FAIRLANE_ROUTER_DIR)"
    assert GOOD["FAIRLANE_KEY_PEPPER"] not in out
    assert cli.main(["check-config"]) == 0
    assert "FAIRLANE_ROUTER_PORT" in capsys.readouterr().out


def test_check_config_refuses_a_bad_snapshot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "snapshot.json"
    path.write_text('{"revision": "x"}')
    assert cli.main(["check-config", "--snapshot", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["is_good"] is False
    assert found["snapshot"]["reason"]


def test_check_config_tells_of_keys_whose_pepper_is_not_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    setup = Setup([backend(1)])
    setup.key("alice")
    write_snapshot(tmp_path / "snapshot.json", setup.snapshot())
    for name, value in {**GOOD, "FAIRLANE_KEY_PEPPER": f"2:{'ab' * 32}"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["check-config", "--snapshot", str(tmp_path / "snapshot.json")]) == 0
    assert "1 of its keys would be refused" in capsys.readouterr().out
    monkeypatch.setenv("FAIRLANE_KEY_PEPPER", f"{'ab' * 32},2:{'cd' * 32}")
    assert cli.main(["check-config", "--snapshot", str(tmp_path / "snapshot.json")]) == 0
    assert "refused" not in capsys.readouterr().out


def test_every_variable_is_shown_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {**GOOD, "COLUMNS": "60", "FAIRLANE_ROUTER_ID": "x" * 70}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["check-config"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    for name in RouterSettings.model_fields:
        assert variable_of(name) in shown
    assert "x" * 70 in shown
