"""Tenants that are suspended, deleted, or changed many at once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from django.test import Client

from controlplane.accounts.actions import reset_password, update_user
from controlplane.accounts.invitations import invite
from controlplane.accounts.models import Invitation, Role, User
from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor
from controlplane.common.errors import Conflict, Invalid, NotFound
from controlplane.keys.actions import issue_key
from controlplane.keys.models import ApiKey
from controlplane.rollout.models import Revision
from controlplane.rollout.queries import current_body
from controlplane.tenants.actions import delete_group, delete_tenant, resume_tenant, suspend_tenant, update_tenant
from controlplane.tenants.bulk import change_tenants
from controlplane.tenants.models import Tenant
from controlplane.tenants.queries import tenant_names
from controlplane.tiers.actions import delete_tier
from controlplane.tiers.models import Tier
from router_ext.wire.controlplane import ConfigSnapshot
from tests.support.control_plane import (
    ApiClient,
    api_client,
    make_group,
    make_key,
    make_pool,
    make_tenant,
    make_tier,
    make_user,
)

pytestmark = pytest.mark.django_db


def published() -> ConfigSnapshot:
    return msgspec.json.decode(current_body()[2], type=ConfigSnapshot)


def test_suspending_lets_what_runs_finish_or_cuts_it_by_choice(system: Actor) -> None:
    tenant = make_tenant(system)
    suspend_tenant(actor=system, tenant_id=tenant.id, reason="unpaid")
    assert [t.state for t in published().tenants] == ["suspended"]
    assert AuditEntry.objects.latest("id").after == {"state": "suspended", "reason": "unpaid"}
    suspend_tenant(actor=system, tenant_id=tenant.id, is_cut=True)
    assert [t.state for t in published().tenants] == ["stopped"]
    resume_tenant(actor=system, tenant_id=tenant.id)
    assert [t.state for t in published().tenants] == ["active"]


def test_a_tenant_is_deleted_only_when_suspended_and_leaves_its_name_to_the_books(system: Actor) -> None:
    group, pool = make_group(system), make_pool(system)
    tenant = make_tenant(system, group=group.name, tiers=["standard", "batch"])
    keys = [make_key(system, tenant, pool, tiers=["batch"], default_tier="batch")[0] for _ in range(2)]
    name, slug = tenant.name, tenant.slug
    with pytest.raises(Conflict, match="suspend it first"):
        delete_tenant(actor=system, tenant_id=tenant.id)
    suspend_tenant(actor=system, tenant_id=tenant.id)
    number = Revision.objects.count()
    delete_tenant(actor=system, tenant_id=tenant.id)
    assert Revision.objects.count() == number + 1
    assert (published().tenants, published().keys) == ([], [])
    assert not ApiKey.objects.filter(revoked_at=None).exists()
    assert tenant_names()[tenant.id] == f"{name} (deleted)"
    entry = AuditEntry.objects.latest("id")
    assert entry.before["slug"] == slug
    assert entry.after["keys_revoked"] == [key.public_id for key in keys]
    # What it was in can go, and its short name can be given again.
    delete_group(actor=system, group_id=group.id)
    for name in ("batch", "standard"):
        delete_tier(actor=system, tier_id=Tier.objects.get(name=name).id)
    assert make_tenant(system, slug=slug).id != tenant.id


def test_the_people_of_a_deleted_tenant_are_shut_out_until_they_get_another(system: Actor) -> None:
    tenant, other = make_tenant(system), make_tenant(system)
    admin, neighbour = (make_user(role=Role.TENANT_ADMIN, tenant=t.id) for t in (tenant, other))
    own, others = (api_client(user, "tenant.read", "tenant.write") for user in (admin, neighbour))
    browser = Client()
    browser.force_login(admin)
    invite(actor=system, email="late@example.test", role=Role.TENANT_MEMBER, tenant=tenant.id)
    invite(actor=system, email="on.time@example.test", role=Role.TENANT_MEMBER, tenant=other.id)
    suspend_tenant(actor=system, tenant_id=tenant.id)
    assert (own.send("GET", "/keys").status_code, browser.get("/usage/").status_code) == (200, 200)
    delete_tenant(actor=system, tenant_id=tenant.id)
    entry = AuditEntry.objects.latest("id")
    assert entry.after["accounts_closed"] == [admin.id]
    assert entry.after["invitations_revoked"] == [Invitation.objects.get(email="late@example.test").id]
    assert own.send("GET", "/keys").status_code == 401
    assert others.send("GET", "/keys").status_code == 200
    assert browser.get("/usage/").headers["location"].startswith("/sign-in/")
    assert Invitation.objects.get(email="on.time@example.test").revoked_at is None
    # Only with a tenant that there is.
    with pytest.raises(Invalid, match="no tenant"):
        update_user(actor=system, user_id=admin.id, is_active=True)
    with pytest.raises(Conflict, match="deleted"):
        reset_password(actor=system, user_id=admin.id)
    update_user(actor=system, user_id=admin.id, is_active=True, tenant=other.slug)
    assert reset_password(actor=system, user_id=admin.id)
    assert own.send("GET", "/keys").status_code == 401


def test_nothing_can_be_done_with_a_deleted_tenant(system: Actor, api: ApiClient) -> None:
    tenant, pool = make_tenant(system), make_pool(system)
    suspend_tenant(actor=system, tenant_id=tenant.id)
    delete_tenant(actor=system, tenant_id=tenant.id)
    assert api.send("GET", f"/tenants/{tenant.id}").status_code == 404
    assert api.send("GET", "/tenants").json()["results"] == []
    for use_case in (delete_tenant, resume_tenant, suspend_tenant):
        with pytest.raises(NotFound):
            use_case(actor=system, tenant_id=tenant.id)
    with pytest.raises(NotFound):
        update_tenant(actor=system, tenant_id=tenant.id, weight=2.0)
    for wrong in (
        lambda: issue_key(actor=system, tenant_id=tenant.id, name="x", default_pool=pool.id),
        lambda: change_tenants(actor=system, tenant_ids=[tenant.id], weight=2.0),
    ):
        with pytest.raises(Invalid):
            wrong()


def test_many_tenants_are_changed_by_one_entry_and_one_revision(system: Actor, api: ApiClient) -> None:
    make_tier(system, "gold")
    tenants = [make_tenant(system) for _ in range(3)]
    update_tenant(actor=system, tenant_id=tenants[2].id, weight=7.0)
    entries, revisions = AuditEntry.objects.count(), Revision.objects.count()
    body = {"tenants": [t.id for t in tenants], "weight": 7, "default_tier": "gold", "reason": "new contract"}
    changed = api.send("POST", "/tenants/bulk", body).json()["changed"]
    assert changed == [t.id for t in tenants]
    assert (AuditEntry.objects.count(), Revision.objects.count()) == (entries + 1, revisions + 1)
    entry = AuditEntry.objects.latest("id")
    assert (entry.bulk, entry.object_id, entry.after["reason"]) == (changed, "", "new contract")
    tiers = {"default_tier": "standard", "tiers": ["standard"]}
    assert entry.before == {changed[0]: {"weight": 1, **tiers}, changed[1]: {"weight": 1, **tiers}, changed[2]: tiers}
    assert [(t.weight, t.default_tier) for t in published().tenants] == [(7.0, "gold")] * 3
    assert set(Tenant.objects.values_list("version", flat=True)) == {2, 3}
    assert api.send("POST", "/tenants/bulk", body).json() == {"changed": []}
    assert AuditEntry.objects.count() == entries + 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tenants": []}, "tenants"),
        ({"tenants": ["ten_x"]}, "tenants"),
        ({"weight": 0}, "weight"),
        ({"default_tier": "unheard"}, "default_tier"),
        ({"state": "asleep"}, "state"),
        ({"weight": None}, "weight"),
    ],
)
def test_of_many_tenants_none_is_changed_where_something_is_wrong(
    changes: dict[str, Any], field: str, system: Actor, api: ApiClient
) -> None:
    tenants = [make_tenant(system) for _ in range(2)]
    body = {"tenants": [t.id for t in tenants], "weight": 3, **changes}
    if changes.get("tenants"):
        body["tenants"] = [tenants[0].id, *changes["tenants"]]
    answer = api.send("POST", "/tenants/bulk", body)
    assert (answer.status_code, field in answer.json()["errors"]) == (422, True)
    assert set(Tenant.objects.values_list("weight", flat=True)) == {1.0}


def test_ticked_tenants_are_changed_on_the_console(system: Actor, operator: User) -> None:
    tenants = [make_tenant(system) for _ in range(3)]
    client = Client()
    client.force_login(operator)
    page = client.get("/tenants/").content.decode()
    assert all(f'name="tenant" value="{t.id}" form="bulk"' in page for t in tenants)
    ticked = [t.id for t in tenants[:2]]
    answer = client.post("/tenants/bulk/", {"tenant": ticked, "what": "suspend", "reason": "x"}, follow=True)
    assert "2 tenants changed." in answer.content.decode()
    for others, said in ((tenants[1:2], "Nothing changed"), (tenants[1:], "1 of 2 tenants changed; the others")):
        body = {"tenant": [t.id for t in others], "what": "suspend", "reason": "x"}
        assert said in client.post("/tenants/bulk/", body, follow=True).content.decode()
    change_tenants(actor=system, tenant_ids=[tenants[2].id], reason="", state="active")
    assert [t.state for t in Tenant.objects.order_by("id")] == ["suspended", "suspended", "active"]
    for wrong in ({"tenant": ticked, "what": "weight"}, {"what": "activate"}, {"tenant": ticked, "what": "x"}):
        assert 'class="message error' in client.post("/tenants/bulk/", wrong, follow=True).content.decode()
    assert Tenant.objects.filter(state="suspended").count() == 2


def test_a_tenant_is_deleted_on_the_console(system: Actor, operator: User) -> None:
    tenant = make_tenant(system)
    client = Client()
    client.force_login(operator)
    page = f"/tenants/{tenant.id}/"
    assert "suspend it first" in client.post(f"{page}delete/", follow=True).content.decode()
    client.post(f"{page}state/", {"state": "suspended", "is_cut": "on"})
    assert "Let it go on" in client.get(page).content.decode()
    assert "Tenant deleted" in client.post(f"{page}delete/", follow=True).content.decode()
    assert client.get(page).status_code == 404
