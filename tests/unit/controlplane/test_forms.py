"""Forms explain each field and the range they take; the form of a pool shows the bound that its settings would give."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django import forms
from django.test import Client
from django.urls import reverse

from controlplane.accounts.models import Role
from controlplane.audit.models import AuditEntry
from controlplane.common.actor import system_actor
from controlplane.console.frame import number_input
from controlplane.console.views.groups import NewGroupForm
from controlplane.console.views.pools import BackendForm, PoolForm
from controlplane.console.views.tenants import KeyForm, TenantForm
from controlplane.console.views.tiers import NewTierForm
from controlplane.fleet.actions import update_pool
from controlplane.fleet.fairness import fairness_of
from controlplane.fleet.models import Pool
from tests.support.control_plane import make_backend, make_pool, make_tenant, signed_in

pytestmark = pytest.mark.django_db
SYSTEM = system_actor("test")


def every_form() -> list[forms.Form]:
    tenant = make_tenant(SYSTEM)
    return [
        TenantForm(actor=SYSTEM), KeyForm(actor=SYSTEM, tenant=tenant), NewTierForm(), NewGroupForm(), PoolForm(),
        BackendForm(),
    ]  # fmt: skip


def numbers_of(text: str) -> set[float]:
    words = re.findall(r"\d[\d,]*(?:\.\d+)?(?:e-\d+)?", text)
    return {float(word.replace(",", "")) for word in words}


def faults(form: forms.Form) -> list[str]:
    """Fields without a help text, numbers without a range, ranges that the help text does not state."""
    wrong = []
    for field in form.visible_fields():
        name = f"{type(form).__name__}.{field.name}"
        if not field.help_text:
            wrong.append(f"{name}: no help")
        if not isinstance(field.field, forms.IntegerField):  # floats are of this kind as well
            continue
        given = field.field.widget.attrs
        if not {"min", "max"} <= given.keys():
            wrong.append(f"{name}: no range")
        elif not field.name.startswith("limits.") and not {float(given["min"]), float(given["max"])} <= numbers_of(
            field.help_text
        ):
            wrong.append(f"{name}: {given['min']} to {given['max']} is not stated: {field.help_text}")
    return wrong


class Silent(forms.Form):
    plain = forms.CharField()
    ranged = forms.IntegerField(help_text="1 to 5.")
    other = forms.IntegerField(help_text="1 to 5.", widget=number_input(1, 6))


def test_every_field_is_explained_with_its_range() -> None:
    assert faults(Silent()) == [
        "Silent.plain: no help", "Silent.ranged: no range", "Silent.other: 1 to 6 is not stated: 1 to 5.",
    ]  # fmt: skip
    assert [fault for form in every_form() for fault in faults(form)] == []


class TestBoundWhileEditing:
    @pytest.fixture
    def client(self) -> Client:
        return signed_in(Role.OPERATOR)

    @pytest.fixture
    def pool(self) -> Pool:
        pool = make_pool(SYSTEM, policy="slo-fair")
        make_backend(SYSTEM, pool, kv_tokens=40_000)
        make_tenant(SYSTEM, weight=3.0)
        return pool

    def ask(self, client: Client, pool: Pool, **changes: Any) -> Any:
        given = {"name": pool.name, "policy": pool.policy, **changes}
        return client.get(reverse("console:pool_bound", args=[pool.id]), given)

    @pytest.mark.parametrize(
        ("policy", "scheduling"), [("slo-fair", {}), ("slo-fair", {"gamma": 0.9}), ("vtc", {}), ("drr", {})]
    )
    def test_it_is_the_one_that_saving_gives(
        self, client: Client, pool: Pool, policy: str, scheduling: dict[str, Any]
    ) -> None:
        before = fairness_of(pool).bound_service
        entries = AuditEntry.objects.count()
        knobs = {f"scheduling.{name}": value for name, value in scheduling.items()}
        context = self.ask(client, pool, policy=policy, **knobs).context
        assert context["in_force"].bound_service == before
        pool.refresh_from_db()
        assert (pool.policy, pool.scheduling, AuditEntry.objects.count()) == ("slo-fair", {}, entries)
        update_pool(actor=SYSTEM, pool_id=pool.id, policy=policy, scheduling=scheduling)
        saved = fairness_of(Pool.objects.get(pk=pool.id))
        assert saved.bound_service is not None
        assert context["edited"].bound_service == saved.bound_service

    def test_a_policy_without_a_bound_says_so(self, client: Client, pool: Pool) -> None:
        assert "none, fifo promises nothing" in self.ask(client, pool, policy="fifo").content.decode()

    def test_what_cannot_be_saved_is_told(self, client: Client, pool: Pool) -> None:
        answer = self.ask(client, pool, **{"scheduling.gamma": "many"})
        assert (answer.status_code, answer.context["edited"]) == (200, None)
        assert "errors" in answer.content.decode()
        answer = self.ask(client, pool, **{"scheduling.gamma": "-1"})
        assert answer.context["edited"] is None
        assert "gamma" in answer.content.decode()

    def test_the_page_asks_for_it_and_sends_no_secret_along(self, client: Client, pool: Pool) -> None:
        text = client.get(reverse("console:pool", args=[pool.id])).content.decode()
        assert f'hx-get="{reverse("console:pool_bound", args=[pool.id])}"' in text
        assert 'hx-params="not csrfmiddlewaretoken,version"' in text
