"""A field for one of many: what is typed is looked up while it is typed, so that no page holds a list of them all."""

from __future__ import annotations

from typing import Any

from django import forms
from django.db.models import Q
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils.safestring import SafeString
from django.views.decorators.http import require_safe

from controlplane.common.actor import Actor
from controlplane.common.validation import without_nul
from controlplane.console.frame import actor_of, signed_in
from controlplane.tenants.models import Tenant
from controlplane.tenants.queries import find_tenant, tenants

OFFERED = 20


class TenantInput(forms.TextInput):
    """A tenant's short name or id, with the tenants that match what is typed offered below."""

    def render(self, name: str, value: Any, attrs: dict[str, Any] | None = None, renderer: Any = None) -> SafeString:
        given = attrs or {}
        options = f"{given.get('id', name)}_options"
        # Of a field, htmx sends the value under the field's own name, whatever that is.
        asks = {"list": options, "autocomplete": "off", "hx-get": reverse("console:tenant_options"),
                "hx-trigger": "focus once, input changed delay:150ms", "hx-target": f"#{options}",
                "hx-params": name, "hx-push-url": "false"}  # fmt: skip
        field = super().render(name, value, {**given, **asks}, renderer)
        return render_to_string("console/fragments/tenant_input.html", {"field": field, "options": options})


class TenantField(forms.CharField):
    def __init__(self, **given: Any) -> None:
        super().__init__(**{"max_length": 63, "widget": TenantInput, "help_text": "Short name or id.", **given})


def named_tenant(form: forms.Form, name: str, *, actor: Actor) -> Tenant | None:
    """The tenant that a valid form's field names; where there is none, an error of that field and None."""
    reference = form.cleaned_data.get(name, "")
    found = find_tenant(reference, actor=actor) if reference else None
    if reference and found is None:
        form.add_error(name, f"no tenant {reference!r}")
    return found


@require_safe
@signed_in
def tenant_options(request: HttpRequest) -> HttpResponseBase:
    """What is offered for the beginning of a short name, or a part of a name."""
    typed = without_nul(str(next(iter(request.GET.values()), ""))).strip()
    rows = tenants(actor=actor_of(request)).prefetch_related(None).select_related(None)
    if typed:
        rows = rows.filter(Q(slug__startswith=typed) | Q(name__icontains=typed))
    return render(request, "console/fragments/tenant_options.html", {"tenants": rows.values("slug", "name")[:OFFERED]})
