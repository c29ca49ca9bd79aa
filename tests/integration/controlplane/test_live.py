"""The live page: one picture of each pool, made of the heartbeats of all its routers."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from support.scripted import Peer, World, running, until

from controlplane.accounts.models import Role
from controlplane.common.actor import Actor
from controlplane.common.clock import to_us, utc_now
from controlplane.console.views.live import SHOWN_TENANTS
from controlplane.fleet.live import HISTORY_S, POINT_S, histories, pools_now
from controlplane.fleet.models import Pool, Router, RouterStatus
from controlplane.tenants.models import Tenant, TenantTier
from router_ext.wire.controlplane import (
    HEARTBEAT_PATH,
    MAX_LIVE_TENANTS,
    SLOT_S,
    BackendState,
    Heartbeat,
    OtherTenants,
    PoolState,
    SlotState,
    TenantState,
    TierState,
)
from router_ext.wire.log_histogram import bucket, quantile_us
from tests.support.control_plane import ApiClient, make_backend, make_pool, make_tenant, make_user, signed_in, tell

pytestmark = pytest.mark.django_db


def words(answer: Any) -> str:
    assert answer.status_code == 200
    return " ".join(re.sub(r"<[^>]*>", " ", answer.content.decode()).split())


def shown(client: Client, name: str = "live_fragment", **query: str) -> str:
    return words(client.get(reverse(f"console:{name}"), query))


def counted(tier: str, times_ms: list[int], **fields: Any) -> TierState:
    counts = Counter(bucket(ms * 1_000) for ms in times_ms)
    return TierState(tier=tier, buckets=list(counts), counts=list(counts.values()), **fields)


def ms(us: float | None) -> str:
    assert us is not None
    return f"{us / 1_000:,.0f} ms"


@pytest.fixture
def pool(system: Actor) -> Pool:
    return make_pool(system)


@pytest.fixture
def viewer_client(db: None) -> Client:
    return signed_in(Role.VIEWER)


class TestMerging:
    def test_percentiles_are_those_of_all_routers_and_not_a_mean(self, pool: Pool, viewer_client: Client) -> None:
        quick, slow = [100 + n for n in range(95)], [9_000, 9_500, 10_000, 11_000, 12_000]
        for router, times in (("rtr_a", quick), ("rtr_b", slow)):
            in_time = sum(each <= 2_000 for each in times)
            tier = counted("interactive", times, ttft_target_s=2.0, in_time=in_time)
            state = PoolState(
                pool=pool.id, policy="fifo", recent_s=300, queued_by_tier={"interactive": 2}, tiers=[tier]
            )
            tell(router=router, pools=[state])
        page = shown(viewer_client)
        both = Counter(bucket(each * 1_000) for each in quick + slow)
        p50, p95, p99 = (ms(quantile_us(both, level)) for level in (0.5, 0.95, 0.99))
        assert f"interactive 4 100 {p50} {p95} ▲ above the target: {p99} 2 s 95.0%" in page
        assert "in the last 5 minutes" in page
        assert page.count(f"{pool.name} fifo") == 1
        assert f"{pool.name} fifo on 2 routers" in page

    def test_what_nobody_tells_is_neither_full_nor_empty(self, pool: Pool, viewer_client: Client) -> None:
        assert f"No router reports {pool.name}" in shown(viewer_client)
        backend = BackendState(backend="bke_1", state="warming")
        blank = PoolState(pool=pool.id, policy="fifo", queued_by_tier={"batch": 0}, backends=[backend])
        tell(router="rtr_old", pools=[blank])
        page = shown(viewer_client)
        assert "batch 0 not told by this version of the router" in page
        assert "capacity not known yet" in page
        assert "Refused or expired" not in page
        tell(router="rtr_new", pools=[msgspec.structs.replace(blank, recent_s=300, tiers=[counted("batch", [])])])
        page = shown(viewer_client)
        assert "batch 0 no requests in the last 5 minutes none –" in page
        assert "Refused or expired in the last 5 minutes: none" in page
        assert "No router reports" not in page

    def test_a_backend_that_routers_see_differently_shows_both_states(
        self, pool: Pool, viewer_client: Client, system: Actor
    ) -> None:
        backend = make_backend(system, pool, name="gpu-1")
        for router, state in (("rtr_a", "up"), ("rtr_b", "down")):
            told = BackendState(backend=backend.id, state=state, running=2, reserved_tokens=300, kv_tokens=1_000)
            tell(router=router, pools=[PoolState(pool=pool.id, policy="fifo", backends=[told])])
        page = shown(viewer_client)
        assert "gpu-1 up for rtr_a down for rtr_b" in page
        assert "600 of 1,000 tokens" in page
        assert f"Backend gpu-1 of {pool.name} is down for rtr_b." in page

    def test_shares_are_sums_of_what_routers_delivered_and_owed(
        self, pool: Pool, viewer_client: Client, system: Actor
    ) -> None:
        one, two = make_tenant(system, name="One"), make_tenant(system, name="Two")
        for router, service in (("rtr_a", 300.0), ("rtr_b", 100.0)):
            tenants = [
                TenantState(tenant=one.id, running=1, recent_service=service, entitled_service=200.0),
                TenantState(tenant=two.id, queued=1, recent_service=0.0, entitled_service=service - 200.0),
            ]
            others = OtherTenants(tenants=7, queued=5, recent_service=50.0, entitled_service=50.0)
            state = PoolState(pool=pool.id, policy="fifo", recent_s=60, tenants=tenants, other_tenants=others)
            tell(router=router, pools=[msgspec.structs.replace(state, recent_refused={"queue_full": 2})])
        page = shown(viewer_client)
        assert "One 0 2 0 80% of 80%" in page
        assert "Two 2 0 0 0% of 0%" in page
        assert "other: 14 tenants 10 0 0 20% of 20%" in page
        assert f"Routers name the {MAX_LIVE_TENANTS} tenants with the most work" in page
        assert "Refused or expired in the last 60 seconds: queue_full 4." in page


def test_rest_tells_the_same(pool: Pool, api: ApiClient, system: Actor) -> None:
    tenant = make_tenant(system)
    for router, times in (("rtr_a", [100] * 9), ("rtr_b", [5_000])):
        state = PoolState(
            pool=pool.id,
            policy="fifo",
            recent_s=100,
            recent_output_tokens=1_000,
            queued_by_tier={"fast": 3},
            recent_refused={"queue_full": 1},
            recent_preempted={"gap": 0},
            tiers=[counted("fast", times, ttft_target_s=0.5, in_time=sum(each <= 500 for each in times))],
            tenants=[TenantState(tenant=tenant.id, running=1, recent_service=7.0, entitled_service=3.0)],
            other_tenants=OtherTenants(tenants=4, queued=6),
            backends=[BackendState(backend="bke_1", state="up", running=1)],
        )
        tell(router=router, pools=[state])
    told = api.send("GET", f"/pools/{pool.id}/live").json()
    (tier,) = told["tiers"]
    assert (told["waiting"], told["output_tokens_per_s"], told["routers"]) == (6, 20.0, ["rtr_a", "rtr_b"])
    assert (told["refused"], told["preempted"]) == ({"queue_full": 2}, {})
    assert (tier["first_tokens"], tier["in_time_ratio"], tier["ttft_target_s"]) == (10, 0.9, 0.5)
    assert tier["ttft_p50_ms"] == pytest.approx(100, rel=0.01)
    assert tier["ttft_p95_ms"] == pytest.approx(5_000, rel=0.01)
    assert [(t["tenant"], t["number"], t["waiting"], t["service"], t["entitled_service"]) for t in told["tenants"]] == [
        (tenant.id, 1, 0, 14.0, 6.0),
        (None, 8, 12, 0.0, 0.0),
    ]
    states = {"up": ["rtr_a", "rtr_b"]}
    assert told["backends"] == [
        {"backend": "bke_1", "states": states, "running": 2, "reserved_tokens": 0, "kv_tokens": None}
    ]
    assert api.send("GET", "/pools/pol_x/live").status_code == 404


class TestSize:
    """The page costs what it shows, whatever there is."""

    def fill(self, system: Actor, n_tenants: int, n_pools: int) -> list[Pool]:
        first = make_tenant(system)
        rows = [
            Tenant(name=f"Tenant {n}", slug=f"filled-{n}", default_tier_id=first.default_tier_id)
            for n in range(n_tenants)
        ]
        Tenant.objects.bulk_create(rows)
        TenantTier.objects.bulk_create(TenantTier(tenant=row, tier_id=row.default_tier_id) for row in rows)
        pools = [make_pool(system, name=f"pool-{n}") for n in range(n_pools)]
        each = min(MAX_LIVE_TENANTS, n_tenants) // n_pools
        for router in ("rtr_a", "rtr_b"):
            tell(
                router=router,
                pools=[
                    PoolState(
                        pool=pool.id,
                        policy="slo-fair",
                        recent_s=300,
                        tiers=[counted(tier, list(range(10, 900)), ttft_target_s=1.0) for tier in ("fast", "slow")],
                        tenants=[
                            TenantState(tenant=t.id, queued=n + 1, recent_service=5.0, entitled_service=5.0)
                            for n, t in enumerate(rows[i * each : (i + 1) * each])
                        ],
                        backends=[BackendState(backend=f"bke_{i}_{n}", state="up") for n in range(4)],
                    )
                    for i, pool in enumerate(pools)
                ],
            )
        return pools

    def test_queries_do_not_grow_and_only_tenants_that_are_shown_are_read(
        self, viewer_client: Client, system: Actor
    ) -> None:
        pools = self.fill(system, 2_000, 8)
        for name in ("live", "live_fragment", "live_charts"):
            with CaptureQueriesContext(
                connection,
            ) as found:
                viewer_client.get(reverse(f"console:{name}"))
            assert len(found) <= 12, [each["sql"][:80] for each in found]
        page = shown(viewer_client)
        assert all(page.count(f" {pool.name} slo-fair") == 1 for pool in pools)
        assert len(re.findall(r"Tenant \d+ ", page)) == 8 * SHOWN_TENANTS
        assert page.count("other: 15 tenants") == 8
        assert "All tenants of pool-3" in page
        whole = shown(viewer_client, pool=pools[3].id)
        assert len(re.findall(r"Tenant \d+ ", whole)) == MAX_LIVE_TENANTS // 8
        assert "pool-4" not in whole

    def test_the_names_of_other_tenants_are_not_read(
        self, viewer_client: Client, system: Actor, pool: Pool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[set[str]] = []
        monkeypatch.setattr("controlplane.console.views.live.names_of", lambda ids: asked.append(set(ids)) or {})
        tenants = [make_tenant(system, name=f"T{n}") for n in range(3)]
        tell(pools=[PoolState(pool=pool.id, policy="fifo", tenants=[TenantState(tenant=tenants[1].id, queued=1)])])
        shown(viewer_client)
        assert asked == [{tenants[1].id}]


class TestNews:
    """What is read out is sent again only when it has changed."""

    def test_a_status_the_page_has_is_not_sent_again(self, pool: Pool, viewer_client: Client, system: Actor) -> None:
        backend = make_backend(system, pool, name="gpu-1")

        def told(state: str) -> None:
            there = BackendState(backend=backend.id, state=state, kv_tokens=10)
            tell(pools=[PoolState(pool=pool.id, policy="fifo", backends=[there])])

        def said(page: str) -> str:
            found = re.search(r'name="said" value="([0-9a-f]+)"', page)
            assert found is not None
            return found[1]

        told("up")
        page = viewer_client.get(reverse("console:live")).content.decode()
        assert "hx-swap-oob" not in page
        assert "All is well: 1 router and 1 backend report." in page
        again = viewer_client.get(reverse("console:live_fragment"), {"said": said(page)}).content.decode()
        assert "live-said" not in again
        told("down")
        news = viewer_client.get(reverse("console:live_fragment"), {"said": said(page)}).content.decode()
        assert 'hx-swap-oob="innerHTML:#live-status"' in news
        assert "is down" in news
        assert said(news) != said(page)

    @pytest.mark.parametrize(
        ("n_late", "n", "is_late"), [(1, 20, False), (2, 20, True), (19, 19, False), (50, 1_000, False)]
    )
    def test_a_tier_that_misses_its_target_is_not_well(
        self, pool: Pool, viewer_client: Client, n_late: int, n: int, is_late: bool
    ) -> None:
        times = [3_000] * n_late + [100] * (n - n_late)
        tiers = [counted("interactive", times, ttft_target_s=2.0, in_time=n - n_late), counted("batch", [9_000] * 99)]
        tell(pools=[PoolState(pool=pool.id, policy="fifo", recent_s=300, tiers=tiers)])
        page = shown(viewer_client)
        assert (f"First tokens of interactive are late in {pool.name}." in page) is is_late
        assert ("All is well" in page) is not is_late
        assert "of batch are late" not in page

    def test_a_router_that_was_heard_of_and_is_silent_is_a_problem(self, pool: Pool, viewer_client: Client) -> None:
        tell(router="rtr_a")
        RouterStatus.objects.update(seen_at=utc_now() - timedelta(minutes=3))
        page = shown(viewer_client)
        assert "Router rtr_a does not report." in page
        assert "180 s ago" in page
        RouterStatus.objects.update(seen_at=utc_now() - timedelta(days=2))
        assert "rtr_a" not in shown(viewer_client)

    def test_a_paused_page_asks_for_nothing(self, pool: Pool, viewer_client: Client) -> None:
        assert viewer_client.get(reverse("console:live")).content.decode().count("hx-get") == 2
        paused = viewer_client.get(reverse("console:live"), {"pause": "1", "pool": pool.id}).content.decode()
        assert "hx-get" not in paused
        assert f'href="/?pool={pool.id}"' in paused


class TestHistory:
    def test_points_are_of_all_routers_and_what_was_lost_is_a_gap(self, pool: Pool, viewer_client: Client) -> None:
        now = utc_now()
        newest = to_us(now) // 1_000_000 // POINT_S * POINT_S // SLOT_S - 6 * POINT_S // SLOT_S
        for router, tokens, times in (("rtr_a", 100, [100] * 9), ("rtr_b", 50, [5_000])):
            slots = [
                SlotState(
                    slot=newest + n,
                    output_tokens=tokens,
                    tiers=[counted("fast", times, ttft_target_s=0.5)] if n == 0 else [],
                )
                for n in range(3)
                if (router, n) != ("rtr_b", 1)
            ]
            state = PoolState(pool=pool.id, policy="fifo", slots=slots)
            for _ in range(2):  # heartbeats repeat them
                tell(router=router, pools=[state])
        found = histories(instances=["rtr_a", "rtr_b", "rtr_unknown"], now=now)[pool.id]
        assert len(found.points) == len(found.times) == HISTORY_S // POINT_S
        (point,) = (each for each in found.points if each.output_tokens_per_s is not None)
        assert to_us(found.times[found.points.index(point)]) == newest * SLOT_S * 1_000_000
        assert point.output_tokens_per_s == pytest.approx((300 / 30) + (100 / 20))
        assert point.tiers["fast"].total() == 10
        assert point.ttft_s("fast", 0.9) == pytest.approx(0.1, rel=0.01)
        assert point.ttft_s("fast", 0.95) == pytest.approx(5.0, rel=0.01)
        page = shown(viewer_client, "live_charts")
        assert f"TTFT, 95th percentile by tier, {pool.name}" in page
        assert "target of fast: 500 ms" in page
        assert f"Output tokens per second, {pool.name}" in page
        assert page.count("–") >= HISTORY_S // POINT_S - 1

    def test_without_heartbeats_there_is_no_chart(self, pool: Pool, viewer_client: Client) -> None:
        tell(pools=[PoolState(pool=pool.id, policy="fifo")])
        assert "last ten minutes" not in shown(viewer_client, "live_charts")


class TestOwn:
    def test_a_member_sees_its_own_of_all_routers_and_is_told_what_is_not_known(
        self, pool: Pool, system: Actor
    ) -> None:
        own, other = make_tenant(system), make_tenant(system, name="Somebody else")
        client = Client()
        client.force_login(make_user(role=Role.TENANT_MEMBER, tenant=own.id))
        for router in ("rtr_a", "rtr_b"):
            tenants = [TenantState(tenant=each.id, queued=2, running=1) for each in (own, other)]
            tell(router=router, pools=[PoolState(pool=pool.id, policy="fifo", tenants=tenants)])
        page = shown(client, "live")
        assert f"{pool.name} 4 2 0 0" in page
        assert "Somebody else" not in page
        assert "rtr_a" not in page
        assert "live-said" not in client.get(reverse("console:live")).content.decode()
        for router in ("rtr_a", "rtr_b"):
            others = OtherTenants(tenants=9, queued=3)
            tell(router=router, pools=[PoolState(pool=pool.id, policy="fifo", other_tenants=others)])
        page = shown(client)
        assert f"Not known of {pool.name}: only the {MAX_LIVE_TENANTS} tenants" in page
        assert "Nothing waits or runs" not in page
        assert client.get(reverse("console:live_charts")).status_code == 404


async def served(folder: Path) -> bytes:
    """The heartbeat of a router that has served three requests and refused one."""
    world = World()
    world.key = world.setup.key("alice", may_choose_tier=True)
    async with running(folder, world) as made:
        await until(lambda: bool(made.router.engines["pol_main"].backends.up))
        made.router.heartbeat()
        for tier in ("interactive", "interactive", "standard", "no-such-tier"):
            body = {"inputs": "a b c", "parameters": {"max_new_tokens": 9}}
            await Peer(made, "/generate_stream", body, headers={"x-fairlane-tier": tier}).wait()
        return msgspec.json.encode(made.router.heartbeat())


def test_what_a_real_router_served_is_on_the_page(
    tmp_path: Path, viewer_client: Client, system: Actor, router: tuple[Router, dict[str, str]]
) -> None:
    body = asyncio.run(served(tmp_path))
    beat = msgspec.json.decode(body, type=Heartbeat)
    answer = Client().post(HEARTBEAT_PATH, body, content_type="application/json", headers=router[1])
    assert answer.status_code == 204
    page = shown(viewer_client)
    (now,) = pools_now({beat.router: beat}).values()
    fast = now.tiers["interactive"]
    p50, p95, p99 = (f"{value:,.0f} ms" for value in fast.percentiles_ms if value is not None)
    assert f"interactive 0 2 {p50} {p95} {p99} 1 s 100.0%" in page
    assert re.search(r"standard 0 1 \d+ ms \d+ ms \d+ ms none –", page)
    assert "ten_alice 0 0 15 100% of 100%" in page
    assert "Refused or expired in the last 0 seconds: tier_not_allowed 1." in page
