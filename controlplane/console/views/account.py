"""Signing in and out, and choosing a password."""

from __future__ import annotations

import time
from typing import cast

from django import forms
from django.conf import settings
from django.contrib.auth import login, logout, update_session_auth_hash
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.crypto import constant_time_compare
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.safestring import mark_safe
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from controlplane.accounts import actions, queries, second_factor, totp
from controlplane.accounts.middleware import FACTOR_GIVEN
from controlplane.accounts.models import User
from controlplane.common.errors import Conflict, TooManyAttempts
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


class CodeForm(forms.Form):
    code = forms.CharField(
        max_length=40,
        help_text="Six digits from your authenticator app, or one of your recovery codes.",
        widget=forms.TextInput(attrs={"autocomplete": "one-time-code", "inputmode": "text", "autofocus": True}),
    )


HALF_SIGNED_IN = "half_signed_in"
CODE_WITHIN_S = 600


def _address(request: HttpRequest) -> str:
    return str(request.META.get("REMOTE_ADDR", ""))


def _answer(request: HttpRequest, page: str, context: dict[str, object], status: int, wait_s: int) -> HttpResponseBase:
    """A step of signing in; ``wait_s``: before the next attempt, 0 for none."""
    answer = render(request, page, context, status=status)
    if wait_s:
        answer["Retry-After"] = str(wait_s)
    return answer


def open_session(request: HttpRequest, user: User, *, is_factor_given: bool) -> None:
    login(request, user)
    request.session[FACTOR_GIVEN] = is_factor_given
    actions.record_sign_in(actor=user.actor, address=_address(request))


@never_cache
@require_http_methods(["GET", "POST"])
def sign_in(request: HttpRequest) -> HttpResponseBase:
    """Email and password; failures look alike and slow down further ones. Who has a second factor gives a code next."""
    form = SignInForm(request.POST or None)
    status, wait_s = 200, 0
    if request.method == "POST" and form.is_valid():
        try:
            user = actions.authenticate_password(
                email=form.cleaned_data["email"], password=form.cleaned_data["password"], address=_address(request)
            )
        except TooManyAttempts as problem:
            form.add_error(None, problem.message)
            status, wait_s = 429, problem.retry_after_s
        else:
            if user is not None and user.has_second_factor:
                # The password may change meanwhile: what was proved holds for the present one only.
                proved = {"user": user.id, "password": user.get_session_auth_hash(), "at": time.time()}
                request.session[HALF_SIGNED_IN] = {**proved, "next": _next(request)}
                return redirect("console:sign_in_code")
            if user is not None:
                open_session(request, user, is_factor_given=False)
                return redirect(_next(request))
            form.add_error(None, "Email or password is wrong.")
            status = 401
    context = {
        "form": form,
        "next": request.GET.get("next", ""),
        "oidc": settings.OIDC_NAME,
        "is_first_start": not queries.has_anybody_signed_in(),
    }
    return _answer(request, "console/sign_in.html", context, status, wait_s)


def _half_signed_in(request: HttpRequest) -> tuple[User, str] | None:
    """Who has given the right password within the last minutes, and where to go from here."""
    proved = request.session.get(HALF_SIGNED_IN)
    if proved is None or not 0 <= time.time() - proved["at"] < CODE_WITHIN_S:
        return None
    user = User.objects.filter(pk=proved["user"], is_active=True).first()
    if user is None or not constant_time_compare(user.get_session_auth_hash(), proved["password"]):
        return None
    return user, proved["next"]


@never_cache
@require_http_methods(["GET", "POST"])
def sign_in_code(request: HttpRequest) -> HttpResponseBase:
    """The second step of signing in; failures slow down further ones, and nobody is locked out for good."""
    half = _half_signed_in(request)
    if half is None:
        request.session.pop(HALF_SIGNED_IN, None)
        return redirect("console:sign_in")
    user, address = half
    form = CodeForm(request.POST or None)
    status, wait_s = 200, 0
    if request.method == "POST" and form.is_valid():
        try:
            is_right = second_factor.give_code(user=user, code=form.cleaned_data["code"], address=_address(request))
        except TooManyAttempts as problem:
            form.add_error(None, problem.message)
            status, wait_s = 429, problem.retry_after_s
        else:
            if is_right:
                del request.session[HALF_SIGNED_IN]
                open_session(request, user, is_factor_given=True)
                return redirect(address)
            form.add_error("code", "is wrong, or was used already")
            status = 401
    context = {
        "form": form, "heading": "Second step", "submit": "Sign in", "width": "narrow", "lead": user.email,
        "back": reverse("console:sign_in"),
    }  # fmt: skip
    return _answer(request, "console/form.html", context, status, wait_s)


NEW_SECRET = "new_second_factor"


@never_cache
@require_http_methods(["GET", "POST"])
@own_account
def own_second_factor(request: HttpRequest) -> HttpResponseBase:
    """Enrol a device. The secret waits sealed in the session until a code proves that the device has it."""
    user = cast(User, request.user)
    kept = request.session.get(NEW_SECRET)
    secret = totp.opened(bytes.fromhex(kept), user.id) if kept else None
    if secret is None and not user.has_second_factor:
        secret = totp.new_secret()
        request.session[NEW_SECRET] = totp.sealed(secret, user.id).hex()
    form = CodeForm(request.POST or None)
    form.fields["code"].help_text = "The six digits that the app shows now."
    codes: list[str] = []

    def change() -> str:
        if secret is None:
            raise Conflict("the account has a second factor already")
        codes.extend(second_factor.enrol(actor=user.actor, user=user, secret=secret, code=form.cleaned_data["code"]))
        return "From now on signing in asks for a code."

    if request.method == "POST" and form.is_valid() and apply(request, form, change):
        request.session.pop(NEW_SECRET, None)
        request.session.cycle_key()
        request.session[FACTOR_GIVEN] = True
        return render(request, "console/recovery_codes.html", {"codes": codes})
    context: dict[str, object] = {"form": form, "is_required": settings.SECOND_FACTOR_REQUIRED}
    if secret is not None:
        context |= {"picture": mark_safe(totp.picture(secret, user.email)), "secret": totp.as_text(secret)}
    return render(request, "console/second_factor.html", context)


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
