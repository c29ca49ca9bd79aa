"""Tenants, their weights and tiers, and their keys."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

from django import forms
from django.conf import settings
from django.db.models import F
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.text import slugify
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from controlplane.accounts.queries import members
from controlplane.common.actor import Actor, Scope
from controlplane.common.clock import utc_now
from controlplane.common.errors import Invalid
from controlplane.common.limits import Limited, limit_fields
from controlplane.common.validation import get_or_not_found, without_nul
from controlplane.common.zones import find_zone
from controlplane.console import charts
from controlplane.console.frame import LimitedForm, act, actor_of, apply, number_input, of_tenants, signed_in
from controlplane.console.sorting import Column, sorted_page
from controlplane.fleet import queries as fleet_queries
from controlplane.keys import actions as key_actions
from controlplane.keys import queries as key_queries
from controlplane.keys.models import ApiKey
from controlplane.tenants import actions, bulk, queries
from controlplane.tenants.models import Tenant, TenantState
from controlplane.tiers import queries as tier_queries
from controlplane.usage.quotas import quota_use
from controlplane.usage.report import usage_question, usage_report

PAGE = 100
USAGE_DAYS = 30
_SERIES = (("prompt_tokens", "prompt tokens"), ("output_tokens", "output tokens"))


class TenantForm(LimitedForm):
    name = forms.CharField(max_length=200, help_text="As people call it.")
    slug = forms.SlugField(
        max_length=63, required=False, help_text="Short name for reports and files; made from the name if left empty."
    )
    weight = forms.FloatField(
        initial=1.0,
        help_text="Its share of the service, relative to the other tenants that have work waiting (0.001 to 10,000); "
        "in a fairness group, to the group's other tenants.",
        widget=number_input(0.001, 10_000, step="any"),
    )
    tiers = forms.MultipleChoiceField(
        label="Allowed tiers", widget=forms.CheckboxSelectMultiple, help_text="A tier buys a latency target, not share."
    )
    default_tier = forms.ChoiceField(help_text="Used by keys that name no tier of their own.")
    max_queued = forms.IntegerField(
        initial=2_000,
        label="Waiting requests at most",
        help_text="More are refused with 429 (1 to 1,000,000).",
        widget=number_input(1, 1_000_000),
    )
    timezone = forms.CharField(
        initial="UTC",
        required=False,
        max_length=64,
        label="Time zone",
        help_text="Whose months its statements cover, such as Europe/Berlin; UTC if left empty.",
    )
    group = forms.ChoiceField(
        required=False,
        label="Fairness group",
        help_text="Tenants of a group compete in every pool as one, with the group's weight.",
    )

    def __init__(self, *args: Any, actor: Actor, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rows = list(tier_queries.tiers(actor=actor))
        names = [(t.name, f"{t.name} (TTFT {t.ttft_target_s:g} s)" if t.ttft_target_s else t.name) for t in rows]
        self.fields["tiers"].choices = names  # type: ignore[attr-defined]  # a choice field
        self.fields["default_tier"].choices = names  # type: ignore[attr-defined]  # a choice field
        groups = [(g.name, f"{g.name} (weight {g.weight:g})") for g in queries.groups(actor=actor)]
        self.fields["group"].choices = [("", "none: it competes for itself"), *groups]  # type: ignore[attr-defined]  # a choice field

    def values(self) -> dict[str, Any]:
        values = super().values()
        values["group"] = values["group"] or None
        values["timezone"] = values["timezone"] or "UTC"
        values["slug"] = values["slug"] or slugify(values["name"])[:63]
        return values


class KeyForm(LimitedForm):
    name = forms.CharField(max_length=200, help_text="Where it is used, such as “web chat, production”.")
    default_pool = forms.ChoiceField(label="Pool", help_text="Serves requests that name no model.")
    default_tier = forms.ChoiceField(required=False, help_text="The tenant's default unless chosen here.")
    may_choose_tier = forms.BooleanField(
        required=False,
        label="May choose its tier by the header x-fairlane-tier",
        help_text="Any that it may use. Off: its requests go to the tier above, whatever they ask for.",
    )
    expires_at = forms.DateTimeField(
        required=False, help_text="UTC; empty for never.", widget=forms.DateTimeInput(attrs={"type": "datetime-local"})
    )

    def __init__(self, *args: Any, actor: Actor, tenant: Tenant, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        pools = [(name, name) for name in fleet_queries.pool_names(actor=actor).values()]
        tiers = [("", f"tenant's default ({tenant.default_tier_name})")]
        tiers += [(name, name) for name in queries.tier_names(tenant)]
        self.fields["default_pool"].choices = pools  # type: ignore[attr-defined]  # a choice field
        self.fields["default_tier"].choices = tiers  # type: ignore[attr-defined]  # a choice field

    def values(self) -> dict[str, Any]:
        values = super().values()
        values["default_tier"] = values["default_tier"] or None
        return values


def _limits(row: Limited) -> dict[str, int]:
    """Initial values of a ``LimitedForm``."""
    return {f"limits.{name}": value for name, value in limit_fields(row).items()}


def _quotas(actor: Actor, row: Limited) -> list[dict[str, Any]]:
    """Use and meter of the day and the month that run."""
    return [
        {
            "use": use,
            "meter": "" if use.ratio is None else charts.meter(title=f"Quota of the {use.span}", ratio=use.ratio),
        }
        for use in quota_use(actor=actor, row=row)
    ]


def _tenant(request: HttpRequest, tenant_id: str) -> Tenant:
    return get_or_not_found(queries.tenants(actor=actor_of(request)), "tenant", tenant_id)


COLUMNS = (
    Column(name="name", label="Tenant", key=queries.SORTED_BY["name"]),
    Column(name="state", label="State", key=queries.SORTED_BY["state"]),
    Column(name="weight", label="Weight", key=queries.SORTED_BY["weight"], is_number=True),
    Column(name="group", label="Group", key=queries.SORTED_BY["group"]),
    Column(name="tiers", label="Tiers", key=queries.SORTED_BY["tiers"]),
    Column(name="default_tier", label="Default tier", key=queries.SORTED_BY["default_tier"]),
    Column(name="waiting", label="Waiting at most", key=queries.SORTED_BY["waiting"], is_number=True),
    Column(name="limits", label="Limits", key=queries.SORTED_BY["limits"]),
    Column(name="created", label="Created", key=queries.SORTED_BY["created"]),
)


@require_safe
@of_tenants
def index(request: HttpRequest) -> HttpResponseBase:
    """Found by name, short name or id, and state; sorted by any column, a page at a time."""
    actor = actor_of(request)
    if actor.tenant is not None:
        return redirect("console:tenant", actor.tenant)
    given = {name: without_nul(request.GET.get(name, "")).strip() for name in ("q", "state", "sort", "cursor")}
    kept = {name: given[name] for name in ("q", "state")}
    problem = ""
    try:
        rows = queries.tenants(actor=actor, search=given["q"], state=given["state"])
        page = sorted_page(rows, COLUMNS, given=given, kept=kept, size=PAGE)
    except Invalid as refused:
        problem = refused.message
        page = sorted_page(Tenant.objects.none(), COLUMNS, given={}, kept={}, size=PAGE)
    context = {
        "page": page,
        "search": given["q"],
        "state": given["state"],
        "states": TenantState.values,
        "problem": problem,
        "bulk": BulkForm(actor=actor),
        "may_change": actor.holds(Scope.WRITE),
    }
    return render(request, "console/tenants.html", context, status=422 if problem else 200)


@require_http_methods(["GET", "POST"])
@signed_in
def create(request: HttpRequest) -> HttpResponseBase:
    actor = actor_of(request)
    form = TenantForm(request.POST or None, actor=actor)
    made: list[Tenant] = []

    def change() -> str:
        made.append(actions.create_tenant(actor=actor, **form.values()))
        return f"Tenant {made[0].name} created. Issue a key so that it can send requests."

    if request.method == "POST" and form.is_valid() and apply(request, form, change):
        return redirect("console:tenant", made[0].id)
    context = {
        "form": form,
        "heading": "New tenant",
        "lead": "Whoever shares the platform: a team, an application, a customer.",
        "submit": "Create tenant",
        "back": reverse("console:tenants"),
    }
    return render(request, "console/form.html", context)


@require_http_methods(["GET", "POST"])
@of_tenants
def detail(request: HttpRequest, tenant_id: str) -> HttpResponseBase:
    """Settings and keys of one tenant."""
    actor = actor_of(request)
    tenant = _tenant(request, tenant_id)
    if actor.tenant is not None:
        return _own(request, actor, tenant)
    initial = {**actions.tenant_fields(tenant), **_limits(tenant), "version": tenant.version}
    form = TenantForm(request.POST or None, initial=initial, actor=actor)

    def change() -> str:
        actions.update_tenant(actor=actor, tenant_id=tenant.id, expected_version=form.shown_version, **form.values())
        return "Saved. Routers apply it within two seconds."

    if request.method == "POST" and form.is_valid() and apply(request, form, change):
        return redirect("console:tenant", tenant.id)
    return render(request, "console/tenant.html", {"form": form, **_about(actor, tenant)})


def _own(request: HttpRequest, actor: Actor, tenant: Tenant) -> HttpResponseBase:
    """The page for the tenant's own people: what an operator has set, and their keys."""
    if request.method != "GET":
        actor.require(Scope.WRITE)
    return render(request, "console/own_tenant.html", _about(actor, tenant))


def _about(actor: Actor, tenant: Tenant) -> dict[str, Any]:
    rows = key_queries.keys(actor=actor, tenant=tenant.id)
    keys = list(rows.order_by(F("revoked_at").asc(nulls_first=True), "-id")[: PAGE + 1])
    return {
        "tenant": tenant,
        # Live ones first: a key that is never revoked must not fall off the page behind revoked ones.
        "keys": keys[:PAGE],
        "has_more_keys": len(keys) > PAGE,
        "newest_pepper": settings.KEY_PEPPER_VERSION,
        "quotas": _quotas(actor, tenant),
        "now": utc_now(),
        "may_change": actor.holds(Scope.TENANT_WRITE),
        "people": list(members(actor=actor).filter(tenant=tenant)[:PAGE]),
        # Ids of its own: the page holds two forms with a field "name".
        "key_form": KeyForm(actor=actor, tenant=tenant, auto_id="key_%s"),
    }


@require_safe
@of_tenants
def usage(request: HttpRequest, tenant_id: str) -> HttpResponseBase:
    """What a tenant used in the last 30 days, for its page, which does not wait for it."""
    tenant = _tenant(request, tenant_id)
    zone = find_zone(tenant.timezone) or ZoneInfo("UTC")
    today = utc_now().astimezone(zone).date()
    question = usage_question(
        actor=actor_of(request),
        from_day=today - timedelta(days=USAGE_DAYS - 1),
        to_day=today,
        timezone=zone.key,
        group_by=("day",),
        filters={"tenant": tenant.id},
    )
    report = usage_report(question, limit=USAGE_DAYS)
    sums = {row.start.date(): row.sums for row in report.rows}
    days = [question.from_day + timedelta(days=n) for n in range(USAGE_DAYS)]
    series = [(label, [sums[d][name] if d in sums else 0 for d in days]) for name, label in _SERIES]
    chart = charts.stacked_bars(
        title=f"Tokens of {tenant.name} by day", days=[f"{day:%m-%d}" for day in days], series=series
    )
    context = {"tenant": tenant, "totals": report.totals, "chart": chart, "zone": zone.key, "days": USAGE_DAYS}
    return render(request, "console/fragments/tenant_usage.html", context)


@require_POST
@signed_in
def set_state(request: HttpRequest, tenant_id: str) -> HttpResponseBase:
    """Suspend the tenant, cutting what runs where that is ticked, or make it active again."""
    state, reason = request.POST.get("state", ""), request.POST.get("reason", "")

    def change() -> str:
        actor = actor_of(request)
        if state == TenantState.SUSPENDED:
            is_cut = request.POST.get("is_cut") == "on"
            tenant = actions.suspend_tenant(actor=actor, tenant_id=tenant_id, reason=reason, is_cut=is_cut)
        else:
            tenant = actions.resume_tenant(actor=actor, tenant_id=tenant_id, reason=reason)
        return f"Tenant {tenant.name} is {tenant.state}."

    return act(request, change, reverse("console:tenant", args=[tenant_id]))


@require_POST
@signed_in
def delete(request: HttpRequest, tenant_id: str) -> HttpResponseBase:
    """Delete a suspended tenant; back to it where that is refused."""

    def change() -> str:
        actions.delete_tenant(actor=actor_of(request), tenant_id=tenant_id)
        return "Tenant deleted: its keys are revoked, its use stays in the books."

    answer = act(request, change, reverse("console:tenants"))
    is_there = queries.tenants(actor=actor_of(request)).filter(pk=tenant_id).exists()
    return redirect("console:tenant", tenant_id) if is_there else answer


class BulkForm(forms.Form):
    """What to do with the tenants whose boxes are ticked."""

    what = forms.ChoiceField(
        label="With those that are ticked",
        choices=[
            ("suspend", "suspend; what runs finishes"),
            ("stop", "suspend, and cut what runs"),
            ("activate", "activate"),
            ("weight", "set the weight to"),
            ("tier", "make the default tier"),
        ],
    )
    weight = forms.FloatField(required=False, widget=forms.NumberInput(attrs={"step": "any", "min": "0.001"}))
    tier = forms.ChoiceField(required=False)
    reason = forms.CharField(required=False, max_length=1_000, label="Why")

    def __init__(self, data: Any = None, *, actor: Actor) -> None:
        super().__init__(data, auto_id="bulk_%s")
        names = [("", "–"), *((t.name, t.name) for t in tier_queries.tiers(actor=actor))]
        self.fields["tier"].choices = names  # type: ignore[attr-defined]  # a choice field

    def change(self) -> bulk.BulkChange:
        """The fields that ``change_tenants`` takes."""
        match self.cleaned_data["what"]:
            case "suspend":
                return {"state": TenantState.SUSPENDED.value}
            case "stop":
                return {"state": TenantState.STOPPED.value}
            case "activate":
                return {"state": TenantState.ACTIVE.value}
            case "weight":
                if self.cleaned_data["weight"] is None:
                    raise Invalid({"weight": "say which"})
                return {"weight": self.cleaned_data["weight"]}
            case _:
                return {"default_tier": self.cleaned_data["tier"]}


@require_POST
@signed_in
def change_many(request: HttpRequest) -> HttpResponseBase:
    """The tenants that are ticked: all of them are changed, or none."""
    actor = actor_of(request)
    form = BulkForm(request.POST, actor=actor)

    def change() -> str:
        if not form.is_valid():
            raise Invalid({name: list(map(str, texts)) for name, texts in form.errors.items()})
        ids = sorted(set(request.POST.getlist("tenant")))
        changed = bulk.change_tenants(actor=actor, tenant_ids=ids, reason=form.cleaned_data["reason"], **form.change())
        if not changed:
            return "Nothing changed: they were so already."
        if len(changed) == len(ids):
            return f"{len(ids)} tenants changed." if len(ids) > 1 else "1 tenant changed."
        return f"{len(changed)} of {len(ids)} tenants changed; the others were so already."

    return act(request, change, reverse("console:tenants"))


@never_cache
@require_POST
@of_tenants
def issue_key(request: HttpRequest, tenant_id: str) -> HttpResponseBase:
    """Issue a key; the answer to this request is the only page that ever shows it."""
    actor = actor_of(request)
    tenant = _tenant(request, tenant_id)
    form = KeyForm(request.POST, actor=actor, tenant=tenant)
    if form.is_valid():
        try:
            key, text = key_actions.issue_key(actor=actor, tenant_id=tenant.id, **form.values())
        except Invalid as problem:
            for field, texts in problem.fields.items():
                form.add_error(field if field in form.fields else None, texts)
        else:
            context = {"tenant": tenant, "key": key, "text": text, "router": fleet_queries.router_address(actor=actor)}
            return render(request, "console/key_issued.html", context)
    context = {
        "form": form, "heading": f"New key of {tenant.name}", "submit": "Issue key",
        "back": reverse("console:tenant", args=[tenant.id]),
    }  # fmt: skip
    return render(request, "console/form.html", context, status=422)


@require_http_methods(["GET", "POST"])
@of_tenants
def key(request: HttpRequest, tenant_id: str, key_id: str) -> HttpResponseBase:
    """Settings of one key, and what it has used."""
    actor = actor_of(request)
    tenant = _tenant(request, tenant_id)
    row: ApiKey = get_or_not_found(key_queries.keys(actor=actor, tenant=tenant.id), "key", key_id)
    initial = {**key_actions.key_fields(row), **_limits(row), "version": row.version}
    form = KeyForm(request.POST or None, initial=initial, actor=actor, tenant=tenant)

    def change() -> str:
        key_actions.update_key(actor=actor, key_id=row.id, expected_version=form.shown_version, **form.values())
        return "Saved. Routers apply it within two seconds."

    if request.method == "POST" and form.is_valid() and apply(request, form, change):
        return redirect("console:key", tenant.id, row.id)
    context = {"tenant": tenant, "key": row, "form": form, "quotas": _quotas(actor, row), "now": utc_now()}
    context["may_change"] = actor.holds(Scope.TENANT_WRITE)
    return render(request, "console/key.html", context)


@require_POST
@of_tenants
def revoke_key(request: HttpRequest, tenant_id: str, key_id: str) -> HttpResponseBase:
    def change() -> str:
        key: ApiKey = key_actions.revoke_key(actor=actor_of(request), key_id=key_id)
        return f"Key {key.public_id} is revoked. Routers refuse it within two seconds."

    return act(request, change, reverse("console:tenant", args=[tenant_id]))
