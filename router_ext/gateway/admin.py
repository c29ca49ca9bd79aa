"""The operator's port of a router: what names tenants stands here, behind a token, and nowhere else."""

from __future__ import annotations

import hmac
from typing import Any

import orjson

from router_ext import compiled
from router_ext.gateway.app import send_response
from router_ext.gateway.explained import refused_line
from router_ext.gateway.lifespan import Router
from router_ext.gateway.overview import overview
from router_ext.gateway.streams import Response
from router_ext.obs.metrics import CONTENT_TYPE
from router_ext.wire.headers import JSON


class AdminApp:
    """``GET /metrics`` with tenants, ``/readyz`` with reasons, ``/overview`` for ``fairlane top``, ``/requests`` with
    those that live or have just ended, ``/requests/{id}`` with why they waited, ``/predictor`` with the prediction
    worker and the models it serves, ``/debug/pools`` with the schedulers' whole state."""

    def __init__(self, router: Router, token: str) -> None:
        self._router = router
        self._expected = b"Bearer " + token.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send_response(send, self._answer(scope))

    def _answer(self, scope: Any) -> Response:
        router = self._router
        if scope["path"] == "/livez":
            return Response(status=200, headers=[], body=b"alive\n")
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or not hmac.compare_digest(given[0], self._expected):
            return Response(status=401, headers=[(b"www-authenticate", b"Bearer")], body=b"")
        if scope["method"] != "GET":
            return Response(status=405, headers=[(b"allow", b"GET")], body=b"")
        match scope["path"]:
            case "/metrics":
                page = router.metrics.page(is_admin=True)
                return Response(status=200, headers=[(b"content-type", CONTENT_TYPE)], body=page)
            case "/readyz":
                return _json(200 if router.is_ready else 503, _state(router))
            case "/overview":
                return _json(200, overview(router))
            case "/requests":
                return _json(200, {"requests": _requests(router)})
            case path if path.startswith("/requests/"):
                wanted = path.removeprefix("/requests/")
                found = [each for engine in router.engines.values() for each in engine.explain(wanted)]
                found += [{"pool": None, **refused_line(each)} for each in router.refusals.find(wanted)]
                return _json(200 if found else 404, {"id": wanted, "requests": found})
            case "/predictor":
                return _json(200, router.predictions.state())
            case "/debug/pools":
                return _json(200, {e.name: e.scheduler.snapshot() for e in router.engines.values()})
            case _:
                return Response(status=404, headers=[], body=b"")


_SHOWN = 200
"""Requests of one list."""


def _requests(router: Router) -> list[dict[str, Any]]:
    lines = [line for engine in router.engines.values() for line in engine.requests(_SHOWN)]
    lines.sort(key=lambda line: (not line["is_live"], -line["arrived_at_us"]))
    return lines[:_SHOWN]


def _state(router: Router) -> dict[str, Any]:
    return {
        "is_ready": router.is_ready,
        "reason": None if router.is_ready else router.why_not_ready(),
        "core": compiled.running(),
        "limits": {
            "reservations": router.limits.count,
            "reserved_tokens": router.limits.tokens,
            "minutes": _minutes(router),
            "totals_age_s": router.totals_age_s,
            "totals": "none yet: only what this router has served counts" if router.totals_age_s is None else "known",
        },
        "inherited_requests": sum(engine.num_remote for engine in router.engines.values()),
        "applied_revision": router.directory.revision if router.directory else 0,
        "backends": {
            engine.name: {
                member.backend: {"state": member.state, "detail": member.detail}
                for member in engine.backends.members.values()
            }
            for engine in router.engines.values()
        },
    }


def _minutes(router: Router) -> str:
    shared = router.limits.shared
    if shared is None:
        return "of this router: no Valkey is configured"
    return "shared" if shared.is_up else f"of this router by its share: {shared.last_error or 'the store is late'}"


def _json(status: int, value: Any) -> Response:
    return Response(status=status, headers=[JSON], body=orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))
