"""Price lists, and who pays by them."""

from __future__ import annotations

from datetime import date
from typing import Any

from django import forms
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from controlplane.common.errors import Invalid
from controlplane.common.validation import get_or_not_found
from controlplane.console.frame import VersionedForm, act, actor_of, apply, signed_in
from controlplane.console.pickers import TenantField
from controlplane.tenants.queries import find_tenant
from controlplane.usage import assignments, prices

SHOWN_TENANTS = 200
_LINE = "valid from, micro-currency for 1,000,000 prompt tokens, for 1,000,000 output tokens, model"


class PriceListForm(VersionedForm):
    name = forms.SlugField(max_length=63, help_text="1 to 63 of a-z, 0-9 and -.")
    prices = forms.CharField(
        required=False,
        widget=forms.Textarea(attrs={"rows": "10", "spellcheck": "false"}),
        help_text=f"A line each: {_LINE}; no model for all that have none of their own. "
        "2026-01-01, 150000, 600000 is 0.15 and 0.60 for a million tokens from that day on.",
    )

    def clean_prices(self) -> list[dict[str, Any]]:
        found = []
        for number, line in enumerate(self.cleaned_data["prices"].splitlines(), 1):
            if not line.strip():
                continue
            try:
                day, prompt, output, *model = (part.strip() for part in line.split(",", 3))
                price = {
                    "valid_from": date.fromisoformat(day),
                    "prompt_micro": int(prompt),
                    "output_micro": int(output),
                    "model": model[0] if model else "",
                }
            except ValueError:
                raise forms.ValidationError(f"Line {number} is not: {_LINE}.") from None
            found.append(price)
        return found


class AssignmentForm(forms.Form):
    tenant = TenantField()
    valid_from = forms.DateField(
        required=False,
        label="From",
        widget=forms.DateInput(attrs={"type": "date"}),
        help_text="A day of the tenant's time zone; the lists before it hold until then. Empty: this is its only list.",
    )


class NewPriceListForm(PriceListForm):
    currency = forms.CharField(max_length=3, help_text="Three letters, such as EUR. It never changes.")
    timezone = forms.CharField(
        max_length=64, initial="UTC", label="Time zone", help_text="Whose days prices begin with. It never changes."
    )
    field_order = ("name", "currency", "timezone", "prices")


@require_safe
@signed_in
def index(request: HttpRequest) -> HttpResponseBase:
    return render(request, "console/price_lists.html", {"price_lists": prices.price_lists(actor=actor_of(request))})


@require_http_methods(["GET", "POST"])
@signed_in
def create(request: HttpRequest) -> HttpResponseBase:
    form = NewPriceListForm(request.POST or None)

    def change() -> str:
        return f"Price list {prices.create_price_list(actor=actor_of(request), **form.values()).name} created."

    if request.method == "POST" and form.is_valid() and apply(request, form, change):
        return redirect("console:price_lists")
    context = {
        "form": form,
        "heading": "New price list",
        "submit": "Create price list",
        "back": reverse("console:price_lists"),
    }
    return render(request, "console/form.html", context)


@require_http_methods(["GET", "POST"])
@signed_in
def detail(request: HttpRequest, price_list_id: str) -> HttpResponseBase:
    actor = actor_of(request)
    row = get_or_not_found(prices.price_lists(actor=actor), "price list", price_list_id)
    lines = [
        f"{p['valid_from']}, {p['prompt_micro']}, {p['output_micro']}" + (f", {p['model']}" if p["model"] else "")
        for p in prices.price_list_fields(row)["prices"]
    ]
    initial = {"name": row.name, "prices": "\n".join(lines), "version": row.version}
    form = PriceListForm(request.POST or None, initial=initial)

    def change() -> str:
        prices.update_price_list(
            actor=actor, price_list_id=row.id, expected_version=form.shown_version, **form.values()
        )  # fmt: skip
        return f"Price list {row.name} saved. Closed statements stay as they are."

    if request.method == "POST" and form.is_valid() and apply(request, form, change):
        return redirect("console:price_list", row.id)
    assigned = list(row.assigned.select_related("tenant").order_by("tenant__slug", "valid_from")[: SHOWN_TENANTS + 1])
    context = {
        "price_list": row,
        "form": form,
        "assigned": assigned[:SHOWN_TENANTS],
        "always": assignments.ALWAYS,
        "assignment": AssignmentForm(auto_id="assign_%s"),
        "has_more": len(assigned) > SHOWN_TENANTS,
    }
    return render(request, "console/price_list.html", context)


@require_POST
@signed_in
def assign(request: HttpRequest, price_list_id: str) -> HttpResponseBase:
    """Let a tenant pay by this list from a day on, or take such an assignment away."""
    actor, removed = actor_of(request), request.POST.get("remove", "")

    def change() -> str:
        if removed:
            assignments.remove_assignment(actor=actor, assignment_id=removed)
            return "Taken away. What is in a closed statement stays."
        form = AssignmentForm(request.POST)
        if not form.is_valid():
            raise Invalid({name: [str(m) for m in messages] for name, messages in form.errors.items()})
        day = form.cleaned_data["valid_from"]
        tenant = find_tenant(form.cleaned_data["tenant"], actor=actor)
        if tenant is None:
            raise Invalid({"tenant": f"no tenant {form.cleaned_data['tenant']!r}"})
        assignments.assign_price_list(actor=actor, tenant_id=tenant.id, price_list=price_list_id, valid_from=day)
        return f"{tenant.name} pays by this list {f'from {day} on' if day else 'for everything'}."

    return act(request, change, reverse("console:price_list", args=[price_list_id]))


@require_POST
@signed_in
def delete(request: HttpRequest, price_list_id: str) -> HttpResponseBase:
    def change() -> str:
        prices.delete_price_list(actor=actor_of(request), price_list_id=price_list_id)
        return "Price list deleted."

    return act(request, change, reverse("console:price_lists"))
