"""Long lists are turned page by page in every order, each row once."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from html import unescape

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.accounts.models import Role, User
from controlplane.common.actor import Actor
from controlplane.usage.models import Statement
from tests.support.control_plane import make_tenant, signed_in

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
