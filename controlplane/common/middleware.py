"""Request ids in logs and in audit entries."""

from __future__ import annotations

import re
from collections.abc import Callable

import structlog
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
