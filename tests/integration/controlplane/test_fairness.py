"""The fairness bound of a pool: as configured, as a live router has it, in service and in seconds of GPU time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from django.test import Client
from django.urls import reverse

from controlplane.accounts.models import User
from controlplane.common.actor import Actor
from controlplane.fleet.models import Pool, Router
from controlplane.fleet.routers import take_heartbeat
from controlplane.rollout.queries import current_body
from controlplane.tenants.models import Tenant
from router_ext.core.bounds import terms
from router_ext.core.config import build_pool
from router_ext.wire.controlplane import BoundTerms, ConfigSnapshot, Heartbeat, PoolState
from tests.support.control_plane import ApiClient, make_backend, make_group, make_pool, make_tenant, make_tier

pytestmark = pytest.mark.django_db


@pytest.fixture
def pool(system: Actor) -> Pool:
    """10,000 usable tokens of KV, two tenants of weight 1 and 4, a tier with a target."""
    made = make_pool(system)
    make_backend(system, made, kv_tokens=10_001)
    make_tier(system, "chat", ttft_target_s=0.5)
    make_tenant(system, name="Light", slug="light", weight=1.0)
    make_tenant(system, name="Heavy", slug="heavy", weight=4.0)
    return made


def beat(router: Router, pool: Pool, instance: str = "rtr_1", **fields: Any) -> None:
    state = PoolState(pool=pool.id, policy=pool.policy, **fields)
    heartbeat = Heartbeat(
        router=instance, version="1", address="127.0.0.1:1", applied_revision=1, applied_at_us=0, pools=[state]
    )
    take_heartbeat(router=router, heartbeat=heartbeat)


def fairness(api: ApiClient, pool: Pool, query: str = "") -> dict[str, Any]:
    answer = api.send("GET", f"/pools/{pool.id}/fairness{query}")
    assert answer.status_code == 200, answer.content
    return dict(answer.json())


def test_without_a_router_the_bound_is_that_of_the_rows(api: ApiClient, pool: Pool) -> None:
    shown = fairness(api, pool)
    assert (shown["policy"], shown["cost_model"], shown["is_bounded"]) == ("slo-fair", "linear", True)
    assert (shown["source"], shown["unstated"], shown["routers"]) == ("configuration", [], [])
    assert shown["bound_service"] == pytest.approx(2 * 10_002 * 1.3)
    assert (shown["service_per_gpu_s"], shown["bound_gpu_s"]) == (None, None)
    services = {term["name"]: term["service"] for term in shown["terms"]}
    assert services == {
        "U'": pytest.approx(20_004),
        "S": pytest.approx(1_000.2),
        "urgency pass": pytest.approx(5_001),
        "backfill pass": pytest.approx(400.08),
        "bound": pytest.approx(26_005.2),
    }
    by_tenant = {each["name"]: each for each in shown["tenants"]}
    assert by_tenant["Heavy"]["counter_bound"] == pytest.approx(26_005.2 / 4)
    assert by_tenant["Heavy"]["bound_service"] == by_tenant["Light"]["bound_service"] == pytest.approx(26_005.2)


def test_the_bound_shown_is_that_of_the_published_configuration(api: ApiClient, pool: Pool) -> None:
    body = {"scheduling": {"burst_ratio": 1.0, "gamma": 0.5, "w_output": 3.0}}
    assert api.send("PATCH", f"/pools/{pool.id}", body).status_code == 200
    snapshot = msgspec.json.decode(current_body()[2], type=ConfigSnapshot)
    record = next(record for record in snapshot.pools if record.pool == pool.id)
    config = build_pool(
        pool=record.scheduling,
        backends=[msgspec.to_builtins(backend) for backend in record.backends],
        tiers=[msgspec.to_builtins(tier) for tier in snapshot.tiers],
        tenants=[msgspec.to_builtins(tenant) for tenant in snapshot.tenants],
    )
    stated = terms(config)
    assert stated is not None
    shown = fairness(api, pool)
    assert shown["bound_service"] == pytest.approx(stated.bound_service)
    assert "work in flight" in [term["name"] for term in shown["terms"]]


def test_a_live_router_tells_what_is_in_force_and_what_it_has_measured(
    api: ApiClient, pool: Pool, router: tuple[Router, dict[str, str]]
) -> None:
    stated = BoundTerms(
        peak_service=8_000.0,
        pool_tokens=4_000,
        longest_prompt=1_000,
        passes={"urgency": 2_000.0, "backfill": 400.0},
        lightest_weight=1.0,
        heaviest_weight=4.0,
    )
    beat(router[0], pool, bound_service=10_000.0, largest_gap_service=6_000.0, bound_terms=stated)
    shown = fairness(api, pool)
    assert (shown["source"], shown["bound_service"], shown["bound_gpu_s"]) == ("router", 10_000.0, None)
    assert shown["routers"][0]["largest_gap_gpu_s"] is None
    measured = {"bound_service": 10_000.0, "largest_gap_service": 6_000.0, "bound_terms": stated}
    beat(router[0], pool, service_per_gpu_s=500.0, **measured)
    beat(router[0], pool, instance="rtr_2", service_per_gpu_s=400.0, **measured)
    shown = fairness(api, pool)
    assert (shown["service_per_gpu_s"], shown["bound_gpu_s"]) == (400.0, 25.0)
    assert [(r["router"], r["bound_gpu_s"], r["largest_gap_gpu_s"]) for r in shown["routers"]] == [
        ("rtr_1", 20.0, 12.0),
        ("rtr_2", 25.0, 15.0),
    ]
    assert shown["terms"][0]["gpu_s"] == 20.0
    assert "4,000 tokens of KV" in shown["terms"][0]["text"]


def test_of_two_tenants_the_bound_is_the_sum_of_theirs(api: ApiClient, pool: Pool) -> None:
    light, heavy = Tenant.objects.get(slug="light"), Tenant.objects.get(slug="heavy")
    shown = fairness(api, pool, f"?first={light.id}&second={heavy.id}")
    assert shown["pair"]["pair_bound"] == pytest.approx(26_005.2 * 1.25)
    assert fairness(api, pool)["pair"] is None
    answer = api.send("GET", f"/pools/{pool.id}/fairness?first={light.id}")
    assert (answer.status_code, list(answer.json()["errors"])) == (422, ["second"])
    assert api.send("GET", f"/pools/{pool.id}/fairness?first={light.id}&second=ten_x").status_code == 404
    assert api.send("GET", "/pools/pool_x/fairness").status_code == 404


def test_a_backend_without_stated_kv_leaves_the_bound_unknown(api: ApiClient, pool: Pool, system: Actor) -> None:
    make_backend(system, pool, name="large", kv_tokens=None)
    shown = fairness(api, pool)
    assert (shown["is_bounded"], shown["unstated"], shown["bound_service"]) == (True, ["large"], None)
    assert (shown["terms"], shown["tenants"]) == ([], [])


def test_a_policy_that_promises_nothing_shows_no_bound(
    api: ApiClient, pool: Pool, router: tuple[Router, dict[str, str]]
) -> None:
    api.send("PATCH", f"/pools/{pool.id}", {"policy": "fifo"})
    pool.refresh_from_db()
    beat(router[0], pool, largest_gap_service=3_000.0, service_per_gpu_s=100.0)
    shown = fairness(api, pool)
    assert (shown["is_bounded"], shown["bound_service"], shown["terms"]) == (False, None, [])
    assert shown["routers"][0]["largest_gap_gpu_s"] == 30.0


def test_the_console_shows_the_same(operator: User, pool: Pool, router: tuple[Router, dict[str, str]]) -> None:
    client = Client()
    client.force_login(operator)
    page = client.get(reverse("console:pool", args=[pool.id])).content.decode()
    assert "26,005" in page
    assert "not measured yet" in page
    light, heavy = Tenant.objects.get(slug="light"), Tenant.objects.get(slug="heavy")
    address = reverse("console:pool_fairness", args=[pool.id])
    page = client.get(f"{address}?first={light.id}&second={heavy.id}").content.decode()
    assert "32,507" in page
    for name in ("U&#x27;", "urgency pass", "backfill pass", "Heavy"):
        assert name in page
    beat(router[0], pool, largest_gap_service=6_000.0, service_per_gpu_s=500.0, bound_service=10_000.0)
    assert "12.0 s of GPU time" in client.get(reverse("console:live_fragment")).content.decode()
    assert client.get(f"{address}?first=nobody&second=nobody").status_code == 200


def test_members_of_a_group_are_bounded_among_themselves_and_the_group_among_the_others(
    api: ApiClient, system: Actor, pool: Pool
) -> None:
    make_group(system, name="research", weight=10.0)
    first = make_tenant(system, name="First", weight=1.0, group="research")
    second = make_tenant(system, name="Second", weight=2.0, group="research")
    light = Tenant.objects.get(slug="light")
    shown = fairness(api, pool, f"?first={first.id}&second={second.id}")
    by_tenant = {each["name"]: each for each in shown["tenants"]}
    assert (by_tenant["Second"]["group"], by_tenant["Light"]["group"]) == ("research", None)
    assert by_tenant["Second"]["counter_bound"] == pytest.approx(26_005.2 / 2)
    assert shown["pair"]["pair_bound"] == pytest.approx(26_005.2 * 1.5)
    shown = fairness(api, pool, f"?first={first.id}&second={light.id}")
    assert shown["pair"]["pair_bound"] == pytest.approx(26_005.2 * 1.1)
