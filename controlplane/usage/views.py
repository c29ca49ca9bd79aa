"""What routers book."""

from __future__ import annotations

import msgspec
from django.http import HttpRequest, HttpResponse

from controlplane.common.problems import problem_response
from controlplane.fleet.machine import router_endpoint
from controlplane.fleet.models import Router
from controlplane.usage.ingest import decode_batch, ingest
from router_ext.wire.decoding import NotDecoded


@router_endpoint("POST")
def usage(request: HttpRequest, router: Router) -> HttpResponse:
    """POST /router/v1/usage: 200 with a ``UsageAck`` once everything in the batch is durable."""
    try:
        batch = decode_batch(request.body)
    except NotDecoded as error:
        return problem_response(400, "malformed", str(error))
    return HttpResponse(msgspec.json.encode(ingest(batch)), content_type="application/json")
