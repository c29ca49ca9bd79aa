"""Prices: exact however usage is grouped, by the day from which they hold, for whoever pays by them."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor
from controlplane.common.clock import to_us
from controlplane.common.errors import Conflict, Invalid, NotFound, VersionMismatch
from controlplane.usage import ingest as ingestion
from controlplane.usage.assignments import ALWAYS, assign_price_list, create_assignment, remove_assignment
from controlplane.usage.models import PriceAssignment, PriceList, StaleSum
from controlplane.usage.prices import (
    create_price_list,
    decimal_text,
    delete_price_list,
    rounded_micro,
    update_price_list,
)
from controlplane.usage.report import MIXED, stream_rows, usage_question, usage_report
from controlplane.usage.rollup import roll_up_finished, sum_up_stale
from tests.support.control_plane import ApiClient, book, make_tenant, make_user, signed_in, usage_event

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
FIRST, LAST = date(2026, 11, 1), date(2026, 11, 20)


@pytest.fixture(autouse=True)
def _at_a_known_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingestion, "utc_now", lambda: NOW)


def price(day: str, prompt: int, output: int, model: str = "") -> dict[str, Any]:
    return {
        "model": model, "valid_from": date.fromisoformat(day), "prompt_micro": prompt, "output_micro": output,
    }  # fmt: skip


def test_costs_are_those_of_the_events_however_they_are_grouped(system: Actor) -> None:
    """A price of a model goes before that of all others, each from midnight of the list's zone on."""
    by_model = create_price_list(
        actor=system, name="by-model", currency="EUR", timezone="Asia/Kolkata",
        prices=[price("2026-01-01", 150_000, 600_000), price("2026-11-10", 151_000, 599_999),
                price("2026-11-05", 7, 1_000_001, "m1")],
    )  # fmt: skip
    flat = create_price_list(
        actor=system, name="flat", currency="USD", prices=[price("2026-11-08", 10**12, 3), price("2026-11-15", 0, 0)]
    )
    # The same instants, worked out by hand: midnight at +05:30 is 18:30 of the day before.
    changes = {
        "by-model": [
            ("m1", datetime(2026, 11, 4, 18, 30, tzinfo=UTC), 7, 1_000_001),
            ("", datetime(2026, 11, 9, 18, 30, tzinfo=UTC), 151_000, 599_999),
            ("", datetime(2025, 12, 31, 18, 30, tzinfo=UTC), 150_000, 600_000),
        ],
        "flat": [("", datetime(2026, 11, 15, tzinfo=UTC), 0, 0), ("", datetime(2026, 11, 8, tzinfo=UTC), 10**12, 3)],
    }
    tenants = [make_tenant(system) for _ in range(3)]
    assign_price_list(actor=system, tenant_id=tenants[0].id, price_list=by_model.id)
    assign_price_list(actor=system, tenant_id=tenants[1].id, price_list="flat")
    paying = {tenants[0].id: ("by-model", "EUR"), tenants[1].id: ("flat", "USD")}
    assert flat.currency == "USD"
    rng = random.Random(1)
    expected: Counter[str] = Counter()
    by_key: Counter[tuple[str, str]] = Counter()
    unpriced, events = 0, []
    for number in range(150):
        at = NOW - timedelta(seconds=rng.randrange(86_400 * 18))
        if number < 30:  # around the instants of change
            at = datetime(2026, 11, rng.choice((4, 9)), 18, 30, tzinfo=UTC) - timedelta(microseconds=rng.randrange(2))
        event = usage_event(
            tenant=rng.choice(tenants).id, key=rng.choice(["k1", "k2"]), model=rng.choice(["m1", "m2"]),
            arrived_at_us=to_us(at), prompt_tokens=rng.randrange(10**6), output_tokens=rng.randrange(10**5),
        )  # fmt: skip
        events.append(event)
        name, currency = paying.get(event.tenant, ("", ""))
        found = [c for c in changes.get(name, ()) if c[0] in (event.model, "") and c[1] <= at]
        if found:
            _, _, prompt, output = found[0]
            expected[currency] += event.prompt_tokens * prompt + event.output_tokens * output
            by_key[event.key, event.tenant] += event.prompt_tokens * prompt + event.output_tokens * output
        else:
            unpriced += 1
    book(*events[:80])
    roll_up_finished(now=NOW)
    book(*events[80:])
    assert set(expected) == {"EUR", "USD"}
    assert unpriced
    for timezone in ("UTC", "America/Los_Angeles"):
        for group in (("day", "tenant"), ("hour", "key", "tenant"), ("tenant",), ("tenant", "model"), ("key",)):
            question = usage_question(
                actor=system, from_day=FIRST, to_day=LAST, timezone=timezone, group_by=group
            )  # fmt: skip
            report = usage_report(question)
            assert report.costs == dict(expected)
            assert report.unpriced == unpriced == sum(row.unpriced for row in report.rows)
            if "tenant" not in group:
                assert {row.currency for row in report.rows} == {MIXED}
                assert all(row.cost_pico is None for row in report.rows)
                continue
            sums: Counter[str] = Counter()
            for row in report.rows:
                if row.cost_pico is not None:
                    sums[row.currency] += row.cost_pico
            assert sums == expected
            assert list(stream_rows(question)) == report.rows
    question = usage_question(actor=system, from_day=FIRST, to_day=LAST, group_by=("key", "tenant"))
    told = {(r.group["key"], r.group["tenant"]): r.cost_pico for r in usage_report(question).rows if r.cost_pico}
    assert told == {key: pico for key, pico in by_key.items() if pico}


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_list_assigned_later_counts_for_what_is_rolled_up(system: Actor, is_marked: bool) -> None:
    """The sums over all tenants are kept by price list; without its marks (the mutant) a report would be wrong."""
    row = create_price_list(
        actor=system, name="flat", currency="EUR", prices=[price("2026-01-01", 3, 5), price("2026-11-19", 7, 0)]
    )
    paying, other = make_tenant(system), make_tenant(system)
    events = [
        usage_event(
            tenant=tenant.id, model=f"m{n % 2}", arrived_at_us=to_us(NOW - timedelta(hours=n)),
            prompt_tokens=1_000 + n, output_tokens=n,
        )
        for n in range(1, 40) for tenant in (paying, other)
    ]  # fmt: skip
    book(*events)
    roll_up_finished(now=NOW)
    cost = sum(
        e.prompt_tokens * 7 if e.arrived_at_us >= to_us(datetime(2026, 11, 19, tzinfo=UTC))
        else e.prompt_tokens * 3 + e.output_tokens * 5
        for e in events if e.tenant == paying.id
    )  # fmt: skip

    def told() -> list[tuple[dict[str, int], int]]:
        answers = []
        for group in ((), ("model",), ("hour",), ("day", "tenant")):
            report = usage_report(usage_question(actor=system, from_day=FIRST, to_day=LAST, group_by=group))
            assert report.totals["requests"] == len(events) == sum(r.sums["requests"] for r in report.rows)
            assert sum(r.cost_pico or 0 for r in report.rows) == sum(report.costs.values())
            answers.append((dict(report.costs), report.unpriced))
        return answers

    assert told() == [({}, len(events))] * 4
    assert not StaleSum.objects.exists()
    assign_price_list(actor=system, tenant_id=paying.id, price_list=row.id)
    if not is_marked:
        StaleSum.objects.all().delete()
        with pytest.raises(AssertionError):
            told()
        return
    assert told() == [({"EUR": cost}, len(events) // 2)] * 4
    assert sum_up_stale(limit=5) == 5
    assert told() == [({"EUR": cost}, len(events) // 2)] * 4
    roll_up_finished(now=NOW)
    assert not StaleSum.objects.exists()
    assert told() == [({"EUR": cost}, len(events) // 2)] * 4
    assign_price_list(actor=system, tenant_id=paying.id, price_list=None)
    assert told() == [({}, len(events))] * 4


def test_amounts() -> None:
    assert decimal_text(1_234_567_890_123) == "1.234567890123"
    assert decimal_text(-1) == "-0.000000000001"
    rng = random.Random(2)
    for _ in range(200):
        pico = rng.randrange(-(10**15), 10**15)
        assert Decimal(decimal_text(pico)) * 10**12 == pico
        near = rng.randrange(-50, 50) * 10**6 + rng.choice([0, 499_999, 500_000, 500_001])
        for value in (pico, near):
            assert rounded_micro(value) == round(Decimal(value) / 10**6)


def test_a_list_is_changed_as_a_whole_and_every_change_is_audited(system: Actor) -> None:
    row = create_price_list(actor=system, name="a", currency="EUR", prices=[price("2026-01-01", 1, 2)])
    update_price_list(actor=system, price_list_id=row.id, prices=[price("2026-02-01", 3, 4, "m")], expected_version=1)
    with pytest.raises(VersionMismatch):
        update_price_list(actor=system, price_list_id=row.id, prices=[], expected_version=1)
    tenant = make_tenant(system)
    assign_price_list(actor=system, tenant_id=tenant.id, price_list="a")
    with pytest.raises(Conflict, match="1 tenants pay"):
        delete_price_list(actor=system, price_list_id=row.id)
    with pytest.raises(Invalid):
        assign_price_list(actor=system, tenant_id=tenant.id, price_list="b\0")
    assign_price_list(actor=system, tenant_id=tenant.id, price_list=None)
    assert not PriceAssignment.objects.exists()
    delete_price_list(actor=system, price_list_id=row.id)
    entries = AuditEntry.objects.filter(action__contains="price_list").order_by("id")
    assert [e.action.partition(".")[2] for e in entries] == [
        "created", "updated", "assigned", "assigned", "deleted",
    ]  # fmt: skip
    assert entries[1].before == {
        "prices": [{"model": "", "valid_from": "2026-01-01", "prompt_micro": 1, "output_micro": 2}]
    }
    assert (entries[2].before, entries[2].after) == (
        {"price_lists": {}}, {"price_lists": {"2000-01-01": "a"}}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"currency": "euro"}, "currency"), ({"name": "A b"}, "name"), ({"timezone": "Mars"}, "timezone"),
        ({"prices": [price("2026-01-01", -1, 0)]}, "prices"),
        ({"prices": [price("2026-01-01", 0, 10**12 + 1)]}, "prices"),
        ({"prices": [price("1999-01-01", 0, 0)]}, "prices"), ({"prices": [price("2026-01-01", 1, 1)] * 2}, "prices"),
        ({"prices": [price("2026-01-01", 1, 1, "a\0")]}, "prices"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(system: Actor, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as refused:
        create_price_list(**{"actor": system, "name": "a", "currency": "EUR", **fields})
    assert list(refused.value.fields) == [field]
    assert not PriceList.objects.exists()


def test_rest(api: ApiClient, system: Actor) -> None:
    tenant = make_tenant(system)
    said = {"model": "", "valid_from": "2026-01-01", "prompt_micro": 150_000, "output_micro": 600_000}
    made = api.send("POST", "/price-lists", {"name": "a", "currency": "EUR", "prices": [said]})
    assert (made.status_code, made.json()["prices"]) == (201, [said])
    path = f"/price-lists/{made.json()['id']}"
    assert api.send("PUT", f"/tenants/{tenant.id}/price-list", {"price_list": "a"}).json() == {
        "price_list": made.json()["id"], "valid_from": "2000-01-01"
    }  # fmt: skip
    changed = api.send("PATCH", path, {"prices": [said, {**said, "model": "m"}]}, if_match='"1"')
    assert len(changed.json()["prices"]) == 2
    assert api.send("DELETE", path).status_code == 409
    book(usage_event(tenant=tenant.id, arrived_at_us=to_us(NOW) - 1, prompt_tokens=1_000_000, output_tokens=1))
    report = api.send("GET", "/usage/report?from=2026-11-20&to=2026-11-20").json()
    assert report["costs"] == [{"currency": "EUR", "cost": "0.150000600000", "cost_micro": 150_001}]
    assert [(row["currency"], row["cost"]) for row in report["rows"]] == [("EUR", "0.150000600000")]
    assert api.send("PUT", f"/tenants/{tenant.id}/price-list", {"price_list": None}).status_code == 200
    assert api.send("DELETE", path).status_code == 204
    member = make_user(role="tenant_admin", tenant=tenant.id).actor
    with pytest.raises(NotFound):
        assign_price_list(actor=member, tenant_id=tenant.id, price_list=None)


def test_the_usage_page_groups_costs_and_keeps_their_last_decimal(system: Actor) -> None:
    create_price_list(actor=system, name="a", currency="EUR", prices=[price("2026-01-01", 150_000, 0)])
    for n_tokens in (60_296_358_579, 1_000, 0):
        tenant = make_tenant(system)
        assign_price_list(actor=system, tenant_id=tenant.id, price_list="a")
        book(usage_event(tenant=tenant.id, arrived_at_us=to_us(NOW) - 1, prompt_tokens=n_tokens, output_tokens=0))
    page = signed_in("operator").get("/usage/?from_day=2026-11-20&to_day=2026-11-20&group_by=tenant")
    costs = {(row["cost"]["text"], row["cost"]["exact"]) for row in page.context["rows"]}
    assert costs == {
        ("9,044.45 EUR", "9044.453786850000 EUR"),
        ("< 0.01 EUR", "0.000150000000 EUR"),
        ("0.00 EUR", "0.000000000000 EUR"),
    }
    assert 'title="9044.453786850000 EUR">9,044.45 EUR</td>' in page.content.decode()


def test_the_pages_round_trip_every_field(system: Actor) -> None:
    client: Client = signed_in("operator")
    form = {"name": "a", "currency": "EUR", "timezone": "Europe/Berlin",
            "prices": "2026-01-01, 150000, 600000\n2026-02-01, 1, 2, a, model"}  # fmt: skip
    assert client.post(reverse("console:price_list_new"), form).status_code == 302
    row = PriceList.objects.get()
    prices = sorted(row.prices.values_list("model", "valid_from", "prompt_micro", "output_micro"))
    assert prices == [("", date(2026, 1, 1), 150_000, 600_000), ("a, model", date(2026, 2, 1), 1, 2)]
    page = reverse("console:price_list", args=[row.id])
    text = client.get(page).content.decode()
    assert "2026-02-01, 1, 2, a, model" in text
    shown = {"name": "b", "prices": "2026-01-01, 150000, 600000\n2026-02-01, 1, 2, a, model", "version": "1"}
    assert client.post(page, shown).status_code == 302
    assert sorted(row.prices.values_list("model", "valid_from", "prompt_micro", "output_micro")) == prices
    assert "Line 1 is not" in client.post(page, {**shown, "prices": "x", "version": "2"}).content.decode()
    tenant = make_tenant(system)
    assign = reverse("console:price_list_assign", args=[row.id])
    client.post(assign, {"tenant": tenant.id})
    assert tenant.name in client.get(page).content.decode()
    client.post(assign, {"tenant": tenant.slug, "valid_from": "2026-03-01"})
    rows = PriceAssignment.objects.order_by("valid_from")
    assert [(each.valid_from, each.price_list) for each in rows] == [(ALWAYS, row), (date(2026, 3, 1), row)]
    text = client.get(page).content.decode()
    assert "<td>always</td>" in text
    assert "<td>2026-03-01</td>" in text
    assert "no tenant" in client.post(assign, {"tenant": "nobody"}, follow=True).content.decode()
    for each in rows:
        client.post(assign, {"remove": each.id})
    assert not PriceAssignment.objects.exists()
    assert client.get(reverse("console:price_lists")).status_code == 200
    assert client.post(reverse("console:price_list_delete", args=[row.id])).status_code == 302
    assert not PriceList.objects.exists()


def test_a_tenant_pays_by_another_list_from_a_day_of_its_time_zone_on(system: Actor) -> None:
    old = create_price_list(actor=system, name="old", currency="EUR", prices=[price("2026-01-01", 10**6, 0)])
    create_price_list(actor=system, name="new", currency="EUR", prices=[price("2026-01-01", 3 * 10**6, 0)])
    tenant = make_tenant(system, timezone="Asia/Kolkata")
    assign_price_list(actor=system, tenant_id=tenant.id, price_list="old")
    assign_price_list(actor=system, tenant_id=tenant.id, price_list="new", valid_from=date(2026, 11, 10))
    none = create_assignment(actor=system, tenant=tenant.slug, price_list=None, valid_from=date(2026, 11, 15))
    change = datetime(2026, 11, 9, 18, 30, tzinfo=UTC)
    instants = [change - timedelta(microseconds=1), change, datetime(2026, 11, 14, 18, 30, tzinfo=UTC)]
    book(*(usage_event(tenant=tenant.id, arrived_at_us=to_us(at), prompt_tokens=1, output_tokens=0) for at in instants))

    def told() -> tuple[dict[str, int], int]:
        question = usage_question(actor=system, from_day=FIRST, to_day=LAST, group_by=("tenant",))
        report = usage_report(question)
        assert sum(row.cost_pico or 0 for row in report.rows) == sum(report.costs.values())
        return dict(report.costs), report.unpriced

    assert told() == ({"EUR": 4 * 10**6}, 1)
    roll_up_finished(now=NOW)
    assert told() == ({"EUR": 4 * 10**6}, 1)
    remove_assignment(actor=system, assignment_id=none.id)
    assert told() == ({"EUR": 7 * 10**6}, 0)
    # Without a day it is the only one.
    assign_price_list(actor=system, tenant_id=tenant.id, price_list=old.id)
    assert told() == ({"EUR": 3 * 10**6}, 0)
    assert PriceAssignment.objects.get().valid_from == ALWAYS


def test_another_currency_begins_with_a_month_and_a_day_has_one_list(system: Actor) -> None:
    for name, currency in (("a", "EUR"), ("b", "USD")):
        create_price_list(actor=system, name=name, currency=currency)
    tenant = make_tenant(system)
    assign_price_list(actor=system, tenant_id=tenant.id, price_list="a")
    with pytest.raises(Invalid, match="no first of a month"):
        assign_price_list(actor=system, tenant_id=tenant.id, price_list="b", valid_from=date(2026, 11, 10))
    assert PriceAssignment.objects.count() == 1
    assign_price_list(actor=system, tenant_id=tenant.id, price_list=None, valid_from=date(2026, 11, 10))
    with pytest.raises(Invalid, match="no first of a month"):
        create_assignment(actor=system, tenant=tenant.id, price_list="b", valid_from=date(2026, 11, 20))
    create_assignment(actor=system, tenant=tenant.id, price_list="b", valid_from=date(2026, 12, 1))
    with pytest.raises(Conflict, match="already"):
        create_assignment(actor=system, tenant=tenant.id, price_list="b", valid_from=date(2026, 12, 1))
    with pytest.raises(Invalid, match="valid_from"):
        create_assignment(actor=system, tenant=tenant.id, price_list="b", valid_from=date(1999, 12, 1))
