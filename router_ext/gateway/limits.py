"""What a tenant and a key may take: judged and reserved at admission, settled at the end.

    measured --admit--> Reservation (owner: the event id) --> queue ... --> the slot in the ledger ends --> settled

A request is counted at its prompt and its predicted output before it is queued, and at what is in the books once it
ends. Each slot of the ledger ends exactly once, by an event or discarded, and says so (``Ledger.on_end``): that settles
the reservation on every path. A request that is refused by whatever comes later is discarded and has consumed nothing.
A reservation whose owner vanished lapses after the longest life of a request.

    concurrent        requests waiting or running; each router allows limit / live routers, rounded up
    per minute        ``sync.window``; over all routers through Valkey (``sync.minutes``) while that answers, else
                      each router allows limit / live routers, and one request if it has had none in this minute
    day, month        ``sync.quota`` plus open reservations; from the soft limits on a request gets its lowest tier

At the limit is within it. A request that does not fit beside the reserved ones is refused, though they may turn out
smaller; one that gets longer than predicted may overrun: at most by what the open requests exceed their predictions.
A limit that is new to a tenant or key counts its minute from then on; everything else counts what is there.

Cost: without limits some dictionary look-ups (1 to 2 us at admission and end together).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from router_ext.core.ids import TierName
from router_ext.errors import LimitExceeded, QuotaExceeded
from router_ext.gateway.auth import Identity
from router_ext.sync.quota import DAY_US, QuotaBook, month_after
from router_ext.sync.window import BUCKET_S, REQUESTS, TOKENS, MinuteWindow, hash_name
from router_ext.wire.controlplane import LimitsRecord, UsageEvent
from router_ext.wire.headers import MAX_RETRY_AFTER_S, Headers, reset_text

if TYPE_CHECKING:
    from router_ext.sync.minutes import SharedMinutes, Verdict

NO_LIMITS = LimitsRecord()

MARGIN_S = 60.0
"""A reservation outlives the longest request by so much."""

SWEEP_S = 10.0
"""How often lapsed reservations and idle counters are looked for."""

_WORDS = ("requests", "tokens")


class Scope:
    """A tenant or a key that has requests, or has had some within the minute.

    Attributes:
        word: ``tenant`` or ``key``. open: requests inside. reserved: tokens of these by UTC day of arrival, where there
            are limits.
        window: of the last minute; None without a limit per minute.
    """

    __slots__ = ("is_limited", "limits", "name", "open", "reserved", "scope", "window", "word")

    def __init__(self, scope: str, word: str, name: str, limits: LimitsRecord) -> None:
        self.scope = scope
        self.word = word
        self.name = name
        self.open = 0
        self.reserved: dict[int, int] = {}
        self.window: MinuteWindow | None = None
        self.use(limits)

    def use(self, limits: LimitsRecord) -> None:
        """Other limits; what was counted stays."""
        self.limits = limits
        self.is_limited = limits is not NO_LIMITS
        if limits.requests_per_minute is None and limits.tokens_per_minute is None:
            self.window = None
        elif self.window is None:
            self.window = MinuteWindow(self.name)

    def reserve(self, day: int, tokens: int) -> None:
        """Add to what is reserved in a day, or take from it."""
        left = self.reserved.get(day, 0) + tokens
        if left:
            self.reserved[day] = left
        else:
            self.reserved.pop(day, None)

    @property
    def per_minute(self) -> tuple[int | None, int | None]:
        """Requests and tokens per minute."""
        return self.limits.requests_per_minute, self.limits.tokens_per_minute


class Reservation:
    """What one request holds. ``bucket``: where its windows count it, None before they do. ``parts``: ids of its
    prompts that are counted, of an inherited one."""

    __slots__ = ("bucket", "day", "expires_s", "key", "parts", "tenant", "tokens", "windows")

    def __init__(self, tenant: Scope, key: Scope, tokens: int, day: int, expires_s: float) -> None:
        self.tenant = tenant
        self.key = key
        self.tokens = tokens
        self.day = day
        self.expires_s = expires_s
        self.windows: Sequence[MinuteWindow] = ()
        self.bucket: int | None = None
        self.parts: tuple[str, ...] = ()


class Limiter:
    """See the module. Event loop's thread only.

    Args:
        clock: seconds that never go back. lifetime_s: longest life of a request.

    Attributes:
        shared: the routers' common minutes; None: no Valkey is configured. tokens: reserved at present.
    """

    def __init__(self, quotas: QuotaBook, *, clock: Callable[[], float], lifetime_s: float) -> None:
        self.shared: SharedMinutes | None = None
        self.tokens = 0
        self._quotas = quotas
        self._clock = clock
        self._lifetime_s = lifetime_s + MARGIN_S
        self._limits: Mapping[str, LimitsRecord] = {}
        self._ranks: Mapping[TierName, int] = {}
        self._scopes: dict[str, Scope] = {}
        self._open: dict[str, Reservation] = {}
        self._random = random.Random()  # jitter only

    @property
    def count(self) -> int:
        """Open reservations."""
        return len(self._open)

    def windows(self) -> Iterator[MinuteWindow]:
        """Of everybody who has had requests within the minute."""
        return (scope.window for scope in self._scopes.values() if scope.window is not None)

    def apply(self, limits: Mapping[str, LimitsRecord], ranks: Mapping[TierName, int]) -> None:
        """Limits of another snapshot, by tenant and key; holds at once for what is counted already.

        Cost: O(those who have had requests within the minute, open requests).
        """
        self._limits, self._ranks = limits, ranks
        for scope in self._scopes.values():
            scope.use(limits.get(scope.scope, NO_LIMITS))
            scope.reserved.clear()
        for held in self._open.values():
            for scope in (held.tenant, held.key):
                if scope.is_limited:
                    scope.reserve(held.day, held.tokens)

    # --- admission ----------------------------------------------------------------------------------------------------

    def tier(self, identity: Identity, tier: TierName, arrived_us: int) -> tuple[TierName, str | None]:
        """The tier that a request gets, and why if that is not the one it would have had."""
        if identity.tenant not in self._limits and identity.key not in self._limits:
            return tier, None
        for scope_id, word in ((identity.tenant, "tenant"), (identity.key, "key")):
            limits = self._limits.get(scope_id, NO_LIMITS)
            if limits.soft_tokens_per_day is None and limits.soft_tokens_per_month is None:
                continue
            used = self._used(scope_id, arrived_us)
            for limit, tokens, period in zip(
                (limits.soft_tokens_per_day, limits.soft_tokens_per_month), used, ("day", "month"), strict=True
            ):
                if limit is None or tokens < limit:
                    continue
                lowest = max(identity.tiers, key=lambda name: self._ranks.get(name, 0), default=tier)
                if self._ranks.get(lowest, 0) <= self._ranks.get(tier, 0):
                    return tier, None
                return lowest, (
                    f"tier {lowest} instead of {tier}: this {word} has used {tokens} tokens of this {period}, "
                    f"its soft quota is {limit}"
                )
        return tier, None

    def admit(
        self, identity: Identity, event: str, tokens: int, arrived_us: int, drain_s: Callable[[], float]
    ) -> Coroutine[Any, Any, None] | None:
        """Reserve for a request that is about to be queued. What is returned, if anything, has to be awaited.

        Args:
            event: the owner; ``end`` gives back by it. tokens: prompt and predicted output.
            drain_s: when what waits will be gone, for who has too many requests at once.

        Raises:
            LimitExceeded, QuotaExceeded: nothing is reserved; so does what is awaited.
        """
        tenant = self._scopes.get(identity.tenant)
        if tenant is None:
            tenant = self._begin(identity.tenant, "tenant", hash_name(identity.tenant))
        key = self._scopes.get(identity.key)
        if key is None:
            key = self._begin(identity.key, "key", hash_name(identity.tenant, identity.key))
        held = Reservation(tenant, key, tokens, arrived_us // DAY_US, self._clock() + self._lifetime_s)
        counted: list[Scope] = []
        if tenant.is_limited or key.is_limited:
            scopes = [scope for scope in (tenant, key) if scope.is_limited]
            for scope in scopes:
                self._judge_lasting(scope, tokens, arrived_us, drain_s)
            counted = [scope for scope in scopes if scope.window is not None]
            held.windows = [scope.window for scope in counted if scope.window is not None]
            is_shared = self.shared is not None and self.shared.is_up
            for scope in counted:
                self._judge_minute(scope, tokens, is_shared=is_shared)
            for scope in scopes:
                scope.reserve(held.day, tokens)
            if counted and not is_shared:
                self._count_here(held)
        self._hold(event, held)
        return self._count_everywhere(event, counted, held) if counted and is_shared else None

    def _begin(self, scope_id: str, word: str, name: str) -> Scope:
        scope = self._scopes[scope_id] = Scope(scope_id, word, name, self._limits.get(scope_id, NO_LIMITS))
        return scope

    async def _count_everywhere(self, event: str, scopes: list[Scope], held: Reservation) -> None:
        """Count it at all routers' if they can be asked in time, else by this one's share."""
        assert self.shared is not None
        try:
            limits = [scope.per_minute for scope in scopes]
            verdict = await self.shared.take(held.windows, limits, held.tokens)
            if verdict is None:
                for scope in scopes:
                    if scope.window is not None:  # its limits may have gone meanwhile
                        self._judge_minute(scope, held.tokens, is_shared=False)
                self._count_here(held)
            elif verdict.is_taken:
                held.bucket = verdict.bucket
            else:
                raise self._refused_by_all(scopes, limits, held.tokens, verdict)
        except BaseException:
            self.end(event, None)
            raise

    def _count_here(self, held: Reservation) -> None:
        held.bucket = self._bucket()
        for window in held.windows:
            window.add(held.bucket, 1, held.tokens)
            self._changed(window, held.bucket)

    def _bucket(self) -> int:
        return int(self._clock() / BUCKET_S)

    def _changed(self, window: MinuteWindow, bucket: int) -> None:
        if self.shared is not None:
            self.shared.changed(window, bucket)

    def inherit(
        self, tenant: str, key: str, event: str, tokens: int, arrived_us: int, *, part: str | None = None
    ) -> None:
        """A request that another process admitted and carries out: it is one of those at once, and of its day.

        Its minute was counted there. ``end`` without an event gives back: that process books it.

        Args:
            part: which of its prompts these tokens are for; each counts once, however often it is told.
        """
        part = event if part is None else part
        known = self._open.get(event)
        if known is not None:
            if known.parts and part not in known.parts:
                known.parts += (part,)
                known.tokens += tokens
                self.tokens += tokens
                for scope in (known.tenant, known.key):
                    if scope.is_limited:
                        scope.reserve(known.day, tokens)
            return
        inside = self._scopes.get(tenant) or self._begin(tenant, "tenant", hash_name(tenant))
        within = self._scopes.get(key) or self._begin(key, "key", hash_name(tenant, key))
        held = Reservation(inside, within, tokens, arrived_us // DAY_US, self._clock() + self._lifetime_s)
        held.parts = (part,)
        for scope in (inside, within):
            if scope.is_limited:
                scope.reserve(held.day, tokens)
        self._hold(event, held)

    def _hold(self, event: str, held: Reservation) -> None:
        self._open[event] = held
        self.tokens += held.tokens
        held.tenant.open += 1
        held.key.open += 1

    # --- ends ---------------------------------------------------------------------------------------------------------

    def end(self, event_id: str, event: UsageEvent | None) -> None:
        """A request has ended: booked, or refused without having consumed anything. Once is enough, twice no harm."""
        if event is not None:
            self._quotas.booked(event)
        held = self._open.pop(event_id, None)
        if held is None:
            return
        self._release(held)
        bucket = held.bucket
        if bucket is None or not held.windows:
            return
        requests, tokens = 1, held.tokens
        if event is not None:
            used = event.prompt_tokens + event.output_tokens
            # Displaced, or waited in vain: refused, if later than others.
            requests = int(event.outcome == "expired" and not used)
            tokens = held.tokens - used
        now = self._bucket()
        for window in held.windows:
            window.advance(now)
            if tokens < 0:
                # What came on top is taken now.
                window.add(now, 0, -tokens)
                self._changed(window, now)
            elif window.take_back(bucket, requests, tokens):
                self._changed(window, bucket)

    def _release(self, held: Reservation) -> None:
        self.tokens -= held.tokens
        for scope in (held.tenant, held.key):
            scope.open -= 1
            if scope.is_limited:
                scope.reserve(held.day, -held.tokens)

    def sweep(self) -> int:
        """Let reservations lapse whose time is over, and forget who has nothing here; the number of the first."""
        now, bucket = self._clock(), self._bucket()
        # They all live equally long, so the oldest come first.
        lapsed = []
        for event, held in self._open.items():
            if held.expires_s > now:
                break
            lapsed.append(event)
        for event in lapsed:
            self._release(self._open.pop(event))
        for scope in list(self._scopes.values()):
            if scope.window is not None:
                scope.window.advance(bucket)
            if not scope.open and (scope.window is None or scope.window.is_empty):
                del self._scopes[scope.scope]
        return len(lapsed)

    # --- judgement ----------------------------------------------------------------------------------------------------

    def _used(self, scope_id: str, arrived_us: int) -> tuple[int, int]:
        """Tokens used and reserved in the day and the month of an arrival."""
        day = self._quotas.today(arrived_us)
        used_day, used_month = self._quotas.used(scope_id, day)
        scope = self._scopes.get(scope_id)
        if scope is not None and scope.reserved:
            after = month_after(day)
            used_day += scope.reserved.get(day, 0)
            # A reservation of the last month counts where its event will: there.
            used_month += sum(n for d, n in scope.reserved.items() if month_after(d) == after)
        return used_day, used_month

    def _judge_lasting(self, scope: Scope, tokens: int, arrived_us: int, drain_s: Callable[[], float]) -> None:
        """Requests at once, day and month."""
        limits, word = scope.limits, scope.word
        if limits.concurrent is not None:
            live = self._quotas.live_routers
            share = -(-limits.concurrent // live)
            if scope.open >= share:
                here = f" ({share} on each of {live} routers)" if live > 1 else ""
                drain = drain_s() if limits.concurrent else float(MAX_RETRY_AFTER_S)
                raise self._refusal(
                    f"This {word} may have {limits.concurrent} requests at once{here}: 0 remaining, reset when one "
                    "ends.",
                    retry_s=drain,
                    may_retry=limits.concurrent > 0,
                )
        if limits.tokens_per_day is None and limits.tokens_per_month is None:
            return
        used = self._used(scope.scope, arrived_us)
        day = self._quotas.today(arrived_us)
        for limit, tokens_used, period, ends_day in (
            (limits.tokens_per_day, used[0], "day", day + 1),
            (limits.tokens_per_month, used[1], "month", month_after(day)),
        ):
            if limit is not None and tokens_used + tokens > limit:
                left = max(limit - tokens_used, 0)
                rest_s = (ends_day * DAY_US - arrived_us) / 1e6
                raise QuotaExceeded(
                    f"The quota of this {word} is {limit} tokens per {period}: {left} remaining, this request is "
                    f"counted as {tokens}, reset in {reset_text(rest_s)} (00:00 UTC).",
                    retry_after_s=self._hint(rest_s),
                )

    def _judge_minute(self, scope: Scope, tokens: int, *, is_shared: bool) -> None:
        """Requests and tokens of the minute, as far as this router knows.

        Args:
            is_shared: the store will be asked: only what is refused whatever the others have taken is refused here.
        """
        window = scope.window
        assert window is not None
        now = self._bucket()
        window.advance(now)
        for kind, limit, cost in zip((REQUESTS, TOKENS), scope.per_minute, (1, tokens), strict=True):
            if limit is None:
                continue
            own = window.sums[kind]
            if cost > limit:
                raise self._over(scope, kind, limit, limit - own, cost, None)
            others = 0 if is_shared else window.others(now, kind)
            share = limit if is_shared else limit // self._quotas.live_routers
            if own + others + cost <= limit and (own + cost <= share or not own):
                continue
            if own + others + cost > limit:
                free_at = window.free_at(kind, own + others + cost - limit)
            else:
                free_at = window.free_at(kind, own + cost - share) or window.empty_at(kind, now)
            if free_at is None:
                # What others have taken has to go as well.
                free_at = window.empty_at(kind, now)
            left = limit - own - others if is_shared else min(share - own, limit - own - others)
            raise self._over(scope, kind, limit, left, cost, free_at)

    def _refused_by_all(
        self, scopes: list[Scope], limits: list[tuple[int | None, int | None]], tokens: int, verdict: Verdict
    ) -> LimitExceeded:
        """The refusal of the limit that lets it through last."""
        worst: tuple[int, Scope, int, int, int] | None = None
        for scope, pair, sums, free_at in zip(scopes, limits, verdict.sums, verdict.free_at, strict=True):
            for kind, limit in enumerate(pair):
                if limit is not None and free_at[kind] and (worst is None or free_at[kind] > worst[0]):
                    worst = (free_at[kind], scope, kind, limit, limit - sums[kind])
        assert worst is not None
        at, scope, kind, limit, left = worst
        return self._over(scope, kind, limit, left, (1, tokens)[kind], at if at > 0 else None)

    def _over(self, scope: Scope, kind: int, limit: int, left: int, cost: int, free_at: int | None) -> LimitExceeded:
        """Refused by a limit per minute. ``free_at``: the bucket from which on it fits; None: it never will."""
        counted = f", this request is counted as {cost}" if kind == TOKENS else ""
        wait_s = None if free_at is None else max(free_at * BUCKET_S - self._clock(), 0.0)
        reset = "it can never fit" if wait_s is None else f"reset in {reset_text(wait_s)}"
        return self._refusal(
            f"This {scope.word} may use {limit} {_WORDS[kind]} per minute: {max(left, 0)} remaining{counted}, {reset}.",
            retry_s=float(MAX_RETRY_AFTER_S) if wait_s is None else wait_s,
            may_retry=wait_s is not None,
        )

    def _refusal(self, text: str, *, retry_s: float, may_retry: bool) -> LimitExceeded:
        error = LimitExceeded(text, retry_after_s=self._hint(retry_s))
        error.may_retry = may_retry
        return error

    def _hint(self, estimate_s: float) -> float:
        """Spread, so that the refused do not come back together; never before the estimate."""
        return min(max(estimate_s, 1.0) * self._random.uniform(1.0, 1.25), float(MAX_RETRY_AFTER_S))

    # --- headers ------------------------------------------------------------------------------------------------------

    def headers(self, identity: Identity) -> Headers:
        """``x-ratelimit-*`` of the tightest of tenant and key, as of now; nothing where there is no limit."""
        limits = self._limits
        if identity.tenant not in limits and identity.key not in limits:
            return []
        now = self._bucket()
        headers: Headers = []
        for kind, word in enumerate((b"requests", b"tokens")):
            tightest: tuple[int, int, float] | None = None
            for scope_id in (identity.tenant, identity.key):
                record = limits.get(scope_id, NO_LIMITS)
                limit = record.requests_per_minute if kind == REQUESTS else record.tokens_per_minute
                if limit is None:
                    continue
                found = (*self._left(scope_id, kind, limit, now),)
                if tightest is None or found < tightest:
                    tightest = found
            if tightest is not None:
                left, limit, reset_s = tightest
                headers += [
                    (b"x-ratelimit-limit-" + word, b"%d" % limit),
                    (b"x-ratelimit-remaining-" + word, b"%d" % left),
                    (b"x-ratelimit-reset-" + word, reset_text(reset_s).encode()),
                ]
        return headers

    def _left(self, scope_id: str, kind: int, limit: int, now: int) -> tuple[int, int, float]:
        """What remains, of how much, and the seconds until all of it does again."""
        scope = self._scopes.get(scope_id)
        window = None if scope is None else scope.window
        if window is None:
            return limit, limit, 0.0
        window.advance(now)
        own, others = window.sums[kind], window.others(now, kind)
        left = limit - own - others
        if self.shared is None or not self.shared.is_up:
            left = min(left, limit // self._quotas.live_routers - own)
        return max(left, 0), limit, max(window.empty_at(kind, now) * BUCKET_S - self._clock(), 0.0)


def has_quota(limits: LimitsRecord) -> bool:
    """Whether the control plane tells what was used of it."""
    return (
        limits.soft_tokens_per_day is not None
        or limits.tokens_per_day is not None
        or limits.soft_tokens_per_month is not None
        or limits.tokens_per_month is not None
    )
