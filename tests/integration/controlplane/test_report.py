"""Reports: sums are those of the events however they are grouped, in every time zone, before and after rollups."""

from __future__ import annotations

import csv
import io
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from django.db import connection
from django.test import Client
from django.urls import reverse

from controlplane.common.actor import Actor
from controlplane.common.clock import from_us, to_us
from controlplane.common.errors import Invalid
from controlplane.common.zones import QUARTER
from controlplane.tenants.actions import update_tenant
from controlplane.usage import ingest as ingestion
from controlplane.usage import report as reporting
from controlplane.usage.coarsening import coarsen
from controlplane.usage.models import QuarantinedEvent, RolledUp, StaleSum, TouchedQuarter, UsageEvent, UsageQuarter
from controlplane.usage.partitions import QUARTERS, drop_old_days, ensure_days, partition_name
from controlplane.usage.report import Question, Row, usage_question, usage_report
from controlplane.usage.report_export import COLUMNS, report_csv, report_json
from controlplane.usage.rollup import SUMS, roll_up_finished
from router_ext.wire.controlplane import UsageEvent as Event
from tests.support.control_plane import (
    ApiClient,
    api_client,
    book,
    make_key,
    make_pool,
    make_tenant,
    make_user,
    signed_in,
    usage_event,
)

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
ZONES = ("UTC", "Asia/Kolkata", "America/Los_Angeles", "Australia/Lord_Howe")
# Around the Sunday on which clocks of Los Angeles go back (25 hours); those of Lord Howe went on (23.5) on 4 October.
FIRST, LAST = date(2026, 10, 31), date(2026, 11, 2)
GROUPS: tuple[tuple[str, ...], ...] = (
    ("day",), ("hour",), (), ("key",), ("model",), ("day", "tenant"), ("day", "key", "model"),
    ("hour", "tenant", "key", "pool", "model", "tier"), ("pool", "tier"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _at_a_known_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingestion, "utc_now", lambda: NOW)


def random_events(rng: random.Random, n: int, first: datetime, last: datetime) -> list[Event]:
    span = to_us(last) - to_us(first)
    events = []
    for _ in range(n):
        at = to_us(first) + rng.randrange(span)
        if rng.random() < 0.3:  # on a quarter of an hour, or just before it
            at = at // 900_000_000 * 900_000_000 - rng.randrange(2)
        ttft = round(rng.lognormvariate(12.5, 1.2)) if rng.random() < 0.9 else None
        events.append(
            usage_event(
                arrived_at_us=at, ended_at_us=at + 9_000_000, first_dispatch_us=at,
                first_token_us=None if ttft is None else at + ttft,
                tenant=rng.choice(["ten_a", "ten_b"]), key=rng.choice(["k1", "k2", "=k3"]),
                pool=rng.choice(["p1", "p2"]), model=rng.choice(["m1", "m2"]), tier=rng.choice(["fast", "slow"]),
                outcome=rng.choice(["completed", "cancelled", "failed"]), prompt_tokens=rng.randrange(1_000),
                output_tokens=rng.randrange(1_000) if ttft else 0, recomputed_tokens=rng.randrange(9),
                resumed_prefill_tokens=rng.randrange(9), kv_token_seconds=rng.random() * 1_000,
            )
        )  # fmt: skip
    return events


def sums_of(event: Event) -> Counter[str]:
    return Counter(
        requests=1, completed=int(event.outcome == "completed"), prompt_tokens=event.prompt_tokens,
        output_tokens=event.output_tokens, recomputed_tokens=event.recomputed_tokens,
        resumed_tokens=event.resumed_prefill_tokens, kv_token_ms=round(event.kv_token_seconds * 1_000),
    )  # fmt: skip


def expected(events: Iterable[Event], group: tuple[str, ...], zone: ZoneInfo) -> dict[tuple[str, ...], Counter[str]]:
    """The sums by local day or hour as its clock shows it, and by the names of the group: from the events alone."""
    found: dict[tuple[str, ...], Counter[str]] = {}
    for event in events:
        local = from_us(event.arrived_at_us).astimezone(zone)
        if not FIRST <= local.date() <= LAST:
            continue
        key = [getattr(event, name) for name in group if name not in ("day", "hour")]
        if "day" in group:
            key.insert(0, str(local.date()))
        if "hour" in group:
            key.insert(0, f"{local:%Y-%m-%d %H} {local.utcoffset()}")
        found.setdefault(tuple(key), Counter()).update(sums_of(event))
    return found


def told(rows: Iterable[Row], group: tuple[str, ...]) -> dict[tuple[str, ...], Counter[str]]:
    found = {}
    for row in rows:
        key = [row.group[name] for name in group if name not in ("day", "hour")]
        if "day" in group:
            key.insert(0, str(row.start.date()))
        if "hour" in group:
            key.insert(0, f"{row.start:%Y-%m-%d %H} {row.start.utcoffset()}")
        assert tuple(key) not in found
        found[tuple(key)] = Counter(row.sums)
    return found


def asked(actor: Actor, group: tuple[str, ...] = ("day", "tenant"), **fields: Any) -> Question:
    return usage_question(actor=actor, group_by=group, **{"from_day": FIRST, "to_day": LAST, **fields})


def check(actor: Actor, events: list[Event], zone: str) -> None:
    """Every grouping, page and export says what the events say."""
    for group in GROUPS:
        question = asked(actor, group, timezone=zone)
        truth = expected(events, tuple(sorted(group, key=lambda n: (n not in ("day", "hour"), DIMENSION.get(n, 0)))),
                         ZoneInfo(zone))  # fmt: skip
        by = tuple(name for name in (question.step, *question.by) if name)
        report = usage_report(question)
        assert told(report.rows, by) == truth
        total = Counter(dict.fromkeys(SUMS, 0))
        for row in truth.values():
            total.update(row)
        assert report.totals == dict(total)
        keys = [(row.start, *row.group.values()) for row in report.rows]
        assert keys == sorted(keys)
    pages, cursor = [], ""
    while True:
        page = usage_report(question, limit=3, cursor=cursor)
        pages += page.rows
        if page.next_cursor is None:
            break
        cursor = page.next_cursor
    assert pages == usage_report(question, limit=None).rows
    lines = list(csv.DictReader(io.StringIO("".join(report_csv(reporting.stream_rows(question))))))
    said = msgspec.json.decode(b"".join(report_json(reporting.stream_rows(question))))["rows"]
    assert len(lines) == len(said) == len(pages)
    for name in SUMS:
        assert sum(int(line[name]) for line in lines) == sum(row[name] for row in said) == report.totals[name]


DIMENSION = {name: n for n, name in enumerate(("tenant", "key", "pool", "model", "tier"))}


def books(rng: random.Random, checked: Callable[[list[Event]], None]) -> None:
    """Events in batches, rollups in between, and events that come late."""
    first = datetime(2026, 10, 30, 6, 0, tzinfo=UTC)
    events = random_events(rng, 90, first, first + timedelta(days=5))
    late, booked = events[60:], events[:60]
    book(*booked)
    checked(booked)
    roll_up_finished(now=NOW, limit=20)
    checked(booked)
    roll_up_finished(now=NOW)
    assert not TouchedQuarter.objects.exists()
    book(*late, *booked[:5])
    checked(events)
    roll_up_finished(now=NOW)
    checked(events)
    assert UsageQuarter.objects.count() > 60


@pytest.fixture(autouse=True)
def _much_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are put together from stretches, as where there are many requests."""
    monkeypatch.setattr(reporting, "FEW_REQUESTS", 10)


def check_books(actor: Actor, zone: str) -> None:
    books(random.Random(zone), lambda events: check(actor, events, zone))


MARKS = {"found": timedelta(days=-1), "known": timedelta(days=999)}
"""How far apart touched quarters may lie so that a report reads its marks before: never, and however far."""


def _mark(monkeypatch: pytest.MonkeyPatch, marks: str) -> None:
    monkeypatch.setattr(reporting, "_AT_MOST", MARKS[marks])


@pytest.mark.parametrize("zone", ZONES)
def test_sums_agree_however_they_are_grouped(system: Actor, zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _mark(monkeypatch, ("found", "known")[ZONES.index(zone) % 2])
    check_books(system, zone)


def _utc_days(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reporting.day_start
    monkeypatch.setattr(reporting, "day_start", lambda day, zone: right(day, ZoneInfo("UTC")))


def _change(monkeypatch: pytest.MonkeyPatch, part: str, old: str, new: str) -> None:
    for name in ("_FOUND", "_KNOWN"):
        marks = getattr(reporting, name)
        if old in getattr(marks, part):
            wrong = replace(marks, **{part: getattr(marks, part).replace(old, new)})
            monkeypatch.setattr(reporting, name, wrong)


def _late_events_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    _change(monkeypatch, "tail", "WHERE arrived_at", "WHERE false AND arrived_at")


def _touched_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    for old in ("at NOT IN (SELECT quarter FROM touched)", "at <> ALL (%(touched)s::timestamptz[])"):
        _change(monkeypatch, "not_touched", old, "true")


def _hours_of_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reporting.hour_starts
    monkeypatch.setattr(
        reporting, "hour_starts",
        lambda day, zone: [at.replace(minute=0) for at in right(day, zone)][:24],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mutant", "marks"),
    [
        (_utc_days, "known"), (_hours_of_utc, "known"),
        *((mutant, marks) for mutant in (_late_events_ignored, _touched_counted_twice) for marks in MARKS),
    ],
)  # fmt: skip
def test_a_wrong_report_is_seen(
    system: Actor, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[Any], None], marks: str
) -> None:
    _mark(monkeypatch, marks)
    mutant(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        check_books(system, "Asia/Kolkata")


def test_filters_narrow_rows_and_totals(system: Actor) -> None:
    events = random_events(random.Random(2), 80, datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 11, 2, tzinfo=UTC))
    book(*events[:40])
    roll_up_finished(now=NOW)
    book(*events[40:])
    for names in (("tenant",), ("key", "model"), ("pool", "tier", "tenant")):
        chosen = {name: getattr(events[0], name) for name in names}
        wanted = [e for e in events if all(getattr(e, n) == v for n, v in chosen.items())]
        report = usage_report(asked(system, ("day", *names), filters=chosen))
        assert report.totals["requests"] == len(wanted) == sum(r.sums["requests"] for r in report.rows)
        assert all(dict(row.group) == chosen for row in report.rows)


class TestRest:
    def test_a_report_is_told_in_pages(self, api: ApiClient) -> None:
        events = random_events(
            random.Random(4), 60, datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 11, 3, tzinfo=UTC)
        )
        book(*events)
        path = "/usage/report?from=2026-10-31&to=2026-11-03&tz=America/Los_Angeles&group_by=hour,key,model&limit=10"
        rows, cursor = [], ""
        for _ in range(100):
            page = api.send("GET", path + (f"&cursor={cursor}" if cursor else "")).json()
            assert (page["timezone"], page["requests"]) == ("America/Los_Angeles", 60)
            assert page["group_by"] == ["hour", "key", "model"]
            rows += page["rows"]
            cursor = page["next"]
            if not cursor:
                break
            assert len(page["rows"]) == 10
        assert sum(row["requests"] for row in rows) == 60
        assert {row["start"][-6:] for row in rows} <= {"-07:00", "-08:00"}
        exported = api.send("GET", path.replace("report", "export").replace("&limit=10", ""))
        assert msgspec.json.decode(b"".join(exported.streaming_content))["rows"] == rows
        assert set(rows[0]) == set(COLUMNS)

    @pytest.mark.parametrize(
        ("query", "field"),
        [
            ("tz=Mars/Base", "tz"), ("tz=..%2F..%2Fetc%2Fpasswd", "tz"), ("group_by=day,hour", "group_by"),
            ("group_by=day,day", "group_by"), ("group_by=weather", "group_by"), ("limit=0", "limit"),
            ("limit=1001", "limit"), ("limit=%C2%B2", "limit"), ("cursor=abc", "cursor"), ("cursor=%00", "cursor"),
            ("from=2023-01-01&to=2026-11-01", "to"), ("group_by=hour&from=2026-01-01&to=2026-11-01", "to"),
            ("format=xml", "format"),
        ],
    )  # fmt: skip
    def test_what_is_wrong_is_named(self, api: ApiClient, query: str, field: str) -> None:
        answer = api.send("GET", f"/usage/report?{query}")
        assert answer.status_code == 422
        assert field in answer.json()["errors"]

    def test_a_cursor_of_another_report_is_refused(self, api: ApiClient) -> None:
        book(*(usage_event(tenant=f"ten_{n}", arrived_at_us=to_us(NOW) - 5_000_000) for n in range(3)))
        span = "from=2026-11-19&to=2026-11-20"
        cursor = api.send("GET", f"/usage/report?{span}&limit=1").json()["next"]
        assert cursor
        for other in ("group_by=day", "group_by=day,tenant,key", "tz=Asia/Kolkata"):
            assert api.send("GET", f"/usage/report?{span}&{other}&cursor={cursor}").status_code == 422


def test_the_page_narrows_and_turns_pages(system: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    from controlplane.console.views import usage as view

    monkeypatch.setattr(view, "SHOWN_ROWS", 3)
    tenant = make_tenant(system, name="<b>Chat</b>")
    book(*random_events(random.Random(5), 30, datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 11, 2, tzinfo=UTC)))
    book(usage_event(tenant=tenant.id, arrived_at_us=to_us(datetime(2026, 11, 1, 9, 0, tzinfo=UTC))))
    client: Client = signed_in("viewer")
    query = "from_day=2026-10-31&to_day=2026-11-02&tz=Asia/Kolkata&group_by=hour&group_by=tenant"
    text = client.get(f"{reverse('console:usage')}?{query}").content.decode()
    assert "<b>Chat</b>" not in text
    assert "31" in text
    assert "cursor=" in text
    few = client.get(f"{reverse('console:usage')}?{query}&tenant={tenant.id}").content.decode()
    assert "&lt;b&gt;Chat&lt;/b&gt;" in few
    assert "2026-11-01 14:00 +0530" in few
    as_rest = query.replace("_day", "")
    asked = client.get(f"{reverse('console:usage')}?{as_rest}&tenant={tenant.id}").context["form"]
    assert [str(asked[name].value()) for name in ("from_day", "to_day")] == ["2026-10-31", "2026-11-02"]
    for kind in ("csv", "json"):
        answer = client.get(f"{reverse(f'console:usage_{kind}')}?{query}")
        assert b"".join(answer.streaming_content).count(b"\n" if kind == "csv" else b'"start"') > 3  # type: ignore[attr-defined]


def test_the_page_takes_few_statements_however_much_there_is(
    django_assert_max_num_queries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "FEW_REQUESTS", 10_000)
    book(*random_events(random.Random(6), 200, NOW - timedelta(days=6), NOW))
    roll_up_finished(now=NOW, limit=50)
    client = signed_in("viewer")
    # In a transaction of a test, a savepoint and its release are two more than the 12 of a page.
    with django_assert_max_num_queries(14):
        client.get(f"{reverse('console:usage')}?from_day=2026-01-01&to_day=2026-11-20&group_by=day&group_by=key")


def test_sums_that_their_column_cannot_hold_are_added_up_by_the_report(system: Actor) -> None:
    at = to_us(datetime(2026, 11, 1, 9, 0, tzinfo=UTC))
    book(*(usage_event(tenant=f"ten_{n}", arrived_at_us=at, prompt_tokens=8 * 10**18) for n in range(3)))
    book(usage_event(arrived_at_us=at + 900_000_000, prompt_tokens=1))
    for _ in range(2):
        roll_up_finished(now=NOW)
        for group in ((), ("model",), ("tenant",)):
            report = usage_report(asked(system, group))
            assert report.totals["prompt_tokens"] == 24 * 10**18 + 1
            assert sum(row.sums["prompt_tokens"] for row in report.rows) == 24 * 10**18 + 1
    assert [at for (at,) in StaleSum.objects.values_list("quarter")] == [from_us(at)]


@pytest.mark.parametrize("group", [("tenant",), ("key",), ("tenant", "key", "model"), ("key", "tier")])
def test_pages_of_tenants_and_keys_hold_every_row_once(system: Actor, group: tuple[str, ...]) -> None:
    """Whether the books know more of them than there are, or fewer."""
    tenants = [make_tenant(system) for _ in range(12)]
    rng, pool = random.Random(7), make_pool(system)
    keys = {tenant.id: [make_key(system, tenant, pool)[0].id for _ in range(3)] for tenant in tenants}
    at = to_us(datetime(2026, 11, 1, 9, 0, tzinfo=UTC))
    for number in range(60):
        tenant = rng.choice([*keys][::2])
        key = rng.choice([*keys[tenant], "", "gone", "zzz"])
        book(usage_event(tenant=rng.choice([tenant, "", "zzz"]), key=key, model=f"m{number % 3}",
                         tier=f"t{number % 2}", arrived_at_us=at + number * 400_000_000))  # fmt: skip
    roll_up_finished(now=NOW)
    question = asked(system, group)
    whole = usage_report(question, limit=None).rows
    assert sum(row.sums["requests"] for row in whole) == 60
    for limit in (1, 4, 100):
        rows, cursor = [], ""
        while True:
            page = usage_report(question, limit=limit, cursor=cursor)
            rows += page.rows
            if page.next_cursor is None:
                break
            cursor = page.next_cursor
        assert rows == whole


# --- keeping ---


def quarters() -> list[tuple[int, int]]:
    return list(UsageQuarter.objects.order_by("at", "tenant").values_list("minutes", "requests"))


def test_old_days_are_coarsened_where_days_are_made_of_whole_hours(system: Actor) -> None:
    whole = make_tenant(system, timezone="America/Los_Angeles")
    half = make_tenant(system, timezone="Asia/Kolkata")
    start = datetime(2026, 9, 1, 10, 0, tzinfo=UTC)
    for minutes in (0, 14, 15, 59, 60):
        for tenant in (whole.id, half.id, "ten_gone"):
            book(usage_event(tenant=tenant, arrived_at_us=to_us(start + timedelta(minutes=minutes))))
    roll_up_finished(now=NOW)
    fine = usage_report(asked(system, ("hour", "tenant"), from_day=start.date(), to_day=start.date()))
    assert coarsen(now=NOW) == 0
    assert len(quarters()) == 12
    later = start + timedelta(days=92)
    assert coarsen(now=later) == 0
    assert coarsen(now=later + timedelta(days=1)) >= 1
    for tenant, minutes in ((whole.id, [(60, 4), (60, 1)]), ("ten_gone", [(60, 4), (60, 1)]),
                            (half.id, [(15, 2), (15, 1), (15, 1), (15, 1)])):  # fmt: skip
        rows = UsageQuarter.objects.filter(tenant=tenant).order_by("at")
        assert list(rows.values_list("minutes", "requests")) == minutes
    assert usage_report(asked(system, ("hour", "tenant"), from_day=start.date(), to_day=start.date())) == fine
    assert coarsen(now=later + timedelta(days=1)) == 0
    # A tenant that moves later is told that its old hours are whole ones.
    update_tenant(actor=system, tenant_id=whole.id, timezone="Asia/Kolkata")
    span = {"from_day": start.date(), "to_day": start.date(), "timezone": "Asia/Kolkata"}
    assert usage_report(asked(system, filters={"tenant": whole.id}, **span)).is_coarse
    assert not usage_report(asked(system, filters={"tenant": half.id}, **span)).is_coarse
    assert RolledUp.objects.get(what="coarsened").at > start


def test_an_event_reopens_the_whole_hour_where_only_an_hour_was_kept(system: Actor) -> None:
    """As after an upgrade from rollups by hour."""
    hour = datetime(2026, 11, 2, 8, 0, tzinfo=UTC)
    events = [usage_event(arrived_at_us=to_us(hour + n * QUARTER)) for n in range(4)]
    book(*events[:3])
    roll_up_finished(now=NOW)
    UsageQuarter.objects.filter(at__gt=hour).delete()
    UsageQuarter.objects.update(minutes=60, requests=3)
    span = {"from_day": hour.date(), "to_day": hour.date()}
    assert usage_report(asked(system, **span)).totals["requests"] == 3
    book(events[3])
    for n in range(5):
        assert usage_report(asked(system, **span)).totals["requests"] == 4, n
        roll_up_finished(now=NOW, limit=1)
    assert quarters() == [(15, 1)] * 4


def partitions(parent: str) -> set[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = %s::regclass", [parent])
        return {name for (name,) in cursor.fetchall()}


def test_events_are_kept_90_days_and_their_sums_for_25_months(system: Actor) -> None:
    at = datetime(2026, 8, 25, 12, 0, tzinfo=UTC)
    book(usage_event(arrived_at_us=to_us(at)))
    later = at + timedelta(days=92)
    # Not before the sums hold it, whatever kept the rollup from being made.
    drop_old_days(now=later)
    assert partition_name(at.date()) in partitions("usage_event")
    roll_up_finished(now=NOW)
    drop_old_days(now=later - timedelta(days=1))
    assert UsageEvent.objects.exists()
    assert partition_name(at.date()) in drop_old_days(now=later)
    assert not UsageEvent.objects.exists()
    span = {"from_day": at.date(), "to_day": at.date()}
    assert usage_report(asked(system, **span)).totals["requests"] == 1
    ensure_days([date(2024, 7, 31), date(2024, 8, 1)], QUARTERS)
    assert "usage_quarter_202407" in drop_old_days(now=datetime(2026, 9, 30, tzinfo=UTC))
    assert {"usage_quarter_202408", "usage_quarter_202608"} <= partitions("usage_quarter")


def test_an_event_that_comes_after_its_day_is_gone_is_kept_beside(system: Actor) -> None:
    at = to_us(NOW - timedelta(days=90))
    assert book(usage_event(arrived_at_us=at - 1), usage_event(arrived_at_us=at)).quarantined == 1
    assert "90 days" in QuarantinedEvent.objects.get().reason


def test_questions_are_checked(system: Actor) -> None:
    with pytest.raises(Invalid) as refused:
        usage_question(actor=system, from_day=FIRST, to_day=LAST, timezone="x", group_by=["day", "hour"])
    assert set(refused.value.fields) == {"tz", "group_by"}


def test_steps_follow_each_other(system: Actor) -> None:
    for zone, step in itertools.product(ZONES, ("day", "hour")):
        starts = asked(system, (step,), timezone=zone).starts
        assert all(a < b for a, b in itertools.pairwise(starts))


@pytest.mark.parametrize("path", ["/usage/report", "/usage/export"])
def test_people_of_a_tenant_are_told_of_their_own_only(system: Actor, api: ApiClient, path: str) -> None:
    own, other = make_tenant(system), make_tenant(system)
    book(*(usage_event(tenant=t.id, arrived_at_us=to_us(NOW) - 5_000_000) for t in (own, own, other)))
    teammate = api_client(make_user(role="tenant_member", tenant=own.id), "tenant.read")
    span = "?from=2026-11-20&to=2026-11-20"

    def rows(client: ApiClient, query: str = "") -> list[tuple[str, int]]:
        answer = client.send("GET", path + span + query)
        body = b"".join(answer.streaming_content) if answer.streaming else answer.content
        return [(row["tenant"], row["requests"]) for row in msgspec.json.decode(body)["rows"]]

    assert rows(api) == sorted([(own.id, 2), (other.id, 1)])
    assert rows(teammate) == rows(teammate, f"&tenant={own.id}") == [(own.id, 2)]
    assert rows(teammate, "&group_by=day") == [("", 2)]
    assert teammate.send("GET", f"{path}{span}&tenant={other.id}").status_code == 404
