"""Artifacts for routers."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse

from controlplane.common.problems import problem_response
from controlplane.fleet.machine import router_endpoint
from controlplane.fleet.models import Router
from controlplane.training.queries import artifact_body


@router_endpoint("GET")
def artifact(request: HttpRequest, router: Router, digest: str) -> HttpResponse:
    """GET /router/v1/artifacts/{digest}: the bytes; the digest in the address is their sha256."""
    body = artifact_body(digest)
    if body is None:
        return problem_response(404, "not_found", "No artifact of that digest.")
    response = HttpResponse(body, content_type="application/octet-stream")
    response["Cache-Control"] = "private, max-age=31536000, immutable"
    return response
