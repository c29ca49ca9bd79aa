"""SLO tiers."""

from __future__ import annotations

from django import forms
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from controlplane.common.validation import get_or_not_found
from controlplane.console.frame import VersionedForm, act, actor_of, apply, number_input, signed_in
from controlplane.tiers import actions, queries


class TierForm(VersionedForm):
    rank = forms.IntegerField(
        help_text="Smaller goes first inside a tenant (0 to 10,000).", widget=number_input(0, 10_000)
    )
    ttft_target_s = forms.FloatField(
        label="TTFT target, s",
        required=False,
        help_text="Seconds from arrival to the first token, queueing included; above 0, at most 3,600. "
        "Empty for no target.",
        widget=number_input(0, 3_600, step="any", placeholder="no target"),
    )
    max_queue_wait_s = forms.FloatField(
        label="Longest wait in the queue, s",
        required=False,
        help_text="A request that waited longer, or is certain to, is refused with 429; above 0, at most 86,400. "
        "Empty for no limit.",
        widget=number_input(0, 86_400, step="any", placeholder="no limit"),
    )
    grammar_stall_s = forms.FloatField(
        label="Stall by a new grammar, s",
        required=False,
        help_text="Seconds a grammar may stall a backend that has not compiled it; more is refused with the figures. "
        "0 to 60; 0: no grammars, empty: 2.",
        widget=number_input(0, 60, step="any", placeholder="2"),
    )


class NewTierForm(TierForm):
    name = forms.SlugField(
        max_length=40, help_text="1 to 40 of a-z, 0-9 and -. It never changes: the books and the keys name it."
    )
    field_order = ("name", "rank", "ttft_target_s", "max_queue_wait_s", "grammar_stall_s")


@require_safe
@signed_in
def index(request: HttpRequest) -> HttpResponseBase:
    return render(request, "console/tiers.html", {"tiers": queries.tiers(actor=actor_of(request))})


@require_http_methods(["GET", "POST"])
@signed_in
def create(request: HttpRequest) -> HttpResponseBase:
    form = NewTierForm(request.POST or None, initial={"rank": 100})

    def change() -> str:
        return f"Tier {actions.create_tier(actor=actor_of(request), **form.values()).name} created."

    if request.method == "POST" and form.is_valid() and apply(request, form, change):
        return redirect("console:tiers")
    context = {"form": form, "heading": "New tier", "submit": "Create tier", "back": reverse("console:tiers")}
    return render(request, "console/form.html", context)


@require_http_methods(["GET", "POST"])
@signed_in
def detail(request: HttpRequest, tier_id: str) -> HttpResponseBase:
    actor = actor_of(request)
    tier = get_or_not_found(queries.tiers(actor=actor), "tier", tier_id)
    form = TierForm(request.POST or None, initial={**actions.tier_fields(tier), "version": tier.version})

    def change() -> str:
        actions.update_tier(actor=actor, tier_id=tier.id, expected_version=form.shown_version, **form.values())
        return f"Tier {tier.name} saved. Routers apply it within two seconds."

    if request.method == "POST" and form.is_valid() and apply(request, form, change):
        return redirect("console:tiers")
    context = {"form": form, "heading": f"Tier {tier.name}", "submit": "Save", "back": reverse("console:tiers")}
    return render(request, "console/form.html", context)


@require_POST
@signed_in
def delete(request: HttpRequest, tier_id: str) -> HttpResponseBase:
    def change() -> str:
        actions.delete_tier(actor=actor_of(request), tier_id=tier_id)
        return "Tier deleted."

    return act(request, change, reverse("console:tiers"))
