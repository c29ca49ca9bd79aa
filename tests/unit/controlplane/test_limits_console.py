"""Limits and quotas on the pages of tenants and keys, as a browser without scripts sees them."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.accounts.models import Role
from controlplane.common.actor import system_actor
from controlplane.common.clock import to_us, utc_now
from controlplane.common.limits import LIMITS, MAX_LIMIT, limit_fields
from controlplane.keys.actions import revoke_key
from controlplane.keys.models import ApiKey
from controlplane.tenants.models import Tenant
from tests.support.control_plane import book, make_key, make_pool, make_tenant, signed_in, usage_event

pytestmark = pytest.mark.django_db

SYSTEM = system_actor("test")


@pytest.fixture
def operator() -> Client:
    return signed_in(Role.OPERATOR)


@pytest.fixture
def tenant() -> Tenant:
    return make_tenant(SYSTEM, limits={"tokens_per_day": 1_000, "soft_tokens_per_day": 40, "concurrent": 0})


def shown_fields(page: str, prefix: str = "id_") -> dict[str, str]:
    """What the form of a page holds of each limit."""
    found = {}
    for name in LIMITS:
        tag = re.search(rf'<input[^>]*id="{prefix}limits\.{name}"[^>]*>', page)
        assert tag is not None, name
        value = re.search(r'value="([^"]*)"', tag[0])
        found[name] = value[1] if value else ""
    return found


def form_of(row: Tenant | ApiKey, limits: dict[str, Any]) -> dict[str, Any]:
    given = {f"limits.{name}": value for name, value in limits.items()}
    if isinstance(row, Tenant):
        plain = {"slug": row.slug, "weight": "1", "tiers": ["standard"], "default_tier": "standard", "max_queued": "9"}
    else:
        plain = {"default_pool": row.default_pool.name, "default_tier": ""}
    return {"name": row.name, "version": str(row.version), **plain, **given}


def test_a_tenants_limits_go_through_its_form_and_back(operator: Client, tenant: Tenant) -> None:
    address = reverse("console:tenant", args=[tenant.id])
    page = operator.get(address).content.decode()
    stated = {"tokens_per_day": "1000", "soft_tokens_per_day": "40", "concurrent": "0"}
    assert shown_fields(page) == {**dict.fromkeys(LIMITS, ""), **stated}
    assert '<details class="knobs" open><summary>Limits and quotas' in page
    assert "An empty field means no limit, 0 means nothing." in page
    # Saved as it was shown nothing changes; emptied and set, that and nothing else does.
    assert operator.post(address, form_of(tenant, shown_fields(page))).status_code == 302
    changed = {**stated, "concurrent": "", "tokens_per_month": str(MAX_LIMIT)}
    tenant.refresh_from_db()
    assert operator.post(address, form_of(tenant, changed)).status_code == 302
    tenant.refresh_from_db()
    assert limit_fields(tenant) == {"tokens_per_day": 1_000, "soft_tokens_per_day": 40, "tokens_per_month": MAX_LIMIT}
    text = operator.get(reverse("console:tenants")).content.decode()
    assert "40 tokens/day (soft), 1,000 tokens/day, 1,000,000,000,000,000 tokens/month" in text


def test_a_key_is_issued_and_changed_with_limits(operator: Client, tenant: Tenant) -> None:
    make_pool(SYSTEM, name="tiny")
    issued = {"name": "web", "default_pool": "tiny", "limits.requests_per_minute": "60"}
    assert operator.post(reverse("console:key_new", args=[tenant.id]), issued).status_code == 200
    key = ApiKey.objects.get()
    assert limit_fields(key) == {"requests_per_minute": 60}
    address = reverse("console:key", args=[tenant.id, key.id])
    fields = shown_fields(operator.get(address).content.decode())
    assert fields == {**dict.fromkeys(LIMITS, ""), "requests_per_minute": "60"}
    form = form_of(key, {**fields, "requests_per_minute": "", "tokens_per_day": "0"})
    assert operator.post(address, {**form, "may_choose_tier": "on"}).status_code == 302
    key.refresh_from_db()
    assert (limit_fields(key), key.may_choose_tier) == ({"tokens_per_day": 0}, True)
    assert ">0 tokens/day<" in operator.get(reverse("console:tenant", args=[tenant.id])).content.decode()
    # Somebody else was faster.
    stale = operator.post(address, form)
    assert (stale.status_code, "Somebody else changed this" in stale.content.decode()) == (200, True)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"concurrent": "-1"}, "must be from 0 to 1,000,000,000,000,000, not -1"),
        ({"tokens_per_day": "5", "soft_tokens_per_day": "6"}, "must be from 0 to the hard quota of 5, not 6"),
    ],
)
def test_a_limit_that_cannot_be_is_named_beside_its_field(
    operator: Client, tenant: Tenant, limits: dict[str, str], words: str
) -> None:
    key, _ = make_key(SYSTEM, tenant, make_pool(SYSTEM))
    addresses = {"console:tenant": [tenant.id], "console:key": [tenant.id, key.id]}
    for (name, args), row in zip(addresses.items(), (tenant, key), strict=True):
        answer = operator.post(reverse(name, args=args), form_of(row, limits))
        page = answer.content.decode()
        assert answer.status_code == 200
        assert f'<span class="error" role="alert">{words}</span>' in page
        assert '<details class="knobs" open>' in page


def test_use_of_quotas_is_shown_as_numbers_bar_and_time(operator: Client, tenant: Tenant) -> None:
    key, _ = make_key(SYSTEM, tenant, make_pool(SYSTEM))
    us = to_us(utc_now())
    book(usage_event(tenant=tenant.id, key=key.id, arrived_at_us=us, prompt_tokens=100, output_tokens=150))
    page = operator.get(reverse("console:tenant", args=[tenant.id])).content.decode()
    assert "250 of 1,000 tokens" in page
    assert "None" not in page.partition('id="quotas"')[2].partition("</section>")[0]
    assert 'aria-label="Quota of the day: 25%"' in page
    assert "Quota of the month" not in page
    assert '<span class="badge warn">lowest tier</span>' in page
    assert f"{utc_now().date() + timedelta(days=1)} 00:00 UTC" in page
    of_key = operator.get(reverse("console:key", args=[tenant.id, key.id])).content.decode()
    assert ("250 tokens" in of_key, "aria-label" in of_key.partition('id="quotas"')[2].partition("</section>")[0]) == (
        True, False,
    )  # fmt: skip


def test_the_page_of_a_key_is_its_tenants_alone(operator: Client, tenant: Tenant) -> None:
    key, _ = make_key(SYSTEM, tenant, make_pool(SYSTEM))
    assert operator.get(reverse("console:key", args=[make_tenant(SYSTEM).id, key.id])).status_code == 404
    assert Client().get(reverse("console:key", args=[tenant.id, key.id])).status_code == 302
    revoke_key(actor=SYSTEM, key_id=key.id)
    page = operator.get(reverse("console:key", args=[tenant.id, key.id])).content.decode()
    assert ("revoked" in page, "<button>Save</button>" in page) == (True, False)


def test_a_viewer_sets_no_limit(tenant: Tenant) -> None:
    viewer = signed_in(Role.VIEWER)
    page = viewer.post(reverse("console:tenant", args=[tenant.id]), form_of(tenant, {"concurrent": "1"}))
    assert "lacks the scope" in page.content.decode()
    tenant.refresh_from_db()
    assert tenant.concurrent == 0
