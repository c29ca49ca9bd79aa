"""What two connections do at once: creates sent twice, revisions published side by side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from django.db import connection

from controlplane.audit.actions import record
from controlplane.common.actor import Actor
from controlplane.rollout.models import Revision
from controlplane.tenants.actions import update_tenant
from controlplane.tenants.models import Tenant
from controlplane.tiers.models import Tier
from router_ext.wire.controlplane import ConfigSnapshot
from tests.support.control_plane import api_client, make_tenant, make_tier, make_user

pytestmark = pytest.mark.usefixtures("committed_db")


def side_by_side(tasks: list[Any]) -> list[Any]:
    """Run each in a thread of its own, with a connection of its own."""

    def run(task: Any) -> Any:
        try:
            return task()
        finally:
            connection.close()

    with ThreadPoolExecutor(len(tasks)) as pool:
        return [f.result(timeout=60) for f in [pool.submit(run, t) for t in tasks]]


def test_creates_sent_at_once_under_one_key_create_once() -> None:
    user = make_user()
    clients = [api_client(user)] * 8
    body = {"name": "once", "rank": 1}
    answers = side_by_side([lambda c=c: c.send("POST", "/tiers", body, idempotency_key="k") for c in clients])
    assert {a.status_code for a in answers} == {201}
    assert all(a.json() == answers[0].json() for a in answers)
    assert Tier.objects.count() == 1


def test_revisions_published_side_by_side_are_monotone_and_miss_nothing(system: Actor) -> None:
    """Each revision carries its own change and every one before it; the last equals the rows."""
    make_tier(system, "standard")
    tenants = [make_tenant(system) for _ in range(8)]
    first = Revision.objects.count()

    def change(tenant: Tenant) -> None:
        for step in range(1, 6):
            update_tenant(actor=system, tenant_id=tenant.id, weight=float(step + 1))

    side_by_side([lambda t=t: change(t) for t in tenants])
    rows = list(Revision.objects.order_by("number"))
    assert [r.number for r in rows] == list(range(1, len(rows) + 1))
    assert len(rows) == first + 8 * 5
    weights: dict[str, float] = {}
    for row in rows[first - 1 :]:
        snapshot = msgspec.json.decode(bytes(row.body), type=ConfigSnapshot)
        now = {t.tenant: t.weight for t in snapshot.tenants}
        assert all(now[t] >= w for t, w in weights.items())
        assert not weights or sum(now.values()) == sum(weights.values()) + 1
        weights = now
    assert weights == dict(Tenant.objects.values_list("id", "weight"))


def test_an_audit_entry_outside_a_transaction_is_a_defect(system: Actor) -> None:
    with pytest.raises(RuntimeError):
        record(actor=system, action="x", object_type="x", object_id="x")
