"""Django's admin for emergencies: owners read rows; nothing can be written there, and no secret is shown."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import models
from django.test import Client
from django.urls import get_resolver, reverse

from controlplane.accounts.models import Role, User
from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor
from controlplane.staff.site import SHOWN, make_site, shown_fields
from tests.support.console_world import enliven, make_world
from tests.support.control_plane import make_tenant, make_user

pytestmark = pytest.mark.django_db

SECRET = {
    "accounts.User": {"password", "totp_secret", "recovery_digests", "oidc_subject"},
    "accounts.OperatorToken": {"digest"},
    "accounts.Invitation": {"digest"},
    "fleet.Router": {"token_digest"},
    "keys.ApiKey": {"digest"},
    "common.BackgroundJob": {"lease"},
}


def admins() -> dict[str, Any]:
    return {admin.opts.label: admin for admin in make_site()._registry.values()}


@pytest.fixture
def client() -> Client:
    client = Client()
    client.force_login(make_user(role=Role.OWNER))
    return client


def pages() -> list[str]:
    """Every address, with an id that need not be there."""
    found = [reverse("admin:index"), reverse("admin:jsi18n")]
    found += [reverse("admin:app_list", args=[app]) for app in sorted({label.split(".")[0] for label in SHOWN})]
    for label in SHOWN:
        name = f"admin:{label.replace('.', '_').lower()}"
        found += [reverse(f"{name}_changelist"), reverse(f"{name}_change", args=["1"])]
        found.append(reverse(f"{name}_history", args=["1"]))
    return found


def test_an_owner_reads_every_list_and_row(client: Client, system: Actor) -> None:
    enliven(make_world(system), system)
    seen = 0
    for label, admin in admins().items():
        name = f"admin:{label.replace('.', '_').lower()}"
        assert client.get(reverse(f"{name}_changelist")).status_code == 200, label
        row = admin.model._default_manager.first()
        if row is not None:
            seen += 1
            answer = client.get(reverse(f"{name}_change", args=[row.pk]))
            assert answer.status_code == 200, label
            assert 'name="_save"' not in answer.content.decode(), label
    assert seen > 10


@pytest.mark.parametrize("role", [*(r for r in Role if r != Role.OWNER), None])
def test_for_all_others_it_does_not_exist(role: Role | None, system: Actor) -> None:
    client = Client()
    if role is not None:
        tenant = make_tenant(system).id if role.value.startswith("tenant_") else None
        client.force_login(make_user(role=role, tenant=tenant))
    for address in pages():
        answer = client.get(address)
        if role is None:
            assert answer.headers["location"].startswith("/sign-in/?next=/staff/")
        else:
            assert answer.status_code == 404


def test_nothing_is_written_by_any_address_or_method(client: Client, system: Actor) -> None:
    owner = make_user(role=Role.OWNER)
    entries = AuditEntry.objects.count()
    change = reverse("admin:accounts_user_change", args=[owner.id])
    for address in (*pages(), change, f"{change}?_popup=1"):
        for method in ("post", "put", "patch", "delete"):
            assert getattr(client, method)(address, {"role": "viewer", "_save": "1"}).status_code == 405, address
    for tail in ("add/", f"{owner.id}/delete/", f"{owner.id}/password/", "autocomplete/"):
        assert client.post(f"/staff/accounts/user/{tail}").status_code in (404, 405)
        assert client.get(f"/staff/accounts/user/{tail}").status_code in (302, 404)
    for tail in ("password_change/", "login/", "logout/", "autocomplete/", "r/1/1/"):
        assert client.get(f"/staff/{tail}").status_code == 404
    assert User.objects.get(pk=owner.id).role == Role.OWNER
    assert AuditEntry.objects.count() == entries


def test_it_has_no_address_that_could_write() -> None:
    (site,) = (each for each in get_resolver().url_patterns if str(each.pattern) == "staff/")
    names = set()
    for each in site.url_patterns:
        inner = getattr(each, "url_patterns", None) or [each]
        names |= {str(pattern.name).rpartition("_")[2] for pattern in inner}
    assert names == {"index", "list", "jsi18n", "changelist", "change", "history"}


def test_no_secret_and_no_bytes_are_shown() -> None:
    for label, admin in admins().items():
        fields = {field.name: field for field in admin.model._meta.concrete_fields}
        shown = set(shown_fields(admin.model)) | set(admin.get_list_display(None))
        assert not shown & SECRET.get(label, set()), label
        assert SECRET.get(label, set()) <= fields.keys(), label
        assert not [n for n in shown if isinstance(fields[n], models.BinaryField)], label


def test_the_history_of_a_row_is_the_audit_log(client: Client) -> None:
    address = reverse("admin:tenants_tenant_history", args=["ten_1"])
    assert client.get(address).headers["location"] == "/audit/?object_id=ten_1"


def test_no_list_is_filtered_or_sorted_by_a_secret(client: Client) -> None:
    """Else a secret could be guessed letter by letter from which rows are left."""
    for label, admin in admins().items():
        address = reverse(f"admin:{label.replace('.', '_').lower()}_changelist")
        for name in SECRET.get(label, ()):
            for lookup in (name, f"{name}__startswith", f"{name}__gte", f"{name}__isnull"):
                assert client.get(address, {lookup: "a"}).status_code == 400, (label, lookup)
        assert not {field.removeprefix("=") for field in admin.get_search_fields(None)} & SECRET.get(label, set())
    users = reverse("admin:accounts_user_changelist")
    assert client.get(users, {"role__exact": "viewer"}).status_code == 200
    tokens = reverse("admin:accounts_operatortoken_changelist")
    assert client.get(tokens, {"user__password__startswith": "a"}).status_code == 400


def test_a_row_is_found_by_its_id_and_its_names(client: Client, system: Actor) -> None:
    tenant, other = make_tenant(system, name="Aardvark"), make_tenant(system, name="Zebra")
    address = reverse("admin:tenants_tenant_changelist")
    for wanted in (tenant.id, tenant.slug, "aardv"):
        text = client.get(address, {"q": wanted}).content.decode()
        assert tenant.id in text
        assert other.id not in text
    for label in SHOWN:
        assert client.get(reverse(f"admin:{label.replace('.', '_').lower()}_changelist"), {"q": "7"}).status_code == 200


@pytest.mark.parametrize("address", ["accounts/user/?email=%00", "accounts/user/?q=%00", "accounts/user/a%00/change/"])
def test_nul_is_found_nowhere(client: Client, address: str) -> None:
    assert client.get(f"/staff/{address}").status_code == 404
