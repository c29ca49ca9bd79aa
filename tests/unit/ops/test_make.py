"""What make would do, without doing it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TARGETS = ("setup", "core", "lint", "test", "conformance", "fuzz", "bench", "pictures", "docker-check", "pin", "run")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def planned(target: str, *options: str) -> str:
    command = ["make", "--dry-run", "--always-make", target, *options]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_installed_into_another_environment(target: str, tmp_path: Path) -> None:
    told = planned(target, f"VENV={tmp_path}")
    assert str(tmp_path) in told
    assert "pip" not in told.replace(".ci/pin.py", "")
    assert "-m venv" not in told


def test_the_projects_own_is_set_up() -> None:
    told = planned("test")
    assert "-m venv .venv" in told
    assert "pip --disable-pip-version-check --no-input install" in told


def test_clean_leaves_another_environment_alone(tmp_path: Path) -> None:
    assert str(tmp_path) not in planned("clean", f"VENV={tmp_path}")
