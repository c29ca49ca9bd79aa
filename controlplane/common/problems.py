"""problem+json: one shape for every error of ``/api/v1`` (RFC 9457)."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

import structlog
from django.core.exceptions import PermissionDenied, RequestDataTooBig
from django.db import IntegrityError, OperationalError
from django.http import Http404, HttpResponse
from psycopg_pool import PoolTimeout
from rest_framework import exceptions
from rest_framework.response import Response
from rest_framework.settings import api_settings
from rest_framework.views import set_rollback

from controlplane.common.errors import ControlPlaneError, Invalid, TooManyAttempts

logger = structlog.get_logger(__name__)

CONTENT_TYPE = "application/problem+json"
TOO_LARGE = "The body is larger than 32 MiB."


def problem_body(status: int, code: str, detail: str, errors: dict[str, list[str]] | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "code": code,
        "detail": detail,
    }
    if errors is not None:
        body["errors"] = errors
    return body


def problem_response(status: int, code: str, detail: str, errors: dict[str, list[str]] | None = None) -> HttpResponse:
    """The same outside DRF: middleware, machine endpoints, unknown paths."""
    body = problem_body(status, code, detail, errors)
    return HttpResponse(json.dumps(body).encode(), status=status, content_type=CONTENT_TYPE)


def exception_handler(error: Exception, context: dict[str, Any]) -> Response | None:
    """DRF's hook. What is nobody's known fault stays an exception: Django logs it and answers 500."""
    status, code, detail, fields, headers = 500, "internal_error", "", None, {}
    match error:
        case Invalid():
            status, code, detail, fields = error.status, error.code, error.message, error.fields
        case TooManyAttempts():
            status, code, detail = error.status, error.code, error.message
            headers["Retry-After"] = str(error.retry_after_s)
        case ControlPlaneError():
            status, code, detail = error.status, error.code, error.message
        case exceptions.ValidationError():
            status, code, detail, fields = 422, "invalid", "The request has invalid fields.", _flatten(error.detail)
        case exceptions.APIException():
            status, code, detail = error.status_code, str(error.get_codes()), str(error.detail)
            if (header := getattr(error, "auth_header", None)) is not None:
                headers["WWW-Authenticate"] = header
            if (wait := getattr(error, "wait", None)) is not None:
                headers["Retry-After"] = str(max(1, int(wait)))
        case RequestDataTooBig():
            status, code, detail = 413, "request_too_large", TOO_LARGE
        case Http404():
            status, code, detail = 404, "not_found", "Nothing of that id."
        case PermissionDenied():
            status, code, detail = 403, "not_allowed", "Not allowed."
        case IntegrityError():
            # A race that the use case's own check lost to: the constraint has decided.
            logger.warning("api.integrity_error", constraint=_constraint(error))
            status, code, detail = 409, "conflict", f"The change violates {_constraint(error) or 'a constraint'}."
        case OperationalError() | PoolTimeout():
            status, code, detail = 503, "database_unavailable", "The database is not reachable."
            headers["Retry-After"] = "2"
        case _:
            return None
    set_rollback()
    response = Response(problem_body(status, code, detail, fields), status=status, headers=headers)
    response.content_type = CONTENT_TYPE
    return response


def _constraint(error: IntegrityError) -> str:
    diagnosis = getattr(error.__cause__, "diag", None)
    return str(getattr(diagnosis, "constraint_name", None) or "")


def _flatten(detail: Any, prefix: str = "") -> dict[str, list[str]]:
    """DRF's nested details as one flat map; list positions and nested names are joined by dots."""
    if isinstance(detail, dict):
        merged: dict[str, list[str]] = {}
        for name, value in detail.items():
            own = "" if name == api_settings.NON_FIELD_ERRORS_KEY else str(name)
            merged.update(_flatten(value, f"{prefix}.{own}".strip(".")))
        return merged
    if isinstance(detail, list):
        if all(not isinstance(v, dict | list) for v in detail):
            return {prefix: [str(v) for v in detail]}
        merged = {}
        for index, value in enumerate(detail):
            if value:
                merged.update(_flatten(value, f"{prefix}.{index}".strip(".")))
        return merged
    return {prefix: [str(detail)]}
