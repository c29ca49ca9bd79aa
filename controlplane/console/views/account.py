"""Signing in and out, and choosing a password."""

from __future__ import annotations

from typing import cast

from django import forms
from django.conf import settings
from django.contrib.auth import login, logout, update_session_auth_hash
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect, render
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from controlplane.accounts import actions
from controlplane.accounts.models import User
from controlplane.common.errors import TooManyAttempts
from controlplane.console.frame import actor_of, apply, own_account


class SignInForm(forms.Form):
    email = forms.EmailField(widget=forms.EmailInput(attrs={"autofocus": True, "autocomplete": "username"}))
    password = forms.CharField(widget=forms.PasswordInput(attrs={"autocomplete": "current-password"}), strip=False)


class ChosenPasswordForm(forms.Form):
    password = forms.CharField(
        label="Password", widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}), strip=False,
        help_text="At least 12 characters.",
    )  # fmt: skip
    repeated = forms.CharField(
        label="Password again", widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}), strip=False
    )

    def clean(self) -> dict[str, object]:
        values = super().clean() or {}
        if values.get("password") != values.get("repeated"):
            self.add_error("repeated", "differs from the password")
        return values


class PasswordForm(forms.Form):
    old_password = forms.CharField(
        label="Present password", widget=forms.PasswordInput(attrs={"autocomplete": "current-password"}), strip=False
    )
    new_password = forms.CharField(
        label="New password", widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}), strip=False,
        help_text="At least 12 characters.",
    )  # fmt: skip
    repeated = forms.CharField(
        label="New password again", widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}), strip=False
    )

    def clean(self) -> dict[str, object]:
        values = super().clean() or {}
        if values.get("new_password") != values.get("repeated"):
            self.add_error("repeated", "differs from the new password")
        return values


def _next(request: HttpRequest) -> str:
    address = request.POST.get("next") or request.GET.get("next") or ""
    if url_has_allowed_host_and_scheme(address, allowed_hosts={request.get_host()}, require_https=request.is_secure()):
        return address
    return settings.LOGIN_REDIRECT_URL


@never_cache
@require_http_methods(["GET", "POST"])
def sign_in(request: HttpRequest) -> HttpResponseBase:
    """Email and password; failures look alike and slow down further ones."""
    form = SignInForm(request.POST or None)
    status = 200
    if request.method == "POST" and form.is_valid():
        address = str(request.META.get("REMOTE_ADDR", ""))
        try:
            user = actions.authenticate_password(
                email=form.cleaned_data["email"], password=form.cleaned_data["password"], address=address
            )
        except TooManyAttempts as problem:
            form.add_error(None, problem.message)
            status = 429
        else:
            if user is not None:
                login(request, user)
                actions.record_sign_in(actor=user.actor, address=address)
                return redirect(_next(request))
            form.add_error(None, "Email or password is wrong.")
            status = 401
    return render(request, "console/sign_in.html", {"form": form, "next": request.GET.get("next", "")}, status=status)


@require_POST
@own_account
def sign_out(request: HttpRequest) -> HttpResponseBase:
    actions.record_sign_out(actor=actor_of(request))
    logout(request)
    return redirect(settings.LOGIN_URL)


@never_cache
@require_http_methods(["GET", "POST"])
@own_account
def password(request: HttpRequest) -> HttpResponseBase:
    """Replace one's own password; required after a one-time password."""
    form = PasswordForm(request.POST or None)
    user = cast(User, request.user)

    def change() -> str:
        actions.change_password(
            actor=user.actor,
            user=user,
            old_password=form.cleaned_data["old_password"],
            new_password=form.cleaned_data["new_password"],
        )
        return "Password changed."

    if request.method == "POST" and form.is_valid() and apply(request, form, change):
        user.refresh_from_db()
        update_session_auth_hash(request, user)
        return redirect(settings.LOGIN_REDIRECT_URL)
    lead = "You signed in with a one-time password. Choose your own to go on." if user.must_change_password else ""
    context = {
        "form": form,
        "heading": "Choose a password",
        "lead": lead,
        "submit": "Change password",
        "width": "narrow",
    }
    return render(request, "console/form.html", context)
