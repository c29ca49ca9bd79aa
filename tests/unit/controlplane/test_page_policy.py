"""What a page may not hold, what every answer carries, and no change without the form's token."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from controlplane.audit.models import AuditEntry
from controlplane.console.views import live
from tests.support.control_plane import signed_in

pytestmark = pytest.mark.django_db

TEMPLATES = sorted(
    path
    for config in apps.get_app_configs()
    if config.name.startswith("controlplane.")
    for path in (Path(config.path) / "templates").rglob("*.html")
)


class _Inline(HTMLParser):
    """Gathers what the policy would not let run or apply."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        if (tag == "script" and "src" not in names) or tag == "style":
            self.found.append(f"<{tag}>")
        for name, value in attrs:
            text = (value or "").strip().lower()
            if name == "style" or name.startswith(("on", "hx-on")) or text.startswith(("javascript:", "js:")):
                self.found.append(f"{name}={value}")


def inline(text: str) -> list[str]:
    parser = _Inline()
    parser.feed(text)
    return parser.found


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_no_template_holds_script_or_style_of_its_own(path: Path) -> None:
    assert inline(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "<script>go()</script>", "<style>p {}</style>", '<p style="color: red">', '<p onclick="go()">',
        '<a href=" javascript:go()">', '<p hx-on:click="go()">', "<p hx-vals='js:{a: go()}'>",
    ],
)  # fmt: skip
def test_it_would_be_found(text: str) -> None:
    assert inline(text)


def test_every_answer_carries_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    client = signed_in("operator")
    client.raise_request_exception = False
    strict = Client(enforce_csrf_checks=True)
    answers = {
        200: client.get("/tenants/"),
        302: Client().get("/"),
        400: client.get("/", headers={"host": "evil.example"}),
        401: client.get("/api/v1/tenants", headers={"authorization": "Bearer x"}),
        403: strict.post("/sign-in/", {"email": "a@b.example", "password": "x"}),
        404: client.get("/nowhere/"),
        405: client.delete("/tenants/"),
    }
    static = client.get("/static/console/console.css")
    static.close()
    monkeypatch.setattr(live, "render", lambda *args, **kwargs: 1 / 0)
    answers[500] = client.get("/")
    for status, answer in answers.items():
        assert answer.status_code == status, answer.content
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy, status
        assert "unsafe" not in policy, status
        assert "no-store" in answer.headers["cache-control"], status
        if status != 400:  # refused before anything was looked at
            assert answer.headers["x-frame-options"] == "DENY", status
            assert answer.headers["x-content-type-options"] == "nosniff", status
    assert "default-src 'none'" in static.headers["content-security-policy"]


def _routes(patterns: Any = None, prefix: str = "") -> Iterator[str]:
    for each in get_resolver().url_patterns if patterns is None else patterns:
        if isinstance(each, URLResolver):
            yield from _routes(each.url_patterns, prefix + _filled(each.pattern))
        elif isinstance(each, URLPattern):
            yield "/" + prefix + _filled(each.pattern)


def _filled(pattern: Any) -> str:
    """An address of the pattern; what it stands for need not exist."""
    text = str(pattern).strip("^").replace("\\Z", "").rstrip("$")
    text = re.sub(r"<(\w+:)?\w+>", "x", text)
    text = re.sub(r"\(\?P?<?\w*>?\[0-9a-f\]\{64\}\)", "0" * 64, text)
    return re.sub(r"\(\?P<\w+>[^)]*\)", "1", text).replace(".*", "x")


def test_no_route_takes_a_change_without_the_forms_token() -> None:
    client = signed_in("owner")
    strict = Client(enforce_csrf_checks=True, raise_request_exception=False)
    strict.cookies = client.cookies
    assert strict.get("/members/").status_code == 200  # it is signed in
    before = AuditEntry.objects.count()
    routes = sorted(set(_routes()))
    assert len(routes) > 100
    assert {"/tenants/new/", "/api/v1/tenants", "/router/v1/usage"} <= set(routes)
    for route in routes:
        for method in ("post", "patch", "delete") if route.startswith("/api/") else ("post",):
            status = getattr(strict, method)(route, {}, content_type="application/json").status_code
            # 401: machines show tokens, sessions open nothing there. 404, 405: there is no such change.
            assert status in ((401, 404, 405) if route.startswith(("/router/", "/v1/")) else (403, 404, 405)), route
    assert AuditEntry.objects.count() == before
