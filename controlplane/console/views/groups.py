"""Fairness groups: tenants that compete as one."""

from __future__ import annotations

from django import forms
from django.db.models import Count
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from controlplane.common.validation import get_or_not_found
from controlplane.console.frame import VersionedForm, act, actor_of, apply, number_input, signed_in
from controlplane.tenants import actions, queries

LEAD = "Its tenants compete in every pool as one of this weight, and share what they get by their own weights."


class GroupForm(VersionedForm):
    weight = forms.FloatField(
        initial=1.0,
        help_text="Share of the group, relative to other groups and to tenants without one (0.001 to 10,000).",
        widget=number_input(0.001, 10_000, step="any"),
    )


class NewGroupForm(GroupForm):
    name = forms.SlugField(
        max_length=63, help_text="1 to 63 of a-z, 0-9 and -. It never changes: routers count the group's service by it."
    )
    field_order = ("name", "weight")


@require_safe
@signed_in
def index(request: HttpRequest) -> HttpResponseBase:
    groups = queries.groups(actor=actor_of(request)).annotate(num_tenants=Count("tenants"))
    return render(request, "console/groups.html", {"groups": groups})


@require_http_methods(["GET", "POST"])
@signed_in
def create(request: HttpRequest) -> HttpResponseBase:
    form = NewGroupForm(request.POST or None)

    def change() -> str:
        name = actions.create_group(actor=actor_of(request), **form.values()).name
        return f"Fairness group {name} created. Tenants join it on their own pages."

    if request.method == "POST" and form.is_valid() and apply(request, form, change):
        return redirect("console:groups")
    context = {
        "form": form,
        "heading": "New fairness group",
        "lead": LEAD,
        "submit": "Create group",
        "back": reverse("console:groups"),
    }
    return render(request, "console/form.html", context)


@require_http_methods(["GET", "POST"])
@signed_in
def detail(request: HttpRequest, group_id: str) -> HttpResponseBase:
    actor = actor_of(request)
    group = get_or_not_found(queries.groups(actor=actor), "group", group_id)
    form = GroupForm(request.POST or None, initial={**actions.group_fields(group), "version": group.version})

    def change() -> str:
        actions.update_group(actor=actor, group_id=group.id, expected_version=form.shown_version, **form.values())
        return f"Fairness group {group.name} saved. Routers apply it within two seconds."

    if request.method == "POST" and form.is_valid() and apply(request, form, change):
        return redirect("console:groups")
    context = {
        "form": form,
        "heading": f"Fairness group {group.name}",
        "lead": LEAD,
        "submit": "Save",
        "back": reverse("console:groups"),
    }
    return render(request, "console/form.html", context)


@require_POST
@signed_in
def delete(request: HttpRequest, group_id: str) -> HttpResponseBase:
    def change() -> str:
        actions.delete_group(actor=actor_of(request), group_id=group_id)
        return "Fairness group deleted."

    return act(request, change, reverse("console:groups"))
