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

from controlplane.accounts.actions import issue_token
from controlplane.accounts.invitations import invite
from controlplane.accounts.models import Role
from controlplane.common.actor import Actor
from controlplane.fleet.routers import create_router
from controlplane.training.actions import start_job
from controlplane.training.models import Promotion
from controlplane.training.promotion import promote
from controlplane.usage.models import Statement
from controlplane.usage.prices import create_price_list
from tests.support.control_plane import (
    book,
    make_backend,
    make_evaluation,
    make_group,
    make_hazard,
    make_key,
    make_length_model,
    make_pool,
    make_tenant,
    make_tier,
    make_user,
    usage_event,
)

pytestmark = pytest.mark.django_db
TABLE = Path(__file__).with_name("routes_by_role.txt")
COLUMNS = ("owner", "operator", "viewer", "tenant_admin", "tenant_member", "stranger", "nobody")
# Of REST's own routes, those that stand in no OpenAPI document: the document, its page, and what answers 404.
UNLISTED = {"/api/v1/openapi.json", "/api/v1/docs", "/api/v1/.*"}


def _plain(pattern: str) -> str:
    """A route as people read it: ``tenants/{tenant_id}/``."""
    pattern = re.sub(r"\(\?P<(\w+)>(?:[^()]|\([^()]*\))*\)", r"{\1}", pattern)
    return re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", pattern).replace("^", "").replace("$", "").replace("\\Z", "")


def _routes(patterns: list[Any], prefix: str = "/") -> Iterator[tuple[str, URLPattern]]:
    for each in patterns:
        route = prefix + _plain(str(each.pattern))
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
    tenant, other, pool = make_tenant(system), make_tenant(system), make_pool(system)
    backend = make_backend(system, pool)
    key, _ = make_key(system, tenant, pool)
    people = {
        role.value: make_user(role=role, tenant=tenant.id if role.value.startswith("tenant_") else None)
        for role in Role
    }
    people["stranger"] = make_user(role=Role.TENANT_ADMIN, tenant=other.id)
    sessions = {"nobody": ""}
    for name, user in people.items():
        signed_in = Client()
        signed_in.force_login(user)
        sessions[name] = signed_in.cookies[settings.SESSION_COOKIE_NAME].value
    colleague = make_user(role=Role.TENANT_MEMBER, tenant=tenant.id)
    token, _ = issue_token(actor=system, user=people["tenant_admin"], name="x", scopes=["tenant.read"])
    invitation, text = invite(actor=system, email="new@example.test", role=Role.TENANT_MEMBER, tenant=tenant.id)
    event = usage_event(tenant=tenant.id)
    book(event)
    price_list = create_price_list(actor=system, name="spare", currency="EUR")
    statement = Statement.objects.create(
        tenant=tenant.id, tenant_name="x", month="2026-01-01", timezone="UTC", from_at="2026-01-01T00:00Z",
        to_at="2026-02-01T00:00Z", amount_micro=0, closed_at="2026-02-01T01:00Z",
    )  # fmt: skip
    router, _ = create_router(actor=system, name="spare")
    model = make_length_model("better")
    make_evaluation(model, pool)
    promote(actor=system, pool_id=pool.id, artifact_id=model.id, reason="better than none")
    ids = {
        "tenant_id": tenant.id, "key_id": key.id, "group_id": make_group(system).id, "pool_id": pool.id,
        "tier_id": make_tier(system, "spare").id, "backend_id": backend.id, "token_id": token.id,
        "hazard_id": make_hazard(backend=backend.id, tenant=tenant.id).id, "job_id": start_job(actor=system).id,
        "member_id": colleague.id, "invitation_id": invitation.id, "text": text, "request_id": event.request,
        "price_list_id": price_list.id, "statement_id": statement.id,
        "provider_id": "sso",
        "digest": "0" * 64, "artifact_id": model.id, "promotion_id": Promotion.objects.get().pk, "router_id": router.id,
    }  # fmt: skip
    rest = {
        "tenants": "tenant_id", "keys": "key_id", "groups": "group_id", "pools": "pool_id", "tiers": "tier_id",
        "backends": "backend_id", "tokens": "token_id", "hazards": "hazard_id", "training-jobs": "job_id",
        "members": "member_id", "invitations": "invitation_id", "artifacts": "artifact_id", "routers": "router_id",
        "promotions": "promotion_id", "price-lists": "price_list_id", "statements": "statement_id",
    }  # fmt: skip
    return sessions, {"": ids, **{word: {"pk": ids[name]} for word, name in rest.items()}}


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
