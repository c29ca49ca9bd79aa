"""What ``fairlane top`` shows of routers' documents: lines of text, and shares of the last minute."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router_ext.ops.top.sources import Look
from router_ext.wire.log_histogram import quantile_us

WINDOW_S = 60.0
"""Delivered shares are those of so long ago until now, once there are two looks; before, those since start."""

BAR_CELLS = 12

Row = tuple[str, ...]

POOL_COLUMNS = (
    "model",
    "policy",
    "queued",
    "by tier",
    "running",
    "tokens/s",
    "drain",
    "held by",
    "refused",
    "preempted",
    "gap/bound",
)
TIER_COLUMNS = ("tier", "model", "queued", "first tokens", "TTFT p50", "p95", "p99", "target", "in time")
TENANT_COLUMNS = ("tenant", "model", "queued", "running", "delivered", "entitled", "counter", "weight", "output tokens")
BACKEND_COLUMNS = ("backend", "model", "state", "running", "KV", "reserved", "own queue", "detail")


@dataclass(slots=True)
class Tenant:
    """One tenant of one pool of one router. ``delivered``: part of the tokens in the window."""

    router: str
    model: str
    name: str
    group: str | None
    queued: int
    running: int
    delivered: float
    entitled: float
    counter: float
    weight: float
    output_tokens: int


SORTS: Mapping[str, tuple[str, Callable[[Tenant], Any]]] = {
    "w": ("queued", lambda t: -t.queued),
    "r": ("running", lambda t: -t.running),
    "d": ("delivered", lambda t: -t.delivered),
    "e": ("entitled", lambda t: -t.entitled),
    "c": ("counter", lambda t: -t.counter),
    "o": ("output tokens", lambda t: -t.output_tokens),
    "n": ("tenant", lambda t: t.name.casefold()),
}
"""Key -> (column, order of tenants)."""

DEFAULT_SORT = "r"


@dataclass(slots=True)
class _Seen:
    """Output tokens by (pool, tenant) of one router at some instants."""

    at: deque[tuple[float, dict[tuple[str, str], int]]] = field(default_factory=deque)


class Shares:
    """Turns running totals into shares of a window. Remembers ``WINDOW_S`` of looks."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def tenants(self, looks: Iterable[Look]) -> list[Tenant]:
        """All tenants of all routers, as of these looks."""
        found = []
        for look in looks:
            if look.document is not None:
                found += self._of(look.url, look.document)
        return found

    def _of(self, url: str, document: Mapping[str, Any]) -> list[Tenant]:
        at_s = document["at_us"] / 1e6
        totals = {(p["model"], t["tenant"]): t["output_tokens"] for p in document["pools"] for t in p["tenants"]}
        seen = self._seen.setdefault(url, _Seen()).at
        if seen and any(totals.get(which, 0) < count for which, count in seen[-1][1].items() if which in totals):
            seen.clear()  # another process, which counts from 0
        seen.append((at_s, totals))
        while len(seen) > 2 and seen[1][0] <= at_s - WINDOW_S:
            seen.popleft()
        before = seen[0][1] if len(seen) > 1 else {}
        gains = {which: count - before.get(which, 0) for which, count in totals.items()}
        sums: dict[str, int] = {}
        for (model, _), gain in gains.items():
            sums[model] = sums.get(model, 0) + gain
        return [
            Tenant(
                router=document["router"],
                model=pool["model"],
                name=tenant["name"],
                group=tenant["group"],
                queued=tenant["queued"],
                running=tenant["running"],
                delivered=gains[pool["model"], tenant["tenant"]] / sums[pool["model"]] if sums[pool["model"]] else 0.0,
                entitled=tenant["entitled"],
                counter=tenant["counter"],
                weight=tenant["weight"],
                output_tokens=tenant["output_tokens"],
            )
            for pool in document["pools"]
            for tenant in pool["tenants"]
        ]


def sorted_tenants(tenants: Iterable[Tenant], sort: str, *, is_reversed: bool = False) -> list[Tenant]:
    """In the order of a key of ``SORTS``; ties by name, model and router."""
    _, key = SORTS[sort]
    plain = sorted(tenants, key=lambda t: (t.name.casefold(), t.model, t.router))
    return sorted(plain, key=key, reverse=is_reversed)


def tenant_rows(tenants: Sequence[Tenant]) -> list[Row]:
    return [
        (
            t.name if t.group is None else f"{t.name} ({t.group})",
            t.model,
            str(t.queued),
            str(t.running),
            f"{t.delivered:.1%}",
            f"{t.entitled:.1%}",
            f"{t.counter:,.0f}",
            f"{t.weight:g}",
            f"{t.output_tokens:,}",
        )
        for t in tenants
    ]


def pool_rows(looks: Iterable[Look]) -> list[Row]:
    rows: list[Row] = []
    for pool in _pools(looks):
        tiers = ", ".join(f"{tier} {count}" for tier, count in pool["queued_by_tier"].items() if count)
        rate, bound = pool["output_tokens_per_s"], pool["bound_service"]
        refused = ", ".join(f"{code} {count}" for code, count in pool.get("recent_refused", {}).items())
        cuts = ", ".join(f"{trigger} {count}" for trigger, count in pool["preempted_total"].items() if count)
        rows.append(
            (
                pool["model"],
                pool["policy"],
                str(pool["queued"]) + (f" ({pool['parked']} parked)" if pool["parked"] else ""),
                tiers or "-",
                str(pool["running"]),
                "-" if rate is None else f"{rate:,.0f}",
                f"{pool['drain_s']:.0f} s" if pool["queued"] else "-",
                pool["held_by"] if pool["queued"] else "-",
                refused or "0",
                cuts or "0",
                "-" if bound is None else f"{pool['largest_gap_service']:,.0f} / {bound:,.0f}",
            )
        )
    return rows


@dataclass(slots=True)
class _Tier:
    """One tier of one model, of all routers. ``target_s``: of the router looked at last."""

    queued: int = 0
    in_time: int = 0
    target_s: float | None = None
    counts: Counter[int] = field(default_factory=Counter)


def tier_rows(looks: Iterable[Look]) -> list[Row]:
    """First tokens of the last minutes: percentiles of all routers together, within ``log_histogram.RELATIVE_ERROR``.

    Routers of a version that does not tell them are left out.
    """
    found: dict[tuple[str, str], _Tier] = {}
    for pool in _pools(looks):
        for told in pool.get("tiers", ()):
            tier = found.setdefault((pool["model"], told["tier"]), _Tier())
            tier.queued += pool["queued_by_tier"].get(told["tier"], 0)
            tier.in_time += told["in_time"]
            tier.target_s = told["ttft_target_s"]
            tier.counts.update(dict(zip(told["buckets"], told["counts"], strict=True)))
    return [
        (
            name,
            model,
            str(tier.queued),
            f"{tier.counts.total():,}",
            *(_ttft(tier.counts, level) for level in (0.5, 0.95, 0.99)),
            "-" if tier.target_s is None else f"{tier.target_s:g} s",
            f"{tier.in_time / tier.counts.total():.1%}" if tier.target_s is not None and tier.counts else "-",
        )
        for (model, name), tier in found.items()
    ]


def _ttft(counts: Mapping[int, int], level: float) -> str:
    found = quantile_us(counts, level)
    return "-" if found is None else f"{found / 1_000:,.0f} ms"


def backend_rows(looks: Iterable[Look]) -> list[Row]:
    rows: list[Row] = []
    for pool in _pools(looks):
        for b in pool["backends"]:
            part = b["reserved_tokens"] / b["kv_tokens"] if b["kv_tokens"] else 0.0
            is_tripped = b["breaker"] not in (None, "closed") and b["state"] == "up"
            rows.append(
                (
                    b["name"],
                    pool["model"],
                    f"{b['state']} ({b['breaker']})" if is_tripped else b["state"],
                    str(b["running"]),
                    bar(part),
                    f"{b['reserved_tokens']:,} / {b['kv_tokens']:,}",
                    "-" if b["queue_size"] is None else str(b["queue_size"]),
                    b["detail"],
                )
            )
    return rows


def bar(part: float) -> str:
    """A part of 1 as a bar and a percentage; anything outside is drawn as the nearer end."""
    filled = round(min(max(part, 0.0), 1.0) * BAR_CELLS)
    return f"{'█' * filled}{'░' * (BAR_CELLS - filled)} {part:4.0%}"


def headline(look: Look) -> str:
    """One line about a router."""
    document = look.document
    if document is None:
        return f"{look.url}: {look.problem}"
    state = "ready" if document["is_ready"] else f"not ready: {document['reason']}"
    ledger = document["ledger"]
    alarm = f", {ledger['overflow_events']} not on disk" if ledger["overflow_events"] else ""
    pending = f"{ledger['pending_events']} usage events pending{alarm}"
    return f"{document['router']} {document['version']}: {state}, revision {document['applied_revision']}, {pending}"


def _pools(looks: Iterable[Look]) -> Iterable[Mapping[str, Any]]:
    return [pool for look in looks if look.document is not None for pool in look.document["pools"]]
