"""What answers when no view does: a page for people, problem+json below ``/api`` and ``/router``."""

from __future__ import annotations

from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.template.loader import render_to_string

from controlplane.common.errors import ControlPlaneError, NotFound
from controlplane.common.problems import TOO_LARGE, problem_response

_MACHINES = ("/api/", "/router/")


class _TooLarge(ControlPlaneError):
    status = 413
    code = "request_too_large"


class _Forbidden(ControlPlaneError):
    status = 403
    code = "forbidden"


def _answer(request: HttpRequest, problem: ControlPlaneError) -> HttpResponseBase:
    if request.path.startswith(_MACHINES):
        return problem_response(problem.status, problem.code, problem.message)
    return render(request, "console/problem.html", {"problem": problem}, status=problem.status)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    """Django has refused to read the request."""
    if isinstance(exception, RequestDataTooBig):
        return _answer(request, _TooLarge(TOO_LARGE))
    # No page here: its context may need what was just refused, such as the host's name.
    return problem_response(400, "bad_request", "The request is malformed, or names a host this site does not serve.")


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    return _answer(request, _Forbidden("This is not allowed."))


def not_found(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    return _answer(request, NotFound(f"There is nothing at {request.path}."))


def broken(request: HttpRequest) -> HttpResponseBase:
    """A fault of ours; the log has it under the request id. Nothing that could fail again is touched."""
    if request.path.startswith(_MACHINES):
        return problem_response(500, ControlPlaneError.code, "Something broke on our side; the log says what.")
    return HttpResponse(render_to_string("console/broken.html"), status=500)


def stale_form(request: HttpRequest, reason: str = "") -> HttpResponseBase:
    """The form's CSRF token is missing or of another session."""
    return _answer(
        request,
        _Forbidden(
            "The form was too old, or this browser refuses our cookie; nothing was changed. "
            "Go back, reload the page and send it again."
        ),
    )
