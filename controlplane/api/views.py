"""What answers below ``/api`` where no viewset does."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt

from controlplane.common.problems import problem_response


@csrf_exempt
def not_found(request: HttpRequest) -> HttpResponse:
    return problem_response(404, "not_found", f"Nothing at {request.path}.")
