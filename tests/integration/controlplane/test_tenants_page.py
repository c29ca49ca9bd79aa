"""The list of tenants: searched, sorted by every column and turned page by page by the database; the page of one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from controlplane.accounts.models import Role, User
from controlplane.common.actor import Actor
from controlplane.common.limits import LIMITS
from controlplane.console.views import tenants as page
from controlplane.tenants.actions import suspend_tenant
from controlplane.tenants.models import Tenant
from tests.support.control_plane import book, make_group, make_tenant, make_user, usage_event

pytestmark = pytest.mark.django_db


@pytest.fixture
def client(operator: User) -> Client:
    client = Client()
    client.force_login(operator)
    return client


@pytest.fixture
def many(system: Actor, monkeypatch: pytest.MonkeyPatch) -> list[Tenant]:
    """Twelve tenants, four to a page, with equals in every column."""
    monkeypatch.setattr(page, "PAGE", 4)
    rng = random.Random(8)
    groups = [make_group(system).name, None]
    for n in range(12):
        make_tenant(
            system, name=rng.choice(["alpha", "Beta", "gamma"]), weight=rng.choice([1.0, 0.1, 2.5]),
            group=rng.choice(groups), max_queued=rng.choice([10, 2_000]),
            tiers=["standard", "batch"][: rng.choice([1, 2])],
            limits={"concurrent": 3} if n % 3 else {"concurrent": 3, "tokens_per_day": 9},
        )  # fmt: skip
    for tenant in Tenant.objects.order_by("?")[:5]:
        suspend_tenant(actor=system, tenant_id=tenant.id)
    return list(Tenant.objects.select_related("group", "default_tier").prefetch_related("tiers"))


KEYS: dict[str, Callable[[Tenant], Any]] = {
    "name": lambda t: t.name.lower(),
    "state": lambda t: t.state,
    "weight": lambda t: t.weight,
    "group": lambda t: t.group.name if t.group else "",
    "tiers": lambda t: t.tiers.count(),
    "default_tier": lambda t: t.default_tier_name,
    "waiting": lambda t: t.max_queued,
    "limits": lambda t: sum(getattr(t, name) is not None for name in LIMITS),
    "created": lambda t: t.created_at,
}


def walk(client: Client, **given: str) -> list[str]:
    """Ids of all pages."""
    found: list[str] = []
    address = "?" + "&".join(f"{name}={value}" for name, value in given.items())
    for _ in range(10):
        answer = client.get(reverse("console:tenants") + address)
        assert answer.status_code == 200
        shown = answer.context["page"]
        found += [row.id for row in shown.rows]
        if not shown.next_query:
            return found
        address = f"?{shown.next_query}"
    raise AssertionError("the pages have no end")


def test_every_column_sorts_both_ways_and_its_pages_show_each_tenant_once(client: Client, many: list[Tenant]) -> None:
    assert KEYS.keys() == {column.name for column in page.COLUMNS}
    for name, key in KEYS.items():
        expected = [t.id for t in sorted(many, key=lambda t: (key(t), t.id))]
        assert walk(client, sort=name) == expected, name
        assert walk(client, sort=f"-{name}") == expected[::-1], name


def test_a_tenant_that_comes_meanwhile_moves_no_other(client: Client, many: list[Tenant], system: Actor) -> None:
    first = client.get(reverse("console:tenants"), {"sort": "name"}).context["page"]
    make_tenant(system, name="aaa, before all others")
    second = client.get(f"{reverse('console:tenants')}?{first.next_query}").context["page"]
    assert not {row.id for row in first.rows} & {row.id for row in second.rows}
    assert first.rows[-1].name.lower() <= second.rows[0].name.lower()


def test_search_and_state_stay_while_one_sorts_and_turns_pages(client: Client, many: list[Tenant]) -> None:
    wanted = [t for t in many if t.state == "active" and "a" in t.name.lower()]
    assert sorted(walk(client, q="a", state="active", sort="-weight")) == sorted(t.id for t in wanted)
    assert walk(client, q=many[3].id) == [many[3].id]
    assert walk(client, q=many[3].slug) == [many[3].id]
    head = client.get(reverse("console:tenants"), {"q": "a", "sort": "weight"}).context["page"].heads[2]
    assert (head.url, head.aria_sort) == ("?q=a&sort=-weight", "ascending")


@pytest.mark.parametrize(
    "query",
    [
        "sort=secret", "sort=-", "state=odd", "cursor=!", "cursor=W10", "cursor=WzEsIDJd",
        "sort=weight&cursor=WyJ4IiwgInkiXQ", "sort=name&cursor=WzEsICJ5Il0",
    ],
)  # fmt: skip
def test_what_is_no_column_page_or_state_is_refused(client: Client, query: str) -> None:
    answer = client.get(f"{reverse('console:tenants')}?{query}")
    assert answer.status_code == 422
    assert 'role="alert"' in answer.content.decode()


def test_a_page_costs_the_same_queries_however_many_there_are(client: Client, system: Actor) -> None:
    def cost() -> int:
        with CaptureQueriesContext(
            connection,
        ) as queries:
            client.get(reverse("console:tenants"), {"sort": "tiers"})
        return len(queries)

    make_tenant(system)
    few = cost()
    for _ in range(8):
        make_tenant(system, tiers=["standard", "batch"], group=make_group(system).name)
    assert cost() == few <= 12


def test_its_page_shows_use_and_people_and_costs_no_more_than_it_may(client: Client, system: Actor) -> None:
    tenant = make_tenant(system, timezone="Asia/Kolkata")
    colleague = make_user(role=Role.TENANT_MEMBER, tenant=tenant.id, email="colleague@example.test")
    stranger = make_user(role=Role.TENANT_MEMBER, tenant=make_tenant(system).id, email="stranger@example.test")
    book(*(usage_event(tenant=tenant.id, prompt_tokens=7, output_tokens=n) for n in (100, 11)))
    with CaptureQueriesContext(connection) as queries:
        text = client.get(reverse("console:tenant", args=[tenant.id])).content.decode()
    assert len(queries) <= 12
    assert colleague.email in text
    assert stranger.email not in text
    address = reverse("console:tenant_usage", args=[tenant.id])
    assert f'hx-get="{address}"' in text
    member = Client()
    member.force_login(colleague)
    for asking in (client, member):
        fragment = asking.get(address)
        assert fragment.context["totals"]["output_tokens"] == 111
        assert "Days of Asia/Kolkata" in fragment.content.decode()
        assert "<svg" in fragment.content.decode()
    member.force_login(stranger)
    assert member.get(address).status_code == 404


def test_many_are_cut_at_once(client: Client, system: Actor) -> None:
    tenants = [make_tenant(system) for _ in range(2)]
    client.post(reverse("console:tenants_bulk"), {"tenant": [t.id for t in tenants], "what": "stop"})
    assert set(Tenant.objects.values_list("state", flat=True)) == {"stopped"}
