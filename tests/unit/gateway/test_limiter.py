"""Who may take what: each limit at its edges and at each level, alone on one router."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from support.routers import Setup

from router_ext.core.ids import KeyId, TenantId, TierName
from router_ext.errors import LimitExceeded, QuotaExceeded
from router_ext.gateway.auth import Identity
from router_ext.gateway.configure import Directory
from router_ext.gateway.limits import MARGIN_S, Limiter
from router_ext.sync.quota import DAY_US, QuotaBook
from router_ext.sync.window import N_BUCKETS
from router_ext.wire.controlplane import LimitsRecord, TotalRecord, Totals, UsageEvent
from router_ext.wire.headers import reset_text

DAY = 20_787
"""2026-11-30, the last day of its month."""
NOON = DAY * DAY_US + DAY_US // 2
TIERS = (TierName("fast"), TierName("standard"), TierName("slow"))
RANKS = {TierName("fast"): 1, TierName("standard"): 10, TierName("slow"): 20}
ALICE = Identity(
    tenant=TenantId("ten_a"), tenant_name="alice", key=KeyId("key_a"), public_id="a", default_pool="main",
    tiers=TIERS, default_tier=TIERS[0], may_choose_tier=True,
)  # fmt: skip
OTHER_KEY = dataclasses.replace(ALICE, key=KeyId("key_b"), public_id="b")
HUGE = 10**12


class Bench:
    """A limiter whose clock the test turns."""

    def __init__(self, tenant: LimitsRecord | None = None, key: LimitsRecord | None = None) -> None:
        self.now = 10_000.0
        self.quotas = QuotaBook()
        self.limiter = Limiter(self.quotas, clock=lambda: self.now, lifetime_s=3_600.0)
        self.number = 0
        self.drain_s = 7.0
        self.publish(tenant, key)

    def publish(self, tenant: LimitsRecord | None = None, key: LimitsRecord | None = None) -> None:
        given = {"ten_a": tenant, "key_a": key}
        self.limiter.apply({name: each for name, each in given.items() if each is not None}, RANKS)

    def admit(self, tokens: int = 10, *, at_us: int = NOON, who: Identity = ALICE) -> str:
        self.number += 1
        event = f"evt_{self.number}"
        assert self.limiter.admit(who, event, tokens, at_us, lambda: self.drain_s) is None
        return event

    def refused(self, tokens: int = 10, **given: Any) -> LimitExceeded:
        before = self.state()
        with pytest.raises(LimitExceeded) as found:
            self.admit(tokens, **given)
        assert self.state() == before, "a refused request has consumed something"
        return found.value

    def end(self, event: str, tokens: int | None = None, *, at_us: int = NOON, who: Identity = ALICE) -> None:
        self.limiter.end(event, None if tokens is None else booked(event, tokens, at_us=at_us, who=who))

    def state(self) -> Any:
        limiter = self.limiter
        scopes = {
            name: (scope.open, dict(scope.reserved), None if scope.window is None else list(scope.window.sums))
            for name, scope in limiter._scopes.items()
        }
        # A scope is made for whoever asks, and says nothing while it is empty.
        shown = {name: kept for name, kept in scopes.items() if kept[0] or kept[1] or (kept[2] and any(kept[2]))}
        return limiter.count, limiter.tokens, shown, {k: dict(v) for k, v in self.quotas._own.items()}


def booked(event: str, tokens: int, *, at_us: int = NOON, who: Identity = ALICE) -> UsageEvent:
    return UsageEvent(
        event=event, request="r", router="rtr", tenant=who.tenant, key=who.key, pool="p", model="m", tier="t",
        dialect="chat", outcome="completed", arrived_at_us=at_us, ended_at_us=at_us, prompt_tokens=min(tokens, 3),
        output_tokens=tokens - min(tokens, 3),
    )  # fmt: skip


HARD = ["concurrent", "requests_per_minute", "tokens_per_minute", "tokens_per_day", "tokens_per_month"]
LEVELS = [("tenant",), ("key",), ("tenant", "key")]


@pytest.mark.parametrize("levels", LEVELS, ids="+".join)
@pytest.mark.parametrize("name", HARD)
class TestTruth:
    """One limit, at the tenant, at the key or at both; three requests of 10 tokens are exactly at it."""

    @staticmethod
    def bench(levels: tuple[str, ...], name: str, limit: int) -> Bench:
        record = LimitsRecord(**{name: limit})
        return Bench(**dict.fromkeys(levels, record))

    @staticmethod
    def exactly(name: str) -> int:
        return 30 if name.startswith("tokens") else 3

    def test_at_the_limit_is_within_it(self, levels: tuple[str, ...], name: str) -> None:
        bench = self.bench(levels, name, self.exactly(name))
        events = [bench.admit() for _ in range(3)]
        error = bench.refused()
        is_quota = name in ("tokens_per_day", "tokens_per_month")
        assert isinstance(error, QuotaExceeded) is is_quota
        assert error.code == ("insufficient_quota" if is_quota else "rate_limit_exceeded")
        assert error.openai_type == ("insufficient_quota" if is_quota else "rate_limit_error")
        assert error.may_retry is not is_quota
        assert f"this {levels[0]}" in error.message.lower()
        assert str(self.exactly(name)) in error.message
        assert "0 remaining" in error.message
        assert "reset" in error.message
        assert error.retry_after_s is not None
        assert 1.0 <= error.retry_after_s <= 120.0
        # One less is room for one more.
        bench.end(events[0], 10)
        if name == "concurrent":
            bench.admit()
        else:
            bench.refused()

    def test_nothing_is_nothing(self, levels: tuple[str, ...], name: str) -> None:
        bench = self.bench(levels, name, 0)
        error = bench.refused(1)
        assert not error.may_retry
        assert error.retry_after_s is not None
        assert 60.0 <= error.retry_after_s <= 120.0

    def test_a_million_millions_are_a_number_like_others(self, levels: tuple[str, ...], name: str) -> None:
        bench = self.bench(levels, name, HUGE)
        if name.startswith("tokens"):
            event = bench.admit(HUGE)
            bench.refused(1)
            bench.end(event, HUGE - 5)
            bench.admit(5)
            bench.refused(1)
        else:
            for _ in range(200):
                bench.admit(HUGE)

    def test_unset_is_no_limit(self, levels: tuple[str, ...], name: str) -> None:
        others = {each: HUGE for each in HARD if each != name}
        bench = Bench(**dict.fromkeys(levels, LimitsRecord(**others)))
        for _ in range(100):
            bench.admit(1_000)

    def test_a_request_that_ends_refused_has_consumed_nothing(self, levels: tuple[str, ...], name: str) -> None:
        bench = self.bench(levels, name, self.exactly(name))
        empty = bench.state()
        for event in [bench.admit() for _ in range(3)]:
            bench.end(event)
        assert bench.state() == empty

    def test_another_limit_holds_at_once(self, levels: tuple[str, ...], name: str) -> None:
        bench = self.bench(levels, name, HUGE)
        for _ in range(3):
            bench.admit()
        bench.publish(**dict.fromkeys(levels, LimitsRecord(**{name: self.exactly(name)})))
        bench.refused()
        bench.publish(**dict.fromkeys(levels, LimitsRecord(**{name: self.exactly(name) * 2})))
        bench.admit()
        bench.publish()
        bench.admit()

    def test_the_other_key_has_its_tenants_limits_only(self, levels: tuple[str, ...], name: str) -> None:
        bench = self.bench(levels, name, self.exactly(name))
        for _ in range(3):
            bench.admit()
        if "tenant" in levels:
            bench.refused(who=OTHER_KEY)
        else:
            bench.admit(who=OTHER_KEY)


@pytest.mark.parametrize("name", ["concurrent", "tokens_per_day", "tokens_per_month"])
def test_a_limit_that_is_new_counts_who_is_there(name: str) -> None:
    bench = Bench()
    for _ in range(3):
        bench.admit()
    bench.publish(LimitsRecord(**{name: 30 if name.startswith("tokens") else 3}))
    bench.refused()


def test_tokens_are_settled_by_what_they_were() -> None:
    bench = Bench(LimitsRecord(tokens_per_minute=100, tokens_per_day=100))
    event = bench.admit(100)
    bench.refused(1)
    bench.end(event, 40)
    event = bench.admit(60)
    bench.refused(1)
    # Longer than predicted: what is over is over, and counts.
    bench.end(event, 90)
    assert bench.state()[2]["ten_a"][2] == [2, 130]
    assert "0 remaining" in bench.refused(1).message


@pytest.mark.parametrize(("tokens", "requests"), [(0, 0), (4, 1)])
def test_what_is_displaced_or_waits_in_vain_has_consumed_nothing(tokens: int, requests: int) -> None:
    bench = Bench(tenant=LimitsRecord(requests_per_minute=2, tokens_per_minute=20))
    event = bench.admit(10)
    bench.limiter.end(event, msgspec.structs.replace(booked(event, tokens), outcome="expired"))
    assert bench.state()[2].get("ten_a", (0, {}, [0, 0]))[2] == [requests, tokens]


def test_a_minute_comes_back_after_a_minute() -> None:
    bench = Bench(LimitsRecord(requests_per_minute=2))
    bench.end(bench.admit(), 10)
    bench.now += 30
    bench.end(bench.admit(), 10)
    error = bench.refused()
    assert "reset in 32s" in error.message
    assert error.retry_after_s is not None
    assert 32 <= error.retry_after_s <= 40
    bench.now += 31.9
    bench.refused()
    bench.now += 0.2
    bench.admit()
    bench.refused()


@pytest.mark.parametrize(("drain_s", "least", "most"), [(0.2, 1.0, 1.25), (7.0, 7.0, 8.75), (600.0, 120.0, 120.0)])
def test_too_many_at_once_are_told_when_the_queue_has_drained(drain_s: float, least: float, most: float) -> None:
    bench = Bench(LimitsRecord(concurrent=1))
    bench.drain_s = drain_s
    bench.admit()
    hints = [bench.refused().retry_after_s or 0.0 for _ in range(20)]
    assert all(least <= hint <= most for hint in hints)
    # Those who are refused together do not come back together.
    assert len(set(hints)) == (1 if drain_s == 600.0 else 20)


def test_a_request_that_never_fits_is_not_to_be_tried_again() -> None:
    bench = Bench(LimitsRecord(tokens_per_minute=9))
    error = bench.refused(10)
    assert not error.may_retry
    assert "can never fit" in error.message


def test_totals_of_the_control_plane_count() -> None:
    bench = Bench(LimitsRecord(tokens_per_day=100), LimitsRecord(tokens_per_month=1_000))
    records = [
        TotalRecord(scope="ten_a", day_tokens=70, month_tokens=5_000),
        TotalRecord(scope="key_a", day_tokens=70, month_tokens=960),
    ]
    bench.quotas.apply(Totals(as_of_us=5, day="2026-11-30", totals=records))
    assert "tokens per day: 30 remaining" in bench.refused(31).message
    bench.end(bench.admit(30), 20)
    bench.admit(10)
    assert "per day: 0 remaining" in bench.refused(10).message
    # The next day is the next month as well.
    bench.admit(100, at_us=NOON + DAY_US)
    error = bench.refused(1, at_us=NOON + DAY_US)
    assert error.retry_after_s == 120.0
    assert "reset in 12h0m0s (00:00 UTC)" in error.message


def test_each_router_allows_its_share_without_the_others() -> None:
    bench = Bench(LimitsRecord(requests_per_minute=9, tokens_per_minute=90, concurrent=10))
    bench.quotas.apply(Totals(as_of_us=5, day="2026-11-30", live_routers=4))
    bench.admit(40)  # the first of a minute passes up to the whole limit
    bench.refused(1)
    bench = Bench(LimitsRecord(requests_per_minute=9))
    bench.quotas.apply(Totals(as_of_us=5, day="2026-11-30", live_routers=4))
    events = [bench.admit(), bench.admit()]
    bench.refused()
    bench.end(events[0])
    bench.admit()
    bench = Bench(LimitsRecord(concurrent=10))
    bench.quotas.apply(Totals(as_of_us=5, day="2026-11-30", live_routers=4))
    for _ in range(3):
        bench.admit()
    assert "3 on each of 4 routers" in bench.refused().message


@pytest.mark.parametrize("period", ["day", "month"])
@pytest.mark.parametrize("level", ["tenant", "key"])
def test_a_soft_quota_lowers_the_tier(period: str, level: str) -> None:
    bench = Bench(**{level: LimitsRecord(**{f"soft_tokens_per_{period}": 30})})
    event = bench.admit(29)
    assert bench.limiter.tier(ALICE, TIERS[0], NOON) == (TIERS[0], None)
    bench.end(event, 30)
    tier, why = bench.limiter.tier(ALICE, TIERS[0], NOON)
    assert (tier, why) == (
        "slow",
        f"tier slow instead of fast: this {level} has used 30 tokens of this {period}, its soft quota is 30",
    )
    assert bench.limiter.tier(ALICE, TIERS[2], NOON) == (TIERS[2], None)
    bench.admit(1_000)  # it refuses nobody
    assert bench.limiter.tier(OTHER_KEY, TIERS[0], NOON)[0] == ("slow" if level == "tenant" else "fast")


def test_a_soft_quota_of_nothing_lowers_everybody() -> None:
    bench = Bench(LimitsRecord(soft_tokens_per_month=0))
    assert bench.limiter.tier(ALICE, TIERS[1], NOON)[0] == "slow"
    # The lowest is that of those the key may use.
    narrow = dataclasses.replace(ALICE, tiers=TIERS[:2])
    assert bench.limiter.tier(narrow, TIERS[0], NOON)[0] == "standard"


def test_a_reservation_lapses_when_its_owner_has_vanished() -> None:
    bench = Bench(LimitsRecord(concurrent=1, tokens_per_day=100))
    event = bench.admit(100)
    bench.now += 3_600.0 + MARGIN_S - 1
    assert bench.limiter.sweep() == 0
    bench.refused(1)
    bench.now += 1
    assert bench.limiter.sweep() == 1
    assert bench.limiter.count == bench.limiter.tokens == 0
    later = bench.admit(60)
    # It was there after all: its tokens are used, and nothing is given back twice.
    bench.end(event, 100)
    bench.end(later)
    assert bench.state()[2] == {}
    assert "0 remaining" in bench.refused(1).message


def test_ending_twice_is_ending_once() -> None:
    bench = Bench(LimitsRecord(concurrent=2, requests_per_minute=5))
    event = bench.admit()
    bench.end(event)
    bench.end(event)
    assert bench.state()[2] == {}


def test_who_is_idle_is_forgotten() -> None:
    bench = Bench(LimitsRecord(requests_per_minute=5))
    bench.end(bench.admit(), 5)
    bench.limiter.sweep()
    assert set(bench.limiter._scopes) == {"ten_a"}
    bench.now += N_BUCKETS * 2.0
    bench.limiter.sweep()
    assert not bench.limiter._scopes


def test_headers_are_of_the_tightest_scope() -> None:
    bench = Bench(LimitsRecord(requests_per_minute=100, tokens_per_minute=50), LimitsRecord(requests_per_minute=5))
    bench.admit(20)
    found = dict(bench.limiter.headers(ALICE))
    assert found == {
        b"x-ratelimit-limit-requests": b"5",
        b"x-ratelimit-remaining-requests": b"4",
        b"x-ratelimit-reset-requests": b"1m2s",
        b"x-ratelimit-limit-tokens": b"50",
        b"x-ratelimit-remaining-tokens": b"30",
        b"x-ratelimit-reset-tokens": b"1m2s",
    }
    other = dict(bench.limiter.headers(OTHER_KEY))
    assert (other[b"x-ratelimit-limit-requests"], other[b"x-ratelimit-remaining-requests"]) == (b"100", b"99")
    assert Bench(LimitsRecord(concurrent=5, tokens_per_day=5)).limiter.headers(ALICE) == []
    assert Bench().limiter.headers(ALICE) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"), (0.0101, "11ms"), (0.12, "120ms"), (0.9999, "1s"), (1.0, "1s"), (1.2, "2s"), (59.5, "1m0s"),
        (360.0, "6m0s"), (3_600.0, "1h0m0s"), (90_061.0, "25h1m1s"),
    ],
)  # fmt: skip
def test_durations_are_written_as_clients_read_them(seconds: float, text: str) -> None:
    assert reset_text(seconds) == text


def test_new_quotas_are_noticed() -> None:
    setup = Setup(backends=[])
    text = setup.key("a")
    directory: Directory | None = None
    for tenant, key, is_new in (
        (LimitsRecord(), LimitsRecord(), False),
        (LimitsRecord(requests_per_minute=5), LimitsRecord(), False),
        (LimitsRecord(requests_per_minute=5, soft_tokens_per_month=5), LimitsRecord(), True),
        (LimitsRecord(soft_tokens_per_month=9), LimitsRecord(concurrent=9), False),
        (LimitsRecord(soft_tokens_per_month=9), LimitsRecord(tokens_per_day=9), True),
        (LimitsRecord(), LimitsRecord(tokens_per_day=9), False),
    ):
        setup.tenant("a", limits=tenant)
        setup.keys[text] = msgspec.structs.replace(setup.keys[text], limits=key)
        directory = Directory(setup.snapshot(), {1: setup.pepper}, directory)
        assert directory.has_new_quotas is is_new
        held = {setup.tenants["a"].tenant: tenant, setup.keys[text].key: key}
        assert directory.limits == {scope: record for scope, record in held.items() if record != LimitsRecord()}


def test_who_has_no_limits_leaves_nothing() -> None:
    bench = Bench()
    events = [bench.admit(who=who) for who in (ALICE, OTHER_KEY) for _ in range(50)]
    assert (bench.limiter.count, bench.limiter.tokens) == (100, 1_000)
    for event in events:
        bench.end(event)
    bench.limiter.sweep()
    assert (bench.limiter.count, bench.limiter.tokens, bench.limiter._scopes) == (0, 0, {})


@pytest.mark.parametrize("level", ["tenant", "key"])
def test_what_another_process_carries_out_is_one_of_those_at_once_and_of_its_day(level: str) -> None:
    bench = Bench(**{level: LimitsRecord(concurrent=2, tokens_per_day=100, requests_per_minute=5)})
    for _ in range(2):  # told again by a second predecessor: it is still one request
        bench.limiter.inherit("ten_a", "key_a", "evt_theirs", 60, NOON)
    assert isinstance(bench.refused(41), QuotaExceeded)
    own = bench.admit(40)
    assert "2 requests at once" in bench.refused(1).message
    assert bench.state()[2]["ten_a" if level == "tenant" else "key_a"] == (2, {DAY: 100}, [1, 40])
    # Other limits hold for it as well.
    bench.publish(**{level: LimitsRecord(tokens_per_day=99)})
    bench.refused(1)
    bench.publish(**{level: LimitsRecord(concurrent=2, tokens_per_day=100)})
    for _ in range(2):
        bench.limiter.end("evt_theirs", None)
    bench.admit(60)
    bench.end(own)
    assert bench.limiter.count == 1


def test_every_prompt_of_what_another_process_carries_out_is_reserved_once() -> None:
    bench = Bench(tenant=LimitsRecord(concurrent=2, tokens_per_day=100))
    for _ in range(2):
        for index in range(3):
            bench.limiter.inherit("ten_a", "key_a", "evt_theirs", 20, NOON, part=f"evt_theirs-{index}")
    assert (bench.limiter.count, bench.limiter.tokens) == (1, 60)
    assert isinstance(bench.refused(41), QuotaExceeded)
    own = bench.admit(40)
    assert "2 requests at once" in bench.refused(1).message
    bench.limiter.end("evt_theirs", None)
    bench.end(own)
    assert (bench.limiter.count, bench.limiter.tokens) == (0, 0)
