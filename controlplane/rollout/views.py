"""The long poll of routers."""

from __future__ import annotations

import re

from django.db import connection
from django.http import HttpRequest, HttpResponse

from controlplane.common.problems import problem_response
from controlplane.fleet.machine import router_endpoint
from controlplane.fleet.models import Router
from controlplane.rollout.queries import current, current_body, deltas_since
from controlplane.rollout.watch import watcher
from router_ext.wire.controlplane import BASE_HEADER, LONG_POLL_S

_DIGEST = re.compile(r"[0-9a-f]{64}")


@router_endpoint("GET")
def snapshot(request: HttpRequest, router: Router) -> HttpResponse:
    """GET /router/v1/snapshot?wait_s=25 with ``If-None-Match``: 200 with the newest revision, 304 when none came.

    With ``base`` the revision that the router has in force: what has changed since, if that is known and shorter.

    While it waits the request holds a thread and nothing else: its connection goes back to the pool first.
    """
    try:
        wait_s = float(request.GET.get("wait_s", "0"))
        if not 0 <= wait_s <= LONG_POLL_S:
            raise ValueError
    except ValueError:
        return problem_response(422, "invalid", f"wait_s: a number from 0 to {LONG_POLL_S}")
    held = {tag.strip().removeprefix("W/").strip('"') for tag in request.headers.get("if-none-match", "").split(",")}
    newest = current()
    if newest is not None and newest.digest in held and wait_s > 0:
        connection.close()
        watcher.wait_beyond(newest.number, wait_s)
        newest = current()
    if newest is None:
        return problem_response(404, "nothing_published", "No revision has been published.")
    if newest.digest in held:
        response = HttpResponse(status=304)
        response["ETag"] = f'"{newest.digest}"'
        return response
    base = request.GET.get("base", "")
    if _DIGEST.fullmatch(base):
        deltas = deltas_since(base)
        if deltas is not None:
            response = HttpResponse(deltas[1], content_type="application/json")
            response[BASE_HEADER] = f'"{base}"'
            response["ETag"] = f'"{deltas[0]}"'
            response["Cache-Control"] = "no-store"
            return response
    number, digest, body = current_body()
    response = HttpResponse(body, content_type="application/json")
    response["ETag"] = f'"{digest}"'
    response["X-Fairlane-Revision"] = str(number)
    response["Cache-Control"] = "no-store"
    return response
