"""Every page of the console asks the database at most twelve times, however much there is to show.

Counted is everything between request and answer: session, account, alarm. Of a transaction, its begin and end are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date, timedelta

import pytest
from django.conf import settings
from django.core.cache import cache
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import get_resolver

from controlplane.accounts.actions import issue_token
from controlplane.accounts.invitations import invite
from controlplane.accounts.models import Role
from controlplane.common.actor import Actor
from controlplane.common.clock import to_us, utc_now
from controlplane.fleet.routers import create_router
from controlplane.tenants import queries as tenant_queries
from controlplane.tenants.models import Tenant
from controlplane.usage.assignments import create_assignment
from controlplane.usage.models import QuarantinedEvent
from controlplane.usage.prices import create_price_list
from tests.support.console_pages import is_file
from tests.support.console_world import World, enliven, make_world, report_state
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
    roll_up,
    usage_event,
)

pytestmark = pytest.mark.django_db

MOST = 12
NOT_PAGES = {
    # Its secret is used up by who looks, and it is no page of somebody signed in.
    "/invitations/{text}/",
}
_BRACKET = re.compile(r"BEGIN|COMMIT|ROLLBACK|SAVEPOINT|RELEASE|SET ")


def addresses() -> dict[str, str]:
    """The console's routes that are pages or parts of pages, by name."""
    found = {}
    for resolver in get_resolver().url_patterns:
        if getattr(resolver, "app_name", None) != "console":
            continue
        for each in resolver.url_patterns:
            route = "/" + re.sub(r"<\w+:(\w+)>", r"{\1}", str(each.pattern))
            if not is_file(route) and route not in NOT_PAGES:
                found[each.name] = route
    return found


def counted(world: World, column: str, only: str = "") -> dict[str, list[str]]:
    """The statements of every page that somebody may see, by its name."""
    client = Client()
    client.cookies[settings.SESSION_COOKIE_NAME] = world.sessions()[column]
    found = {}
    report_state(world)
    for name, route in addresses().items():
        if only not in ("", name):
            continue
        cache.clear()
        with CaptureQueriesContext(connection) as captured:
            answer = client.get(route.format(**world.ids))
        if answer.status_code == 200:
            found[name] = [q["sql"] for q in captured.captured_queries if not _BRACKET.match(q["sql"])]
    return found


def enlarge(world: World, actor: Actor, numbers: range) -> None:
    """More of everything a page may list."""
    now = to_us(utc_now()) - 3_600_000_000
    group = make_group(actor).name
    for number in numbers:
        tenant = make_tenant(actor, group=(None, group)[number % 2])
        pool, tier = make_pool(actor), make_tier(actor, f"more-{number}")
        backend = make_backend(actor, pool)
        make_backend(actor, world.pool)
        for owner in (tenant, world.tenant):
            key, _ = make_key(actor, owner, pool)
            user = make_user(role=Role.TENANT_MEMBER, tenant=owner.id)
            issue_token(actor=actor, user=user, name="more", scopes=["tenant.read"])
            invite(actor=actor, email=f"more{number}@{owner.slug}.test", role=Role.TENANT_MEMBER, tenant=owner.id)
            book(*(usage_event(tenant=owner.id, key=key.id, pool=pool.id, model=pool.name, tier=tier.name,
                               arrived_at_us=now - hours * 3_600_000_000, request=world.event.request)
                   for hours in (0, 30, 60)))  # fmt: skip
            make_hazard(backend=backend.id, tenant=owner.id, key=key.public_id)
        row = create_price_list(
            actor=actor, name=f"more-{number}", currency="EUR",
            prices=[{"model": "", "valid_from": date(2026, 1, 1 + number), "prompt_micro": 1, "output_micro": 2}],
        )  # fmt: skip
        create_assignment(actor=actor, tenant=tenant.id, price_list=row.id)
        create_router(actor=actor, name=f"more-{number}")
        make_evaluation(make_length_model(f"more-{number}"), world.pool)
        QuarantinedEvent.objects.create(
            digest=f"{number:064d}", router="rtr", reason="odd", body=b"", received_at=utc_now() - timedelta(hours=1)
        )
    roll_up()


@pytest.mark.parametrize("column", ["owner", "tenant_admin"])
def test_pages_ask_twelve_times_at_most_and_no_more_with_more_to_show(system: Actor, column: str) -> None:
    world = make_world(system)
    enliven(world, system)
    enlarge(world, system, range(1))
    few = counted(world, column)
    enlarge(world, system, range(1, 5))
    many = counted(world, column)
    assert few.keys() == many.keys()
    assert len(many) > {"owner": 35, "tenant_admin": 10}[column]
    too_many = {name: [len(asked), *(sql[:150] for sql in asked)] for name, asked in many.items() if len(asked) > MOST}
    assert not too_many
    grown = {name: (len(few[name]), len(asked)) for name, asked in many.items() if len(asked) > len(few[name])}
    assert not grown


def test_a_page_that_asks_for_each_row_is_seen(system: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(system)
    enliven(world, system)

    def lazy(*, actor: Actor, **narrowed: str) -> Iterator[Tenant]:
        return tenant_queries.live_tenants().order_by("slug")  # type: ignore[return-value]

    monkeypatch.setattr(tenant_queries, "tenants", lazy)
    few = len(counted(world, "owner", "tenants")["tenants"])
    for _ in range(3):
        make_tenant(system)
    assert len(counted(world, "owner", "tenants")["tenants"]) > few
