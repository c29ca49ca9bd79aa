"""No mutating route escapes the audit log: each one of the address table is driven and leaves one entry.

``test_rest.py`` drives those of REST; those of the console are driven here. What takes a method it need not is found by
asking every address with every method.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from django.contrib.admindocs.views import simplify_regex
from django.db import transaction
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from controlplane.accounts import totp
from controlplane.accounts.models import Role, User
from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor, system_actor
from controlplane.common.leases import JobState
from controlplane.common.models import BackgroundJob
from controlplane.fleet.brakes import drain_backend, stop_grammars
from controlplane.tenants.actions import stop_tenant
from controlplane.training.actions import start_job
from tests.integration.controlplane.test_rest import MUTATIONS
from tests.support.control_plane import PASSWORD
from tests.support.world import World, expected_states, make_world, states_of

pytestmark = pytest.mark.django_db

METHODS = ("POST", "PUT", "PATCH", "DELETE")
SYSTEM = system_actor("test")
MACHINE = {
    "/router/v1/usage": "routers book what was used: events are rows of the books themselves",
    "/router/v1/heartbeat": "routers report every second: what they say is kept as their state",
}
"""What changes something and is not a person's doing."""
ANSWERS_ANY_METHOD = {
    "/livez": "reads nothing",
    "/readyz": "reads only",
    "/api/v1/.": "answers 404 to whatever no address takes",
}


@dataclass(frozen=True)
class Case:
    """How an address of the console is driven. ``form``: what is posted, beside what the page's own form shows."""

    action: str
    form: Callable[[World], dict[str, Any]] = lambda w: {}
    before: Callable[[World], object] = lambda w: None
    is_page: bool = False
    opened: Callable[[Client, World], dict[str, Any]] = lambda client, w: {}
    """What an earlier page tells, such as a secret; posted as well."""
    follows: tuple[str, ...] = ()
    """Actions that the first one brings with it, each with an entry of its own."""


def _tenant(world: World) -> str:
    return world.ids["tenants"]


def _enrolling(client: Client, world: World) -> dict[str, Any]:
    """The code for the secret that the page shows."""
    text = client.get("/second-factor/").context["secret"].replace(" ", "")
    return {"code": totp.code(base64.b32decode(text), totp.counter())}


def _with_password(client: Client, world: World) -> dict[str, Any]:
    """After the right password of an account with a second factor: the code."""
    user, secret = User.objects.get(email=world.ids["email"]), totp.new_secret()
    user.totp_secret = totp.sealed(secret, user.id)
    user.save()
    client.post("/sign-in/", {"email": user.email, "password": PASSWORD})
    return {"code": totp.code(secret, totp.counter())}


NEW_BACKEND = {"name": "new", "url": "http://10.1.1.1:80", "block_size": 1, "prefill_budget_tokens": 99, "speculate": 0}
CASES: dict[str, Case] = {
    "sign_in": Case("user.signed_in", lambda w: {"email": w.ids["email"], "password": PASSWORD}),
    "sign_in_code": Case("user.signed_in", opened=_with_password),
    "second_factor": Case("user.second_factor_enrolled", opened=_enrolling),
    "sign_out": Case("user.signed_out"),
    "password": Case(
        "user.password_changed",
        lambda w: {"old_password": PASSWORD, "new_password": f"{PASSWORD} 2", "repeated": f"{PASSWORD} 2"},
    ),
    "tenant_new": Case(
        "tenant.created", lambda w: {"name": "New", "tiers": ["standard"], "default_tier": "standard"}, is_page=True
    ),
    "tenants_bulk": Case(
        "tenant.changed_together", lambda w: {"tenant": [_tenant(w)], "what": "weight", "weight": "7"}
    ),
    "tenant": Case("tenant.updated", lambda w: {"weight": "5"}, is_page=True),
    "tenant_state": Case("tenant.suspended", lambda w: {"state": "suspended"}),
    "tenant_stop": Case("tenant.stopped", lambda w: {"reason": "x"}),
    "tenant_resume": Case(
        "tenant.resumed", before=lambda w: stop_tenant(actor=SYSTEM, tenant_id=_tenant(w), reason="x")
    ),
    "tenant_delete": Case(
        "tenant.deleted", before=lambda w: stop_tenant(actor=SYSTEM, tenant_id=_tenant(w), reason="x")
    ),
    "key_new": Case("key.issued", lambda w: {"name": "new", "default_pool": w.ids["pool_name"]}),
    "key": Case("key.updated", lambda w: {"may_choose_tier": "on"}, is_page=True),
    "key_revoke": Case("key.revoked"),
    "group_new": Case("group.created", lambda w: {"name": "new", "weight": "2"}),
    "group": Case("group.updated", lambda w: {"weight": "3"}, is_page=True),
    "group_delete": Case("group.deleted"),
    "tier_new": Case("tier.created", lambda w: {"name": "new", "rank": "3"}),
    "tier": Case("tier.updated", lambda w: {"rank": "77"}, is_page=True),
    "tier_delete": Case("tier.deleted"),
    "price_list_new": Case("price_list.created", lambda w: {"name": "new", "currency": "EUR", "timezone": "UTC"}),
    "price_list": Case("price_list.updated", lambda w: {"prices": "2026-01-01, 1, 2"}, is_page=True),
    "price_list_assign": Case("price_list.assigned", lambda w: {"tenant": _tenant(w)}),
    "price_list_delete": Case("price_list.deleted"),
    "pool_new": Case("pool.created", lambda w: {"name": "org/new"}, is_page=True),
    "pool": Case("pool.updated", lambda w: {"policy": "fifo"}, is_page=True),
    "pool_stop_grammars": Case("pool.grammars_stopped", lambda w: {"reason": "x"}),
    "pool_allow_grammars": Case(
        "pool.grammars_allowed", before=lambda w: stop_grammars(actor=SYSTEM, pool_id=w.ids["pools"], reason="x")
    ),
    "backend_new": Case("backend.created", lambda w: NEW_BACKEND),
    "backend": Case("backend.updated", lambda w: {"is_cordoned": "on"}, is_page=True),
    "backend_drain": Case("backend.drained", lambda w: {"reason": "x"}),
    "backend_uncordon": Case(
        "backend.uncordoned", before=lambda w: drain_backend(actor=SYSTEM, backend_id=w.ids["backends"], reason="x")
    ),
    "backend_delete": Case("backend.deleted"),
    "request_cancel": Case("request.cancelled", lambda w: {"id": "req_1", "reason": "x"}),
    "hazard_resolve": Case("hazard.resolved", lambda w: {"note": "x"}),
    "predictor_start": Case("job.queued", lambda w: {"kind": "baseline"}),
    "predictor_promote": Case(
        "pool.length_model_promoted",
        lambda w: {"pool": w.ids["pool_in_use"], "artifact": w.ids["artifacts"], "reason": "x"},
    ),
    "predictor_roll_back": Case("pool.length_model_rolled_back", lambda w: {"pool": w.ids["pool_in_use"]}),
    "predictor_demote": Case("pool.length_model_demoted", lambda w: {"pool": w.ids["pool_in_use"]}),
    "predictor_cancel": Case("job.cancelled"),
    "job_start": Case("job.queued", lambda w: {"kind": "usage-reconcile-books"}),
    "job_cancel": Case("job.cancelled"),
    "job_retry": Case("job.queued"),
    "members": Case("invitation.created", lambda w: {"email": "new@example.test", "role": "viewer"}),
    "member": Case("user.updated", lambda w: {"role": "operator"}, is_page=True),
    "member_password": Case("user.password_reset"),
    "member_second_factor": Case("user.second_factor_reset"),
    "member_remove": Case("user.removed"),
    "invitation": Case(
        "invitation.accepted", lambda w: {"password": PASSWORD, "repeated": PASSWORD}, follows=("user.signed_in",)
    ),
    "invitation_revoke": Case("invitation.revoked"),
    "tokens": Case("token.issued", lambda w: {"name": "new", "scopes": ["admin.read"]}),
    "token_revoke": Case("token.revoked"),
}


@pytest.fixture
def world(system: Actor, operator: User) -> World:
    made = make_world(system, operator)
    operator.set_password(PASSWORD)
    operator.role = Role.OWNER  # drives members as well
    operator.save()
    made.ids["email"] = operator.email
    return made


@pytest.fixture
def client(operator: User, world: World) -> Client:
    client = Client()
    client.force_login(operator)
    return client


def routes(resolver: URLResolver, prefix: str = "") -> Iterator[tuple[str, URLPattern]]:
    """Every address with its pattern, such as ``/tenants/<tenant_id>/``."""
    for each in resolver.url_patterns:
        text = prefix + str(each.pattern)
        if isinstance(each, URLResolver):
            yield from routes(each, text)
        else:
            plain = simplify_regex(re.sub(r"<\w+:(\w+)>", r"<\1>", text))
            yield plain if plain.startswith("/") else f"/{plain}", each


def everything() -> list[tuple[str, URLPattern]]:
    return list(routes(get_resolver()))


def filled(route: str, ids: dict[str, str]) -> str:
    return re.sub(r"<(\w+)>", lambda name: ids.get(name[1], "1"), route)


def test_every_address_that_takes_a_mutating_method_is_driven(client: Client) -> None:
    """A new route without a case fails here, and so does a case of a route that is gone."""
    found: dict[str, set[str]] = {}
    rest: set[tuple[str, str]] = set()
    for route, pattern in everything():
        if route in ANSWERS_ANY_METHOD:
            continue
        for method in METHODS:
            content_type = "application/json" if route.startswith("/api/") else "application/octet-stream"
            answer = client.generic(
                method, filled(route, {"digest": "0" * 64, "app_label": "tenants"}), b"{}", content_type=content_type
            )
            if answer.status_code == 405:
                continue
            if route.startswith("/api/v1"):
                rest.add((method, re.sub(r"<\w+>", "{}", route.removeprefix("/api/v1"))))
            else:
                found.setdefault(str(pattern.name or route), set()).add(method)
    assert rest == {(method, re.sub(r"{\w+}", "{}", route)) for method, route in MUTATIONS}
    assert found == {name: {"POST"} for name in (*CASES, *MACHINE)}


def shown_values(answer: Any) -> dict[str, Any]:
    """What a browser would send back of the page's own form, unchanged."""
    values = {field.html_name: field.value() for field in answer.context["form"]}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def drive(name: str, client: Client, world: World) -> list[AuditEntry]:
    """What a case of the console leaves in the audit log."""
    case = CASES[name]
    case.before(world)
    ids = {
        "tenant_id": _tenant(world), "key_id": world.ids["keys"], "group_id": world.ids["groups"],
        "tier_id": world.ids["tiers"], "pool_id": world.ids["pools"], "backend_id": world.ids["backends"],
        "price_list_id": world.ids["price-lists"], "hazard_id": world.ids["hazards"], "token_id": world.ids["tokens"],
        "member_id": world.ids["members"], "invitation_id": world.ids["invitations"],
        "text": world.ids["invitation_text"],
    }  # fmt: skip
    if name in ("predictor_cancel", "job_cancel"):
        ids["job_id"] = start_job(actor=SYSTEM).id
    if name == "job_retry":
        failed = BackgroundJob(kind="usage-coarsen-old", queue="default", requested_by="x", state=JobState.FAILED)
        failed.save()
        ids["job_id"] = failed.id
    route = next(route for route, pattern in everything() if pattern.name == name and "/api/" not in route)
    address = filled(route, ids)
    form = shown_values(client.get(address)) if case.is_page else {}
    form |= case.opened(client, world)
    newest = AuditEntry.objects.latest("id").id
    answer = client.post(address, {**form, **case.form(world)})
    assert answer.status_code in (200, 302), (name, answer.content)
    return list(AuditEntry.objects.filter(id__gt=newest))


def test_a_mutation_on_the_console_leaves_one_entry_with_before_and_after(world: World, operator: User) -> None:
    """One world for all of them, each in a savepoint of its own: to make it takes longer than to drive a case."""
    found = {}
    for name in CASES:
        client = Client()
        with transaction.atomic():
            if name not in ("sign_in", "sign_in_code"):
                client.force_login(operator)
            entries = drive(name, client, world)
            by = "invited@example.test" if name == "invitation" else operator.email
            found[name] = [(entry.action, by in entry.actor_label, states_of(entry)) for entry in entries]
            transaction.set_rollback(True)
    assert found == {
        name: [(action, True, expected_states(action)) for action in (case.action, *case.follows)]
        for name, case in CASES.items()
    }
