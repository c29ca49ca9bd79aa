"""Requests are searched by tenant, key, state, outcome and time, page by page; people of a tenant find their own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from controlplane.accounts.models import Role, User
from controlplane.common.actor import Actor
from controlplane.common.clock import to_us, utc_now
from controlplane.console.views import requests as page
from controlplane.fleet.models import Cancellation
from controlplane.keys.models import ApiKey
from controlplane.tenants.actions import delete_tenant, suspend_tenant
from controlplane.tenants.models import Tenant
from router_ext.wire.controlplane import LiveRequest, PoolState
from tests.support.control_plane import api_client, book, make_key, make_pool, make_tenant, make_user, tell, usage_event

pytestmark = pytest.mark.django_db
ADDRESS = "/requests/"


@pytest.fixture
def client(operator: User) -> Client:
    client = Client()
    client.force_login(operator)
    return client


class Books:
    """Two tenants with a key each; requests of the last two hours and one of three days ago."""

    def __init__(self, system: Actor) -> None:
        self.pool = make_pool(system)
        self.chat = make_tenant(system, name="Web chat", slug="chat")
        self.batch = make_tenant(system, name="Batch", slug="batch")
        self.keys: dict[str, ApiKey] = {t.id: make_key(system, t, self.pool)[0] for t in (self.chat, self.batch)}
        self.now = to_us(utc_now())
        self.booked: list[tuple[str, Tenant, str]] = []
        for n in range(6):
            self._book(n * 1_000_000_000, self.chat if n % 2 else self.batch, "failed" if n in (1, 2) else "completed")
        self._book(3 * 86_400 * 1_000_000, self.chat, "completed")
        live = [self._live(self.chat, "req_waits", None), self._live(self.batch, "req_runs", "bkd_1")]
        state = PoolState(pool=self.pool.id, policy="fifo", oldest=live)
        tell(pools=[state])

    def _book(self, ago_us: int, tenant: Tenant, outcome: str) -> None:
        event = f"evt_{len(self.booked)}"
        book(
            usage_event(
                event=event,
                request=f"req_{event}",
                tenant=tenant.id,
                key=self.keys[tenant.id].id,
                outcome=outcome,
                arrived_at_us=self.now - 60_000_000 - ago_us,
                pool=self.pool.id,
            )
        )
        self.booked.append((event, tenant, outcome))

    def _live(self, tenant: Tenant, request: str, backend: str | None) -> LiveRequest:
        return LiveRequest(
            request=request, event=f"evt_of_{request}", tenant=tenant.id, key=self.keys[tenant.id].id,
            tier="standard", arrived_at_us=self.now - 5_000_000, backend=backend, output_tokens=3,
        )  # fmt: skip


@pytest.fixture
def books(system: Actor) -> Books:
    return Books(system)


def shown(client: Client, **given: Any) -> tuple[list[str], list[str]]:
    """Events that ended, and requests under way."""
    answer = client.get(ADDRESS, given)
    assert answer.status_code == 200
    context = answer.context
    return [line["event"].event for line in context["ended"]], [e["row"].live.request for e in context["under_way"]]


def test_all_of_the_last_day_is_shown_newest_first(client: Client, books: Books) -> None:
    assert shown(client) == ([f"evt_{n}" for n in range(6)], ["req_waits", "req_runs"])


def test_each_field_narrows(client: Client, books: Books) -> None:
    key = books.keys[books.chat.id]
    for word in (books.chat.id, "chat", "Web chat", "web CHAT"):
        assert shown(client, tenant=word) == (["evt_1", "evt_3", "evt_5"], ["req_waits"]), word
    for word in (key.public_id, key.id):
        assert shown(client, key=word) == (["evt_1", "evt_3", "evt_5"], ["req_waits"]), word
    assert shown(client, outcome="failed") == (["evt_1", "evt_2"], [])
    assert shown(client, outcome="failed", tenant="batch") == (["evt_2"], [])
    assert shown(client, state="queued") == ([], ["req_waits"])
    assert shown(client, state="running") == ([], ["req_runs"])
    assert shown(client, state="ended")[1] == []
    ago = f"{utc_now() - timedelta(days=4):%Y-%m-%dT%H:%M}"
    assert shown(client, since=ago)[0][-1] == "evt_6"
    assert shown(client, until=f"{utc_now() - timedelta(days=2):%Y-%m-%dT%H:%M}", since=ago) == (["evt_6"], [])


def test_pages_lead_to_every_request_once(client: Client, books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PAGE", 2)
    # Two that arrived in the same microsecond as another.
    for n in (7, 8):
        book(usage_event(event=f"evt_{n}", tenant=books.batch.id, arrived_at_us=books.now - 60_000_000))
    found: list[str] = []
    address = f"{ADDRESS}?tenant=batch"
    for _ in range(6):
        context = client.get(address).context
        found += [line["event"].event for line in context["ended"]]
        if not context["next_query"]:
            break
        address = f"{ADDRESS}?{context['next_query']}"
    assert found == ["evt_8", "evt_7", "evt_0", "evt_2", "evt_4"]


@pytest.mark.parametrize(
    "given",
    [
        {"tenant": "nobody"}, {"key": "none"}, {"outcome": "odd"}, {"state": "odd"}, {"since": "soon"}, {"cursor": "x"},
        {"since": "2026-01-01T00:00", "until": "2026-02-01T00:00"}, {"until": "0001-01-01T00:00"},
        {"since": "2026-02-01T00:00", "until": "2026-01-01T00:00"},
    ],
)  # fmt: skip
def test_what_cannot_be_searched_is_told(client: Client, books: Books, given: dict[str, str]) -> None:
    answer = client.get(ADDRESS, given)
    assert answer.status_code == 422
    assert 'role="alert"' in answer.content.decode()


def test_a_deleted_tenants_requests_are_found_by_its_name(client: Client, books: Books, system: Actor) -> None:
    suspend_tenant(actor=system, tenant_id=books.chat.id)
    delete_tenant(actor=system, tenant_id=books.chat.id)
    assert shown(client, tenant="Web chat (deleted)")[0] == ["evt_1", "evt_3", "evt_5"]


def test_people_of_a_tenant_find_their_own_and_its_admin_ends_them(books: Books) -> None:
    admin, member = (make_user(role=role, tenant=books.chat.id) for role in (Role.TENANT_ADMIN, Role.TENANT_MEMBER))
    client = Client()
    client.force_login(admin)
    assert shown(client) == (["evt_1", "evt_3", "evt_5"], ["req_waits"])
    assert shown(client, tenant=books.batch.id)[0] == ["evt_1", "evt_3", "evt_5"]
    assert client.get(ADDRESS, {"key": books.keys[books.batch.id].public_id}).status_code == 422
    text = client.get(ADDRESS, {"id": "req_waits"}).content.decode()
    assert "Every request of your tenant with this id" in text
    client.post(reverse("console:request_cancel"), {"id": "req_waits", "reason": "not needed"})
    row = Cancellation.objects.get()
    assert (row.request, row.tenant, row.cancelled_by) == ("req_waits", books.chat.id, admin.actor.label)
    assert "not needed" in client.get(ADDRESS).content.decode()
    client.force_login(member)
    assert reverse("console:request_cancel") not in client.get(ADDRESS, {"id": "req_waits"}).content.decode()
    assert client.post(reverse("console:request_cancel"), {"id": "req_1", "reason": "x"}).status_code == 403


def test_the_page_costs_no_more_queries_than_it_may(client: Client, books: Books) -> None:
    for given in ({}, {"id": "req_evt_1"}, {"tenant": "chat", "key": books.keys[books.chat.id].public_id}):
        with CaptureQueriesContext(connection) as queries:
            client.get(ADDRESS, given)
        assert len(queries) <= 12, given


def test_rest_finds_the_same(client: Client, books: Books, operator: User) -> None:
    api, key = api_client(operator), books.keys[books.chat.id]

    def found(query: str) -> list[str]:
        return [each["event"] for each in api.send("GET", f"/usage/events?{query}").json()["results"]]

    assert found("") == [f"evt_{n}" for n in range(6)]
    assert found(f"tenant={books.chat.id}") == found(f"key={key.id}") == ["evt_1", "evt_3", "evt_5"]
    assert found("outcome=failed") == ["evt_1", "evt_2"]
    assert found(f"from={utc_now() - timedelta(days=4):%Y-%m-%dT%H:%M:%SZ}")[-1] == "evt_6"
    pages, cursor = [], ""
    while cursor is not None:
        page = api.send("GET", f"/usage/events?limit=4&cursor={cursor}").json()
        pages += [each["event"] for each in page["results"]]
        cursor = page["next"]
    assert pages == found("")
    member = make_user(role=Role.TENANT_MEMBER, tenant=books.chat.id)
    own = api_client(member, "tenant.read")
    assert [e["event"] for e in own.send("GET", "/usage/events").json()["results"]] == ["evt_1", "evt_3", "evt_5"]
    for query in ("outcome=odd", "from=soon", "to=0001-01-01T00:00:00Z", "cursor=eA", "from=2026-01-01T00:00:00Z"):
        assert api.send("GET", f"/usage/events?{query}").status_code == 422, query
