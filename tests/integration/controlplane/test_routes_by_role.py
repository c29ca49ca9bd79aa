"""Every route answers every role as ``routes_by_role.txt`` says; a route without a row fails.

Columns: the five roles, where tenant admin and member are of the tenant whose objects the routes name; a stranger, who
is admin of another tenant; nobody, who is not signed in. Words: ``ok`` the role may (whatever becomes of an empty
body), ``403`` it may not, ``404`` for it there is no such thing, ``401`` and ``in`` sign in first. To see what a new
route answers, run this file: the failure prints the rows that are missing or differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from django.conf import settings
from django.db import transaction
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from controlplane.common.actor import Actor
from tests.support.console_world import COLUMNS, make_world

pytestmark = pytest.mark.django_db
TABLE = Path(__file__).with_name("routes_by_role.txt")
REST_IDS = {
    "tenants": "tenant_id", "keys": "key_id", "groups": "group_id", "pools": "pool_id", "tiers": "tier_id",
    "backends": "backend_id", "tokens": "token_id", "hazards": "hazard_id", "training-jobs": "job_id", "jobs": "job_id",
    "members": "member_id", "invitations": "invitation_id", "artifacts": "artifact_id", "routers": "router_id",
    "promotions": "promotion_id", "price-lists": "price_list_id", "statements": "statement_id",
    "price-assignments": "assignment_id",
}  # fmt: skip
# Of REST's own routes, those that stand in no OpenAPI document: the document, its page, and what answers 404.
UNLISTED = {"/api/v1/openapi.json", "/api/v1/docs", "/api/v1/.*"}


def _plain(pattern: str) -> str:
    """A route as people read it: ``tenants/{tenant_id}/``."""
    pattern = re.sub(r"\(\?P<(\w+)>(?:[^()]|\([^()]*\))*\)", r"{\1}", pattern)
    return re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", pattern).replace("^", "").replace("$", "").replace("\\Z", "")


def _routes(patterns: list[Any], prefix: str = "/") -> Iterator[tuple[str, URLPattern]]:
    for each in patterns:
        route = prefix + _plain(str(each.pattern))
        if route == "/staff/":
            continue  # the same for every kind of row: test_staff.py asks all of it as every role
        if isinstance(each, URLResolver):
            yield from _routes(each.url_patterns, route)
        else:
            yield route, each


def _methods(client: Client, route: str, pattern: URLPattern, values: dict[str, str]) -> list[str]:
    """What the view serves, HEAD and OPTIONS aside: as REST's classes say, or a view's ``Allow``."""
    view = pattern.callback
    if (actions := getattr(view, "actions", None)) is not None:
        return sorted(method.upper() for method in actions if method != "head")
    if (cls := getattr(view, "cls", None)) is not None:
        return sorted(name.upper() for name in ("get", "post", "put", "patch", "delete") if hasattr(cls, name))
    answer = client.options(route.format(**values))
    allowed = answer.headers.get("allow", "GET") if answer.status_code == 405 else "GET"
    return sorted(set(allowed.split(", ")) - {"HEAD", "OPTIONS"})


def _word(answer: Any) -> str:
    if answer.status_code == 302 and answer.headers["location"].startswith("/sign-in/?next="):
        return "in"
    return str(answer.status_code) if answer.status_code in (401, 403, 404) else "ok"


@pytest.fixture
def world(system: Actor) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """A session of each column, and ids for the parts of routes: by the word before them, or for all under ""."""
    made = make_world(system)
    return made.sessions(), {"": made.ids, **{word: {"pk": made.ids[name]} for word, name in REST_IDS.items()}}


def _values(route: str, ids: dict[str, dict[str, str]]) -> dict[str, str]:
    found = re.match(r"/api/v1/([\w/-]+?)/\{pk\}", route)
    return {**ids[""], "pk": "1", **(ids.get(found[1], {}) if found else {})}


def test_every_route_answers_every_role_as_the_table_says(world: Any) -> None:
    sessions, ids = world
    client = Client()
    fields = urlencode({"pool": ids[""]["pool_id"], "tenant": ids[""]["tenant_id"]})
    form = {"data": fields, "content_type": "application/x-www-form-urlencoded"}
    actual: dict[str, str] = {}
    for route, pattern in _routes(get_resolver().url_patterns):
        values = _values(route, ids)
        address = route.format(**values).replace(".*", "nothing")
        for method in _methods(client, route, pattern, values):
            words = []
            for name in COLUMNS:
                # Every answer is undone: the next role finds what this one found.
                with transaction.atomic():
                    client.cookies.clear()
                    client.cookies[settings.SESSION_COOKIE_NAME] = sessions[name]
                    body = {"data": "{}", "content_type": "application/json"} if "/api/" in route else form
                    words.append(_word(client.generic(method, address, **body)))
                    transaction.set_rollback(True)
            actual[f"{method} {route}"] = " ".join(words)
    lines = [line for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    expected = {" ".join(line.split()[:2]): " ".join(line.split()[2:]) for line in lines}
    assert len(expected) == len(lines), "a route stands there twice"
    gone = sorted(expected.keys() - actual.keys())
    different = [f"{key}  {row}" for key, row in sorted(actual.items()) if expected.get(key) != row]
    assert not different, "\n".join(["missing or different:", *different])
    assert not gone, "\n".join(["no longer there:", *gone])


def test_rest_has_no_route_beside_its_document(client: Client) -> None:
    documented = {
        re.sub(r"\{\w+\}", "{}", f"{method.upper()} {path}")
        for path, operations in client.get("/api/v1/openapi.json").json()["paths"].items()
        for method in operations
    }
    routed = {
        re.sub(r"\{\w+\}", "{}", f"{method} {route}")
        for route, pattern in _routes(get_resolver().url_patterns)
        if route.startswith("/api/") and route not in UNLISTED
        for method in _methods(client, route, pattern, {})
    }
    assert routed == documented
