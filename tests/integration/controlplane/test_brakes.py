"""Operator's brakes and the guard's settings: published at once, audited with a reason, taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.db import IntegrityError
from django.test import Client
from django.urls import reverse

from controlplane.accounts.models import Role, User
from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor
from controlplane.common.clock import utc_now
from controlplane.common.errors import Conflict, Invalid, NotAllowed, NotFound, VersionMismatch
from controlplane.fleet import brakes
from controlplane.fleet.actions import update_backend, update_pool
from controlplane.fleet.models import Backend, Cancellation
from controlplane.rollout.models import Revision
from controlplane.rollout.queries import current_body, current_number
from controlplane.tenants.actions import resume_tenant, stop_tenant, update_tenant
from controlplane.tiers.actions import update_tier
from controlplane.usage import ingest
from router_ext.wire.controlplane import (
    BackendState,
    ConfigSnapshot,
    LiveRequest,
    OwnCancellation,
    PoolState,
    UsageBatch,
    UsageEvent,
)
from tests.support.control_plane import (
    ApiClient,
    api_client,
    make_backend,
    make_pool,
    make_tenant,
    make_tier,
    make_user,
    tell,
    usage_event,
)

pytestmark = pytest.mark.django_db


def published() -> ConfigSnapshot:
    return msgspec.json.decode(current_body()[2], type=ConfigSnapshot)


def last_entry() -> AuditEntry:
    return AuditEntry.objects.order_by("-id")[0]


# --- settings --------------------------------------------------------------------------------------------------------


def test_what_guards_a_pool_reaches_the_snapshot(system: Actor, api: ApiClient) -> None:
    pool = make_pool(system)
    (row,) = published().pools
    assert (row.is_guarded, row.vocabulary, row.takes_grammars) == (True, 131_072, True)
    body = {"is_guarded": False, "vocabulary": 49_152, "takes_grammars": False}
    answer = api.send("PATCH", f"/pools/{pool.id}", body)
    assert body.items() <= answer.json().items()
    (row,) = published().pools
    assert (row.is_guarded, row.vocabulary, row.takes_grammars) == (False, 49_152, False)
    assert last_entry().before == {"is_guarded": True, "vocabulary": 131_072, "takes_grammars": True}


def test_a_backend_can_be_kept_free_of_grammars(system: Actor, api: ApiClient) -> None:
    backend = make_backend(system, make_pool(system))
    assert api.send("PATCH", f"/backends/{backend.id}", {"takes_grammars": False}).status_code == 200
    assert [b.takes_grammars for b in published().pools[0].backends] == [False]


@pytest.mark.parametrize("stall", [0, 0.5, 60, None])
def test_a_tier_says_how_long_a_grammar_may_stall(system: Actor, api: ApiClient, stall: float | None) -> None:
    tier = make_tier(system, "standard", grammar_stall_s=1.0)
    answer = api.send("PATCH", f"/tiers/{tier.id}", {"rank": tier.rank, "grammar_stall_s": stall})
    assert answer.json()["grammar_stall_s"] == stall
    assert [t.grammar_stall_s for t in published().tiers] == [stall]


@pytest.mark.parametrize("stall", [-0.1, 60.1, float("nan"), float("inf")])
def test_a_stall_out_of_range_is_named_with_its_range(system: Actor, stall: float) -> None:
    tier = make_tier(system, "standard")
    with pytest.raises(Invalid, match=rf"grammar_stall_s: must be from 0 to 60, not {stall}"):
        update_tier(actor=system, tier_id=tier.id, grammar_stall_s=stall)


@pytest.mark.parametrize("vocabulary", [0, 10_000_001])
def test_a_vocabulary_out_of_range_is_named_with_its_range(system: Actor, api: ApiClient, vocabulary: int) -> None:
    pool = make_pool(system)
    with pytest.raises(Invalid, match=rf"vocabulary: must be from 1 to 10,000,000, not {vocabulary}"):
        update_pool(actor=system, pool_id=pool.id, vocabulary=vocabulary)
    answer = api.send("PATCH", f"/pools/{pool.id}", {"vocabulary": vocabulary})
    assert (answer.status_code, list(answer.json()["errors"])) == (422, ["vocabulary"])


# --- a backend -------------------------------------------------------------------------------------------------------


def test_a_backend_is_drained_and_uncordoned(system: Actor, api: ApiClient) -> None:
    backend = make_backend(system, make_pool(system))
    answer = api.send("POST", f"/backends/{backend.id}/drain", {"reason": "new  disks"}, if_match='"1"')
    assert (answer.json()["is_cordoned"], answer.json()["is_drained"], answer.headers["etag"]) == (True, True, '"2"')
    (stated,) = published().pools[0].backends
    assert (stated.is_cordoned, stated.is_drained) == (True, True)
    entry = last_entry()
    assert entry.before == {"is_cordoned": False, "is_drained": False}
    assert entry.after == {"is_cordoned": True, "is_drained": True, "reason": "new disks"}
    answer = api.send("POST", f"/backends/{backend.id}/uncordon", {"reason": "done"})
    assert (answer.json()["is_cordoned"], answer.json()["is_drained"]) == (False, False)
    (stated,) = published().pools[0].backends
    assert (stated.is_cordoned, stated.is_drained) == (False, False)


def test_a_backend_that_is_only_cordoned_is_drained_and_uncordoned_as_well(system: Actor) -> None:
    backend = make_backend(system, make_pool(system), is_cordoned=True)
    brakes.drain_backend(actor=system, backend_id=backend.id, reason="now")
    backend.refresh_from_db()
    assert backend.is_drained
    update_backend(actor=system, backend_id=backend.id, is_cordoned=False)
    backend.refresh_from_db()
    assert not backend.is_drained, "one that takes work is not drained"
    with pytest.raises(IntegrityError):
        Backend.objects.filter(pk=backend.id).update(is_drained=True)


def shown(api: ApiClient, backend: Backend) -> tuple[int, bool | None]:
    body = api.send("GET", f"/backends/{backend.id}/running").json()
    return body["running"], body["is_empty"]


def test_what_still_runs_on_a_backend_is_told_by_its_routers(system: Actor, api: ApiClient) -> None:
    pool = make_pool(system)
    backend, other = make_backend(system, pool), make_backend(system, pool)

    def say(router: str, state: str, running: int) -> None:
        there = BackendState(backend=backend.id, state=state, running=running, reserved_tokens=100 * running)
        busy = BackendState(backend=other.id, state="up", running=7)
        tell(pools=[PoolState(pool=pool.id, policy="fifo", backends=[there, busy])], router=router)

    assert shown(api, backend) == (0, None), "no router reports"
    say("one", "up", 0)
    assert shown(api, backend) == (0, False), "it takes work"
    brakes.drain_backend(actor=system, backend_id=backend.id, reason="now")
    assert shown(api, backend) == (0, False), "the router has not applied it"
    say("one", "cordoned", 0)
    say("two", "cordoned", 3)
    assert shown(api, backend) == (3, False)
    say("two", "cordoned", 0)
    assert shown(api, backend) == (0, True)
    say("one", "down", 0)
    assert shown(api, backend) == (0, True)


def test_requests_under_way_are_listed_the_oldest_first(system: Actor, api: ApiClient) -> None:
    assert api.send("GET", "/requests").json() == {"results": [], "next": None}
    for router, arrived_at_us in (("one", 2_000_000), ("two", 1_000_000)):
        live = LiveRequest(
            request=f"req_{router}", event="evt", tenant="ten", key="abc", tier="standard", arrived_at_us=arrived_at_us
        )
        tell(pools=[PoolState(pool="pool_a", policy="fifo", oldest=[live])], router=router)
    first, second = api.send("GET", "/requests").json()["results"]
    assert (first["request"], second["request"]) == ("req_two", "req_one")
    assert first == {
        "request": "req_two", "event": "evt", "tenant": "ten", "key": "abc", "tier": "standard", "output_tokens": 0,
        "arrived_at": "1970-01-01T00:00:01Z", "backend": None, "pool": "pool_a", "router": "two", "state": "queued",
    }  # fmt: skip


def test_a_request_is_found_before_its_end(system: Actor, operator: User, api: ApiClient) -> None:
    tenant, other = make_tenant(system, name="Web chat"), make_tenant(system)
    backend = make_backend(system, make_pool(system), name="left")
    event = usage_event(request="req_1", tenant=tenant.id)

    def live(event: UsageEvent, where: str | None) -> LiveRequest:
        return LiveRequest(
            request=event.request, event=event.event, tenant=event.tenant, key="abc", tier="standard",
            arrived_at_us=event.arrived_at_us, output_tokens=12, backend=where,
        )  # fmt: skip

    waiting = usage_event(request="req_2", tenant=other.id)
    oldest = [live(event, backend.id), live(waiting, None)]
    tell(pools=[PoolState(pool="pool_a", policy="fifo", oldest=oldest)], router="one")
    for wanted in ("req_1", event.event):
        found = api.send("GET", f"/requests/{wanted}").json()
        assert found["requests"] == []
        (row,) = found["live"]
        assert (row["event"], row["state"], row["backend"]) == (event.event, "running", backend.id)
        assert (row["tenant"], row["tier"], row["output_tokens"]) == (tenant.id, "standard", 12)
    (row,) = api.send("GET", "/requests/req_2").json()["live"]
    assert (row["state"], row["backend"]) == ("queued", None)
    client = Client()
    client.force_login(operator)
    page = client.get(reverse("console:requests"), {"id": "req_1"}).content.decode()
    assert "12 output tokens so far" in page
    assert "on left" in page
    assert "has been booked" not in page
    # Of one tenant alone, who is told of its own.
    member = replace(system, tenant=tenant.id)
    assert [each.live.event for each in brakes.under_way(actor=member)] == [event.event]
    # Once it is booked it is told once, though the heartbeat before its end may still name it.
    book = msgspec.json.encode(UsageBatch(router="one", events=[event]))
    assert ingest.ingest(ingest.decode_batch(book)).accepted == 1
    found = api.send("GET", "/requests/req_1").json()
    assert ([each["event"] for each in found["requests"]], found["live"]) == ([event.event], [])
    assert api.send("GET", "/requests/req_3").status_code == 404


# --- tenants and grammars --------------------------------------------------------------------------------------------


def test_a_tenant_is_stopped_and_goes_on(system: Actor, api: ApiClient) -> None:
    tenant = make_tenant(system)
    answer = api.send("POST", f"/tenants/{tenant.id}/stop", {"reason": "its loop"})
    assert answer.json()["state"] == "stopped"
    assert [t.state for t in published().tenants] == ["stopped"]
    entry = last_entry()
    assert (entry.tenant, entry.before) == (tenant.id, {"state": "active"})
    assert entry.after == {"state": "stopped", "reason": "its loop"}
    assert api.send("POST", f"/tenants/{tenant.id}/resume", {}).json()["state"] == "active"
    assert [t.state for t in published().tenants] == ["active"]


def test_a_suspended_tenant_is_stopped_and_resumed(system: Actor) -> None:
    tenant = make_tenant(system)
    for back in ("suspended", "stopped"):
        update_tenant(actor=system, tenant_id=tenant.id, state=back)
        assert stop_tenant(actor=system, tenant_id=tenant.id, reason="x").state == "stopped"
        assert resume_tenant(actor=system, tenant_id=tenant.id).state == "active"


def test_the_grammars_of_a_pool_are_stopped_and_allowed(system: Actor, api: ApiClient) -> None:
    pool, other = make_pool(system), make_pool(system)
    assert not api.send("POST", f"/pools/{pool.id}/stop-grammars", {"reason": "x"}).json()["takes_grammars"]
    assert {p.pool: p.takes_grammars for p in published().pools} == {pool.id: False, other.id: True}
    assert last_entry().after == {"takes_grammars": False, "reason": "x"}
    assert api.send("POST", f"/pools/{pool.id}/allow-grammars", {"reason": "fixed"}).json()["takes_grammars"]
    assert all(p.takes_grammars for p in published().pools)


BRAKES: dict[str, Callable[..., Any]] = {
    "drain": lambda actor, ids, **rest: brakes.drain_backend(actor=actor, backend_id=ids["backend"], **rest),
    "stop tenant": lambda actor, ids, **rest: stop_tenant(actor=actor, tenant_id=ids["tenant"], **rest),
    "stop grammars": lambda actor, ids, **rest: brakes.stop_grammars(actor=actor, pool_id=ids["pool"], **rest),
}


@pytest.fixture
def ids(system: Actor) -> dict[str, str]:
    pool = make_pool(system)
    return {"pool": pool.id, "backend": make_backend(system, pool).id, "tenant": make_tenant(system).id}


@pytest.mark.parametrize("name", BRAKES)
def test_a_brake_needs_a_reason_and_the_version_that_was_read(system: Actor, ids: dict[str, str], name: str) -> None:
    brake = BRAKES[name]
    number, entries = current_number(), AuditEntry.objects.count()
    for reason in ("", "  ", "a\0b", "x" * 1_001):
        with pytest.raises(Invalid) as caught:
            brake(system, ids, reason=reason)
        assert list(caught.value.fields) == ["reason"]
    with pytest.raises(VersionMismatch):
        brake(system, ids, reason="x", expected_version=9)
    with pytest.raises(NotFound):
        brake(system, dict.fromkeys(ids, "missing"), reason="x")
    assert (current_number(), AuditEntry.objects.count()) == (number, entries)


@pytest.mark.parametrize("name", BRAKES)
def test_a_brake_that_is_on_already_changes_nothing(system: Actor, ids: dict[str, str], name: str) -> None:
    first = BRAKES[name](system, ids, reason="x")
    number, entries = current_number(), AuditEntry.objects.count()
    assert BRAKES[name](system, ids, reason="again").version == first.version
    assert (current_number(), AuditEntry.objects.count()) == (number, entries)


def test_a_missing_reason_is_a_field_error(api: ApiClient, ids: dict[str, str]) -> None:
    for path in (f"/tenants/{ids['tenant']}/stop", f"/backends/{ids['backend']}/drain", "/requests/req_1/cancel"):
        answer = api.send("POST", path, {})
        assert (answer.status_code, list(answer.json()["errors"])) == (422, ["reason"]), path


# --- one request -----------------------------------------------------------------------------------------------------


def test_a_cancelled_request_is_published_and_forgotten(system: Actor, api: ApiClient) -> None:
    make_tenant(system)
    answer = api.send("POST", "/requests/trace/7%3Fx/cancel", {"reason": "never ends"}, idempotency_key="k")
    assert answer.status_code == 201
    body = answer.json()
    assert (body["request"], body["reason"]) == ("trace/7?x", "never ends")
    assert published().cancelled == ["trace/7?x"]
    assert last_entry().after == {"request": "trace/7?x", "reason": "never ends"}
    assert last_entry().object_id == "trace/7?x"
    again = api.send("POST", "/requests/trace/7%3Fx/cancel", {"reason": "never ends"}, idempotency_key="k")
    assert again.json() == body
    assert Cancellation.objects.count() == 1
    number = current_number()
    assert brakes.forget_cancelled() == 0
    assert current_number() == number
    assert brakes.forget_cancelled(now=utc_now() + timedelta(minutes=11)) == 1
    assert (published().cancelled, current_number()) == ([], number + 1)
    assert Revision.objects.get(pk=number + 1).actor == "schedule"


def test_an_id_that_is_used_and_cancelled_again_gives_another_revision(system: Actor) -> None:
    number = current_number()
    for n in (1, 2):
        brakes.cancel_request(actor=system, request_id="req_1", reason="x")
        assert (current_number(), published().cancelled) == (number + n, ["req_1"] * n)


def test_a_cancellation_that_is_over_is_in_no_later_snapshot(system: Actor) -> None:
    brakes.cancel_request(actor=system, request_id="req_1", reason="x")
    Cancellation.objects.update(created_at=utc_now() - timedelta(minutes=10))
    make_tenant(system)
    assert published().cancelled == []
    number = current_number()
    assert brakes.forget_cancelled() == 1
    assert current_number() == number


@pytest.mark.parametrize("request_id", ["", "x" * 129, "naïve", "a\0b"])
def test_what_no_request_can_be_called_is_refused(system: Actor, request_id: str) -> None:
    with pytest.raises(Invalid) as caught:
        brakes.cancel_request(actor=system, request_id=request_id, reason="x")
    assert list(caught.value.fields) == ["request"]


def test_cancellations_in_force_are_bounded(system: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brakes, "MAX_CANCELLATIONS", 2)
    for n in range(2):
        brakes.cancel_request(actor=system, request_id=f"req_{n}", reason="x")
    with pytest.raises(Conflict):
        brakes.cancel_request(actor=system, request_id="req_2", reason="x")
    Cancellation.objects.update(created_at=utc_now() - timedelta(minutes=10))
    brakes.cancel_request(actor=system, request_id="req_2", reason="x")


def test_a_tenants_admin_cancels_its_own_requests_only(system: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant, other = make_tenant(system), make_tenant(system)
    admin = make_user(role=Role.TENANT_ADMIN, tenant=tenant.id)
    api = api_client(admin, "tenant.write")
    number = current_number()
    answer = api.send("POST", "/requests/req_1/cancel", {"reason": "mine"})
    assert answer.status_code == 201
    assert (published().cancelled, current_number()) == ([], number + 1)
    assert published().own_cancelled == [OwnCancellation(tenant=tenant.id, request="req_1")]
    entry = AuditEntry.objects.latest("id")
    assert (entry.action, entry.tenant) == ("request.cancelled", tenant.id)
    assert [row.request for row in brakes.cancellations(actor=admin.actor)] == ["req_1"]
    stranger = make_user(role=Role.TENANT_ADMIN, tenant=other.id)
    assert not brakes.cancellations(actor=stranger.actor).exists()
    member = make_user(role=Role.TENANT_MEMBER, tenant=tenant.id)
    with pytest.raises(NotAllowed):
        brakes.cancel_request(actor=member.actor, request_id="req_1", reason="x")
    monkeypatch.setattr(brakes, "MAX_OF_TENANT", 2)
    brakes.cancel_request(actor=admin.actor, request_id="req_2", reason="x")
    assert api.send("POST", "/requests/req_3/cancel", {"reason": "mine"}).status_code == 409
    brakes.cancel_request(actor=stranger.actor, request_id="req_3", reason="x")
    brakes.forget_cancelled(now=utc_now() + timedelta(minutes=11))
    assert published().own_cancelled == []


def test_what_tenants_cancel_takes_no_place_of_the_operators(system: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brakes, "MAX_CANCELLATIONS", 1)
    tenants = [make_tenant(system) for _ in range(2)]
    first, second = (make_user(role=Role.TENANT_ADMIN, tenant=t.id).actor for t in tenants)
    brakes.cancel_request(actor=first, request_id="req_1", reason="x")
    with pytest.raises(Conflict):
        brakes.cancel_request(actor=second, request_id="req_2", reason="x")
    brakes.cancel_request(actor=system, request_id="req_3", reason="x")
    with pytest.raises(Conflict):
        brakes.cancel_request(actor=system, request_id="req_4", reason="x")
