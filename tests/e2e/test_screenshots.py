"""Pictures of every page with ordinary names, for people to look at: light and dark, wide and narrow."""

from __future__ import annotations

import pytest

from tests.support.console_pages import (
    NARROW,
    NOT_OURS,
    WIDE,
    Console,
    answers_by_role,
    is_file,
    picture_name,
)

NAMED = str
ANSWERS = answers_by_role()
PAGES = [
    each for each in ANSWERS if not is_file(each) and "{provider_id}" not in each
    and each not in NOT_OURS
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("route", PAGES)
def test_a_page_has_its_pictures(console: Console, route: str) -> None:
    column = "nobody" if ANSWERS[route]["nobody"] == "ok" else "owner"
    looking = console.look(column)
    looking.visit(console.path(route))
    if not looking.is_page():
        return
    for width, size in (("wide", WIDE), ("narrow", NARROW)):
        looking.page.set_viewport_size(size)
        for theme in ("light", "dark"):
            looking.page.emulate_media(color_scheme=theme)
            looking.picture(f"plain/{picture_name(route)}.{width}.{theme}")
    assert looking.problems == []
