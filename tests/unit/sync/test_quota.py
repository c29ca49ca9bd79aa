"""What is used of a day and a month: totals of the control plane plus what of this router they do not have."""

from __future__ import annotations

import random

import msgspec
import pytest

from router_ext.sync.quota import DAY_US, QuotaBook, month_after, month_of
from router_ext.wire.controlplane import TotalRecord, Totals, UsageEvent

DAY = 20_787
"""2026-11-30, a Monday and the last day of its month."""
NOON = DAY * DAY_US + DAY_US // 2


def event(number: int, tokens: int, *, at_us: int = NOON, key: str = "key_a") -> UsageEvent:
    return UsageEvent(
        event=f"evt_{number}", request="r", router="rtr", tenant="ten_a", key=key, pool="p", model="m", tier="t",
        dialect="chat", outcome="completed", arrived_at_us=at_us, ended_at_us=at_us, prompt_tokens=tokens // 2,
        output_tokens=tokens - tokens // 2,
    )  # fmt: skip


def payload(of: UsageEvent) -> bytes:
    return msgspec.json.encode(of)


def totals(as_of_us: int, day: int, month: int, *, date: str = "2026-11-30", is_whole: bool = True) -> Totals:
    records = [TotalRecord(scope="ten_a", day_tokens=day, month_tokens=month)]
    return Totals(as_of_us=as_of_us, day=date, live_routers=2, is_whole=is_whole, totals=records)


def test_days_and_months() -> None:
    assert month_of(DAY) == DAY - 29
    assert month_after(DAY) == DAY + 1
    assert month_of(DAY + 1) == DAY + 1
    assert month_after(DAY + 1) == DAY + 32


def test_without_totals_only_own_events_count() -> None:
    book = QuotaBook()
    book.booked(event(1, 10))
    book.acked([payload(event(1, 10))], 5)
    assert book.used("ten_a", DAY) == book.used("key_a", DAY) == (10, 10)
    assert book.live_routers == 1
    # They are in the first totals that were read after they were booked.
    assert book.apply(totals(5, 110, 1_010))
    assert book.used("ten_a", DAY) == (110, 1_010)
    assert book.used("key_a", DAY) == (0, 0)
    assert book.live_routers == 2


@pytest.mark.parametrize("booked_at_us", [99, 100, 101])
@pytest.mark.parametrize("is_acked_first", [True, False])
def test_acknowledgments_and_totals_may_come_in_any_order(booked_at_us: int, is_acked_first: bool) -> None:
    book = QuotaBook()
    book.apply(totals(1, 0, 0))
    book.booked(event(1, 10))
    is_in = booked_at_us <= 100
    answer = totals(100, 10 if is_in else 0, 10 if is_in else 0, is_whole=False)
    if is_acked_first:
        book.acked([payload(event(1, 10))], booked_at_us)
    book.apply(answer)
    if not is_acked_first:
        book.acked([payload(event(1, 10))], booked_at_us)
    assert book.used("ten_a", DAY) == (10, 10)
    book.apply(totals(101, 10, 10, is_whole=False))
    assert book.used("ten_a", DAY) == (10, 10)


def test_an_event_counts_in_the_day_of_its_arrival() -> None:
    book = QuotaBook()
    book.apply(totals(1, 100, 1_000))
    midnight = (DAY + 1) * DAY_US
    book.booked(event(1, 7, at_us=midnight - 1))
    book.booked(event(2, 9, at_us=midnight))
    assert book.used("ten_a", DAY) == (107, 1_007)
    # The next day is the first of another month: nothing of the totals is in it.
    assert book.used("ten_a", DAY + 1) == (9, 9)
    # Both are booked, and the control plane has not seen the midnight: the second is in none of its sums yet.
    book.acked([payload(event(1, 7, at_us=midnight - 1)), payload(event(2, 9, at_us=midnight))], 2)
    book.apply(totals(3, 107, 1_007, is_whole=False))
    assert book.used("ten_a", DAY) == (107, 1_007)
    assert book.used("ten_a", DAY + 1) == (9, 9)
    book.apply(totals(4, 9, 9, date="2026-12-01"))
    assert book.used("ten_a", DAY + 1) == (9, 9)
    assert book.today(midnight - 1) == DAY + 1


def test_what_does_not_continue_what_is_in_force_is_asked_for_whole() -> None:
    book = QuotaBook()
    assert not book.apply(totals(1, 5, 5, is_whole=False))
    assert book.apply(totals(1, 5, 5))
    assert not book.apply(totals(2, 5, 5, date="2026-12-01", is_whole=False))
    assert book.used("ten_a", DAY) == (5, 5)


def test_a_restart_reads_the_spool_again() -> None:
    before = QuotaBook()
    events = [event(n, 10) for n in range(5)]
    for each in events:
        before.booked(each)
    after = QuotaBook()
    after.load(map(payload, events))
    assert after.used("ten_a", DAY) == before.used("ten_a", DAY) == (50, 50)


def test_events_of_a_router_that_was_replaced_count_until_totals_have_them() -> None:
    book = QuotaBook()
    left = [event(n, 10) for n in range(5)]
    book.booked(event(9, 7))
    for each in left:
        book.adopted(payload(each))
    assert book.used("ten_a", DAY) == (57, 57)
    book.acked([payload(each) for each in left], 20)
    assert book.apply(totals(20, 50, 50))
    assert book.used("ten_a", DAY) == (57, 57)  # this router's own is not in them yet


def test_what_cannot_be_read_counts_for_nobody() -> None:
    book = QuotaBook()
    book.load([b"{", b"[" * 10_000, payload(event(1, 10)), b'{"tenant":"ten_a"}'])
    assert book.used("ten_a", DAY) == (10, 10)


def test_acknowledgments_without_totals_are_kept_in_bounded_memory() -> None:
    book = QuotaBook()
    for number in range(3_000):
        book.booked(event(number, 2))
        book.acked([payload(event(number, 2))], number + 1)
    assert len(book._acked) <= 512
    assert book.used("ten_a", DAY) == (6_000, 6_000)
    book.apply(totals(3_000, 6_000, 6_000))
    assert book.used("ten_a", DAY) == (6_000, 6_000)
    assert not book._own


def test_a_random_course_is_exact_at_every_step() -> None:
    """Events are booked, delivered in batches, and totals read, in random order; the sum is always right."""
    rng = random.Random(20261130)
    for _ in range(30):
        book = QuotaBook()
        spool: list[UsageEvent] = []
        control_plane = truth = 0
        for clock in range(1, 300):
            match rng.randrange(4):
                case 0 | 1:
                    each = event(clock, rng.randrange(1, 50))
                    truth += each.prompt_tokens + each.output_tokens
                    spool.append(each)
                    book.booked(each)
                case 2 if spool:
                    batch = spool[: rng.randrange(1, 5)]
                    del spool[: len(batch)]
                    control_plane += sum(e.prompt_tokens + e.output_tokens for e in batch)
                    book.acked(map(payload, batch), clock)
                case _:
                    book.apply(totals(clock, control_plane, control_plane, is_whole=not book.as_of_us))
            assert book.used("ten_a", DAY) == (truth, truth)
