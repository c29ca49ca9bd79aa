"""A browser, and a whole stack for it to look at."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Browser
from support.stack import Stack, running_stack

if TYPE_CHECKING:
    from tests.support.console_pages import Console

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


@pytest.fixture(scope="module")
def console(
    request: pytest.FixtureRequest, test_database: None, django_db_blocker: Any, browser: Browser
) -> Iterator[Console]:
    """The console under gunicorn, on a database with one of everything, named by what the module says of ``NAMED``."""
    from django.db import connections

    from controlplane.common.valkey import valkey
    from tests.support.console_pages import Console
    from tests.support.control_plane import Site, empty_all_tables

    site = Site()
    with django_db_blocker.unblock():
        try:
            valkey().flushdb()  # it keeps the first of what routers tell of a moment: that of another module's world
            shown = Console(browser, site(), request.module.NAMED)
            yield shown
            shown.close()
        finally:
            site.stop()
            empty_all_tables()
            connections.close_all()  # opened beside Playwright's loop, they are not those that pytest-django closes


@pytest.fixture(scope="session", autouse=True)
def _django_beside_playwright() -> Iterator[None]:
    """Playwright's event loop stands still while a test runs, but Django sees that there is one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_old_screenshots() -> None:
    from tests.support.console_pages import SCREENSHOTS

    shutil.rmtree(SCREENSHOTS, ignore_errors=True)
