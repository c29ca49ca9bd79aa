"""Holds people to what their account still needs: their own password, a second factor."""

from __future__ import annotations

from collections.abc import Callable

from django.conf import settings
from django.contrib.auth import logout
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect

from controlplane.accounts.models import User
from controlplane.accounts.second_factor import must_have
from controlplane.common.problems import problem_response

FACTOR_GIVEN = "second_factor"
"""Key of a session that was opened with a second factor: a code of ours, or signing in elsewhere."""


class AccountReadyMiddleware:
    """Until the account is ready every page leads to the form it needs, and REST by session answers 403.

    A session without the second factor that its account has is none: it was opened before there was one.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        user = request.user
        if not isinstance(user, User):
            return self.get_response(request)
        is_given = bool(request.session.get(FACTOR_GIVEN))
        if user.has_second_factor and not is_given:
            logout(request)
        elif user.must_change_password:
            return self._held(request, settings.PASSWORD_CHANGE_URL, "password_change_required", "a new password")
        elif must_have(user) and not is_given:
            return self._held(request, settings.SECOND_FACTOR_URL, "second_factor_required", "a second factor")
        return self.get_response(request)

    def _held(self, request: HttpRequest, form: str, code: str, what: str) -> HttpResponseBase:
        open_paths = (form, settings.SIGN_OUT_URL, settings.STATIC_URL, "/livez", "/readyz")
        if request.path.startswith("/api/"):
            # A token speaks for itself; what is held is the session.
            if request.headers.get("authorization"):
                return self.get_response(request)
            return problem_response(403, code, f"Choose {what} first, on the console.")
        if not request.path.startswith(open_paths):
            return redirect(form)
        return self.get_response(request)
