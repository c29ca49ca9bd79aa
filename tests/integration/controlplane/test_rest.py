"""``/api/v1``: who may, what is audited, one shape of errors, creates that may be sent twice."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import openapi_spec_validator
import pytest
from django.db import connection, transaction
from django.test import Client

from controlplane.accounts.actions import issue_token, revoke_token
from controlplane.accounts.models import OperatorToken, Role, User
from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor, system_actor
from controlplane.common.clock import utc_now
from controlplane.common.leases import JobState
from controlplane.common.models import BackgroundJob
from controlplane.common.parsers import MAX_DEPTH
from controlplane.fleet.brakes import drain_backend, stop_grammars
from controlplane.keys.models import ApiKey
from controlplane.rollout.models import Revision
from controlplane.rollout.queries import current_body
from controlplane.tenants.actions import stop_tenant
from controlplane.tenants.models import Tenant
from controlplane.training.actions import start_job
from router_ext.core.config import KNOBS, policy_names
from router_ext.wire.controlplane import ConfigSnapshot
from tests.support.control_plane import (
    ApiClient,
    api_client,
    make_backend,
    make_evaluation,
    make_key,
    make_length_model,
    make_pool,
    make_tenant,
    make_tier,
    make_user,
)
from tests.support.world import World, expected_states, make_world, states_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def world(system: Actor, operator: User) -> World:
    return make_world(system, operator)


# Every mutating operation of the schema: its body and the audit actions it must leave behind.
MUTATIONS: dict[tuple[str, str], tuple[Callable[[World], Any], str]] = {
    ("POST", "/tenants"): (
        lambda w: {"name": "New", "slug": "new", "tiers": ["standard"], "default_tier": "standard"}, "tenant.created",
    ),
    ("POST", "/batch"): (
        lambda w: {"operations": [{"method": "PATCH", "path": f"/tenants/{w.ids['tenants']}", "body": {"weight": 5}}]},
        "tenant.updated",
    ),
    ("PATCH", "/tenants/{id}"): (lambda w: {"weight": 5}, "tenant.updated"),
    ("POST", "/tenants/{id}/stop"): (lambda w: {"reason": "floods us"}, "tenant.stopped"),
    ("POST", "/tenants/{id}/resume"): (lambda w: {"reason": "agreed"}, "tenant.resumed"),
    ("POST", "/tenants/{id}/suspend"): (lambda w: {"is_cut": False}, "tenant.suspended"),
    ("POST", "/tenants/bulk"): (
        lambda w: {"tenants": [w.ids["tenants"]], "weight": 9}, "tenant.changed_together",
    ),
    ("DELETE", "/tenants/{id}"): (lambda w: None, "tenant.deleted"),
    ("PUT", "/tenants/{tenant_id}/price-list"): (lambda w: {"price_list": "spare"}, "price_list.assigned"),
    ("POST", "/price-lists"): (lambda w: {"name": "new", "currency": "EUR"}, "price_list.created"),
    ("PATCH", "/price-lists/{id}"): (lambda w: {"name": "other"}, "price_list.updated"),
    ("DELETE", "/price-lists/{id}"): (lambda w: None, "price_list.deleted"),
    ("POST", "/price-assignments"): (
        lambda w: {"tenant": w.ids["tenants"], "price_list": "spare", "valid_from": "2026-02-01"},
        "price_list.assigned",
    ),
    ("PATCH", "/price-assignments/{id}"): (lambda w: {"price_list": "spare"}, "price_list.assigned"),
    ("DELETE", "/price-assignments/{id}"): (lambda w: None, "price_list.assigned"),
    ("POST", "/keys"): (
        lambda w: {"tenant": w.ids["tenants"], "name": "new", "default_pool": w.ids["pools"]}, "key.issued",
    ),
    ("PATCH", "/keys/{id}"): (lambda w: {"may_choose_tier": True}, "key.updated"),
    ("POST", "/keys/{id}/revoke"): (lambda w: None, "key.revoked"),
    ("POST", "/tiers"): (lambda w: {"name": "new", "rank": 3, "ttft_target_s": 0.5}, "tier.created"),
    ("PATCH", "/tiers/{id}"): (lambda w: {"rank": 77}, "tier.updated"),
    ("DELETE", "/tiers/{id}"): (lambda w: None, "tier.deleted"),
    ("POST", "/groups"): (lambda w: {"name": "new", "weight": 2.5}, "group.created"),
    ("PATCH", "/groups/{id}"): (lambda w: {"weight": 7}, "group.updated"),
    ("DELETE", "/groups/{id}"): (lambda w: None, "group.deleted"),
    ("POST", "/pools"): (lambda w: {"name": "org/new", "policy": "fifo"}, "pool.created"),
    ("PATCH", "/pools/{id}"): (lambda w: {"policy": "fifo"}, "pool.updated"),
    ("POST", "/pools/{id}/stop-grammars"): (lambda w: {"reason": "they kill it"}, "pool.grammars_stopped"),
    ("POST", "/pools/{id}/allow-grammars"): (lambda w: {}, "pool.grammars_allowed"),
    ("DELETE", "/pools/{id}"): (lambda w: None, "pool.deleted"),
    ("POST", "/backends"): (
        lambda w: {"pool": w.ids["pools"], "name": "new", "url": "http://10.1.1.1:80", "kv_tokens": 999},
        "backend.created",
    ),
    ("PATCH", "/backends/{id}"): (lambda w: {"is_cordoned": True}, "backend.updated"),
    ("POST", "/backends/{id}/drain"): (lambda w: {"reason": "new disks"}, "backend.drained"),
    ("POST", "/backends/{id}/uncordon"): (lambda w: {}, "backend.uncordoned"),
    ("DELETE", "/backends/{id}"): (lambda w: None, "backend.deleted"),
    ("POST", "/requests/{request_id}/cancel"): (lambda w: {"reason": "it never ends"}, "request.cancelled"),
    ("POST", "/hazards/{id}/resolve"): (lambda w: {"note": "told its team"}, "hazard.resolved"),
    ("POST", "/routers"): (lambda w: {"name": "new"}, "router.created"),
    ("POST", "/routers/{id}/revoke"): (lambda w: None, "router.revoked"),
    ("POST", "/routers/{id}/renew-token"): (lambda w: None, "router.token_renewed"),
    ("POST", "/training-jobs"): (lambda w: {"kind": "baseline"}, "job.queued"),
    ("POST", "/training-jobs/{id}/cancel"): (lambda w: None, "job.cancelled"),
    ("POST", "/jobs"): (lambda w: {"kind": "usage-reconcile-books"}, "job.queued"),
    ("POST", "/jobs/{id}/cancel"): (lambda w: None, "job.cancelled"),
    ("POST", "/jobs/{id}/retry"): (lambda w: None, "job.queued"),
    ("POST", "/promotions"): (
        lambda w: {"pool": w.ids["pool_in_use"], "artifact": w.ids["artifacts"], "reason": "it is better"},
        "pool.length_model_promoted",
    ),
    ("POST", "/promotions/roll-back"): (
        lambda w: {"pool": w.ids["pool_in_use"], "reason": "it is worse"}, "pool.length_model_rolled_back",
    ),
    ("POST", "/promotions/demote"): (
        lambda w: {"pool": w.ids["pool_in_use"], "reason": "we do without"}, "pool.length_model_demoted",
    ),
    ("PATCH", "/members/{id}"): (lambda w: {"role": "operator"}, "user.updated"),
    ("DELETE", "/members/{id}"): (lambda w: None, "user.removed"),
    ("POST", "/members/{id}/reset-password"): (lambda w: None, "user.password_reset"),
    ("POST", "/members/{id}/reset-second-factor"): (lambda w: None, "user.second_factor_reset"),
    ("POST", "/invitations"): (lambda w: {"email": "a@example.test", "role": "viewer"}, "invitation.created"),
    ("POST", "/invitations/{id}/revoke"): (lambda w: None, "invitation.revoked"),
    ("POST", "/tokens"): (lambda w: {"name": "new", "scopes": ["admin.read"]}, "token.issued"),
    ("POST", "/tokens/{id}/revoke"): (lambda w: None, "token.revoked"),
}  # fmt: skip
CONFIGURATION = ("tenant.", "group.", "key.", "tier.", "pool.", "backend.", "request.")


# Undoing needs something that was done.
DONE_BEFORE: dict[tuple[str, str], Callable[[World], object]] = {
    ("DELETE", "/tenants/{id}"): lambda w: stop_tenant(actor=SYSTEM, tenant_id=w.ids["tenants"], reason="x"),
    ("POST", "/tenants/{id}/resume"): lambda w: stop_tenant(actor=SYSTEM, tenant_id=w.ids["tenants"], reason="x"),
    ("POST", "/pools/{id}/allow-grammars"): lambda w: stop_grammars(actor=SYSTEM, pool_id=w.ids["pools"], reason="x"),
    ("POST", "/backends/{id}/uncordon"): lambda w: drain_backend(
        actor=SYSTEM, backend_id=w.ids["backends"], reason="x"
    ),
}
SYSTEM = system_actor("test")


def path_of(method: str, route: str, world: World) -> str:
    DONE_BEFORE.get((method, route), lambda world: None)(world)
    kind = route.split("/")[1]
    if route in ("/jobs/{id}/cancel", "/jobs/{id}/retry"):
        state = JobState.QUEUED if route.endswith("cancel") else JobState.FAILED
        job = BackgroundJob.objects.create(kind="usage-coarsen-old", queue="default", requested_by="x", state=state)
        world.ids[kind] = job.id
    if kind == "training-jobs" and "{id}" in route:
        world.ids[kind] = start_job(actor=system_actor("test")).id
    route = route.replace("{tenant_id}", world.ids["tenants"])
    return route.replace("{id}", world.ids.get(kind, "")).replace("{request_id}", "req_1").rstrip("/")


@pytest.fixture
def schema(client: Client) -> Any:
    answer = client.get("/api/v1/openapi.json")
    assert answer.status_code == 200
    return answer.json()


def test_the_schema_is_valid_openapi_3_1(schema: Any) -> None:
    assert schema["openapi"].startswith("3.1")
    openapi_spec_validator.validate(schema)


def test_every_mutating_route_of_the_schema_is_tested_here(schema: Any) -> None:
    routes = {
        (method.upper(), path.removeprefix("/api/v1"))
        for path, operations in schema["paths"].items()
        for method in operations
        if method in ("post", "put", "patch", "delete")
    }
    assert routes == set(MUTATIONS)


@pytest.mark.parametrize(("method", "route"), list(MUTATIONS))
def test_a_mutation_leaves_one_audit_entry_and_publishes_what_routers_must_know(
    world: World, method: str, route: str
) -> None:
    make_body, action = MUTATIONS[method, route]
    owner = make_user(role=Role.OWNER)
    api = api_client(owner, "admin.write", "admin.members")
    path = path_of(method, route, world)
    entries, revisions = AuditEntry.objects.count(), Revision.objects.count()
    answer = api.send(method, path, make_body(world))
    assert answer.status_code in (200, 201, 204), answer.content
    (entry,) = AuditEntry.objects.order_by("id")[entries:]
    assert entry.action == action
    assert owner.email in entry.actor_label
    assert entry.request_id == answer.headers["x-request-id"]
    assert states_of(entry) == expected_states(action)
    assert Revision.objects.count() == revisions + action.startswith(CONFIGURATION)


def test_a_mutation_needs_the_write_scope_of_an_operator(operator: User, viewer: User, world: World) -> None:
    callers = {"nobody": (ApiClient(None), 401), "reading token": (api_client(operator, "admin.read"), 403)}
    # Role outranks scope: a viewer's token of whatever scopes reads only.
    callers["viewer"] = (api_client(viewer, "admin.read", "admin.write"), 403)
    for (method, route), (make_body, _) in MUTATIONS.items():
        with transaction.atomic():
            path = path_of(method, route, world)
            before = AuditEntry.objects.count()
            for name, (client, status) in callers.items():
                answer = client.send(method, path, make_body(world))
                assert answer.status_code == status, (name, method, route)
                assert answer.headers["content-type"] == "application/problem+json", (name, method, route)
            assert AuditEntry.objects.count() == before, (method, route)
            transaction.set_rollback(True)  # what was done to make it possible


READABLE = (
    "/tenants", "/groups", "/keys", "/tiers", "/pools", "/backends", "/hazards", "/routers", "/revisions", "/audit",
    "/training-jobs", "/jobs", "/jobs/schedule", "/artifacts", "/promotions", "/predictor/drift", "/predictor/samples",
    "/members", "/invitations", "/tokens", "/usage/report", "/usage/quarantine", "/price-lists",
    "/price-assignments", "/statements", "/usage/reconciliations",
)  # fmt: skip


def test_reading_needs_the_read_scope(world: World, viewer: User, operator: User) -> None:
    reader, writer = api_client(viewer, "admin.read"), api_client(operator, "admin.write")
    for path in [*READABLE, "/tenants/{tenants}/quota", "/keys/{keys}/quota"]:
        path = path.format(**world.ids)
        assert ApiClient(None).send("GET", path).status_code == 401, path
        assert reader.send("GET", path).status_code == 200, path
        assert writer.send("GET", path).status_code == 200, path


@pytest.mark.parametrize(
    ("role", "given", "method", "path", "missing"),
    [
        (Role.OWNER, "admin.write", "POST", "/invitations", "admin.members"),
        (Role.OWNER, "admin.read", "POST", "/tenants", "admin.write"),
        (Role.OWNER, "admin.read", "POST", "/keys", "admin.write"),
        (Role.OWNER, "admin.read", "POST", "/batch", "admin.write or admin.members"),
        (Role.OWNER, "admin.members", "GET", "/keys", "admin.read"),
        (Role.TENANT_ADMIN, "tenant.read", "POST", "/keys", "tenant.write"),
        (Role.TENANT_ADMIN, "tenant.read", "POST", "/invitations", "tenant.write"),
    ],
)
def test_a_scope_that_is_missing_is_named(
    system: Actor, role: Role, given: str, method: str, path: str, missing: str
) -> None:
    tenant = make_tenant(system).id if role == Role.TENANT_ADMIN else None
    answer = api_client(make_user(role=role, tenant=tenant), given).send(method, path, {})
    assert (answer.status_code, answer.json()["code"]) == (403, "not_allowed")
    assert answer.json()["detail"].endswith(f" lacks the scope {missing}")


def test_a_list_shows_no_secret_and_no_digest_of_one(world: World, api: ApiClient) -> None:
    digests = [digest for model in (ApiKey, OperatorToken) for digest in model.objects.values_list("digest", flat=True)]
    assert digests
    for path in READABLE:
        text = api.send("GET", path).content.decode()
        assert not [digest for digest in digests if digest in text], path


def test_a_tenants_key_opens_nothing_here(system: Actor) -> None:
    _, text = make_key(system, make_tenant(system), make_pool(system))
    answer = ApiClient(text).send("GET", "/tenants")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"


def test_every_bad_token_is_refused_with_the_same_words(operator: User, system: Actor) -> None:
    texts = {}
    token, texts["revoked"] = issue_token(actor=system, user=operator, name="a", scopes=["admin.read"])
    revoke_token(actor=system, token_id=token.id)
    token, texts["expired"] = issue_token(actor=system, user=operator, name="b", scopes=["admin.read"])
    OperatorToken.objects.filter(pk=token.id).update(expires_at=utc_now() - timedelta(seconds=1))
    closed = make_user()
    _, texts["of a closed account"] = issue_token(actor=system, user=closed, name="c", scopes=["admin.read"])
    User.objects.filter(pk=closed.pk).update(is_active=False)
    texts["unknown"] = "flt_aaaaaaaaaaaa_" + "A" * 48
    texts["malformed"] = "sk-123"
    texts["in another alphabet"] = "flt_ключ"
    answers = {name: ApiClient(text).send("GET", "/tenants") for name, text in texts.items()}
    assert {a.status_code for a in answers.values()} == {401}
    assert len({a.content for a in answers.values()}) == 1


def test_a_session_reads_and_writes_only_with_a_csrf_token(operator: User) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(operator)
    assert client.get("/api/v1/tiers").status_code == 200
    body = {"data": {"name": "x", "rank": 1}, "content_type": "application/json"}
    assert client.post("/api/v1/tiers", **body).status_code == 403
    client.cookies["fairlane_csrf"] = "a" * 32
    assert client.post("/api/v1/tiers", headers={"x-csrftoken": "a" * 32}, **body).status_code == 201


def test_a_one_time_password_opens_no_api(operator: User) -> None:
    User.objects.filter(pk=operator.pk).update(must_change_password=True)
    client = Client()
    client.force_login(operator)
    answer = client.get("/api/v1/tiers")
    assert (answer.status_code, answer.json()["code"]) == (403, "password_change_required")


def test_field_errors_come_as_a_map(api: ApiClient) -> None:
    answer = api.send("POST", "/tenants", {"name": "", "slug": "x", "weight": "heavy", "tiers": [], "colour": "red"})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["errors"].keys() == {"colour"}
    answer = api.send("POST", "/tenants", {"name": "", "slug": "x", "weight": "heavy", "tiers": []})
    assert answer.json()["errors"].keys() == {"name", "weight", "tiers", "default_tier"}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/tenants/ten_missing", None, 404),
        ("GET", "/tenants/%00", None, 404),
        ("GET", "/nothing/here", None, 404),
        ("PUT", "/tenants", {}, 405),
        ("POST", "/audit", {}, 405),
        ("GET", "/tenants?limit=0", None, 422),
        ("GET", "/tenants?limit=1001", None, 422),
        ("GET", "/tenants?cursor=%21%21", None, 422),
        ("GET", "/revisions?cursor=YWJj", None, 422),
        ("GET", "/usage/report?from=yesterday", None, 422),
        ("GET", "/usage/report?from=2026-02-01&to=2026-01-01", None, 422),
        ("GET", "/usage/report?format=xml", None, 422),
        ("POST", "/keys", {"name": "x", "tenant": "ten_missing"}, 422),
        ("POST", "/pools", {"name": "x", "policy": "unheard of"}, 422),
    ],
)
def test_every_refusal_has_one_shape(api: ApiClient, method: str, path: str, body: Any, status: int) -> None:
    answer = api.send(method, path, body)
    assert answer.status_code == status, answer.content
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status
    if status == 405:
        assert answer.headers["allow"]


def test_what_is_not_json_is_refused(api: ApiClient) -> None:
    answer = api.generic("POST", "/api/v1/tiers", b"{", content_type="application/json")
    assert answer.status_code == 400
    answer = api.generic("POST", "/api/v1/tiers", b"a=b", content_type="application/x-www-form-urlencoded")
    assert answer.status_code == 415


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" * 100_000, "deep"),
        (b'{"a":' * 5_000, "deep"),
        (b'{"name":' + b"[" * 400 + b"]" * 400 + b"}", "deep"),
        (b'{"operations":' + b"[" * 33 + b"]" * 33 + b"}", "deep"),
        (rb'{"\ud800": 1}', "surrogate"),
        (rb'{"name": "\udc00"}', "surrogate"),
        (b'{"rank": 1' + b"0" * 5_000 + b"}", "JSON"),
        (b'{"name": "\xff"}', "JSON"),
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/tiers"), ("PATCH", "/tenants/ten_missing"), ("POST", "/batch")]
)
def test_json_that_nobody_can_walk_through_or_write_down_is_refused(
    api: ApiClient, body: bytes, said: str, method: str, path: str
) -> None:
    headers = {"idempotency-key": "x"}
    answer = api.generic(method, f"/api/v1{path}", body, content_type="application/json", headers=headers)
    assert answer.status_code == 400, answer.content
    assert answer.headers["content-type"] == "application/problem+json"
    assert said in answer.json()["detail"]


def test_json_as_deep_as_the_limit_and_of_any_script_is_read(api: ApiClient) -> None:
    nested = b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1)
    answer = api.generic("POST", "/api/v1/tiers", b'{"a": ' + nested + b"}", content_type="application/json")
    assert answer.json()["errors"] == {"a": ["unknown field"]}
    answer = api.generic("POST", "/api/v1/tiers", '{"\\ud83d\\ude00é": 1}'.encode(), content_type="application/json")
    assert answer.json()["errors"] == {"\U0001f600é": ["unknown field"]}


def test_a_conflict_is_409(api: ApiClient) -> None:
    assert api.send("POST", "/tiers", {"name": "x", "rank": 1}).status_code == 201
    assert api.send("POST", "/tiers", {"name": "x", "rank": 2}).status_code == 409


def test_a_configuration_routers_would_refuse_is_422_and_leaves_nothing(api: ApiClient, system: Actor) -> None:
    tenant = make_tenant(system, tiers=["standard", "batch"])
    make_key(system, tenant, make_pool(system), tiers=["batch"])
    answer = api.send("PATCH", f"/tenants/{tenant.id}", {"tiers": ["standard"]})
    assert (answer.status_code, answer.json()["code"]) == (422, "config_refused")
    assert "batch" in answer.json()["detail"]
    assert api.send("GET", f"/tenants/{tenant.id}").json()["tiers"] in (["standard", "batch"], ["batch", "standard"])


def test_a_lost_update_is_noticed_by_version(api: ApiClient, system: Actor) -> None:
    tenant = make_tenant(system)
    path = f"/tenants/{tenant.id}"
    etag = api.send("GET", path).headers["etag"]
    assert api.send("PATCH", path, {"weight": 2}, if_match=etag).status_code == 200
    assert api.send("PATCH", path, {"weight": 3}, if_match=etag).status_code == 412
    assert api.send("PATCH", path, {"weight": 4}, if_match="*").status_code == 200
    assert api.send("PATCH", path, {"weight": 5}, if_match="yesterday").status_code == 422
    assert Tenant.objects.get().weight == 4


@pytest.mark.parametrize(
    ("method", "action"),
    [("PATCH", ""), ("DELETE", ""), ("POST", "/reset-password"), ("POST", "/reset-second-factor")],
)
def test_a_lost_update_of_a_member_is_noticed(method: str, action: str) -> None:
    owner, member = make_user(role="owner"), make_user(role="viewer")
    rest, path = api_client(owner, "admin.read", "admin.write", "admin.members"), f"/members/{member.id}"
    shown = rest.send("GET", path)
    assert shown.headers["etag"] == f'"{shown.json()["version"]}"'
    assert rest.send("PATCH", path, {"name": "First"}, if_match=shown.headers["etag"]).status_code == 200
    body = {"name": "Second"} if method == "PATCH" else None
    assert rest.send(method, path + action, body, if_match=shown.headers["etag"]).status_code == 412
    assert rest.send("GET", path).json()["name"] == "First"
    now = rest.send("GET", path).headers["etag"]
    assert rest.send(method, path + action, body, if_match=now).status_code in (200, 204)


def test_a_create_sent_twice_creates_once_and_shows_its_secret_once(api: ApiClient, world: World) -> None:
    body = {"tenant": world.ids["tenants"], "name": "once", "default_pool": world.ids["pools"]}
    first = api.send("POST", "/keys", body, idempotency_key="k1")
    second = api.send("POST", "/keys", body, idempotency_key="k1")
    assert (first.status_code, second.status_code) == (201, 201)
    assert second.headers["idempotency-replayed"] == "true"
    assert first.json()["key"].startswith("flk_")
    assert second.json() == {**first.json(), "key": None}
    assert ApiKey.objects.filter(name="once").count() == 1
    assert api.send("POST", "/keys", {**body, "name": "twice"}, idempotency_key="k1").status_code == 422
    assert api.send("POST", "/keys", body, idempotency_key="k2").status_code == 201


def test_a_repeated_answer_has_the_version_of_the_first(api: ApiClient, world: World) -> None:
    seen = 0
    for route in ("/tenants", "/groups", "/keys", "/tiers", "/pools", "/price-lists", "/price-assignments", "/routers"):
        body = MUTATIONS["POST", route][0](world)
        first, second = (api.send("POST", route, body, idempotency_key="k" + route) for _ in range(2))
        assert (first.status_code, second.headers.get("idempotency-replayed")) == (201, "true")
        assert second.headers.get("etag") == first.headers.get("etag") == f'"{first.json()["version"]}"'
        seen += 1
    assert seen == 8


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tenants/{}", {"weight": True}, "weight"),
        ("/tenants/{}", {"weight": "2"}, "weight"),
        ("/tenants/{}", {"max_queued": "7"}, "max_queued"),
        ("/tenants/{}", {"max_queued": 7.5}, "max_queued"),
        ("/tenants/{}", {"name": 7}, "name"),
        ("/tenants/{}", {"state": False}, "state"),
        ("/tenants/{}", {"tiers": ["standard", 1]}, "tiers.1"),
        ("/tenants/{}", {"limits": {"concurrent": "1"}}, "limits.concurrent"),
        ("/pools/{}", {"scheduling": {"burst_ratio": True}}, "scheduling.burst_ratio"),
        ("/backends/{}", {"is_cordoned": "no"}, "is_cordoned"),
        ("/backends/{}", {"is_cordoned": 1}, "is_cordoned"),
        ("/price-lists/{}", {"prices": [{"valid_from": "2026-01-01", "prompt_micro": True}]}, "prices.0.prompt_micro"),
    ],
)
def test_a_value_of_another_json_type_is_refused(
    api: ApiClient, world: World, path: str, body: dict[str, Any], field: str
) -> None:
    answer = api.send("PATCH", path.format(world.ids[path.split("/")[1]]), body)
    assert answer.status_code == 422
    assert "is needed, not" in answer.json()["errors"][field][0], answer.json()


@pytest.mark.parametrize("limit", ["٣", "²", "+3", "3_0", " 3", "-1", "1" * 50])
def test_a_limit_is_of_ten_digits(api: ApiClient, limit: str) -> None:
    assert api.get("/api/v1/tenants", {"limit": limit}).status_code == 422


def test_a_whole_number_may_be_written_with_a_point(api: ApiClient, world: World) -> None:
    assert api.send("PATCH", f"/tenants/{world.ids['tenants']}", {"max_queued": 7.0, "weight": 2}).status_code == 200


def test_a_refused_create_may_be_corrected_under_the_same_idempotency_key(api: ApiClient, world: World) -> None:
    body = {"name": "New", "slug": "new", "tiers": ["unknown"], "default_tier": "unknown"}
    assert api.send("POST", "/tenants", body, idempotency_key="k").status_code == 422
    body = {**body, "tiers": ["standard"], "default_tier": "standard"}
    assert api.send("POST", "/tenants", body, idempotency_key="k").status_code == 201


def test_pages_hold_everything_once_though_rows_are_added_meanwhile(api: ApiClient, system: Actor) -> None:
    wanted = [make_tier(system, f"tier-{n}").id for n in range(7)]
    seen: list[str] = []
    cursor = ""
    while True:
        page = api.send("GET", f"/tiers?limit=3{cursor}").json()
        seen += [row["id"] for row in page["results"]]
        make_tier(system, f"late-{len(seen)}")
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert seen == sorted(wanted, reverse=True)


@pytest.mark.parametrize(
    "path",
    [
        "/tenants",
        "/keys",
        "/pools",
        "/backends",
        "/routers",
        "/tokens",
        "/training-jobs",
        "/artifacts",
        "/promotions",
    ],
)
def test_a_list_takes_the_same_number_of_queries_whatever_its_length(
    api: ApiClient, system: Actor, world: World, django_assert_max_num_queries: Any, path: str
) -> None:
    tenant, pool = make_tenant(system), make_pool(system, aliases=["a", "b"])
    for n in range(10):
        make_key(system, tenant, pool, tiers=["standard"], default_tier="standard")
        make_backend(system, make_pool(system))
        make_tenant(system)
        make_evaluation(make_length_model(f"model {n}"), pool)
    api.send("GET", path)
    with django_assert_max_num_queries(5):
        assert api.send("GET", path).status_code == 200


def test_requests_are_answered_with_their_id(api: ApiClient) -> None:
    assert api.send("GET", "/tiers", x_request_id="from-a-client").headers["x-request-id"] == "from-a-client"
    assert api.send("GET", "/tiers", x_request_id="not harmless\x7f").headers["x-request-id"].startswith("req_")


def test_health_needs_nobody_signed_in(client: Client) -> None:
    assert client.get("/livez").json() == {"status": "ok"}
    assert client.get("/readyz").status_code == 200


def test_pending_migrations_make_it_unready(client: Client) -> None:
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM django_migrations WHERE app = 'usage' AND name = '0002_event_partitions'")
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["pending"]) == (503, ["usage.0002_event_partitions"])


@pytest.mark.parametrize(
    "query", ["from=0001-01-01&to=0001-01-05", "to=0001-01-02", "from=9999-12-01&to=9999-12-31", "to=1999-12-31"]
)
def test_a_report_outside_the_calendar_names_the_days_it_may_cover(api: ApiClient, query: str) -> None:
    answer = api.send("GET", f"/usage/report?{query}")
    assert answer.status_code == 422
    assert all("2000-01-01 to 9998-12-31" in text for texts in answer.json()["errors"].values() for text in texts)


def test_a_body_over_the_limit_is_413(api: ApiClient, settings: Any) -> None:
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1_000
    answer = api.send("POST", "/tenants", {"name": "x" * 2_000})
    assert (answer.status_code, answer.json()["code"]) == (413, "request_too_large")


def test_an_answer_with_a_secret_is_stored_nowhere(api: ApiClient) -> None:
    answer = api.send("POST", "/tokens", {"name": "once", "scopes": ["admin.read"]})
    assert answer.json()["token"].startswith("flt_")
    assert answer.headers["cache-control"] == "no-store"


def test_the_policies_and_knobs_of_a_pool_are_listed_and_their_ranges_are_in_the_schema(
    api: ApiClient, viewer: User
) -> None:
    said = api_client(viewer).send("GET", "/policies").json()
    assert [policy["name"] for policy in said["policies"]] == list(policy_names())
    assert all(policy["summary"] for policy in said["policies"])
    knob = next(each for each in said["knobs"] if each["name"] == "burst_ratio")
    assert (knob["kind"], knob["default"], knob["low"], knob["high"]) == ("number", 0.25, 0.0, 10.0)
    schema = api.send("GET", "/openapi.json").json()["components"]["schemas"]["Scheduling"]["properties"]
    assert set(schema) == set(KNOBS)
    assert (schema["gamma"]["minimum"], schema["gamma"]["maximum"]) == (0.0, 1.0)


def test_a_policy_and_knobs_chosen_by_rest_are_published(api: ApiClient, system: Actor) -> None:
    pool = make_pool(system)
    body = {"policy": "fifo", "scheduling": {"burst_ratio": 0.5, "max_queued": 7, "gamma": None}}
    shown = api.send("PATCH", f"/pools/{pool.id}", body).json()
    assert (shown["policy"], shown["scheduling"]) == ("fifo", {"burst_ratio": 0.5, "max_queued": 7})
    published = msgspec.json.decode(current_body()[2], type=ConfigSnapshot)
    record = next(p for p in published.pools if p.pool == pool.id)
    assert record.scheduling == {"policy": "fifo", "burst_ratio": 0.5, "max_queued": 7}
    assert api.send("PATCH", f"/pools/{pool.id}", {"scheduling": {}}).json()["scheduling"] == {}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"policy": "lottery"}, "policy"),
        ({"scheduling": {"gamma": 7}}, "scheduling.gamma"),
        ({"scheduling": {"max_queued": 1.5}}, "scheduling.max_queued"),
        ({"scheduling": {"bursts": 1}}, "scheduling.bursts"),
        ({"scheduling": 3}, "scheduling"),
    ],
)
def test_a_knob_no_scheduler_takes_is_refused_by_name(
    body: dict[str, Any], field: str, api: ApiClient, system: Actor
) -> None:
    answer = api.send("PATCH", f"/pools/{make_pool(system).id}", body)
    assert answer.status_code == 422
    assert field in answer.json()["errors"]


def test_a_tenant_joins_and_leaves_a_fairness_group_by_its_name(api: ApiClient, world: World) -> None:
    tenant = f"/tenants/{world.ids['tenants']}"
    assert api.send("GET", tenant).json()["group"] is None
    assert api.send("POST", "/groups", {"name": "research", "weight": 3}).json()["weight"] == 3
    assert api.send("PATCH", tenant, {"group": "research"}).json()["group"] == "research"
    assert api.send("PATCH", tenant, {"weight": 2}).json()["group"] == "research"
    assert api.send("PATCH", tenant, {"group": None}).json()["group"] is None
    refused = api.send("PATCH", tenant, {"group": "nobody"})
    assert (refused.status_code, list(refused.json()["errors"])) == (422, ["group"])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "Not A Slug"}, "name"),
        ({"name": "x", "weight": 0}, "weight"),
        ({"name": "x", "weight": 1e9}, "weight"),
        ({}, "name"),
    ],
)
def test_a_fairness_group_that_cannot_be_is_refused_by_field(api: ApiClient, body: dict[str, Any], field: str) -> None:
    answer = api.send("POST", "/groups", body)
    assert (answer.status_code, list(answer.json()["errors"])) == (422, [field])
