"""The books: every event once, whatever is sent how often; report, CSV and events agree."""

from __future__ import annotations

import csv
import io
import random
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from typing import Any

import msgspec
import pytest
from django.db import connection
from django.test import Client

from controlplane.common.actor import Actor
from controlplane.common.clock import from_us, to_us, utc_now
from controlplane.fleet.models import Router
from controlplane.keys.models import ApiKey
from controlplane.tenants.models import Tenant
from controlplane.usage.ingest import decode_batch, ingest
from controlplane.usage.models import (
    QuarantinedEvent,
    TouchedHour,
    TouchedQuarter,
    UsageEvent,
    UsageExplanation,
    UsageQuarter,
)
from controlplane.usage.partitions import ensure_ahead, ensure_days, partition_name
from controlplane.usage.report import usage_question, usage_report
from controlplane.usage.rollup import roll_up_finished, roll_up_quarter
from controlplane.usage.totals import fold
from router_ext.wire import controlplane as wire
from tests.support.control_plane import (
    ApiClient,
    book,
    make_key,
    make_pool,
    make_tenant,
    undated,
    usage_body,
    usage_event,
)

RouterAndHeaders = tuple[Router, dict[str, str]]
DAY_US = 86_400_000_000


def partitions() -> set[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'usage_event'::regclass")
        return {name for (name,) in cursor.fetchall()}


@pytest.mark.django_db
class TestIngestion:
    def test_every_field_is_booked_as_sent(self) -> None:
        event = usage_event(
            preemptions=1, segments=3, recomputed_tokens=4, resumed_prefill_tokens=5, kv_token_seconds=1.5,
            max_new_tokens=99, predicted_tokens=30, predictor="d", resume_class="exact", backends=["b1", "b2"],
            error_code="e", token_source="backend",
        )  # fmt: skip
        assert undated(book(event)) == wire.UsageAck(accepted=1, known=0)
        row = UsageEvent.objects.get()
        assert row.ended_at == from_us(event.ended_at_us)
        assert row.first_dispatch_at == from_us(event.first_dispatch_us or 0)
        assert row.first_token_at == from_us(event.first_token_us or 0)
        assert to_us(row.arrived_at) == event.arrived_at_us
        times = {"arrived_at_us", "ended_at_us", "first_dispatch_us", "first_token_us"}
        # Kept beside the row, the explanation for those that waited.
        times |= {"explanation", "reasons", "timeline", "prediction"}
        for name, value in msgspec.to_builtins(event).items():
            if name not in times:
                assert getattr(row, name) == value, name

    def test_an_event_sent_again_is_known(self) -> None:
        events = [usage_event() for _ in range(5)]
        assert undated(book(*events[:3])) == wire.UsageAck(accepted=3, known=0)
        assert undated(book(*events)) == wire.UsageAck(accepted=2, known=3)
        assert undated(book(*events, *events)) == wire.UsageAck(accepted=0, known=10)
        assert UsageEvent.objects.count() == 5

    def test_a_day_gets_its_partition_when_its_first_event_comes(self) -> None:
        before = partitions()
        event = usage_event(arrived_at_us=to_us(utc_now() - timedelta(days=80)))
        day = from_us(event.arrived_at_us).date()
        assert partition_name(day) not in before
        book(event)
        assert partition_name(day) in partitions()

    def test_days_ahead_are_made_by_schedule(self) -> None:
        ensure_ahead()
        today = utc_now().date()
        assert {partition_name(today + timedelta(days=n)) for n in range(4)} <= partitions()

    def test_both_sides_of_midnight_are_booked_in_one_batch(self) -> None:
        midnight = to_us(datetime.combine(utc_now().date() - timedelta(days=3), datetime.min.time(), UTC))
        book(usage_event(arrived_at_us=midnight - 1), usage_event(arrived_at_us=midnight))
        names = {partition_name(from_us(midnight + d).date()) for d in (-1, 0)}
        assert len(names) == 2
        assert names <= partitions()
        assert UsageEvent.objects.count() == 2

    @pytest.mark.parametrize(
        ("fields", "word"),
        [
            ({"arrived_at_us": to_us(utc_now()) - 91 * DAY_US}, "older than 90 days"),
            # Taken when tests are collected: the margin outlasts the whole run.
            ({"arrived_at_us": to_us(utc_now()) + 2 * DAY_US}, "future"),
            ({"ended_at_us": 10**18}, "calendar"),
            ({"arrived_at_us": -(10**30)}, "calendar"),
            ({"prompt_tokens": -1}, "prompt_tokens"),
            ({"output_tokens": 2**63}, "output_tokens"),
            ({"segments": 2**31}, "segments"),
            ({"model": "a\0b"}, "NUL"),
            ({"backends": ["\0"]}, "NUL"),
            ({"event": ""}, "without an id"),
        ],
    )
    def test_what_cannot_be_booked_is_kept_beside_and_spoils_nothing(self, fields: dict[str, Any], word: str) -> None:
        bad = usage_event(**fields)
        ack = book(usage_event(), bad, usage_event())
        assert undated(ack) == wire.UsageAck(accepted=2, known=0, quarantined=1)
        row = QuarantinedEvent.objects.get()
        assert word in row.reason
        assert msgspec.json.decode(bytes(row.body), type=wire.UsageEvent) == bad
        assert book(bad).quarantined == 1
        assert QuarantinedEvent.objects.count() == 1

    def test_an_unreadable_event_is_quarantined_by_its_bytes(self) -> None:
        good = msgspec.json.encode(usage_event())
        body = b'{"router":"rtr_1","events":[{"event":7},' + good + b"]}"
        assert undated(ingest(decode_batch(body))) == wire.UsageAck(accepted=1, known=0, quarantined=1)
        assert bytes(QuarantinedEvent.objects.get().body) == b'{"event":7}'

    def test_just_inside_the_limits_is_booked(self) -> None:
        now = to_us(utc_now())
        early, late = now - 90 * DAY_US + 60_000_000, now + DAY_US - 60_000_000
        ack = book(
            usage_event(arrived_at_us=early, ended_at_us=early, first_dispatch_us=None, first_token_us=None),
            usage_event(arrived_at_us=late, ended_at_us=late, first_dispatch_us=None, first_token_us=None),
        )
        assert undated(ack) == wire.UsageAck(accepted=2, known=0)

    def test_explanations_are_kept_for_what_waited_failed_or_was_preempted(self) -> None:
        at = to_us(utc_now()) - 60_000_000
        kept = [
            usage_event(arrived_at_us=at, first_dispatch_us=at + 1_000_001, explanation=["waited"]),
            usage_event(arrived_at_us=at, outcome="failed", explanation=["failed"]),
            usage_event(arrived_at_us=at, preemptions=1, explanation=["preempted"]),
        ]
        book(*kept, usage_event(arrived_at_us=at, explanation=["quick"]))
        book(*kept)
        assert dict(UsageExplanation.objects.values_list("event", "lines")) == {e.event: e.explanation for e in kept}

    def test_a_key_shows_when_it_was_last_used(self, system: Actor) -> None:
        key, _ = make_key(system, make_tenant(system), make_pool(system))
        at = to_us(utc_now()) - 600_000_000
        book(usage_event(key=key.id, arrived_at_us=at), usage_event(key=key.id, arrived_at_us=at + 30_000_000))
        fold()
        assert ApiKey.objects.get().last_used_at == from_us(at + 30_000_000)
        book(usage_event(key=key.id, arrived_at_us=at + 60_000_000))
        fold()
        assert ApiKey.objects.get().last_used_at == from_us(at + 30_000_000)
        book(usage_event(key=key.id, arrived_at_us=at + 120_000_000), usage_event(key=key.id, arrived_at_us=at))
        fold()
        assert ApiKey.objects.get().last_used_at == from_us(at + 120_000_000)


@pytest.mark.django_db
class TestEndpoint:
    def post(self, headers: dict[str, str], body: bytes) -> Any:
        return Client().post(wire.USAGE_PATH, body, content_type="application/json", headers=headers)

    def test_a_batch_is_acknowledged_once_it_is_booked(self, router: RouterAndHeaders) -> None:
        answer = self.post(router[1], usage_body(usage_event(), usage_event()))
        assert answer.status_code == 200
        assert undated(msgspec.json.decode(answer.content, type=wire.UsageAck)) == wire.UsageAck(accepted=2, known=0)

    def test_a_batch_of_the_next_version_is_booked(self, router: RouterAndHeaders) -> None:
        batch = msgspec.json.decode(usage_body(usage_event()))
        batch["events"][0]["new_here"] = {"of": ["the", "next", "version"]}
        answer = self.post(router[1], msgspec.json.encode({**batch, "more": 1}))
        assert undated(msgspec.json.decode(answer.content, type=wire.UsageAck)) == wire.UsageAck(accepted=1, known=0)

    def test_an_empty_batch_is_fine(self, router: RouterAndHeaders) -> None:
        answer = self.post(router[1], usage_body())
        assert undated(msgspec.json.decode(answer.content, type=wire.UsageAck)) == wire.UsageAck(accepted=0, known=0)

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"router":"r"}', b"\xff"])
    def test_a_malformed_batch_is_400(self, router: RouterAndHeaders, body: bytes) -> None:
        answer = self.post(router[1], body)
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")

    def test_nobody_books_without_a_live_router_token(self, router: RouterAndHeaders, api: ApiClient) -> None:
        operators_token = api.defaults["HTTP_AUTHORIZATION"]
        for headers in ({}, {"authorization": "Bearer nonsense"}, {"authorization": operators_token}):
            assert self.post(headers, usage_body(usage_event())).status_code == 401
        assert api.send("POST", f"/routers/{router[0].id}/revoke").status_code == 200
        assert self.post(router[1], usage_body(usage_event())).status_code == 401
        assert not UsageEvent.objects.exists()

    def test_only_post_books(self, router: RouterAndHeaders) -> None:
        answer = Client().get(wire.USAGE_PATH, headers=router[1])
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def random_events(rng: random.Random, n: int, tenants: list[str], days: int = 3) -> list[wire.UsageEvent]:
    """Events over the last days, some without a first token."""
    now = to_us(utc_now()) - 5_000_000
    events = []
    for _ in range(n):
        at = now - rng.randrange(days * DAY_US)
        first = at + round(rng.lognormvariate(12.5, 1.2)) if rng.random() < 0.9 else None
        events.append(
            usage_event(
                arrived_at_us=at,
                ended_at_us=(first or at) + 1_000,
                first_token_us=first,
                tenant=rng.choice(tenants),
                outcome=rng.choice(["completed", "cancelled", "failed"]),
                prompt_tokens=rng.randrange(1_000),
                output_tokens=rng.randrange(1_000) if first else 0,
                tier=rng.choice(["a", "b"]),
                key=rng.choice(["k1", "k2"]),
            )
        )
    return events


def by_tenant_and_day(events: list[wire.UsageEvent]) -> dict[tuple[date, str], dict[str, Any]]:
    groups: dict[tuple[date, str], list[wire.UsageEvent]] = defaultdict(list)
    for event in events:
        groups[from_us(event.arrived_at_us).date(), event.tenant].append(event)
    return {
        key: {
            "requests": len(group),
            "prompt_tokens": sum(e.prompt_tokens for e in group),
            "output_tokens": sum(e.output_tokens for e in group),
            "ttft_us": sorted(e.first_token_us - e.arrived_at_us for e in group if e.first_token_us is not None),
        }
        for key, group in groups.items()
    }


def check_report(actor: Actor, events: list[wire.UsageEvent]) -> None:
    """The report equals the events: sums exactly, percentiles within two percent."""
    today = utc_now().date()
    question = usage_question(actor=actor, from_day=today - timedelta(days=10), to_day=today + timedelta(days=1))
    report = usage_report(question)
    expected = by_tenant_and_day(events)
    assert [(r.start.date(), r.group["tenant"]) for r in report.rows] == sorted(expected)
    for row in report.rows:
        truth = expected[row.start.date(), row.group["tenant"]]
        for name in ("requests", "prompt_tokens", "output_tokens"):
            assert row.sums[name] == truth[name]
        times = truth["ttft_us"]
        for shown, level in ((row.ttft_p50_ms, 50), (row.ttft_p95_ms, 95)):
            if not times:
                assert shown is None
                continue
            true = times[max(1, -(-level * len(times) // 100)) - 1]
            assert shown is not None
            assert abs(shown * 1_000 - true) <= 0.02 * true + 1
    assert report.totals["requests"] == len(events)
    assert report.totals["output_tokens"] == sum(e.output_tokens for e in events)


@pytest.mark.django_db
class TestReport:
    @pytest.mark.parametrize("seed", [1, 2, 3])
    def test_it_equals_the_events_before_amid_and_after_rollups(self, system: Actor, seed: int) -> None:
        rng = random.Random(seed)
        events = random_events(rng, 400, ["ten_a", "ten_b", "ten_c"])
        booked: list[wire.UsageEvent] = []
        while events:
            part = [events.pop() for _ in range(min(len(events), rng.randrange(1, 120)))]
            booked += part
            book(*part, *rng.sample(booked, min(5, len(booked))))
            check_report(system, booked)
            if rng.random() < 0.6:
                roll_up_finished(limit=rng.randrange(1, 60))
                check_report(system, booked)
        roll_up_finished()
        check_report(system, booked)
        assert not TouchedHour.objects.filter(hour__lt=utc_now() - timedelta(hours=2)).exists()
        assert not TouchedQuarter.objects.filter(quarter__lt=utc_now() - timedelta(minutes=18)).exists()
        assert UsageQuarter.objects.exists()

    def test_a_late_event_reopens_its_quarter(self, system: Actor) -> None:
        at = to_us(utc_now()) - 5 * 3_600_000_000
        first, late = usage_event(arrived_at_us=at), usage_event(arrived_at_us=at + 1)
        book(first)
        roll_up_finished()
        assert not TouchedQuarter.objects.exists()
        book(late)
        check_report(system, [first, late])
        assert roll_up_finished() == 1
        check_report(system, [first, late])
        assert UsageQuarter.objects.get().requests == 2

    def test_an_event_sent_again_does_not_reopen_its_quarter(self) -> None:
        event = usage_event(arrived_at_us=to_us(utc_now()) - 5 * 3_600_000_000)
        book(event)
        roll_up_finished()
        book(event)
        assert not TouchedQuarter.objects.exists()

    def test_a_running_quarter_is_not_rolled_up(self) -> None:
        book(usage_event(arrived_at_us=to_us(utc_now()) - 1_000_000))
        assert roll_up_finished() == 0

    def test_a_rollup_computed_again_is_the_same(self) -> None:
        rng = random.Random(7)
        book(*random_events(rng, 100, ["ten_a", "ten_b"]))
        roll_up_finished()
        before = list(UsageQuarter.objects.order_by("at", "tenant", "key", "tier").values())
        for at in {row["at"] for row in before}:
            roll_up_quarter(at)
        assert list(UsageQuarter.objects.order_by("at", "tenant", "key", "tier").values()) == before

    def test_days_are_utc_and_both_ends_are_included(self, system: Actor) -> None:
        midnight = datetime.combine(utc_now().date() - timedelta(days=2), datetime.min.time(), UTC)
        for offset in (-1, 0, DAY_US - 1, DAY_US):
            book(usage_event(arrived_at_us=to_us(midnight) + offset))
        day = midnight.date()
        (row,) = usage_report(usage_question(actor=system, from_day=day, to_day=day)).rows
        assert (row.start.date(), row.sums["requests"]) == (day, 2)

    def test_one_tenant_may_be_asked_for(self, system: Actor) -> None:
        book(usage_event(tenant="ten_a"), usage_event(tenant="ten_b"))
        today = utc_now().date()
        question = usage_question(
            actor=system, from_day=today - timedelta(days=1), to_day=today, filters={"tenant": "ten_b"}
        )
        report = usage_report(question)
        assert [(r.group["tenant"], r.sums["requests"]) for r in report.rows] == [("ten_b", 1)]
        assert report.totals["requests"] == 1

    def test_page_and_csv_read_the_same_rows(self, api: ApiClient, system: Actor) -> None:
        tenant = make_tenant(system, name="Chat")
        Tenant.objects.filter(pk=tenant.id).update(name='=HYPERLINK("http://evil","x")')
        book(*random_events(random.Random(3), 60, [tenant.id, "+ten", "ten_b"]))
        data = api.send("GET", "/usage/report").json()
        answer = api.send("GET", "/usage/report?format=csv")
        assert answer.headers["content-type"] == "text/csv; charset=utf-8"
        assert "attachment" in answer.headers["content-disposition"]
        text = b"".join(answer.streaming_content).decode()
        by_header = api.send("GET", "/usage/report", accept="text/csv")
        assert b"".join(by_header.streaming_content).decode() == text
        lines = list(csv.reader(io.StringIO(text)))
        assert lines[0] == [
            "day", "tenant", "tenant_name", "requests", "prompt_tokens", "output_tokens", "ttft_p50_ms", "ttft_p95_ms",
            "start", "key", "key_name", "pool", "pool_name", "model", "tier", "completed", "recomputed_tokens",
            "resumed_tokens", "kv_token_ms", "currency", "cost", "unpriced_requests",
        ]  # fmt: skip
        cells = [cell for line in lines[1:] for cell in line]
        assert not any(cell.startswith(("=", "+", "-", "@")) for cell in cells)
        shown = [
            [
                r["day"],
                r["tenant"].replace("+ten", "'+ten"),
                r["tenant_name"].replace("=HYPER", "'=HYPER"),
                *(str(r[n]) for n in ("requests", "prompt_tokens", "output_tokens")),
                *("" if r[n] is None else str(r[n]) for n in ("ttft_p50_ms", "ttft_p95_ms")),
            ]
            for r in data["rows"]
        ]
        assert [line[:8] for line in lines[1:]] == shown
        assert data["requests"] == 60 == sum(int(line[3]) for line in lines[1:])

    def test_the_number_of_statements_is_bounded_however_long_the_span(
        self, system: Actor, django_assert_num_queries: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        book(*random_events(random.Random(5), 200, [f"ten_{n}" for n in range(20)]))
        roll_up_finished(limit=30)
        today = utc_now().date()
        question = usage_question(actor=system, from_day=today - timedelta(days=30), to_day=today)
        with django_assert_num_queries(5):  # a savepoint, prices and marks, the totals, and all rows at once
            usage_report(question, limit=None)
        with django_assert_num_queries(4 + 2):  # the rows of a page, and their quantiles
            usage_report(question)
        # Where there is much to read: the first day, the 30 others, and the quantiles of the page.
        monkeypatch.setattr("controlplane.usage.report.FEW_REQUESTS", 0)
        with django_assert_num_queries(4 + 3):
            usage_report(question)

    def test_quarantine_is_shown(self, api: ApiClient) -> None:
        bad = usage_event(arrived_at_us=1)
        book(bad)
        (row,) = api.send("GET", "/usage/quarantine").json()["results"]
        assert (row["event"], row["tenant"]) == (bad.event, bad.tenant)
        assert "older than" in row["reason"]
        assert msgspec.json.decode(row["body"].encode(), type=wire.UsageEvent) == bad


@pytest.mark.usefixtures("committed_db")
class TestSideBySide:
    def test_overlapping_batches_in_any_order_book_each_event_once(self, system: Actor) -> None:
        """Deadlocks would be retried; sums and rollups stay exact while both run."""
        rng = random.Random(11)
        events = random_events(rng, 600, ["ten_a", "ten_b"], days=2)
        batches = [rng.sample(events, 300) for _ in range(12)] + [events]

        def run(task: Any) -> Any:
            try:
                return task()
            finally:
                connection.close()

        with ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(run, lambda b=b: book(*b)) for b in batches]
            futures += [pool.submit(run, roll_up_finished) for _ in range(4)]
            acks = [f.result(timeout=120) for f in futures][: len(batches)]
        assert sum(a.accepted for a in acks) == len(events)
        assert all(a.accepted + a.known == len(b) for a, b in zip(acks, batches, strict=True))
        assert UsageEvent.objects.count() == len(events)
        check_report(system, events)
        roll_up_finished()
        check_report(system, events)

    def test_the_same_day_is_made_once_by_many(self) -> None:
        day = utc_now().date() - timedelta(days=50)

        def make() -> None:
            try:
                ensure_days([day])
            finally:
                connection.close()

        with ThreadPoolExecutor(6) as pool:
            for future in [pool.submit(make) for _ in range(6)]:
                future.result(timeout=60)
        assert partition_name(day) in partitions()

    def test_a_report_never_counts_an_hour_twice_or_not_at_all_while_it_is_rolled_up(self, system: Actor) -> None:
        events = random_events(random.Random(13), 300, ["ten_a"], days=2)
        book(*events)
        today = utc_now().date()

        def read() -> int:
            try:
                question = usage_question(actor=system, from_day=today - timedelta(days=3), to_day=today)
                return usage_report(question).totals["requests"]
            finally:
                connection.close()

        def roll() -> None:
            try:
                roll_up_finished()
            finally:
                connection.close()

        with ThreadPoolExecutor(3) as pool:
            rolling = pool.submit(roll)
            counts = []
            while not rolling.done() or len(counts) < 5:
                counts.append(pool.submit(read).result(timeout=60))
            rolling.result(timeout=60)
        assert set(counts) == {300}
