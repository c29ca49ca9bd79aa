"""What routers and people learn of quotas: every booked token once, in the day and month it arrived."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import msgspec
import pytest
from django.db import DatabaseError, connection, connections, transaction
from django.test import Client

from controlplane.common.actor import Actor
from controlplane.common.clock import from_us, to_us, utc_now
from controlplane.fleet.models import Router, RouterStatus
from controlplane.fleet.routers import create_router, revoke_router, take_heartbeat
from controlplane.keys.actions import revoke_key, update_key
from controlplane.tenants.actions import update_tenant
from controlplane.usage import totals as module
from controlplane.usage.models import UsageAdded, UsageTotal
from controlplane.usage.tasks import forget_old_samples
from controlplane.usage.totals import fold, oldest_month, totals, used
from router_ext.wire.controlplane import TOTALS_PATH, Heartbeat, TotalRecord, Totals, UsageAck, UsageEvent
from tests.support.control_plane import (
    ApiClient,
    book,
    make_key,
    make_pool,
    make_tenant,
    usage_event,
    wait_for,
)

DAY = timedelta(days=1)
QUOTA = {"tokens_per_month": 1_000}


def tokens(event: UsageEvent) -> int:
    return event.prompt_tokens + event.output_tokens


def truth(answer: Totals, scope: str, events: list[UsageEvent]) -> TotalRecord:
    """What the answer must say of a tenant or key that these events are all of."""
    mine = [(from_us(e.arrived_at_us).date().isoformat(), tokens(e)) for e in events if scope in (e.tenant, e.key)]
    return TotalRecord(
        scope=scope,
        day_tokens=sum(n for day, n in mine if day == answer.day),
        month_tokens=sum(n for day, n in mine if day[:7] == answer.day[:7]),
    )


def records(answer: Totals) -> dict[str, TotalRecord]:
    return {record.scope: record for record in answer.totals}


def at(instant: datetime, **fields: Any) -> UsageEvent:
    us = to_us(instant)
    return usage_event(arrived_at_us=us, ended_at_us=us, first_dispatch_us=None, first_token_us=None, **fields)


@pytest.mark.django_db
class TestCounting:
    @pytest.mark.parametrize("is_folded", [False, True])
    def test_those_with_a_quota_are_told_of_by_day_and_month(self, system: Actor, is_folded: bool) -> None:
        pool = make_pool(system)
        tenant, free = make_tenant(system, limits={"soft_tokens_per_day": 5}), make_tenant(system)
        key, _ = make_key(system, free, pool, limits=QUOTA)
        unlimited, _ = make_key(system, tenant, pool, limits={"concurrent": 1})
        now = utc_now()
        days = [now - timedelta(minutes=1), now - DAY, now - 2 * DAY, now - 31 * DAY, now + timedelta(hours=23)]
        events = [
            at(day, tenant=owner.id, key=used.id, prompt_tokens=n, output_tokens=10 * n)
            for n, day in enumerate(days, start=1)
            for owner, used in ((tenant, unlimited), (free, key))
        ]
        book(*events[:5])
        if is_folded:
            fold()
        book(*events[5:])
        answer = totals()
        assert answer.is_whole
        assert records(answer) == {scope: truth(answer, scope, events) for scope in (tenant.id, key.id)}
        today = date.fromisoformat(answer.day)
        told = truth(answer, free.id, events)
        assert used(free.id, today) == (told.day_tokens, told.month_tokens)
        assert used(free.id, today - DAY)[0] == sum(
            tokens(e) for e in events if e.tenant == free.id and from_us(e.arrived_at_us).date() == today - DAY
        )
        assert UsageAdded.objects.count() == 0  # an answer folds what came since the last

    def test_what_is_sent_again_or_cannot_be_booked_counts_once_or_not(self, system: Actor) -> None:
        tenant = make_tenant(system, limits=QUOTA)
        good = usage_event(tenant=tenant.id)
        bad = usage_event(tenant=tenant.id, segments=2**31)
        for _ in range(2):
            book(good, good, bad)
        answer = totals()
        assert records(answer) == {tenant.id: truth(answer, tenant.id, [good])}

    def test_a_quota_set_later_finds_what_was_used_before(self, system: Actor) -> None:
        tenant = make_tenant(system)
        key, _ = make_key(system, tenant, make_pool(system))
        event = usage_event(tenant=tenant.id, key=key.id)
        book(event)
        with connection.cursor() as cursor:  # long ago, so that only the edit can make it news
            fold()
            cursor.execute("UPDATE usage_total SET changed_at_us = 1")
            cursor.execute("UPDATE tenants_tenant SET updated_at = now() - interval '1 hour'")
            cursor.execute("UPDATE keys_apikey SET updated_at = now() - interval '1 hour'")
        before = totals()
        assert before.totals == []
        update_tenant(actor=system, tenant_id=tenant.id, limits=QUOTA)
        after = totals(since_us=before.as_of_us)
        assert (after.is_whole, records(after)) == (False, {tenant.id: truth(after, tenant.id, [event])})
        update_key(actor=system, key_id=key.id, limits={"soft_tokens_per_day": 3})
        assert set(records(totals(since_us=after.as_of_us))) == {tenant.id, key.id}
        revoke_key(actor=system, key_id=key.id)
        assert set(records(totals())) == {tenant.id}

    def test_only_what_changed_since_is_told(self, system: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "CLOCK_STEP_US", 0)
        monkeypatch.setattr(module, "EDIT_MARGIN", timedelta(0))
        one, other = make_tenant(system, limits=QUOTA), make_tenant(system, limits=QUOTA)
        events = [usage_event(tenant=tenant.id) for tenant in (one, other)]
        book(*events)
        first = totals()
        assert set(records(first)) == {one.id, other.id}
        assert totals(since_us=first.as_of_us).totals == []
        events.append(usage_event(tenant=one.id))
        book(events[-1])
        second = totals(since_us=first.as_of_us)
        assert (second.is_whole, records(second)) == (False, {one.id: truth(second, one.id, events)})

    def test_an_answer_is_whole_where_changes_would_not_do(self, system: Actor) -> None:
        now = totals().as_of_us
        midnight = to_us(datetime.combine(from_us(now).date(), time(), UTC))
        assert totals(since_us=midnight - 1).is_whole
        assert totals(since_us=now - 2 * module.OLDEST_SINCE_US).is_whole
        assert totals(since_us=now + 3_600_000_000).is_whole
        assert not totals(since_us=max(midnight, now - 60_000_000)).is_whole

    def test_no_event_keeps_others_from_being_counted(self, system: Actor) -> None:
        tenant = make_tenant(system, limits=QUOTA)
        huge = {"tenant": tenant.id, "prompt_tokens": 2**63 - 1, "output_tokens": 2**63 - 1}
        for _ in range(3):
            book(*(usage_event(**huge) for _ in range(3)), usage_event(tenant=tenant.id, key="k" * 9_000))
            book(usage_event(tenant=tenant.id, key=""))
            assert records(totals())[tenant.id].month_tokens == module.MAX_TOKENS
        assert not UsageTotal.objects.filter(scope__in=["", "k" * 9_000]).exists()

    def test_old_months_are_forgotten_and_not_begun_again(self) -> None:
        now = utc_now()
        oldest = oldest_month()
        assert oldest == (now.date().replace(day=1) - DAY).replace(day=1)
        first = datetime.combine(oldest, time(), UTC)
        book(at(first), at(first - timedelta(microseconds=1)), at(now))
        fold()
        UsageTotal.objects.bulk_create(
            UsageTotal(span=span, scope="ten_a", tokens=1, changed_at_us=1)
            for span in (f"{oldest - DAY:%Y-%m}", f"{oldest - DAY:%Y-%m-%d}")
        )
        forget_old_samples()
        spans = {f"{day:%Y-%m}" for day in (oldest, now)} | {f"{day:%Y-%m-%d}" for day in (oldest, now)}
        assert set(UsageTotal.objects.values_list("span", flat=True)) == spans

    def test_routers_that_are_heard_of_are_counted(self, system: Actor) -> None:
        assert totals().live_routers == 1
        row, _ = create_router(actor=system, name="several")

        def beat(name: str, **fields: Any) -> None:
            said = Heartbeat(router=name, version="0", address="", applied_revision=1, applied_at_us=0, **fields)
            take_heartbeat(router=row, heartbeat=said)

        for name in ("a", "b", "c", "d"):
            beat(name)
        assert totals().live_routers == 4
        beat("c", is_draining=True)
        RouterStatus.objects.filter(pk="d").update(seen_at=utc_now() - timedelta(seconds=11))
        assert totals().live_routers == 2
        # The row follows the heartbeats closely enough for that.
        RouterStatus.objects.filter(pk="a").update(seen_at=utc_now() - timedelta(seconds=6))
        beat("a")
        assert RouterStatus.objects.get(pk="a").seen_at > utc_now() - timedelta(seconds=5)
        revoke_router(actor=system, router_id=row.id)
        assert totals().live_routers == 1


@pytest.mark.django_db
class TestEndpoints:
    def test_a_router_asks_by_its_token(self, router: tuple[Router, dict[str, str]], system: Actor) -> None:
        tenant = make_tenant(system, limits=QUOTA)
        ack = book(usage_event(tenant=tenant.id))
        answer = Client().get(TOTALS_PATH, headers=router[1])
        told = msgspec.json.decode(answer.content, type=Totals)
        assert (answer.status_code, set(records(told))) == (200, {tenant.id})
        assert told.as_of_us >= ack.booked_at_us > 0
        later = Client().get(TOTALS_PATH, {"since_us": told.as_of_us}, headers=router[1])
        assert msgspec.json.decode(later.content, type=Totals).as_of_us > told.as_of_us
        assert Client().get(TOTALS_PATH).status_code == 401
        assert Client().post(TOTALS_PATH, headers=router[1]).status_code == 405

    @pytest.mark.parametrize("since", ["-1", "x", "1.5", "", "9" * 19, "²"])
    def test_an_instant_that_is_none_is_refused(self, router: tuple[Router, dict[str, str]], since: str) -> None:
        assert Client().get(TOTALS_PATH, {"since_us": since}, headers=router[1]).status_code == 422

    def test_use_of_quotas_by_rest(self, api: ApiClient, system: Actor) -> None:
        tenant = make_tenant(system, limits={"soft_tokens_per_day": 25, "tokens_per_day": 60, "tokens_per_month": 30})
        key, _ = make_key(system, tenant, make_pool(system))
        now = utc_now()
        book(at(now, tenant=tenant.id, key=key.id))
        shown = api.send("GET", f"/tenants/{tenant.id}/quota").json()
        tomorrow = datetime.combine(now.date() + DAY, time(), UTC)
        assert shown["day"] == {
            "used_tokens": 30, "soft_tokens": 25, "hard_tokens": 60, "state": "soft",
            "resets_at": f"{tomorrow:%Y-%m-%dT%H:%M:%SZ}",
        }  # fmt: skip
        assert (shown["month"]["used_tokens"], shown["month"]["state"]) == (30, "used_up")
        next_month = (now.date().replace(day=28) + timedelta(days=4)).replace(day=1)
        assert shown["month"]["resets_at"] == f"{next_month}T00:00:00Z"
        of_key = api.send("GET", f"/keys/{key.id}/quota").json()["day"]
        assert (of_key["used_tokens"], of_key["hard_tokens"], of_key["state"]) == (30, None, "free")
        for path in ("/tenants/ten_none/quota", "/keys/key_none/quota"):
            assert api.send("GET", path).status_code == 404


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """The same, giving its connection back."""

    def run() -> Any:
        try:
            return work()
        finally:
            connections.close_all()

    return run


def n_waiting() -> int:
    """Sessions that wait for an advisory lock of this database: other tests have theirs on the same server."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = pg_locks.database"
            " WHERE locktype = 'advisory' AND NOT granted AND datname = current_database()"
        )
        return int((cursor.fetchone() or (0,))[0])


@pytest.mark.parametrize("is_locked", [True, False], ids=["as it is", "mutant: batches take no lock"])
def test_an_answer_waits_for_a_batch_that_has_its_instant_and_no_commit(
    committed_db: None, system: Actor, monkeypatch: pytest.MonkeyPatch, is_locked: bool
) -> None:
    if not is_locked:
        monkeypatch.setattr(module, "_SHARE_SQL", f"SELECT {module._CLOCK} WHERE %s > 0")
    tenant = make_tenant(system, limits=QUOTA)
    is_booked, may_commit = threading.Event(), threading.Event()

    def commit_late() -> UsageAck:
        with transaction.atomic():
            ack = book(usage_event(tenant=tenant.id))
            is_booked.set()
            assert may_commit.wait(20)
        return ack

    with ThreadPoolExecutor(2) as threads:
        booking = threads.submit(in_thread(commit_late))
        assert is_booked.wait(20)
        asking = threads.submit(in_thread(totals))
        wait_for(lambda: n_waiting() or asking.done(), what="the answer waiting, or being there")
        may_commit.set()
        ack, answer = booking.result(20), asking.result(20)
    assert ack.booked_at_us <= answer.as_of_us
    assert (tenant.id in records(answer)) == is_locked


def test_a_batch_that_gets_its_instant_after_an_answer_is_not_in_it(committed_db: None, system: Actor) -> None:
    tenant = make_tenant(system, limits=QUOTA)
    with connection.cursor() as cursor, ThreadPoolExecutor(1) as threads:
        # Everything of the batch is written, only its instant is missing, when the answer is given.
        cursor.execute("SELECT pg_advisory_lock(%s)", [module._LOCK])
        booking = threads.submit(in_thread(lambda: book(usage_event(tenant=tenant.id))))
        wait_for(n_waiting, what="the batch waiting")
        answer = totals()
        cursor.execute("SELECT pg_advisory_unlock(%s)", [module._LOCK])
        ack = booking.result(20)
    assert answer.totals == []
    assert ack.booked_at_us > answer.as_of_us
    assert set(records(totals(since_us=answer.as_of_us))) == {tenant.id}


def test_an_answer_that_fails_leaves_no_lock(committed_db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WHOLE_SQL", "SELECT nothing FROM nowhere")
    with pytest.raises(DatabaseError):
        totals()
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database "
            "WHERE locktype = 'advisory' AND datname = current_database()"
        )
        assert cursor.fetchone() == (0,)


def test_every_answer_holds_exactly_the_batches_booked_before_it(committed_db: None, system: Actor) -> None:
    """Four writers, some of whose batches are sent twice, a folder, and two readers as routers are."""
    tenants = [make_tenant(system, limits=QUOTA).id for _ in range(3)]
    batches: list[tuple[UsageAck, list[UsageEvent]]] = []
    ended = threading.Event()

    def write(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(10):
            now = utc_now()
            events = [
                at(
                    now - rng.choice([0, 0, 1]) * DAY,
                    tenant=rng.choice(tenants),
                    key="",
                    output_tokens=rng.randrange(9),
                )
                for _ in range(rng.randrange(1, 30))
            ]
            ack = book(*events)
            assert ack.accepted == len(events)
            batches.append((ack, events))
            if rng.random() < 0.4:
                assert book(*events).accepted == 0

    def fold_on() -> None:
        while not ended.is_set():
            fold()

    def read() -> list[tuple[Totals, dict[str, TotalRecord]]]:
        """Answers, and what a router holds after each."""
        answers: list[tuple[Totals, dict[str, TotalRecord]]] = []
        held: dict[str, TotalRecord] = {}
        is_last = False
        while not is_last:
            is_last = ended.is_set()
            answer = totals(since_us=answers[-1][0].as_of_us if answers else 0)
            held = records(answer) if answer.is_whole else {**held, **records(answer)}
            answers.append((answer, dict(held)))
        return answers

    with ThreadPoolExecutor(7) as threads:
        readers = [threads.submit(in_thread(read)) for _ in range(2)]
        folder = threads.submit(in_thread(fold_on))
        writers = [threads.submit(in_thread(lambda seed=seed: write(seed))) for seed in range(4)]
        try:
            for writer in writers:
                writer.result(60)
        finally:
            ended.set()
        seen = [answer for reader in readers for answer in reader.result(60)]
        folder.result(60)
    assert len(batches) == 40
    sizes: Counter[int] = Counter()
    for answer, held in seen:
        events = [e for ack, batch in batches if ack.booked_at_us <= answer.as_of_us for e in batch]
        sizes[len(events)] += 1
        expected = {scope: truth(answer, scope, events) for scope in tenants}
        assert {s: r for s, r in held.items() if r.month_tokens} == {
            s: r for s, r in expected.items() if r.month_tokens
        }
    assert len(sizes) > 3  # answers in between, not only before and after
