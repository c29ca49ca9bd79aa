"""Request ids in logs and in audit entries; what a browser may do with our pages."""

from __future__ import annotations

import re
from collections.abc import Callable

import structlog
from django.conf import settings
from django.http import HttpRequest, HttpResponseBase

from controlplane.common.ids import new_id

_SAFE_ID = re.compile(r"[0-9A-Za-z_.:-]{1,64}\Z")


def current_request_id() -> str:
    """Id of the request this thread serves, "" outside of one."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))


class RequestContextMiddleware:
    """Binds ``request_id`` (the client's if it is harmless) to the log context and echoes it."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        given = request.headers.get("x-request-id", "")
        request_id = given if _SAFE_ID.match(given) else new_id("req")
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            response = self.get_response(request)
        response["X-Request-Id"] = request_id
        return response


_CONSOLE_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",
    "connect-src": "'self'",
    "form-action": "'self'",
    "frame-ancestors": "'none'",
    "base-uri": "'none'",
}
# Swagger UI writes style attributes and knows no way around them; its script is a file like every other.
_DOCS_POLICY = {**_CONSOLE_POLICY, "style-src": "'self' 'unsafe-inline'"}


class SecurityHeadersMiddleware:
    """Only scripts, styles and pictures of this host; nothing is stored by browsers or proxies unless a view says so.

    Pages and answers carry tenants' figures, and some of them a secret that is shown once: after signing out, the
    back button must not bring them up again.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self.get_response(request)
        policy = _DOCS_POLICY if request.path == settings.API_DOCS_URL else _CONSOLE_POLICY
        response["Content-Security-Policy"] = "; ".join(f"{name} {value}" for name, value in policy.items())
        response.setdefault("Cache-Control", "no-store")
        return response
