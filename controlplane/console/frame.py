"""What every page shares: who is asking, the navigation, and how a refused use case becomes a form's errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, cast

from django import forms
from django.contrib import messages
from django.contrib.auth.views import redirect_to_login
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django_htmx.http import HttpResponseClientRefresh

from controlplane.accounts.models import User
from controlplane.common.actor import Actor, Scope
from controlplane.common.errors import ControlPlaneError, Invalid, NotAllowed, NotFound, VersionMismatch
from controlplane.common.limits import LIMITS, MAX_LIMIT, TEXTS
from controlplane.fleet.hazards import n_open

P = ParamSpec("P")
View = Callable[Concatenate[HttpRequest, P], HttpResponseBase]

PAGES = (
    ("live", "Live"),
    ("tenants", "Tenants"),
    ("tiers", "Tiers"),
    ("pools", "Pools"),
    ("requests", "Requests"),
    ("hazards", "Hazards"),
    ("usage", "Usage"),
    ("predictor", "Predictor"),
    ("jobs", "Jobs"),
    ("audit", "Audit"),
    ("members", "Members"),
    ("tokens", "Tokens"),
)
OF_TENANT = ("live", "requests", "usage", "members", "tokens")
"""Pages that people of a tenant have, beside that of the tenant itself."""

OWN_ACCOUNT = ("second_factor", "password", "sign_in", "sign_in_code", "invitation")


def navigation(request: HttpRequest) -> dict[str, object]:
    """Context processor: the main navigation with the current page marked, and what sets off the alarm."""
    match = request.resolver_match
    current = (match.url_name or "").split("_")[0] if match else ""
    # REST leaves None where nobody is signed in, and its documentation is a page as well.
    tenant = request.user.tenant_id if isinstance(request.user, User) else None
    pages = [(name, label, reverse(f"console:{name}")) for name, label in PAGES if not tenant or name in OF_TENANT]
    if tenant:
        pages.insert(1, ("tenant", "Tenant", reverse("console:tenant", args=[tenant])))
    current = {
        "backend": "pools",
        "group": "tenants",
        "groups": "tenants",
        "key": "tenants",
        "peppers": "tokens",
        "price": "usage",
        "statement": "usage",
        "statements": "usage",
    }.get(current, current)
    return {
        "navigation": [
            {
                "url": url,
                "label": label,
                "is_current": current == name.rstrip("s") or current == name,
            }
            for name, label, url in pages
        ],
        "is_of_tenant": tenant is not None,
        "is_readonly": _is_readonly(request),
        # Counted when a template asks: pages of strangers must not.
        "open_hazards": n_open,
    }


def _is_readonly(request: HttpRequest) -> bool:
    """Whether the person may change nothing here, so that pages offer nothing to change; not so of the own account."""
    match = request.resolver_match
    if not isinstance(request.user, User) or (match and match.url_name in OWN_ACCOUNT):
        return False
    return not request.user.actor.holds(Scope.WRITE if request.user.tenant_id is None else Scope.TENANT_WRITE)


def signed_in_with(*, reads: Scope | None, writes: Scope | None) -> Callable[[View[P]], View[P]]:
    """Only for people who are signed in and hold the scope; None: everybody, for what is their own.

    Refusals of use cases become pages with their status. Use cases check again, with the object at hand.
    """

    def decorate(view: View[P]) -> View[P]:
        @functools.wraps(view)
        def run(request: HttpRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
            if not request.user.is_authenticated:
                if request.htmx:  # type: ignore[attr-defined] # django_htmx sets it
                    # A fragment must not be replaced by the sign-in form: the page as a whole goes there.
                    return HttpResponseClientRefresh()
                return redirect_to_login(request.get_full_path())
            try:
                needed = reads if request.method in ("GET", "HEAD") else writes
                if needed is not None:
                    actor_of(request).require(needed)
                return view(request, *args, **kwargs)
            except ControlPlaneError as problem:
                return render(request, "console/problem.html", {"problem": problem}, status=problem.status)

        return run

    return decorate


def signed_in(view: View[P]) -> View[P]:
    """A page of the platform: reading needs ``admin.read``, changing ``admin.write``."""
    return signed_in_with(reads=Scope.READ, writes=Scope.WRITE)(view)


def of_tenants(view: View[P]) -> View[P]:
    """A page that people of a tenant have as well, for what belongs to it; the view shows and changes no other."""
    return signed_in_with(reads=Scope.TENANT_READ, writes=Scope.TENANT_WRITE)(view)


def of_members(view: View[P]) -> View[P]:
    """A page about people: changed by owners, and by a tenant's admins for its own."""
    return signed_in_with(reads=Scope.TENANT_READ, writes=Scope.MEMBERS)(view)


def own_account(view: View[P]) -> View[P]:
    """A page of everybody's own account."""
    return signed_in_with(reads=None, writes=None)(view)


def actor_of(request: HttpRequest) -> Actor:
    """The signed-in person as an actor of use cases."""
    return cast(User, request.user).actor


def number_input(low: float, high: float, *, step: str = "1", placeholder: str = "") -> forms.NumberInput:
    """A field for a number, whose range the browser knows as well; the use case has the last word."""
    attributes = {"step": step, "min": f"{low:.15g}", "max": f"{high:.15g}"}
    return forms.NumberInput(attrs={**attributes, "placeholder": placeholder} if placeholder else attributes)


class VersionedForm(forms.Form):
    """A form that remembers which version of the row it shows, so that two people cannot overwrite each other."""

    version = forms.IntegerField(required=False, widget=forms.HiddenInput)

    @property
    def shown_version(self) -> int | None:
        """What an update expects the row's version to be; None where nothing was shown."""
        version: int | None = self.cleaned_data["version"]
        return version

    def values(self) -> dict[str, Any]:
        """The fields by name, for the use case."""
        return {name: value for name, value in self.cleaned_data.items() if name != "version"}


@dataclass(frozen=True, slots=True)
class Section:
    """Some fields of a form under one heading; ``is_open``: something in it is set, or wrong."""

    title: str
    fields: list[forms.BoundField]
    is_open: bool
    lead: str = ""


def section(title: str, fields: list[forms.BoundField], lead: str = "") -> Section:
    return Section(title, fields, any(field.errors or field.value() not in (None, "") for field in fields), lead)


class LimitedForm(VersionedForm):
    """A form whose last fields are limits, as ``limits.<name>``; an empty one means no limit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in LIMITS:
            text = TEXTS[name]
            self.fields[f"limits.{name}"] = forms.IntegerField(
                required=False,
                label=text.label,
                help_text=text.help,
                widget=forms.NumberInput(attrs={"min": "0", "max": str(MAX_LIMIT), "placeholder": "no limit"}),
            )

    def plain_fields(self) -> list[forms.BoundField]:
        """The fields under no heading."""
        return [field for field in self.visible_fields() if not field.name.startswith("limits.")]

    def sections(self) -> list[Section]:
        lead = "An empty field means no limit, 0 means nothing. Days and months are UTC."
        return [section("Limits and quotas", [self[f"limits.{name}"] for name in LIMITS], lead)]

    def values(self) -> dict[str, Any]:
        values = super().values()
        values["limits"] = {name: values.pop(f"limits.{name}") for name in LIMITS}
        return values


def apply(request: HttpRequest, form: forms.Form, change: Callable[[], str]) -> bool:
    """Run a use case for a valid form; its message on success, its refusal as the form's errors."""
    try:
        text = change()
    except Invalid as problem:
        for field, texts in problem.fields.items():
            for message in texts:
                form.add_error(
                    field if field in form.fields else None,
                    message if field in form.fields or not field else f"{field}: {message}",
                )
        return False
    except VersionMismatch:
        form.add_error(None, "Somebody else changed this meanwhile; nothing was saved. Open the page again to see it.")
        return False
    except (NotAllowed, NotFound):
        raise
    except ControlPlaneError as problem:
        form.add_error(None, problem.message)
        return False
    messages.success(request, text)
    return True


def act(request: HttpRequest, change: Callable[[], str], back: str) -> HttpResponseBase:
    """Run a use case for a button: a message either way, then back to ``back``."""
    try:
        messages.success(request, change())
    except (NotAllowed, NotFound):
        raise
    except ControlPlaneError as problem:
        messages.error(request, problem.message)
    return redirect(back)
