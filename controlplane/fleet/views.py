"""What routers report."""

from __future__ import annotations

import msgspec
from django.db import DataError
from django.http import HttpRequest, HttpResponse

from controlplane.common.problems import problem_response
from controlplane.fleet.machine import router_endpoint
from controlplane.fleet.models import Router
from controlplane.fleet.routers import take_heartbeat
from router_ext.wire.controlplane import Heartbeat
from router_ext.wire.decoding import NotDecoded

_decoder = msgspec.json.Decoder(Heartbeat)


@router_endpoint("POST")
def heartbeat(request: HttpRequest, router: Router) -> HttpResponse:
    """POST /router/v1/heartbeat -> 204"""
    try:
        beat = _decoder.decode(request.body)
    except NotDecoded as error:
        return problem_response(400, "malformed", str(error))
    if not beat.router.isprintable() or not 1 <= len(beat.router) <= 100:
        return problem_response(422, "invalid", "router: 1 to 100 printable characters")
    try:
        take_heartbeat(router=router, heartbeat=beat)
    except (OverflowError, DataError) as error:
        return problem_response(422, "invalid", f"a value that cannot be kept: {error}")
    return HttpResponse(status=204)
