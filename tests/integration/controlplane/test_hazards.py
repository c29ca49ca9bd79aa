"""Hazards: told by heartbeats, kept once, listed, seen to, forgotten after 90 days."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.test import Client

from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor, system_actor
from controlplane.common.clock import to_us, utc_now
from controlplane.fleet import hazards
from controlplane.fleet.models import Hazard, Router
from controlplane.rollout.queries import current_number
from router_ext.wire.controlplane import HEARTBEAT_PATH, Heartbeat
from tests.support.control_plane import ApiClient, hazard_record, make_backend, make_hazard, make_pool, tell

pytestmark = pytest.mark.django_db

SYSTEM = system_actor("test")


def test_a_hazard_told_many_times_is_one_row_with_its_pool(system: Actor, api: ApiClient) -> None:
    pool = make_pool(system)
    backend = make_backend(system, pool)
    told = hazard_record(backend=backend.id, kind="freeze")
    tell(told)
    first = Hazard.objects.get()
    tell(told, hazard_record())
    assert Hazard.objects.count() == 2
    shown = api.send("GET", f"/hazards/{told.hazard}").json()
    assert shown.items() >= {
        "state": "open", "kind": "freeze", "pool": pool.id, "backend": backend.id, "tenant": told.tenant,
        "key": told.key, "request": told.request, "digest": told.digest, "router": "rtr_host", "version": 1,
    }.items()  # fmt: skip
    assert to_us(first.at) == told.at_us
    assert to_us(first.refused_until) == told.refused_until_us


def test_a_heartbeat_without_a_fresh_hazard_writes_none(django_assert_num_queries: Any) -> None:
    told = hazard_record()
    tell(told)
    beat = Heartbeat(router="r", version="", address="", applied_revision=0, applied_at_us=0)
    with django_assert_num_queries(0):
        assert hazards.take_hazards(beat) == 0
    with django_assert_num_queries(1):
        assert hazards.take_hazards(msgspec.structs.replace(beat, hazards=[told])) == 0


def test_a_hazard_of_a_backend_that_is_gone_is_kept_without_a_pool() -> None:
    assert make_hazard(backend="bkd_gone").pool == ""


@pytest.mark.parametrize("field", [{"refused_until_us": 10**18}, {"request": "a\0b"}])
def test_a_hazard_that_no_row_can_hold_is_refused(router: tuple[Router, dict[str, str]], field: dict[str, Any]) -> None:
    beat = Heartbeat(
        router="r", version="", address="", applied_revision=0, applied_at_us=0, hazards=[hazard_record(**field)]
    )
    body = msgspec.json.encode(beat)
    answer = Client().post(HEARTBEAT_PATH, body, content_type="application/json", headers=router[1])
    assert answer.status_code == 422


def test_hazards_are_filtered_and_paged(api: ApiClient) -> None:
    rows = [make_hazard(tenant=f"ten_{n % 2}", kind=("death", "batch")[n // 2], request=f"req_{n}") for n in range(4)]
    hazards.resolve_hazard(actor=SYSTEM, hazard_id=rows[0].id, note="seen to")

    def found(query: str) -> list[str]:
        answer = api.send("GET", f"/hazards?{query}")
        assert answer.status_code == 200
        return [each["request"] for each in answer.json()["results"]]

    assert found("tenant=ten_1") == ["req_3", "req_1"]
    assert found("kind=death&tenant=ten_0") == ["req_0"]
    assert found("state=open") == ["req_3", "req_2", "req_1"]
    assert found("state=resolved") == ["req_0"]
    assert api.send("GET", "/hazards?tenant=%00ten_1").status_code == 422
    page = api.send("GET", "/hazards?limit=3").json()
    assert found(f"limit=3&cursor={page['next']}") == ["req_0"]
    answer = api.send("GET", "/hazards?state=gone")
    assert (answer.status_code, list(answer.json()["errors"])) == (422, ["state"])


def test_a_hazard_is_seen_to_once_and_audited(api: ApiClient) -> None:
    row = make_hazard()
    number = current_number()
    path = f"/hazards/{row.id}/resolve"
    assert api.send("POST", path, {"note": " "}).status_code == 422
    assert api.send("POST", path, {"note": "x"}, if_match='"7"').status_code == 412
    answer = api.send("POST", path, {"note": "key revoked"}, if_match='"1"')
    assert (answer.json()["state"], answer.json()["note"], answer.headers["etag"]) == ("resolved", "key revoked", '"2"')
    entry = AuditEntry.objects.get(action="hazard.resolved")
    assert (entry.object_id, entry.tenant) == (row.id, row.tenant)
    assert entry.after is not None
    assert entry.before == {"resolved_at": None, "resolved_by": "", "note": ""}
    assert entry.after["note"] == "key revoked"
    assert api.send("POST", path, {"note": "again"}).json()["note"] == "key revoked"
    assert AuditEntry.objects.filter(action="hazard.resolved").count() == 1
    assert current_number() == number, "routers need not know"
    assert api.send("POST", "/hazards/evt_none/resolve", {"note": "x"}).status_code == 404


def test_one_that_is_told_again_after_it_was_seen_to_stays_so() -> None:
    told = hazard_record()
    tell(told)
    hazards.resolve_hazard(actor=SYSTEM, hazard_id=told.hazard, note="x")
    tell(told)
    assert hazards.n_open() == 0


def test_hazards_are_forgotten_after_90_days_though_a_router_still_tells_of_them() -> None:
    now = utc_now()
    old = hazard_record(at_us=to_us(now - timedelta(days=90, minutes=1)))
    young = hazard_record(at_us=to_us(now - timedelta(days=89)))
    tell(old, young)
    assert list(Hazard.objects.values_list("id", flat=True)) == [young.hazard]
    assert hazards.forget_old_hazards() == 0
    assert hazards.forget_old_hazards(now=now + timedelta(days=2)) == 1
