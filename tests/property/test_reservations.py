"""Reservations over random exits: nothing ever negative, nothing above its limit, nothing left at the end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_ext.core.ids import KeyId, TenantId, TierName
from router_ext.errors import LimitExceeded
from router_ext.gateway.auth import Identity
from router_ext.gateway.limits import Limiter
from router_ext.sync.quota import DAY_US, QuotaBook
from router_ext.wire.controlplane import LimitsRecord, UsageEvent

DAY = 20_770
"""A day in the middle of a month: no course is long enough to leave it."""
WHO = [
    Identity(
        tenant=TenantId(tenant), tenant_name=tenant, key=KeyId(key), public_id=key, default_pool="main",
        tiers=(TierName("t"),), default_tier=TierName("t"), may_choose_tier=False,
    )
    for tenant, key in (("ten_a", "key_a"), ("ten_a", "key_b"), ("ten_b", "key_c"))
]  # fmt: skip
SCOPES = ("ten_a", "ten_b", "key_a", "key_b", "key_c")


class Leaky(Limiter):
    """The mutant: a request refused behind its admission is not given back in full."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.leak = ""

    def end(self, event_id: str, event: UsageEvent | None) -> None:
        held = self._open.get(event_id)
        if event is not None or held is None:
            super().end(event_id, event)
        elif self.leak == "window":
            held.windows = ()
            super().end(event_id, None)
        elif self.leak == "slot":
            self._open.pop(event_id)
        elif self.leak == "tokens":
            tokens, held.tokens = held.tokens, 0
            super().end(event_id, None)
            held.tokens = tokens


limits = st.builds(
    LimitsRecord,
    concurrent=st.none() | st.integers(0, 4),
    requests_per_minute=st.none() | st.integers(0, 6),
    tokens_per_minute=st.none() | st.integers(0, 200),
    tokens_per_day=st.none() | st.integers(0, 500),
    tokens_per_month=st.none() | st.integers(0, 800),
)
steps = st.one_of(
    st.tuples(st.just("admit"), st.integers(0, 2), st.integers(1, 80)),
    st.tuples(st.just("refuse"), st.integers(0, 30)),
    st.tuples(st.just("book"), st.integers(0, 30), st.floats(0, 1)),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 3.0, 31.0, 90.0, 4_000.0])),
    st.tuples(st.just("publish"), st.dictionaries(st.sampled_from(SCOPES), limits)),
)


def course(limiter: Limiter, clock: list[float], quotas: QuotaBook, given_steps: list[Any]) -> None:
    """Play the steps; every law is looked at after each."""
    in_force: dict[str, LimitsRecord] = {}
    held: dict[str, tuple[Identity, int, int]] = {}
    number = 0

    def end(event: str, share: float | None) -> None:
        who, tokens, at_us = held.pop(event)
        if share is None:
            limiter.end(event, None)
            return
        used = int(tokens * share)
        limiter.end(
            event,
            UsageEvent(
                event=event, request="r", router="r", tenant=who.tenant, key=who.key, pool="p", model="m", tier="t",
                dialect="chat", outcome="completed", arrived_at_us=at_us, ended_at_us=at_us, output_tokens=used,
            ),
        )  # fmt: skip

    for step in given_steps:
        match step:
            case ("admit", index, tokens):
                number += 1
                at_us = DAY * DAY_US + int(clock[0] * 1e6)
                try:
                    assert limiter.admit(WHO[index], f"e{number}", tokens, at_us, float) is None
                except LimitExceeded:
                    pass
                else:
                    held[f"e{number}"] = (WHO[index], tokens, at_us)
                    for scope in (WHO[index].tenant, WHO[index].key):
                        within(limiter, quotas, scope, in_force.get(scope, LimitsRecord()), at_us // DAY_US)
            case ("refuse", index) if held:
                end(list(held)[index % len(held)], None)
            case ("book", index, share) if held:
                end(list(held)[index % len(held)], share)
            case ("wait", seconds):
                clock[0] += seconds
                limiter.sweep()
            case ("publish", given_limits):
                in_force = {name: record for name, record in given_limits.items() if record != LimitsRecord()}
                limiter.apply(in_force, {})
        assert limiter.tokens >= 0
        for scope_id, scope in limiter._scopes.items():
            assert scope.open >= 0, scope_id
            assert all(n > 0 for n in scope.reserved.values()), scope_id
            if scope.window is not None:
                assert min(scope.window.sums) >= 0, scope_id
    # Everybody leaves; those that never were served have consumed nothing.
    for event in list(held):
        end(event, None)
    assert (limiter.count, limiter.tokens) == (0, 0)
    for scope_id, scope in limiter._scopes.items():
        assert (scope.open, scope.reserved) == (0, {}), scope_id
    clock[0] += 100.0
    limiter.sweep()
    assert not limiter._scopes


def within(limiter: Limiter, quotas: QuotaBook, scope_id: str, record: LimitsRecord, day: int) -> None:
    """What was just admitted has left its scope within every limit."""
    scope = limiter._scopes[scope_id]
    used_day, used_month = quotas.used(scope_id, day)
    pairs = [
        (scope.open, record.concurrent),
        (used_day + scope.reserved.get(day, 0), record.tokens_per_day),
        (used_month + sum(scope.reserved.values()), record.tokens_per_month),
    ]
    if scope.window is not None:
        pairs += zip(scope.window.sums, scope.per_minute, strict=True)
    for taken, limit in pairs:
        assert limit is None or taken <= limit, (scope_id, pairs)


def play(kind: type[Limiter], given_steps: list[Any], **leak: str) -> None:
    clock = [0.0]
    quotas = QuotaBook()
    limiter = kind(quotas, clock=lambda: clock[0], lifetime_s=100_000.0)
    for name, value in leak.items():
        setattr(limiter, name, value)
    course(limiter, clock, quotas, given_steps)


@settings(max_examples=200, deadline=None)
@given(given_steps=st.lists(steps, max_size=60))
def test_reservations_balance_over_random_exits(given_steps: list[Any]) -> None:
    play(Limiter, given_steps)


@pytest.mark.parametrize("leak", ["slot", "tokens"])
def test_a_limiter_that_leaks_on_one_exit_is_found(leak: str) -> None:
    refused = [("publish", {"ten_a": LimitsRecord(tokens_per_day=500)}), ("admit", 0, 50), ("refuse", 0)]
    play(Limiter, refused)
    with pytest.raises(AssertionError):
        play(Leaky, refused, leak=leak)


def test_a_window_that_is_not_given_back_to_refuses_others() -> None:
    record = LimitsRecord(requests_per_minute=1)
    clock, quotas = [0.0], QuotaBook()
    for kind, leak, is_free in ((Limiter, "", True), (Leaky, "window", False)):
        limiter = kind(quotas, clock=lambda: clock[0], lifetime_s=10.0)
        if leak:
            limiter.leak = leak  # type: ignore[attr-defined]
        limiter.apply({"ten_a": record}, {})
        limiter.admit(WHO[0], "e1", 5, 0, float)
        limiter.end("e1", None)
        if is_free:
            limiter.admit(WHO[0], "e2", 5, 0, float)
        else:
            with pytest.raises(LimitExceeded):
                limiter.admit(WHO[0], "e2", 5, 0, float)
