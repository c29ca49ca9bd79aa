"""Three people: an owner of the platform, a teammate of the tenant whose things are read, a stranger of another tenant.

Whatever belongs to a tenant is seen by the first two and does not exist for the third; what is the platform's exists
for the first only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from django.apps import apps

from controlplane.accounts.actions import issue_token, remove_user, reset_password, update_user
from controlplane.accounts.invitations import invite
from controlplane.accounts.models import OperatorToken, Role, User
from controlplane.accounts.queries import invitations, tokens
from controlplane.audit.models import AuditEntry
from controlplane.audit.queries import entries
from controlplane.common.access import TENANT_OF, visible, visible_tenant
from controlplane.common.actor import Actor, Scope, system_actor
from controlplane.common.errors import Conflict, Invalid, NotAllowed, NotFound
from controlplane.fleet import brakes, hazards
from controlplane.fleet import queries as fleet
from controlplane.fleet.actions import create_pool
from controlplane.fleet.models import Cancellation
from controlplane.keys.actions import issue_key, revoke_key, update_key
from controlplane.keys.models import ApiKey
from controlplane.keys.queries import keys
from controlplane.tenants import queries as tenant_queries
from controlplane.tenants.actions import update_tenant
from controlplane.tenants.models import Tenant
from controlplane.tiers.queries import tiers
from controlplane.usage import queries as usage
from controlplane.usage.models import Statement, UsageEvent
from tests.support.control_plane import api_client, book, make_key, make_pool, make_tenant, make_user, usage_event

pytestmark = pytest.mark.django_db


@dataclass(frozen=True)
class People:
    owner: User
    teammate: User
    stranger: User
    tenant: Tenant
    other: Tenant
    key: ApiKey

    def of(self, name: str) -> Actor:
        user: User = getattr(self, name)
        return user.actor


@pytest.fixture
def people(system: Actor) -> People:
    pool = make_pool(system)
    tenant, other = make_tenant(system, limits={"tokens_per_day": 1_000}), make_tenant(system)
    key, _ = make_key(system, tenant, pool)
    make_key(system, other, pool)
    return People(
        owner=make_user(role=Role.OWNER),
        teammate=make_user(role=Role.TENANT_ADMIN, tenant=tenant.id),
        stranger=make_user(role=Role.TENANT_ADMIN, tenant=other.id),
        tenant=tenant,
        other=other,
        key=key,
    )


# By model of TENANT_OF: what of it belongs to the tenant, as (id, rows the actor sees).
KINDS: dict[str, Callable[[People, Actor], tuple[Any, Any]]] = {
    "tenants.Tenant": lambda p, a: (p.tenant.pk, tenant_queries.tenants(actor=a)),
    "keys.ApiKey": lambda p, a: (p.key.pk, keys(actor=a)),
    "accounts.User": lambda p, a: (p.teammate.pk, visible(User.objects.all(), actor=a)),
    "accounts.OperatorToken": lambda p, a: (_token_of(p), tokens(actor=a)),
    "accounts.Invitation": lambda p, a: (_invitation_to(p), invitations(actor=a)),
    "fleet.Cancellation": lambda p, a: (_cancellation_of(p), brakes.cancellations(actor=a)),
    "usage.UsageEvent": lambda p, a: (_event_of(p), usage_events(a)),
    "usage.Statement": lambda p, a: (_statement_of(p), visible(Statement.objects.all(), actor=a)),
}


def _cancellation_of(people: People) -> str:
    found = Cancellation.objects.first()
    if found is None:
        found = brakes.cancel_request(actor=system_actor("test"), request_id="req_2", reason="x")
        found.tenant = people.tenant.id
        found.save()
    return str(found.pk)


def _invitation_to(people: People) -> str:
    found = people.tenant.invitations.first()
    if found is None:
        found, _ = invite(actor=people.of("teammate"), email="new@example.test", role=Role.TENANT_MEMBER)
    return str(found.pk)


def _event_of(people: People) -> Any:
    if not UsageEvent.objects.exists():
        book(usage_event(tenant=people.tenant.id), usage_event(tenant=people.other.id))
    return UsageEvent.objects.get(tenant=people.tenant.id).pk


def _statement_of(people: People) -> str:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    given = {"tenant_name": "x", "timezone": "UTC", "from_at": at, "to_at": at, "closed_at": at, "amount_micro": 0}
    row, _ = Statement.objects.get_or_create(tenant=people.tenant.id, month=at.date(), defaults=given)
    return row.id


def usage_events(actor: Actor) -> Any:
    return visible(UsageEvent.objects.all(), actor=actor)


def _token_of(people: People) -> str:
    row = people.teammate.tokens.first()
    if row is None:
        row, _ = issue_token(actor=people.of("teammate"), user=people.teammate, name="x", scopes=[Scope.TENANT_READ])
    return row.pk


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_tenants_things_are_seen_by_owner_and_teammate_and_do_not_exist_for_a_stranger(
    people: People, kind: str
) -> None:
    for name, is_seen in (("owner", True), ("teammate", True), ("stranger", False)):
        public_id, rows = KINDS[kind](people, people.of(name))
        assert rows.filter(pk=public_id).exists() == is_seen, name


def test_every_listed_model_has_the_field_that_is_named_and_the_rest_is_the_platforms(people: People) -> None:
    assert KINDS.keys() == TENANT_OF.keys()
    for label, field in TENANT_OF.items():
        apps.get_model(label).objects.filter(**{field: "x"}).exists()
    for model in apps.get_models():
        if model._meta.label in TENANT_OF:
            continue
        with pytest.raises(NotFound):
            visible(model._default_manager.all(), actor=people.of("teammate"))
        visible(model._default_manager.all(), actor=people.of("owner"))


PLATFORM: dict[str, Callable[[Actor], Any]] = {
    "tiers": lambda a: tiers(actor=a),
    "groups": lambda a: tenant_queries.groups(actor=a),
    "pools": lambda a: fleet.pools(actor=a),
    "backends": lambda a: fleet.backends(actor=a),
    "routers": lambda a: fleet.routers(actor=a),
    "hazards": lambda a: hazards.hazards(actor=a),
    "audit": lambda a: entries(actor=a),
    "quarantine": lambda a: usage.quarantined(actor=a),
}


@pytest.mark.parametrize("kind", list(PLATFORM))
def test_what_is_the_platforms_does_not_exist_for_people_of_a_tenant(people: People, kind: str) -> None:
    PLATFORM[kind](people.of("owner"))
    with pytest.raises(NotFound):
        PLATFORM[kind](people.of("teammate"))


def test_a_report_is_narrowed_to_the_own_tenant(people: People) -> None:
    assert visible_tenant("", actor=people.of("owner")) == ""
    assert visible_tenant(people.other.id, actor=people.of("owner")) == people.other.id
    assert visible_tenant("", actor=people.of("teammate")) == people.tenant.id
    with pytest.raises(NotFound):
        visible_tenant(people.other.id, actor=people.of("teammate"))
    nobody = Actor(kind="token", id="t", label="t", tenant=people.tenant.id)
    with pytest.raises(NotAllowed):
        visible_tenant("", actor=nobody)


def test_a_tenants_admin_has_its_keys_and_no_others(people: People) -> None:
    admin, stranger = people.of("teammate"), people.of("stranger")
    key, _ = issue_key(actor=admin, tenant_id=people.tenant.id, name="mine", limits={"tokens_per_day": 1_000})
    update_key(actor=admin, key_id=key.id, name="still mine")
    for use_case in (update_key, revoke_key):
        with pytest.raises(NotFound):
            use_case(actor=stranger, key_id=key.id)
    for wanted in ("ten_missing", people.tenant.id):
        with pytest.raises(Invalid) as caught:
            issue_key(actor=stranger, tenant_id=wanted, name="x")
        assert caught.value.fields == {"tenant": [f"no tenant {wanted!r}"]}
    revoke_key(actor=admin, key_id=key.id)
    assert AuditEntry.objects.filter(tenant=people.tenant.id, actor_id=people.teammate.id).count() == 3


def test_keys_of_a_tenants_admin_stay_within_its_limits(people: People) -> None:
    limits = {"tokens_per_day": 1_001}
    with pytest.raises(Invalid) as caught:
        issue_key(actor=people.of("teammate"), tenant_id=people.tenant.id, name="x", limits=limits)
    assert list(caught.value.fields) == ["limits.tokens_per_day"]
    with pytest.raises(Invalid):
        update_key(actor=people.of("teammate"), key_id=people.key.id, limits=limits)
    update_key(actor=people.of("owner"), key_id=people.key.id, limits=limits)


def test_a_tenants_member_reads_only(people: People, system: Actor) -> None:
    member = make_user(role=Role.TENANT_MEMBER, tenant=people.tenant.id).actor
    assert keys(actor=member).filter(pk=people.key.pk).exists()
    for act in (
        lambda: issue_key(actor=member, tenant_id=people.tenant.id, name="x"),
        lambda: revoke_key(actor=member, key_id=people.key.id),
        lambda: update_user(actor=member, user_id=people.teammate.id, name="x"),
    ):
        with pytest.raises(NotAllowed):
            act()


def test_a_tenants_admin_changes_nothing_of_the_platform(people: People) -> None:
    with pytest.raises(NotFound):
        update_tenant(actor=people.of("teammate"), tenant_id=people.tenant.id, weight=100.0)
    with pytest.raises(NotFound):
        create_pool(actor=people.of("teammate"), name="mine")


def test_only_an_owner_gives_roles_and_a_tenants_admin_within_the_tenant(people: People) -> None:
    admin = people.of("teammate")
    colleague = make_user(role=Role.TENANT_MEMBER, tenant=people.tenant.id)
    assert update_user(actor=admin, user_id=colleague.id, role=Role.TENANT_ADMIN).role == Role.TENANT_ADMIN
    for role, tenant in ((Role.OPERATOR, None), (Role.OWNER, None), (Role.TENANT_ADMIN, people.other.id)):
        with pytest.raises(Invalid):
            update_user(actor=admin, user_id=colleague.id, role=role, tenant=tenant)
    for other in (people.stranger, people.owner):
        for use_case in (update_user, reset_password, remove_user):
            with pytest.raises(NotFound):
                use_case(actor=admin, user_id=other.id)
    operator = make_user(role=Role.OPERATOR)
    with pytest.raises(NotAllowed):
        update_user(actor=operator.actor, user_id=operator.id, role=Role.OWNER)
    with pytest.raises(NotAllowed):
        reset_password(actor=operator.actor, user_id=people.owner.id)
    with pytest.raises(Conflict):
        remove_user(actor=admin, user_id=people.teammate.id)


def test_a_token_never_gives_more_than_its_holders_role_and_tenant(people: People) -> None:
    client = api_client(people.teammate, "tenant.read")
    OperatorToken.objects.update(scopes=["admin.read", "admin.write", "admin.members", "tenant.read"])
    assert client.send("GET", f"/keys/{people.key.id}").status_code == 200
    assert client.send("GET", "/pools").status_code == 404
    assert client.send("POST", f"/keys/{people.key.id}/revoke").status_code == 403
    with pytest.raises(NotAllowed):
        issue_token(actor=people.of("teammate"), user=people.teammate, name="x", scopes=["admin.read"])
    with pytest.raises(NotAllowed):
        issue_token(actor=people.of("owner"), user=people.owner, name="x", scopes=["tenant.read"])
    # Made one of the platform's people, the same token opens no tenant at all: it is revoked.
    update_user(actor=people.of("owner"), user_id=people.teammate.id, role=Role.VIEWER)
    assert client.send("GET", f"/keys/{people.key.id}").status_code == 401


def test_one_who_was_demoted_loses_at_once_what_the_role_gave(people: People) -> None:
    operator = make_user()
    client = api_client(operator, "admin.read", "admin.write")
    assert client.send("POST", "/tiers", {"name": "quick", "rank": 1_234}).status_code == 201
    update_user(actor=people.of("owner"), user_id=operator.id, role=Role.VIEWER)
    assert client.send("POST", "/tiers", {"name": "quicker", "rank": 1_235}).status_code == 403
    assert client.send("GET", "/tiers").status_code == 200
