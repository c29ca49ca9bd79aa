"""The console in a browser: who looks at what, and what every page owes whoever looks."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from django.urls import resolve
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, Response

from controlplane.common.actor import system_actor
from tests.support.console_world import COLUMNS, enliven, make_world, report_state

TESTS = Path(__file__).parents[1]
SCREENSHOTS = TESTS.parent / "build" / "screenshots"
ROUTES_BY_ROLE = TESTS / "integration" / "controlplane" / "routes_by_role.txt"
AXE = TESTS / "e2e" / "axe" / "axe-4.14.1.min.js"
CHECKS = TESTS / "e2e" / "checks.js"
FORMS = TESTS / "e2e" / "forms.js"
WIDE, NARROW = {"width": 1_280, "height": 900}, {"width": 390, "height": 844}
CONTRAST_ONLY = {"runOnly": ["color-contrast"]}
# Swagger UI is a package's page: its labels and headings are its own.
NOT_OURS = {"/api/v1/docs"}
MARK = "{{7*7}}"


def answers_by_role(asked: str = "GET") -> dict[str, dict[str, str]]:
    """What each route of the console's pages answers each column of ``routes_by_role.txt``."""
    rows = [line.split() for line in ROUTES_BY_ROLE.read_text().splitlines() if not line.startswith("#")]
    return {
        route: dict(zip(COLUMNS, words, strict=True))
        for method, route, *words in rows
        if method == asked and re.match(r"/(?!api/|router/|oidc/|v1/|livez|readyz)|/api/v1/docs", route)
    }


def is_file(route: str) -> bool:
    """Whether a route is fetched to be saved."""
    return bool(re.search(r"[./](csv|json)/?$", route))


def picture_name(route: str) -> str:
    return re.sub(r"\W+", "-", route.replace("_id", "")).strip("-") or "live"


class Names:
    """Texts that do harm where they are taken for HTML, a template or a formula, in every script and direction."""

    def __init__(self) -> None:
        self.given: list[str] = []
        self._numbers = count(1)

    def __call__(self, kind: str) -> str:
        begin = ('=HYPERLINK("x";"a")', "+cmd|'/C x'!A0", "@SUM(1+1)", "-2+3")[len(self.given) % 4]
        number = next(self._numbers)
        text = f"{begin} {kind} {number} \"'><script>probed()</script><img src=x onerror=probed()>{MARK} שלום 🚀"
        self.given.append(text)
        return text


class Looking:
    """One person's browser window on the console. ``problems``: what went wrong on the page it shows."""

    def __init__(self, browser: Browser, url: str, session: str, **options: Any) -> None:
        self.url = url
        self.context: BrowserContext = browser.new_context(viewport=WIDE, base_url=url, **options)
        if session:
            self.context.add_cookies([{"name": "fairlane_session", "value": session, "url": url}])
        self.context.add_init_script(path=AXE)
        self.context.add_init_script(path=CHECKS)
        self.page: Page = self.context.new_page()
        self.problems: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.problems.append(f"script: {error}"))
        self.page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))
        self.page.on("requestfailed", self._failed)
        self.page.on("response", self._answered)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text}")

    def _failed(self, request: Request) -> None:
        if "ERR_ABORTED" not in (request.failure or ""):  # what the page left was fetching
            self.problems.append(f"failed: {request.url} {request.failure}")

    def _answered(self, answer: Response) -> None:
        if answer.status >= 400:
            self.problems.append(f"{answer.status}: {answer.url}")

    def visit(self, path: str) -> None:
        self.page.emulate_media(color_scheme="light")
        self.page.set_viewport_size(WIDE)
        self.problems.clear()
        self.page.goto(path)

    def is_page(self) -> bool:
        """Whether what is shown is a whole page, and not a part of one."""
        return bool(self.page.evaluate("() => document.doctype !== null"))

    def faults(self, *, rules: dict[str, Any] | None = None) -> list[str]:
        """What the page shown lacks: light and wide first, then narrow and dark, as which it stays."""
        page = self.page
        found = page.evaluate("() => [...fairlane.structure(), ...fairlane.fits()]")
        found += page.evaluate("rules => fairlane.accessible(rules)", rules or {})
        page.keyboard.press("Tab")
        found += page.evaluate("() => fairlane.focus()")
        page.set_viewport_size(NARROW)
        found += [f"narrow: {each}" for each in page.evaluate("() => fairlane.fits()")]
        page.emulate_media(color_scheme="dark")
        found += [f"dark: {each}" for each in page.evaluate("r => fairlane.accessible(r)", CONTRAST_ONLY)]
        return [*self.problems, *found]

    def picture(self, name: str) -> None:
        """Keep how the page looks: ``build/screenshots/<name>.jpg``."""
        self.page.screenshot(path=SCREENSHOTS / f"{name}.jpg", full_page=True, type="jpeg", quality=70)

    def shown_as_text(self, names: list[str]) -> list[str]:
        """Names of ``Names`` that the page took for something else than text."""
        page = self.page
        text = page.evaluate("() => document.documentElement.textContent")
        made = page.evaluate("() => document.querySelectorAll('img[src=x], script:not([src])').length")
        # The audit log shows what is no text as JSON.
        whole = [*names, *(json.dumps(name, ensure_ascii=False)[1:-1] for name in names)]
        n_marks, n_whole = text.count(MARK), sum(text.count(each) for each in whole)
        found = [f"{made} elements of a name"] if made else []
        return found if n_marks == n_whole else [*found, f"{n_marks - n_whole} of {n_marks} names are not as they are"]

    def close(self) -> None:
        self.context.close()


class Console:
    """A site with one of everything; ``look`` is a window of each column of ``routes_by_role.txt``."""

    def __init__(self, browser: Browser, url: str, named: Callable[[str], str]) -> None:
        self.url = url
        self._browser = browser
        self._windows: dict[str, Looking] = {}
        self._told_at = 0.0
        self.actor = system_actor("test")
        self.world = make_world(self.actor, named=named)
        enliven(self.world, self.actor, named=named)
        self._sessions = self.world.sessions()

    def look(self, column: str) -> Looking:
        if column not in self._windows:
            self._windows[column] = Looking(self._browser, self.url, self._sessions[column])
        if time.monotonic() - self._told_at > 5:
            report_state(self.world)
            self._told_at = time.monotonic()
        return self._windows[column]

    def stranger(self) -> Looking:
        """A window of its own for somebody who is not signed in; who opens it closes it."""
        return Looking(self._browser, self.url, "")

    def is_fetched(self, route: str) -> bool:
        """Whether a page fetches the route by itself, again and again or when something is opened."""
        request = self.look("owner").context.request
        pages = [each for each, words in answers_by_role().items() if words["owner"] == "ok" and not is_file(each)]
        pages.sort(key=lambda page: page.split("/")[1] != route.split("/")[1])  # most likely it is a neighbour
        texts = (request.get(self.path(each)).text() for each in pages)
        found = (each for text in texts for each in re.findall(r'hx-get="(/[^"]*)"', text))
        return any(self.fetched(each) == route for each in found)

    def path(self, route: str) -> str:
        return route.format(**self.world.ids)

    def fetched(self, address: str) -> str:
        """The route of an address of this site."""
        match = resolve(address.partition("?")[0])
        return "/" + re.sub(r"<\w+:(\w+)>", r"{\1}", match.route)

    def close(self) -> None:
        for each in self._windows.values():
            each.close()
