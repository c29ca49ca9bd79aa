"""Holds an operator with a one-time password to choosing a new one."""

from __future__ import annotations

from collections.abc import Callable

from django.conf import settings
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect

from controlplane.common.problems import problem_response


class PasswordChangeMiddleware:
    """Until the one-time password is replaced, every page leads to the form and REST by session answers 403."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        user = request.user
        if user.is_authenticated and getattr(user, "must_change_password", False):
            open_paths = (settings.PASSWORD_CHANGE_URL, settings.SIGN_OUT_URL, settings.STATIC_URL, "/livez", "/readyz")
            if request.path.startswith("/api/"):
                return problem_response(403, "password_change_required", "Choose a new password first.")
            if not request.path.startswith(open_paths):
                return redirect(settings.PASSWORD_CHANGE_URL)
        return self.get_response(request)
