"""What the routers are doing now: queues, first tokens, shares, backends; refreshed every two seconds.

The figures are those of ``fleet.live``. A page names at most ``MAX_LIVE_TENANTS`` tenants of a router, as heartbeats
do, so its cost does not grow with the number of tenants.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_safe

from controlplane.common.actor import Actor
from controlplane.common.clock import utc_now
from controlplane.console import charts, plots
from controlplane.console.frame import actor_of, of_tenants, signed_in
from controlplane.fleet import hazards
from controlplane.fleet import queries as fleet_queries
from controlplane.fleet.live import HISTORY_S, History, PoolNow, TenantNow, TierNow, histories, pools_now
from controlplane.fleet.models import RouterStatus
from controlplane.rollout.queries import current_number
from controlplane.tenants.queries import names_of
from controlplane.usage import queries as usage_queries
from controlplane.usage.models import UsageEvent
from router_ext.wire.controlplane import MAX_LIVE_TENANTS, Heartbeat

STALE_S = 25
"""The row of an instance is renewed every ten seconds."""
FORGOTTEN_S = 86_400
"""An instance that was not heard of for so long is gone: REST names it, the page does not."""
IN_TIME, LATE_OF = 0.95, 20
"""Below this ratio of that many first tokens or more a tier is late, as is its p95."""
SHOWN_TENANTS = 10
"""Tenants of a pool where several pools are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What the database knows: instances of routers (``revoked``: those whose credential is), names by id."""

    instances: list[RouterStatus]
    revoked: set[str]
    pools: dict[str, str]
    backends: dict[str, str]

    @classmethod
    def read(cls, actor: Actor) -> Fleet:
        routers = list(fleet_queries.routers(actor=actor))
        return cls(
            instances=[status for router in routers for status in router.instances.all()],
            revoked={s.instance for router in routers if router.revoked_at for s in router.instances.all()},
            pools=fleet_queries.pool_names(actor=actor),
            backends=fleet_queries.backend_names(actor=actor),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRow:
    """One tenant of one pool. ``delivered``, ``entitled``: parts of the pool's service in the last minutes, with the
    ends of their bars; None if no router tells, or nothing was delivered."""

    now: TenantNow
    name: str
    delivered: float | None
    entitled: float | None
    bar: str
    mark: str

    @property
    def delivered_text(self) -> str:
        return _percent(self.delivered or 0.0)

    @property
    def entitled_text(self) -> str:
        return _percent(self.entitled or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRow:
    """One tier of one pool. ``percentiles``: milliseconds, and whether that is above the target."""

    now: TierNow
    percentiles: list[tuple[float | None, bool]]

    @property
    def target_text(self) -> str:
        return "" if self.now.target_s is None else _seconds(self.now.target_s)

    @property
    def in_time_text(self) -> str:
        ratio = self.now.in_time_ratio
        return "–" if ratio is None else f"{ratio:.1%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPicture:
    """One pool. ``hidden``: how many of the tenants that heartbeats name are on the pool's own page only."""

    id: str
    name: str
    now: PoolNow
    span: str
    tiers: list[TierRow]
    backends: list[dict[str, Any]]
    tenants: list[TenantRow]
    others: TenantRow | None
    hidden: int
    refused: list[tuple[str, int]]
    preempted: list[tuple[str, int]]
    preempted_total: list[tuple[str, int]]

    @property
    def n_preempted(self) -> int:
        return sum(n for _, n in self.preempted_total)


# --- pages -------------------------------------------------------------------------------------------------------


@require_safe
@of_tenants
def page(request: HttpRequest) -> HttpResponseBase:
    actor, context = actor_of(request), _page_context(request)
    if actor.tenant is not None:
        return render(request, "console/live.html", {**context, **_of_tenant(actor, actor.tenant)})
    fleet, wanted = Fleet.read(actor), request.GET.get("pool", "")
    return render(request, "console/live.html", {**context, **_now(actor, fleet, wanted), **_charts(fleet, wanted)})


@require_safe
@of_tenants
def fragment(request: HttpRequest) -> HttpResponseBase:
    actor = actor_of(request)
    if actor.tenant is not None:
        return render(request, _template(request), _of_tenant(actor, actor.tenant))
    context = _now(actor, Fleet.read(actor), request.GET.get("pool", ""))
    # Said again, it would be read out again.
    context["is_news"] = context["said"] != request.GET.get("said", "")
    return render(request, _template(request), context)


@require_safe
@signed_in
def last_minutes(request: HttpRequest) -> HttpResponseBase:
    fleet = Fleet.read(actor_of(request))
    return render(request, "console/fragments/live_charts.html", _charts(fleet, request.GET.get("pool", "")))


def _template(request: HttpRequest) -> str:
    return f"console/fragments/{'live' if actor_of(request).tenant is None else 'own_live'}.html"


def _page_context(request: HttpRequest) -> dict[str, Any]:
    wanted = {name: value for name in ("pool",) if (value := request.GET.get(name, ""))}
    is_paused = "pause" in request.GET
    there = wanted if is_paused else {**wanted, "pause": "1"}
    query = f"?{urlencode(wanted)}" if wanted else ""
    return {
        "fragment": _template(request),
        "is_paused": is_paused,
        "pause_url": f"{reverse('console:live')}?{urlencode(there)}" if there else reverse("console:live"),
        "fragment_url": reverse("console:live_fragment") + query,
        "charts_url": reverse("console:live_charts") + query,
    }


def _now(actor: Actor, fleet: Fleet, wanted: str) -> dict[str, Any]:
    beats = fleet_queries.live_heartbeats([each.instance for each in fleet.instances])
    routers, problems = _routers(fleet)
    seen = pools_now(beats)
    shown = [pool for pool in dict.fromkeys([*fleet.pools, *sorted(seen)]) if not wanted or pool == wanted]
    events = usage_queries.latest_events(actor=actor, limit=12)
    names = names_of({e.tenant for e in events} | {t for pool in shown if pool in seen for t in seen[pool].tenants})
    pictures = [_picture(pool, seen[pool], names, fleet, is_whole=bool(wanted)) for pool in shown if pool in seen]
    silent = [fleet.pools[pool] for pool in shown if pool not in seen]
    full_disks = [(name, beat.overflow_events) for name, beat in sorted(beats.items()) if beat.overflow_events]
    problems += [problem for picture in pictures for problem in (*_backend_problems(picture), *_late(picture))]
    return {
        "at": utc_now(),
        "routers": routers,
        "revision": current_number(),
        "pictures": pictures,
        "silent": silent,
        "is_one_pool": bool(wanted),
        "has_beats": bool(beats),
        "most_tenants": MAX_LIVE_TENANTS,
        "events": [_latest(e, names.get(e.tenant, e.tenant)) for e in events],
        **_status(problems, full_disks, beats, pictures),
    }


def _status(
    problems: list[str], full_disks: list[tuple[str, int]], beats: dict[str, Heartbeat], pictures: list[PoolPicture]
) -> dict[str, Any]:
    """What is read out when it changes; ``said`` is what the page sends back to know whether it has."""
    open_hazards = hazards.n_open()
    is_well = not (problems or full_disks or open_hazards)
    text = list(problems)
    if is_well and beats:
        backends = sum(len(picture.backends) for picture in pictures)
        text.append(f"All is well: {_number(len(beats), 'router')} and {_number(backends, 'backend')} report.")
    # Of what waits in memory only the magnitude: it grows all the time.
    news = [*text, open_hazards, *((name, len(str(n))) for name, n in full_disks)]
    return {
        "status": text,
        "is_well": is_well,
        "full_disks": full_disks,
        "open_hazards": open_hazards,
        "said": hashlib.sha256(repr(news).encode()).hexdigest()[:16],
        "is_news": True,
    }


def _number(n: int, word: str) -> str:
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def _routers(fleet: Fleet) -> tuple[list[dict[str, Any]], list[str]]:
    now = utc_now()
    rows, problems = [], []
    for status in fleet.instances:
        age_s = (now - status.seen_at).total_seconds()
        if age_s > FORGOTTEN_S:
            continue
        is_live = age_s < STALE_S
        rows.append({"status": status, "is_live": is_live, "age_s": int(age_s)})
        if not is_live and status.instance not in fleet.revoked:
            problems.append(f"Router {status.instance} does not report.")
    return rows, problems


# --- pools -------------------------------------------------------------------------------------------------------


def _picture(pool: str, now: PoolNow, names: dict[str, str], fleet: Fleet, *, is_whole: bool) -> PoolPicture:
    servers = fleet.backends
    tenants = now.busiest()
    shown = tenants if is_whole else tenants[:SHOWN_TENANTS]
    hidden = tenants[len(shown) :]
    others = _sum_of([*hidden, *([now.others] if now.others.number else [])])
    rows = _tenant_rows(now, [*shown, *([others] if others else [])], names)
    return PoolPicture(
        id=pool,
        name=fleet.pools.get(pool, pool),
        now=now,
        span=_span(now.recent_s),
        tiers=[_tier_row(tier) for tier in now.tiers.values()],
        backends=[
            {
                "now": b,
                "name": servers.get(b.backend, b.backend),
                "states": [
                    (state, "" if len(b.states) == 1 else ", ".join(seers)) for state, seers in b.states.items()
                ],
                "meter": "" if b.ratio is None else charts.meter(title="KV reserved", ratio=b.ratio),
            }
            for b in sorted(now.backends.values(), key=lambda b: servers.get(b.backend, b.backend))
        ],
        tenants=rows[: len(shown)],
        others=rows[-1] if others else None,
        hidden=len(hidden),
        refused=now.refused.most_common(),
        preempted=[each for each in now.preempted.most_common() if each[1]],
        preempted_total=[each for each in now.preempted_total.items() if each[1]],
    )


def _tier_row(tier: TierNow) -> TierRow:
    limit_ms = None if tier.target_s is None else tier.target_s * 1_000
    return TierRow(
        now=tier,
        percentiles=[(ms, ms is not None and limit_ms is not None and ms > limit_ms) for ms in tier.percentiles_ms],
    )


def _tenant_rows(now: PoolNow, tenants: list[TenantNow], names: dict[str, str]) -> list[TenantRow]:
    """Bars are drawn to the scale of the largest, so that shares of many tenants can be told apart."""
    whole = now.service
    parts = [
        (None, None) if t.service is None or not whole else (t.service / whole, (t.entitled or 0.0) / whole)
        for t in tenants
    ]
    largest = max((part or 0.0 for both in parts for part in both), default=0.0) or 1.0
    return [
        TenantRow(
            now=t,
            name=names.get(t.tenant, t.tenant),
            delivered=delivered,
            entitled=entitled,
            bar=f"{200 * (delivered or 0.0) / largest:.1f}",
            mark=f"{198 * (entitled or 0.0) / largest:.1f}",
        )
        for t, (delivered, entitled) in zip(tenants, parts, strict=True)
    ]


def _sum_of(tenants: list[TenantNow]) -> TenantNow | None:
    if not tenants:
        return None
    told = [t for t in tenants if t.service is not None]
    return TenantNow(
        tenant="",
        number=sum(t.number for t in tenants),
        waiting=sum(t.waiting for t in tenants),
        running=sum(t.running for t in tenants),
        prompt_tokens=sum(t.prompt_tokens for t in tenants),
        output_tokens=sum(t.output_tokens for t in tenants),
        service=sum(t.service or 0.0 for t in told) if told else None,
        entitled=sum(t.entitled or 0.0 for t in told) if told else None,
    )


def _late(picture: PoolPicture) -> list[str]:
    """Tiers that miss their target more often than one may by chance; without figures, which change all the time."""
    return [
        f"First tokens of {name} are late in {picture.name}."
        for name, tier in picture.now.tiers.items()
        if tier.requests >= LATE_OF and (ratio := tier.in_time_ratio) is not None and ratio < IN_TIME
    ]


def _backend_problems(picture: PoolPicture) -> list[str]:
    return [
        f"Backend {backend['name']} of {picture.name} is {state}{f' for {seers}' if seers else ''}."
        for backend in picture.backends
        for state, seers in backend["states"]
        if state in ("down", "warming")
    ]


def _span(seconds: int | None) -> str:
    if seconds is None:
        return ""
    minutes = round(seconds / 60)
    return f"{seconds} seconds" if seconds < 90 else f"{minutes} minutes"


# --- charts ------------------------------------------------------------------------------------------------------


def _charts(fleet: Fleet, wanted: str) -> dict[str, Any]:
    now = utc_now()
    heard = [i.instance for i in fleet.instances if (now - i.seen_at).total_seconds() < HISTORY_S + STALE_S]
    found = histories(instances=heard, now=now)
    return {
        "plotted": [
            {"ttft": _ttft_chart(found[pool], pool, name), "tokens": _tokens_chart(found[pool], pool, name)}
            for pool, name in fleet.pools.items()
            if pool in found and not found[pool].is_empty and wanted in ("", pool)
        ]
    }


def _ttft_chart(history: History, pool: str, name: str) -> str:
    targets = sorted(
        (target, f"target of {tier}: {_seconds(target)}") for tier, target in history.targets.items() if target
    )
    series = [(tier, [point.ttft_s(tier, 0.95) for point in history.points]) for tier in history.targets]
    if not series:
        return ""
    top = max([v for _, values in series for v in values if v is not None] + [target for target, _ in targets])
    return plots.over_time(
        title=f"TTFT, 95th percentile by tier, {name}",
        times=history.times,
        series=series,
        shown=_seconds,
        rules=targets,
        top=plots.round_up(top),
        stamp=STAMP,
        plotted=charts.Plotted(key=f"ttft-{pool}", unit="s"),
    )


def _tokens_chart(history: History, pool: str, name: str) -> str:
    return plots.over_time(
        title=f"Output tokens per second, {name}",
        times=history.times,
        series=[("tokens/s", [point.output_tokens_per_s for point in history.points])],
        shown=lambda value: f"{value:,.0f}" if value >= 10 or not value else f"{value:.1f}",
        stamp=STAMP,
        plotted=charts.Plotted(key=f"tokens-{pool}"),
    )


STAMP = "%H:%M:%S"


def _percent(part: float) -> str:
    """Small shares keep a digit, of many tenants each has few percent."""
    return f"{part:.0%}" if part >= 0.1 or not part else f"{part:.1%}"


def _seconds(value: float) -> str:
    if not value:
        return "0"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1_000:.3g} ms"


# --- tenants' people, requests -----------------------------------------------------------------------------------


def _of_tenant(actor: Actor, tenant: str) -> dict[str, Any]:
    """What waits and runs of one tenant, by pool, and its latest requests; nothing of anybody else."""
    names = fleet_queries.pool_names(actor=actor)
    own, untold = [], []
    for pool, now in pools_now(fleet_queries.live_heartbeats()).items():
        if tenant in now.tenants:
            own.append({"pool": names.get(pool, pool), "now": now.tenants[tenant]})
        elif now.others.number:
            untold.append(names.get(pool, pool))
    events = usage_queries.latest_events(actor=actor, limit=12)
    return {
        "own": sorted(own, key=lambda row: str(row["pool"])),
        "untold": sorted(untold),
        "most_tenants": MAX_LIVE_TENANTS,
        "events": [_latest(e, e.tenant) for e in events],
    }


def _latest(event: UsageEvent, tenant: str) -> dict[str, object]:
    return {"event": event, "name": tenant, "ttft_ms": _ttft_ms(event)}


def _ttft_ms(event: UsageEvent) -> int | None:
    if event.first_token_at is None:
        return None
    return round((event.first_token_at - event.arrived_at).total_seconds() * 1_000)
