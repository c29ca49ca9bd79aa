"""Limits and quotas of tenants and keys: one set of rules for use cases, REST, database and snapshot."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from django.db import IntegrityError, transaction

from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor
from controlplane.common.errors import Invalid
from controlplane.common.limits import LIMITS, MAX_LIMIT, QUOTAS
from controlplane.keys.actions import update_key
from controlplane.keys.models import ApiKey
from controlplane.rollout.queries import current_body
from controlplane.tenants.actions import update_tenant
from controlplane.tenants.models import Tenant
from router_ext.wire.controlplane import ConfigSnapshot, LimitsRecord
from tests.support.control_plane import ApiClient, make_key, make_pool, make_tenant

pytestmark = pytest.mark.django_db
SOME = {"concurrent": 4, "tokens_per_minute": 0, "soft_tokens_per_day": 800, "tokens_per_day": 1_000}


def published() -> ConfigSnapshot:
    return msgspec.json.decode(current_body()[2], type=ConfigSnapshot)


def test_limits_are_published_as_they_were_given(system: Actor) -> None:
    tenant = make_tenant(system, limits=SOME)
    key, _ = make_key(system, tenant, make_pool(system), limits={"requests_per_minute": MAX_LIMIT})
    make_tenant(system)
    snapshot = published()
    assert [t.limits for t in snapshot.tenants] == [LimitsRecord(**SOME), LimitsRecord()]
    assert [k.limits for k in snapshot.keys] == [LimitsRecord(requests_per_minute=MAX_LIMIT)]
    for name in LIMITS:  # each column is its own field of the record
        update_key(actor=system, key_id=key.id, limits={n: 7 if n == name else None for n in LIMITS})
        assert published().keys[0].limits == LimitsRecord(**{name: 7})


def test_what_is_left_out_stays_and_none_takes_a_limit_away(system: Actor) -> None:
    tenant = make_tenant(system, limits=SOME)
    update_tenant(actor=system, tenant_id=tenant.id, limits={"concurrent": None, "tokens_per_month": 5})
    update_tenant(actor=system, tenant_id=tenant.id, weight=2.0)
    left = {name: value for name, value in SOME.items() if name != "concurrent"}
    assert published().tenants[0].limits == LimitsRecord(**left, tokens_per_month=5)


def test_a_change_of_limits_is_audited_with_before_and_after(system: Actor) -> None:
    tenant = make_tenant(system)
    update_tenant(actor=system, tenant_id=tenant.id, limits={"tokens_per_day": 0})
    entry = AuditEntry.objects.get(action="tenant.updated")
    assert (entry.before, entry.after) == ({"limits": {}}, {"limits": {"tokens_per_day": 0}})
    update_tenant(actor=system, tenant_id=tenant.id, limits={"tokens_per_day": 0})
    assert AuditEntry.objects.filter(action="tenant.updated").count() == 1


@pytest.mark.parametrize(
    ("limits", "field", "words"),
    [
        ({"concurrent": -1}, "concurrent", ("-1", "from 0 to 1,000,000,000,000,000")),
        ({"tokens_per_month": MAX_LIMIT + 1}, "tokens_per_month", ("1000000000000001", "from 0 to")),
        ({"soft_tokens_per_day": 11, "tokens_per_day": 10}, "soft_tokens_per_day", ("11", "from 0 to", "10")),
        ({"soft_tokens_per_month": 1, "tokens_per_month": 0}, "soft_tokens_per_month", ("1", "0")),
        ({"tokens_per_year": 1}, "tokens_per_year", LIMITS),
    ],
)
@pytest.mark.parametrize("kind", ["tenant", "key"])
def test_a_limit_that_cannot_be_is_refused_by_value_and_range(
    system: Actor, kind: str, limits: dict[str, int], field: str, words: tuple[str, ...]
) -> None:
    tenant, pool = make_tenant(system), make_pool(system)
    key, _ = make_key(system, tenant, pool)
    attempts: list[Any] = [
        lambda: make_tenant(system, limits=limits),
        lambda: update_tenant(actor=system, tenant_id=tenant.id, limits=limits),
    ]
    if kind == "key":
        attempts = [
            lambda: make_key(system, tenant, pool, limits=limits),
            lambda: update_key(actor=system, key_id=key.id, limits=limits),
        ]
    for attempt in attempts:
        with pytest.raises(Invalid) as refused:
            attempt()
        assert list(refused.value.fields) == [f"limits.{field}"]
        assert all(word in refused.value.message for word in words)


def test_a_soft_quota_is_held_against_the_hard_one_that_stands(system: Actor) -> None:
    tenant = make_tenant(system, limits={"tokens_per_day": 10, "soft_tokens_per_month": 5})
    for changes in ({"soft_tokens_per_day": 11}, {"tokens_per_month": 4}):
        with pytest.raises(Invalid):
            update_tenant(actor=system, tenant_id=tenant.id, limits=changes)
    # Equal is fine, and a day may have more than its month.
    update_tenant(actor=system, tenant_id=tenant.id, limits={"soft_tokens_per_day": 10, "tokens_per_month": 5})


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", [-1, MAX_LIMIT + 1])
def test_the_database_holds_every_limit_to_its_range(system: Actor, name: str, value: int) -> None:
    tenant = make_tenant(system)
    make_key(system, tenant, make_pool(system))
    for rows in (Tenant.objects, ApiKey.objects):
        with pytest.raises(IntegrityError, match="limits_range"), transaction.atomic():
            rows.update(**{name: value})


@pytest.mark.parametrize("span", ["day", "month"])
def test_the_database_holds_soft_quotas_below_hard_ones(system: Actor, span: str) -> None:
    make_tenant(system)
    with pytest.raises(IntegrityError, match="soft_below_hard"), transaction.atomic():
        Tenant.objects.update(**{f"soft_tokens_per_{span}": 2, f"tokens_per_{span}": 1})


def test_limits_by_rest_are_set_shown_changed_and_taken_away(api: ApiClient, system: Actor) -> None:
    pool = make_pool(system)
    tenant = make_tenant(system)
    body = {"name": "A", "slug": "a", "tiers": ["standard"], "default_tier": "standard", "limits": SOME}
    made = api.send("POST", "/tenants", body).json()
    assert made["limits"] == {name: SOME.get(name) for name in LIMITS}
    path = f"/tenants/{made['id']}"
    changed = api.send("PATCH", path, {"limits": {"tokens_per_day": None, "concurrent": 5}}).json()
    assert changed["limits"] == {**made["limits"], "tokens_per_day": None, "concurrent": 5}
    assert api.send("GET", path).json()["limits"] == changed["limits"]
    key = {"tenant": tenant.id, "name": "k", "default_pool": pool.id, "limits": {"tokens_per_month": 9}}
    issued = api.send("POST", "/keys", key).json()
    assert issued["limits"] == {name: 9 if name == "tokens_per_month" else None for name in LIMITS}
    shown = api.send("PATCH", f"/keys/{issued['id']}", {"limits": {"tokens_per_month": 0}}).json()
    assert shown["limits"]["tokens_per_month"] == 0


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"concurrent": -1}, "limits.concurrent"),
        ({"tokens_per_day": 1.5}, "limits.tokens_per_day"),
        ({"tokens_per_year": 1}, "limits.tokens_per_year"),
        ({"soft_tokens_per_day": 2, "tokens_per_day": 1}, "limits.soft_tokens_per_day"),
        (None, "limits"),
    ],
)
def test_a_bad_limit_by_rest_is_422_under_its_name(api: ApiClient, system: Actor, limits: Any, field: str) -> None:
    answer = api.send("PATCH", f"/tenants/{make_tenant(system).id}", {"limits": limits})
    assert (answer.status_code, list(answer.json()["errors"])) == (422, [field])


def test_the_schema_says_what_each_limit_may_be(client: Any) -> None:
    schemas = client.get("/api/v1/openapi.json").json()["components"]["schemas"]
    for name in ("Limits", "LimitsRequest"):
        assert set(schemas[name]["properties"]) == set(LIMITS)
        assert all(p["maximum"] == MAX_LIMIT and p["minimum"] == 0 for p in schemas[name]["properties"].values())
    assert set(QUOTAS) == {name for name in LIMITS if "_day" in name or "_month" in name}


def test_limits_cost_a_change_no_query(system: Actor, django_assert_max_num_queries: Any) -> None:
    pool = make_pool(system)
    tenant = make_tenant(system, limits=SOME)
    for _ in range(10):
        make_key(system, make_tenant(system, limits=SOME), pool, limits=SOME)
    with django_assert_max_num_queries(30):
        update_tenant(actor=system, tenant_id=tenant.id, limits={"concurrent": 9})
