"""Statements and reconciliation: closed months never change, late events are corrections, differences are shown."""

from __future__ import annotations

import csv
import io
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from django.db import DatabaseError, transaction
from django.urls import reverse

from controlplane.common.actor import Actor
from controlplane.common.clock import to_us
from controlplane.console.views.statements import money
from controlplane.tenants.actions import update_tenant
from controlplane.tenants.models import Tenant
from controlplane.usage import ingest as ingestion
from controlplane.usage.assignments import assign_price_list
from controlplane.usage.models import Reconciliation, Statement, StatementLine, UsageQuarter
from controlplane.usage.prices import create_price_list, update_price_list
from controlplane.usage.reconciliation import reconcile
from controlplane.usage.rollup import roll_up_finished
from controlplane.usage.statements import close_months
from tests.support.control_plane import ApiClient, api_client, book, make_tenant, make_user, signed_in, usage_event

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _at_a_known_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingestion, "utc_now", lambda: NOW)


def at(*when: int) -> int:
    return to_us(datetime(*when, tzinfo=UTC))  # type: ignore[arg-type]  # year, month, ...


def price(day: str, prompt: int, output: int, model: str = "") -> dict[str, Any]:
    return {"model": model, "valid_from": date.fromisoformat(day), "prompt_micro": prompt, "output_micro": output}


@pytest.fixture
def tenant(system: Actor) -> Tenant:
    row = make_tenant(system, name="=Chat", timezone="Asia/Kolkata")
    create_price_list(
        actor=system, name="a", currency="EUR", timezone="Asia/Kolkata",
        prices=[price("2026-01-01", 150_000, 600_000), price("2026-09-15", 1, 1)],
    )  # fmt: skip
    assign_price_list(actor=system, tenant_id=row.id, price_list="a")
    return row


def lines(statement: Statement) -> list[tuple[Any, ...]]:
    fields = ("kind", "month__month", "model", "requests", "prompt_tokens", "output_tokens", "amount_micro")
    return list(statement.lines.order_by("number").values_list(*fields))


def used(tenant: Tenant, arrived: int, prompt: int, output: int, model: str = "m") -> None:
    book(usage_event(tenant=tenant.id, arrived_at_us=arrived, model=model, prompt_tokens=prompt, output_tokens=output))


def test_a_month_is_closed_once_in_the_tenants_time_zone_and_late_events_are_corrected(
    system: Actor, tenant: Tenant
) -> None:
    # September in Kolkata is 31 August 18:30 to 30 September 18:30.
    used(tenant, at(2026, 8, 31, 18, 29, 59), 1_000_000, 0)
    used(tenant, at(2026, 8, 31, 18, 30), 10, 0)
    used(tenant, at(2026, 9, 2), 3, 1, "n")
    used(tenant, at(2026, 9, 14, 18, 30), 1_000_000, 500_000)
    used(tenant, at(2026, 9, 30, 18, 30), 7, 7)
    roll_up_finished(now=NOW)
    assert close_months(now=datetime(2026, 9, 30, 19, 29, tzinfo=UTC)) == 1
    august = Statement.objects.get()
    assert (august.month, lines(august)) == (date(2026, 8, 1), [("usage", 8, "m", 1, 1_000_000, 0, 150_000)])
    assert close_months(now=datetime(2026, 9, 30, 19, 31, tzinfo=UTC)) == 1
    assert close_months(now=datetime(2026, 9, 30, 19, 31, tzinfo=UTC)) == 0
    september = Statement.objects.get(month=date(2026, 9, 1))
    assert september.from_at == datetime(2026, 8, 31, 18, 30, tzinfo=UTC) == august.to_at
    # 1.5 micro for ten prompt tokens, and 1.05 for three and one: half to even, a line each. 1.5 again for the million
    # and a half at a millionth of the price.
    expected = [
        ("usage", 9, "m", 1, 10, 0, 2),
        ("usage", 9, "m", 1, 1_000_000, 500_000, 2),
        ("usage", 9, "n", 1, 3, 1, 1),
    ]
    assert lines(september) == expected
    assert (september.amount_micro, september.currency) == (5, "EUR")

    # What comes late, one in a model that had nothing; and prices are edited, which changes nothing that is closed.
    used(tenant, at(2026, 9, 3), 1_000_000, 0)
    used(tenant, at(2026, 9, 3), 0, 10, "late")
    used(tenant, at(2026, 8, 25), 1_000_000, 1_000_000)
    assert lines(september) == expected
    assert close_months(now=datetime(2026, 10, 31, 19, 31, tzinfo=UTC)) == 1
    october = Statement.objects.get(month=date(2026, 10, 1))
    assert lines(october) == [
        ("usage", 10, "m", 1, 7, 7, 0),
        ("correction", 8, "m", 1, 1_000_000, 1_000_000, 750_000),
        ("correction", 9, "late", 1, 0, 10, 6),
        ("correction", 9, "m", 1, 1_000_000, 0, 150_000),
    ]
    assert october.amount_micro == sum(line[-1] for line in lines(october))
    assert lines(september) == expected

    # Nothing is corrected twice, whatever becomes of the prices.
    update_price_list(actor=system, price_list_id=tenant_list(), prices=[price("2026-02-02", 9, 9)])
    assert close_months(now=datetime(2026, 11, 30, 19, 31, tzinfo=UTC)) == 1
    assert lines(Statement.objects.get(month=date(2026, 11, 1))) == []
    total = sum(line.requests for line in StatementLine.objects.all())
    assert total == 8


def tenant_list() -> str:
    from controlplane.usage.models import PriceList

    return PriceList.objects.get().id


def test_a_closed_statement_cannot_be_changed(tenant: Tenant) -> None:
    used(tenant, at(2026, 10, 5), 1, 1)
    close_months(now=NOW)
    for rows in (Statement.objects.all(), StatementLine.objects.all()):
        assert rows.exists()
        for change in (lambda rows=rows: rows.update(tenant="x") if rows.model is Statement else rows.update(model="x"),
                       lambda rows=rows: rows._raw_delete("default")):  # fmt: skip
            with pytest.raises(DatabaseError, match="closed"), transaction.atomic():
                change()


def test_nothing_falls_between_two_statements_when_the_time_zone_changes(system: Actor, tenant: Tenant) -> None:
    used(tenant, at(2026, 9, 10), 1, 1)
    close_months(now=datetime(2026, 10, 2, tzinfo=UTC))
    update_tenant(actor=system, tenant_id=tenant.id, timezone="America/Los_Angeles")
    # October began in Kolkata, and ends in Los Angeles.
    for hour in (datetime(2026, 9, 30, 18, 30, tzinfo=UTC), datetime(2026, 11, 1, 6, 59, tzinfo=UTC)):
        used(tenant, to_us(hour), 1, 1)
    close_months(now=NOW)
    october = Statement.objects.get(month=date(2026, 10, 1))
    assert (october.from_at, october.to_at) == (
        datetime(2026, 9, 30, 18, 30, tzinfo=UTC), datetime(2026, 11, 1, 7, 0, tzinfo=UTC),
    )  # fmt: skip
    assert [line[3] for line in lines(october)] == [2]


def test_a_tenant_without_prices_has_statements_without_amounts(system: Actor) -> None:
    row = make_tenant(system)
    used(row, at(2026, 10, 5), 4, 2)
    assert close_months(now=NOW) == 1
    statement = Statement.objects.get()
    assert (statement.currency, statement.amount_micro) == ("", 0)
    assert lines(statement) == [("usage", 10, "m", 1, 4, 2, None)]


def test_statements_are_shown_to_the_tenants_own_people_and_exported(
    api: ApiClient, system: Actor, tenant: Tenant
) -> None:
    used(tenant, at(2026, 10, 5), 1_000_000, 1_000_000, "+model")
    close_months(now=NOW)
    statement = Statement.objects.get()
    teammate = api_client(make_user(role="tenant_member", tenant=tenant.id), "tenant.read")
    stranger = api_client(make_user(role="tenant_member", tenant=make_tenant(system).id), "tenant.read")
    for client in (api, teammate):
        (row,) = client.send("GET", "/statements").json()["results"]
        assert row == client.send("GET", f"/statements/{statement.id}").json()
        assert (row["amount_micro"], row["currency"], row["lines"][0]["requests"]) == (2, "EUR", 1)
    assert stranger.send("GET", "/statements").json()["results"] == []
    assert stranger.send("GET", f"/statements/{statement.id}").status_code == 404
    answer = teammate.send("GET", f"/statements/{statement.id}?format=csv")
    (line,) = csv.DictReader(io.StringIO(b"".join(answer.streaming_content).decode()))
    assert (line["tenant_name"], line["model"], line["amount_micro"]) == ("'=Chat", "'+model", "2")
    client = signed_in("viewer")
    assert "0.000002 EUR" in client.get(reverse("console:statements")).content.decode()
    page = client.get(reverse("console:statement", args=[statement.id])).content.decode()
    assert "0.000002 EUR" in page
    assert '<td>2026-09-15</td><td class="num">0.000001</td><td class="num">0.000001</td>' in page
    assert client.get(reverse("console:statement_csv", args=[statement.id])).status_code == 200


@pytest.mark.parametrize(
    ("micro", "text"),
    [
        (None, ""), (0, "0.000000"), (-1, "-0.000001"), (-59_697_284_970, "-59,697.284970"),
        (10**37 + 1, "10,000,000,000,000,000,000,000,000,000,000.000001"),
    ],
)  # fmt: skip
def test_amounts_are_grouped_and_exact(micro: int | None, text: str) -> None:
    assert money(micro) == text


# --- reconciliation ---


def test_books_that_agree_are_said_to(api: ApiClient) -> None:
    book(*(usage_event(arrived_at_us=to_us(NOW - timedelta(days=n, hours=1)), key=f"k{n % 2}") for n in range(10)))
    roll_up_finished(now=NOW - timedelta(days=3))
    row = reconcile(now=NOW)
    assert (row.n_events, row.n_different, row.differences) == (8, 0, [])
    assert (row.from_day, row.to_day) == (date(2026, 11, 12), date(2026, 11, 19))
    assert api.send("GET", "/usage/reconciliations").json()["results"][0]["n_events"] == 8
    assert "agree" in signed_in("viewer").get(reverse("console:usage")).content.decode()


@pytest.mark.parametrize("damage", ["changed", "gone", "made up"])
def test_a_rollup_that_differs_is_named_and_shown(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    book(*(usage_event(arrived_at_us=to_us(NOW - timedelta(days=2)), key=key) for key in ("k1", "k2")))
    roll_up_finished(now=NOW)
    rows = UsageQuarter.objects.filter(key="k1")
    if damage == "changed":
        rows.update(output_tokens=21)
    elif damage == "gone":
        rows.delete()
    else:
        UsageQuarter.objects.filter(key="k2").update(key="k3")
    row = reconcile(now=NOW)
    assert row.n_different == (2 if damage == "made up" else 1)
    (difference, *_) = row.differences
    assert difference["day"] == "2026-11-18"
    assert difference["key"] == ("k2" if damage == "made up" else "k1")
    assert difference["events"]["output_tokens"] == 20
    assert difference["books"]["output_tokens"] == {"changed": 21, "gone": 0, "made up": 0}[damage]
    assert any(record.levelname == "ERROR" and "books_differ" in str(record.msg) for record in caplog.records)
    text = signed_in("viewer").get(reverse("console:usage")).content.decode()
    assert "The books differ from their events" in text
    assert difference["key"] in text


def test_old_runs_are_forgotten() -> None:
    reconcile(now=NOW - timedelta(days=401))
    reconcile(now=NOW)
    assert Reconciliation.objects.get().ran_at == NOW


def test_what_comes_late_is_charged_by_the_list_of_its_day(system: Actor, tenant: Tenant) -> None:
    """Both lists have a price from the same day on; a statement tells them apart by the day of their assignment."""
    create_price_list(
        actor=system, name="b", currency="EUR", timezone="Asia/Kolkata", prices=[price("2026-01-01", 10**6, 0)]
    )
    assign_price_list(actor=system, tenant_id=tenant.id, price_list="b", valid_from=date(2026, 10, 11))
    used(tenant, at(2026, 10, 10, 18, 29), 10**6, 0)
    used(tenant, at(2026, 10, 10, 18, 30), 10**6, 0)
    roll_up_finished(now=NOW)
    close_months(now=datetime(2026, 11, 2, tzinfo=UTC))
    (october,) = Statement.objects.all()
    assert lines(october) == [
        ("usage", 10, "m", 1, 10**6, 0, 1), ("usage", 10, "m", 1, 10**6, 0, 10**6)
    ]  # fmt: skip
    days = list(october.lines.order_by("number").values_list("valid_from", flat=True))
    assert days == [date(2026, 9, 15), date(2026, 10, 11)]
    used(tenant, at(2026, 10, 9), 10**6, 0)
    used(tenant, at(2026, 10, 12), 2 * 10**6, 0)
    close_months(now=datetime(2026, 12, 2, tzinfo=UTC))
    assert lines(Statement.objects.get(month=date(2026, 11, 1))) == [
        ("correction", 10, "m", 1, 10**6, 0, 1), ("correction", 10, "m", 1, 2 * 10**6, 0, 2 * 10**6)
    ]  # fmt: skip
