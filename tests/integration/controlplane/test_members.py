"""Members and invitations: who may invite whom, a link that opens one account once, and pages of a tenant's people."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.accounts.invitations import accept_invitation, invite, revoke_invitation
from controlplane.accounts.models import Invitation, Role, User
from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor
from controlplane.common.clock import utc_now
from controlplane.common.errors import Conflict, Invalid, NotAllowed, NotFound
from controlplane.tenants.models import Tenant
from router_ext.wire.controlplane import LiveRequest, PoolState, TenantState
from tests.support.control_plane import (
    PASSWORD,
    api_client,
    book,
    make_key,
    make_pool,
    make_tenant,
    make_user,
    signed_in,
    tell,
    usage_event,
)

pytestmark = pytest.mark.django_db


@pytest.fixture
def owner(db: None) -> User:
    return make_user(role=Role.OWNER)


@pytest.fixture
def tenant(system: Actor) -> Tenant:
    return make_tenant(system, name="Own tenant")


def test_the_second_of_two_owners_is_told(owner: User) -> None:
    client, member = signed_in(Role.OWNER), make_user(role=Role.VIEWER)
    page = reverse("console:member", args=[member.id])
    form = {"version": client.get(page).context["form"].initial["version"], "tenant": "", "is_active": "on"}
    assert client.post(page, {**form, "role": "operator"}).status_code == 302
    second = client.post(page, {**form, "role": "owner"})
    assert second.status_code == 200
    assert "changed" in str(second.context["form"].errors)
    member.refresh_from_db()
    assert member.role == Role.OPERATOR


def link_of(page: Any) -> str:
    text = page.content.decode()
    start = text.index('id="invitation-link">') + len('id="invitation-link">')
    return text[start : text.index("<", start)]


@pytest.mark.parametrize("path", ["/keys", "/statements", "/usage/events", "/usage/report"])
def test_whoever_asks_for_another_tenant_is_told_that_there_is_none(tenant: Tenant, system: Actor, path: str) -> None:
    teammate = api_client(make_user(role=Role.TENANT_MEMBER, tenant=tenant.id), "tenant.read")
    assert teammate.send("GET", f"{path}?tenant={tenant.id}").status_code == 200
    for other in (make_tenant(system).id, "ten_missing"):
        assert teammate.send("GET", f"{path}?tenant={other}").json()["status"] == 404


def test_a_link_opens_one_account_once(tenant: Tenant) -> None:
    client = signed_in(Role.OWNER)
    form = {"email": "New@Example.Test", "role": "tenant_admin", "tenant": tenant.slug}
    link = link_of(client.post(reverse("console:members"), form))
    assert "invitation-link" not in client.get(reverse("console:members")).content.decode()
    stranger = Client()
    assert "new@example.test" in stranger.get(link).content.decode()
    chosen = {"name": "New One", "password": PASSWORD, "repeated": PASSWORD}
    weak = {**chosen, "password": "short", "repeated": "short"}
    assert "too short" in stranger.post(link, weak).content.decode()
    opened = stranger.post(link, chosen, follow=True)
    assert opened.redirect_chain[-1] == ("/", 302), opened.redirect_chain
    assert (opened.status_code, opened.wsgi_request.user.email) == (200, "new@example.test")
    assert "Your account is open." in opened.content.decode()
    assert stranger.post(link, chosen).status_code == 404
    stranger = Client()
    user = User.objects.get(email="new@example.test")
    assert (user.role, user.tenant, user.name) == (Role.TENANT_ADMIN, tenant, "New One")
    answer = stranger.post(reverse("console:sign_in"), {"email": user.email, "password": PASSWORD})
    assert answer.status_code == 302
    page = stranger.get(reverse("console:tenant", args=[tenant.id]))
    assert page.status_code == 200
    assert set(AuditEntry.objects.filter(tenant=tenant.id).values_list("action", flat=True)) >= {
        "invitation.created", "invitation.accepted",
    }  # fmt: skip
    assert link.rstrip("/").rpartition("/")[2] not in str(list(AuditEntry.objects.values()))


def test_a_link_whose_email_has_an_account_meanwhile_says_so(owner: User) -> None:
    _, text = invite(actor=owner.actor, email="a@example.test", role=Role.VIEWER)
    make_user(email="a@example.test")
    link = reverse("console:invitation", args=[text])
    answer = Client().post(link, {"name": "", "password": PASSWORD, "repeated": PASSWORD})
    assert (answer.status_code, "exists" in answer.content.decode()) == (409, True)


def test_an_invitation_that_lapsed_or_was_taken_back_opens_nothing(owner: User, system: Actor) -> None:
    _, first_text = invite(actor=owner.actor, email="a@example.test", role=Role.VIEWER)
    # The last one counts.
    second, second_text = invite(actor=owner.actor, email="a@example.test", role=Role.OPERATOR)
    third, third_text = invite(actor=owner.actor, email="b@example.test", role=Role.VIEWER)
    Invitation.objects.filter(pk=second.pk).update(expires_at=utc_now() - timedelta(seconds=1))
    revoke_invitation(actor=owner.actor, invitation_id=third.id)
    for text in (first_text, second_text, third_text, "fli_nonsense", first_text[:-1] + "0"):
        with pytest.raises(NotFound):
            accept_invitation(actor=system, text=text, name="", password=PASSWORD)
    assert not User.objects.filter(email__in=("a@example.test", "b@example.test")).exists()


def test_a_tenants_admin_invites_into_the_own_tenant_only(tenant: Tenant, system: Actor, owner: User) -> None:
    admin = make_user(role=Role.TENANT_ADMIN, tenant=tenant.id).actor
    invitation, _ = invite(actor=admin, email="a@example.test", role=Role.TENANT_MEMBER)
    assert invitation.tenant == tenant
    for role, other in ((Role.VIEWER, None), (Role.OWNER, None), (Role.TENANT_ADMIN, make_tenant(system).id)):
        with pytest.raises(Invalid):
            invite(actor=admin, email="b@example.test", role=role, tenant=other)
    invite(actor=owner.actor, email="c@example.test", role=Role.VIEWER)
    invite(actor=owner.actor, email="e@example.test", role=Role.TENANT_ADMIN, tenant=make_tenant(system).id)
    make_user(role=Role.OPERATOR, email="f@example.test")
    make_user(role=Role.TENANT_ADMIN, email="g@example.test", tenant=make_tenant(system).id)
    told = set()
    for email in (f"{letter}@example.test" for letter in "cefg"):
        with pytest.raises(Conflict) as refused:
            invite(actor=admin, email=email, role=Role.TENANT_MEMBER)
        told.add(refused.value.message.replace(email, ""))
    assert told == {" cannot be invited: the address is in use elsewhere"}
    make_user(role=Role.TENANT_MEMBER, email="h@example.test", tenant=tenant.id)
    with pytest.raises(Conflict, match="exists"):
        invite(actor=admin, email="h@example.test", role=Role.TENANT_MEMBER)
    for user in (make_user(role=Role.OPERATOR), make_user(role=Role.TENANT_MEMBER, tenant=tenant.id)):
        with pytest.raises(NotAllowed):
            invite(actor=user.actor, email="d@example.test", role=Role.TENANT_MEMBER, tenant=tenant.id)


def test_a_role_fits_its_tenant(owner: User, tenant: Tenant) -> None:
    for role, of in ((Role.TENANT_ADMIN, None), (Role.OPERATOR, tenant.id), (Role.TENANT_ADMIN, "ten_no"), ("x", None)):
        with pytest.raises(Invalid):
            invite(actor=owner.actor, email="a@example.test", role=role, tenant=of)


def test_the_members_page_changes_closes_resets_and_removes(system: Actor, tenant: Tenant) -> None:
    client = signed_in(Role.OWNER)
    member = make_user(role=Role.VIEWER, password=PASSWORD)
    theirs = Client()
    theirs.force_login(member)
    page = reverse("console:member", args=[member.id])
    assert client.post(page, {"role": "tenant_member", "tenant": tenant.slug, "is_active": "on"}).status_code == 302
    member.refresh_from_db()
    assert (member.role, member.tenant) == (Role.TENANT_MEMBER, tenant)
    assert theirs.get(reverse("console:pools")).status_code == 404
    answer = client.post(reverse("console:member_password", args=[member.id]))
    text = answer.content.decode().partition('id="one-time-password">')[2].partition("<")[0]
    member.refresh_from_db()
    assert member.check_password(text)
    assert theirs.get("/").status_code == 302
    assert client.post(page, {"role": "tenant_member", "tenant": tenant.slug}).status_code == 302
    member.refresh_from_db()
    assert not member.is_active
    client.post(reverse("console:member_remove", args=[member.id]))
    assert not User.objects.filter(pk=member.pk).exists()


def test_pages_of_a_tenants_people_show_their_tenant_and_nobody_elses(system: Actor, tenant: Tenant) -> None:
    other, pool = make_tenant(system, name="Somebody else"), make_pool(system)
    make_key(system, tenant, pool, name="own key")
    make_key(system, other, pool, name="foreign key")
    book(usage_event(tenant=tenant.id, request="req_own"), usage_event(tenant=other.id, request="req_foreign"))
    oldest = [
        LiveRequest(
            request=f"live_{t.slug}",
            event=f"evt_{t.slug}",
            key="key_a",
            tenant=t.id,
            tier="standard",
            arrived_at_us=1,
            output_tokens=0,
        )
        for t in (tenant, other)
    ]
    states = [TenantState(tenant=t.id, queued=3, running=1) for t in (tenant, other)]
    tell(pools=[PoolState(pool=pool.id, policy="fifo", tenants=states, oldest=oldest)])
    client = signed_in(Role.TENANT_MEMBER, tenant=tenant.id)
    for address in ("/", "/live/fragment/", f"/tenants/{tenant.id}/", "/requests/", "/usage/", "/members/", "/tokens/"):
        text = client.get(address).content.decode()
        for foreign in ("Somebody else", other.id, other.slug, "foreign key", "req_foreign"):
            assert foreign not in text, (address, foreign)
    assert "req_own" in client.get("/").content.decode()
    assert f"live_{tenant.slug}" in client.get("/requests/").content.decode()
    assert client.get("/tenants/").headers["location"] == f"/tenants/{tenant.id}/"
    assert client.get(f"/usage/?tenant={other.id}").status_code == 404
    assert "has been booked" in client.get("/requests/?id=req_foreign").content.decode()
    assert "Pools" not in client.get("/").content.decode()
    # A member reads: no form changes anything.
    assert 'method="post" action="/tenants/' not in client.get(f"/tenants/{tenant.id}/").content.decode()


def test_a_tenants_admin_issues_and_revokes_keys_on_the_page(system: Actor, tenant: Tenant) -> None:
    pool = make_pool(system)
    client = signed_in(Role.TENANT_ADMIN, tenant=tenant.id)
    answer = client.post(reverse("console:key_new", args=[tenant.id]), {"name": "ours", "default_pool": pool.name})
    assert 'id="key-text"' in answer.content.decode()
    key = tenant.keys.get()
    client.post(reverse("console:key_revoke", args=[tenant.id, key.id]))
    key.refresh_from_db()
    assert key.revoked_at is not None


def test_rest_invites_once_per_key_and_shows_the_link_once(owner: User) -> None:
    client = api_client(owner, "admin.read", "admin.members")
    body = {"email": "a@example.test", "role": "viewer"}
    first = client.send("POST", "/invitations", body, idempotency_key="1")
    again = client.send("POST", "/invitations", body, idempotency_key="1")
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json()["link"].startswith("http://testserver/invitations/fli_")
    assert again.json() == {**first.json(), "link": None}
    assert Client().get(first.json()["link"]).status_code == 200


def test_the_scope_of_members_alone_manages_members(system: Actor) -> None:
    owner, member = make_user(role=Role.OWNER), make_user(role=Role.VIEWER)
    client = api_client(owner, "admin.members")
    assert member.id in {row["id"] for row in client.send("GET", "/members").json()["results"]}
    assert client.send("PATCH", f"/members/{member.id}", {"role": "operator"}).json()["role"] == "operator"
    made = client.send("POST", "/invitations", {"email": "a@example.test", "role": "viewer"})
    assert made.status_code == 201
    assert client.send("POST", f"/invitations/{made.json()['id']}/revoke").status_code == 200
    assert client.send("DELETE", f"/members/{member.id}").status_code == 204
    assert client.send("GET", "/tokens").status_code == 403
    assert client.send("GET", "/tenants").status_code == 403
