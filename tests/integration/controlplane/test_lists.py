"""Long lists are turned page by page in every order, each row once."""

from __future__ import annotations

import base64
import re
from datetime import UTC, date, datetime
from html import unescape
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from rest_framework.test import APIClient as ApiClient

from controlplane.accounts.models import Role, User
from controlplane.common.actor import Actor
from controlplane.tenants.models import Tenant
from controlplane.usage.models import Statement
from tests.support.control_plane import api_client, make_tenant, make_user, signed_in

pytestmark = pytest.mark.django_db
N_ROWS = 230


def turned(client: Client, address: str, query: str, row: str) -> list[str]:
    """What ``row`` finds on the pages, in their order."""
    found: list[str] = []
    while True:
        answer = client.get(f"{address}?{query}")
        assert answer.status_code == 200
        text = answer.content.decode()
        found += re.findall(row, text)
        further = re.search(r'href="\?([^"]*cursor=[^"]*)">Further', text)
        if further is None:
            return found
        query = unescape(further[1])


@pytest.mark.parametrize("sort", ["", "name", "-role", "tenant", "-last_login"])
def test_members_are_turned_page_by_page(system: Actor, sort: str) -> None:
    client, tenant = signed_in("viewer"), make_tenant(system)
    User.objects.bulk_create(
        User(
            email=f"m{n:03d}@example.test", name=f"Name {n % 7}", password="!",
            role=(Role.VIEWER, Role.TENANT_MEMBER)[n % 2], tenant=tenant if n % 2 else None,
            last_login=datetime(2026, 1, 1 + n % 28, tzinfo=UTC) if n % 3 else None,
        )
        for n in range(N_ROWS)
    )  # fmt: skip
    found = turned(client, reverse("console:members"), f"sort={sort}", r">(m\d+@example\.test)</a>")
    assert len(found) == N_ROWS
    assert set(found) == {f"m{n:03d}@example.test" for n in range(N_ROWS)}
    if not sort:
        assert found == sorted(found)
    of_tenant = turned(client, reverse("console:members"), f"q={tenant.slug}", r">(m\d+@example\.test)</a>")
    assert len(of_tenant) == N_ROWS // 2
    assert client.get(reverse("console:members"), {"sort": "password"}).status_code == 422


@pytest.mark.parametrize("sort", ["", "tenant", "-closed"])
def test_statements_are_turned_page_by_page(sort: str) -> None:
    client = signed_in("viewer")
    Statement.objects.bulk_create(
        Statement(
            tenant=f"ten_{n:03d}", tenant_name=f"T{n:03d}", month=date(2026, 1 + n % 12, 1), timezone="UTC",
            from_at=datetime(2026, 1, 1, tzinfo=UTC), to_at=datetime(2026, 2, 1, tzinfo=UTC), amount_micro=n,
            closed_at=datetime(2026, 2, 1, n % 24, tzinfo=UTC),
        )
        for n in range(N_ROWS)
    )  # fmt: skip
    rows = turned(client, reverse("console:statements"), f"sort={sort}", r">(\d{4}-\d\d)</a></td><td>(T\d+)</td>")
    assert {name for _, name in rows} == {f"T{n:03d}" for n in range(N_ROWS)}
    assert len(rows) == N_ROWS
    months = [month for month, _ in rows]
    assert sort or months == sorted(months, reverse=True)
    assert len(turned(client, reverse("console:statements"), "tenant=ten_007", r">(T\d+)</td>")) == 1


SORTED = {
    "tenants": ("name", "state", "weight", "group", "tiers", "default_tier", "waiting", "limits", "created"),
    "members": ("email", "name", "role", "tenant", "last_login"),
    "statements": ("month", "tenant", "timezone", "closed"),
}


@pytest.fixture
def people(system: Actor) -> list[str]:
    """Ids of 9 tenants, each with a member and a statement; many are equal in what they may be sorted by."""
    made = [
        make_tenant(system, name=f"Name {n % 3}", slug=f"slug-{n}", weight=1 + n % 2, max_queued=10 + n % 4)
        for n in range(9)
    ]
    for n, tenant in enumerate(made):
        make_user(role=Role.TENANT_MEMBER, tenant=tenant.id)
        Statement.objects.create(
            tenant=tenant.id, tenant_name=tenant.name, month=date(2026, 1 + n % 4, 1), timezone="UTC", amount_micro=n,
            from_at=datetime(2026, 1, 1, tzinfo=UTC), to_at=datetime(2026, 2, 1, tzinfo=UTC),
            closed_at=datetime(2026, 2, 1, n % 5, tzinfo=UTC),
        )  # fmt: skip
    return [tenant.id for tenant in made]


def pages_of(api: ApiClient, path: str, **asked: str) -> list[dict[str, Any]]:
    """Rows of all pages."""
    found: list[dict[str, Any]] = []
    while True:
        answer = api.get(path, asked)
        assert answer.status_code == 200, answer.content
        found += answer.json()["results"]
        if answer.json()["next"] is None:
            return found
        asked = {**asked, "cursor": answer.json()["next"]}


def test_rest_sorts_every_list_as_its_page_does(people: list[str]) -> None:
    api, viewer = api_client(make_user(role=Role.OWNER)), signed_in("viewer")
    for kind, sorts in SORTED.items():
        everything = {row["id"] for row in pages_of(api, f"/api/v1/{kind}")}
        for sort in sorts:
            up = [row["id"] for row in pages_of(api, f"/api/v1/{kind}", sort=sort, limit="4")]
            down = [row["id"] for row in pages_of(api, f"/api/v1/{kind}", sort=f"-{sort}", limit="4")]
            assert len(up) == len(everything)
            assert set(up) == everything
            assert up == down[::-1]
            page = viewer.get(reverse(f"console:{kind}"), {"sort": sort}).context
            shown = page[kind] if kind == "statements" else page["page"].rows
            assert [row["row"].id if kind == "statements" else row.id for row in shown] == up, (kind, sort)


def test_rest_searches_a_list_as_its_page_does(people: list[str]) -> None:
    api = api_client(make_user(role=Role.OWNER))
    tenant = Tenant.objects.get(pk=people[4])
    sorted_ones = {"q": "name 1", "state": "active", "sort": "name"}
    for asked in ({"slug": "slug-4"}, {"q": "LUG-4"}, {"q": tenant.id}, sorted_ones):
        rows = pages_of(api, "/api/v1/tenants", **asked)
        assert tenant.id in [row["id"] for row in rows]
        assert len(rows) == (3 if asked is sorted_ones else 1)
    assert pages_of(api, "/api/v1/tenants", slug="slug") == []
    assert pages_of(api, "/api/v1/tenants", state="suspended") == []
    assert [row["tenant_slug"] for row in pages_of(api, "/api/v1/members", q="slug-4")] == ["slug-4"]
    assert len(pages_of(api, "/api/v1/statements", q="name 1")) == 3
    for wrong in ({"state": "lost"}, {"sort": "slug"}, {"sort": "name", "cursor": "x"}):
        assert api.get("/api/v1/tenants", wrong).status_code == 422
    own = api_client(make_user(role=Role.TENANT_ADMIN, tenant=tenant.id), "tenant.read")
    assert [row["id"] for row in pages_of(own, "/api/v1/tenants", q="slug", sort="name")] == [tenant.id]


def test_a_cursor_that_was_made_up_is_refused() -> None:
    api, viewer = api_client(make_user(role=Role.VIEWER), "admin.read"), signed_in("viewer")
    for key in ("true", "1e999", "1" + "0" * 400, "NaN", '"\\ud800"', '"\\u0000"', "[]", "null"):
        for sort in ("weight", "name"):
            cursor = base64.urlsafe_b64encode(f'[{key}, "ten_x"]'.encode()).decode().rstrip("=")
            asked = {"sort": sort, "cursor": cursor}
            assert api.get("/api/v1/tenants", asked).status_code == 422, key
            assert viewer.get(reverse("console:tenants"), asked).status_code == 422, key


def test_tenants_are_offered_while_one_is_typed(system: Actor) -> None:
    client = signed_in("viewer")
    for number in range(25):
        make_tenant(system, name=f"Acme {number}", slug=f"acme-{number:02d}")
    make_tenant(system, name="<b>Other</b>", slug="other")
    address = reverse("console:tenant_options")

    def offered(**typed: str) -> list[str]:
        return re.findall(r'<option value="([^"]*)">', client.get(address, typed).content.decode())

    assert offered(first="acme-0") == [f"acme-{number:02d}" for number in range(10)]
    assert len(offered(tenant="cme")) == 20
    assert offered(q="OTHER") == ["other"]
    assert "<b>" not in client.get(address, {"q": "other"}).content.decode()
