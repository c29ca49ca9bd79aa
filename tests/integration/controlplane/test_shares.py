"""Entitled against delivered share, by the weights that held at the time; and the report a tenant's own key gets."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.common.actor import Actor
from controlplane.common.clock import to_us, utc_now
from controlplane.keys.actions import revoke_key
from controlplane.keys.models import ApiKey
from controlplane.tenants.actions import update_group, update_tenant
from controlplane.tenants.models import Tenant
from controlplane.usage import ingest as ingestion
from controlplane.usage import key_api
from controlplane.usage import shares as sharing
from controlplane.usage.models import WeightChange
from controlplane.usage.report import usage_question
from controlplane.usage.rollup import roll_up_finished
from controlplane.usage.shares import shares
from router_ext.wire.controlplane import KEY_HEADER, TENANT_USAGE_PATH
from tests.support.control_plane import (
    ApiClient,
    api_client,
    book,
    make_group,
    make_key,
    make_pool,
    make_tenant,
    make_user,
    signed_in,
    usage_event,
)

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
DAY = date(2026, 11, 19)
START = datetime(2026, 11, 19, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _at_a_known_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingestion, "utc_now", lambda: NOW)


def served(tenant: str, minutes: int, prompt: int, output: int = 0, pool: str = "p1") -> None:
    book(
        usage_event(
            tenant=tenant, pool=pool, arrived_at_us=to_us(START + timedelta(minutes=minutes)),
            prompt_tokens=prompt, output_tokens=output,
        )
    )  # fmt: skip


def told(actor: Actor, **filters: str) -> dict[tuple[str, str], tuple[float, float]]:
    question = usage_question(actor=actor, from_day=DAY, to_day=DAY, filters=filters)
    return {(s.pool, s.tenant): (s.delivered, s.entitled) for s in shares(question)}


def test_triggers_note_every_change_of_a_weight(system: Actor) -> None:
    group = make_group(system, weight=5.0)
    tenant = make_tenant(system, weight=2.0)
    update_tenant(actor=system, tenant_id=tenant.id, name="Other")
    update_tenant(actor=system, tenant_id=tenant.id, weight=3.0)
    update_tenant(actor=system, tenant_id=tenant.id, group=group.name)
    update_group(actor=system, group_id=group.id, weight=7.0)
    Tenant.objects.filter(pk=tenant.id).update(weight=4.0)
    rows = WeightChange.objects.filter(tenant=tenant.id).order_by("id")
    assert list(rows.values_list("weight", "group", "group_weight")) == [
        (2.0, None, None), (3.0, None, None), (3.0, group.name, 5.0), (3.0, group.name, 7.0), (4.0, group.name, 7.0),
    ]  # fmt: skip


def test_shares_by_weight_among_those_with_traffic(system: Actor) -> None:
    one, two = make_tenant(system, weight=1.0), make_tenant(system, weight=3.0)
    served(one.id, 0, 100)
    served(two.id, 14, 100, 50)  # the same quarter of an hour: 300 of service
    served(one.id, 15, 50)  # alone: entitled to all of it
    served(one.id, 0, 10, pool="p2")
    roll_up_finished(now=NOW)
    found = told(system)
    assert found["p1", one.id] == pytest.approx((150 / 350, (300 / 4 + 50) / 350))
    assert found["p1", two.id] == pytest.approx((200 / 350, 225 / 350))
    assert found["p2", one.id] == pytest.approx((1.0, 1.0))
    assert told(system, pool="p2") == {("p2", one.id): (1.0, 1.0)}
    # Narrowed to one tenant, the others still compete.
    assert told(system, tenant=one.id)["p1", one.id] == found["p1", one.id]


def test_a_weight_counts_from_when_it_held(system: Actor) -> None:
    one, two = make_tenant(system), make_tenant(system)
    for tenant in (one, two):
        for minutes in (0, 60):
            served(tenant.id, minutes, 100)
    WeightChange.objects.all().delete()
    for tenant, at, weight in ((one, -60, 1.0), (one, 30, 9.0), (two, 600, 1.0)):
        WeightChange.objects.create(tenant=tenant.id, at=START + timedelta(minutes=at), weight=weight)
    assert told(system)["p1", one.id][1] == pytest.approx((100 + 180) / 400)


def test_shares_are_those_worked_out_by_hand_with_groups(system: Actor) -> None:
    rng = random.Random(3)
    groups = [make_group(system, weight=w) for w in (2.0, 6.0)]
    tenants = [make_tenant(system, weight=rng.choice([1.0, 2.0, 5.0]),
                           group=rng.choice([None, groups[0].name, groups[1].name])) for _ in range(7)]  # fmt: skip
    quarters: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for _ in range(60):
        tenant, minutes, prompt, output = rng.choice(tenants), rng.randrange(90), rng.randrange(100), rng.randrange(50)
        served(tenant.id, minutes, prompt, output)
        quarters[minutes // 15][tenant.id] += prompt + 2 * output
    rows = {t.id: (t.weight, None if t.group is None else (t.group.name, t.group.weight)) for t in tenants}
    service: dict[str, float] = defaultdict(float)
    entitled: dict[str, float] = defaultdict(float)
    for present in quarters.values():
        outside = {group or tenant: (group[1] if group else weight)
                   for tenant, (weight, group) in rows.items() if tenant in present}  # fmt: skip
        for tenant, amount in present.items():
            weight, group = rows[tenant]
            inside = sum(w for t, (w, g) in rows.items() if t in present and g == group) if group else weight
            share = outside[group or tenant] / sum(outside.values()) * weight / inside
            entitled[tenant] += share * sum(present.values())
            service[tenant] += amount
    whole = sum(service.values())
    found = told(system)
    assert set(found) == {("p1", tenant) for tenant in service}
    for tenant in service:
        assert found["p1", tenant] == pytest.approx((service[tenant] / whole, entitled[tenant] / whole))
    assert sum(e for _, e in found.values()) == pytest.approx(1.0)


def test_the_largest_of_every_pool_are_told(system: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = [make_tenant(system) for _ in range(4)]
    for number, tenant in enumerate(tenants):
        for pool in ("p1", "p2"):
            served(tenant.id, 0, 100 * (number + 1), pool=pool)
    monkeypatch.setattr(sharing, "MAX_ROWS", 4)
    found = [(s.pool, s.tenant) for s in shares(usage_question(actor=system, from_day=DAY, to_day=DAY))]
    assert found == [(pool, tenants[number].id) for pool in ("p1", "p2") for number in (3, 2)]


def test_shares_are_told_by_rest_and_page(api: ApiClient, system: Actor) -> None:
    own, other = make_tenant(system, name="Own"), make_tenant(system, name="Other")
    served(own.id, 0, 100)
    served(other.id, 0, 100)
    path = "/usage/shares?from=2026-11-19&to=2026-11-19"
    assert [s["delivered"] for s in api.send("GET", path).json()["shares"]] == [0.5, 0.5]
    teammate = api_client(make_user(role="tenant_member", tenant=own.id), "tenant.read")
    assert [s["tenant"] for s in teammate.send("GET", path).json()["shares"]] == [own.id]
    assert api.send("GET", "/usage/shares?from=2026-01-01&to=2026-11-19").status_code == 422
    page = signed_in("viewer").get(f"{reverse('console:usage_shares')}?from_day=2026-11-19&to_day=2026-11-19")
    assert "Own" in page.content.decode()
    assert "50.00%" in page.content.decode()


class TestOwnKey:
    @pytest.fixture
    def mine(self, system: Actor) -> tuple[ApiKey, str]:
        tenant, pool = make_tenant(system), make_pool(system)
        key, text = make_key(system, tenant, pool)
        book(usage_event(tenant=tenant.id, arrived_at_us=to_us(NOW)), usage_event(arrived_at_us=to_us(NOW)))
        return key, text

    def ask(self, text: str, query: str = "", **more: Any) -> Any:
        headers = {"authorization": f"Bearer {text}"} if text else {}
        return Client().get(f"/v1/usage?from=2026-11-20&to=2026-11-20{query}", headers=headers, **more)

    def test_a_key_is_told_of_its_own_tenant_only(self, mine: tuple[ApiKey, str]) -> None:
        key, text = mine
        told = self.ask(text).json()
        assert (told["requests"], [row["tenant"] for row in told["rows"]]) == (1, [key.tenant_id])
        assert self.ask(text, "&tenant=ten_a").status_code == 404
        assert self.ask(text, "&group_by=key&tz=Asia/Kolkata").json()["requests"] == 1
        answer = self.ask(text, "&format=csv")
        assert b"".join(answer.streaming_content).count(b"\r\n") == 2
        assert self.ask(text, "&tz=Mars").status_code == 422

    def test_others_are_refused_with_the_same_words(self, mine: tuple[ApiKey, str], system: Actor) -> None:
        key, text = mine
        tenant = make_tenant(system)
        expired, expired_text = make_key(system, tenant, make_pool(system))
        ApiKey.objects.filter(pk=expired.id).update(expires_at=utc_now() - timedelta(seconds=1))
        _, unknown = make_key(system, tenant, make_pool(system))
        ApiKey.objects.exclude(pk__in=[key.id, expired.id]).delete()
        revoke_key(actor=system, key_id=key.id)
        answers = [self.ask(t) for t in ("", "nonsense", text, expired_text, unknown)]
        assert {a.status_code for a in answers} == {401}
        assert len({a.content for a in answers}) == 1
        assert {a.headers["www-authenticate"] for a in answers} == {"Bearer"}

    def test_a_router_asks_for_a_key_that_it_has_authenticated(
        self, mine: tuple[ApiKey, str], router: tuple[Any, dict[str, str]], system: Actor
    ) -> None:
        key, text = mine

        def told(headers: dict[str, str], key_id: str) -> Any:
            query = "from=2026-11-20&to=2026-11-20"
            return Client().get(f"{TENANT_USAGE_PATH}?{query}", headers={**headers, KEY_HEADER: key_id})

        answer = told(router[1], key.id)
        assert (answer.json()["requests"], answer.json()["rows"][0]["tenant"]) == (1, key.tenant_id)
        # A tenant's key is no router's token, and nobody is asked for whose key does not hold.
        for headers in ({}, {"authorization": f"Bearer {text}"}):
            assert told(headers, key.id).status_code == 401
        revoke_key(actor=system, key_id=key.id)
        for key_id in (key.id, "key_missing", ""):
            assert told(router[1], key_id).status_code == 404

    def test_failures_slow_down_and_reports_are_counted(
        self, mine: tuple[ApiKey, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key, text = mine
        monkeypatch.setattr(key_api, "PER_MINUTE", 3)
        monkeypatch.setattr(key_api, "utc_now", lambda: NOW)
        assert [self.ask(text).status_code for _ in range(4)] == [200, 200, 200, 429]
        ApiKey.objects.filter(pk=key.id).update(digest="0" * 64)
        answers = [self.ask(text) for _ in range(7)]
        assert answers[0].status_code == 401
        assert answers[-1].status_code == 429
        assert int(answers[-1].headers["retry-after"]) > 0
