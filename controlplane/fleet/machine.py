"""The frame around endpoints that only routers call: credential, method, and failures they can act on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec

import structlog
from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt
from psycopg_pool import PoolTimeout

from controlplane.common.problems import problem_response
from controlplane.fleet.models import Router
from controlplane.fleet.routers import authenticate_router

P = ParamSpec("P")
logger = structlog.get_logger(__name__)


def router_endpoint(
    method: str,
) -> Callable[
    [Callable[Concatenate[HttpRequest, Router, P], HttpResponse]], Callable[Concatenate[HttpRequest, P], HttpResponse]
]:
    """A plain view for routers: 401 without a live router token, 405 for another method, 503 without the database.

    Sessions and operators' tokens open nothing here, so CSRF does not apply.
    """

    def decorate(
        view: Callable[Concatenate[HttpRequest, Router, P], HttpResponse],
    ) -> Callable[Concatenate[HttpRequest, P], HttpResponse]:
        @functools.wraps(view)
        def run(request: HttpRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
            if request.method != method:
                response = problem_response(405, "method_not_allowed", f"{method} only.")
                response["Allow"] = method
                return response
            try:
                router = authenticate_router(request.headers.get("authorization", ""))
                if router is None:
                    response = problem_response(
                        401, "invalid_router_token", "The router token is missing or not valid."
                    )
                    response["WWW-Authenticate"] = "Bearer"
                    return response
                return view(request, router, *args, **kwargs)
            except (OperationalError, InterfaceError, PoolTimeout) as error:
                logger.warning("machine.database_unavailable", path=request.path, error=type(error).__name__)
                response = problem_response(503, "database_unavailable", "The database is not reachable.")
                response["Retry-After"] = "1"
                return response

        return csrf_exempt(run)

    return decorate
