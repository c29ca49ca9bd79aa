"""A browser, and a whole stack for it to look at."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.stack import Stack, running_stack

_SWITCHES = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args: dict[str, Any]) -> dict[str, Any]:
    """The system's own chromium; Playwright's download of one is not needed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    executable = next((found for name in names if (found := shutil.which(name)) is not None), None)
    if executable is None:
        pytest.skip("no chromium on this machine: install the package `chromium`")
    return {**browser_type_launch_args, "executable_path": executable, "args": list(_SWITCHES)}


@pytest.fixture(scope="session")
def whole_stack() -> Iterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="fairlane-e2e-") as folder, running_stack(Path(folder)) as running:
        yield running
