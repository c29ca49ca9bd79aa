"""The report of a simulation in a browser: it fetches nothing, fits, and its controls work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from support.recordings import recording, study

from router_ext.sim import report

NAMES = ("interactive", "batch", "a-tenant-with-a-long-name", *(f"client{index}" for index in range(9)))

CUT = """() => [...document.querySelectorAll('svg.chart')].flatMap(svg => {
    const paper = svg.getBoundingClientRect();
    return [...svg.querySelectorAll('text')].filter(text => {
        const box = text.getBoundingClientRect();
        return box.left < paper.left - 1 || box.right > paper.right + 1
            || box.top < paper.top - 1 || box.bottom > paper.bottom + 1;
    }).map(text => `${svg.getAttribute('aria-labelledby')}: ${text.textContent}`);
})"""
"""Texts that stick out of their picture."""

COVERED = """() => [...document.querySelectorAll('svg.chart')].flatMap(svg => {
    const boxes = [...svg.querySelectorAll('text.label')].map(text => text.getBoundingClientRect());
    boxes.sort((one, other) => one.top - other.top);
    return boxes.slice(1).filter((box, index) => box.top + 2 < boxes[index].bottom - 2)
        .map(box => `${svg.getAttribute('aria-labelledby')} at ${box.top}`);
})"""
"""Labels that stand on each other."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    runs = [
        recording(NAMES, policy=policy, seed=seed, rates=rates, targets_s=(1.0, None, 0.2), ttft_s=(0.5, 700.0))
        for policy, rates in (("fifo", (1, 90)), ("slo-fair", tuple(range(20, 32))), ("vtc-predict", (30, 29, 31)))
        for seed in (1, 2)
    ]
    return report.write(tmp_path_factory.mktemp("report"), study(*runs)).as_uri()


@pytest.fixture
def visit(browser: Browser, address: str) -> Iterator[Callable[..., Page]]:
    """A page of a given width; whatever it asks for and complains of is a failure."""
    pages: list[Page] = []
    requested: list[str] = []
    problems: list[str] = []

    def visit(width: int = 1_400, **options: Any) -> Page:
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        pages.append(page)
        page.on("request", lambda request: requested.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.goto(address)
        return page

    yield visit
    for page in pages:
        page.close()
    assert set(requested) == {address}
    assert problems == []


@pytest.mark.parametrize("width", [360, 800, 1_400, 2_200])
def test_nothing_is_cut_or_covered(visit: Callable[..., Page], width: int) -> None:
    page = visit(width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CUT) == []
    assert page.evaluate(COVERED) == []


def test_a_policy_can_be_hidden_everywhere(visit: Callable[..., Page]) -> None:
    page = visit()
    parts = page.locator('[data-of="fifo"]')
    box = page.get_by_role("checkbox", name="fifo", exact=True)
    assert parts.count() > 8
    box.uncheck()
    expect(parts.locator("visible=true")).to_have_count(0)
    box.check()
    expect(page.locator('#service div[data-of="fifo"]')).to_be_visible()


def test_a_tenant_can_be_followed_with_the_keyboard(visit: Callable[..., Page]) -> None:
    page = visit()
    button = page.get_by_role("button", name="batch")
    button.focus()
    page.keyboard.press("Enter")
    expect(button).to_have_attribute("aria-pressed", "true")
    assert page.locator("svg [data-tenant='1'].dim").count() == 0
    assert page.locator("svg [data-tenant='0'].dim").count() > 0
    page.keyboard.press("Space")
    assert page.locator("svg .dim").count() == 0


def test_without_a_script_everything_is_shown(visit: Callable[..., Page]) -> None:
    page = visit(java_script_enabled=False)
    expect(page.get_by_role("checkbox")).to_have_count(0)
    expect(page.get_by_role("link", name="Queues")).to_be_visible()
    expect(page.locator("svg.chart").last).to_be_visible()
