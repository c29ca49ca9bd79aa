"""Who may do what: members, their roles, and invitations. Owners for all, a tenant's admins for their own."""

from __future__ import annotations

from typing import Any

from django import forms
from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from controlplane.accounts import actions, invitations, queries, second_factor
from controlplane.accounts.models import TENANT_ROLES, Role, User
from controlplane.common.actor import Actor, Scope, system_actor
from controlplane.common.clock import utc_now
from controlplane.common.errors import ControlPlaneError, Invalid, NotFound
from controlplane.common.validation import get_or_not_found, without_nul
from controlplane.console.frame import VersionedForm, act, actor_of, apply, of_members
from controlplane.console.pickers import TenantField
from controlplane.console.sorting import Column, asked_page
from controlplane.console.views.account import ChosenPasswordForm, open_session
from controlplane.tenants.queries import tenants

SHOWN = 200
"""Open invitations on the page."""
COLUMNS = (
    Column(name="email", label="Email", key=queries.SORTED_BY["email"]),
    Column(name="name", label="Name", key=queries.SORTED_BY["name"]),
    Column(name="role", label="Role", key=queries.SORTED_BY["role"]),
    Column(name="tenant", label="Tenant", key=queries.SORTED_BY["tenant"]),
    Column(name="last_login", label="Last sign-in", key=queries.SORTED_BY["last_login"]),
    Column(name="state", label="State"),
)
ROLE_HELP = {
    Role.OWNER: "everything, members and roles included",
    Role.OPERATOR: "configuration",
    Role.VIEWER: "reads everything",
    Role.TENANT_ADMIN: "keys and members of one tenant",
    Role.TENANT_MEMBER: "reads what belongs to one tenant",
}


class RoleForm(forms.Form):
    """A role and, for roles of a tenant, its short name; a tenant's admin gives roles of the own tenant only."""

    role = forms.ChoiceField(widget=forms.RadioSelect)
    tenant = TenantField(required=False, help_text="Short name, for a tenant admin or member; else empty.")

    def __init__(self, *args: Any, actor: Actor, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.actor = actor
        offered = [r for r in Role if actor.tenant is None or r.value in TENANT_ROLES]
        self.fields["role"].choices = [(r.value, f"{r.label}: {ROLE_HELP[r]}") for r in offered]  # type: ignore[attr-defined]  # a choice field
        if actor.tenant is not None:
            del self.fields["tenant"]

    def clean_tenant(self) -> str | None:
        slug = without_nul(self.cleaned_data["tenant"]).strip()
        row = tenants(actor=self.actor).filter(slug=slug).first()
        if slug and row is None:
            raise forms.ValidationError(f"no tenant {slug!r}")
        return row.id if row is not None else None

    def values(self) -> dict[str, Any]:
        return {"tenant": self.actor.tenant, **self.cleaned_data}


class InviteForm(RoleForm):
    email = forms.CharField(max_length=254, widget=forms.EmailInput(attrs={"autocomplete": "off"}))
    field_order = ("email", "role", "tenant")


class MemberForm(RoleForm, VersionedForm):
    is_active = forms.BooleanField(required=False, label="May sign in", help_text="Off: signed out and refused.")

    def values(self) -> dict[str, Any]:
        return {"tenant": self.actor.tenant, **VersionedForm.values(self)}


class AcceptForm(ChosenPasswordForm):
    name = forms.CharField(max_length=200, required=False, widget=forms.TextInput(attrs={"autocomplete": "name"}))
    field_order = ("name", "password", "repeated")


@never_cache
@require_http_methods(["GET", "POST"])
@of_members
def index(request: HttpRequest) -> HttpResponseBase:
    """Members and open invitations; the answer to an invitation is the only page that ever shows its link."""
    actor = actor_of(request)
    form = InviteForm(request.POST or None, actor=actor, initial={"role": Role.TENANT_MEMBER})
    links: list[str] = []

    def change() -> str:
        invitation, text = invitations.invite(actor=actor, **form.values())
        links.append(request.build_absolute_uri(reverse("console:invitation", args=[text])))
        return f"{invitation.email} is invited. Nothing was sent: hand over the link below."

    if request.method == "POST" and form.is_valid() and apply(request, form, change):
        form = InviteForm(actor=actor, initial={"role": Role.TENANT_MEMBER})
    search = without_nul(request.GET.get("q", "")).strip()
    rows = queries.members(actor=actor, search=search)
    page, problem = asked_page(rows, COLUMNS, asked=request.GET.dict(), kept=["q"])
    opened = queries.invitations(actor=actor).filter(accepted_at=None, revoked_at=None, expires_at__gt=utc_now())
    context = {
        "form": form,
        "link": "".join(links),
        "page": page,
        "problem": problem,
        "invitations": opened[:SHOWN],
        "shown": SHOWN,
        "search": search,
        "may_change": actor.holds(Scope.MEMBERS),
    }
    return render(request, "console/members.html", context, status=422 if problem else 200)


@require_http_methods(["GET", "POST"])
@of_members
def detail(request: HttpRequest, member_id: str) -> HttpResponseBase:
    actor = actor_of(request)
    member: User = get_or_not_found(queries.members(actor=actor), "member", member_id)
    initial = {
        "role": member.role,
        "tenant": member.tenant.slug if member.tenant else "",
        "is_active": member.is_active,
        "version": member.version,
    }
    form = MemberForm(request.POST or None, initial=initial, actor=actor)

    def change() -> str:
        actions.update_user(actor=actor, user_id=member.id, expected_version=form.shown_version, **form.values())
        return "Saved, and in force at once."

    if request.method == "POST" and form.is_valid() and apply(request, form, change):
        return redirect("console:members")
    context = {"member": member, "form": form, "may_change": actor.holds(Scope.MEMBERS)}
    return render(request, "console/member.html", context)


@never_cache
@require_POST
@of_members
def reset_password(request: HttpRequest, member_id: str) -> HttpResponseBase:
    """The answer to this request is the only page that ever shows the one-time password."""
    actor = actor_of(request)
    password = actions.reset_password(actor=actor, user_id=member_id)
    member = get_or_not_found(queries.members(actor=actor), "member", member_id)
    return render(request, "console/member_password.html", {"member": member, "password": password})


@require_POST
@of_members
def reset_second_factor(request: HttpRequest, member_id: str) -> HttpResponseBase:
    def change() -> str:
        member = second_factor.reset_second_factor(actor=actor_of(request), user_id=member_id)
        return f"{member.email} may enrol another device."

    return act(request, change, reverse("console:member", args=[member_id]))


@require_POST
@of_members
def remove(request: HttpRequest, member_id: str) -> HttpResponseBase:
    def change() -> str:
        actions.remove_user(actor=actor_of(request), user_id=member_id)
        return "The account is removed, with its tokens."

    return act(request, change, reverse("console:members"))


@require_POST
@of_members
def revoke_invitation(request: HttpRequest, invitation_id: str) -> HttpResponseBase:
    def change() -> str:
        row = invitations.revoke_invitation(actor=actor_of(request), invitation_id=invitation_id)
        return f"The invitation of {row.email} is taken back."

    return act(request, change, reverse("console:members"))


@never_cache
@require_http_methods(["GET", "POST"])
def accept(request: HttpRequest, text: str) -> HttpResponseBase:
    """Where the link of an invitation leads: choose a password, once, and be signed in by it."""
    try:
        invitation = invitations.open_invitation(text)
    except NotFound as problem:
        return render(request, "console/problem.html", {"problem": problem}, status=problem.status)
    form = AcceptForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        values = {name: form.cleaned_data[name] for name in ("name", "password")}
        try:
            user = invitations.accept_invitation(actor=system_actor("invitation"), text=text, **values)
        except Invalid as problem:
            for field, texts in problem.fields.items():
                form.add_error(field, texts)
        except ControlPlaneError as problem:
            # Opened by another one meanwhile: the link a second time, or an account of that email.
            return render(request, "console/problem.html", {"problem": problem}, status=problem.status)
        else:
            open_session(request, user, is_factor_given=False)
            messages.success(request, "Your account is open.")
            return redirect(settings.LOGIN_REDIRECT_URL)
    context = {
        "form": form, "heading": "Welcome to Fairlane", "submit": "Open the account", "width": "narrow",
        "lead": f"{invitation.invited_by} invites {invitation.email} as {invitation.get_role_display()}. "
        "Choose a password.",
    }  # fmt: skip
    return render(request, "console/form.html", context)
