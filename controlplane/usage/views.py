"""What routers book, and what they learn of it."""

from __future__ import annotations

import msgspec
from django.http import HttpRequest, HttpResponse

from controlplane.common.problems import problem_response
from controlplane.fleet.machine import router_endpoint
from controlplane.fleet.models import Router
from controlplane.usage.ingest import decode_batch, ingest
from controlplane.usage.totals import totals as totals_since
from router_ext.wire.decoding import NotDecoded


@router_endpoint("POST")
def usage(request: HttpRequest, router: Router) -> HttpResponse:
    """POST /router/v1/usage: 200 with a ``UsageAck`` once everything in the batch is durable."""
    try:
        batch = decode_batch(request.body)
    except NotDecoded as error:
        return problem_response(400, "malformed", str(error))
    return HttpResponse(msgspec.json.encode(ingest(batch)), content_type="application/json")


@router_endpoint("GET")
def totals(request: HttpRequest, router: Router) -> HttpResponse:
    """GET /router/v1/totals?since_us=0: 200 with ``Totals``."""
    text = request.GET.get("since_us", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        return problem_response(422, "invalid", f"since_us: microseconds, not {text[:40]!r}")
    body = msgspec.json.encode(totals_since(since_us=int(text)))
    return HttpResponse(body, content_type="application/json")
