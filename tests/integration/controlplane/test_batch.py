"""``POST /api/v1/batch``: each operation as by itself, all of them one transaction and one revision."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from controlplane.accounts.models import User
from controlplane.api.batch import MAX_OPERATIONS
from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor
from controlplane.rollout import actions as rollout
from controlplane.rollout.models import Revision
from controlplane.tenants.models import Group, Tenant
from controlplane.tiers.models import Tier
from tests.support.control_plane import ApiClient, api_client, make_key, make_pool, make_tenant, make_user

pytestmark = pytest.mark.django_db


def op(method: str, path: str, body: Any = None, **headers: str) -> dict[str, Any]:
    return {"method": method, "path": path, "body": body, **headers}


def test_what_one_operation_refuses_undoes_that_one_only(api: ApiClient, system: Actor) -> None:
    tenant = make_tenant(system)
    revisions = Revision.objects.count()
    operations = [
        op("POST", "/tiers", {"name": "fast", "rank": 1}, idempotency_key="k"),
        op("POST", "/tiers", {"name": "fast", "rank": 2}),
        op("PATCH", f"/tenants/{tenant.id}", {"tiers": ["fast"], "default_tier": "fast"}, if_match='"1"'),
        op("PATCH", f"/tenants/{tenant.id}", {"weight": 3}, if_match='"1"'),
        op("POST", f"/tenants/{tenant.id}/suspend", {}, if_match='"2"'),
        op("DELETE", f"/tenants/{tenant.id}", if_match='"3"'),
        op("POST", "/groups", {"name": "A B"}),
        op("PUT", "/nothing", {}),
        op("PUT", "/groups", {}),
        op("POST", "/tiers", {"name": "fast", "rank": 1}, idempotency_key="k"),
    ]
    answer = api.send("POST", "/batch", {"operations": operations})
    assert answer.status_code == 200, answer.content
    results = answer.json()["results"]
    assert [r["status"] for r in results] == [201, 409, 200, 412, 200, 204, 422, 404, 405, 201]
    assert (results[0]["body"]["name"], results[5]["body"]) == ("fast", None)
    assert list(results[6]["body"]["errors"]) == ["name"]
    assert results[9]["body"]["id"] == results[0]["body"]["id"]
    assert not Tenant.objects.filter(deleted_at=None).exists()
    assert Revision.objects.count() == revisions + 1
    assert Revision.objects.latest("number").reason == "; ".join(
        ["tier fast created", *(f"tenant {tenant.slug} {how}" for how in ("updated", "suspended", "deleted"))]
    )
    assert [e.action for e in AuditEntry.objects.order_by("-id")[:4]] == [
        "tenant.deleted", "tenant.suspended", "tenant.updated", "tier.created"
    ]  # fmt: skip


def test_a_configuration_that_routers_would_refuse_undoes_all(api: ApiClient, system: Actor) -> None:
    tenant = make_tenant(system, tiers=["standard", "batch"])
    make_key(system, tenant, make_pool(system), tiers=["batch"])
    operations = [
        op("POST", "/groups", {"name": "new"}), op("PATCH", f"/tenants/{tenant.id}", {"tiers": ["standard"]})
    ]  # fmt: skip
    answer = api.send("POST", "/batch", {"operations": operations})
    assert (answer.status_code, answer.json()["code"]) == (422, "config_refused")
    assert not Group.objects.exists()


def test_each_operation_asks_for_its_own_scope(system: Actor, operator: User) -> None:
    mine = make_tenant(system)
    admin = make_user(role="tenant_admin", tenant=mine.id)
    pool = make_pool(system)
    operations = [
        op("POST", "/keys", {"tenant": mine.slug, "name": "new", "default_pool": pool.name}),
        op("PATCH", f"/tenants/{mine.id}", {"weight": 9}),
        op("POST", "/tiers", {"name": "fast", "rank": 1}),
    ]
    answer = api_client(admin, "tenant.write").send("POST", "/batch", {"operations": operations})
    assert [r["status"] for r in answer.json()["results"]] == [201, 404, 404]
    answer = api_client(operator, "admin.write").send(
        "POST", "/batch", {"operations": [op("POST", "/invitations", {"email": "a@example.test", "role": "viewer"})]}
    )
    assert [r["status"] for r in answer.json()["results"]] == [403]
    assert api_client(operator, "admin.read").send("POST", "/batch", {"operations": operations}).status_code == 403


def test_a_session_needs_its_csrf_token(operator: User) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(operator)
    body = {
        "data": {"operations": [op("POST", "/tiers", {"name": "x", "rank": 1})]}, "content_type": "application/json"
    }  # fmt: skip
    assert client.post("/api/v1/batch", **body).status_code == 403
    client.cookies["fairlane_csrf"] = "a" * 32
    answer = client.post("/api/v1/batch", headers={"x-csrftoken": "a" * 32}, **body)
    assert [r["status"] for r in answer.json()["results"]] == [201]


@pytest.mark.parametrize(
    "operation",
    [
        op("GET", "/tiers"), op("POST", "/batch", {"operations": []}), op("POST", "tiers", {}),
        op("POST", "/tiers?limit=1", {}), {**op("POST", "/tiers"), "headers": {}}, {"method": "POST"},
    ],
)  # fmt: skip
def test_what_is_no_operation_is_named_and_nothing_is_done(api: ApiClient, operation: Any) -> None:
    good = op("POST", "/tiers", {"name": "x", "rank": 1})
    answer = api.send("POST", "/batch", {"operations": [good, operation]})
    assert answer.status_code == 422
    assert all(name.startswith("operations.1.") for name in answer.json()["errors"]), answer.content
    assert not Tier.objects.exists()


def test_there_is_a_most_of_operations(api: ApiClient) -> None:
    good = op("POST", "/tiers", {"name": "x", "rank": 1})
    for operations in ([], [good] * (MAX_OPERATIONS + 1)):
        assert api.send("POST", "/batch", {"operations": operations}).status_code == 422


def test_many_reasons_are_counted(api: ApiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    operations = [op("POST", "/groups", {"name": f"g{n}"}) for n in range(13)]
    built = []
    build = rollout.build_snapshot
    monkeypatch.setattr(rollout, "build_snapshot", lambda **given: built.append(1) or build(**given))
    api.send("POST", "/batch", {"operations": operations})
    assert Revision.objects.latest("number").reason.endswith("fairness group g9 created; and 3 more")
    assert built == [1]
