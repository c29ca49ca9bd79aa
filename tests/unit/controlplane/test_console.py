"""The console as a browser without scripts sees it."""

from __future__ import annotations

import csv
import io
import re

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.accounts import actions as account_actions
from controlplane.accounts.models import Role
from controlplane.common.actor import system_actor
from controlplane.fleet import actions as fleet_actions
from controlplane.keys.models import ApiKey
from controlplane.tenants.models import Tenant
from controlplane.tiers import actions as tier_actions

pytestmark = pytest.mark.django_db

PASSWORD = "correct horse battery staple"
SYSTEM = system_actor("test")


def signed_in(role: str) -> Client:
    """A client with a session of a person who has chosen a password."""
    user, one_time = account_actions.create_user(actor=SYSTEM, email=f"{role}@example.org", role=role)
    account_actions.change_password(actor=user.actor, user=user, old_password=one_time, new_password=PASSWORD)
    client = Client()
    answer = client.post(reverse("console:sign_in"), {"email": user.email, "password": PASSWORD})
    assert answer.status_code == 302, answer.content
    return client


@pytest.fixture
def operator() -> Client:
    return signed_in(Role.OPERATOR)


@pytest.fixture
def platform() -> None:
    tier_actions.create_tier(actor=SYSTEM, name="interactive", rank=0, ttft_target_s=2.0)
    tier_actions.create_tier(actor=SYSTEM, name="batch", rank=50)
    fleet_actions.create_pool(actor=SYSTEM, name="tiny-model")


def make_tenant(client: Client, **changes: object) -> Tenant:
    form = {
        "name": "Web chat", "slug": "", "weight": "3", "tiers": ["interactive", "batch"],
        "default_tier": "interactive", "max_queued": "100",
    }  # fmt: skip
    answer = client.post(reverse("console:tenant_new"), {**form, **changes})
    assert answer.status_code == 302, answer.content.decode()
    return Tenant.objects.get(slug="web-chat")


def test_a_one_time_password_leads_to_the_password_form_and_nowhere_else() -> None:
    user, one_time = account_actions.create_user(actor=SYSTEM, email="new@example.org", role=Role.OPERATOR)
    client = Client()
    client.post(reverse("console:sign_in"), {"email": user.email, "password": one_time})
    assert client.get(reverse("console:tenants")).headers["location"] == reverse("console:password")
    form = {"old_password": one_time, "new_password": PASSWORD, "repeated": PASSWORD}
    assert client.post(reverse("console:password"), form).status_code == 302
    assert client.get(reverse("console:tenants")).status_code == 200


def test_a_wrong_password_and_an_unknown_email_look_alike() -> None:
    account_actions.create_user(actor=SYSTEM, email="known@example.org", role=Role.VIEWER)
    answers = [
        Client().post(reverse("console:sign_in"), {"email": email, "password": "wrong"})
        for email in ("known@example.org", "unknown@example.org")
    ]
    assert [a.status_code for a in answers] == [401, 401]
    assert all("Email or password is wrong." in a.content.decode() for a in answers)


def test_the_address_after_sign_in_stays_on_this_host() -> None:
    user, one_time = account_actions.create_user(actor=SYSTEM, email="next@example.org", role=Role.VIEWER)
    form = {"email": user.email, "password": one_time, "next": "https://evil.example/"}
    assert Client().post(reverse("console:sign_in"), form).headers["location"] == "/"


PAGES = ("live", "live_fragment", "tenants", "tenant_new", "tiers", "tier_new", "pools", "pool_new", "usage",
         "usage_csv", "usage_quarantine", "jobs", "jobs_fragment", "audit")  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_itself_to_an_operator_and_a_sign_in_form_to_a_stranger(
    name: str, operator: Client, platform: None
) -> None:
    assert operator.get(reverse(f"console:{name}")).status_code == 200
    stranger = Client().get(reverse(f"console:{name}"))
    assert stranger.status_code == 302
    assert stranger.headers["location"].startswith("/sign-in/")


def test_a_tenant_is_created_changed_and_suspended(operator: Client, platform: None) -> None:
    tenant = make_tenant(operator)
    assert (tenant.weight, tenant.default_tier.name) == (3.0, "interactive")
    page = reverse("console:tenant", args=[tenant.id])
    form = {"name": "Web chat", "slug": "web-chat", "weight": "5", "tiers": ["batch"], "default_tier": "batch",
            "max_queued": "100"}  # fmt: skip
    assert operator.post(page, form).status_code == 302
    tenant.refresh_from_db()
    assert (tenant.weight, tenant.default_tier.name) == (5.0, "batch")
    operator.post(reverse("console:tenant_state", args=[tenant.id]), {"state": "suspended"})
    assert "suspended" in operator.get(page).content.decode()


def test_a_value_out_of_range_is_named_with_its_range(operator: Client, platform: None) -> None:
    form = {"name": "X", "weight": "0", "tiers": ["batch"], "default_tier": "interactive", "max_queued": "1"}
    page = operator.post(reverse("console:tenant_new"), form).content.decode()
    assert "0.001 to 10000" in page.replace(",", "")
    assert "is not one of the tenant" in page
    assert not Tenant.objects.exists()


def test_a_key_is_shown_once_and_revoked(operator: Client, platform: None) -> None:
    tenant = make_tenant(operator)
    answer = operator.post(
        reverse("console:key_new", args=[tenant.id]),
        {"name": "first", "default_pool": "tiny-model", "default_tier": ""},
    )
    key = ApiKey.objects.get()
    text = re.search(r"flk_[0-9a-z]{12}_[0-9A-Za-z]+", answer.content.decode())
    assert text is not None
    assert "no-store" in answer.headers["cache-control"]
    page = operator.get(reverse("console:tenant", args=[tenant.id])).content.decode()
    assert key.public_id in page
    assert text[0] not in page
    operator.post(reverse("console:key_revoke", args=[tenant.id, key.id]))
    key.refresh_from_db()
    assert key.revoked_at is not None


def test_a_viewer_reads_and_changes_nothing(operator: Client, platform: None) -> None:
    tenant = make_tenant(operator)
    viewer = signed_in(Role.VIEWER)
    assert viewer.get(reverse("console:tenant", args=[tenant.id])).status_code == 200
    viewer.post(reverse("console:tenant_state", args=[tenant.id]), {"state": "suspended"})
    tenant.refresh_from_db()
    assert tenant.state == "active"


def test_a_change_is_in_the_audit_log_with_its_author(operator: Client, platform: None) -> None:
    make_tenant(operator)
    page = operator.get(reverse("console:audit")).content.decode()
    assert "tenant.created" in page
    assert "operator@example.org" in page


def test_the_policy_of_a_pool_is_chosen_on_its_page(operator: Client, platform: None) -> None:
    from controlplane.fleet.models import Pool

    pool = Pool.objects.get()
    form = {"name": "tiny-model", "aliases": "tiny, small", "policy": "fifo", "tokenizer_path": "", "scheduling": ""}
    assert operator.post(reverse("console:pool", args=[pool.id]), form).status_code == 302
    pool.refresh_from_db()
    assert pool.policy == "fifo"
    assert sorted(n.word for n in pool.model_names.all()) == ["small", "tiny", "tiny-model"]


def test_the_csv_has_a_header_even_without_rows(operator: Client) -> None:
    answer = operator.get(reverse("console:usage_csv"))
    text = b"".join(answer.streaming_content).decode()  # type: ignore[attr-defined]
    assert next(csv.reader(io.StringIO(text)))[:3] == ["day", "tenant", "tenant_name"]


def test_an_unknown_id_is_a_page_with_404(operator: Client) -> None:
    answer = operator.get(reverse("console:tenant", args=["ten_nobody"]))
    assert answer.status_code == 404
    assert "ten_nobody" in answer.content.decode()
